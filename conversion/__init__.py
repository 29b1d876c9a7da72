"""Original checkpoints into hf_vit models: one module an origin, its key table as data (see README.md here)."""

from hf_vit.conversion.api import ConversionResult, convert, describe, plan
from hf_vit.conversion.exporting import ExportResult, export
from hf_vit.conversion.labels import read_labels
from hf_vit.conversion.plan.planning import Plan
from hf_vit.conversion.sizes import parse_size
from hf_vit.conversion.stem import load_stem

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
