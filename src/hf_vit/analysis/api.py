"""`analyze` and `analyze_stages` run analyses and write their files, a report and records; finished ones are kept.

Every analysis writes a file `NAME.json`:

| field    | meaning                                                                                                   |
|----------|-----------------------------------------------------------------------------------------------------------|
| format   | version of this table, 1                                                                                  |
| name, title, source, shows | attributes of the `Analysis`                                                            |
| inputs   | model and against (name, kind, fingerprint of weights and config), images and cue_conflicts (name,        |
|          | fingerprint, split, size, skipped), settings (`AnalysisSettings`), processor and against_processor        |
|          | (fingerprints of the fields of the image processors)                                                      |
| arrays   | name -> axes, shape, unit, meaning, values (nested lists of float32; null for undefined)                  |
| notes    | further remarks                                                                                           |
| pictures | file name -> title                                                                                        |

The same model, images and settings give the same bytes, as the file holds no dates, times or paths. Its JSON schema is
`AnalysisDocument.model_json_schema()`.

`analyze_stages` writes OUTPUT/checkpoint-<step>/ for every checkpoint as `analyze` does, OUTPUT/stages.json
(`StagesDocument`), its curves in OUTPUT/stages_NAME.png, and OUTPUT/report.html.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from hf_vit.analysis.analysis import Analysis, AnalysisSettings, Arrays, Context, draw_panels
from hf_vit.analysis.images import AnalysisImages, open_cue_conflicts, open_images
from hf_vit.analysis.permutation import SHARES
from hf_vit.analysis.registry import ANALYSES
from hf_vit.analysis.shape_bias import ShapeBias
from hf_vit.data.sources import refuse_output_in
from hf_vit.data.transforms import keeps_shapes
from hf_vit.display import Displayed
from hf_vit.errors import UserError, report_full_memory
from hf_vit.evaluation.reading import restored_modes
from hf_vit.families import refuse_diverged
from hf_vit.hub.card import refresh_card
from hf_vit.loading.folders import WORK_FOLDER, list_checkpoints, parse_step
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import describe_engine, record_engine, refuse_optimized_result
from hf_vit.results.documents import Document, ModelInput, list_differing_fields
from hf_vit.results.facts import Facts, Record, append_record, is_recorded, lock_folder, make_record
from hf_vit.results.figures import PictureFormat, encode_figure, render_report
from hf_vit.writing import is_writable, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Number = float | None | list[float | None]


@final
class ImagesInput(BaseModel):
    """The images of an analysis, as its file describes them."""

    name: str
    fingerprint: str
    split: str | None
    size: int
    skipped: list[str]


@final
class AnalysisInputs(BaseModel):
    """Everything a result depends on.

    All results in a folder have the same model, images and settings; `against` and `cue_conflicts` belong to single
    analyses.
    """

    model: ModelInput
    images: ImagesInput
    settings: dict[str, int | float]
    processor: str | None = None  # fingerprint of its fields
    against: ModelInput | None = None
    against_processor: str | None = None
    cue_conflicts: ImagesInput | None = None


@final
class StoredArray(BaseModel):
    """An array in an analysis file."""

    axes: list[str]
    shape: list[int]
    unit: str
    meaning: str
    values: list[Any]

    def array(self) -> NDArray[np.float32]:
        """Return the array as float32."""
        return np.array(self.values, dtype=np.float32).reshape(self.shape)


@final
class AnalysisDocument(Document):
    """The file of one analysis; the module's docstring lists its fields."""

    command: ClassVar[str] = "hf-vit analyze"

    name: str
    title: str
    source: str
    shows: str
    inputs: AnalysisInputs
    arrays: dict[str, StoredArray]
    notes: list[str] = Field(default_factory=list[str])
    pictures: dict[str, str] = Field(default_factory=dict[str, str])

    @classmethod
    def of(cls, analysis: Analysis, arrays: Arrays, inputs: AnalysisInputs, pictures: Mapping[str, str]) -> Self:
        """Return the document of an analysis with its arrays, inputs and plots (file -> title)."""
        names = ("name", "title", "source", "shows", "notes")
        attributes: dict[str, Any] = {name: getattr(analysis, name) for name in names}
        stored_arrays = {name: _store_array(analysis, name, values) for name, values in arrays.items()}
        return cls(**attributes, inputs=inputs, arrays=stored_arrays, pictures=dict(pictures))


