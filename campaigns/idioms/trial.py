"""The table of idioms, and a trial: a tiny model, an idiom, and what a freshly built model of the same weights answers.

Legend: B batch, C channels, H x W px, h x w patch grid.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from models.families import FAMILIES, OTHERS, Family, randomise
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTForMaskedImageModeling, ViTModel
from transformers.initialization import no_init_weights

import hf_vit
from hf_vit.models.resnet_hf_vit import StdConv2d

OLD, NEW = 0, 1  # seeds of the weights that a model begins with, and of those that it is given
BATCH = 2
OTHER = (3, 5)  # patches; not the nominal size, so that tables are resampled
LABELS = 40
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Products in 8 bits: torchao's weights (by dtype float32), and torch.ao's, with activations in 8 bits as well.
QUANTISED = ("int8-torchao", "int8-dynamic")
AS_LOADED, BEFORE, OPTIMIZED = "as-loaded", "before-optimizing", "optimized"
STATES = (AS_LOADED, BEFORE, OPTIMIZED)

Tensors = list[torch.Tensor]
Pair = tuple[Tensors, Tensors]
PLAIN = tuple(DTYPES)  # of idioms that quantised weights do not take
EXACT = ("float64", "float32")
FLOAT32 = ("float32",)


class TransformersFamily(Family):
    """transformers' ViT in the place of a family: the plain one's sizes, its classes, what it calls them."""

    def config(self, choice: str = "default", **overrides: Any) -> Any:
        """Return a config with what tests ask one of the package for."""
        config: Any = ViTConfig(**{**self.sizes, **self.tiny, **overrides, "encoder_stride": 4})
        grid = config.image_size // config.patch_size
        config.patch_stride, config.grid = (config.patch_size,) * 2, (grid, grid)
        return config

    @property
    def classes(self) -> dict[str, Any]:
        """A backbone is compared with the bare model: there is none of ViT."""
        heads = {"classification": ViTForImageClassification, "masked_prediction": ViTForMaskedImageModeling}
        return {"model": ViTModel, **heads, "backbone": ViTModel}


TRANSFORMERS = TransformersFamily("transformers", {"patch_size": 4}, {"default": {}})
ALL = {**FAMILIES, **OTHERS, "transformers": TRANSFORMERS}


@dataclass(frozen=True)
class Subject:
    """A model of one family, choice, head and dtype, with any weights.

    Attributes:
        head: a door of the table of families.
        dtype: a key of `DTYPES`, or one of `QUANTISED`.
    """

    family: str
    head: str = "classification"
    dtype: str = "float32"
    choice: str = "default"

    @property
    def row(self) -> Family:
        return ALL[self.family]

    @property
    def is_ours(self) -> bool:
        return self.family != "transformers"

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def is_rough(self) -> bool:
        """Numbers of so few digits that the distance from float64 is compared, not bounded."""
        return self.is_quantised or self.dtype == "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, torch.float32)

    @property
    def config(self) -> Any:
        """With many labels, so that a mean over logits says something."""
        labels = {} if self.row.choices[self.choice].get("num_labels") == 0 else {"num_labels": LABELS}
        return self.row.config(self.choice, **labels)

    def bare(self, seed: int) -> Any:
        """In float32, every parameter and every statistic random."""
        config = self.config
        with no_init_weights():  # `randomise` writes every parameter
            model = randomise(self.row.classes[self.head](config), seed).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if re.search(r"norm\d?\.weight$", name):  # batch norms, too: else little of what is before them is left
                    parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if "running" in name:
                random = torch.rand(buffer.shape, generator=generator)
                buffer.copy_(random / 5 if name.endswith("running_mean") else random + 0.5)
        return model.to(self.torch_dtype)

    def build(self, seed: int = OLD) -> Any:
        """As a user has it: in its dtype, quantised."""
        model = self.bare(seed)
        if self.dtype == "int8-torchao":
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig())
        if self.dtype == "int8-dynamic":
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        return model

    def exact(self, seed: int = OLD) -> Any:
        """The same weights, rounded to the dtype as they are, in float64 and never quantised."""
        return self.bare(seed).double()


def tensors_of(outputs: Any) -> Tensors:
    """What a user reads: of classifiers logits, of masked prediction what stands for every patch, of others all."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        for name in ("logits", "reconstruction"):
            if isinstance(outputs.get(name), torch.Tensor):
                return [outputs[name]]
        return [tensor for value in outputs.values() for tensor in tensors_of(value)]
    return [tensor for value in outputs if value is not None for tensor in tensors_of(value)]


