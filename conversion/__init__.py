"""Original checkpoints into hf_vit models: one module an origin, its key table as data (see README.md here)."""

from .api import ConversionResult, convert, describe, plan
from .exporting import ExportResult, export
from .labels import read_labels
from .planning import Plan
from .sizes import parse_size
from .stem import load_stem

__all__ = [
    "ConversionResult",
    "ExportResult",
    "Plan",
    "convert",
    "describe",
    "export",
    "load_stem",
    "parse_size",
    "plan",
    "read_labels",
]
