"""Predicting patches: corrupted ones from the rest (arXiv 2010.11929, B.1.2), or each from those before it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import nn
from transformers import AutoModelForMaskedImageModeling, PreTrainedModel

from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.loading.start import ModelSource, build_model, build_processor
from hf_vit.training.plan import Run
from hf_vit.training.recipes.definition import Recipe
from hf_vit.training.tasks.masking import MaskingCollator, NextPatch, RandomMasking
from hf_vit.training.tasks.pictures import draw_predictions
from hf_vit.training.tasks.pretext import PretextTask, validation_images
from hf_vit.training.trainer.sampling import derive_seed

TARGETS = ("mean_color", "downsampled", "pixels")
_PICTURED = 8  # images


@final
class PatchPrediction(PretextTask):
    """Predict corrupted patches, or each patch from those before it.

    Args:
        target: `prediction_target`.
        policy: which patches.
        static: every image keeps its mask.
        fields: of the model's configuration.

    Raises:
        UserError: there is no such target.
    """

    picture = "predictions.png"
    auto_class = AutoModelForMaskedImageModeling
    arguments: ClassVar[dict[str, Any]] = PretextTask.arguments | {"label_names": ["bool_masked_pos"]}

    def __init__(self, target: str, policy: RandomMasking | NextPatch, static: bool, fields: Mapping[str, Any]) -> None:
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

    def build(
        self, source: ModelSource, data: ImageData, image_size: tuple[int, int], recipe: Recipe
    ) -> tuple[nn.Module, Any]:
        if self.static and data.readers:
            raise UserError("static masks need to know every image again, which a stream does not; use dynamic masks")
        scale = build_processor(source, source.config)
        model = build_model(
            source,
            "masked_prediction",
            image_size=image_size,
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
