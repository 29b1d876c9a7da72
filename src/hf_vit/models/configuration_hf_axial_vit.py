"""Define the configuration of the Axial-ViT: attention along rows, then columns (arXiv 2010.11929, appendix D.6)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_axial_resnet import HEADS
from .configuration_hf_resnet import check_stem, compute_stem_stride
from .configuration_hf_vit import HfViTBaseConfig, Pooling, PositionEmbedding, refuse


@strict
class HfAxialViTConfig(HfViTBaseConfig):
    """Configuration of `HfAxialViTModel` and its heads; the default is Axial-ViT-B/16 at 224 px.

    The paper does not say how the model pools or which positions it has; the defaults here are mean pooling and two
    learned tables (rows and columns). It has all fields of `HfViTConfig`, with these differences:

    Args:
        pooling: "gap" or "map"; there is no class token on a grid.
        position_embedding: "learned_2d", "learned", "sincos_2d", "sincos_1d" or "none".
        stage_depths: units in each stage of an AxialResNet stem (arXiv 2003.07853), () for its root alone; None for no
            stem. `patch_size` remains the total stride, a multiple of the stem's.
        stem_width: channels of that stem's root; see `HfAxialResNetConfig`.
    """

    model_type = "hf_axial_vit"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_axial_vit.HfAxialViTConfig",
        "AutoModel": "modeling_hf_axial_vit.HfAxialViTModel",
        "AutoModelForImageClassification": "modeling_hf_axial_vit.HfAxialViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_hf_axial_vit.HfAxialViTForMaskedPatchPrediction",
        "AutoBackbone": "modeling_hf_axial_vit.HfAxialViTBackbone",
    }
    patch_size: int | tuple[int, int] | list[int] = 16
    position_embedding: PositionEmbedding = "learned_2d"
    pooling: Pooling = "gap"
    stage_depths: tuple[int, ...] | list[int] | None = None
    stem_width: int = 64

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """Return the tensor parallel plan for both blocks of every layer."""
        plan = super().base_model_tp_plan
        axes = ("row", "column")
        return {name.replace("*", f"*.{axis}"): style for axis in axes for name, style in plan.items()}

    @property
    def num_rotary_axes(self) -> int:
        """Return 1: along a line, all channels of a head rotate by the place on it."""
        return 1

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (h, w) in patches of an image in px: a stem rounds halvings up, incomplete patches are ignored.

        Raises:
            ValueError: the image is smaller than a patch.
        """
        stride = 1 if self.stage_depths is None else compute_stem_stride(self.stage_depths)
        return super().grid_of(-(-height // stride) * stride, -(-width // stride) * stride)

    def validate_stem(self) -> None:
        """Raise a ValueError for an invalid stem, or for a patch size that is not a multiple of its stride."""
        if self.stage_depths is None:
            return
        check_stem(self.stage_depths, self.stem_width, HEADS, "the number of heads")
        stride = compute_stem_stride(self.stage_depths)
        if any(side % stride for side in self.patch_stride):
            raise ValueError(
                f"patch_size={self.patch_size} must be a multiple of {stride} px, the stride of the stem; change it or "
                f"stage_depths={self.stage_depths}"
            )

    def validate_axial(self) -> None:
        """Raise a ValueError for special tokens, causal attention and relative positions, which a grid of lines cannot
        have.
        """
        registers, positions = self.num_register_tokens, self.position_embedding
        refuse(
            (
                self.pooling.startswith("token") or self.has_class_token,
                f"pooling='{self.pooling}' with use_class_token={self.use_class_token} needs a class token, which an "
                "Axial-ViT does not have; use pooling='gap' or 'map', and leave use_class_token out",
            ),
            (
                self.use_distillation_token,
                "use_distillation_token=True needs a class token, which an Axial-ViT does not have; leave it out",
            ),
            (
                registers > 0,
                f"num_register_tokens={registers} is not possible for an Axial-ViT, whose tokens are all patches of a "
                "grid; leave it out",
            ),
            (
                self.is_causal,
                "is_causal=True is not possible for an Axial-ViT, which attends along single lines; leave it out",
            ),
            (
                positions.startswith("relative"),
                f"position_embedding='{positions}' is not possible for an Axial-ViT; use 'learned_2d'",
            ),
            (
                self.rotary_embedding == "mixed",
                "rotary_embedding='mixed' is not possible for an Axial-ViT, whose lines have one axis; use 'axial'",
            ),
        )
