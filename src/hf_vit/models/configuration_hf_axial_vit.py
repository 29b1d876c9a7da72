"""Configuration of the Axial-ViT: attention along rows, then along columns (arXiv 2010.11929, appendix D.6)."""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfViTBaseConfig


@strict
class HfAxialViTConfig(HfViTBaseConfig):
    """Configuration of `HfAxialViTModel` and its heads; the default is Axial-ViT-B/16 at 224 px.

    The paper names neither the class token nor the position table: mean pooling and two learned tables (rows and
    columns) are the default here, and a choice. All fields of `HfViTConfig`, with these differences:

    Args:
        pooling: "gap" or "map"; there is no class token on a grid.
        position_embedding: "learned_2d", "learned", "sincos_2d", "sincos_1d" or "none".
    """

    model_type = "hf_axial_vit"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        f"layers.*.{axis}.{name.removeprefix('layers.*.')}": style
        for axis in ("row", "column")
        for name, style in HfViTBaseConfig.base_model_tp_plan.items()
    }

    patch_size: int | tuple[int, int] | list[int] = 16
    position_embedding: Literal["learned", "learned_2d", "sincos_2d", "sincos_1d", "relative", "none"] = "learned_2d"
    pooling: Literal["token", "gap", "map"] = "gap"

    def validate_axial(self) -> None:
        if self.pooling == "token" or self.has_class_token:
            raise ValueError(
                f"pooling='{self.pooling}' with use_class_token={self.use_class_token}: an axial model keeps its "
                "tokens on a grid, which has no place for a class token; use pooling='gap' or 'map'"
            )
        if self.use_distillation_token:
            raise ValueError("use_distillation_token=True needs a class token, which an axial model has no place for")
        if self.is_causal:
            raise ValueError("is_causal=True does not go with an axial model, whose lines see only themselves")
        if self.position_embedding == "relative":
            raise ValueError("position_embedding='relative' does not go with an axial model; use 'learned_2d'")
