from .api import evaluate, predict
from .embedding import Embedded, embed
from .prediction import DensePrediction, Prediction, predict_images
from .protocols.dense import DetectionResult, SegmentationResult
from .protocols.frame import ProtocolResult
from .protocols.registry import PROTOCOLS, ProtocolRun, evaluate_protocol
from .protocols.top1 import ClassificationResult, WrongImage, plot_confusion_matrix, plot_wrong_images
from .saving import save_protocol

__all__ = [
    "PROTOCOLS",
    "ClassificationResult",
    "DensePrediction",
    "DetectionResult",
    "Embedded",
    "Prediction",
    "ProtocolResult",
    "ProtocolRun",
    "SegmentationResult",
    "WrongImage",
    "embed",
    "evaluate",
    "evaluate_protocol",
    "plot_confusion_matrix",
    "plot_wrong_images",
    "predict",
    "predict_images",
    "save_protocol",
]
