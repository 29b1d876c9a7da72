"""Seeing how models see: the analyses of the papers. Nothing is imported before it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_vit.analysis.api import AnalysisRun, analyze
    from hf_vit.analysis.attention import AttentionReader
    from hf_vit.analysis.cue_conflicts import CueConflicts, open_cue_conflicts
    from hf_vit.analysis.document import AnalysisDocument
    from hf_vit.analysis.frame import AnalysisSettings
    from hf_vit.analysis.images import AnalysisImages, open_images
    from hf_vit.analysis.record import save_analyses
    from hf_vit.analysis.registry import ANALYSES
    from hf_vit.analysis.stages import StagesDocument, analyze_stages, stage_folders
    from hf_vit.evaluation.subject import Subject, open_subject

_HOMES = {
    "ANALYSES": "registry",
    "AnalysisDocument": "document",
    "AnalysisImages": "images",
    "AnalysisRun": "api",
    "AnalysisSettings": "frame",
    "AttentionReader": "attention",
    "CueConflicts": "cue_conflicts",
    "Subject": "api",
    "StagesDocument": "stages",
    "analyze": "api",
    "analyze_stages": "stages",
    "open_cue_conflicts": "cue_conflicts",
    "open_images": "images",
    "open_subject": "api",
    "save_analyses": "record",
    "stage_folders": "stages",
}

__all__ = [
    "ANALYSES",
    "AnalysisDocument",
    "AnalysisImages",
    "AnalysisRun",
    "AnalysisSettings",
    "AttentionReader",
    "CueConflicts",
    "StagesDocument",
    "Subject",
    "analyze",
    "analyze_stages",
    "open_cue_conflicts",
    "open_images",
    "open_subject",
    "save_analyses",
    "stage_folders",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
