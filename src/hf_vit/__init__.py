"""hf_vit: the original Vision Transformer and its variants as first-class transformers models.

Importing the package registers its families with transformers' Auto classes. Everything else is imported when used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    ViTImageProcessor,
    ViTImageProcessorPil,
)

from hf_vit.errors import UserError
from hf_vit.models.backbone_hf_vit import HfViTBackbone
from hf_vit.models.configuration_hf_axial_resnet import HfAxialResNetConfig
from hf_vit.models.configuration_hf_axial_vit import HfAxialViTConfig
from hf_vit.models.configuration_hf_bit import HfBitConfig
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_axial_resnet import HfAxialResNetForImageClassification, HfAxialResNetModel
from hf_vit.models.modeling_hf_axial_vit import (
    HfAxialViTBackbone,
    HfAxialViTForImageClassification,
    HfAxialViTForMaskedPatchPrediction,
    HfAxialViTModel,
)
from hf_vit.models.modeling_hf_bit import HfBitForImageClassification, HfBitModel
from hf_vit.models.modeling_hf_hybrid_vit import (
    HfHybridViTBackbone,
    HfHybridViTForImageClassification,
    HfHybridViTForMaskedPatchPrediction,
    HfHybridViTModel,
)
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from hf_vit.models.pretraining_hf_vit import HfViTForMaskedPatchPrediction

if TYPE_CHECKING:
    from hf_vit.conversion.loading import from_hub, image_processor_from_hub
    from hf_vit.hub.push import push_to_hub
    from hf_vit.inference import optimize_for_inference
    from hf_vit.variants import VARIANTS, variant_config

__version__ = "0.1.0"

# Public names that cost an import of their own: name -> module.
_LAZY = {
    "VARIANTS": "hf_vit.variants",
    "from_hub": "hf_vit.conversion.loading",
    "image_processor_from_hub": "hf_vit.conversion.loading",
    "optimize_for_inference": "hf_vit.inference",
    "push_to_hub": "hf_vit.hub.push",
    "variant_config": "hf_vit.variants",
}

__all__ = [
    "VARIANTS",
    "HfAxialResNetConfig",
    "HfAxialResNetForImageClassification",
    "HfAxialResNetModel",
    "HfAxialViTBackbone",
    "HfAxialViTConfig",
    "HfAxialViTForImageClassification",
    "HfAxialViTForMaskedPatchPrediction",
    "HfAxialViTModel",
    "HfBitConfig",
    "HfBitForImageClassification",
    "HfBitModel",
    "HfHybridViTBackbone",
    "HfHybridViTConfig",
    "HfHybridViTForImageClassification",
    "HfHybridViTForMaskedPatchPrediction",
    "HfHybridViTModel",
    "HfViTBackbone",
    "HfViTConfig",
    "HfViTForImageClassification",
    "HfViTForMaskedPatchPrediction",
    "HfViTModel",
    "UserError",
    "from_hub",
    "image_processor_from_hub",
    "optimize_for_inference",
    "push_to_hub",
    "variant_config",
]


def _register() -> None:
    processors = {"torchvision": ViTImageProcessor, "pil": ViTImageProcessorPil}
    families = (
        (HfViTConfig, HfViTModel, HfViTForImageClassification, HfViTForMaskedPatchPrediction, HfViTBackbone),
        (
            HfHybridViTConfig,
            HfHybridViTModel,
            HfHybridViTForImageClassification,
            HfHybridViTForMaskedPatchPrediction,
            HfHybridViTBackbone,
        ),
        (
            HfAxialViTConfig,
            HfAxialViTModel,
            HfAxialViTForImageClassification,
            HfAxialViTForMaskedPatchPrediction,
            HfAxialViTBackbone,
        ),
    )
    for config, model, classifier, predictor, backbone in families:
        AutoConfig.register(config.model_type, config)
        AutoModel.register(config, model)
        AutoModelForImageClassification.register(config, classifier)
        AutoModelForMaskedImageModeling.register(config, predictor)
        AutoImageProcessor.register(config, image_processor_classes=processors)
        AutoBackbone.register(config, backbone)
    resnets = (
        (HfAxialResNetConfig, HfAxialResNetModel, HfAxialResNetForImageClassification),
        (HfBitConfig, HfBitModel, HfBitForImageClassification),
    )
    for config, model, classifier in resnets:
        AutoConfig.register(config.model_type, config)
        AutoModel.register(config, model)
        AutoModelForImageClassification.register(config, classifier)
        AutoImageProcessor.register(config, image_processor_classes=processors)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hf_vit' has no attribute '{name}'")


_register()
