"""Pre-training by predicting corrupted patches from the rest (arXiv 2010.11929, B.1.2), or every patch from those
before it.

Legend: B images, C channels, H x W px, N patches in a grid h x w.
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
from hf_vit.models.pretraining_hf_vit import cut_patches, join_patches
from hf_vit.results.figures import make_figure, save_figure
from hf_vit.training.plan import Run, Start
from hf_vit.training.tasks.task import PretextTask, load_validation_images, stack_pixels
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import Recipe

TARGETS = ("mean_color", "downsampled", "pixels")
_PICTURE_IMAGES = 8
# bool_masked_pos [B, N]: whether a patch is to be predicted; patch_sources [B, N], int64: the number of the patch whose
# embedding the model gets there, or -1 for the [mask] embedding.
Plan = tuple[torch.Tensor, torch.Tensor]


@final
@dataclass(frozen=True)
class RandomMasking:
    """Corrupts the same number of patches of every image, at least one (arXiv 2010.11929, B.1.2).

    Attributes:
        rate: the share of the patches that are corrupted; .5 is the paper's, .15 BERT's (slightly worse there).
        mask_share: the share of the corrupted patches that become [mask].
        swap_share: the share of the corrupted patches that become another random patch of the image; the rest is
            unchanged.
    """

    rate: float = 0.5
    mask_share: float = 0.8
    swap_share: float = 0.1

    def __post_init__(self) -> None:
        """Raise a UserError for shares that are out of range."""
        if not 0 < self.rate <= 1:
            raise UserError(
                f"the mask rate is {self.rate}, but it must be above 0 and at most 1, as it is a share of the "
                "patches; choose another --mask-rate"
            )
        if min(self.mask_share, self.swap_share) < 0 or self.mask_share + self.swap_share > 1:
            raise UserError(
                f"mask_share is {self.mask_share} and swap_share {self.swap_share}, but both must be 0 or more "
                "and together at most 1; choose smaller shares"
            )

    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        """Draw the plan of a batch of B images of N patches, by default with torch's global generator."""
        num_corrupted = max(1, round(self.rate * num_patches))
        order = torch.rand(batch, num_patches, generator=generator).argsort(dim=1)
        masked = torch.zeros(batch, num_patches, dtype=torch.bool).scatter(1, order[:, :num_corrupted], True)
        chance = torch.rand(batch, num_patches, generator=generator)
        numbers = torch.arange(num_patches).expand(batch, -1)
        offset = torch.randint(1, max(num_patches, 2), (batch, num_patches), generator=generator)
        swapped = (numbers + offset) % num_patches  # another patch, unless the image has only one
        sources = torch.where(chance < self.mask_share + self.swap_share, swapped, numbers)
        return masked, torch.where(chance < self.mask_share, -1, sources)


@final
@dataclass(frozen=True)
class NextPatch:
    """Predicts every patch but the first from those before it, and corrupts none."""

    def draw(self, batch: int, num_patches: int, generator: torch.Generator | None = None) -> Plan:
        """Return the plan of a batch, which has nothing random; see `RandomMasking.draw`."""
        if num_patches < 2:
            raise UserError(
                "the images have only one patch, but next patch prediction needs at least two; choose a smaller "
                "patch or a larger --image-size"
            )
        numbers = torch.arange(num_patches).repeat(batch, 1)
        return numbers > 0, numbers


Masking = RandomMasking | NextPatch


@final
class MaskingCollator:
    """Combines examples to `pixel_values` [B, C, H, W] with a plan: `bool_masked_pos` and `patch_sources` [B, N].

    Dynamic masks come from torch's generator, which `HfViTTrainer` seeds for every batch. Static masks depend on the
    seed and the image's index only. Validation images ("mixable": False) always have static masks, so that every
    evaluation predicts the same patches; images of a stream have no index, and their content replaces it.
    """

    def __init__(self, policy: Masking, config: HfViTBaseConfig, static: bool = False, seed: int = 0) -> None:
        self.policy = policy
        self.config = config
        self.static = static
        self.seed = seed

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Stack images [B, C, H, W] and draw the patches to mask; the same ones each time for validation images."""
        pixel_values = stack_pixels(examples)
        h, w = self.config.grid_of(*pixel_values.shape[2:])
        is_validation = not all(example.get("mixable", True) for example in examples)
        if self.static or is_validation:
            plans = [self._draw_static(example, h * w, is_validation) for example in examples]
            masked, sources = (torch.cat(parts) for parts in zip(*plans, strict=True))
        else:
            masked, sources = self.policy.draw(len(examples), h * w)
        return {"pixel_values": pixel_values, "bool_masked_pos": masked, "patch_sources": sources}

    def _draw_static(self, example: dict[str, Any], num_patches: int, is_validation: bool) -> Plan:
        """Draw the static plan of one image."""
        if "index" in example:
            key = int(example["index"])
        elif is_validation:
            key = zlib.crc32(torch.as_tensor(example["pixel_values"]).contiguous().numpy().tobytes())
        else:
            raise UserError("--static-masks does not work with --streaming; leave one of them out")
        # The split is part of the seed, so that image 7 of validation does not get the mask of training image 7.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, int(is_validation), key))
        return self.policy.draw(1, num_patches, generator)


@final
class PatchPredictionTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose validation loss counts every image once, with any number of processes."""

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Run transformers' prediction step without the images that accelerate repeats to fill the last batch."""
        state, size = self.accelerator.gradient_state, len(inputs["pixel_values"])
        if state.end_of_dataloader and state.remainder > 0:
            count = max(1, state.remainder - self.args.process_index * size)
            inputs = {name: values[:count] for name, values in inputs.items()}
        return super().prediction_step(model, inputs, *args, **kwargs)


