from .api import evaluate, predict
from .dense_prediction import DensePrediction
from .embedding.job import Embedded, embed
from .prediction import Prediction, predict_images
from .protocols.dense.detection import DetectionResult
from .protocols.dense.segmentation import SegmentationResult
from .protocols.frame import ProtocolResult
from .protocols.registry import PROTOCOLS, ProtocolRun, evaluate_protocol
from .protocols.top1 import ClassificationResult
from .protocols.top1_figures import WrongImage, plot_confusion_matrix, plot_wrong_images
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
