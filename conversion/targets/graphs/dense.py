"""A model of dense prediction as a graph: what comes out of it, and images of which sizes go in."""

import math
from dataclasses import dataclass
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from hf_vit.errors import UserError
from hf_vit.families import DENSE_HEADS, dense_head_of
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone

# By the name of a head: what its graph gives, [B, ...] each. Mask R-CNN is none: which boxes it looks at, it decides
# in Python, image by image.
OUTPUTS = {
    "linear": ["logits"],
    "upernet": ["logits"],
    "mask2former": ["class_queries_logits", "masks_queries_logits"],
    "detr": ["logits", "pred_boxes"],
    "deformable-detr": ["logits", "pred_boxes"],
}


def dense_outputs(model: PreTrainedModel) -> list[str] | None:
    """The names of what the graph gives; None for a model of another kind."""
    head = dense_head_of(getattr(model.config, "model_type", None))
    return None if head is None else OUTPUTS.get(head.name, [])


@dataclass(frozen=True)
class DenseSizes:
    """The images that a graph for any size takes, as a configuration of a family tells them.

    Attributes:
        num_channels: of the images.
        patch_stride: (height, width) in px that sides must be multiples of, so that all maps are whole.
        grid: (h, w) of these in the nominal image.
        stage_depths: () says that only multiples are taken; see `only_whole_patches`.
    """

    backbone: Any
    num_channels: int
    patch_stride: tuple[int, int]
    grid: tuple[int, int]
    stage_depths: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> "DenseSizes":
        (backbone,) = (module for module in model.modules() if isinstance(module, HfBaseBackbone))
        config: Any = backbone.config
        unit_h, unit_w = (math.lcm(side, *backbone.strides) for side in config.patch_stride)
        height, width = config.nominal_size
        return cls(config, config.num_channels, (unit_h, unit_w), (height // unit_h, width // unit_w))

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Raises ValueError where the backbone takes no images of this size."""
        return self.backbone.grid_of(height, width)

    def refuse_nominal(self) -> None:
        """Raise a UserError where the graph would not take the model's own images."""
        height, width = self.backbone.nominal_size
        stride_h, stride_w = self.patch_stride
        if height % stride_h or width % stride_w:
            raise UserError(
                f"a graph for any size takes multiples of {stride_h}x{stride_w} px, and the model's own images have "
                f"{height}x{width}; add --static for a graph of that size alone"
            )


def refuse_dense(model: PreTrainedModel, title: str, takes_dense: bool) -> None:
    """Raise a UserError where a model of dense prediction has no way to a target."""
    outputs = dense_outputs(model)
    if outputs is None:
        return
    if not outputs:
        names = ", ".join(f"'{name}'" for name in OUTPUTS if DENSE_HEADS[name].task == "detection")
        raise UserError(
            f"{type(model).__name__} is torchvision's Mask R-CNN, which chooses its boxes in Python and is no graph; "
            f"the heads {names} can be exported"
        )
    if not takes_dense:
        raise UserError(f"{type(model).__name__} does not go to {title}; models of dense prediction go to ONNX")
