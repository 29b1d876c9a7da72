"""`compare`: measure models one by one, keep what is finished, time them together, write tables and pictures."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, final

import torch

from hf_vit.comparison.measurement import (
    check,
    inputs_of,
    judged_by,
    measure_model,
    measure_named,
    sample,
    untrained,
)
from hf_vit.comparison.result_files import ComparisonInputs, ComparisonSettings, ModelResult, ModelSpeed, SpeedResult
from hf_vit.comparison.tables import draw_comparison, html, markdown, plain_csv, plain_json
from hf_vit.data import ImageData, load_data
from hf_vit.data.builtin import MAX_PHOTO_SIDE
from hf_vit.data.sources import is_builtin
from hf_vit.display import Displayed, shortened
from hf_vit.environment import hardware
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import refuse_output_in
from hf_vit.evaluation.runners import running
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
    """What `compare` measured.

    Attributes:
        data: the images.
        split: the one that judged.
        subjects: the models, in the order they were given.
        results: what was measured of each, in that order.
        speed: of all in one process; None where it was left out.
        measured: names of the models that were measured now; the others were found finished.
    """

    data: ImageData
    split: str
    subjects: list[LoadedModel]
    results: list[ModelResult] = field(default_factory=list[ModelResult])
    speed: SpeedResult | None = None
    measured: list[str] = field(default_factory=list[str])

    def overview(self) -> dict[str, object]:
        return {"models": shortened([each.name for each in self.subjects]), "data": self.data.name, "split": self.split}


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
    """Put image classifiers side by side.

    Args:
        models: see `load_model`: folders, Hub ids, "timm:NAME", pairs (model, image processor); the first is what the
            speed of the others is told by.
        data: see `load_data`; classes and heads are matched by name.
        output: folder for models/NAME.json, speed.json and comparison.md, .csv, .json, .png, .html. Models that it
            holds finished results of, with the same images and settings, are not measured again.
        split: the images that judge.
        probe: let a linear probe, trained on the train split, answer for models without a head for these classes.
        settings: corruptions, attacks, numbers of images, turns, seed.
        image_size: (height, width) px in which built-in data come; by default the models' own if they share one.
        skip_bad_images, image_column, label_column: see `load_data`.
        device: torch device; by default a GPU where there is one.
        optimize: have models of this package answer through what is fastest for so many images (`select_engine`); all
            are attacked and timed as they were loaded.
        runner: "ray" measures models that are given by their names at once: one on every GPU, or as many cores as here,
            of machines that share models and data under these names; their speed is measured here.
        address: HOST:PORT of a cluster of Ray; by default Ray is started on this machine.
        progress: show bars on standard error; Ray shows none.
        report: called with a line for every model.

    Raises:
        UserError: a model or the data cannot be read, a model has no head for the classes and no probe was asked for,
            the folder holds results of other inputs, or another comparison writes there. All that is found before any
            work.
    """
    settings, say, folder = settings or ComparisonSettings(), report or (lambda line: None), Path(output)
    refuse_output_in(data, folder)
    if runner == "ray" and not all(isinstance(model, str | PathLike) for model in models):
        raise UserError("a model object runs in this process only; leave --runner ray out")
    with ExitStack() as held:
        with running(runner, address, device) as ray:
            loaded, size = load_models(models, device), None
            if isinstance(data, str):
                if is_builtin(data):  # in the size that all models want, up to what built-in data have
                    sizes = {each.input_size for each in loaded}
                    common = sizes.pop() if len(sizes) == 1 else None
                    size = image_size or (common if common and max(common) <= MAX_PHOTO_SIDE else None)
                columns: dict[str, Any] = dict(image_column=image_column, label_column=label_column)
                data = load_data(data, image_size=size, skip_bad_images=skip_bad_images, **columns)
            if data.readers:
                raise UserError(f"'{data.name}' is a stream, which cannot be read twice; load it without streaming")
            # What every result will depend on, and what would stop a measurement, before any work.
            judges = [judged_by(each, data, probe) for each in loaded]
            pairs = zip(loaded, judges, strict=True)
            wanted = [inputs_of(each, judge, data, split, settings, size) for each, judge in pairs]
            for each, inputs in zip(loaded, wanted, strict=True):
                check(each, inputs, data, settings)
            # No other comparison writes there: two at once could both find it empty, and mix their files.
            reject_url(folder)
            with explain_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock_folder(folder, wait=False))
            names = [re.sub(r"[^\w.-]", "--", inputs.model.name) for inputs in wanted]
            files = [folder / "models" / f"{name}.json" for name in names]
            results = {number: _kept(*pair) for number, pair in enumerate(zip(files, wanted, strict=True))}
            missing = [number for number, result in results.items() if result is None]
            for number in sorted(results.keys() - missing):
                say(f"{loaded[number].name}: kept, it was finished before")
            if ray is None:
                options: Any = {"optimize": optimize, "progress": progress}
                finished = (
                    (place, measure_model(loaded[number], data, wanted[number], settings, **options))
                    for place, number in enumerate(missing)
                )
            else:
                from hf_vit.evaluation.ray_runner import independent

                named = [(str(models[number]), wanted[number]) for number in missing]
                finished = independent(ray, measure_named, named, data, settings, device, optimize)
            for place, result in finished:
                number = missing[place]
                result.write(files[number])
                results[number] = result
                say(f"{loaded[number].name}: measured")
        run = Comparison(data, split, loaded, [result for result in results.values() if result is not None])
        run.measured = [loaded[number].name for number in missing]
        run.speed = _speed(run, folder / SPEED_NAME, settings, say) if settings.speed_turns else None
        for name, render in (("md", markdown), ("csv", plain_csv), ("json", plain_json)):
            write_atomically(folder / f"comparison.{name}", render(run.results, run.speed))
        save_figure(draw_comparison(run.results, run.speed), folder / PICTURE_NAME)
        write_atomically(folder / REPORT_NAME, html(run.results, run.speed, folder / PICTURE_NAME))
    return run


def save_comparison(
    run: Comparison, *, command: str | Sequence[str] | None = None, seed: int | None = None
) -> list[str]:
    """Append to the facts of every model of this package that has a folder and was measured now.

    A model that was found finished is told of as well, if a run that was killed did not come to it.

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


