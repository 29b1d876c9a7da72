from .analysis import AnalysisSettings, AttentionReader
from .api import AnalysisDocument, AnalysisRun, StagesDocument, analyze, analyze_stages, save_analyses, stage_folders
from .images import AnalysisImages, CueConflicts, open_cue_conflicts, open_images
from .registry import ANALYSES
from .showing import Shown, show

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
