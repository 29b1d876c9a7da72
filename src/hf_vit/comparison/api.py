"""`compare`: measure models one by one, time them together, and write tables and pictures.

Finished measurements are stored and not repeated. The logits are those of the model's head if it has the data's
classes, else of a linear probe, which has gradients too.

Legend: B images, C channels, H x W px, K classes.
"""

import hashlib
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, final

import numpy as np
import torch
from torch import nn

from hf_vit.comparison.result_files import (
    ComparisonInputs,
    ComparisonSettings,
    JudgedModel,
    ModelResult,
    Share,
    SpeedResult,
)
from hf_vit.comparison.tables import draw_comparison, make_html, make_markdown, to_csv, to_json
from hf_vit.data import ImageData, load_data
from hf_vit.data.builtin import MAX_PHOTO_SIDE
from hf_vit.data.images import decode_image, undecode_images
from hf_vit.data.sources import is_builtin, refuse_output_in
from hf_vit.display import Displayed, shorten_list
from hf_vit.environment import read_hardware
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.calibration import ReliabilitySums
from hf_vit.evaluation.protocols.probes import STRENGTHS, Probe, choose_best_probe
from hf_vit.evaluation.protocols.robustness import Variants, corrupt_batch, fgsm, make_loss, measure_variants
from hf_vit.evaluation.reading import evaluation_mode, find_largest, restored_modes
from hf_vit.evaluation.runners import open_runner
from hf_vit.evaluation.saving import MULTI_LABEL_WARNING
from hf_vit.families import get_problem_type
from hf_vit.loading.model import LoadedModel, load_model, load_models
from hf_vit.loading.optimizing import copy_optimized, describe_engine, refuse_optimized_result
from hf_vit.loading.outputs import compute_pre_logits
from hf_vit.loading.pixels import PixelScale
from hf_vit.results.documents import list_differing_fields, round_floats
from hf_vit.results.facts import DataFact, append_record, is_recorded, lock_folder, make_record
from hf_vit.results.figures import save_figure
from hf_vit.results.trained_images import note_trained
from hf_vit.speed.measuring import BUSY, count_flops, measure_forwards
from hf_vit.writing import explain_write_errors, is_writable, reject_url, write_atomically

HEAD, PROBE = "head", "linear probe"
# The logit of a class without a training image, so that it is never predicted.
NEVER = -1e9
_CONFIDENCE = 0.95


def choose_classifier(loaded: LoadedModel, data: ImageData, probe: bool) -> str:
    """Return `HEAD` if the model's head has the data's classes, else `PROBE`.

    Raises:
        UserError: the head lacks a class, and `probe` is False.
    """
    try:
        loaded.list_classes(data.label_names)
    except UserError as error:
        if not probe:
            raise UserError(f"{loaded.name} cannot be compared: {error}; or add --probe for a linear probe") from error
        return PROBE
    return HEAD


def describe_inputs(
    loaded: LoadedModel,
    classifier: str,
    data: ImageData,
    split: str,
    settings: ComparisonSettings,
    image_size: tuple[int, int] | None = None,
) -> ComparisonInputs:
    """Return everything on which a model's result depends, to recognize results of the same inputs.

    `image_size` is that of built-in data, whose fingerprint does not contain it.
    """
    fact = DataFact(name=data.name, fingerprint=data.fingerprint, split=split, size=data.num_examples(split))
    all_settings = settings.kept() | {"image_size": list(image_size) if image_size else None}
    description = loaded.describe()
    fingerprint = hashlib.sha256(description["fingerprint"].encode() + loaded.prepare_probe()).hexdigest()[:16]
    model = JudgedModel(name=loaded.name, kind=description["kind"], fingerprint=fingerprint, judged_by=classifier)
    return ComparisonInputs(model=model, data=fact, settings=all_settings)