def _store_array(analysis: Analysis, name: str, values: NDArray[np.float32]) -> StoredArray:
    """Return an array with its axes, unit and meaning; NaN and infinities become None."""
    spec = analysis.arrays[name]
    if len(spec.axes) != values.ndim:
        raise ValueError(
            f"{analysis.name}.{name} has {values.ndim} axes, but its description names {spec.axes}; correct one of them"
        )
    # Through text, each value becomes the shortest decimal that gives the same float32.
    decimals: NDArray[Any] = values.astype(np.float32).astype(str).astype(np.float64).astype(object)
    decimals[~np.isfinite(values)] = None
    axes, shape = list(spec.axes), list(values.shape)
    return StoredArray(axes=axes, shape=shape, unit=spec.unit, meaning=spec.meaning, values=decimals.tolist())


@final
@dataclass(eq=False, repr=False)
class AnalysisRun(Displayed, Mapping[str, Arrays]):
    """The result of `analyze`; `run["attention_distance"]["distance"]` is an array [layer, head].

    Attributes:
        subject: the model.
        images: the images; `skipped` lists unreadable ones.
        arrays: analysis -> its float32 arrays; axes and units are in `ANALYSES[name].arrays`.
        measured: analyses that ran now; the others were finished before.
        left_out: analysis -> why it does not apply to the model.
        summaries: analysis -> numbers recorded in facts.json.
        pictures: file -> title; empty without an output folder.
        seconds: wall time of the new analyses.
        record: record in the model's folder; None if it has no folder or nothing is new.
        engine: the engine that ran an optimized model, if one was used.
        cue_conflicts: the images of "shape_bias".
    """

    subject: LoadedModel
    images: AnalysisImages
    arrays: dict[str, Arrays] = field(default_factory=dict[str, Arrays])
    measured: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    pictures: dict[Path, str] = field(default_factory=dict[Path, str])
    seconds: float = 0.0
    record: Record | None = None
    engine: str | None = None
    cue_conflicts: AnalysisImages | None = None
    _durations: dict[str, float] = field(default_factory=dict[str, float], init=False)  # of each new analysis

    def overview(self) -> dict[str, object]:
        """Return model, images and analyses, and the analyses that were not run."""
        not_run = {"not run": ", ".join(self.left_out)} if self.left_out else {}
        images = f"{self.images.size:,} of {self.images.name}"
        return {"model": self.subject.name, "images": images, "analyses": ", ".join(self), **not_run}

    def __getitem__(self, name: str) -> dict[str, NDArray[np.float32]]:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


REPORT_NAME = "report.html"

