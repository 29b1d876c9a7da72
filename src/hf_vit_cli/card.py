"""`hf-vit card`."""

from pathlib import Path
from typing import Annotated, Any

from hf_vit_cli import options
from hf_vit_cli.options import arg, opt


@options.takes("share_images")
def card(
    model: Annotated[Path, arg("Folder of a saved model.")],
    repo: Annotated[str | None, opt("Name on the Hub, for the examples: user/name.")] = None,
    license: Annotated[str | None, opt("Hub license id, for example apache-2.0 or cc-by-4.0.")] = None,
    power: Annotated[
        float | None, opt("Mean watts of what trained it, as you state: adds the training's energy.")
    ] = None,
    carbon_intensity: Annotated[
        float | None, opt("With --power: grams of CO2 a kWh of that electricity; adds the emissions.")
    ] = None,
    space: Annotated[str | None, opt("The static Space that shows it, user/name: kept, and linked to.")] = None,
    **shared: Any,
) -> None:
    """Write a model's card, MODEL/README.md, from its recorded facts."""
    from hf_vit.errors import UserError
    from hf_vit.hub.card import write_card
    from hf_vit.hub.energy import state_power
    from hf_vit.hub.page_folder import state_space
    from hf_vit.hub.preflight import check_repo_id

    if repo is not None:
        check_repo_id(repo)
    if not model.is_dir():
        raise UserError(f"there is no folder {model}; give the folder of a saved model")
    if space is not None:
        state_space(model, space)
    if power is not None:
        state_power(model, power, carbon_intensity)
    elif carbon_intensity is not None:
        raise UserError("--carbon-intensity is of the energy that --power comes to; add --power, or leave it out")
    print(f"wrote {write_card(model, repo_id=repo, license=license, **shared)}")
