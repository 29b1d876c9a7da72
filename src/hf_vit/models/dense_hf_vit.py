"""What dense predictors share: a head of transformers or torchvision on one of the package's backbones.

Configuration and model of a head stand in one file: of a local folder, transformers loads each file that `auto_map`
names as a module of its own, with siblings of its own.
"""

from typing import Any, ClassVar

from transformers import AutoBackbone, AutoConfig
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

KNOWN: tuple[Any, ...] = (
    HfViTBackbone,
    HfHybridViTBackbone,
    HfAxialViTBackbone,
    HfLocalViTBackbone,
    HfAxialResNetBackbone,
    HfBitBackbone,
    HfMixerBackbone,
)
BACKBONES = {backbone.config_class.model_type: backbone for backbone in KNOWN}
for backbone in KNOWN:  # transformers' heads look there; with the package it is done already
    AutoBackbone.register(backbone.config_class, backbone, exist_ok=True)


class HfDenseConfig(PreTrainedConfig):
    """Abstract: the configuration of a head, whose `backbone_config` is one of the package's."""

    _auto_class = "AutoConfig"
    # Its dtype and its attention are the head's.
    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": AutoConfig}  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self, **kwargs: Any) -> None:
        given: Any = self.backbone_config
        if given is None:
            self.backbone_config = HfViTConfig(use_feature_pyramid=True)
        elif isinstance(given, dict):
            model_type = given.get("model_type")
            if model_type not in BACKBONES:
                raise ValueError(
                    f"backbone_config has the model_type '{model_type}'; it needs one of {', '.join(BACKBONES)}"
                )
            self.backbone_config = BACKBONES[model_type].config_class.from_dict(given)
        super().__post_init__(**kwargs)

    @property
    def image_size(self) -> int | tuple[int, int] | list[int]:
        """The backbone's, in px, int or (height, width)."""
        return self.backbone_config.image_size


class HfDenseMixin(HfPublishedMixin):
    """Abstract: how a head is initialized, saved and trained."""

    main_input_name = "pixel_values"
    input_modalities = "image"
    accepts_loss_kwargs: ClassVar[bool] = False  # the mean over a batch is the loss; the Trainer scales it
