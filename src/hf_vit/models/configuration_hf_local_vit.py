"""Define the configuration of the Local-ViT: every token attends to a window, a row and column, or strided patches.

Sources: local attention, Ramachandran et al., arXiv 1906.05909; strided, Child et al., arXiv 1904.10509; criss-cross,
Huang et al., arXiv 1811.11721.
"""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfViTBaseConfig, refuse


@strict
class HfLocalViTConfig(HfViTBaseConfig):
    """Configuration of `HfLocalViTModel` and its heads; the default is Local-ViT-B/16 at 224 px.

    The special tokens (class, distillation, registers) attend to all tokens, and all tokens attend to them. It has all
    fields of `HfViTConfig`, without causal attention and relative positions, and these:

    Args:
        attention_pattern: the patches that a patch attends to: "local", those in the window around it; "criss_cross",
            those in its row and column; "strided", those whose distance in raster order is less than `attention_stride`
            or a multiple of it (1904.10509, section 4.2; here in one softmax and in both directions).
        attention_window: side of the window in tokens, an odd number. The window is cut off at the border.
        attention_stride: stride in tokens; the paper sets it to the length of an image row.
    """

    model_type = "hf_local_vit"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_local_vit.HfLocalViTConfig",
        "AutoModel": "modeling_hf_local_vit.HfLocalViTModel",
        "AutoModelForImageClassification": "modeling_hf_local_vit.HfLocalViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_hf_local_vit.HfLocalViTForMaskedPatchPrediction",
        "AutoBackbone": "modeling_hf_local_vit.HfLocalViTBackbone",
    }
    patch_size: int | tuple[int, int] | list[int] = 16
    attention_pattern: Literal["local", "strided", "criss_cross"] = "local"
    attention_window: int = 7
    attention_stride: int = 14

    def validate_pattern(self) -> None:
        """Raise a ValueError for an even window, causal attention or relative positions."""
        refuse(
            (
                self.attention_window < 1 or self.attention_window % 2 == 0,
                f"attention_window={self.attention_window} must be an odd number of tokens, such as 7, so that the "
                "window has a center",
            ),
            (
                self.is_causal,
                "is_causal=True is not possible for a Local-ViT, which attends in all directions; leave it out",
            ),
            (
                self.position_embedding.startswith("relative"),
                f"position_embedding='{self.position_embedding}' is not possible for a Local-ViT; use 'learned_2d'",
            ),
        )
