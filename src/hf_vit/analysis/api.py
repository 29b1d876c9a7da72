"""`analyze` and `analyze_stages`: make analyses, keep what is finished, write files, a report and facts.

The file of an analysis, `NAME.json`:

| field    | meaning                                                                                                   |
|----------|-----------------------------------------------------------------------------------------------------------|
| format   | version of this table, 1                                                                                  |
| name, title, source, shows | as the analysis says of itself                                                          |
| inputs   | model and against (name, kind, fingerprint of weights and config), images and cue_conflicts (name,        |
|          | fingerprint, split, size, skipped), settings (`AnalysisSettings`)                                         |
| arrays   | name -> axes, shape, unit, meaning, values (nested lists of float32; null for undefined)                  |
| notes    | what else must be said                                                                                    |
| pictures | file name -> title                                                                                        |

The same model, images and settings give the same bytes: no dates, times or paths are in it. Its JSON schema is
`AnalysisDocument.model_json_schema()`.

The same analyses at every stage of a training write OUTPUT/checkpoint-<step>/ as `analyze` does, OUTPUT/stages.json
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
from hf_vit.analysis.cka import CKA, CKABetween
from hf_vit.analysis.distance import AttentionDistance
from hf_vit.analysis.entropy import AttentionEntropy
from hf_vit.analysis.equivariance import Equivariance
from hf_vit.analysis.filters import PatchFilters
from hf_vit.analysis.head_maps import HeadMaps
from hf_vit.analysis.images import AnalysisImages, open_cue_conflicts, open_images
from hf_vit.analysis.permutation import PatchPermutation
from hf_vit.analysis.positions import PositionSimilarity
from hf_vit.analysis.receptive_field import ReceptiveField
from hf_vit.analysis.rollout import AttentionRollout
from hf_vit.analysis.shape_bias import ShapeBias
from hf_vit.display import Displayed
from hf_vit.errors import UserError, enough_memory
from hf_vit.evaluation.reading import refuse_output_in
from hf_vit.hub.card import refresh_card
from hf_vit.loading.folders import WORK_FOLDER, list_checkpoints, parse_step
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import describe_engine, record_engine
from hf_vit.results.documents import Document, ModelInput, differing
from hf_vit.results.facts import Facts, Record, append_record, is_recorded, new_record
from hf_vit.results.figures import PictureFormat, encode_figure, render_report
from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Number = float | None | list[float | None]

# In the order in which they are made and shown: name -> class.
ANALYSES: dict[str, type[Analysis]] = {
    analysis.name: analysis
    for analysis in (
        PatchFilters,
        PositionSimilarity,
        AttentionDistance,
        AttentionEntropy,
        AttentionRollout,
        HeadMaps,
        CKA,
        CKABetween,
        Equivariance,
        PatchPermutation,
        ReceptiveField,
        ShapeBias,
    )
}


@final
class ImagesInput(BaseModel):
    """The images of an analysis."""

    name: str
    fingerprint: str
    split: str | None
    size: int
    skipped: list[str]


@final
class AnalysisInputs(BaseModel):
    """Everything a result depends on; results in one folder share it, but for the inputs that only some have."""

    model: ModelInput
    images: ImagesInput
    settings: dict[str, int | float]
    against: ModelInput | None = None
    cue_conflicts: ImagesInput | None = None


@final
class StoredArray(BaseModel):
    """An array as JSON keeps it."""

    axes: list[str]
    shape: list[int]
    unit: str
    meaning: str
    values: list[Any]

    def array(self) -> NDArray[np.float32]:
        """Return the array, float32."""
        return np.array(self.values, dtype=np.float32).reshape(self.shape)


@final
class AnalysisDocument(Document):
    """One analysis; see the module's table."""

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
        """Return the document of an analysis and its arrays."""
        texts: dict[str, Any] = {key: getattr(analysis, key) for key in ("name", "title", "source", "shows", "notes")}
        stored = {name: _stored(analysis, name, values) for name, values in arrays.items()}
        return cls(**texts, inputs=inputs, arrays=stored, pictures=dict(pictures))


def _stored(analysis: Analysis, name: str, values: NDArray[np.float32]) -> StoredArray:
    spec = analysis.arrays[name]
    if len(spec.axes) != values.ndim:
        raise ValueError(f"{analysis.name}.{name} has {values.ndim} axes; its description names {spec.axes}")
    # The shortest decimals that give the same float32 again.
    decimals: NDArray[Any] = values.astype(np.float32).astype(str).astype(np.float64).astype(object)
    decimals[~np.isfinite(values)] = None
    return StoredArray(
        axes=list(spec.axes), shape=list(values.shape), unit=spec.unit, meaning=spec.meaning, values=decimals.tolist()
    )