_REPORT = """
{%- set model, images = inputs.model, inputs.images %}
<p>A {{ model.kind }} (fingerprint {{ model.fingerprint }}), analyzed with {{ images.size }} images of
{{ images.name }}
{%- if images.split %}, split {{ images.split }}{% endif %} (fingerprint {{ images.fingerprint }}).
{%- if images.skipped %} {{ images.skipped | length }} unreadable images were skipped:
{{ images.skipped | join(", ") }}.{% endif %}</p>
<p class="quiet">
{%- for name, value in inputs.settings.items() if name != "num_images" %}
{{- name }} {{ value }}{{ ", " if not loop.last }}{% endfor %}</p>
{%- for one in documents %}
<h2>{{ one.title }}</h2>
<p>{{ one.shows }}</p>
{%- if one.inputs.against %}
<p>Compared with {{ one.inputs.against.name }}, a {{ one.inputs.against.kind }}
(fingerprint {{ one.inputs.against.fingerprint }}).</p>
{%- endif %}
{%- if one.inputs.cue_conflicts %}
<p>Analyzed with {{ one.inputs.cue_conflicts.size }} images of {{ one.inputs.cue_conflicts.name }} (fingerprint
{{ one.inputs.cue_conflicts.fingerprint }}).
{%- if one.inputs.cue_conflicts.skipped %} {{ one.inputs.cue_conflicts.skipped | length }} unreadable images were
skipped: {{ one.inputs.cue_conflicts.skipped | join(", ") }}.{% endif %}</p>
{%- endif %}
{%- for title, picture in pictures[one.name] %}
{{ figure(picture, title) }}
{%- endfor %}
{%- for note in one.notes %}
<p class="quiet">{{ note }}</p>
{%- endfor %}
<p class="quiet">{{ one.source }}. The numbers are in {{ one.name }}.json</p>
<table class="quiet">
{%- for name, array in one.arrays.items() %}
<tr><td>{{ name }}</td><td>{{ array.axes | join(" x ") }}: {{ array.shape | join(" x ") }}</td><td>{{ array.unit }}</td>
<td>{{ array.meaning }}</td></tr>
{%- endfor %}
</table>
{%- endfor %}
{%- if left_out %}
<h2>Not run</h2>
<ul>
{%- for name, reason in left_out.items() %}
<li>{{ name }}: {{ reason }}</li>
{%- endfor %}
</ul>
{%- endif %}
"""


