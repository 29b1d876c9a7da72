"""The model card, README.md, rendered from facts.json and config.json: it states what was measured and nothing else."""

import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError, one_line
from hf_vit.hub.card_metadata import check_license, declared_license, inherited_license, load_facts, metadata_of
from hf_vit.hub.card_sections import Markdown, code_block, code_span, sections, text
from hf_vit.hub.example import Architecture, example
from hf_vit.hub.model_folder import CARD_NAME, ModelConfig, example_images, read_config
from hf_vit.hub.published_results import hub_id
from hf_vit.repositories.hub import check_repo_id
from hf_vit.results.facts import Facts, exclusive
from hf_vit.results.writing import write_atomically

MARKER = "<!-- Rendered by hf-vit from facts.json and config.json; edits here are lost when it is rendered again. -->"
_JOULES = 3.6e6  # of a kWh


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
    """Return whether `folder/README.md` was rendered from facts, so that rendering it again loses nobody's words."""
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
    """Return the card of a model folder, metadata included. A section whose facts are missing is absent.

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
    license = license or declared_license(folder) or inherited_license(facts)
    metadata = metadata_of(config, facts, name, license, example_images(folder))
    context = sections(folder, config, facts, share_images, on_hub="/" in name) | _examples(folder, config, name)
    template = resources.files("hf_vit.model_cards").joinpath("card_template.md").read_text(encoding="utf-8")
    # Whatever the template prints is escaped, unless it is Markdown already: a field that is forgotten is harmless.
    card = Environment(finalize=text, autoescape=False).from_string(template)
    given = {"card_data": Markdown(metadata.to_yaml()), "marker": Markdown(MARKER), "title": name.rpartition("/")[2]}
    return card.render(**given, **context).rstrip() + "\n"


def _examples(folder: Path, config: ModelConfig, name: str) -> dict[str, object]:
    """Return how the model is used: with the package, by the code beside its weights, from the command line."""

    def block(architecture: Architecture) -> Markdown:
        return code_block(example(config, name, architecture), "python")

    def command(*words: str) -> Markdown:
        return code_span(shlex.join(["hf-vit", *words]))

    runs = config.own_class is None  # by commands, which run no code of a folder
    has_page = config.is_ours and config.is_classifier and not config.is_regression and runs
    travels = any((folder / f"{target.partition('.')[0]}.py").is_file() for target in config.code_targets)
    return {
        "is_ours": config.is_ours,
        "example": block("hf_vit" if config.is_ours else "transformers"),
        "example_without_package": block("travelling") if config.is_ours and travels else None,
        "verify_command": command("verify", name, "--results") if "/" in name else None,
        "page_command": command("page", name, "--output", "page") if has_page else None,
        "predict_command": command("predict", name, "image.png") if runs else None,
    }


def _repo_of_present_card(folder: Path) -> str | None:
    """Return the name in the code examples of the present card, if it was rendered."""
    if not is_rendered(folder):
        return None
    line = re.search(r'^repo = (".*")$', (folder / CARD_NAME).read_text(encoding="utf-8"), flags=re.MULTILINE)
    try:
        return str(json.loads(line[1])) if line else None
    except ValueError:
        return None


# What the author states, kept beside the record that it belongs to


def state_power(folder: str | os.PathLike[str], watts: float, grams_per_kwh: float | None = None) -> None:
    """Keep with the last training of a model what its machine drew, and what that came to.

    Args:
        folder: of the model; the training's record in its facts.json tells the seconds.
        watts: mean power of all that trained, processors and cooling as far as they are to count.
        grams_per_kwh: of CO2 equivalent, of the electricity there; None for energy alone.

    Raises:
        UserError: there is no training whose time was measured, or a number is no power or no carbon intensity.
    """
    if not watts > 0 or not (grams_per_kwh is None or grams_per_kwh >= 0):
        raise UserError(
            f"{watts:g} W and {grams_per_kwh} g/kWh are out of range; give watts above 0 and grams of at least 0"
        )
    with exclusive(folder):
        facts = Facts.load(folder)
        training = facts.latest("training")
        if training is None or training.seconds is None:
            raise UserError(
                f"facts.json of {folder} has no training record with a measured time, so the energy cannot "
                "be computed; leave --power out"
            )
        kwh = training.seconds * watts / _JOULES
        energy: dict[str, Any] = {"stated_watts": watts, "kwh": float(f"{kwh:.6g}")}
        if grams_per_kwh is not None:
            grams = float(f"{kwh * grams_per_kwh:.6g}")
            energy |= {"stated_grams_co2_per_kwh": grams_per_kwh, "grams_co2": grams}
        training.values["energy"] = energy
        facts.save(folder)


def state_space(folder: str | os.PathLike[str], space: str) -> None:
    """Keep with a model's latest training or conversion which Space shows it: every later card links to it.

    Args:
        folder: of the model.
        space: user/name of the Space.

    Raises:
        UserError: it cannot be a Space's name, or there is no record of a training or conversion.
    """
    check_repo_id(space)
    if hub_id(space) != space:
        raise UserError(f"the Space '{space}' lacks its owner, and the card links to it; give user/name")
    with exclusive(folder):
        facts = Facts.load(folder)
        if not (origins := facts.origins()):
            raise UserError(
                f"facts.json of {folder} has no training or conversion record to store --space {space} "
                "with; leave --space out"
            )
        origins[-1].values["space"] = space
        facts.save(folder)
