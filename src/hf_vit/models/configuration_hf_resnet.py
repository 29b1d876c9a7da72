"""What configurations of ResNets share: root, stages, and the map that they end in."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_hf_base import HfBaseConfig


def stem_stride(stage_depths: tuple[int, ...] | list[int]) -> int:
    """Px behind one place of the last map: 4 for the root, 2 for every stage after the first."""
    return 4 * 2 ** max(len(stage_depths) - 1, 0)


def check_stem(stage_depths: tuple[int, ...] | list[int], stem_width: int, divisor: int, what: str) -> None:
    """Raises ValueError: an empty stage, or a width that is no multiple of `divisor`, which `what` names."""
    if any(depth < 1 for depth in stage_depths):
        raise ValueError(f"stage_depths={stage_depths}: every stage needs at least one unit; () has none")
    if stem_width < divisor or stem_width % divisor:
        raise ValueError(f"stem_width={stem_width} must be a positive multiple of {divisor}, {what}")


@strict
class HfResNetBaseConfig(HfBaseConfig):
    """Abstract: a ResNet whose stage i puts out 4 * stem_width * 2**i channels and halves the map, the first excepted.

    Args:
        image_size: nominal image in px, int or (height, width). Other sizes work too, of any number of px.
        num_channels: of the image.
        stage_depths: bottleneck units in each stage; () is the root alone.
        stem_width: channels of the root.
    """

    code_files: ClassVar[tuple[str, ...]] = (
        "configuration_hf_base",
        "configuration_hf_resnet",
        "pretrained_hf_vit",
        "loss_hf_vit",
        "modeling_hf_resnet",
    )

    image_size: int | tuple[int, int] | list[int] = 224
    num_channels: int = 3
    stage_depths: tuple[int, ...] | list[int] = (3, 4, 6, 3)
    stem_width: int = 64
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.stage_depths = tuple(self.stage_depths)
        if isinstance(self.image_size, list):
            self.image_size = (self.image_size[0], self.image_size[1])
        self.take_stages(kwargs)
        super().__post_init__(**kwargs)

    @property
    def num_stages(self) -> int:
        return len(self.stage_depths)

    @property
    def hidden_size(self) -> int:
        """Channels of the last map."""
        stages = len(self.stage_depths)
        return 4 * self.stem_width * 2 ** (stages - 1) if stages else self.stem_width

    @property
    def patch_size(self) -> int:
        """Total stride in px."""
        return stem_stride(self.stage_depths)

    @property
    def patch_stride(self) -> tuple[int, int]:
        return self.patch_size, self.patch_size

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(h, w) of the last map: every halving rounds up."""
        return -(-height // self.patch_size), -(-width // self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w) of the nominal image."""
        return self.grid_of(*self.nominal_size)

    def validate_image(self) -> None:
        if self.num_channels < 1:
            raise ValueError(f"num_channels={self.num_channels} must be at least 1")
        if min(self.nominal_size) < 1:
            raise ValueError(f"image_size={self.image_size} must be at least 1 px")
