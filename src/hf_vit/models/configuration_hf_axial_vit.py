"""Configuration of the Axial-ViT: attention along rows, then along columns (arXiv 2010.11929, appendix D.6)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_axial_resnet import HEADS
from .configuration_hf_resnet import check_stem, stem_stride
from .configuration_hf_vit import HfViTBaseConfig, Pooling, PositionEmbedding, refuse


@strict
class HfAxialViTConfig(HfViTBaseConfig):
    """Configuration of `HfAxialViTModel` and its heads; the default is Axial-ViT-B/16 at 224 px.

    The paper names neither the class token nor the position table: mean pooling and two learned tables (rows and
    columns) are the default here, and a choice. All fields of `HfViTConfig`, with these differences:

    Args:
        pooling: "gap" or "map"; there is no class token on a grid.
        position_embedding: "learned_2d", "learned", "sincos_2d", "sincos_1d" or "none".
        stage_depths: units in each stage of an AxialResNet (arXiv 2003.07853) before the Transformer, () for its root
            alone; None for no stem. `patch_size` stays the total stride, a multiple of the stem's.
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
        """Of the two blocks of a layer each."""
        plan = super().base_model_tp_plan
        axes = ("row", "column")
        return {name.replace("*", f"*.{axis}"): style for axis in axes for name, style in plan.items()}

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(h, w) of an image: a stem rounds every halving up; what makes no whole patch is left out.

        Raises:
            ValueError: the image is smaller than a patch.
        """
        stride = 1 if self.stage_depths is None else stem_stride(self.stage_depths)
        return super().grid_of(-(-height // stride) * stride, -(-width // stride) * stride)

    def validate_stem(self) -> None:
        if self.stage_depths is None:
            return
        check_stem(self.stage_depths, self.stem_width, HEADS, "the number of heads")
        stride = stem_stride(self.stage_depths)
        if any(side % stride for side in self.patch_stride):
            raise ValueError(
                f"patch_size={self.patch_size} is cut from the map of a stem with stage_depths={self.stage_depths}; "
                f"it must be a multiple of its stride, {stride} px"
            )

    def validate_axial(self) -> None:
        registers, positions = self.num_register_tokens, self.position_embedding
        refuse(
            (
                self.pooling == "token" or self.has_class_token,
                f"pooling='{self.pooling}' with use_class_token={self.use_class_token}: an axial model keeps its "
                "tokens on a grid, which has no place for a class token; use pooling='gap' or 'map'",
            ),
            (
                self.use_distillation_token,
                "use_distillation_token=True needs a class token, which an axial model has no place for",
            ),
            (
                registers > 0,
                f"num_register_tokens={registers}: an axial model keeps its tokens on a grid, which has no place for "
                "registers; leave them out",
            ),
            (self.is_causal, "is_causal=True does not go with an axial model, whose lines see only themselves"),
            (
                positions.startswith("relative"),
                f"position_embedding='{positions}' does not go with an axial model; use 'learned_2d'",
            ),
        )
