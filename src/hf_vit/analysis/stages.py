"""The same analyses at every stage of a training: all checkpoints of a run, and their numbers over the steps.

OUTPUT/checkpoint-<step>/   what `analyze` writes, for every checkpoint
OUTPUT/stages.json          the numbers that facts keep (`Analysis.summary`), by analysis and stage
OUTPUT/stages_NAME.png      their curves
OUTPUT/report.html          all curves on one page

| field of stages.json | meaning                                                                                      |
|----------------------|----------------------------------------------------------------------------------------------|
| format               | version of this table, 1                                                                     |
| stages               | name, step, and fingerprint of the weights of every checkpoint, by step                      |
| numbers              | analysis -> name -> a number, or a list by layer or depth, for every stage; null: undefined  |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from pydantic import BaseModel

from hf_vit.analysis.analysis import AnalysisSettings
from hf_vit.analysis.api import ANALYSES, REPORT_NAME, AnalysisRun, analyze
from hf_vit.analysis.images import open_images
from hf_vit.errors import UserError
from hf_vit.loading.folders import WORK_FOLDER, checkpoints_in, step_of
from hf_vit.loading.model import load_model
from hf_vit.results.documents import Document
from hf_vit.results.figures import PictureFormat, encode_figure, new_figure, render_report
from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Number = float | None | list[float | None]

_REPORT = """
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
    """The numbers of all stages; see the module's table."""

    command: ClassVar[str] = "hf-vit analyze"

    stages: list[Stage]
    numbers: dict[str, dict[str, list[Number]]]


def stage_folders(source: object) -> list[Path]:
    """The checkpoints with weights in a folder of checkpoints, or in `checkpoints` inside, by step.

    Empty for anything else, also for the folder of a model that holds checkpoints beside its own weights: give the
    folder of the checkpoints to look at them.
    """
    if not isinstance(source, str | Path) or not Path(source).is_dir() or (Path(source) / "config.json").is_file():
        return []
    found = checkpoints_in(Path(source)) or checkpoints_in(Path(source) / WORK_FOLDER)
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
        output: see the module's description.
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
        Stage(name=folder.name, step=step_of(folder), fingerprint=run.subject.fingerprint)
        for folder, run in zip(folders, runs, strict=True)
    ]
    document = StagesDocument(stages=stages, numbers=_numbers(runs))
    _write(document, output, picture_format)
    return document


def _numbers(runs: list[AnalysisRun]) -> dict[str, dict[str, list[Number]]]:
    """Of the analyses that all stages have, what is a number or a list of numbers."""
    found: dict[str, dict[str, list[Number]]] = {}
    for analysis in ANALYSES:
        summaries = [run.summaries.get(analysis, {}) for run in runs]
        for name in summaries[0]:
            values = [summary.get(name) for summary in summaries]
            if not any(isinstance(value, dict | str) for value in values):
                found.setdefault(analysis, {})[name] = values
    return found


def _write(document: StagesDocument, output: Path, picture_format: PictureFormat) -> None:
    steps = [stage.step for stage in document.stages]
    pictures: dict[str, str] = {}
    for analysis, numbers in document.numbers.items():
        curves = {
            name.replace("_", " "): np.array(values, dtype=np.float32).reshape(len(steps), -1)
            for name, values in numbers.items()
        }
        name = f"stages_{analysis}.{picture_format}"
        write_atomically(output / name, encode_figure(_over_steps(curves, steps), picture_format))
        pictures[name] = ANALYSES[analysis].title
    document.write(output / "stages.json")
    page = render_report(
        "Stages of a training",
        _REPORT,
        stages=[stage.name for stage in document.stages],
        pictures=[(title, output / name) for name, title in pictures.items()],
    )
    write_atomically(output / REPORT_NAME, page)


def _over_steps(curves: "Mapping[str, NDArray[np.float32]]", steps: "Sequence[int]") -> "Figure":
    """One panel an array [stage, depth] (or [stage, 1]): a line a depth, dark to bright, over the training's steps."""
    from matplotlib import colormaps

    figure = new_figure(4.4 * len(curves), 3.6)
    for place, (title, values) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), place + 1)
        depths = values.shape[1]
        for depth in range(depths):
            colour = colormaps["viridis"](depth / max(depths - 1, 1) * 0.9)
            axes.plot(steps, values[:, depth], marker=".", color=colour, label=str(depth) if depths > 1 else None)
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=9)
        axes.grid(visible=True, alpha=0.3)
        if depths > 1:
            axes.legend(fontsize=6, title="place", title_fontsize=6)
    return figure
