"""What is measured about one model: accuracy, calibration, robustness, parameters and FLOPs.

The model's head answers where it knows the data's classes, else a linear probe, which can be attacked too.

Legend: B batch, C channels, H x W px, D features, K classes.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, final

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_vit.comparison.result_files import ComparisonInputs, ComparisonSettings, JudgedModel, ModelResult, Share
from hf_vit.data import ImageData
from hf_vit.data.images import decode_image
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.calibration import ReliabilitySums
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe, best_probe
from hf_vit.evaluation.protocols.robustness import corrupt_batch, count_right, fgsm
from hf_vit.evaluation.reading import evaluating, finite_logits, largest, undecoded
from hf_vit.evaluation.saving import EACH_BY_ITSELF
from hf_vit.families import problem_type_of
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import copy_optimized, describe_engine
from hf_vit.loading.outputs import pre_logits
from hf_vit.loading.pixels import PixelScale
from hf_vit.results.facts import DataFact
from hf_vit.speed.measuring import counted_flops

HEAD, PROBE = "head", "linear probe"
# The logit of a class without a training image, which is never the answer.
NEVER = -1e9
_CONFIDENCE = 0.95


def judged_by(loaded: LoadedModel, data: ImageData, probe: bool) -> str:
    """Return `HEAD` where the model's own head knows the data's classes, else `PROBE`.

    Raises:
        UserError: the model has no head for these classes, and no `probe` was asked for.
    """
    try:
        loaded.classes_of(data.label_names)
    except UserError as error:
        if not probe:
            raise UserError(f"{loaded.name}: {error}; or fit a linear probe (--probe)") from error
        return PROBE
    return HEAD


def inputs_of(
    loaded: LoadedModel,
    judge: str,
    data: ImageData,
    split: str,
    settings: ComparisonSettings,
    image_size: tuple[int, int] | None = None,
) -> ComparisonInputs:
    """Return all that a model's result depends on; `image_size`: of built-in data, in no fingerprint."""
    fact = DataFact(name=data.name, fingerprint=data.fingerprint, split=split, size=data.num_examples(split))
    kept = settings.kept() | {"image_size": list(image_size) if image_size else None}
    described = loaded.describe()
    # A picture with edges and colors shows how the processor resizes, crops and scales.
    picture = Image.effect_mandelbrot((96, 80), (-2, -1.2, 0.6, 1.2), 60).convert("RGB")
    prepared = (loaded.prepare([picture]) * 100).round().to(torch.int32).numpy().tobytes()
    fingerprint = hashlib.sha256(described["fingerprint"].encode() + prepared).hexdigest()[:16]
    model = JudgedModel(name=loaded.name, kind=described["kind"], fingerprint=fingerprint, judged_by=judge)
    return ComparisonInputs(model=model, data=fact, settings=kept)


def check(loaded: LoadedModel, inputs: ComparisonInputs, data: ImageData, settings: ComparisonSettings) -> None:
    """Raise a UserError for what would stop the model's measurement later."""
    examination = Examination(loaded, data, inputs.data.split or "")
    if inputs.model.judged_by == PROBE:
        for name in ("train", "validation"):
            examination.learning_split(name)
    if (settings.corruptions or settings.epsilons) and not loaded.resizes:
        PixelScale.measure(loaded)


