"""`--config FILE`: the options of a command from a file, its own or the `facts.json` of an earlier run."""

import json
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_vit_cli.places import is_endless

# What a run did with its result is not done again because of a file that came with a model.
_NOT_REPEATED = ("output", "resume", "push", "private", "share_images")


def take_config(context: typer.Context, file: Path | None) -> None:
    """Let the options that a file names be the defaults of this call.

    A mapping names them as the command does (`learning_rate: 0.01`); of a `facts.json` the last run of this command is
    taken.

    Raises:
        typer.TyperException: the file cannot be read, or names what is no option.
    """
    if file is None or context.resilient_parsing:
        return
    if is_endless(file):
        context.fail(f"--config {file} is a device or a pipe; give a file")
    content = _read(context, file)
    options = _recorded(context, file, content) if isinstance(content, list) else content
    if not isinstance(options, Mapping):
        context.fail(f"--config {file} holds no options; give 'name: value' lines, or the facts.json of a run")
    is_switch = {each.name: getattr(each, "is_flag", False) for each in context.command.params}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in is_switch:
            near = get_close_matches(name, is_switch, 1)
            context.fail(f"--config {file}: '{key}' is no option{f'; did you mean {near[0]}?' if near else ''}")
        if value is not None:
            defaults[name] = value if isinstance(value, bool) and is_switch[name] else _typed(value)
    context.default_map = defaults


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=take_config,
        is_eager=True,
        expose_value=False,
        exists=True,
        dir_okay=False,
        help="Options from a YAML or JSON file, or the facts.json of a run to do again; typed ones come first.",
    ),
]


def _read(context: typer.Context, file: Path) -> Any:
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        context.fail(f"--config {file} cannot be read ({error}); give a YAML or JSON file")


def _recorded(context: typer.Context, file: Path, records: list[Any]) -> dict[str, Any]:
    """The options of the last run of this command that a facts.json knows."""
    commands = [str(record.get("command", "")) for record in records if isinstance(record, dict)]
    runs = [command for command in commands if command.startswith(f"{context.command_path} ")]
    if not runs:
        context.fail(f"--config {file} records no run of {context.command_path}")
    try:
        words = shlex.split(runs[-1].removeprefix(context.command_path))
        typed = context.command.make_context(context.info_name, words)
    except (ValueError, typer.TyperException) as error:
        context.fail(f"--config {file} records a command that is not understood ({error}); give its options yourself")
    sources = {name: typed.get_parameter_source(name) for name in typed.params if name not in _NOT_REPEATED}
    return {name: typed.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _typed(value: Any) -> Any:
    """A value as it would be typed, so that it is read and refused in the same way."""
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return str(value)