def check_measurable(
    loaded: LoadedModel, inputs: ComparisonInputs, data: ImageData, settings: ComparisonSettings
) -> None:
    """Raise before any work the errors that would stop the measurement of a model later.

    Raises:
        UserError: the data have no split to fit a probe on, or the processor does more than scale pixels, so that its
            input cannot be corrupted or attacked.
    """
    examination = Examination(loaded, data, inputs.data.split or "")
    if inputs.model.judged_by == PROBE:
        for name in ("train", "validation"):
            examination.require_fit_split(name)
    if (settings.corruptions or settings.epsilons) and not loaded.resizes:
        PixelScale.measure(loaded)


@final
class ProbedForImageClassification(nn.Module):
    """A frozen model with a linear head on its features: pixels [B, C, H, W] -> logits [B, K]."""

    def __init__(self, body: nn.Module, head: nn.Linear, label_names: list[str]) -> None:
        super().__init__()
        self.body, self.head = body, head
        image_size = getattr(getattr(body, "config", None), "image_size", None)
        self.config = SimpleNamespace(
            num_labels=len(label_names), id2label=dict(enumerate(label_names)), image_size=image_size
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K]."""
        return self.head(compute_pre_logits(self.body, pixel_values).to(self.head.weight.dtype))


def prepare_timing(loaded: LoadedModel, classifier: str, data: ImageData, sample: torch.Tensor) -> LoadedModel:
    """Return the classifier to time: the model, or the model with an untrained probe; `sample` is [B, C, H, W]."""
    if classifier == HEAD:
        return loaded
    with torch.inference_mode():
        num_features = compute_pre_logits(loaded.model, sample).shape[1]
    head = nn.Linear(num_features, len(data.label_names)).to(sample.device)
    return replace(loaded, model=ProbedForImageClassification(loaded.model, head, data.label_names).eval())


def fit_probe(examination: Examination, num_images: int | None = None) -> tuple[nn.Linear, float]:
    """Fit scikit-learn's logistic regression to standardized training features; return a linear layer and C.

    C is the value of `STRENGTHS` with the highest accuracy on the validation images, of equal ones the smallest. At
    most `num_images` images are used, drawn by the examination's seed.

    Raises:
        UserError: the train or the validation split is missing or is the one to be measured, or all training images
            have one class.
    """
    train, validation = (examination.require_fit_split(name) for name in ("train", "validation"))
    rows = np.random.default_rng(examination.seed).permutation(len(examination.labels(train)))[:num_images]
    features, labels = examination.features(train, sorted(rows.tolist()))
    if len(np.unique(labels)) < 2:
        raise UserError(
            f"all images of split '{train}' have the same class, but a probe needs two; give a data set with "
            "more classes"
        )
    probes = [Probe.fit(features, labels, strength) for strength in STRENGTHS]
    best = choose_best_probe(probes, *examination.features(validation))
    scaler, regression = cast(Any, best.pipeline)
    weights, biases = regression.coef_, regression.intercept_
    if len(weights) == 1:  # of two classes scikit-learn has one row, the second class against the first
        weights, biases = np.concatenate([0 * weights, weights]), np.concatenate([0 * biases, biases])
    head = nn.Linear(weights.shape[1], len(examination.data.label_names))
    # The layer includes the scaler: w ((x - mean) / scale) + b = (w / scale) x + (b - (w / scale) mean).
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(NEVER)
        head.weight[regression.classes_] = torch.from_numpy(weights / scaler.scale_).float()
        head.bias[regression.classes_] = torch.from_numpy(biases - (weights / scaler.scale_) @ scaler.mean_).float()
    return head.to(next(examination.loaded.model.parameters()).device), best.strength


def measure_model(
    loaded: LoadedModel,
    data: ImageData,
    inputs: ComparisonInputs,
    settings: ComparisonSettings,
    *,
    optimize: bool = False,
    progress: bool = True,
) -> ModelResult:
    """Measure a model on all images of a split, and on corrupted and attacked ones; fit its probe first if it has one.

    With `optimize` a copy computes the predictions on the engine that is fastest for so many images (`select_engine`);
    gradients and FLOPs are those of the model as it was loaded.

    Raises:
        UserError: an output is not finite, the image processor does more than scale pixels, or a probe has no split to
            be fitted on.
    """
    split = inputs.data.split or ""
    examination = Examination(loaded, data, split, None, settings.batch_size, settings.seed, progress)
    attacks = settings.epsilons if loaded.is_differentiable else ()
    notes = note_trained(loaded.folder, examination.list_digests())
    if inputs.model.judged_by == PROBE:
        head, strength = fit_probe(examination, settings.probe_images)
        loaded = replace(loaded, model=ProbedForImageClassification(loaded.model, head, data.label_names).eval())
        notes.append(f"a linear probe (C = {strength:g}) of {head.in_features} features is the classifier")
    elif get_problem_type(loaded.model) == "multi_label_classification":
        notes.append(MULTI_LABEL_WARNING)
    if loaded.is_graph:
        omitted = "it was not corrupted or attacked" if examination.loaded.resizes else "it was not attacked"
        notes.append(f"the model is an exported graph: {omitted}, and parameters and FLOPs were not counted")
    elif not examination.loaded.is_differentiable:
        notes.append("the model was not attacked, because its color quantization has no gradient")
    faster, engine = copy_optimized(loaded, data.num_examples(split)) if optimize else (loaded, None)
    if engine is not None:
        notes.append(describe_engine(engine))
    examination = replace(examination, loaded=faster)
    pixel_values = load_sample(loaded, data, split, 1)
    sizes: dict[str, Any] = {"parameters": None, "flops": None}
    with evaluation_mode(loaded.model):
        values = _measure_accuracy(examination)
        few_images = replace(examination, num_images=settings.robustness_images)
        values |= _measure_robustness(few_images, settings, attacks, loaded.model)
        if not loaded.is_graph:
            sizes["flops"] = count_flops(loaded.model, lambda: loaded.model(pixel_values))
            sizes["parameters"] = sum(parameter.numel() for parameter in loaded.model.parameters())
    height, width = loaded.input_size if loaded.resizes else pixel_values.shape[-2:]
    return ModelResult(inputs=inputs, image_size=(height, width), notes=notes, **sizes, **values)


def measure_named(
    name_and_inputs: tuple[str, ComparisonInputs],
    data: ImageData,
    settings: ComparisonSettings,
    device: str | None,
    optimize: bool,
) -> ModelResult:
    """Load a model by its name and measure it, on any machine of a cluster.

    Raises:
        UserError: another model has this name on this machine.
    """
    source, inputs = name_and_inputs
    loaded = replace(load_model(source, device), name=inputs.model.name)
    if describe_inputs(loaded, inputs.model.judged_by, data, inputs.data.split or "", settings).model != inputs.model:
        raise UserError(
            f"{source} is another model on a node of the cluster; put the model on storage that all nodes "
            "share, or give a Hub id"
        )
    return measure_model(loaded, data, inputs, settings, optimize=optimize, progress=False)


def load_sample(loaded: LoadedModel, data: ImageData, split: str, count: int) -> torch.Tensor:
    """Return the first images of a split as the model's input [count, C, H, W], repeatedly if there are too few."""
    table: Any = undecode_images(data.split(split))
    return loaded.pixel_values([decode_image(table[index % len(table)]["image"]) for index in range(count)])


