"""Which library runs a checkpoint: the one that saved it, where it is installed and still knows the architecture."""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hf_vit.conversion.fetch.addresses import TIMM


class Library(NamedTuple):
    """What runs a checkpoint.

    Attributes:
        name: None where nothing here does.
        takes_pixels: whether what it makes of the checkpoint is a model of images alone; a CLIP of transformers is not.
    """

    name: Literal["timm", "transformers"] | None
    takes_pixels: bool


# Where heads stand that have no bare model: transformers' UperNet, and this package's.
_DENSE_MAPPINGS = (
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
)
_NONE, _TRANSFORMERS = Library(None, False), Library("transformers", True)


def library_of(source: str, config: dict[str, Any]) -> Library:
    """The library for a folder, file, address, Hub id or "timm:NAME" with this config.json ({} without one)."""
    if source.startswith(TIMM) or is_timm_config(config):
        return Library("timm", True) if importlib.util.find_spec("timm") else _NONE
    if "://" in source or Path(source).expanduser().is_file():
        return _NONE
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str):
        return _TRANSFORMERS  # it says what is wrong
    if kind not in CONFIG_MAPPING:
        return _NONE
    mappings: list[Any] = [MODEL_MAPPING, *(getattr(transformers, name) for name in _DENSE_MAPPINGS)]
    classes = (mapping.get(CONFIG_MAPPING[kind], None) for mapping in mappings)
    first = next((each for each in classes if each is not None), None)
    return Library("transformers", getattr(first, "main_input_name", None) == "pixel_values")


def is_timm_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is timm's."""
    return "architecture" in config and config.get("model_type") in (None, "timm_wrapper")


def config_in(folder: Path) -> dict[str, Any]:
    """config.json of a folder; {} where there is none that can be read."""
    try:
        config: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
