"""Published results, measured again: the same weights, the same images, the same draws.

Whoever wrote the folder is not trusted: what cannot be read is reported, and nothing but numbers is taken from it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.data import ImageData, load_data
from hf_vit.data.annotations import Target
from hf_vit.data.sources import is_builtin
from hf_vit.errors import UserError, first_line, one_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.metrics import macro_averages
from hf_vit.evaluation.protocols.registry import TARGETS, evaluate_protocol
from hf_vit.evaluation.reading import largest
from hf_vit.hub.card_metadata import current_records, latest_evaluations
from hf_vit.hub.model_folder import CARD_NAME, check_inside
from hf_vit.hub.published_results import ACCURACIES, hub_dataset, index_entries, rounded
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.results.facts import DataFact, Facts, Record

Verdict = Literal["equal", "rounding", "different", "not checkable"]
_DATA_NAME = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?(:[\w.\-]+)?")
# Two classes whose logits are closer than this share of the largest may change places by rounding.
NEAR_TIE = 1e-4
# Losses, calibration errors and other protocols' fractions that differ by less are equal.
SAME = 1e-6


@dataclass(frozen=True)
class Finding:
    """What became of one published number.

    Attributes:
        what: of which data, by which metric.
        verdict: "equal"; "rounding": different by no more than near ties may; "different"; "not checkable".
        published, measured: as they stand in facts.json, and as measured now; None where there is none.
        reason: in words, where the numbers do not say it.
    """

    what: str
    verdict: Verdict
    published: float | None = None
    measured: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        numbers = "" if self.published is None else f" {self.published:.6g} published"
        numbers += "" if self.measured is None else f", {self.measured:.6g} measured"
        return f"{self.verdict}: {self.what}{numbers}" + (f" ({self.reason})" if self.reason else "")


def audit_results(
    folder: Path,
    *,
    data: Sequence[str] = (),
    device: str | None = None,
    batch_size: int = 32,
    report: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Measure again what a model folder publishes of its accuracy.

    Args:
        folder: of a model, such as `hf-vit verify` downloads; it may be a stranger's.
        data: where data sets are that have no public name, see `load_data`; what is in them decides which are meant.
        device: torch device; by default a GPU where there is one.
        batch_size: images a forward.
        report: is told what is being done.

    Raises:
        UserError: the model or facts.json cannot be read.
    """
    facts, say = Facts.load(folder), report or (lambda line: None)
    claims, unreadable = without_record(folder, facts)
    findings = [Finding(what, "not checkable") for what in unreadable]
    for claim in claims:
        reason = f"{claim.place} states it, but facts.json has no record of it for these weights"
        findings.append(Finding(claim.what, "not checkable", claim.value, reason=reason))
    records = records_to_measure(facts)
    if records:
        loaded = load_model(str(folder), device)
        known = SameData(loaded.image_size, data)
        for record in records:
            where = record.data or DataFact(name="unnamed data")
            what = one_line(f"{where.name}, split {where.split}")
            say(f"measuring {one_line(record.values.get('protocol', 'top1'))} on {what}")
            findings += _measure_again(what, record, loaded, known, batch_size)
    return findings


def _measure_again(
    what: str, record: Record, loaded: LoadedModel, known: "SameData", batch_size: int
) -> Iterator[Finding]:
    if record.data is None or record.data.split is None:
        yield Finding(what, "not checkable", reason="the record names no data, or no split")
        return
    protocol = str(record.values.get("protocol", "top1"))
    images, reason = known.of(record.data, TARGETS.get(protocol, "label"))
    if images is None:
        yield Finding(what, "not checkable", reason=reason)
        return
    settings: Any = record.values.get("settings")
    options: dict[str, Any] = settings if isinstance(settings, dict) else {}
    try:
        run = evaluate_protocol(
            protocol,
            loaded,
            images,
            split=record.data.split,
            num_images=record.data.size,
            batch_size=batch_size,
            seed=record.seed or 0,
            **options,
        )
    except (UserError, TypeError, ValueError) as error:  # settings of a stranger's record
        yield Finding(what, "not checkable", reason=f"{first_line(error):.200}")
        return
    # Number by number: a top-1 evaluation's own, or what another protocol calls its headline.
    is_top1 = run.protocol == "top1"
    now: Any = run.result.values() if is_top1 else run.result.headline()
    before: Any = record.values if is_top1 else record.values["headline"]
    ties = NearTies(run.examination) if is_top1 else None
    for name, measured in now.items():
        published = before.get(name)
        if isinstance(measured, float) and isinstance(published, float | int):
            verdict, reason = _verdict(name, float(published), measured, run.result.num_images, ties)
            yield Finding(f"{ACCURACIES.get(name, name)} on {what}", verdict, float(published), measured, reason)


