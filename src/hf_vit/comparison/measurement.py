"""What is measured about one model: accuracy, calibration, robustness, parameters and FLOPs.

Legend: B batch, C channels, H x W px, K classes.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_vit.comparison.answering import NEVER, PROBE, answering
from hf_vit.comparison.result_files import ComparisonInputs, ComparisonSettings, JudgedModel, ModelResult, Share
from hf_vit.data import ImageData, to_rgb
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.attacks import fgsm
from hf_vit.evaluation.protocols.calibration import ReliabilitySums
from hf_vit.evaluation.protocols.corrupted_accuracy import corrupt_batch
from hf_vit.evaluation.reading import evaluating, finite_logits, largest
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import engine_note, optimized_copy
from hf_vit.loading.pixels import PixelScale
from hf_vit.results.facts import DataFact
from hf_vit.speed.measuring import counted_flops

_CONFIDENCE = 0.95


def inputs_of(
    subject: LoadedModel,
    judge: str,
    data: ImageData,
    split: str,
    settings: ComparisonSettings,
    image_size: tuple[int, int] | None = None,
) -> ComparisonInputs:
    """All that a model's result depends on; `image_size`: what built-in data were stretched to, in no fingerprint."""
    fact = DataFact(name=data.name, fingerprint=data.fingerprint, split=split, size=data.num_examples(split))
    chosen = settings.kept() | {"image_size": list(image_size) if image_size else None}
    return ComparisonInputs(model=_described(subject, judge), data=fact, settings=chosen)


def _described(subject: LoadedModel, judge: str) -> JudgedModel:
    """Name, kind, what answers, and a fingerprint of config, weights and how images are prepared."""
    described = subject.describe()
    # A picture with edges and colours shows how the processor resizes, crops and scales.
    picture = Image.effect_mandelbrot((96, 80), (-2, -1.2, 0.6, 1.2), 60).convert("RGB")
    prepared = (subject.prepare([picture]) * 100).round().to(torch.int32).numpy().tobytes()
    fingerprint = hashlib.sha256(described["fingerprint"].encode() + prepared).hexdigest()[:16]
    return JudgedModel(name=subject.name, kind=described["kind"], fingerprint=fingerprint, judged_by=judge)


def check(subject: LoadedModel, inputs: ComparisonInputs, data: ImageData, settings: ComparisonSettings) -> None:
    """Raise a UserError for what would stop the model's measurement later."""
    examination = Examination(subject, data, inputs.data.split or "")
    if inputs.model.judged_by == PROBE:
        for name in ("train", "validation"):
            examination.learning_split(name)
    if (settings.corruptions or settings.epsilons) and not subject.resizes:
        PixelScale.of(subject)


def measure_model(
    subject: LoadedModel,
    data: ImageData,
    inputs: ComparisonInputs,
    settings: ComparisonSettings,
    *,
    optimize: bool = False,
    progress: bool = True,
) -> ModelResult:
    """Judge a model by all images of a split, and corrupt and attack some of them.

    Args:
        subject: the model; a linear probe is trained where one is to answer.
        data: the images.
        inputs: of `inputs_of`.
        settings: corruptions, attacks, numbers of images, seed.
        optimize: have a copy answer that is computed by what is fastest for so many images (`engine_for`); gradients
            and FLOPs are those of the model as it was loaded.
        progress: show bars on standard error.

    Raises:
        UserError: outputs that are not finite, an image processor that does more than scale pixels, no split to train
            a probe on.
    """
    split = inputs.data.split or ""
    examination = Examination(subject, data, split, None, settings.batch_size, settings.seed, progress)
    attacks = settings.epsilons if subject.is_differentiable else ()
    notes, is_graph = list[str](), subject.is_graph
    if is_graph:
        unharmed = "neither corrupted nor attacked" if subject.resizes else "not attacked"
        notes = [f"a graph: {unharmed}, parameters and FLOPs not counted"]
    elif not subject.is_differentiable:
        notes = ["not attacked: its choice of colours has no gradient"]
    subject, probe = answering(subject, inputs.model.judged_by, examination, settings.probe_images)
    faster, engine = optimized_copy(subject, data.num_examples(split)) if optimize else (subject, None)
    examination = replace(examination, subject=faster)
    robust_examination = replace(examination, num_images=settings.robustness_images)
    pixel_values = sample(subject, data, split, 1)
    flops = parameters = None
    with evaluating(subject.model):
        top1, top5, loss, ece = _judge(examination)
        robust = _robustness(robust_examination, settings, attacks, subject.model)
        if not is_graph:
            flops = counted_flops(subject.model, lambda: subject.model(pixel_values))
            parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    height, width = subject.input_size if subject.resizes else pixel_values.shape[-2:]
    return ModelResult(
        inputs=inputs,
        image_size=(height, width),
        parameters=parameters,
        flops=flops,
        top1=top1,
        top5=top5,
        loss=loss,
        ece=ece,
        notes=probe + notes + ([] if engine is None else [engine_note(engine)]),
        **robust,
    )


