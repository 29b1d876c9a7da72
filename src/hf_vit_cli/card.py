"""`hf-vit card`."""

from pathlib import Path
from typing import Any

from hf_vit_cli import options
from hf_vit_cli.command import tell
from hf_vit_cli.options import arg, opt


@options.takes("share_images")
def card(
    model: Path = arg(..., "Folder of a saved model."),
    repo: str | None = opt(None, "Name on the Hub, for the examples: user/name."),
    license: str | None = opt(None, "Hub license id, for example apache-2.0 or cc-by-4.0."),
    power: float | None = opt(
        None, "Mean power of the training hardware in watts; adds the training's energy to the card."
    ),
    carbon_intensity: float | None = opt(None, "With --power: grams of CO2 per kWh; adds the emissions to the card."),
    space: str | None = opt(None, "Static Space with the model's page (user/name); stored and linked in the card."),
    **shared: Any,
) -> None:
    """Write a model's card, MODEL/README.md, from its recorded facts."""
    from hf_vit.errors import UserError
    from hf_vit.hub.card import state_power, state_space, write_card
    from hf_vit.repositories.hub import check_repo_id

    if repo is not None:
        check_repo_id(repo)
    if not model.is_dir():
        raise UserError(f"there is no folder {model}; give the folder of a saved model")
    if space is not None:
        state_space(model, space)
    if power is not None:
        state_power(model, power, carbon_intensity)
    elif carbon_intensity is not None:
        raise UserError("--carbon-intensity needs --power; add it, or leave both out")
    tell(f"wrote {write_card(model, repo_id=repo, license=license, **shared)}")
