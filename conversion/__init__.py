"""Original checkpoints into hf_vit models: one module an origin, its key table as data (see README.md here)."""

from .api import ConversionResult, convert, describe, plan
from .bit import load_stem
from .labels import read_labels
from .planning import Plan
from .sizes import parse_size

__all__ = ["ConversionResult", "Plan", "convert", "describe", "load_stem", "parse_size", "plan", "read_labels"]
