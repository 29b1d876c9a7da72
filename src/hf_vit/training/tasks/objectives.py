"""What a pre-training learns from: each objective's model, data, trainer and picture."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, cast, final

import torch

from hf_vit.data import ImageData, eval_transform, train_transform, transform_split
from hf_vit.errors import UserError
from hf_vit.training.finetuning import Run
from hf_vit.training.model_source import ModelSource, build_encoder, build_predictor, build_processor
from hf_vit.training.recipes.registry import Recipe
from hf_vit.training.run.running import choose_attention, training_arguments
from hf_vit.training.tasks.contrastive import (
    ContrastiveOptions,
    MomentumContrast,
    MomentumUpdate,
    TwoViews,
    collate_views,
    embed,
)
from hf_vit.training.tasks.masking import MaskingCollator, NextPatch, RandomMasking
from hf_vit.training.tasks.pictures import draw_embeddings, draw_predictions
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit.training.trainer.optimizers import optimizer_of
from hf_vit.training.trainer.progress import Clock
from hf_vit.training.trainer.sampling import derive_seed

_PICTURED, _MAPPED = 8, 1000  # images in the picture of predictions, and in the map of embeddings


class Objective(ABC):
    """Abstract: one way of learning without labels.

    Args:
        fields: of the model's configuration that the user chose; they replace those of the source.
    """

    name: str
    picture: str

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that decides what is learnt beside recipe and model: for the facts, and for resuming."""

    @abstractmethod
    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[Any, Any]:
        """The module that is trained, and its image processor.

        Raises:
            UserError: the objective cannot be had with this model or data.
        """

    @abstractmethod
    def build_trainer(self, run: Run) -> HfViTTrainer:
        """The trainer of a run, ready to go."""

    @abstractmethod
    def result(self, trained: Any) -> Any:
        """What is saved of the module that was trained."""

    @abstractmethod
    def draw(self, run: Run, model: Any, path: Path) -> None:
        """Draw what was learnt, on validation images."""


@final
class PatchPrediction(Objective):
    """Predict corrupted patches, or each patch from those before it.

    Args:
        target: `prediction_target`.
        policy: which patches.
        static: every image keeps its mask.
        fields: of the model's configuration.
    """

    picture = "predictions.png"

    def __init__(self, target: str, policy: RandomMasking | NextPatch, static: bool, fields: Mapping[str, Any]) -> None:
        self.is_next = isinstance(policy, NextPatch)
        super().__init__({**fields, "prediction_target": target, "predict_next_patch": self.is_next})
        if self.is_next:
            self.fields["is_causal"] = True
        self.name = "next-patch" if self.is_next else "masked-patch"
        self.policy, self.static = policy, static

    def settings(self) -> dict[str, Any]:
        masking = {} if self.is_next else {"static_masks": self.static, **asdict(cast(Any, self.policy))}
        return {"objective": self.name, **self.fields, **masking}

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[Any, Any]:
        if self.static and data.readers:
            raise UserError("static masks need to know every image again, which a stream does not; use dynamic masks")
        scale = build_processor(source, source.config)
        model: Any = build_predictor(
            source,
            image_size=image_size,
            dropout=recipe.dropout,
            drop_path=recipe.drop_path,
            image_mean=tuple(scale.image_mean),
            image_std=tuple(scale.image_std),
            **self.fields,
        )
        return model, build_processor(source, model.config)

    def build_trainer(self, run: Run) -> HfViTTrainer:
        seed = run.options.seed
        choose_attention(run, run.model)
        training = train_transform(run.processor, run.recipe.augmentation, seed)
        return HfViTTrainer(
            model=run.model,
            args=training_arguments(run, label_names=["bool_masked_pos"], **_WITHOUT_BEST),
            train_dataset=cast(Any, transform_split(run.data, "train", training, seed=seed)),
            eval_dataset=cast(Any, transform_split(run.data, "validation", eval_transform(run.processor))),
            data_collator=MaskingCollator(self.policy, run.model.config, self.static, seed),
            processing_class=run.processor,
            optimizer_cls_and_kwargs=optimizer_of(run.recipe),
            callbacks=[Clock()],
        )

    def result(self, trained: Any) -> Any:
        return trained

    @torch.no_grad()
    def draw(self, run: Run, model: Any, path: Path) -> None:
        images = torch.stack([image for image, _ in _validation_images(run, _PICTURED)])
        h, w = model.config.grid_of(*images.shape[2:])
        generator = torch.Generator().manual_seed(derive_seed(run.options.seed, h, w))
        masked, sources = self.policy.draw(len(images), h * w, generator)
        found = model(*(tensor.to(model.device) for tensor in (images, masked, sources)))
        shown = None if self.is_next else masked
        draw_predictions(images, found.reconstruction.float().cpu(), shown, model.config, path)


@final
class Contrast(Objective):
    """Momentum contrast, see `MomentumContrast`; the encoder is what is kept."""

    name, picture = "contrastive", "embeddings.png"

    def __init__(self, options: ContrastiveOptions, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.options = options

    def settings(self) -> dict[str, Any]:
        return {"objective": self.name, **self.fields, **asdict(self.options)}

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[Any, Any]:
        images = data.num_examples("train")
        if images is not None and images < recipe.batch_size:
            raise UserError(
                f"{images} training images are fewer than a batch of {recipe.batch_size}; choose a smaller --batch-size"
            )
        encoder: Any = build_encoder(
            source, image_size=image_size, dropout=recipe.dropout, drop_path=recipe.drop_path, **self.fields
        )
        return MomentumContrast(encoder, self.options), build_processor(source, encoder.config)

    def build_trainer(self, run: Run) -> HfViTTrainer:
        recipe, seed = run.recipe, run.options.seed
        for encoder in (run.model.encoder, run.model.momentum_encoder):
            choose_attention(run, encoder)
        training = TwoViews(run.processor, recipe.augmentation, seed)
        judged = TwoViews(run.processor, recipe.augmentation, seed, judged=True)
        return HfViTTrainer(
            model=run.model,
            args=training_arguments(run, label_names=["views"], dataloader_drop_last=True, **_WITHOUT_BEST),
            train_dataset=cast(Any, transform_split(run.data, "train", cast(Any, training), seed=seed)),
            eval_dataset=cast(Any, transform_split(run.data, "validation", cast(Any, judged))),
            data_collator=collate_views,
            processing_class=run.processor,
            optimizer_cls_and_kwargs=optimizer_of(run.recipe),
            callbacks=[Clock(), MomentumUpdate(run.model)],
        )

    def result(self, trained: Any) -> Any:
        return trained.encoder

    def draw(self, run: Run, model: Any, path: Path) -> None:
        images, labels = zip(*_validation_images(run, _MAPPED), strict=True)
        draw_embeddings(embed(model, images), list(labels), run.data.label_names, path)


# The last weights are kept: a lower loss of the pretext is no better model.
_WITHOUT_BEST: dict[str, Any] = {
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "prediction_loss_only": True,
}


def _validation_images(run: Run, count: int) -> list[tuple[torch.Tensor, int]]:
    """Validation images [C, H, W] with their labels, as the model sees them: evenly spread, of a stream the first."""
    split: Any = transform_split(run.data, "validation", eval_transform(run.processor), cache_bytes=0)
    if hasattr(split, "__len__"):
        examples = (split[index] for index in range(0, len(split), max(1, len(split) // count)))
    else:
        examples = iter(split)
    return [(example["pixel_values"], int(example["label"])) for example in islice(examples, count)]