@final
@dataclass(eq=False, repr=False)
class AnalysisRun(Displayed, Mapping[str, Arrays]):
    """The result of `analyze`: `run["attention_distance"]["distance"]` is an array [layer, head].

    Attributes:
        subject: the model that was looked at.
        images: the images; `skipped` names those that could not be read.
        arrays: analysis -> its arrays, float32; axes and units as in `ANALYSES[name].arrays`.
        measured: the analyses that were made now; the others were finished before.
        left_out: analysis -> why it does not apply to the model.
        summaries: analysis -> the few numbers that facts.json keeps.
        pictures: file -> title; none without an output folder.
        seconds: wall time of the new analyses.
        record: the record in the model's folder; None where it has none, or nothing was new.
        engine: what computed an optimized model, of the new analyses.
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

    def overview(self) -> dict[str, object]:
        left_out = {"left out": ", ".join(self.left_out)} if self.left_out else {}
        images = f"{self.images.size:,} of {self.images.name}"
        return {"model": self.subject.name, "images": images, "analyses": ", ".join(self), **left_out}

    def __getitem__(self, name: str) -> dict[str, NDArray[np.float32]]:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


REPORT_NAME = "report.html"

_REPORT = """
{%- set model, images = inputs.model, inputs.images %}
<p>A {{ model.kind }} (fingerprint {{ model.fingerprint }}), looked at with {{ images.size }} images of
{{ images.name }}
{%- if images.split %}, split {{ images.split }}{% endif %} (fingerprint {{ images.fingerprint }}).
{%- if images.skipped %} {{ images.skipped | length }} unreadable images were left out:
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
<p>Looked at with {{ one.inputs.cue_conflicts.size }} images of {{ one.inputs.cue_conflicts.name }} (fingerprint
{{ one.inputs.cue_conflicts.fingerprint }}).
{%- if one.inputs.cue_conflicts.skipped %} {{ one.inputs.cue_conflicts.skipped | length }} unreadable images were left
out: {{ one.inputs.cue_conflicts.skipped | join(", ") }}.{% endif %}</p>
{%- endif %}
{%- for title, picture in pictures[one.name] %}
{{ figure(picture, title) }}
{%- endfor %}
{%- for note in one.notes %}
<p class="quiet">{{ note }}</p>
{%- endfor %}
<p class="quiet">{{ one.source }}. Numbers: {{ one.name }}.json</p>
<table class="quiet">
{%- for name, array in one.arrays.items() %}
<tr><td>{{ name }}</td><td>{{ array.axes | join(" x ") }}: {{ array.shape | join(" x ") }}</td><td>{{ array.unit }}</td>
<td>{{ array.meaning }}</td></tr>
{%- endfor %}
</table>
{%- endfor %}
{%- if left_out %}
<h2>Left out</h2>
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
    """Append the results to the facts of the model's folder, and put the pictures beside the weights.

    Results that an earlier, killed run did not record are recorded as well.

    Returns:
        The record; None where the model has no folder, or nothing is new.
    """
    folder = run.subject.folder
    if folder is None:
        return None
    new = {
        name: summary
        for name, summary in run.summaries.items()
        if name in run.measured or not is_recorded(folder, "analysis", {"analyses": {name: summary}})
    }
    if not new:
        return None
    run.subject.need_same_folder()
    pictures: dict[str, str] = {}
    for path, title in run.pictures.items():
        name = f"analysis_{path.name}"
        write_atomically(folder / name, path.read_bytes())
        pictures[name] = title
    values = {"analyses": new, "skipped_images": len(run.images.skipped), "pictures": pictures}
    record = new_record(
        "analysis",
        values=values | record_engine(run.engine),
        command=command,
        seed=seed,
        data=run.images.fact(),
        seconds=run.seconds,
        device=device,
    )
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
    """Run analyses of a model: attention, filters, positions, CKA, inductive biases; also record them in its folder.

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
            what is fastest for so many images (`select_engine`).
        command: what was typed, for the facts.
        report: called with a line for every analysis.
        **choices: fields of `AnalysisSettings` (`num_images=32`).

    Returns:
        The arrays, by analysis and name.

    Raises:
        UserError: an unknown name, one that does not apply to the model, images or a model that cannot be read, or an
            output folder that holds other results.
    """
    settings = replace(settings or AnalysisSettings(), **choices)
    if unknown := [name for name in only or () if name not in ANALYSES]:
        raise UserError(f"unknown analysis {', '.join(unknown)}; choose from {', '.join(ANALYSES)}")
    refuse_output_in(images, output)
    if output is not None and isinstance(model, str | Path) and Path(model).is_dir():
        Facts.load(model)  # damaged facts are told before the work, not after it
    conflicts = None if cue_conflict is None else open_cue_conflicts(cue_conflict)
    if images is None and conflicts is not None and only and set(only) == {ShapeBias.name}:
        images = conflicts.images
    if images is None:
        raise UserError("--images is missing; only shape_bias works with --cue-conflict alone")
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
    applicable = _applicable(only, context, run)
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
        note = "" if analysis.engine is None else f", {describe_engine(analysis.engine)}"
        say(f"{name}: {time.perf_counter() - before:.1f} s{note}")
    for name, document in documents.items():
        run.arrays[name] = {array: stored.array() for array, stored in document.arrays.items()}
        if name not in run.summaries and ANALYSES[name].obstacle(context) is None:
            run.summaries[name] = ANALYSES[name](context).summary(run.arrays[name])
        run.pictures.update({folder / file: title for file, title in document.pictures.items()})
    ordered = [documents[name] for name in ANALYSES if name in documents]
    inputs = ordered[0].inputs
    page = render_report(
        f"{inputs.model.name}: analyses",
        _REPORT,
        heading=inputs.model.name,
        inputs=inputs,
        documents=ordered,
        pictures={one.name: [(title, folder / name) for name, title in one.pictures.items()] for one in ordered},
        left_out=run.left_out,
    )
    write_atomically(folder / REPORT_NAME, page)
    run.seconds = time.perf_counter() - started


