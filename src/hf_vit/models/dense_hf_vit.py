"""Define what dense predictors share: a head of transformers or torchvision on one of the package's backbones.

Configuration and model of a head are in one file, because transformers loads each file that `auto_map` names in a
local folder as a separate module, with its own copies of the sibling modules.
"""

from typing import Any, ClassVar

from torch import nn
from transformers import AutoBackbone, AutoConfig
from transformers.backbone_utils import BackboneMixin
from transformers.configuration_utils import PreTrainedConfig

from .backbone_hf_vit import HfViTBackbone
from .configuration_hf_vit import HfViTConfig
from .modeling_hf_axial_resnet import HfAxialResNetBackbone
from .modeling_hf_axial_vit import HfAxialViTBackbone
from .modeling_hf_bit import HfBitBackbone
from .modeling_hf_hybrid_vit import HfHybridViTBackbone
from .modeling_hf_local_vit import HfLocalViTBackbone
from .modeling_hf_mixer import HfMixerBackbone
from .pretrained_hf_vit import HfPublishedMixin

BACKBONE_CLASSES: tuple[Any, ...] = (
    HfViTBackbone,
    HfHybridViTBackbone,
    HfAxialViTBackbone,
    HfLocalViTBackbone,
    HfAxialResNetBackbone,
    HfBitBackbone,
    HfMixerBackbone,
)
BACKBONES = {backbone.config_class.model_type: backbone for backbone in BACKBONE_CLASSES}
for backbone in BACKBONE_CLASSES:  # transformers' heads look them up; importing hf_vit registers them too
    AutoBackbone.register(backbone.config_class, backbone, exist_ok=True)


class HfDenseConfig(PreTrainedConfig):
    """Abstract: the configuration of a head, whose `backbone_config` belongs to one of the package's backbones."""

    _auto_class = "AutoConfig"
    # Makes dtype and attention implementation of the head apply to the backbone too.
    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": AutoConfig}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self, **kwargs: Any) -> None:
        """Build the backbone's configuration from a dict, or with a feature pyramid by default."""
        backbone_config: Any = self.backbone_config
        if backbone_config is None:
            self.backbone_config = HfViTConfig(use_feature_pyramid=True)
        elif isinstance(backbone_config, dict):
            model_type = backbone_config.get("model_type")
            if model_type not in BACKBONES:
                raise ValueError(
                    f"backbone_config has the model_type '{model_type}'; it needs one of {', '.join(BACKBONES)}"
                )
            self.backbone_config = BACKBONES[model_type].config_class.from_dict(backbone_config)
        super().__post_init__(**kwargs)

    @property
    def image_size(self) -> int | tuple[int, int] | list[int]:
        """Return the backbone's image size in px, int or (height, width)."""
        return self.backbone_config.image_size

    @image_size.setter
    def image_size(self, value: Any) -> None:
        raise ValueError(f"image_size={value} is a field of backbone_config; set it there, before the model is built")


class HfDenseMixin(HfPublishedMixin):
    """Abstract: define how a head is initialized, saved and trained."""

    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing: ClassVar[bool] = True  # of the backbone's layers
    accepts_loss_kwargs: ClassVar[bool] = False  # the loss is a mean over the batch, which the Trainer scales
    # Attention implementations of the backbone, which refuses those that it does not have.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's patch embeddings, which quantization and adapters look up."""
        modules: Any = self.modules()  # pyright: ignore[reportAttributeAccessIssue]
        return next(module for module in modules if isinstance(module, BackboneMixin)).get_input_embeddings()  # pyright: ignore[reportAttributeAccessIssue]