def distance(given: Tensors, wanted: Tensors, rough: bool = False) -> float:
    """How far apart at most, relative to the largest number wanted; infinite where that cannot be said.

    Rough: as norms, and the mean over all tensors.
    """
    if [each.shape for each in given] != [each.shape for each in wanted]:
        return float("inf")
    ratios: list[float] = []
    for one, other in zip(given, wanted, strict=True):
        if one.is_meta or not bool(one.isfinite().all()):
            return float("inf")
        off, size = one.detach().double() - other.detach().double(), other.detach().double()
        ratio = off.norm() / size.norm() if rough else off.abs().max() / size.abs().max()
        ratios.append(float(ratio))
    return sum(ratios) / max(len(ratios), 1) if rough else max(ratios, default=0.0)


@dataclass
class Trial:
    """What an idiom is given: it starts with a model that has computed before, changes it, and is done with it.

    Attributes:
        state: "as-loaded", "before-optimizing" (the idiom, then optimize_for_inference) or "optimized" (the other
            way round).
        seed: added to those of all weights.
    """

    subject: Subject
    state: str = AS_LOADED
    seed: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def start(self, weights: int = OLD) -> Any:
        model = self.subject.build(weights + 2 * self.seed)
        if self.state == OPTIMIZED and self.subject.is_ours:
            model = hf_vit.optimize_for_inference(model, engine="torch")
        with torch.no_grad():  # whatever a model would keep of its weights and of sizes of images, it has now
            for grid in (None, OTHER):
                self.answer(model, self.images(grid))
        return model

    def done(self, model: Any) -> Any:
        if self.state == BEFORE and self.subject.is_ours:
            model = hf_vit.optimize_for_inference(model, engine="torch")
        return model

    def source(self, weights: int = NEW) -> Any:
        """Another model as a user has it, plain."""
        return self.subject.build(weights + 2 * self.seed)

    def exact(self, weights: int = NEW) -> Any:
        return self.subject.exact(weights + 2 * self.seed)

    def images(self, grid: tuple[int, int] | None = OTHER, batch: int = BATCH) -> torch.Tensor:
        """[B, C, H, W] in the model's dtype; what masked prediction reconstructs, transformers takes for a square."""
        if grid == OTHER and not self.subject.is_ours and self.subject.head == "masked_prediction":
            grid = (5, 5)
        images = self.subject.row.images(self.subject.config, batch, grid)
        return images.to(self.subject.torch_dtype)

    def answer(self, model: Any, images: torch.Tensor | None = None, **kwargs: Any) -> Tensors:
        images = self.images() if images is None else images
        return tensors_of(model(images, **self.options(), **kwargs))

    def options(self) -> dict[str, Any]:
        """What transformers' ViT needs for other sizes, and to stand for a backbone, which records hidden states."""
        if self.subject.is_ours:
            return {}
        return {"interpolate_pos_encoding": True, "output_hidden_states": self.subject.head == "backbone"}

    @torch.no_grad()
    def wanted(self, model: Any, images: torch.Tensor | None = None, **kwargs: Any) -> Tensors:
        """What a fresh model answers, one image at a time."""
        images = (self.images() if images is None else images).double()
        each = [self.answer(model, images[index : index + 1], **kwargs) for index in range(len(images))]
        return [torch.cat(parts) for parts in zip(*each, strict=True)]


def inner(model: nn.Module) -> str:
    """The name of a product inside: of a Transformer's MLP, or of a ResNet's unit."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | StdConv2d)]
    inside = [name for name in names if not name.endswith(("classifier", "prediction_head"))]
    return next((name for name in inside if name.endswith("fc1")), inside[-1])


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


@dataclass(frozen=True)
class Idiom:
    """An ordinary thing to do with a model.

    Attributes:
        name: in cases and on the page.
        attempt: does it; gives what the model answers then, and what a freshly built one of the same weights answers.
        changes: the weights or the function are others afterwards, so that a model that missed it answers otherwise.
        slow: takes seconds: tried on each family's classifier, by its default choice, alone.
        dtypes: those it is for.
        takes: whether a subject has what the idiom is about.
    """

    name: str
    attempt: Callable[[Trial], Pair]
    changes: bool = False
    slow: bool = False
    dtypes: tuple[str, ...] = (*PLAIN, *QUANTISED)
    takes: Callable[[Subject], bool] = lambda subject: True

    def fits(self, subject: Subject) -> bool:
        is_plainest = (subject.head, subject.choice) == ("classification", "default")
        return subject.dtype in self.dtypes and self.takes(subject) and (is_plainest or not self.slow)


IDIOMS: dict[str, Idiom] = {}  # filled by `@idiom` in the modules beside


def idiom(name: str, **settings: Any) -> Callable:
    def enter(attempt: Callable[[Trial], Pair]) -> Callable:
        assert name not in IDIOMS
        IDIOMS[name] = Idiom(name, attempt, **settings)
        return attempt

    return enter
