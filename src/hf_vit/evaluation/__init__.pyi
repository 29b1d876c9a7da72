from .embedding.job import Embedded, embed
from .prediction import Prediction, predict_images
from .protocols.frame import ProtocolResult
from .protocols.registry import PROTOCOLS, ProtocolRun, evaluate_protocol
from .protocols.top1 import ClassificationResult, WrongImage, evaluate_classifier
from .protocols.top1_figures import draw_evaluation, plot_confusion_matrix, plot_wrong_images
from .saving import save_evaluation, save_protocol

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
    "plot_confusion_matrix",
    "plot_wrong_images",
    "predict_images",
    "save_evaluation",
    "save_protocol",
]