def _measure_accuracy(examination: Examination) -> dict[str, Any]:
    """Return top1, top5, loss and ece for `ModelResult`.

    top5 is None for fewer than five classes, and the loss if the true class of an image has the logit `NEVER`.
    """
    sums = ReliabilitySums()
    num_top5 = classes = 0
    is_finite = True
    for logits, labels in examination.iterate_logits(examination.split):
        is_finite &= bool((logits.gather(1, labels[:, None]) > NEVER / 2).all())
        sums.add(logits.double().numpy(), labels.numpy())
        num_top5 += int((find_largest(logits, 5) == labels[:, None]).sum())
        classes = logits.shape[1]
    images = int(sums.images.sum())
    top1, top5 = (estimate_share(count, images) for count in (int(sums.hits.sum()), num_top5))
    result = sums.result()
    loss = result.loss if is_finite else None
    return {"top1": top1, "top5": top5 if classes >= 5 else None, "loss": loss, "ece": result.ece}


def _measure_robustness(
    examination: Examination, settings: ComparisonSettings, attacks: Sequence[float], gradient_model: nn.Module
) -> dict[str, Any]:
    """Return the accuracy on clean, corrupted and attacked images for `ModelResult`.

    `gradient_model` computes the gradients of the attacks, because an optimized model has none.
    """
    if examination.loaded.resizes or not (settings.corruptions or attacks):
        return {"clean": None, "corruptions": {}, "fgsm": None}
    scale = PixelScale.measure(examination.loaded)

    def make_variants(values: torch.Tensor, labels: torch.Tensor) -> Variants:
        pixels = scale.pixels(values).clamp(0, 1)
        loss = make_loss(gradient_model, scale, labels)
        yield "clean", scale.values(pixels)
        for name in settings.corruptions:
            yield name, scale.values(corrupt_batch(pixels, name, settings.severity, settings.seed))
        for epsilon in attacks:
            yield epsilon, scale.values(fgsm(loss, pixels, epsilon / 255))

    _, accuracy = measure_variants(examination, f"{examination.loaded.name}: robustness", make_variants)
    return {
        "clean": accuracy["clean"],
        "corruptions": {name: accuracy[name] for name in settings.corruptions},
        "fgsm": {f"{epsilon:g}": accuracy[epsilon] for epsilon in attacks} or None,
    }


