"""The model card, README.md, rendered from facts.json and config.json: it states what was measured and nothing else."""

import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path

from hf_vit.errors import one_line
from hf_vit.hub.card_metadata import check_license, inherited_license, load_facts, metadata_of
from hf_vit.hub.card_sections import sections
from hf_vit.hub.example import Architecture, example
from hf_vit.hub.licenses import declared_license
from hf_vit.hub.markdown import Markdown, code_block, code_span, text
from hf_vit.hub.model_folder import CARD_NAME, ModelConfig, example_images, read_config
from hf_vit.results.facts import exclusive
from hf_vit.results.writing import write_atomically

MARKER = "<!-- Rendered by hf-vit from facts.json and config.json; edits here are lost when it is rendered again. -->"


def write_card(
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    license: str | None = None,
    share_images: bool = False,
) -> Path:
    """Write `folder/README.md` in one move, replacing what is there; the arguments are those of `render_card`."""
    path = Path(folder) / CARD_NAME
    write_atomically(path, render_card(folder, repo_id=repo_id, license=license, share_images=share_images))
    return path


def refresh_card(folder: str | os.PathLike[str], *, license: str | None = None) -> Path | None:
    """Render the card again after new facts, unless somebody wrote README.md by hand (None then)."""
    if (Path(folder) / CARD_NAME).exists() and not is_rendered(folder):
        return None
    with exclusive(folder):  # else a card of earlier facts could come last
        return write_card(folder, license=license)


def is_rendered(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder/README.md` was rendered from facts, so that rendering it again loses nobody's words."""
    try:
        return MARKER in (Path(folder) / CARD_NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False


def render_card(
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    license: str | None = None,
    share_images: bool = False,
) -> str:
    """The card of a model folder, metadata included. A section whose facts are missing is absent.

    Args:
        folder: holds config.json; weights, facts.json and pictures are used as far as they are there.
        repo_id: the name in the code examples; by default the one of the card that is there, else the folder's name.
        license: Hub license id; by default the one of the card that is there, else the base model's, or none.
        share_images: show pictures with images of the data in them (mistakes, attention over images), too.

    Raises:
        UserError: there is no config.json, or it, facts.json or the weights are damaged.
    """
    from jinja2 import Environment

    folder = Path(folder)
    if license is not None:
        check_license(license)
    config = read_config(folder)
    facts = load_facts(folder, config)
    name = one_line(repo_id or _repo_of_present_card(folder) or folder.resolve().name)
    title = name.rpartition("/")[2]
    license = license or declared_license(folder) or inherited_license(facts)
    metadata = metadata_of(config, facts, name, license, example_images(folder))
    context = sections(folder, config, facts, share_images, on_hub="/" in name) | _examples(folder, config, name)
    template = resources.files("hf_vit.model_cards").joinpath("card_template.md").read_text(encoding="utf-8")
    # Whatever the template prints is escaped, unless it is Markdown already: a field that is forgotten is harmless.
    environment = Environment(finalize=text, autoescape=False)
    card = environment.from_string(template).render(
        card_data=Markdown(metadata.to_yaml()), marker=Markdown(MARKER), title=title, **context
    )
    return card.rstrip() + "\n"


def _examples(folder: Path, config: ModelConfig, name: str) -> dict[str, object]:
    """How the model is used: with the package, by the code beside its weights, from the command line."""

    def block(architecture: Architecture) -> Markdown:
        return code_block(example(config, name, architecture), "python")

    runs = config.own_class is None  # by commands, which run no code of a folder
    has_page = config.is_ours and config.is_classifier and not config.is_regression and runs
    travels = any((folder / f"{target.partition('.')[0]}.py").is_file() for target in config.code_targets)
    return {
        "is_ours": config.is_ours,
        "example": block("hf_vit" if config.is_ours else "transformers"),
        "example_without_package": block("travelling") if config.is_ours and travels else None,
        "verify_command": code_span(shlex.join(["hf-vit", "verify", name, "--results"])) if "/" in name else None,
        "page_command": code_span(shlex.join(["hf-vit", "page", name, "--output", "page"])) if has_page else None,
        "predict_command": code_span(shlex.join(["hf-vit", "predict", name, "image.png"])) if runs else None,
    }


def _repo_of_present_card(folder: Path) -> str | None:
    """The name in the code examples of the present card, if it was rendered."""
    if not is_rendered(folder):
        return None
    line = re.search(r'^repo = (".*")$', (folder / CARD_NAME).read_text(encoding="utf-8"), flags=re.MULTILINE)
    try:
        return str(json.loads(line[1])) if line else None
    except ValueError:
        return None
