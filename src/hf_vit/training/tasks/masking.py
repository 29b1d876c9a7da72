"""Which patches are predicted, and what the model sees in their place: masking policies and the batches they make.

Source: arXiv 2010.11929, appendix B.1.2 (50% of the patches; of these 80% [mask], 10% another patch, 10% kept). The
paper leaves open whether an image keeps its mask (static) or gets a new one each time (dynamic), and whether the other
patch is of the same image: here it is.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
from hf_vit.training.trainer.sampling import derive_seed

Plan = tuple[torch.Tensor, torch.Tensor]


class MaskingPolicy(ABC):
    """Abstract: draws the inputs of a patch prediction head."""

    @abstractmethod
    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        """Draw masks.

        Args:
            batch: B.
            num_patches: N.
            generator: of the random numbers; torch's own by default.

        Returns:
            bool_masked_pos [B, N], the patches to be predicted; patch_sources [B, N] int64, what is seen at these: -1
            the [mask] embedding, else the embedding of the patch of that number.
        """


@final
@dataclass(frozen=True)
class RandomMasking(MaskingPolicy):
    """Corrupt a share of the patches of every image: the same number in each, at least one.

    Attributes:
        rate: share of the patches that are corrupted; .5 is the paper's, .15 BERT's (slightly worse there).
        mask_share: share of the corrupted ones that become [mask].
        swap_share: share of them that show another patch of the image, drawn evenly; the rest stays as it is.

    Raises:
        UserError: a share out of range.
    """

    rate: float = 0.5
    mask_share: float = 0.8
    swap_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UserError(f"mask rate {self.rate} must be above 0 and at most 1: a share of the patches")
        if min(self.mask_share, self.swap_share) < 0 or self.mask_share + self.swap_share > 1:
            raise UserError(
                f"of the corrupted patches {self.mask_share} become [mask] and {self.swap_share} another patch; both "
                "are shares, together at most 1"
            )

    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        corrupted = max(1, round(self.rate * num_patches))
        order = torch.rand(batch, num_patches, generator=generator).argsort(dim=1)
        masked = torch.zeros(batch, num_patches, dtype=torch.bool).scatter(1, order[:, :corrupted], True)
        fate = torch.rand(batch, num_patches, generator=generator)
        own = torch.arange(num_patches).expand(batch, -1)
        step = torch.randint(1, max(num_patches, 2), (batch, num_patches), generator=generator)
        other = (own + step) % num_patches  # never its own number, but for an image of one patch
        sources = torch.where(fate < self.mask_share + self.swap_share, other, own)
        return masked, torch.where(fate < self.mask_share, -1, sources)


@final
@dataclass(frozen=True)
class NextPatch(MaskingPolicy):
    """Predict every patch but the first from those before it; nothing is hidden."""

    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        if num_patches < 2:
            raise UserError("an image of one patch has no next one; choose a smaller patch or a larger image")
        own = torch.arange(num_patches).repeat(batch, 1)
        return own > 0, own


@final
class MaskingCollator:
    """Examples to one batch: `pixel_values` [B, C, H, W], `bool_masked_pos` and `patch_sources` [B, N].

    Dynamic masks come from torch's generator, which `HfViTTrainer` seeds for every batch by (seed, epoch, position).
    Static ones depend on the seed and the image's index alone. Images that a model is judged by ("mixable": False)
    always have static masks, so that every evaluation asks for the same patches; without an index (streams) their
    content tells them apart.

    Args:
        policy: draws the masks.
        config: of the model: turns an image's size into its patch grid.
        static: every training image keeps its mask; needs examples with an "index".
        seed: of the static masks.
    """

    def __init__(self, policy: MaskingPolicy, config: HfViTBaseConfig, static: bool = False, seed: int = 0) -> None:
        self.policy, self.config, self.static, self.seed = policy, config, static, seed

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixel_values = torch.stack([torch.as_tensor(example["pixel_values"]) for example in examples])
        h, w = self.config.grid_of(*pixel_values.shape[2:])
        judged = not all(example.get("mixable", True) for example in examples)
        if self.static or judged:
            plans = [self._static_plan(example, h * w, judged) for example in examples]
            masked, sources = (torch.cat(parts) for parts in zip(*plans, strict=True))
        else:
            masked, sources = self.policy.draw(len(examples), h * w)
        return {"pixel_values": pixel_values, "bool_masked_pos": masked, "patch_sources": sources}

    def _static_plan(self, example: dict[str, Any], num_patches: int, judged: bool) -> Plan:
        if "index" in example:
            key = int(example["index"])
        elif judged:
            key = zlib.crc32(torch.as_tensor(example["pixel_values"]).contiguous().numpy().tobytes())
        else:
            raise UserError("static masks need to know every image again, which a stream does not; use dynamic masks")
        # Another number than 0 for judged images: image 7 of validation need not have the mask of image 7 of train.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, int(judged), key))
        return self.policy.draw(1, num_patches, generator)
