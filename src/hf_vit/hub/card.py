"""Render the model card README.md from facts.json and config.json; it states only what was measured."""

import json
import os
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError, to_one_line
from hf_vit.hub.card_metadata import check_license, find_base_license, load_facts, make_metadata, read_license
from hf_vit.hub.card_sections import Markdown, escape_markup, format_code_block, format_code_span, make_sections
from hf_vit.hub.example import Architecture, make_example
from hf_vit.hub.model_folder import CARD_NAME, ModelConfig, keeps_shapes, list_examples, read_config
from hf_vit.hub.published_results import parse_hub_id
from hf_vit.repositories.hub import check_repo_id
from hf_vit.results.delivery import MARKER
from hf_vit.results.facts import Facts, lock_folder
from hf_vit.writing import write_atomically

_JOULES_PER_KWH = 3.6e6


def write_card(folder: str | os.PathLike[str], **options: Any) -> Path:
    """Write the card that `render_card` makes with these options to `folder/README.md`, replacing an existing file."""
    path = Path(folder) / CARD_NAME
    write_atomically(path, render_card(folder, **options))
    return path


def refresh_card(folder: str | os.PathLike[str], *, license: str | None = None) -> Path | None:
    """Render the card again after facts.json changed, or return None if README.md was written by hand."""
    if (Path(folder) / CARD_NAME).exists() and not is_rendered(folder):
        return None
    with lock_folder(folder):  # otherwise a process with older facts could write last
        return write_card(folder, license=license)


def is_rendered(folder: str | os.PathLike[str]) -> bool:
    """Return whether `folder/README.md` was rendered by hf_vit and can be rendered again without losing edits."""
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
    """Return the model card with its metadata; sections without facts are left out.

    Args:
        folder: a model folder with config.json; weights, facts.json and plots are used if present.
        repo_id: name in the code examples; by default the Hub id in the current card, else the folder's name.
        license: Hub license id; by default the one in the current card, else the base model's, if known.
        share_images: include plots that show images of the data (mistakes, attention over images).

    Raises:
        UserError: config.json is missing, or it, facts.json or the weights are damaged.
    """
    from jinja2 import Environment

    folder = Path(folder)
    if license is not None:
        check_license(license)
    config = read_config(folder)
    facts = load_facts(folder, config)
    name = to_one_line(repo_id or _read_repo_id(folder) or folder.resolve().name)
    known_license = read_license(folder) or find_base_license(facts)
    stated_license = known_license if license in (None, known_license.get("license")) else {"license": license}
    metadata = make_metadata(config, facts, name, stated_license, list_examples(folder))
    sections = make_sections(folder, config, facts, share_images, on_hub="/" in name)
    sections |= _make_usage_examples(folder, config, name)
    template = resources.files("hf_vit.model_cards").joinpath("card_template.md").read_text(encoding="utf-8")
    # `finalize=escape_markup` escapes every value that is not `Markdown`, so that no field can add markup.
    card = Environment(finalize=escape_markup, autoescape=False).from_string(template)
    header = {"card_data": Markdown(metadata.to_yaml()), "marker": Markdown(MARKER), "title": name.rpartition("/")[2]}
    return card.render(**header, **sections).rstrip() + "\n"


def _make_usage_examples(folder: Path, config: ModelConfig, name: str) -> dict[str, object]:
    """Return the card's examples: with hf_vit, with the code beside the weights, and the commands."""

    def make_block(architecture: Architecture) -> Markdown:
        return format_code_block(make_example(config, name, architecture, not is_resized), "python")

    # Commands run no code from a model folder, and take images in color only.
    has_commands = config.own_class is None and getattr(config, "num_channels", 3) == 3
    # A page, and transformers' pipeline of our models, resize images to one size.
    is_resized = not (config.is_ours and keeps_shapes(folder))
    has_page = config.is_ours and config.is_classifier and not config.is_regression and has_commands and is_resized
    has_code = any((folder / f"{target.partition('.')[0]}.py").is_file() for target in config.code_targets)
    quoted_name = shlex.quote(name)
    return {
        "is_ours": config.is_ours,
        "is_resized": is_resized,
        "example": make_block("hf_vit" if config.is_ours else "transformers"),
        "example_without_package": make_block("remote code") if config.is_ours and has_code else None,
        "verify_command": format_code_span(f"hf-vit verify {quoted_name} --results") if "/" in name else None,
        "page_command": format_code_span(f"hf-vit page {quoted_name} --output page") if has_page else None,
        "predict_command": format_code_span(f"hf-vit predict {quoted_name} image.png") if has_commands else None,
    }


def _read_repo_id(folder: Path) -> str | None:
    """Return the Hub id in the current card's examples; None for a folder's name, and if it was written by hand."""
    if not is_rendered(folder):
        return None
    card = (folder / CARD_NAME).read_text(encoding="utf-8", errors="replace")
    line = re.search(r'^repo = (".+/.+")$', card, flags=re.MULTILINE)
    try:
        return str(json.loads(line[1])) if line else None
    except ValueError:
        return None


def record_power(folder: str | os.PathLike[str], watts: float, grams_per_kwh: float | None = None) -> None:
    """Add the energy of a model's last training to its record, computed from the stated power.

    Args:
        folder: the model's folder; facts.json holds the training's duration.
        watts: mean power of all hardware that should count, including processors and cooling.
        grams_per_kwh: carbon intensity of the electricity in grams of CO2 equivalent per kWh; None records energy only.

    Raises:
        UserError: facts.json has no training with a duration, or a number is out of range.
    """
    if not watts > 0 or not (grams_per_kwh is None or grams_per_kwh >= 0):
        numbers = f"--power {watts:g} W and --carbon-intensity {grams_per_kwh} g/kWh"
        raise UserError(f"{numbers} are out of range; give watts above 0 and grams of at least 0")
    with lock_folder(folder):
        facts = Facts.load(folder)
        training = facts.find_latest("training")
        if training is None or training.seconds is None:
            raise UserError(f"facts.json of {folder} has no training record with a measured time; leave --power out")
        kwh = training.seconds * watts / _JOULES_PER_KWH
        energy: dict[str, Any] = {"stated_watts": watts, "kwh": float(f"{kwh:.6g}")}
        if grams_per_kwh is not None:
            energy["stated_grams_co2_per_kwh"] = grams_per_kwh
            energy["grams_co2"] = float(f"{kwh * grams_per_kwh:.6g}")
        training.values["energy"] = energy
        facts.save(folder)


def record_space(folder: str | os.PathLike[str], space: str) -> None:
    """Add the Space (user/name) that shows a model to its last training or conversion record; later cards link to it.

    Raises:
        UserError: the name is not valid, or facts.json has no training or conversion.
    """
    check_repo_id(space)
    if parse_hub_id(space) != space:
        raise UserError(f"the Space '{space}' has no owner, which the card's link needs; give it as user/name")
    with lock_folder(folder):
        facts = Facts.load(folder)
        origins = facts.list_origins()
        if not origins:
            raise UserError(f"facts.json of {folder} has no training or conversion record; leave --space out")
        origins[-1].values["space"] = space
        facts.save(folder)