def save_analyses(
    run: AnalysisRun, *, command: str | Sequence[str] | None = None, seed: int | None = None, device: str | None = None
) -> Record | None:
    """Record results in facts.json of the model's folder, and copy the plots beside the weights.

    Results of an earlier run that was killed before it recorded them are recorded as well. "shape_bias" has a record of
    its own, as it reads other images.

    Args:
        run: the results.
        command, seed, device: see `make_record`.

    Returns:
        The last record; None if the model has no folder, or a read-only one, or nothing is new.
    """
    folder = run.subject.folder
    if folder is None or not is_writable(folder):
        return None
    record = None
    for images, has_conflicts in ((run.images, False), (run.cue_conflicts, True)):
        new = {
            name: summary
            for name, summary in run.summaries.items()
            if (name == ShapeBias.name) == has_conflicts
            and (name in run.measured or not is_recorded(folder, "analysis", {"analyses": {name: summary}}))
        }
        if images is None or not new:
            continue
        run.subject.check_same_folder()
        pictures: dict[str, str] = {}
        for path, title in run.pictures.items():
            if (path.stem == ShapeBias.name) == has_conflicts:
                pictures[f"analysis_{path.name}"] = title
                write_atomically(folder / f"analysis_{path.name}", path.read_bytes())
        values = {"analyses": new, "skipped_images": len(images.skipped), "pictures": pictures}
        values |= record_engine(run.engine) if has_conflicts else {}
        options: dict[str, Any] = {"command": command, "seed": seed, "device": device}
        if new.keys() <= run._durations.keys():  # how long a run took that was killed is not known
            options["seconds"] = sum(run._durations[name] for name in new)
        record = make_record("analysis", values=values, data=images.fact(), **options)
        append_record(folder, record)
    return record


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
    """Run analyses of a model (attention, filters, positions, CKA, inductive biases) and record them in its folder.

    Args:
        model: a folder, a Hub id, "timm:NAME", or (model, image processor); see `load_model`.
        images: a folder of images, a data set, or Pillow images; see `open_images`. "shape_bias" alone needs none.
        output: folder for NAME.json, plots and report.html; None writes nothing. Analyses that it already holds for the
            same model, images and settings are kept, so that an interrupted run continues.
        only: names in `ANALYSES`; by default all that apply to the model.
        against: second model, for "cka_between".
        cue_conflict: folder of images with the shape of one class and the texture of another, for "shape_bias"; see
            `open_cue_conflicts`.
        class_map: maps these classes to lists of the model's labels, or a JSON file with such a map; by default the
            label has the class's name.
        settings: numbers of images, batch sizes, seed.
        split: split of a data set.
        picture_format: "png" or "svg".
        device: torch device; by default a GPU if there is one.
        optimize: run "shape_bias", which needs only predictions, on an optimized copy of the model.
        command: the command that was run, for the record.
        report: called with a line of text after every analysis.
        **choices: fields of `AnalysisSettings`, such as `num_images=32`.

    Returns:
        The arrays by analysis and name.

    Raises:
        UserError: an analysis is unknown or does not apply, images or model cannot be read, or the output folder holds
            results of other inputs.
    """
    settings = replace(settings or AnalysisSettings(), **choices)
    only = [only] if isinstance(only, str) else only
    unknown_names = [name for name in only or () if name not in ANALYSES]
    if unknown_names:
        raise UserError(f"the analysis {', '.join(unknown_names)} is unknown; choose from {', '.join(ANALYSES)}")
    refuse_output_in(images, output)
    if output is not None and isinstance(model, str | Path) and Path(model).is_dir():
        Facts.load(model)  # raises for damaged facts before the work begins
    conflicts = None if cue_conflict is None else open_cue_conflicts(cue_conflict)
    if images is None and conflicts is not None and {*(only or ())} == {ShapeBias.name}:
        images = conflicts.images  # it reads no others
    if images is None:
        raise UserError(
            "--images is missing, and only shape_bias works with --cue-conflict alone; give a folder of "
            "images or a data set with --images"
        )
    with restored_modes(model, against):
        loaded = load_model(model, device, inside=True)
        context = Context(
            loaded,
            open_images(images, settings.num_images, split=split, seed=settings.seed),
            settings,
            against=None if against is None else load_model(against, device, inside=True),
            cue_conflicts=None if conflicts is None else conflicts.for_model(loaded, class_map),
            optimize=optimize,
        )
        for each in filter(None, (loaded, context.against)):
            refuse_diverged(each.model, each.name, "analyzed")
        run = AnalysisRun(loaded, context.images)
        run.cue_conflicts = None if context.cue_conflicts is None else context.cue_conflicts.images
        applicable = _select_applicable(only, context, run)
        if output is None:  # nothing is written, recorded or reported
            for name in applicable:
                _measure(ANALYSES[name](context), run)
            return run
        folder = Path(output).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder, wait=False):  # two runs in one folder could mix their files
            _run_analyses(applicable, run, context, folder, picture_format, report or (lambda line: None))
        run.record = save_analyses(run, command=command, seed=settings.seed, device=device)
        if loaded.folder is not None and is_writable(loaded.folder):
            refresh_card(loaded.folder)  # also if an earlier run was killed between the record and the card
        return run


def _run_analyses(
    names: Sequence[str],
    run: AnalysisRun,
    context: Context,
    folder: Path,
    picture_format: PictureFormat,
    report: Callable[[str], None],
) -> None:
    """Run the analyses that the folder does not hold yet, add them to the run, and write a report of all of them."""
    documents = _read_finished(folder, context)  # by name
    for name in names:
        if name in documents:
            report(f"{name} was already finished; its result is kept")
            continue
        start = time.perf_counter()
        analysis = ANALYSES[name](context)
        documents[name] = _run_and_write(analysis, run, folder, picture_format)
        run._durations[name] = time.perf_counter() - start
        note = "" if analysis.engine is None else f", {describe_engine(analysis.engine)}"
        report(f"{name} finished in {run._durations[name]:.1f} s{note}")
    for name, document in documents.items():
        run.arrays[name] = {array: stored_array.array() for array, stored_array in document.arrays.items()}
        # An earlier run that was killed may not have recorded the summary of its result.
        if name not in run.summaries and ANALYSES[name].find_obstacle(context) is None:
            run.summaries[name] = ANALYSES[name](context).summary(run.arrays[name])
        run.pictures.update({folder / file: title for file, title in document.pictures.items()})
    ordered = [documents[name] for name in ANALYSES if name in documents]
    inputs = ordered[0].inputs
    pictures = {one.name: [(title, folder / name) for name, title in one.pictures.items()] for one in ordered}
    page = render_report(
        f"{inputs.model.name}: analyses",
        _REPORT,
        heading=inputs.model.name,
        inputs=inputs,
        documents=ordered,
        pictures=pictures,
        left_out=run.left_out,
    )
    write_atomically(folder / REPORT_NAME, page)
    run.seconds = sum(run._durations.values())