def _verdict(name: str, published: float, measured: float, count: int, ties: "NearTies | None") -> tuple[Verdict, str]:
    """Return the verdict on one number, and the reason."""
    if ties is not None and name in ACCURACIES:
        images = abs(round(measured * count) - round(published * count))
        if not images:
            return "equal", ""
        tied = ties.count(1 if name == "top1" else 5)
        reason = f"by {images} images; {tied} are near ties, which rounding may turn"
        return "rounding" if images <= tied else "different", reason
    apart = abs(measured - published)
    if apart <= SAME * max(1.0, abs(measured)):
        return "equal", ""
    if ties is not None and ties.may_give(name, published, measured):
        return "rounding", f"by {apart:.2g}, as near ties may turn it"
    return "different", f"by {apart:.2g}"


def describe(findings: Sequence[Finding]) -> str:
    """Return a line a number."""
    return "\n".join(map(str, findings))


def check(findings: Sequence[Finding]) -> None:
    """Refuse results of which one is different, or none could be checked."""
    different = [finding for finding in findings if finding.verdict == "different"]
    if different:
        raise UserError(f"{len(different)} of {len(findings)} published results are different: {different[0]}")
    if not any(finding.verdict in ("equal", "rounding") for finding in findings):
        raise UserError(
            "no published result could be checked; give the data that they were measured on with --data"
            if findings
            else "no result is published, so there is nothing to check; measure some with hf-vit evaluate"
        )


class Claim(NamedTuple):
    """A number that is published: the file that holds it, of which data by which metric; None where it is no number."""

    place: str
    what: str
    value: float | None


def records_to_measure(facts: Facts) -> list[Record]:
    """Return the records to evaluate again: those in the card's table, and the latest of every other protocol."""
    latest: dict[object, Record] = {}
    for record in current_records(facts):
        if record.kind == "evaluation" and isinstance(record.values.get("headline"), dict):
            data = record.data
            key = (str(record.values.get("protocol")), data and (data.name, data.split, data.fingerprint))
            latest[key] = record
    return [*latest_evaluations(facts), *latest.values()]


def without_record(folder: Path, facts: Facts) -> tuple[list[Claim], list[str]]:
    """Return the claims that no record of facts.json bears out, and the files that cannot be read."""
    borne_out = {
        (claim.what, claim.value)
        for record in current_records(facts)
        for claim in (*_of_index(index_entries([record], folder.name)), *_of_record(record))
        if record.kind == "evaluation"
    }
    claims, unreadable = list[Claim](), list[str]()
    for path in (folder / CARD_NAME, *sorted((folder / ".eval_results").glob("*.y*ml"))):
        if not path.is_file():
            continue
        check_inside(folder, path)
        try:
            claims += _of_index(_entries_of_card(path)) if path.name == CARD_NAME else _of_results(path)
        except Exception as error:  # YAML of any shape, read by huggingface_hub
            unreadable.append(f"{path.relative_to(folder)} cannot be read ({first_line(error):.120})")
    return [claim for claim in claims if (claim.what, claim.value) not in borne_out], unreadable


def _entries_of_card(path: Path) -> Any:
    from huggingface_hub import ModelCard

    if not path.read_text(encoding="utf-8").lstrip().startswith("---"):
        return []
    data: Any = ModelCard.load(path).data
    return data.eval_results or []


def _of_index(entries: Any) -> Iterator[Claim]:
    """Return the claims in `EvalResult`s, whose fields may hold anything."""
    for entry in entries:
        data = f"{entry.dataset_name}, split {entry.dataset_split}"
        yield _claim(CARD_NAME, data, entry.metric_name, entry.metric_value)


def _of_results(path: Path) -> Iterator[Claim]:
    import yaml
    from huggingface_hub import parse_eval_result_entries

    for entry in parse_eval_result_entries(yaml.safe_load(path.read_bytes())):
        task = f"{entry.dataset_id}, task {entry.task_id}"
        yield _claim(f".eval_results/{path.name}", task, ACCURACIES["top1"], entry.value)


def _of_record(record: Record) -> Iterator[Claim]:
    """Yield what the record would stand for in `.eval_results`."""
    data, value = record.data, record.values.get("top1")
    if data is not None and isinstance(value, float | int) and (dataset := hub_dataset(data)) is not None:
        task = f"{dataset}, task {data.name.partition(':')[2] or 'default'}"
        yield _claim("", task, ACCURACIES["top1"], rounded(value))


def _claim(place: str, data: str, metric: object, value: object) -> Claim:
    number = float(value) if isinstance(value, float | int) else None
    return Claim(place, one_line(f"{metric} on {data}"), number)


