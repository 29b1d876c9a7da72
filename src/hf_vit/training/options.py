"""How a recipe is run: options given by keyword."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit_settings import RUN_FIELDS, FinetuneOptions

__all__ = ["FinetuneOptions", "chosen_options"]


def chosen_options(
    options: FinetuneOptions | None, settings: Mapping[str, Any]
) -> tuple[FinetuneOptions, dict[str, Any]]:
    """Options with those among keyword arguments that bear the name of one; and the others, which are the recipe's."""
    given = {name: value for name, value in settings.items() if name in RUN_FIELDS and value is not None}
    if isinstance(given.get("image_size"), int):
        given["image_size"] = as_pair(given["image_size"])
    rest = {name: value for name, value in settings.items() if name not in RUN_FIELDS}
    return replace(options or FinetuneOptions(), **given), rest
