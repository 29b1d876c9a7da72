"""Momentum contrast (MoCo v3, arXiv 2104.02057) for the encoder of any family; only the encoder is saved.

The model has to find the other view of an image among all views of the batch, over all processes.
Legend: B images, D width of the pooled output, E width of the projection, n images.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel, Trainer, TrainerCallback, TrainerState, ViTImageProcessor

from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.data.transforms import TrainTransform
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import compute_features
from hf_vit.loading.start import build_model, build_processor
from hf_vit.results.figures import make_figure, save_figure
from hf_vit.training.plan import Run, Start
from hf_vit.training.processes import world_size
from hf_vit.training.tasks.task import PretextTask, Views, load_validation_images, stack_pixels
from hf_vit.training.trainer.distributed import gather, synchronize_batch_norms
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.sampling import derive_seed
from hf_vit_settings import ContrastiveOptions, Recipe

_PICTURE_IMAGES, _PICTURE_BATCH = 1000, 64  # of the picture of the embeddings
_MAX_NAMED_CLASSES = 20


def build_mlp(sizes: Sequence[int], normalization: str) -> nn.Sequential:
    """Build dense layers with norms, and ReLU between them: [B, sizes[0]] -> [B, sizes[-1]].

    Layers without norm have a bias. The last norm has no scale and shift, as in the authors' code (`_build_mlp` in
    github.com/facebookresearch/moco-v3).
    """
    layers = nn.Sequential()
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        is_last = index == len(sizes) - 2
        layers.append(nn.Linear(inputs, outputs, bias=normalization == "none"))
        if normalization == "batch":
            layers.append(nn.BatchNorm1d(outputs, affine=not is_last))
        elif normalization == "layer":
            layers.append(nn.LayerNorm(outputs, elementwise_affine=not is_last))
        if not is_last:
            layers.append(nn.ReLU())
    return layers


def gather_rows(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Concatenate the rows [B, E] of all processes, without gradient; also return the index of this process' first."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return rows, 0
    return gather(rows).flatten(0, 1), distributed.get_rank() * len(rows)


def contrastive_loss(queries: torch.Tensor, keys: torch.Tensor, temperature: float, first_key: int = 0) -> torch.Tensor:
    """Return InfoNCE, the cross-entropy of finding the key of each query [B, E] among all keys [n, E] (algorithm 1).

    It is scaled by 2 * temperature, so that its gradient does not grow as the temperature shrinks. Query i belongs to
    key `first_key` + i. It is computed in float32, or in float64 if the queries are.
    """
    queries = F.normalize(queries.float() if queries.dtype != torch.float64 else queries, dim=1)
    keys = F.normalize(keys.detach().to(queries.dtype), dim=1)
    labels = torch.arange(first_key, first_key + len(queries), device=queries.device)
    with torch.autocast(queries.device.type, enabled=False):  # which would round the products
        return 2 * temperature * F.cross_entropy(queries @ keys.T / temperature, labels)


@final
class MomentumContrast(nn.Module):
    """An encoder with pooling layer, projector and predictor, and momentum copies of the first two for the keys."""

    def __init__(self, encoder: Any, options: ContrastiveOptions | None = None) -> None:
        super().__init__()
        self.options = options or ContrastiveOptions()
        self.config = encoder.config
        width = encoder.config.pooled_size
        hidden = self.options.hidden_size or min(4096, 12 * width)
        size, norm = self.options.projection_size, self.options.normalization
        self.encoder = encoder
        self.projector = build_mlp([width, hidden, hidden, size], norm)
        self.predictor = build_mlp([size, hidden, size], norm)
        patches = getattr(getattr(encoder, "embeddings", None), "patch_embeddings", nn.Module())
        # A ResNet has none, and the stem of a hybrid learns, as convolutional stems do in the authors' code.
        if self.options.freeze_patches and not hasattr(patches, "stem"):
            patches.requires_grad_(False)
        self.momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def forward(self, views: torch.Tensor, count: int | None = None) -> dict[str, torch.Tensor]:
        """Compute the symmetric loss of two views per image, [B, 2, C, H, W]: each view is query once and key once.

        In evaluation mode the loss is over the first `count` images of all processes; None is all images.
        """
        if views.ndim != 5 or views.shape[1] != 2:
            raise ValueError(
                f"the views have the shape {tuple(views.shape)}, but momentum contrast needs [B, 2, C, H, W]; give "
                "two views of every image, as TwoViews makes them"
            )
        images = views.transpose(0, 1)
        queries = [self.predictor(self.projector(self.encoder(image).pooler_output)) for image in images]
        with torch.no_grad():
            keys = [self.momentum_projector(self.momentum_encoder(image).pooler_output) for image in images]
        return {"loss": self._loss(queries[0], keys[1], count) + self._loss(queries[1], keys[0], count)}

    def _loss(self, queries: torch.Tensor, keys: torch.Tensor, count: int | None) -> torch.Tensor:
        """Return the loss of this process' queries among the keys of all processes; in evaluation of all queries."""
        all_keys, first_key = gather_rows(keys)
        if not self.training:
            queries = gather_rows(queries)[0][:count]
            all_keys = all_keys[:count]
            first_key = 0
        return contrastive_loss(queries, all_keys, self.options.temperature, first_key)

    @torch.no_grad()
    def update_momentum(self, share: float) -> None:
        """Update the momentum copies to `share` * their weights + (1 - share) * the trained weights."""
        for copied, trained in ((self.momentum_encoder, self.encoder), (self.momentum_projector, self.projector)):
            for average, weight in zip(copied.parameters(), trained.parameters(), strict=True):
                average.lerp_(weight.detach(), 1 - share)


