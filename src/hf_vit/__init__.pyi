from .analysis.api import analyze
from .conversion.api import convert
from .conversion.exporting import export
from .conversion.loading import from_hub, image_processor_from_hub
from .environment import keep_freed_memory
from .errors import UserError
from .evaluation.api import evaluate, predict
from .hub.push import push_to_hub
from .inference.optimize import optimize_for_inference
from .models.backbone_hf_vit import HfViTBackbone
from .models.configuration_hf_axial_resnet import HfAxialResNetConfig
from .models.configuration_hf_axial_vit import HfAxialViTConfig
from .models.configuration_hf_bit import HfBitConfig
from .models.configuration_hf_hybrid_vit import HfHybridViTConfig
from .models.configuration_hf_local_vit import HfLocalViTConfig
from .models.configuration_hf_mixer import HfMixerConfig
from .models.configuration_hf_vit import HfViTConfig
from .models.modeling_hf_axial_resnet import (
    HfAxialResNetBackbone,
    HfAxialResNetForImageClassification,
    HfAxialResNetModel,
)
from .models.modeling_hf_axial_vit import (
    HfAxialViTBackbone,
    HfAxialViTForImageClassification,
    HfAxialViTForMaskedPatchPrediction,
    HfAxialViTModel,
)
from .models.modeling_hf_bit import HfBitBackbone, HfBitForImageClassification, HfBitModel
from .models.modeling_hf_hybrid_vit import (
    HfHybridViTBackbone,
    HfHybridViTForImageClassification,
    HfHybridViTForMaskedPatchPrediction,
    HfHybridViTModel,
)
from .models.modeling_hf_local_vit import (
    HfLocalViTBackbone,
    HfLocalViTForImageClassification,
    HfLocalViTForMaskedPatchPrediction,
    HfLocalViTModel,
)
from .models.modeling_hf_mixer import HfMixerBackbone, HfMixerForImageClassification, HfMixerModel
from .models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from .models.pretraining_hf_vit import HfViTForMaskedPatchPrediction
from .training.api import finetune, pretrain
from .variants import VARIANTS, variant_config

__version__: str

__all__ = [
    "VARIANTS",
    "HfAxialResNetBackbone",
    "HfAxialResNetConfig",
    "HfAxialResNetForImageClassification",
    "HfAxialResNetModel",
    "HfAxialViTBackbone",
    "HfAxialViTConfig",
    "HfAxialViTForImageClassification",
    "HfAxialViTForMaskedPatchPrediction",
    "HfAxialViTModel",
    "HfBitBackbone",
    "HfBitConfig",
    "HfBitForImageClassification",
    "HfBitModel",
    "HfHybridViTBackbone",
    "HfHybridViTConfig",
    "HfHybridViTForImageClassification",
    "HfHybridViTForMaskedPatchPrediction",
    "HfHybridViTModel",
    "HfLocalViTBackbone",
    "HfLocalViTConfig",
    "HfLocalViTForImageClassification",
    "HfLocalViTForMaskedPatchPrediction",
    "HfLocalViTModel",
    "HfMixerBackbone",
    "HfMixerConfig",
    "HfMixerForImageClassification",
    "HfMixerModel",
    "HfViTBackbone",
    "HfViTConfig",
    "HfViTForImageClassification",
    "HfViTForMaskedPatchPrediction",
    "HfViTModel",
    "UserError",
    "analyze",
    "convert",
    "evaluate",
    "export",
    "finetune",
    "from_hub",
    "image_processor_from_hub",
    "keep_freed_memory",
    "optimize_for_inference",
    "predict",
    "pretrain",
    "push_to_hub",
    "variant_config",
]
