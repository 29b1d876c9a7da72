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

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import BaseModel

from hf_vit.analysis import plots
from hf_vit.analysis.analyses.registry import ANALYSES
from hf_vit.analysis.api import AnalysisRun, analyze
from hf_vit.analysis.frame import AnalysisSettings
from hf_vit.analysis.reading.images import open_images
from hf_vit.analysis.report import write_stage_report
from hf_vit.errors import UserError
from hf_vit.results.writing import write_atomically
from hf_vit.subjects.checkpoint_folders import WORK_FOLDER, checkpoints_in, step_of
from hf_vit.subjects.subject import open_subject

Number = float | None | list[float | None]


@final
class Stage(BaseModel):
    """A checkpoint."""

    name: str
    step: int
    fingerprint: str


@final
class StagesDocument(BaseModel):
    """The numbers of all stages; see the module's table."""

    format: Literal[1] = 1
    stages: list[Stage]
    numbers: dict[str, dict[str, list[Number]]]


def stage_folders(source: Any) -> list[Path]:
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
    images: Any,
    output: str | Path,
    *,
    settings: AnalysisSettings | None = None,
    split: str = "test",
    picture_format: plots.PictureFormat = "png",
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
        options: `only`, `against`, `cue_conflict` and `class_map` of `analyze`.

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
        subject = replace(open_subject(folder, device), folder=None)
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


def _write(document: StagesDocument, output: Path, picture_format: plots.PictureFormat) -> None:
    steps = [stage.step for stage in document.stages]
    pictures: dict[str, str] = {}
    for analysis, numbers in document.numbers.items():
        curves = {
            name.replace("_", " "): np.array(values, dtype=np.float32).reshape(len(steps), -1)
            for name, values in numbers.items()
        }
        name = f"stages_{analysis}.{picture_format}"
        write_atomically(output / name, plots.encode(plots.over_steps(curves, steps), picture_format))
        pictures[name] = ANALYSES[analysis].title
    write_atomically(output / "stages.json", document.model_dump_json(indent=1) + "\n")
    write_stage_report(output, [stage.name for stage in document.stages], pictures)
