"""What a model's folder keeps of its analyses: a record in facts.json, and the pictures that its card shows."""

from collections.abc import Sequence

from hf_vit.analysis.analysis_run import AnalysisRun
from hf_vit.loading.optimizing import engine_fact
from hf_vit.results.facts import Record, append_record, is_recorded, new_record
from hf_vit.results.writing import write_atomically

PICTURE_PREFIX = "analysis_"


def save_analyses(
    run: AnalysisRun, *, command: str | Sequence[str] | None = None, seed: int | None = None, device: str | None = None
) -> Record | None:
    """Append what was measured to the facts of the model's folder, and put the pictures beside the weights.

    What was found finished is told as well, if a run that was killed did not come to it.

    Returns:
        The record; None where the model has no folder, or nothing new was measured.
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
        name = f"{PICTURE_PREFIX}{path.name}"
        write_atomically(folder / name, path.read_bytes())
        pictures[name] = title
    values = {
        "analyses": new,
        "skipped_images": len(run.images.skipped),
        "pictures": pictures,
        **engine_fact(run.engine),
    }
    record = new_record(
        "analysis",
        values=values,
        command=command,
        seed=seed,
        data=run.images.fact(),
        seconds=run.seconds,
        device=device,
    )
    append_record(folder, record)
    return record
