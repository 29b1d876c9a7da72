"""Image classifiers of any library side by side. Nothing is imported before it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_vit.comparison.api import Comparison, compare
    from hf_vit.comparison.document import ComparisonSettings, ModelResult, SpeedResult
    from hf_vit.comparison.record import save_comparison

_HOMES = {
    "Comparison": "api",
    "ComparisonSettings": "document",
    "ModelResult": "document",
    "SpeedResult": "document",
    "compare": "api",
    "save_comparison": "record",
}

__all__ = ["Comparison", "ComparisonSettings", "ModelResult", "SpeedResult", "compare", "save_comparison"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
