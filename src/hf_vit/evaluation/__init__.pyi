from .embedding.job import Embedded, embed
from .plots import plot_confusion_matrix, plot_learning_curve, plot_wrong_images
from .prediction import Prediction, predict_images
from .protocols.frame import ProtocolResult
from .protocols.registry import PROTOCOLS, ProtocolRun, evaluate_protocol, save_protocol
from .protocols.top1 import ClassificationResult, WrongImage, evaluate_classifier, match_labels
from .report import draw_evaluation, save_evaluation

__all__ = [
    "PROTOCOLS",
    "ClassificationResult",
    "Embedded",
    "Prediction",
    "ProtocolResult",
    "ProtocolRun",
    "WrongImage",
    "draw_evaluation",
    "embed",
    "evaluate_classifier",
    "evaluate_protocol",
    "match_labels",
    "plot_confusion_matrix",
    "plot_learning_curve",
    "plot_wrong_images",
    "predict_images",
    "save_evaluation",
    "save_protocol",
]