def estimate_share(hits: int, images: int) -> Share:
    """Return the share `hits / images` with Wilson's 95% interval."""
    from scipy.stats import binomtest

    interval = binomtest(hits, images).proportion_ci(_CONFIDENCE, method="wilson")
    return Share(value=hits / images, low=float(interval.low), high=float(interval.high))


PICTURE_NAME, REPORT_NAME, SPEED_NAME = "comparison.png", "comparison.html", "speed.json"


@final
@dataclass(repr=False)
class Comparison(Displayed):
    """The result of `compare`.

    Attributes:
        data: the images.
        split: the split on which the models were measured.
        subjects: the models, in the order they were given.
        results: the result of every model, in that order.
        speed: the speed of all models in one process; None if it was not measured.
        measured: names of the models that this call measured; the others had finished results.
    """

    data: ImageData
    split: str
    subjects: list[LoadedModel]
    results: list[ModelResult] = field(default_factory=list[ModelResult])
    speed: SpeedResult | None = None
    measured: list[str] = field(default_factory=list[str])

    def overview(self) -> dict[str, object]:
        names = [model.name for model in self.subjects]
        return {"models": shorten_list(names), "data": self.data.name, "split": self.split}


def compare(
    models: Sequence[Any],
    data: str | Path | ImageData,
    output: str | Path,
    *,
    split: str = "test",
    probe: bool = False,
    settings: ComparisonSettings | None = None,
    image_size: tuple[int, int] | None = None,
    skip_bad_images: bool = False,
    image_column: str | None = None,
    label_column: str | None = None,
    device: str | None = None,
    optimize: bool = False,
    runner: str = "local",
    address: str | None = None,
    progress: bool = True,
    report: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare image classifiers by accuracy, calibration, robustness, size and speed.

    Args:
        models: see `load_model`: folders, Hub ids, "timm:NAME", pairs (model, image processor); speeds are relative to
            the first.
        data: see `load_data`; classes and heads are matched by name.
        output: folder for models/NAME.json, speed.json and comparison.md, .csv, .json, .png, .html. Models of which it
            has finished results with the same images and settings are not measured again.
        split: the split on which the models are measured.
        probe: fit a linear probe on the train split for models without a head for these classes.
        settings: corruptions, attacks, numbers of images, turns, seed.
        image_size: (height, width) px of built-in data; by default that of the models if they share one.
        skip_bad_images, image_column, label_column: see `load_data`.
        device: torch device; by default a GPU if there is one.
        optimize: run hf_vit's models on the engine that is worthwhile for so many images (`select_engine`); attacks and
            timings use the models as loaded.
        runner: "ray" measures models given by name in parallel, each on a GPU or on as many cores as here, on machines
            that have models and data under the same names; the speed is measured on this machine.
        address: HOST:PORT of a Ray cluster; by default Ray is started on this machine.
        progress: show progress bars on standard error, except with Ray.
        report: called with a line for every model.

    Raises:
        UserError: a model or the data cannot be read, a model has no head for the classes and `probe` is False, the
            folder has results of other inputs, or another comparison uses it. All of this is checked before any work.
    """
    settings = settings or ComparisonSettings()
    report = report or (lambda line: None)
    folder = Path(output).expanduser()
    refuse_output_in(data, folder)
    is_sized = not isinstance(data, ImageData) and is_builtin(str(data))
    if image_size is not None and not is_sized:
        raise UserError("--image-size only works with built-in data; leave it out, as every model resizes other images")
    if runner == "ray" and not all(isinstance(model, str | PathLike) for model in models):
        raise UserError("Ray cannot load a model object; give folders or Hub ids, or leave runner='ray' out")
    with restored_modes(*models), ExitStack() as lock:  # held after Ray is disconnected, until the tables are written
        with open_runner(runner, address, device) as ray:
            loaded = load_models(models, device)
            size = _choose_image_size(loaded, image_size) if is_sized else None
            columns: dict[str, Any] = dict(image_column=image_column, label_column=label_column)
            columns |= dict(splits=[split, *(("train", "validation") if probe else ())], hash_others=True)
            data = load_data(data, image_size=size, skip_bad_images=skip_bad_images, **columns, check=False)
            if data.readers:
                raise UserError(f"'{data.name}' is a stream, which cannot be read twice; leave --streaming out")
            all_inputs = [
                describe_inputs(model, choose_classifier(model, data, probe), data, split, settings, size)
                for model in loaded
            ]
            for model, inputs in zip(loaded, all_inputs, strict=True):
                check_measurable(model, inputs, data, settings)
            lock.enter_context(_claim_folder(folder))
            names = [re.sub(r"[^\w.-]", "--", inputs.model.name) for inputs in all_inputs]
            files = [folder / "models" / f"{name}.json" for name in names]
            results = [_read_result(file, inputs, optimize) for file, inputs in zip(files, all_inputs, strict=True)]
            missing = [index for index, result in enumerate(results) if result is None]
            for model, result in zip(loaded, results, strict=True):
                if result is not None:
                    report(f"{model.name}: already measured, using the stored result")
            if ray is None:
                options: Any = {"optimize": optimize, "progress": progress}
                new_results = (
                    measure_model(loaded[index], data, all_inputs[index], settings, **options) for index in missing
                )
                numbered_results = enumerate(new_results)
            else:
                from hf_vit.evaluation.ray_runner import run_independent

                tasks = [(str(models[index]), all_inputs[index]) for index in missing]
                numbered_results = run_independent(ray, measure_named, tasks, data, settings, device, optimize)
            for number, result in numbered_results:  # the number counts the missing models alone
                index = missing[number]
                result.write(files[index])
                results[index] = result
                report(f"{loaded[index].name}: measured")
        run = Comparison(data, split, loaded, [result for result in results if result is not None])
        run.measured = [loaded[index].name for index in missing]
        run.speed = _measure_speed(run, folder / SPEED_NAME, settings, report) if settings.speed_turns else None
        for suffix, render in (("md", make_markdown), ("csv", to_csv), ("json", to_json)):
            write_atomically(folder / f"comparison.{suffix}", render(run.results, run.speed))
        save_figure(draw_comparison(run.results, run.speed), folder / PICTURE_NAME)
        write_atomically(folder / REPORT_NAME, make_html(run.results, run.speed, folder / PICTURE_NAME))
    return run


def _choose_image_size(loaded: Sequence[LoadedModel], requested: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the size of built-in images: the requested one, else the models' common input size if images have it."""
    if requested:
        return requested
    sizes = {model.input_size for model in loaded}
    common_size = sizes.pop() if len(sizes) == 1 else None
    return common_size if common_size and max(common_size) <= MAX_PHOTO_SIDE else None


@contextmanager
def _claim_folder(folder: Path) -> Generator[None]:
    """Create and lock the output folder, as two comparisons in one folder could mix their files.

    Raises:
        UserError: the folder is a URL, cannot be written, is in use, or holds results of something else.
    """
    reject_url(folder)
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, wait=False):
        foreign_files = [] if (folder / "models").is_dir() else sorted(folder.glob("comparison.*"))
        if foreign_files:
            raise UserError(
                f"{foreign_files[0]} is not a result of hf-vit compare; choose another --output, or move it"
            )
        yield


