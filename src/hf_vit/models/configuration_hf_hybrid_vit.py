"""Define the configuration of the Hybrid-ViT: a ResNet stem before the Transformer (arXiv 2010.11929, section 3.1)."""

import math
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict

from .configuration_hf_resnet import check_stem, compute_stem_stride
from .configuration_hf_vit import HfViTBaseConfig, refuse


@strict
class HfHybridViTConfig(HfViTBaseConfig):
    """Configuration of `HfHybridViTModel` and its heads; the default is R50+ViT-B/16 at 224 px (2010.11929).

    It has all fields of `HfViTConfig` but `patch_size`, which follows from the stem and cannot be set, and these:

    Args:
        stage_depths: bottleneck units in each stage of the ResNet; () is the root alone.
        stem_width: channels of the root, a multiple of 32 (GroupNorm's groups); stage i has 4 * stem_width * 2**i.
        stem_patch_size: side of the patches that are cut from the stem's feature map, in cells of that map.
        group_norm_eps: epsilon of the stem's GroupNorms; None means `layer_norm_eps`, as in the original code.
        weight_standardization: how the stem's kernels are standardized: "std" (w - mean) / (std + 1e-5), as in the
            original code, or "variance" (w - mean) / sqrt(var + 1e-8), as in timm and transformers.
        stem_stages: see `HfHybridViTBackbone`.
    """

    model_type = "hf_hybrid_vit"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "configuration_hf_hybrid_vit.HfHybridViTConfig",
        "AutoModel": "modeling_hf_hybrid_vit.HfHybridViTModel",
        "AutoModelForImageClassification": "modeling_hf_hybrid_vit.HfHybridViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_hf_hybrid_vit.HfHybridViTForMaskedPatchPrediction",
        "AutoBackbone": "modeling_hf_hybrid_vit.HfHybridViTBackbone",
    }

    stage_depths: tuple[int, ...] | list[int] = (3, 4, 9)
    stem_width: int = 64
    stem_patch_size: int = 1
    group_norm_eps: float | None = None
    weight_standardization: Literal["std", "variance"] = "std"
    stem_stages: tuple[int, ...] | list[int] = ()

    def __post_init__(self, **kwargs: Any) -> None:
        if "patch_size" in kwargs:
            raise ValueError(
                f"patch_size={kwargs['patch_size']} cannot be set for a Hybrid-ViT, as it is the total stride of the "
                "stem; set stage_depths and stem_patch_size instead"
            )
        super().__post_init__(**kwargs)

    @property
    def patch_size(self) -> int:
        """Return the total stride in px, that of the stem times `stem_patch_size`."""
        return compute_stem_stride(self.stage_depths) * self.stem_patch_size

    @property
    def output_stem_maps(self) -> bool:
        """Return whether the model returns the maps of the stem's stages, in `stem_maps`."""
        return bool(self.stem_stages)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (h, w) in patches of an image in px: SAME padding rounds halvings up, incomplete patches are
        ignored.

        Raises:
            ValueError: the image is smaller than a patch.
        """
        stride = compute_stem_stride(self.stage_depths)
        h, w = (-(-side // stride) // self.stem_patch_size for side in (height, width))
        return (h, w) if h > 0 and w > 0 else super().grid_of(height, width)  # raises the error

    def validate_image_fits_patch(self) -> None:
        self.validate_stem()  # before the patch size, which follows from the stem
        super().validate_image_fits_patch()

    def validate_stem(self) -> None:
        """Raise a ValueError for invalid settings of the stem."""
        check_stem(self.stage_depths, self.stem_width, 32, "GroupNorm's groups")
        eps = self.group_norm_eps
        stages = tuple(range(1, len(self.stage_depths) + 1))
        refuse(
            (self.stem_patch_size < 1, f"stem_patch_size={self.stem_patch_size} must be at least 1"),
            (
                tuple(self.stem_stages) != tuple(stage for stage in stages if stage in self.stem_stages),
                f"stem_stages={self.stem_stages} must be some of the stem's stages {stages}, in ascending order",
            ),
            (
                self.stem_stages and (self.use_feature_pyramid or not self.reshape_hidden_states),
                f"stem_stages={self.stem_stages} cannot be combined with use_feature_pyramid=True or "
                "reshape_hidden_states=False; leave stem_stages out, or leave the other two at their defaults",
            ),
            (
                eps is not None and not (eps > 0 and math.isfinite(eps)),
                f"group_norm_eps={eps} must be a finite number above 0, or None for layer_norm_eps",
            ),
        )
