from .analyses.analysis import AnalysisSettings
from .analyses.registry import ANALYSES
from .analysis_file import AnalysisDocument
from .analysis_run import AnalysisRun
from .api import analyze
from .reading.attention import AttentionReader
from .reading.cue_conflicts import CueConflicts, open_cue_conflicts
from .reading.images import AnalysisImages, open_images
from .saving import save_analyses
from .showing import Shown, show
from .stages import StagesDocument, analyze_stages, stage_folders

__all__ = [
    "ANALYSES",
    "AnalysisDocument",
    "AnalysisImages",
    "AnalysisRun",
    "AnalysisSettings",
    "AttentionReader",
    "CueConflicts",
    "Shown",
    "StagesDocument",
    "analyze",
    "analyze_stages",
    "open_cue_conflicts",
    "open_images",
    "save_analyses",
    "show",
    "stage_folders",
]