def _speed(run: Comparison, path: Path, settings: ComparisonSettings, say: Callable[[str], None]) -> SpeedResult:
    """Return the finished speed of the same models in the same order, or a new one."""
    models = [result.inputs.model for result in run.results]
    kept = SpeedResult.read(path)
    wanted = (models, settings.speed_batch_size, settings.speed_turns)
    if kept is not None and (kept.models, kept.batch_size, kept.turns) == wanted:
        say("speed: kept, it was finished before")
        return kept
    samples = {one.name: sample(one, run.data, run.split, settings.speed_batch_size) for one in run.subjects}
    timed = {
        one.name: untrained(one, model.judged_by, run.data, samples[one.name])
        for one, model in zip(run.subjects, models, strict=True)
    }
    speeds, load = measure_forwards(timed, samples, settings.speed_turns)
    result = SpeedResult(
        models=models,
        batch_size=settings.speed_batch_size,
        turns=settings.speed_turns,
        threads=torch.get_num_threads(),
        hardware=hardware(str(run.subjects[0].device)),
        others_load=round(load, 2),
        quiet=load <= BUSY,
        rows={name: ModelSpeed.of(speed) for name, speed in speeds.items()},
    )
    result.write(path)
    say("speed: measured")
    return result


def _kept(path: Path, wanted: ComparisonInputs) -> ModelResult | None:
    """Return the finished result of a model.

    Raises:
        UserError: one of other inputs: a table must not mix them.
    """
    result = ModelResult.read(path)
    if result is not None and result.inputs != wanted:
        fields = ", ".join(differing_fields(result.inputs, wanted))
        raise UserError(
            f"{path} was measured with other inputs ({fields} differ); choose another --output or remove it"
        )
    return result
