from .api import Comparison, compare, save_comparison
from .result_files import ComparisonSettings, ModelResult, SpeedResult

__all__ = ["Comparison", "ComparisonSettings", "ModelResult", "SpeedResult", "compare", "save_comparison"]
