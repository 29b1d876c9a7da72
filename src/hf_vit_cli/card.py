"""`hf-vit card`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import print_safely
from hf_vit_cli.options import arg, opt


@options.with_options("share_images")
def card(
    model: Path = arg(..., "Folder of a saved model."),
    repo: str | None = opt(None, "Repository name (user/name) to use in the card's examples."),
    license: str | None = opt(None, "Hub license id, for example apache-2.0 or cc-by-4.0."),
    power: float | None = opt(
        None, "Mean power of the training hardware in watts; adds the training's energy to the card."
    ),
    carbon_intensity: float | None = opt(
        None, "With --power: carbon intensity in grams of CO2 per kWh; adds the emissions to the card."
    ),
    space: str | None = opt(
        None, "Static Space that shows the model (user/name); recorded in facts.json and linked in the card."
    ),
    **shared: Any,
) -> None:
    """Write a model's card, MODEL/README.md, from its recorded facts."""
    from hf_vit.errors import UserError
    from hf_vit.hub.card import is_rendered, record_power, record_space, write_card
    from hf_vit.repositories.hub import check_repo_id

    if repo is not None:
        check_repo_id(repo)
    if not model.is_dir():
        raise UserError(
            f"the folder {model} does not exist; give the folder of a saved model, such as the --output of "
            "hf-vit finetune"
        )
    if (model / "README.md").exists() and not is_rendered(model):
        raise UserError(
            f"README.md of {model} was not written by hf-vit, and its text would be lost; move it away first"
        )
    if power is None and carbon_intensity is not None:
        raise UserError("--carbon-intensity only works with --power; add --power, or leave --carbon-intensity out")
    if space is not None:
        record_space(model, space)
    if power is not None:
        record_power(model, power, carbon_intensity)
    print_safely(f"wrote {write_card(model, repo_id=repo, license=license, **shared)}")
