from .api import ConversionResult, assumption, convert, describe
from .exporting import ExportResult, export
from .origins.beside import read_labels
from .planning import Plan, plan
from .stem import load_stem

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