def measure_named(
    named: tuple[str, ComparisonInputs],
    data: ImageData,
    settings: ComparisonSettings,
    device: str | None,
    optimize: bool,
) -> ModelResult:
    """As `measure_model`, of a model that is opened by its name, on whichever machine.

    Raises:
        UserError: it is another one there.
    """
    source, inputs = named
    subject = replace(load_model(source, device), name=inputs.model.name)
    if _described(subject, inputs.model.judged_by) != inputs.model:
        raise UserError(f"another model has the name {source} there; give one that all nodes share")
    return measure_model(subject, data, inputs, settings, optimize=optimize, progress=False)


def sample(subject: LoadedModel, data: ImageData, split: str, count: int) -> torch.Tensor:
    """The first images of a split as the model takes them, [count, C, H, W]; a short split is repeated."""
    table: Any = data.split(split)
    images = [to_rgb(table[index % len(table)]["image"]) for index in range(count)]
    return subject.pixel_values(images)


def _judge(examination: Examination) -> tuple[Share, Share | None, float | None, float]:
    """Top-1, top-5 (from five classes on), loss (below `-NEVER`) and expected calibration error of one pass."""
    sums, hits, hits5, images, classes, is_finite = ReliabilitySums(), 0, 0, 0, 0, True
    for logits, labels in examination.logits(examination.split):
        is_finite &= bool((logits.gather(1, labels[:, None]) > NEVER / 2).all())
        sums.add(logits.double().numpy(), labels.numpy())
        best = largest(logits, 5) == labels[:, None]
        hits, hits5 = hits + int(best[:, 0].sum()), hits5 + int(best.sum())
        images, classes = images + len(labels), logits.shape[1]
    if not images:
        raise UserError(f"split '{examination.split}' holds no image; choose another")
    found = sums.result()
    return (
        share(hits, images),
        share(hits5, images) if classes >= 5 else None,
        found.loss if is_finite else None,
        found.ece,
    )


def _robustness(
    examination: Examination, settings: ComparisonSettings, attacks: Sequence[float], attacked: nn.Module
) -> dict[str, Any]:
    """Accuracy of clean, corrupted and attacked images, as `ModelResult` names them; `attacked` gives gradients."""
    if examination.subject.resizes or not (settings.corruptions or attacks):
        return {"clean": None, "corruptions": {}, "fgsm": None}
    scale, model = PixelScale.of(examination.subject), examination.subject.model
    hits, images = Counter[tuple[str, str]](), 0
    for values, labels in examination.judging(f"{examination.subject.name}: robustness"):
        pixels = scale.pixels(values).clamp(0, 1)

        def loss(moved: torch.Tensor, labels: torch.Tensor = labels) -> torch.Tensor:
            return F.cross_entropy(finite_logits(attacked, scale.values(moved)), labels, reduction="none")

        moved = {("clean", ""): pixels}
        for name in settings.corruptions:
            moved["corruption", name] = corrupt_batch(pixels, name, settings.severity, settings.seed)
        moved |= {("fgsm", f"{epsilon:g}"): fgsm(loss, pixels, epsilon / 255) for epsilon in attacks}
        with torch.inference_mode():
            for key, found in moved.items():
                answers = finite_logits(model, scale.values(found)).argmax(dim=1)
                hits[key] += int((answers == labels).sum())
        images += len(labels)
    shares = {key: count / images for key, count in hits.items()}
    return {
        "clean": shares["clean", ""],
        "corruptions": {name: shares["corruption", name] for name in settings.corruptions},
        "fgsm": {f"{epsilon:g}": shares["fgsm", f"{epsilon:g}"] for epsilon in attacks} or None,
    }


def share(hits: int, images: int) -> Share:
    """A share of images with Wilson's 95% interval."""
    from scipy.stats import binomtest

    interval = binomtest(hits, images).proportion_ci(_CONFIDENCE, method="wilson")
    return Share(value=hits / images, low=float(interval.low), high=float(interval.high))
