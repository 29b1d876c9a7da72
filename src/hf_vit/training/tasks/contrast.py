"""Telling images apart by momentum contrast (MoCo v3, arXiv 2104.02057)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, final

from torch import nn
from transformers import AutoModel, PreTrainedModel, TrainerCallback

from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.loading.start import ModelSource, build_model, build_processor
from hf_vit.training.plan import Run
from hf_vit.training.processes import world_size
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.tasks.momentum_contrast import (
    ContrastiveOptions,
    ContrastTrainer,
    MomentumContrast,
    MomentumUpdate,
    TwoViews,
    collate_views,
    embed,
)
from hf_vit.training.tasks.pictures import draw_embeddings
from hf_vit.training.tasks.pretext import PretextTask, validation_images
from hf_vit.training.trainer.distributed import synchronise_batch_norms

_MAPPED = 1000  # images in the map of embeddings


@final
class Contrast(PretextTask):
    """Momentum contrast, see `MomentumContrast`; the encoder is what is kept.

    Args:
        options: see there.
        fields: of the model's configuration.
    """

    accumulates = False  # the images of a batch are each other's negatives
    auto_class = AutoModel
    trainer_class = ContrastTrainer
    picture = "embeddings.png"
    arguments: ClassVar[dict[str, Any]] = PretextTask.arguments | {
        "label_names": ["views"],
        "dataloader_drop_last": True,
    }

    def __init__(self, options: ContrastiveOptions, fields: Mapping[str, Any]) -> None:
        super().__init__("contrastive", fields)
        self.options = options

    def settings(self) -> dict[str, Any]:
        return {"objective": self.name, **self.fields, **asdict(self.options)}

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        images = data.num_examples("train")
        if images is not None and images < recipe.batch_size:
            raise UserError(
                f"{images} training images are fewer than a batch of {recipe.batch_size}; choose a smaller --batch-size"
            )
        encoder = build_model(
            source, "model", image_size=image_size, dropout=recipe.dropout, drop_path=recipe.drop_path, **self.fields
        )
        module = MomentumContrast(encoder, self.options)
        if world_size() > 1:  # as the authors' code does
            synchronise_batch_norms(module)
        return module, build_processor(source, encoder.config)

    def learners(self, module: MomentumContrast) -> Sequence[PreTrainedModel]:
        return [module.encoder, module.momentum_encoder]

    def released(self, module: MomentumContrast) -> PreTrainedModel:
        return module.encoder

    def transforms(self, run: Run) -> tuple[Any, Any]:
        augmentation, seed = run.recipe.augmentation, run.options.seed
        return TwoViews(run.processor, augmentation, seed), TwoViews(run.processor, augmentation, seed, judged=True)

    def collator(self, run: Run) -> Any:
        return collate_views

    def callbacks(self, run: Run) -> list[TrainerCallback]:
        assert isinstance(run.model, MomentumContrast)
        return [MomentumUpdate(run.model)]

    def draw(self, run: Run, model: PreTrainedModel, path: Path) -> None:
        images, labels = zip(*validation_images(run, _MAPPED), strict=True)
        draw_embeddings(embed(model, images), list(labels), run.data.label_names, path)