def compute_momentum(step: int, steps: int, start: float) -> float:
    """Return the momentum after `step` of `steps` steps, which rises from `start` to 1 along half a cosine."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * min(step / max(steps, 1), 1))) / 2


@final
class ContrastTrainer(HfViTTrainer):
    """An `HfViTTrainer` whose validation loss counts every image once, with any number of processes."""

    def compute_loss_context_manager(self) -> Any:
        """Return transformers' contexts alone, as batch norms of the momentum copies normalize with the batch."""
        return Trainer.compute_loss_context_manager(self)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Run transformers' prediction step without the images that accelerate repeats to fill the last batch."""
        state = self.accelerator.gradient_state
        count = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return super().prediction_step(model, {**inputs, "count": count}, *args, **kwargs)


@final
class MomentumUpdate(TrainerCallback):
    """Updates the momentum copies once per optimizer step, also if gradients are accumulated."""

    def __init__(self, model: MomentumContrast) -> None:
        self.model = model

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.model.update_momentum(compute_momentum(state.global_step, state.max_steps, self.model.options.momentum))


@final
class TwoViews(Views):
    """Makes two views of every image, [2, 3, H, W], which are the same at every evaluation if `is_validation`.

    Crops and flips of `augmentation` are followed by BYOL's changes of color (arXiv 2006.07733, table 6): jitter and
    gray in both views, blur always in the first and rarely in the second, solarization sometimes in the second.
    """

    def __init__(
        self, processor: ViTImageProcessor, augmentation: AugmentationConfig, seed: int = 0, is_validation: bool = False
    ) -> None:
        side = min(processor.size["height"], processor.size["width"])
        views = [
            TrainTransform(processor, augmentation, derive_seed(seed, view), distort=_distort(side, blur, solarize))
            for view, (blur, solarize) in enumerate(((1.0, 0.0), (0.1, 0.2)))
        ]
        super().__init__(*views)
        self.mixable = not is_validation
        if is_validation:
            super().set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Use the augmentations of this epoch from now on, except for validation, which never changes."""
        if self.mixable:
            super().set_epoch(epoch)


def _distort(side: int, blur: float, solarize: float) -> Any:
    """Make BYOL's changes of color for images of `side` px, with the probabilities of blur and solarization."""
    from torchvision.transforms import v2

    kernel = max(3, side // 10 | 1)  # a tenth of the image, made odd
    return v2.Compose(
        [
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(kernel, sigma=(0.1, 2.0))], p=blur),
            v2.RandomSolarize(128, p=solarize),
        ]
    )


