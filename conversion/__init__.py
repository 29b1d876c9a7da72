"""Original checkpoints into hf_vit models, and out again: one module an origin, its key table as data (README.md)."""

from hf_vit.conversion.account import ConversionResult, assumption, describe
from hf_vit.conversion.api import ExportResult, convert, export
from hf_vit.conversion.labels import read_labels
from hf_vit.conversion.planning.plan import Plan
from hf_vit.conversion.planning.planner import plan
from hf_vit.conversion.stem import load_stem

__all__ = [
    "ConversionResult",
    "ExportResult",
    "Plan",
    "assumption",
    "convert",
    "describe",
    "export",
    "load_stem",
    "plan",
    "read_labels",
]
