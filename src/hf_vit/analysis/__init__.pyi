from .analysis import AnalysisSettings
from .api import ANALYSES, AnalysisDocument, AnalysisRun, analyze, save_analyses
from .images import AnalysisImages, CueConflicts, open_cue_conflicts, open_images
from .reading import AttentionReader
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