def _select_applicable(only: Sequence[str] | None, context: Context, run: AnalysisRun) -> list[str]:
    """Return the names of the analyses that apply; add to `run.left_out` why others do not, which `only` forbids."""
    models = [context.loaded] if context.against is None else [context.loaded, context.against]
    has_own_shapes = any(keeps_shapes(model.processor) for model in models)
    names = [name for name in ANALYSES if only is None or name in only]
    for name in names:
        reason = ANALYSES[name].find_obstacle(context)
        if reason is None and has_own_shapes and ANALYSES[name].reads_images:
            reason = "it needs images of one size, but the model's image processor keeps their shape (max_num_patches)"
        if reason is not None:
            run.left_out[name] = reason
    if only is not None and run.left_out:
        name, reason = next(iter(run.left_out.items()))
        raise UserError(f"{name} cannot be applied: {reason}")
    if len(run.left_out) == len(names):
        raise UserError(
            f"no analysis can be applied to {context.loaded.name}: {'; '.join(run.left_out.values())}; give "
            "another model"
        )
    return [name for name in names if name not in run.left_out]


def _measure(analysis: Analysis, run: AnalysisRun) -> Arrays:
    """Run one analysis and add its result to the run."""
    settings = analysis.context.settings
    sizes = f"batches of {settings.batch_size} images, of {settings.cka_batch_size} for CKA"
    remedy = "choose a smaller --batch-size, or for CKA --cka-batch-size; finished analyses are kept"
    with report_full_memory(f"{analysis.name} ({sizes})", remedy):
        arrays = analysis.measure()
    run.arrays[analysis.name] = arrays
    run.summaries[analysis.name] = analysis.summary(arrays)
    run.measured.append(analysis.name)
    run.engine = analysis.engine or run.engine
    return arrays


def _describe_inputs(context: Context, analysis: type[Analysis]) -> AnalysisInputs:
    """Return the inputs that a result of this analysis depends on."""
    second_model = context.against if analysis.second_input == "against" else None
    conflicts = context.cue_conflicts if analysis.second_input == "cue_conflicts" else None
    return AnalysisInputs(
        model=ModelInput(**context.loaded.describe()),
        images=ImagesInput.model_validate(context.images, from_attributes=True),
        settings=asdict(context.settings),
        processor=context.loaded.processor_fingerprint,
        against=None if second_model is None else ModelInput(**second_model.describe()),
        against_processor=None if second_model is None else second_model.processor_fingerprint,
        cue_conflicts=None if conflicts is None else ImagesInput.model_validate(conflicts.images, from_attributes=True),
    )


