from .api import Comparison, compare
from .document import ComparisonSettings, ModelResult, SpeedResult
from .record import save_comparison

__all__ = ["Comparison", "ComparisonSettings", "ModelResult", "SpeedResult", "compare", "save_comparison"]