def save_comparison(
    run: Comparison, *, command: str | Sequence[str] | None = None, seed: int | None = None
) -> list[str]:
    """Record the results in the facts of every model of this package in a writable folder that was measured now.

    A finished result that an interrupted run did not record is recorded as well.

    Returns:
        The names of these models.
    """
    recorded_models: list[str] = []
    for loaded, result in zip(run.subjects, run.results, strict=True):
        if loaded.folder is None or not is_writable(loaded.folder) or not result.inputs.model.kind.startswith("hf_"):
            continue
        values = result.model_dump(mode="json", exclude={"format", "inputs"}) | {
            "judged_by": result.inputs.model.judged_by,
            "settings": result.inputs.settings,
        }
        if result.name not in run.measured and is_recorded(loaded.folder, "benchmark", values):
            continue
        values["compared_with"] = [other.name for other in run.results if other is not result]
        if run.speed is not None:
            values["speed"] = asdict(run.speed.rows[result.name]) | {"quiet": run.speed.quiet}
        how: Any = {"command": command, "seed": seed, "device": str(loaded.device)}
        record = make_record("benchmark", values=values, data=result.inputs.data, **how)
        loaded.check_same_folder()
        append_record(loaded.folder, record)
        recorded_models.append(result.name)
    return recorded_models