def _read_finished(folder: Path, context: Context) -> dict[str, AnalysisDocument]:
    """Return the finished analyses in a folder; raise UserError for other inputs, which a report must not mix."""
    if (folder / REPORT_NAME).exists() and not any((folder / f"{name}.json").exists() for name in ANALYSES):
        raise UserError(
            f"{folder / REPORT_NAME} is not a report of hf-vit analyze; choose another --output, or move it"
        )
    documents: dict[str, AnalysisDocument] = {}
    for name, analysis in ANALYSES.items():
        document = AnalysisDocument.read(folder / f"{name}.json")
        if document is None or not all((folder / picture).is_file() for picture in document.pictures):
            continue
        inputs = _describe_inputs(context, analysis)
        for field_name in ("processor", "against_processor"):  # results of 0.2 have none
            if None in (getattr(inputs, field_name), getattr(document.inputs, field_name)):
                setattr(inputs, field_name, getattr(document.inputs, field_name))
        second_input = analysis.second_input
        if second_input is not None and getattr(context, second_input) is None:
            # This input was not given now, so the finished result stays.
            setattr(inputs, second_input, getattr(document.inputs, second_input))
        elif not context.optimize:
            refuse_optimized_result(folder / f"{name}.json", document.notes)
        if fields := ", ".join(list_differing_fields(document.inputs, inputs)):
            raise UserError(
                f"{folder} holds {name} of a run with other inputs ({fields} differ); choose another --output"
            )
        documents[name] = document
    return documents


def _run_and_write(
    analysis: Analysis, run: AnalysisRun, folder: Path, picture_format: PictureFormat
) -> AnalysisDocument:
    """Run an analysis, draw it, and write NAME.json last, which marks it as finished."""
    arrays = _measure(analysis, run)
    pictures: dict[str, str] = {}
    for index, (title, figure) in enumerate(analysis.draw(arrays).items()):
        name = f"{analysis.name}{f'_{index + 1}' if index else ''}.{picture_format}"
        write_atomically(folder / name, encode_figure(figure, picture_format))
        pictures[name] = title
    document = AnalysisDocument.of(analysis, arrays, _describe_inputs(analysis.context, type(analysis)), pictures)
    document.write(folder / f"{analysis.name}.json")
    return document


_STAGES_REPORT = """
<p>{% for stage in stages %}<a href="{{ stage }}/report.html">{{ stage }}</a>{{ ", " if not loop.last }}{% endfor %}.
Every line is a layer, depth or share; the first is dark. The numbers are in stages.json.</p>
{%- for title, picture in pictures %}
<h2>{{ title }}</h2>
{{ figure(picture, title) }}
{%- endfor %}
"""


@final
class Stage(BaseModel):
    """A checkpoint of a training."""

    name: str
    step: int
    fingerprint: str


@final
class StagesDocument(Document):
    """The numbers of all checkpoints.

    Attributes:
        stages: name, step and weight fingerprint of every checkpoint, in order of steps.
        numbers: analysis -> name -> one entry per stage: a number, or a list by layer or depth; None if undefined.
    """

    command: ClassVar[str] = "hf-vit analyze"

    stages: list[Stage]
    numbers: dict[str, dict[str, list[Number]]]


def stage_folders(source: object) -> list[Path]:
    """Return the checkpoints with weights in a folder, or in its subfolder `checkpoints`, in order of steps.

    The list is empty for other sources, also for a model folder that contains checkpoints: give its `checkpoints`
    folder to analyze them.
    """
    if not isinstance(source, str | Path) or not Path(source).is_dir() or (Path(source) / "config.json").is_file():
        return []
    folders = list_checkpoints(Path(source)) or list_checkpoints(Path(source) / WORK_FOLDER)
    return [folder for folder in folders if (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))]


