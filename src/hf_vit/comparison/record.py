"""What the folders of compared models keep: a record in facts.json."""

from collections.abc import Sequence

from hf_vit.comparison.api import Comparison
from hf_vit.results.facts import append_record, new_record


def save_comparison(
    run: Comparison, *, command: str | Sequence[str] | None = None, seed: int | None = None
) -> list[str]:
    """Append to the facts of every model of this package that has a folder and was measured now.

    Returns:
        The names of these models.
    """
    recorded: list[str] = []
    for contestant, result in zip(run.contestants, run.results, strict=True):
        folder = contestant.subject.folder
        if folder is None or result.name not in run.measured or not result.inputs.model.kind.startswith("hf_"):
            continue
        values = result.model_dump(mode="json", exclude={"format", "inputs"}) | {
            "judged_by": result.inputs.model.judged_by,
            "compared_with": [other.name for other in run.results if other is not result],
            "settings": result.inputs.settings,
        }
        if run.speed is not None:
            values["speed"] = run.speed.rows[result.name].model_dump(mode="json") | {"quiet": run.speed.quiet}
        record = new_record("benchmark", values=values, command=command, seed=seed, data=result.inputs.data)
        append_record(folder, record)
        recorded.append(result.name)
    return recorded
