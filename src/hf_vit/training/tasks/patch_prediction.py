"""Prediction of patches: corrupted ones from the rest (arXiv 2010.11929, B.1.2), or each from those before it.

Legend: B images, C channels, H x W px, N patches, h x w patch grid.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import nn
from transformers import AutoModelForMaskedImageModeling, PreTrainedConfig, PreTrainedModel

from hf_vit.errors import UserError
from hf_vit.loading.start import build_model, build_processor
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
from hf_vit.models.pretraining_hf_vit import image_patches, join_patches
from hf_vit.results.figures import new_figure, save_figure
from hf_vit.training.plan import Run, Start
from hf_vit.training.tasks.task import PretextTask, validation_images
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import Recipe

TARGETS = ("mean_color", "downsampled", "pixels")
_PICTURED = 8  # images
# bool_masked_pos [B, N], the patches to be predicted; patch_sources [B, N] int64, what the model sees there: -1 the
# [mask] embedding, else the embedding of the patch of that number.
Plan = tuple[torch.Tensor, torch.Tensor]


@final
@dataclass(frozen=True)
class RandomMasking:
    """Corrupt a share of the patches of every image: the same number in each, at least one (arXiv 2010.11929, B.1.2).

    Attributes:
        rate: share of the patches that are corrupted; .5 is the paper's, .15 BERT's (slightly worse there).
        mask_share: share of the corrupted ones that become [mask].
        swap_share: share of them that show another patch of the image, drawn evenly; the rest is unchanged.
    """

    rate: float = 0.5
    mask_share: float = 0.8
    swap_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UserError(f"mask rate {self.rate} must be above 0 and at most 1: a share of the patches")
        if min(self.mask_share, self.swap_share) < 0 or self.mask_share + self.swap_share > 1:
            raise UserError(
                f"of the corrupted patches {self.mask_share} are masked and {self.swap_share} swapped; both "
                "are shares, together at most 1"
            )

    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        """Draw the plan of a batch of B images of N patches; by default from torch's own generator."""
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
class NextPatch:
    """Predict every patch but the first from those before it; nothing is hidden."""

    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        """Draw masks without randomness; see `RandomMasking.draw`."""
        if num_patches < 2:
            raise UserError("an image of one patch has no next patch; choose a smaller patch or a larger image")
        own = torch.arange(num_patches).repeat(batch, 1)
        return own > 0, own


Masking = RandomMasking | NextPatch


@final
class MaskingCollator:
    """Collates examples to `pixel_values` [B, C, H, W], `bool_masked_pos` and `patch_sources` [B, N].

    Dynamic masks come from torch's generator, which `HfViTTrainer` seeds for every batch. Static ones depend on the
    seed and the image's index alone; validation images ("mixable": False) always have those, so that every evaluation
    asks for the same patches; without an index (streams) their content decides.
    """

    def __init__(
        self, policy: RandomMasking | NextPatch, config: HfViTBaseConfig, static: bool = False, seed: int = 0
    ) -> None:
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
            raise UserError("static masks do not work on a stream; leave --static-masks or --streaming out")
        # Another number than 0 for judged images: image 7 of validation need not have the mask of image 7 of train.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, int(judged), key))
        return self.policy.draw(1, num_patches, generator)


@final
class PatchPrediction(PretextTask):
    """Predict corrupted patches, or each patch from those before it; `fields` are of the model's configuration."""

    picture = "predictions.png"
    auto_class = AutoModelForMaskedImageModeling
    arguments: ClassVar[dict[str, Any]] = PretextTask.arguments | {"label_names": ["bool_masked_pos"]}

    def __init__(self, target: str, policy: Masking, static: bool, fields: Mapping[str, Any]) -> None:
        if target not in TARGETS:
            raise UserError(f"target '{target}' is unknown; choose {', '.join(TARGETS)}")
        self.is_next = isinstance(policy, NextPatch)
        causal = {"is_causal": True} if self.is_next else {}
        chosen = {**fields, "prediction_target": target, "predict_next_patch": self.is_next, **causal}
        super().__init__("next-patch" if self.is_next else "masked-patch", chosen)
        self.policy, self.static = policy, static

    def settings(self) -> dict[str, Any]:
        masking = {} if self.is_next else {"static_masks": self.static, **asdict(self.policy)}
        return {"objective": self.name, **self.fields, **masking}

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        source = start.source
        if self.static and start.data.readers:
            raise UserError("static masks do not work on a stream; leave --static-masks or --streaming out")
        scale = build_processor(source, source.config)
        model = build_model(
            source,
            "masked_prediction",
            image_size=start.image_size,
            dropout=recipe.dropout,
            drop_path=recipe.drop_path,
            image_mean=tuple(scale.image_mean),
            image_std=tuple(scale.image_std),
            **self.fields,
        )
        return model, build_processor(source, model.config)

    def collator(self, run: Run) -> MaskingCollator:
        return MaskingCollator(self.policy, run.config, self.static, run.options.seed)

    @torch.no_grad()
    def draw(self, run: Run, model: PreTrainedModel, path: Path) -> None:
        images = torch.stack([image for image, _ in validation_images(run, _PICTURED)])
        h, w = model.config.grid_of(*images.shape[2:])
        generator = torch.Generator().manual_seed(derive_seed(run.options.seed, h, w))
        masked, sources = self.policy.draw(len(images), h * w, generator)
        predicted = model(*(tensor.to(model.device) for tensor in (images, masked, sources)))
        shown = None if self.is_next else masked
        draw_predictions(images, predicted.reconstruction.float().cpu(), shown, model.config, path)


def draw_predictions(
    images: torch.Tensor, predictions: torch.Tensor, masked: torch.Tensor | None, config: PreTrainedConfig, path: Path
) -> None:
    """Draw a column per image: itself, without the corrupted patches (gray), and with the predictions in their place.

    Of images and predictions [B, C, H, W]; without `masked` [B, h*w] (next patch prediction) these two alone.
    """
    colours = [_colours(values, config) for values in (images, predictions)]
    rows = {"image": colours[0], "prediction": colours[1]}
    if masked is not None:
        grid = config.grid_of(*images.shape[2:])
        visible, predicted = (image_patches(values, config.patch_stride) for values in colours)
        hidden = masked[:, :, None, None, None]
        rows = {
            "image": colours[0],
            "not corrupted": join_patches(torch.where(hidden, 0.5, visible), grid),
            "predicted": join_patches(torch.where(hidden, predicted, visible), grid),
        }
    figure = new_figure(1.4 * len(images) + 0.6, 1.5 * len(rows))
    grid_of_axes = figure.subplots(len(rows), len(images), squeeze=False)
    for (name, values), line in zip(rows.items(), grid_of_axes, strict=True):
        line[0].set_ylabel(name)
        for axes, image in zip(line, values, strict=True):
            pixels = image.permute(1, 2, 0).squeeze(-1).numpy()
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    save_figure(figure, path)


def _colours(pixel_values: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """[B, C, H, W] in [0, 1]; of other than 1 or 3 channels the first."""
    mean, std = (pixel_values.new_tensor(each).reshape(-1, 1, 1) for each in (config.image_mean, config.image_std))
    colours = (pixel_values * std + mean).clamp(0, 1)
    return colours if colours.shape[1] in (1, 3) else colours[:, :1]