def analyze_stages(
    source: str | Path,
    images: object,
    output: str | Path,
    *,
    settings: AnalysisSettings | None = None,
    split: str = "test",
    picture_format: PictureFormat = "png",
    device: str | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> StagesDocument:
    """Run analyses of every checkpoint of a training; finished ones in `output` are kept, as by `analyze`.

    Args:
        source: a folder of checkpoint-<step> folders, each with config, weights and image processor.
        images: as in `analyze`; all checkpoints see the same images.
        output: output folder; its files are listed in the module's docstring.
        settings, split, picture_format, device: as in `analyze`.
        report: called with a line of text for every checkpoint and analysis.
        options: `only`, `against`, `cue_conflict`, `class_map` and `optimize` of `analyze`.

    Returns:
        The numbers of stages.json; for the arrays, call `analyze(checkpoint, ...)`.

    Raises:
        UserError: there is no checkpoint, or an error of `analyze`.
    """
    folders = stage_folders(source)
    settings = settings or AnalysisSettings()
    output = Path(output).expanduser()
    if not folders:
        raise UserError(
            f"{source} holds no checkpoint-<step> folders with weights; give the output folder of a training "
            "with --keep-checkpoints"
        )
    if images is not None:
        images = open_images(images, settings.num_images, split=split, seed=settings.seed)
    report_line = report or (lambda line: None)
    runs: list[AnalysisRun] = []
    options |= {"settings": settings, "picture_format": picture_format, "device": device, "report": report}
    for folder in folders:
        report_line(f"{folder.name}:")
        # folder=None: nothing is recorded in a checkpoint's folder, which belongs to the training.
        loaded = replace(load_model(folder, device), folder=None)
        runs.append(analyze(loaded, images, output / folder.name, **options))
    pairs = [(folder, run.subject.fingerprint) for folder, run in zip(folders, runs, strict=True)]
    stages = [Stage(name=folder.name, step=parse_step(folder), fingerprint=digest) for folder, digest in pairs]
    document = StagesDocument(stages=stages, numbers=_collect_numbers(runs))
    _write_stages(document, output, picture_format)
    return document


def _collect_numbers(runs: Sequence[AnalysisRun]) -> dict[str, dict[str, list[Number]]]:
    """Return the summaries' numbers and lists of numbers by analysis and name, one entry per run."""
    numbers: dict[str, dict[str, list[Number]]] = {}
    for analysis in ANALYSES:
        summaries = [run.summaries.get(analysis, {}) for run in runs]
        for name in summaries[0]:
            values = [summary.get(name) for summary in summaries]
            if not any(isinstance(value, dict | str) for value in values):
                numbers.setdefault(analysis, {})[name] = values
    return numbers


def _write_stages(document: StagesDocument, output: Path, picture_format: PictureFormat) -> None:
    """Write stages.json, the plots over steps, and the report."""
    steps = [stage.step for stage in document.stages]
    pictures: list[tuple[str, Path]] = []
    for analysis, numbers in document.numbers.items():
        arrays = {name: np.array(values, dtype=np.float32) for name, values in numbers.items()}
        curves = {name: values.reshape(len(steps), -1) for name, values in arrays.items()}
        path = output / f"stages_{analysis}.{picture_format}"
        write_atomically(path, encode_figure(_draw_over_steps(curves, steps), picture_format))
        pictures.append((ANALYSES[analysis].title, path))
    document.write(output / "stages.json")
    names = [stage.name for stage in document.stages]
    page = render_report("Stages of a training", _STAGES_REPORT, stages=names, pictures=pictures)
    write_atomically(output / REPORT_NAME, page)


def _draw_over_steps(curves: Mapping[str, NDArray[np.float32]], steps: Sequence[int]) -> "Figure":
    """Draw a panel per array [stage, ...] with a line per layer, depth or share over the steps, from dark to bright.

    The end of an array's name says what its lines are; layers are numbered from 1 on as in the plots of a checkpoint.
    """
    from matplotlib import colormaps

    def draw_panel(axes: "Axes", name_and_values: tuple[str, NDArray[np.float32]]) -> None:
        """Draw values [stage, line] over the steps."""
        name, values = name_and_values
        kind, count = name.rpartition("_by_")[2], values.shape[1]
        labels = [f"{kind} {index + (kind == 'layer')}" for index in range(count)]
        if kind == "share":
            labels = [f"{share:.0%}" for share in SHARES]
        for index, label in enumerate(labels):
            color = colormaps["viridis"](index / max(count - 1, 1) * 0.9)
            axes.plot(steps, values[:, index], marker=".", color=color, label=label if count > 1 else None)

    panels = {name.replace("_", " "): (name, values) for name, values in curves.items()}
    return draw_panels(panels, "step", "", draw_panel, fontsize=6)
