"""Energy and carbon of a training: its measured seconds times what its user states; nothing where nothing is stated."""

import os
from typing import Any

from hf_vit.errors import UserError
from hf_vit.results.facts import Facts, Record, exclusive

_JOULES = 3.6e6  # of a kWh


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
        trainings = facts.of_kind("training")
        if not trainings or trainings[-1].seconds is None:
            raise UserError(
                f"facts.json of {folder} has no training record with a measured time, so the energy cannot "
                "be computed; leave --power out"
            )
        kwh = trainings[-1].seconds * watts / _JOULES
        energy: dict[str, Any] = {"stated_watts": watts, "kwh": _rounded(kwh)}
        if grams_per_kwh is not None:
            energy |= {"stated_grams_co2_per_kwh": grams_per_kwh, "grams_co2": _rounded(kwh * grams_per_kwh)}
        trainings[-1].values["energy"] = energy
        facts.save(folder)


def emissions(training: Record) -> dict[str, Any] | None:
    """`co2_eq_emissions` of a card's metadata (docs/hub/model-cards-co2): grams, and how they were reckoned."""
    energy = training.values.get("energy")
    if not isinstance(energy, dict) or not isinstance(grams := energy.get("grams_co2"), float | int):
        return None
    watts, intensity = energy.get("stated_watts"), energy.get("stated_grams_co2_per_kwh")
    told: dict[str, Any] = {
        "emissions": grams,
        "source": f"{training.seconds:g} s measured by hf-vit x {watts} W x {intensity} g/kWh, which the author states",
        "training_type": "fine-tuning" if training.values.get("base_model") else "pre-training",
    }
    return told | ({"hardware_used": str(name)} if (name := training.hardware.get("name")) else {})


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
