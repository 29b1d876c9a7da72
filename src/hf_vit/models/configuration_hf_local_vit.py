"""Configuration of the Local-ViT: every token sees a neighborhood, a row and a column, or a strided part of the image.

Sources: local attention, Ramachandran et al., arXiv 1906.05909; strided, Child et al., arXiv 1904.10509; criss-cross,
Huang et al., arXiv 1811.11721.
"""

from typing import ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfViTBaseConfig, refuse


@strict
class HfLocalViTConfig(HfViTBaseConfig):
    """Configuration of `HfLocalViTModel` and its heads; the default is Local-ViT-B/16 at 224 px.

    The special tokens (class, distillation, registers) see all tokens and are seen by all. All fields of `HfViTConfig`,
    but no causal attention and no relative positions, and:

    Args:
        attention_pattern: which patches a patch sees: "local", those of the window around it; "criss_cross", those of
            its row and its column; "strided", in raster order the ones up to `attention_stride` away, and those a
            multiple of it away (1904.10509, section 4.2; both in one softmax, and here in both directions).
        attention_window: side of the window in tokens, odd. At a border a patch sees what is there of it.
        attention_stride: tokens; that paper's choice is a row of the image.
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
        refuse(
            (
                self.attention_window < 1 or self.attention_window % 2 == 0,
                f"attention_window={self.attention_window} must be an odd number of tokens, so that a token stands in "
                "its middle: 1, 3, 5, ...",
            ),
            (self.is_causal, "is_causal=True does not go with a local model, which sees in all directions"),
            (
                self.position_embedding.startswith("relative"),
                f"position_embedding='{self.position_embedding}' does not go with a local model; use 'learned_2d'",
            ),
        )