def _applicable(only: Sequence[str] | None, context: Context, run: AnalysisRun) -> list[str]:
    """Return the names of the analyses to make; those that do not apply are refused, or left out by default."""
    reasons = {name: analysis.obstacle(context) for name, analysis in ANALYSES.items() if only is None or name in only}
    run.left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if only is not None and run.left_out:
        name = next(iter(run.left_out))
        raise UserError(f"{name} does not apply: {run.left_out[name]}")
    if len(run.left_out) == len(reasons):
        raise UserError(f"no analysis applies to {context.subject.name}: {'; '.join(run.left_out.values())}")
    return [name for name in reasons if name not in run.left_out]


def _measure(analysis: Analysis, run: AnalysisRun) -> Arrays:
    settings = analysis.context.settings
    sizes = f"batches of {settings.batch_size} images, of {settings.cka_batch_size} for CKA"
    remedy = "choose a smaller --batch-size, or for CKA --cka-batch-size; finished analyses are kept"
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
        images=ImagesInput.model_validate(context.images, from_attributes=True),
        settings=asdict(context.settings),
        against=other and ModelInput(**other.describe()),
        cue_conflicts=conflicts and ImagesInput.model_validate(conflicts.images, from_attributes=True),
    )


def _kept(folder: Path, context: Context) -> dict[str, AnalysisDocument]:
    """Return the finished analyses of a folder.

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
            raise UserError(
                f"{folder} holds {name} of another run ({fields} differ); choose another folder or remove it"
            )
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


_STAGES_REPORT = """
<p>{% for stage in stages %}<a href="{{ stage }}/report.html">{{ stage }}</a>{{ ", " if not loop.last }}{% endfor %}.
A line is a layer or depth, the first is dark; numbers: stages.json.</p>
{%- for title, picture in pictures %}
<h2>{{ title }}</h2>
{{ figure(picture, title) }}
{%- endfor %}
"""


@final
class Stage(BaseModel):
    """A checkpoint."""

    name: str
    step: int
    fingerprint: str


@final
class StagesDocument(Document):
    """The numbers of all stages.

    Attributes:
        stages: name, step, and fingerprint of the weights of every checkpoint, by step.
        numbers: analysis -> name -> a number, or a list by layer or depth, for every stage; None where undefined.
    """

    command: ClassVar[str] = "hf-vit analyze"

    stages: list[Stage]
    numbers: dict[str, dict[str, list[Number]]]


def stage_folders(source: object) -> list[Path]:
    """Return the checkpoints with weights in a folder of checkpoints, or in `checkpoints` inside, by step.

    Empty for anything else, also for the folder of a model that holds checkpoints beside its own weights: give the
    folder of the checkpoints to look at them.
    """
    if not isinstance(source, str | Path) or not Path(source).is_dir() or (Path(source) / "config.json").is_file():
        return []
    found = list_checkpoints(Path(source)) or list_checkpoints(Path(source) / WORK_FOLDER)
    return [folder for folder in found if (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))]


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
    """Make analyses of every checkpoint of a run; what is finished in `output` is kept, as by `analyze`.

    Args:
        source: a folder of checkpoint-<step> folders, each with config, weights and image processor.
        images: as in `analyze`; opened once, so that all stages see the same.
        output: the folder; see the module's description.
        settings, split, picture_format, device: as in `analyze`.
        report: called with a line for every stage and analysis.
        options: `only`, `against`, `cue_conflict`, `class_map` and `optimize` of `analyze`.

    Returns:
        The numbers of stages.json; `analyze(checkpoint, ...)` gives the arrays.

    Raises:
        UserError: there is no checkpoint, or whatever `analyze` raises.
    """
    folders, settings, output = stage_folders(source), settings or AnalysisSettings(), Path(output)
    if not folders:
        raise UserError(
            f"{source} holds no checkpoint-<step> folders with weights; give the folder of a run's checkpoints"
        )
    if images is not None:
        images = open_images(images, settings.num_images, split=split, seed=settings.seed)
    say = report or (lambda line: None)
    runs: list[AnalysisRun] = []
    given: dict[str, Any] = {"settings": settings, "picture_format": picture_format, "device": device, "report": report}
    for folder in folders:
        say(f"{folder.name}:")
        # The folder of a checkpoint belongs to its run: nothing is written into it.
        subject = replace(load_model(folder, device), folder=None)
        runs.append(analyze(subject, images, output / folder.name, **options, **given))
    stages = [
        Stage(name=folder.name, step=parse_step(folder), fingerprint=run.subject.fingerprint)
        for folder, run in zip(folders, runs, strict=True)
    ]
    document = StagesDocument(stages=stages, numbers=_numbers(runs))
    _write_stages(document, output, picture_format)
    return document


def _numbers(runs: Sequence[AnalysisRun]) -> dict[str, dict[str, list[Number]]]:
    """Return the numbers and lists of numbers of the analyses that all stages have."""
    found: dict[str, dict[str, list[Number]]] = {}
    for analysis in ANALYSES:
        summaries = [run.summaries.get(analysis, {}) for run in runs]
        for name in summaries[0]:
            values = [summary.get(name) for summary in summaries]
            if not any(isinstance(value, dict | str) for value in values):
                found.setdefault(analysis, {})[name] = values
    return found


def _write_stages(document: StagesDocument, output: Path, picture_format: PictureFormat) -> None:
    steps = [stage.step for stage in document.stages]
    pictures: list[tuple[str, Path]] = []
    for analysis, numbers in document.numbers.items():
        curves = {
            name.replace("_", " "): np.array(values, dtype=np.float32).reshape(len(steps), -1)
            for name, values in numbers.items()
        }
        path = output / f"stages_{analysis}.{picture_format}"
        write_atomically(path, encode_figure(_over_steps(curves, steps), picture_format))
        pictures.append((ANALYSES[analysis].title, path))
    document.write(output / "stages.json")
    names = [stage.name for stage in document.stages]
    page = render_report("Stages of a training", _STAGES_REPORT, stages=names, pictures=pictures)
    write_atomically(output / REPORT_NAME, page)


def _over_steps(curves: Mapping[str, NDArray[np.float32]], steps: Sequence[int]) -> "Figure":
    """One panel an array [stage, depth] (or [stage, 1]): a line a depth, dark to bright, over the training's steps."""
    from matplotlib import colormaps

    def draw(axes: "Axes", values: NDArray[np.float32]) -> None:
        depths = values.shape[1]
        for depth in range(depths):
            color = colormaps["viridis"](depth / max(depths - 1, 1) * 0.9)
            axes.plot(steps, values[:, depth], marker=".", color=color, label=str(depth) if depths > 1 else None)

    return draw_panels(curves, "step", "", draw, fontsize=6, title="place", title_fontsize=6)