class SameData:
    """Loads every data set once.

    Args:
        image_size: (height, width) px that built-in sets come in: the model's.
        given: what the user named; see `load_data`.
    """

    def __init__(self, image_size: tuple[int, int] | None, given: Sequence[str] = ()) -> None:
        self.image_size, self.given = image_size, given
        self._loaded: dict[tuple[str, bool, Target], ImageData | UserError] = {}

    def of(self, fact: DataFact, target: Target = "label") -> tuple[ImageData | None, str]:
        """Return the data with the record's fingerprint, whose images bear `target`; or None, and why there is none."""
        if not fact.fingerprint:
            return None, "the record holds no fingerprint of its data"
        names = [*([fact.name] if is_public(fact) else []), *self.given]
        if not names:
            return None, f"{fact.name} is not a public data set; give its path with --data"
        reasons = list[str]()
        for name in names:
            for streaming in (False, True) if target == "label" else (False,):  # a stream's fingerprint is another
                data = self._load(name, streaming, target)
                if isinstance(data, UserError):
                    reasons.append(str(data))
                    break
                if data.fingerprint == fact.fingerprint:
                    return data, ""
            else:
                reasons.append(f"{name} differs from the evaluated data (another fingerprint)")
        return None, "; ".join(reasons)

    def _load(self, name: str, streaming: bool, target: Target) -> ImageData | UserError:
        key = name, streaming, target
        if key not in self._loaded:
            try:  # what was left out then is left out now: the fingerprint is of the rest
                self._loaded[key] = load_data(
                    name, streaming=streaming, skip_bad_images=True, image_size=self.image_size, target=target
                )
            except UserError as error:
                self._loaded[key] = error
        return self._loaded[key]


def is_public(fact: DataFact) -> bool:
    """Return whether a name, which a stranger may have written, is that of a public data set, and no path of this
    machine.
    """
    if is_builtin(fact.name):
        return True
    is_name = _DATA_NAME.fullmatch(fact.name) is not None and hub_dataset(fact) is not None
    return is_name and not Path(fact.name).expanduser().exists()


@final
class NearTies:
    """Those of a classifier's answers; they are asked for when first needed, and once.

    Args:
        examination: the classifier and the images that judge it.
    """

    def __init__(self, examination: Examination) -> None:
        self._examination = examination

    def count(self, place: int) -> int:
        """Images whose logits at `place`, 1 or 5, and the next one are closer than `NEAR_TIE` of the largest."""
        return int(self._answers[f"tied_{place}"].sum())

    def may_give(self, metric: str, published: float, measured: float) -> bool:
        """Return whether "precision", "recall", "f1" or "ece" may be `published` elsewhere where it is `measured`
        here.
        """
        if metric == "ece":  # an image that turns moves its bin's hits by one
            return abs(published - measured) <= self.count(1) / len(self._answers["references"])
        lowest, highest = self._extremes.get(metric, (measured, measured))
        return lowest - SAME <= published <= highest + SAME

    @cached_property
    def _extremes(self) -> dict[str, tuple[float, float]]:
        """Each metric where all near ties turn that lower it, and where all do that raise it."""
        references, (first, second) = self._answers["references"], self._answers["best"].T
        tied = np.flatnonzero(self._answers["tied_1"])

        def turned(rows: NDArray[Any]) -> dict[str, float]:
            predictions = first.copy()
            predictions[rows] = second[rows]
            return macro_averages(references, predictions)

        # Images of one class that are answered alike do alike.
        kinds, which = np.unique(np.stack([references, first, second])[:, tied], axis=1, return_inverse=True)
        alone = [turned(tied[which == kind][:1]) for kind in range(kinds.shape[1])]
        extremes: dict[str, tuple[float, float]] = {}
        for metric, value in turned(tied[:0]).items():
            effects = np.array([each[metric] - value for each in alone])[which]
            extremes[metric] = (turned(tied[effects < 0])[metric], turned(tied[effects > 0])[metric])
        return extremes

    @cached_property
    def _answers(self) -> dict[str, NDArray[Any]]:
        """Return for every image the true class, the two top classes, and whether ranks 1 and 2, or 5 and 6, are near
        ties.
        """
        batches = list[dict[str, NDArray[Any]]]()
        for logits, labels in self._examination.logits(self._examination.split):
            best = largest(logits, 6)
            ranked = logits.gather(1, best)
            is_tied = ranked[:, :-1] - ranked[:, 1:] <= NEAR_TIE * logits.abs().amax(dim=-1, keepdim=True)
            tied = {f"tied_{place}": is_tied[:, place - 1 : place].any(dim=1).numpy() for place in (1, 5)}
            two = best[:, [0, min(1, best.shape[1] - 1)]].numpy()
            batches.append({"references": labels.numpy(), "best": two, **tied})
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
