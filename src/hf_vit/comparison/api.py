"""`compare`: measure models one by one, time them together, and write tables and pictures.

Finished measurements are stored and not repeated.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.comparison.measurement import (
    check_measurable,
    choose_classifier,
    describe_inputs,
    load_sample,
    measure_model,
    measure_named,
    prepare_timing,
)
from hf_vit.comparison.result_files import ComparisonInputs, ComparisonSettings, ModelResult, ModelSpeed, SpeedResult
from hf_vit.comparison.tables import draw_comparison, html, markdown, to_csv, to_json
from hf_vit.data import ImageData, load_data
from hf_vit.data.builtin import MAX_PHOTO_SIDE
from hf_vit.data.sources import is_builtin
from hf_vit.display import Displayed, shortened
from hf_vit.environment import hardware
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import refuse_output_in
from hf_vit.evaluation.runners import open_runner
from hf_vit.loading.model import LoadedModel, load_models
from hf_vit.results.documents import differing_fields
from hf_vit.results.facts import append_record, is_recorded, lock_folder, new_record
from hf_vit.results.figures import save_figure
from hf_vit.results.writing import explain_write_errors, reject_url, write_atomically
from hf_vit.speed.measuring import BUSY, measure_forwards

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
        return {"models": shortened(names), "data": self.data.name, "split": self.split}


def compare(
    models: Sequence[Any],
    data: str | ImageData,
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
    settings, report, folder = settings or ComparisonSettings(), report or (lambda line: None), Path(output)
    refuse_output_in(data, folder)
    if runner == "ray" and not all(isinstance(model, str | PathLike) for model in models):
        raise UserError("Ray cannot load a model object; give the name of every model, or leave --runner ray out")
    with ExitStack() as lock:
        with open_runner(runner, address, device) as ray:
            loaded, size = load_models(models, device), None
            if isinstance(data, str):
                if is_builtin(data):  # use the common input size of the models, up to the largest of built-in data
                    sizes = {model.input_size for model in loaded}
                    common = sizes.pop() if len(sizes) == 1 else None
                    size = image_size or (common if common and max(common) <= MAX_PHOTO_SIDE else None)
                columns: dict[str, Any] = dict(image_column=image_column, label_column=label_column)
                data = load_data(data, image_size=size, skip_bad_images=skip_bad_images, **columns)
            if data.readers:
                raise UserError(f"'{data.name}' is a stream, which cannot be read twice; load it without streaming")
            classifiers = [choose_classifier(model, data, probe) for model in loaded]
            pairs = zip(loaded, classifiers, strict=True)
            all_inputs = [describe_inputs(model, kind, data, split, settings, size) for model, kind in pairs]
            for model, inputs in zip(loaded, all_inputs, strict=True):
                check_measurable(model, inputs, data, settings)
            # Two comparisons in one folder could mix their files, so that the second is refused.
            reject_url(folder)
            with explain_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(lock_folder(folder, wait=False))
            if not (folder / "models").is_dir() and (others := sorted(folder.glob("comparison.*"))):
                raise UserError(f"{others[0]} is not a result of hf-vit compare; choose another folder, or move it")
            names = [re.sub(r"[^\w.-]", "--", inputs.model.name) for inputs in all_inputs]
            files = [folder / "models" / f"{name}.json" for name in names]
            results = {index: _read_result(*pair) for index, pair in enumerate(zip(files, all_inputs, strict=True))}
            missing = [index for index, result in results.items() if result is None]
            for index in sorted(results.keys() - missing):
                report(f"{loaded[index].name}: already measured, the stored result is used")
            if ray is None:
                options: Any = {"optimize": optimize, "progress": progress}
                finished = (
                    (position, measure_model(loaded[index], data, all_inputs[index], settings, **options))
                    for position, index in enumerate(missing)
                )
            else:
                from hf_vit.evaluation.ray_runner import run_independent

                tasks = [(str(models[index]), all_inputs[index]) for index in missing]
                finished = run_independent(ray, measure_named, tasks, data, settings, device, optimize)
            for position, result in finished:
                index = missing[position]
                result.write(files[index])
                results[index] = result
                report(f"{loaded[index].name}: measured")
        run = Comparison(data, split, loaded, [result for result in results.values() if result is not None])
        run.measured = [loaded[index].name for index in missing]
        run.speed = _measure_speed(run, folder / SPEED_NAME, settings, report) if settings.speed_turns else None
        for name, render in (("md", markdown), ("csv", to_csv), ("json", to_json)):
            write_atomically(folder / f"comparison.{name}", render(run.results, run.speed))
        save_figure(draw_comparison(run.results, run.speed), folder / PICTURE_NAME)
        write_atomically(folder / REPORT_NAME, html(run.results, run.speed, folder / PICTURE_NAME))
    return run


def save_comparison(
    run: Comparison, *, command: str | Sequence[str] | None = None, seed: int | None = None
) -> list[str]:
    """Record the results in the facts of every model of this package that is a folder and was measured now.

    A finished result that an interrupted run did not record is recorded as well.

    Returns:
        The names of these models.
    """
    recorded: list[str] = []
    for loaded, result in zip(run.subjects, run.results, strict=True):
        if loaded.folder is None or not result.inputs.model.kind.startswith("hf_"):
            continue
        values = result.model_dump(mode="json", exclude={"format", "inputs"}) | {
            "judged_by": result.inputs.model.judged_by,
            "settings": result.inputs.settings,
        }
        if result.name not in run.measured and is_recorded(loaded.folder, "benchmark", values):
            continue
        values["compared_with"] = [other.name for other in run.results if other is not result]
        if run.speed is not None:
            values["speed"] = run.speed.rows[result.name].model_dump(mode="json") | {"quiet": run.speed.quiet}
        record = new_record("benchmark", values=values, command=command, seed=seed, data=result.inputs.data)
        loaded.need_same_folder()
        append_record(loaded.folder, record)
        recorded.append(result.name)
    return recorded


def _measure_speed(
    run: Comparison, path: Path, settings: ComparisonSettings, report: Callable[[str], None]
) -> SpeedResult:
    """Return the stored speed of the same models in the same order, or measure it."""
    models = [result.inputs.model for result in run.results]
    stored = SpeedResult.read(path)
    inputs = (models, settings.speed_batch_size, settings.speed_turns)
    if stored is not None and (stored.models, stored.batch_size, stored.turns) == inputs:
        report("speed: already measured, the stored result is used")
        return stored
    samples = {
        subject.name: load_sample(subject, run.data, run.split, settings.speed_batch_size) for subject in run.subjects
    }
    classifiers = {
        subject.name: prepare_timing(subject, model.judged_by, run.data, samples[subject.name])
        for subject, model in zip(run.subjects, models, strict=True)
    }
    speeds, load = measure_forwards(classifiers, samples, settings.speed_turns)
    result = SpeedResult(
        models=models,
        batch_size=settings.speed_batch_size,
        turns=settings.speed_turns,
        threads=torch.get_num_threads(),
        hardware=hardware(str(run.subjects[0].device)),
        others_load=round(load, 2),
        quiet=load <= BUSY,
        rows={name: ModelSpeed.from_speed(speed) for name, speed in speeds.items()},
    )
    result.write(path)
    report("speed: measured")
    return result


def _read_result(path: Path, inputs: ComparisonInputs) -> ModelResult | None:
    """Read the finished result of a model, if there is one.

    Raises:
        UserError: the result has other inputs, which must not be mixed in one table.
    """
    result = ModelResult.read(path)
    if result is not None and result.inputs != inputs:
        fields = ", ".join(differing_fields(result.inputs, inputs))
        raise UserError(
            f"{path} was measured with other inputs ({fields} differ); choose another --output, or delete the file"
        )
    return result
