"""Every command that takes a repository, or a folder that was downloaded from one."""

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from hf_vit_cli.main import build_app

# What stands for a repository: in its help it is a model, data or an image of the Hub, or a model's folder.
_TAKES = re.compile(
    r"Hub id|hf://|on the Hub|[Ff]older of a saved|teacher|fine-tuned from one|second model|as (in )?--data", re.I
)
_ONE_STEP = ["--steps", "1", "--batch-size", "6", "--evaluations", "1"]
_COMPARE = ["compare", "--output", "{out}", "--no-robustness", "--speed-turns", "0"]
_ANALYZE = ["analyze", "--output", "{out}", "--only", "patch_filters", "--num-images", "4"]

# "command parameter" -> arguments; {repo} is the stranger's, {place} all that lies beside it, {good} a model; {data},
# {image} and {runtime} are one's own, {new} is the name of a repository that is not there.
MODELS: dict[str, list[str]] = {
    "predict model": ["predict", "{repo}", "{image}"],
    "evaluate model": ["evaluate", "{repo}", "--data", "{data}"],
    "embed model": ["embed", "{repo}", "--data", "{data}", "--output", "{out}"],
    "analyze model": [*_ANALYZE, "{repo}", "--images", "{data}"],
    "analyze against": [*_ANALYZE, "{good}", "--images", "{data}", "--against", "{repo}"],
    "compare models": [*_COMPARE, "{good}", "{repo}", "--data", "{data}"],
    "diff model": ["diff", "{repo}", "{good}"],
    "diff other": ["diff", "{good}", "{repo}", "--data", "{data}"],
    "soup models": ["soup", "{good}", "{repo}", "--output", "{out}"],
    "finetune model": ["finetune", "{repo}", "--data", "{data}", "--output", "{out}", *_ONE_STEP],
    "finetune teacher": [*("finetune", "{good}", "--data", "{data}", "--output", "{out}", *_ONE_STEP), *("--teacher",
        "{repo}")],
    "pretrain model": [*("pretrain", "{repo}", "--data", "{data}", "--output", "{out}"), *("--steps", "1",
        "--batch-size", "6", "--evaluations", "1")],
    "bench saved models": ["bench", "saved", "{good}", "{repo}", "--turns", "1", "--batch", "1"],
    "bench data model": ["bench", "data", "{repo}", "--data", "{data}", "--seconds", "0.05"],
    "convert model": ["convert", "{hf}", "{out}"],
    "export model": ["export", "{repo}", "{out}", "--to", "transformers"],
    "page models": ["page", "{repo}", "--output", "{out}", "--runtime", "{runtime}"],
    "verify repo": ["verify", "{repo}"],
    "models places": ["models", "{place}"],
}  # fmt: skip
# The same of a folder alone.
FOLDERS: dict[str, list[str]] = {
    "card model": ["card", "{repo}"],
    "push model": ["push", "{repo}", "alice/{new}", "--license", "mit"],
    "cost model": ["cost", "{repo}"],
}  # fmt: skip
DATA: dict[str, list[str]] = {
    "data source": ["data", "{repo}"],
    "evaluate data": ["evaluate", "{good}", "--data", "{repo}"],
    "embed data": ["embed", "{good}", "--data", "{repo}", "--output", "{out}"],
    "embed data --streaming": ["embed", "{good}", "--data", "{repo}", "--output", "{out}", "--streaming"],
    "analyze images": [*_ANALYZE, "{good}", "--images", "{repo}"],
    "compare data": [*_COMPARE, "{good}", "{good}", "--data", "{repo}"],
    "diff data": ["diff", "{good}", "{good}", "--data", "{repo}"],
    "page images": ["page", "{good}", "--images", "{repo}", "--output", "{out}", "--runtime", "{runtime}"],
    "soup data": ["soup", "{good}", "{good}", "--output", "{out}", "--data", "{repo}"],
    "finetune data": ["finetune", "{good}", "--data", "{repo}", "--output", "{out}", *_ONE_STEP],
    "finetune data --streaming": [*("finetune", "{good}", "--data", "{repo}", "--output", "{out}", *_ONE_STEP,
        "--streaming")],
    "finetune unlabeled": [*("finetune", "{good}", "--data", "{data}", "--output", "{out}", *_ONE_STEP), *("--teacher",
        "{good}", "--unlabeled", "{repo}", "--confidence", "0")],
    "pretrain data": [*("pretrain", "{good}", "--data", "{repo}", "--output", "{out}"), *("--steps", "1",
        "--batch-size", "6", "--evaluations", "1")],
    "bench data data": ["bench", "data", "{good}", "--data", "{repo}", "--seconds", "0.05"],
}  # fmt: skip
# Functions of the package that do.
PYTHON = {"python from_hub": "from_hub", "python image_processor_from_hub": "image_processor_from_hub"}
# What takes no repository though its help speaks of one: where it goes, and folders of one's own trainings.
NOT_A_STRANGERS = {"push repo", "card repo", "finetune push", "embed output"}


def takers() -> Iterator[str]:
    """ "command parameter" of everything in the program that may be given a repository."""
    for path, command in _commands("", typer.main.get_command(build_app())):
        for parameter in command.params:
            words = f"{getattr(parameter, 'help', '')} {parameter.metavar or ''}"
            if _TAKES.search(words):
                yield f"{path} {parameter.name}".strip()


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{path} {name}".strip(), inner)
    if not hasattr(command, "commands"):
        yield path, command