@final
class PatchPrediction(PretextTask):
    """Pre-training by prediction of corrupted or of next patches; `fields` replace those of the configuration."""

    picture = "predictions.png"
    auto_class = AutoModelForMaskedImageModeling
    trainer_class = PatchPredictionTrainer
    arguments: ClassVar[dict[str, Any]] = PretextTask.arguments | {"label_names": ["bool_masked_pos"]}

    def __init__(self, target: str, policy: Masking, static: bool, fields: Mapping[str, Any]) -> None:
        if target not in TARGETS:
            raise UserError(f"the target '{target}' is unknown; choose one of {', '.join(TARGETS)}")
        self.is_next = isinstance(policy, NextPatch)
        causal = {"is_causal": True} if self.is_next else {}
        all_fields = {**fields, "prediction_target": target, "predict_next_patch": self.is_next, **causal}
        masking = {} if self.is_next else {"static_masks": static, **asdict(policy)}
        super().__init__("next-patch" if self.is_next else "masked-patch", all_fields, masking)
        self.policy, self.static = policy, static

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        source = start.source
        if self.static and start.data.readers:
            raise UserError("--static-masks does not work with --streaming; leave one of them out")
        processor = build_processor(source, source.config)
        model = build_model(
            source,
            "masked_prediction",
            image_size=start.image_size,
            dropout=recipe.dropout,
            drop_path=recipe.drop_path,
            image_mean=tuple(processor.image_mean),
            image_std=tuple(processor.image_std),
            **self.fields,
        )
        return model, build_processor(source, model.config)

    def make_collator(self, run: Run) -> MaskingCollator:
        return MaskingCollator(self.policy, run.config, self.static, run.options.seed)

    @torch.no_grad()
    def draw(self, run: Run, model: PreTrainedModel, path: Path) -> None:
        """Plot some validation images, their masked patches and the predictions."""
        images = torch.stack([image for image, _ in load_validation_images(run, _PICTURE_IMAGES)])
        h, w = model.config.grid_of(*images.shape[2:])
        generator = torch.Generator().manual_seed(derive_seed(run.options.seed, h, w))
        masked, sources = self.policy.draw(len(images), h * w, generator)
        output = model(*(tensor.to(model.device) for tensor in (images, masked, sources)))
        corrupted = None if self.is_next else masked
        draw_predictions(images, output.reconstruction.float().cpu(), corrupted, model.config, path)


def draw_predictions(
    images: torch.Tensor, predictions: torch.Tensor, masked: torch.Tensor | None, config: PreTrainedConfig, path: Path
) -> None:
    """Draw a column per image: the image, the same with gray for corrupted patches, and with their predictions.

    Images and predictions are [B, 3, H, W]. Without `masked` [B, h*w], for next patch prediction, the rows are image
    and prediction.
    """
    mean, std = (images.new_tensor(value).reshape(-1, 1, 1) for value in (config.image_mean, config.image_std))
    colors = [(values * std + mean).clamp(0, 1) for values in (images, predictions)]
    rows = {"image": colors[0]}
    if masked is None:
        rows["prediction"] = colors[1]
    else:
        grid = config.grid_of(*images.shape[2:])
        true_patches, predicted_patches = (cut_patches(values, config.patch_stride) for values in colors)
        is_masked = masked[:, :, None, None, None]
        rows["not corrupted"] = join_patches(torch.where(is_masked, 0.5, true_patches), grid)
        rows["predicted"] = join_patches(torch.where(is_masked, predicted_patches, true_patches), grid)
    figure = make_figure(1.4 * len(images) + 0.6, 1.5 * len(rows))
    axes_grid = figure.subplots(len(rows), len(images), squeeze=False)
    for (name, values), axes_row in zip(rows.items(), axes_grid, strict=True):
        axes_row[0].set_ylabel(name)
        for axes, image in zip(axes_row, values, strict=True):
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    save_figure(figure, path)
