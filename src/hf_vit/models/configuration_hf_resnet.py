"""What configurations of ResNets share: root, stages, and the map that they end in."""

from huggingface_hub.dataclasses import strict

from .configuration_hf_vit import HfBaseConfig, refuse


def stem_stride(stage_depths: tuple[int, ...] | list[int]) -> int:
    """Px behind one place of the last map: 4 for the root, 2 for every stage after the first."""
    return 4 * 2 ** max(len(stage_depths) - 1, 0)


def check_stem(stage_depths: tuple[int, ...] | list[int], stem_width: int, divisor: int, what: str) -> None:
    """Refuse an empty stage, or a width that is not a multiple of `divisor`, with a ValueError."""
    refuse(
        (
            any(depth < 1 for depth in stage_depths),
            f"stage_depths={stage_depths}: every stage needs at least one unit; () has none",
        ),
        (
            stem_width < divisor or stem_width % divisor,
            f"stem_width={stem_width} must be a positive multiple of {divisor}, {what}",
        ),
    )


@strict
class HfResNetBaseConfig(HfBaseConfig):
    """Abstract: a ResNet whose stage i puts out 4 * stem_width * 2**i channels and halves the map, the first excepted.

    Args:
        image_size: nominal image in px, int or (height, width). Other sizes work too, of any number of px.
        num_channels: of the image.
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
        """Channels of the last map."""
        return self.stem_width * (2 ** (self.num_stages + 1) if self.stage_depths else 1)

    @property
    def patch_size(self) -> int:
        """Total stride in px."""
        return stem_stride(self.stage_depths)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(h, w) of the last map: every halving rounds up."""
        return -(-height // self.patch_size), -(-width // self.patch_size)

    validate_image = HfBaseConfig.validate_image_fits_patch  # by the name of version 0.2
