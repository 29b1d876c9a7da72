"""Measuring image classifiers. Nothing is imported before it is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_vit.evaluation.classification import ClassificationResult, WrongImage, evaluate_classifier, match_labels
    from hf_vit.evaluation.embedding import Embedded, embed
    from hf_vit.evaluation.loading import LoadedClassifier, load_classifier
    from hf_vit.evaluation.plots import plot_confusion_matrix, plot_learning_curve, plot_wrong_images
    from hf_vit.evaluation.prediction import Prediction, predict_images
    from hf_vit.evaluation.protocol import ProtocolResult
    from hf_vit.evaluation.protocols import PROTOCOLS, ProtocolRun, evaluate_protocol, save_protocol
    from hf_vit.evaluation.report import draw_evaluation, save_evaluation

_HOMES = {
    "Embedded": "embedding",
    "embed": "embedding",
    "ClassificationResult": "classification",
    "WrongImage": "classification",
    "evaluate_classifier": "classification",
    "match_labels": "classification",
    "LoadedClassifier": "loading",
    "load_classifier": "loading",
    "plot_confusion_matrix": "plots",
    "plot_learning_curve": "plots",
    "plot_wrong_images": "plots",
    "Prediction": "prediction",
    "predict_images": "prediction",
    "PROTOCOLS": "protocols",
    "ProtocolResult": "protocol",
    "ProtocolRun": "protocols",
    "evaluate_protocol": "protocols",
    "save_protocol": "protocols",
    "draw_evaluation": "report",
    "save_evaluation": "report",
}

__all__ = [
    "PROTOCOLS",
    "ClassificationResult",
    "Embedded",
    "LoadedClassifier",
    "Prediction",
    "ProtocolResult",
    "ProtocolRun",
    "WrongImage",
    "draw_evaluation",
    "embed",
    "evaluate_classifier",
    "evaluate_protocol",
    "load_classifier",
    "match_labels",
    "plot_confusion_matrix",
    "plot_learning_curve",
    "plot_wrong_images",
    "predict_images",
    "save_evaluation",
    "save_protocol",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