def _measure_speed(
    run: Comparison, path: Path, settings: ComparisonSettings, report: Callable[[str], None]
) -> SpeedResult:
    """Return the stored speed of the same models in the same order on this machine, or measure it."""
    models = [result.inputs.model for result in run.results]
    inputs: Any = dict(models=models, batch_size=settings.speed_batch_size, turns=settings.speed_turns)
    inputs |= dict(threads=torch.get_num_threads(), hardware=read_hardware(str(run.subjects[0].device)))
    stored_result = SpeedResult.read(path)
    if stored_result is not None and all(getattr(stored_result, name) == value for name, value in inputs.items()):
        report("speed: already measured, using the stored result")
        return stored_result
    samples = {
        loaded.name: load_sample(loaded, run.data, run.split, settings.speed_batch_size) for loaded in run.subjects
    }
    classifiers = {
        loaded.name: prepare_timing(loaded, model.judged_by, run.data, samples[loaded.name])
        for loaded, model in zip(run.subjects, models, strict=True)
    }
    speeds, load = measure_forwards(classifiers, samples, settings.speed_turns)
    result = SpeedResult(
        **inputs,
        others_load=round(load, 2),
        quiet=load <= BUSY,
        rows={name: round_floats(asdict(speed)) for name, speed in speeds.items()},
    )
    result.write(path)
    report("speed: measured")
    return result


def _read_result(path: Path, inputs: ComparisonInputs, optimize: bool) -> ModelResult | None:
    """Read the finished result of a model, if there is one.

    Raises:
        UserError: the result has other inputs, which must not be mixed in one table, or without `optimize` it is that
            of an optimized model.
    """
    result = ModelResult.read(path)
    if result is not None and not optimize:
        refuse_optimized_result(path, result.notes)
    if result is not None and (fields := ", ".join(list_differing_fields(result.inputs, inputs))):
        raise UserError(
            f"{path} was measured with other inputs ({fields} differ); choose another --output, or delete the file"
        )
    return result and result.model_copy(update={"inputs": inputs})  # speeds are listed by the name as it is now