@final
class ProbedForImageClassification(nn.Module):
    """The frozen features of a model and a linear head: pixels [B, C, H, W] -> logits [B, K]."""

    def __init__(self, body: nn.Module, head: nn.Linear, label_names: list[str]) -> None:
        super().__init__()
        self.body, self.head = body, head
        image_size = getattr(getattr(body, "config", None), "image_size", None)
        self.config = SimpleNamespace(
            num_labels=len(label_names), id2label=dict(enumerate(label_names)), image_size=image_size
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K]."""
        return self.head(pre_logits(self.body, pixel_values).to(self.head.weight.dtype))


def untrained(loaded: LoadedModel, judge: str, data: ImageData, sample: torch.Tensor) -> LoadedModel:
    """Return the model that answers, for timing alone: a probe has not learned anything; `sample` is [B, C, H, W]."""
    if judge == HEAD:
        return loaded
    with torch.inference_mode():
        size = pre_logits(loaded.model, sample).shape[1]
    head = nn.Linear(size, len(data.label_names)).to(sample.device)
    return replace(loaded, model=ProbedForImageClassification(loaded.model, head, data.label_names).eval())


def fit_probe(examination: Examination, num_images: int | None = None) -> tuple[nn.Linear, float]:
    """Return the logistic regression of scikit-learn on standardized training features as a linear layer, and its C.

    Its strength is the one of `STRENGTHS` that answers best on the validation images; of equals the smallest. It learns
    from `num_images` at most, drawn by the examination's seed.

    Raises:
        UserError: there is no train or validation split, or one of them judges.
    """
    train, validation = (examination.learning_split(name) for name in ("train", "validation"))
    rows = np.random.default_rng(examination.seed).permutation(len(examination.labels(train)))[:num_images]
    features, learned = examination.features(train, sorted(rows.tolist()))
    if len(np.unique(learned)) < 2:
        raise UserError(f"split '{train}' has images of one class only; a probe needs at least two")
    best = best_probe([Probe.fit(features, learned, each) for each in STRENGTHS], *examination.features(validation))
    scaler, regression = cast(Any, best.pipeline)
    slopes, offsets = regression.coef_, regression.intercept_
    if len(slopes) == 1:  # two classes share one row: that of the second, against the first
        slopes, offsets = np.concatenate([0 * slopes, slopes]), np.concatenate([0 * offsets, offsets])
    head = nn.Linear(slopes.shape[1], len(examination.data.label_names))
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(NEVER)
        head.weight[regression.classes_] = torch.from_numpy(slopes / scaler.scale_).float()
        head.bias[regression.classes_] = torch.from_numpy(offsets - (slopes / scaler.scale_) @ scaler.mean_).float()
    return head.to(next(examination.subject.model.parameters()).device), best.strength


def measure_model(
    loaded: LoadedModel,
    data: ImageData,
    inputs: ComparisonInputs,
    settings: ComparisonSettings,
    *,
    optimize: bool = False,
    progress: bool = True,
) -> ModelResult:
    """Judge a model by all images of a split, and corrupt and attack some of them; a probe is trained here.

    With `optimize` a copy answers that is computed by what is fastest for so many images (`select_engine`); gradients
    and FLOPs are those of the model as it was loaded.

    Raises:
        UserError: outputs that are not finite, an image processor that does more than scale pixels, no split to train
            a probe on.
    """
    split = inputs.data.split or ""
    examination = Examination(loaded, data, split, None, settings.batch_size, settings.seed, progress)
    attacks = settings.epsilons if loaded.is_differentiable else ()
    notes, is_graph = list[str](), loaded.is_graph
    if inputs.model.judged_by == PROBE:
        head, strength = fit_probe(examination, settings.probe_images)
        loaded = replace(loaded, model=ProbedForImageClassification(loaded.model, head, data.label_names).eval())
        notes.append(f"a linear probe (C = {strength:g}) of {head.in_features} features answers")
    elif problem_type_of(loaded.model) == "multi_label_classification":
        notes.append(EACH_BY_ITSELF)
    if is_graph:
        unharmed = "not corrupted or attacked" if examination.subject.resizes else "not attacked"
        notes.append(f"a graph: {unharmed}, parameters and FLOPs not counted")
    elif not examination.subject.is_differentiable:
        notes.append("not attacked: its color quantization has no gradient")
    faster, engine = copy_optimized(loaded, data.num_examples(split)) if optimize else (loaded, None)
    if engine is not None:
        notes.append(describe_engine(engine))
    examination = replace(examination, subject=faster)
    pixel_values = sample(loaded, data, split, 1)
    sizes: dict[str, Any] = {"parameters": None, "flops": None}
    with evaluating(loaded.model):
        measured = _judge(examination) | _robustness(
            replace(examination, num_images=settings.robustness_images), settings, attacks, loaded.model
        )
        if not is_graph:
            sizes["flops"] = counted_flops(loaded.model, lambda: loaded.model(pixel_values))
            sizes["parameters"] = sum(parameter.numel() for parameter in loaded.model.parameters())
    height, width = loaded.input_size if loaded.resizes else pixel_values.shape[-2:]
    return ModelResult(inputs=inputs, image_size=(height, width), notes=notes, **sizes, **measured)


def measure_named(
    named: tuple[str, ComparisonInputs],
    data: ImageData,
    settings: ComparisonSettings,
    device: str | None,
    optimize: bool,
) -> ModelResult:
    """Measure a model that is opened by its name, on whichever machine.

    Raises:
        UserError: it is another one there.
    """
    source, inputs = named
    loaded = replace(load_model(source, device), name=inputs.model.name)
    if inputs_of(loaded, inputs.model.judged_by, data, inputs.data.split or "", settings).model != inputs.model:
        raise UserError(f"another model has the name {source} there; give one that all nodes share")
    return measure_model(loaded, data, inputs, settings, optimize=optimize, progress=False)


def sample(loaded: LoadedModel, data: ImageData, split: str, count: int) -> torch.Tensor:
    """Return the first images of a split as the model takes them, [count, C, H, W]; a short split is repeated."""
    table: Any = undecoded(data.split(split))
    return loaded.pixel_values([decode_image(table[index % len(table)]["image"]) for index in range(count)])


def _judge(examination: Examination) -> dict[str, Any]:
    """Return top1, top5 (from five classes on), loss (below `-NEVER`) and ece of one pass, for `ModelResult`."""
    sums, hits, images, classes, is_finite = ReliabilitySums(), np.zeros(2, dtype=int), 0, 0, True
    for logits, labels in examination.logits(examination.split):
        is_finite &= bool((logits.gather(1, labels[:, None]) > NEVER / 2).all())
        sums.add(logits.double().numpy(), labels.numpy())
        best = largest(logits, 5) == labels[:, None]
        hits += int(best[:, 0].sum()), int(best.sum())
        images, classes = images + len(labels), logits.shape[1]
    top1, top5 = (share(int(count), images) for count in hits)
    result = sums.result()
    loss = result.loss if is_finite else None
    return {"top1": top1, "top5": top5 if classes >= 5 else None, "loss": loss, "ece": result.ece}


def _robustness(
    examination: Examination, settings: ComparisonSettings, attacks: Sequence[float], attacked: nn.Module
) -> dict[str, Any]:
    """Return the accuracy of clean, corrupted and attacked images for `ModelResult`; `attacked` gives gradients."""
    if examination.subject.resizes or not (settings.corruptions or attacks):
        return {"clean": None, "corruptions": {}, "fgsm": None}
    scale, model = PixelScale.measure(examination.subject), examination.subject.model
    hits, images = Counter[tuple[str, str]](), 0
    for values, labels in examination.judging(f"{examination.subject.name}: robustness"):
        pixels = scale.pixels(values).clamp(0, 1)

        def loss(moved: torch.Tensor, labels: torch.Tensor = labels) -> torch.Tensor:
            return F.cross_entropy(finite_logits(attacked, scale.values(moved)), labels, reduction="none")

        moved = {("clean", ""): pixels}
        for name in settings.corruptions:
            moved["corruption", name] = corrupt_batch(pixels, name, settings.severity, settings.seed)
        moved |= {("fgsm", f"{epsilon:g}"): fgsm(loss, pixels, epsilon / 255) for epsilon in attacks}
        for key, changed in moved.items():
            hits[key] += count_right(model, scale.values(changed), labels)
        images += len(labels)
    shares = {key: count / images for key, count in hits.items()}
    return {
        "clean": shares["clean", ""],
        "corruptions": {name: shares["corruption", name] for name in settings.corruptions},
        "fgsm": {f"{epsilon:g}": shares["fgsm", f"{epsilon:g}"] for epsilon in attacks} or None,
    }


def share(hits: int, images: int) -> Share:
    """Return a share of images with Wilson's 95% interval."""
    from scipy.stats import binomtest

    interval = binomtest(hits, images).proportion_ci(_CONFIDENCE, method="wilson")
    return Share(value=hits / images, low=float(interval.low), high=float(interval.high))
