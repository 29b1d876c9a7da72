"""Define what the configurations of ResNets share: the stem's stride, its checks, and the fields of root and stages."""

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfBaseConfig, refuse


def compute_stem_stride(stage_depths: tuple[int, ...] | list[int]) -> int:
    """Return the total stride in px: 4 for the root, doubled by every stage after the first."""
    return 4 * 2 ** max(len(stage_depths) - 1, 0)


def check_stem(stage_depths: tuple[int, ...] | list[int], stem_width: int, divisor: int, meaning: str) -> None:
    """Raise a ValueError for an empty stage, or a width that is no multiple of `divisor` (whose meaning it names)."""
    refuse(
        (
            any(depth < 1 for depth in stage_depths),
            f"stage_depths={stage_depths} has an empty stage; every stage needs at least one unit (() means no stages)",
        ),
        (
            stem_width < divisor or stem_width % divisor,
            f"stem_width={stem_width} must be a positive multiple of {divisor}, {meaning}",
        ),
    )


@strict
class HfResNetBaseConfig(HfBaseConfig):
    """Abstract: a ResNet whose stage i has 4 * stem_width * 2**i channels; every stage but the first halves the map.

    Args:
        image_size: nominal image in px, int or (height, width). Other sizes work too, of any number of px.
        num_channels: channels of the image.
        stage_depths: bottleneck units in each stage; () is the root alone.
        stem_width: channels of the root.
    """

    stage_depths: tuple[int, ...] | list[int] = (3, 4, 6, 3)
    stem_width: int = 64

    @property
    def num_stages(self) -> int:
        return len(self.stage_depths)

    @property
    def hidden_size(self) -> int:
        """Return the channels of the last map."""
        return self.stem_width * (2 ** (self.num_stages + 1) if self.stage_depths else 1)

    @property
    def patch_size(self) -> int:
        """Return the total stride in px."""
        return compute_stem_stride(self.stage_depths)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (h, w) of the last map for an image in px; every halving rounds up."""
        return -(-height // self.patch_size), -(-width // self.patch_size)

    validate_image = HfBaseConfig.validate_image_fits_patch  # by the name of version 0.2
