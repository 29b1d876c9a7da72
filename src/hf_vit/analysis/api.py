"""`analyze`: make analyses of a model, keep what is finished, write files and a report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_vit.analysis.analyses.analysis import Analysis, AnalysisSettings, Arrays, Context
from hf_vit.analysis.analyses.registry import ANALYSES
from hf_vit.analysis.analysis_file import AnalysisDocument, AnalysisInputs, ImagesInput
from hf_vit.analysis.analysis_run import AnalysisRun
from hf_vit.analysis.folder_report import write_report
from hf_vit.analysis.reading.cue_conflicts import open_cue_conflicts
from hf_vit.analysis.reading.images import AnalysisImages, open_images
from hf_vit.analysis.saving import save_analyses
from hf_vit.errors import UserError, enough_memory
from hf_vit.evaluation.reading import refuse_output_in
from hf_vit.hub.card import refresh_card
from hf_vit.loading.model import load_model
from hf_vit.loading.optimizing import engine_note
from hf_vit.results.documents import ModelInput, differing
from hf_vit.results.facts import Facts
from hf_vit.results.figures import PictureFormat, encode_figure
from hf_vit.results.writing import write_atomically


def analyze(
    model: object,
    images: object = None,
    output: str | Path | None = None,
    *,
    only: Sequence[str] | None = None,
    against: object = None,
    cue_conflict: str | Path | None = None,
    class_map: str | Path | Mapping[str, Sequence[str]] | None = None,
    settings: AnalysisSettings | None = None,
    split: str = "test",
    picture_format: PictureFormat = "png",
    device: str | None = None,
    optimize: bool = False,
    command: str | Sequence[str] | None = None,
    report: Callable[[str], None] | None = None,
    **choices: Any,
) -> AnalysisRun:
    """Look at how a model sees; what goes into an output folder, its own folder is told of: its facts and its card.

    Args:
        model: see `load_model`: a folder, a Hub id, "timm:NAME", or (model, image processor).
        images: see `open_images`: a folder of images, a data set, or Pillow images. "shape_bias" alone needs none.
        output: folder for NAME.json, pictures and report.html. Analyses that it holds of the same model, images and
            settings are not made again, so that a run that was stopped goes on. None writes nothing.
        only: names of `ANALYSES`; by default all that apply to the model.
        against: a second model, for "cka_between".
        cue_conflict: a folder of images with the shape of one class and the texture of another, for "shape_bias"; see
            `open_cue_conflicts`.
        class_map: for its classes the labels of the model that stand for them, or a JSON file of that; by default the
            label of the class's own name.
        settings: numbers of images, batch sizes, choices, seed.
        split: of a data set.
        picture_format: "png" or "svg".
        device: torch device; by default a GPU where there is one.
        optimize: have "shape_bias", which reads answers alone, be answered by a copy of the model that is computed by
            what is fastest for so many images (`engine_for`).
        command: what was typed, for the facts.
        report: called with a line for every analysis.
        **choices: fields of `AnalysisSettings` (`num_images=32`).

    Returns:
        The arrays, by analysis and name.

    Raises:
        UserError: an unknown name, one that does not apply to the model, images or a model that cannot be read, or an
            output folder that holds other results.
    """
    names, settings = _known(only), replace(settings or AnalysisSettings(), **choices)
    refuse_output_in(images, output)
    if output is not None and isinstance(model, str | Path) and Path(model).is_dir():
        Facts.load(model)  # damaged facts are told before the work, not after it
    conflicts = None if cue_conflict is None else open_cue_conflicts(cue_conflict)
    of_conflicts_alone = all(ANALYSES[name].second_input == "cue_conflicts" for name in names)
    if images is None and conflicts is not None and of_conflicts_alone:
        images = conflicts.images
    if images is None:
        raise UserError("no images were given (--images); only shape_bias can be made of cue conflicts alone")
    subject = load_model(model, device, inside=True)
    context = Context(
        subject,
        open_images(images, settings.num_images, split=split, seed=settings.seed),
        settings,
        against=None if against is None else load_model(against, device, inside=True),
        cue_conflicts=None if conflicts is None else conflicts.for_model(subject, class_map),
        optimize=optimize,
    )
    run = AnalysisRun(subject, context.images)
    applicable = _applicable(names, only is not None, context, run)
    if output is None:
        for name in applicable:
            _measure(ANALYSES[name](context), run)
        return run
    _make(applicable, run, context, Path(output), picture_format, report or (lambda line: None))
    run.record = save_analyses(run, command=command, seed=settings.seed, device=device)
    if subject.folder is not None:
        refresh_card(subject.folder)  # also where a run was killed between the record and the card
    return run


def _make(
    names: Sequence[str],
    run: AnalysisRun,
    context: Context,
    folder: Path,
    picture_format: PictureFormat,
    say: Callable[[str], None],
) -> None:
    """Make what the folder does not hold yet, and the report over all that it holds."""
    documents = _kept(folder, context)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    for name in names:
        if name in documents:
            say(f"{name}: kept, it was finished before")
            continue
        before = time.perf_counter()
        analysis = ANALYSES[name](context)
        documents[name] = _write(analysis, run, folder, picture_format)
        note = "" if analysis.engine is None else f", {engine_note(analysis.engine)}"
        say(f"{name}: {time.perf_counter() - before:.1f} s{note}")
    for name, document in documents.items():
        run.arrays[name] = {array: stored.array() for array, stored in document.arrays.items()}
        if name not in run.summaries and ANALYSES[name].obstacle(context) is None:
            run.summaries[name] = ANALYSES[name](context).summary(run.arrays[name])
        run.pictures.update({folder / file: title for file, title in document.pictures.items()})
    write_report(folder, [documents[name] for name in ANALYSES if name in documents], run.left_out)
    run.seconds = time.perf_counter() - started


def _known(only: Sequence[str] | None) -> list[str]:
    if only is None:
        return list(ANALYSES)
    if unknown := [name for name in only if name not in ANALYSES]:
        raise UserError(f"there is no analysis {', '.join(unknown)}; there are {', '.join(ANALYSES)}")
    return [name for name in ANALYSES if name in only]


def _applicable(names: Sequence[str], asked: bool, context: Context, run: AnalysisRun) -> list[str]:
    applicable: list[str] = []
    for name in names:
        obstacle = ANALYSES[name].obstacle(context)
        if obstacle is None:
            applicable.append(name)
        elif asked:
            raise UserError(f"{name} does not apply: {obstacle}")
        else:
            run.left_out[name] = obstacle
    if not applicable:
        raise UserError(f"no analysis applies to {context.subject.name}: {'; '.join(run.left_out.values())}")
    return applicable


def _measure(analysis: Analysis, run: AnalysisRun) -> Arrays:
    settings = analysis.context.settings
    sizes = f"batches of {settings.batch_size} images, of {settings.cka_batch_size} for CKA"
    remedy = "choose a smaller --batch-size, or for CKA --cka-batch-size; what is finished is kept"
    with enough_memory(f"{analysis.name} ({sizes})", remedy):
        arrays = analysis.measure()
    run.arrays[analysis.name] = arrays
    run.summaries[analysis.name] = analysis.summary(arrays)
    run.measured.append(analysis.name)
    run.engine = analysis.engine or run.engine
    return arrays


def _inputs(context: Context, analysis: type[Analysis]) -> AnalysisInputs:
    other = context.against if analysis.second_input == "against" else None
    conflicts = context.cue_conflicts if analysis.second_input == "cue_conflicts" else None
    return AnalysisInputs(
        model=ModelInput(**context.subject.describe()),
        images=_images_input(context.images),
        settings=asdict(context.settings),
        against=None if other is None else ModelInput(**other.describe()),
        cue_conflicts=None if conflicts is None else _images_input(conflicts.images),
    )


def _images_input(images: AnalysisImages) -> ImagesInput:
    return ImagesInput(
        name=images.name,
        fingerprint=images.fingerprint,
        split=images.split,
        size=images.size,
        skipped=images.skipped,
    )


def _kept(folder: Path, context: Context) -> dict[str, AnalysisDocument]:
    """The finished analyses of a folder.

    Raises:
        UserError: one of another model, other images or other settings: a report must not mix them.
    """
    documents: dict[str, AnalysisDocument] = {}
    for name, analysis in ANALYSES.items():
        document = AnalysisDocument.read(folder / f"{name}.json")
        if document is None or not all((folder / picture).is_file() for picture in document.pictures):
            continue
        wanted, second = _inputs(context, analysis), analysis.second_input
        if second is not None and getattr(context, second) is None:  # it is not asked for: the finished result stays
            setattr(wanted, second, getattr(document.inputs, second))
        if document.inputs != wanted:
            fields = ", ".join(differing(document.inputs, wanted))
            raise UserError(f"{folder} holds {name} of other inputs ({fields}); choose another folder or remove it")
        documents[name] = document
    return documents


def _write(analysis: Analysis, run: AnalysisRun, folder: Path, picture_format: PictureFormat) -> AnalysisDocument:
    """Measure, draw, and last write NAME.json, which says that the analysis is finished."""
    arrays = _measure(analysis, run)
    pictures: dict[str, str] = {}
    for place, (title, figure) in enumerate(analysis.draw(arrays).items()):
        name = f"{analysis.name}{f'_{place + 1}' if place else ''}.{picture_format}"
        write_atomically(folder / name, encode_figure(figure, picture_format))
        pictures[name] = title
    document = AnalysisDocument.of(analysis, arrays, _inputs(analysis.context, type(analysis)), pictures)
    document.write(folder / f"{analysis.name}.json")
    return document