def collate_views(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Combine examples of `TwoViews` to a batch, `views` [B, 2, C, H, W]."""
    return {"views": stack_pixels(examples)}


@final
class Contrast(PretextTask):
    """Pre-training by `MomentumContrast`, which saves the encoder; `fields` replace those of its configuration."""

    recipe = "contrastive-small"
    accumulates = False  # the images of a batch are each other's negatives
    auto_class = AutoModel
    trainer_class = ContrastTrainer
    picture = "embeddings.png"
    arguments: ClassVar[dict[str, Any]] = {
        **PretextTask.arguments,
        "label_names": ["views"],
        "dataloader_drop_last": True,
    }

    def __init__(self, options: ContrastiveOptions, fields: Mapping[str, Any]) -> None:
        super().__init__("contrastive", fields, asdict(options))
        self.options = options

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        """Build the encoder with its projection heads and its momentum copy."""
        source = start.source
        images = start.data.num_examples("train")
        if recipe.batch_size < 2:
            raise UserError("momentum contrast compares the images of a batch; give a --batch-size of at least 2")
        if images is not None and images < recipe.batch_size:
            raise UserError(
                f"the batch size {recipe.batch_size} is larger than the {images} training images, but momentum "
                "contrast needs a full batch; choose a smaller --batch-size"
            )
        rates: dict[str, Any] = {"dropout": recipe.dropout, "drop_path": recipe.drop_path}
        encoder = build_model(source, "model", image_size=start.image_size, **rates, **self.fields)
        module = MomentumContrast(encoder, self.options)
        if world_size() > 1:  # as in the authors' code
            synchronize_batch_norms(module)
        return module, build_processor(source, encoder.config)

    def list_models(self, module: MomentumContrast) -> Sequence[PreTrainedModel]:
        return [module.encoder, module.momentum_encoder]

    def get_released(self, module: MomentumContrast) -> PreTrainedModel:
        return module.encoder

    def make_transforms(self, run: Run) -> tuple[Any, Any]:
        augmentation, seed = run.recipe.augmentation, run.options.seed
        validation = TwoViews(run.processor, augmentation, seed, is_validation=True)
        return TwoViews(run.processor, augmentation, seed), validation

    def make_collator(self, run: Run) -> Any:
        return collate_views

    def make_callbacks(self, run: Run) -> list[TrainerCallback]:
        assert isinstance(run.model, MomentumContrast)
        return [MomentumUpdate(run.model)]

    @torch.no_grad()
    def draw(self, run: Run, model: PreTrainedModel, path: Path) -> None:
        images, labels = zip(*load_validation_images(run, _PICTURE_IMAGES), strict=True)
        starts = range(0, len(images), _PICTURE_BATCH)
        batches = (torch.stack(images[start : start + _PICTURE_BATCH]).to(model.device) for start in starts)
        embeddings = np.concatenate([compute_features(model, batch) for batch in batches])
        draw_embeddings(embeddings, labels, run.data.label_names, path)


def draw_embeddings(
    embeddings: NDArray[np.float32], labels: Sequence[int], label_names: Sequence[str], path: Path
) -> None:
    """Plot the first two principal components of embeddings [n, D], colored by class; training used no classes."""
    centered = embeddings.astype(np.float64) - embeddings.mean(axis=0)
    # A row of zeros changes no component, and with it a single image has two.
    _, values, directions = np.linalg.svd(np.vstack([centered, 0 * centered[:1]]), full_matrices=False)
    points = centered @ directions[:2].T
    shares = values**2 / max(float((values**2).sum()), 1e-30)
    figure = make_figure(6, 5)
    axes = figure.add_subplot()
    classes = np.asarray(labels)
    for label, name in enumerate(label_names):
        members = points[classes == label]
        axes.scatter(members[:, 0], members[:, 1], s=12, label=name, color=f"C{label}" if label < 10 else None)
    axes.set_xlabel(f"first principal component ({shares[0]:.0%} of the variance)")
    axes.set_ylabel(f"second ({shares[1]:.0%})")
    if len(label_names) <= _MAX_NAMED_CLASSES:
        axes.legend(fontsize=7)
    save_figure(figure, path)
