"""Published results, measured again: the same weights, the same images, the same draws."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_vit.audit.claims import records_to_measure, without_record
from hf_vit.audit.near_ties import SAME, NearTies
from hf_vit.audit.same_data import SameData
from hf_vit.errors import UserError, first_line, one_line
from hf_vit.evaluation.protocols.registry import TARGETS, ProtocolRun, evaluate_protocol
from hf_vit.hub.published_results import ACCURACIES
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.results.facts import DataFact, Facts, Record

Verdict = Literal["equal", "rounding", "different", "not checkable"]


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
        reason = f"{claim.place} tells it, no record of these weights in facts.json bears it out"
        findings.append(Finding(claim.what, "not checkable", claim.value, reason=reason))
    records = records_to_measure(facts)
    if records:
        subject = load_model(str(folder), device)
        known = SameData(subject.image_size, data)
        for record in records:
            say(f"measuring {one_line(record.values.get('protocol', 'top1'))} on {_named(record)}")
            findings += _measured_again(record, subject, known, batch_size)
    return findings


def _named(record: Record) -> str:
    where = record.data or DataFact(name="unnamed data")
    return one_line(f"{where.name}, split {where.split}")


def _measured_again(record: Record, subject: LoadedModel, known: SameData, batch_size: int) -> Iterator[Finding]:
    what = _named(record)
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
            subject,
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
    yield from _compared(what, record, run)


def _compared(what: str, record: Record, run: ProtocolRun) -> Iterator[Finding]:
    """Number by number: a top-1 evaluation's own, or what another protocol calls its headline."""
    is_top1 = run.protocol == "top1"
    now: Any = run.result.values() if is_top1 else run.result.headline()
    before: Any = record.values if is_top1 else record.values["headline"]
    ties = NearTies(run.examination) if is_top1 else None
    for name, measured in now.items():
        published = before.get(name)
        if isinstance(measured, float) and isinstance(published, float | int):
            verdict, reason = _verdict(name, float(published), measured, run.result.num_images, ties)
            yield Finding(f"{ACCURACIES.get(name, name)} on {what}", verdict, float(published), measured, reason)


def _verdict(name: str, published: float, measured: float, count: int, ties: NearTies | None) -> tuple[Verdict, str]:
    """Of one number, and why."""
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
    """A line a number."""
    return "\n".join(map(str, findings))


def check(findings: Sequence[Finding]) -> None:
    """Refuse results of which one is different, or none could be checked.

    Raises:
        UserError: how many.
    """
    different = [finding for finding in findings if finding.verdict == "different"]
    if different:
        raise UserError(f"{len(different)} of {len(findings)} published results are different: {different[0]}")
    if not any(finding.verdict in ("equal", "rounding") for finding in findings):
        raise UserError(
            "no published result could be checked; give the data that they were measured on with --data"
            if findings
            else "no result is published, so there is nothing to check; measure some with hf-vit evaluate"
        )
