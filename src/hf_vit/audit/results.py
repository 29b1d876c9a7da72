"""Evaluate published results again with the same weights, images and random seed.

The author of a model folder is not trusted: unreadable files are reported, and only numbers are taken from it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries
from numpy.typing import NDArray

from hf_vit.data import ImageData, load_data
from hf_vit.data.annotations import Target
from hf_vit.data.sources import is_builtin
from hf_vit.errors import UserError, get_first_line, to_one_line
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.metrics import compute_macro_averages
from hf_vit.evaluation.protocols.registry import TARGETS, ProtocolRun, evaluate_protocol
from hf_vit.evaluation.reading import find_largest
from hf_vit.hub.card_metadata import describe_inputs, select_evaluations
from hf_vit.hub.model_folder import CARD_NAME, check_inside
from hf_vit.hub.published_results import (
    ACCURACIES,
    PUBLISHED,
    RESULTS_FILE,
    find_hub_dataset,
    make_index_entries,
    make_result_entries,
)
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.results.facts import FACTS_NAME, DataFact, Facts, Record

Verdict = Literal["equal", "rounding", "different", "not checkable"]
_DATA_NAME = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?(:[\w.\-]+)?")
# Two logits closer than this share of the largest logit are a near tie: rounding may swap their classes.
NEAR_TIE, NEAR_TIE_16_BITS = 1e-4, 0.03
# Relative tolerance within which losses, calibration errors and other protocols' fractions count as equal.
TOLERANCE = 1e-6
_ROUNDED = 0.005  # by at most how much a card may round a fraction


@dataclass(frozen=True)
class Finding:
    """The verdict on one published number.

    Attributes:
        result_name: the metric and the data set.
        verdict: "equal", "rounding" (the difference can come from near ties), "different" or "not checkable".
        published, measured: the number in facts.json and the number measured now; None if there is none.
        reason: why the numbers differ or could not be checked; empty if there is nothing to explain.
    """

    result_name: str
    verdict: Verdict
    published: float | None = None
    measured: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        numbers = "" if self.published is None else f" {self.published:.6g} published"
        numbers += "" if self.measured is None else f", {self.measured:.6g} measured"
        return f"{self.verdict}: {self.result_name}{numbers}" + (f" ({self.reason})" if self.reason else "")


def audit_results(
    folder: Path,
    *,
    data: Sequence[str] = (),
    device: str | None = None,
    batch_size: int = 32,
    report: Callable[[str], None] = lambda line: None,
) -> list[Finding]:
    """Evaluate a model again, and return a finding for every number that its folder publishes.

    Args:
        folder: a model folder, such as `hf-vit verify` downloads; its content need not be trustworthy.
        data: data sets without a public name, see `load_data`; each is matched to the records by its fingerprint.
        device: torch device; by default a GPU if there is one.
        batch_size: images per forward pass.
        report: called with a line of text before each evaluation.

    Raises:
        UserError: the model or facts.json cannot be read.
    """
    facts = Facts(records=Facts.load(folder).records)  # without the folder, so that results of other weights stay
    findings = find_unrecorded_results(folder, facts)
    records = select_records(facts)
    if records:
        loaded = load_model(str(folder), device)
        data_finder = DataFinder(loaded.image_size, data)
        for record in records:
            data_fact = record.data or DataFact(name="unnamed data")
            data_name = to_one_line(f"{data_fact.name}, split {data_fact.split}{describe_inputs(record)}")
            report(f"measuring {to_one_line(record.values.get('protocol', 'top1'))} on {data_name}")
            findings += _measure_again(data_name, record, loaded, data_finder, batch_size)
    return findings


def _measure_again(
    data_name: str, record: Record, loaded: LoadedModel, data_finder: "DataFinder", batch_size: int
) -> Iterator[Finding]:
    """Repeat the evaluation of a record, and yield a finding with `data_name` for each of its numbers."""
    if record.data is None or record.data.split is None:
        yield Finding(data_name, "not checkable", reason="its record names no data set or no split")
        return
    protocol = str(record.values.get("protocol", "top1"))
    images, reason = data_finder.find(record.data, TARGETS.get(protocol, "label"))
    if images is None:
        yield Finding(data_name, "not checkable", reason=reason)
        return
    # A top-1 record has only the settings that changed the preparation of images.
    settings: Any = record.values.get("settings", record.values.get("fed"))
    options: dict[str, Any] = settings if isinstance(settings, dict) else {}
    if options.keys() & {"mappings", "num_workers", "real_labels"}:  # a record opens no file, and starts no process
        yield Finding(data_name, "not checkable", reason="its settings are those of its author's machine")
        return
    try:
        evaluation = evaluate_protocol(
            protocol,
            loaded,
            images,
            split=record.data.split,
            num_images=record.data.size,
            batch_size=batch_size,
            seed=record.seed or 0,
            **options,
        )
    except (UserError, TypeError, ValueError) as error:  # the settings come from an untrusted record
        yield Finding(data_name, "not checkable", reason=f"{get_first_line(error):.200}")
        return
    # A top-1 record holds its metrics directly; other protocols hold their main metrics under "headline", and those of
    # the card's metadata directly.
    is_top1 = evaluation.protocol == "top1"
    measurements: Any = evaluation.result.values()
    recorded_values: Any = record.values
    if not is_top1:
        titles = PUBLISHED.get(protocol, ("", {}))[1].items()
        measurements = evaluation.result.headline() | {title: measurements.get(key) for key, title in titles}
        headline = recorded_values["headline"]
        headline_values = {name.casefold(): value for name, value in headline.items()}
        metadata = {title: recorded_values.get(key) for key, title in titles}
        # A metric of both is one finding, unless its two numbers differ.
        recorded_values = headline | {
            title: value for title, value in metadata.items() if value != headline_values.get(title.casefold())
        }
    ties = NearTies(evaluation.examination) if is_top1 else None
    for name in measurements if is_top1 else recorded_values:
        measured, published = measurements.get(name), recorded_values.get(name)
        result_name = to_one_line(f"{ACCURACIES.get(name, name)} on {data_name}")
        if isinstance(measured, float) and isinstance(published, float | int):
            verdict, reason = _judge(name, float(published), measured, evaluation, ties)
            yield Finding(result_name, verdict, float(published), measured, reason)
        elif isinstance(published, float | int) and not is_top1:
            yield Finding(result_name, "not checkable", float(published), reason=f"{protocol} does not measure it")


def _has_16_bits(examination: Examination) -> bool:
    return examination.loaded.dtype.itemsize <= 2


def _judge(
    name: str, published: float, measured: float, evaluation: ProtocolRun, ties: "NearTies | None"
) -> tuple[Verdict, str]:
    """Return the verdict on the metric `name` in facts.json, and its reason; `ties` is None for all but top-1."""
    difference = abs(measured - published)
    if difference <= TOLERANCE * max(1.0, abs(measured)):
        return "equal", ""
    if ties is not None and name in ACCURACIES:
        num_changed = math.ceil(round(difference * evaluation.result.num_images, 3))
        num_tied = ties.count(1 if name == "top1" else 5)
        reason = f"{num_changed} images differ, and rounding can change the {num_tied} near ties"
        return "rounding" if num_changed <= num_tied else "different", reason
    # About this share of pixels and boxes is a near tie of classes, scores or overlaps.
    limit = NEAR_TIE if evaluation.protocol in TARGETS else 0.0
    if _has_16_bits(evaluation.examination):  # which rounds every metric, and may change an image
        limit = max(0.005, 1.5 / evaluation.result.num_images)
    if difference <= limit or (ties is not None and ties.can_explain(name, published, measured)):
        return "rounding", f"they differ by {difference:.2g}, which near ties can explain"
    return "different", f"they differ by {difference:.2g}"


def require_equal(findings: Sequence[Finding]) -> None:
    """Raise a UserError if a published result is different or if none could be checked."""
    different = [finding for finding in findings if finding.verdict == "different"]
    if different:
        problem = f"{len(different)} of {len(findings)} published results differ from those measured now"
        remedy = "hf-vit evaluate records new ones, hf-vit card writes them into the card"
        raise UserError(f"{problem}; the first is {different[0]}; {remedy}")
    if not findings:
        raise UserError("the model publishes no results to check; run hf-vit evaluate to measure some")
    if not any(finding.verdict in ("equal", "rounding") for finding in findings):
        raise UserError("no published result could be checked; give the data set of the results with --data")


def select_records(facts: Facts) -> list[Record]:
    """Return the records to evaluate again: those in the card's tables."""
    latest: dict[object, Record] = {}
    for record in facts.select_current():
        if record.kind == "evaluation" and isinstance(record.values.get("headline"), dict):
            data = record.data or DataFact(name="")
            data_key = (data.name, data.split, data.size, data.fingerprint)
            latest[str(record.values.get("protocol")), data_key, describe_inputs(record)] = record
    return [*select_evaluations(facts), *latest.values()]


def find_unrecorded_results(folder: Path, facts: Facts) -> list[Finding]:
    """Return findings for files that cannot be read, and for published numbers that facts.json does not record.

    A number of the card, or of this package's file of results, is different if facts.json has another for this result.
    """
    recorded = defaultdict[str, list[Any]](list)
    for record in select_records(facts):  # an older one is not evaluated again
        entries = [*make_index_entries([record], folder.name), *make_result_entries([record], folder.name)]
        for finding in _list_published(FACTS_NAME, entries):
            recorded[finding.result_name].append(finding.published)
    unreadable, unrecorded = list[Finding](), list[Finding]()
    for path in (folder / CARD_NAME, *sorted((folder / ".eval_results").glob("*.y*ml"))):
        if not path.is_file():
            continue
        check_inside(folder, path)
        name = path.relative_to(folder).as_posix()
        try:
            published: Any = None
            if name != CARD_NAME:
                published = parse_eval_result_entries(yaml.safe_load(path.read_bytes()))
            elif path.read_text(encoding="utf-8").lstrip().startswith("---"):
                published = ModelCard.load(path).data.get("eval_results")
            for finding in _list_published(name, published or ()):
                number, values = finding.published, recorded[finding.result_name]
                if number in values:
                    continue
                # Cards written by hand round, and may state a percentage.
                is_near = number is None or any(
                    abs(number / scale - value) <= _ROUNDED for value in values for scale in (1, 100)
                )
                if name in (CARD_NAME, RESULTS_FILE) and values and not is_near:
                    reason = f"{name} states this result, but facts.json records {values[-1]:.6g} for these weights"
                    finding = replace(finding, verdict="different", reason=reason)
                unrecorded.append(finding)
        except Exception as error:  # untrusted YAML may fail anywhere inside huggingface_hub
            unreadable.append(Finding(f"{name} cannot be read ({get_first_line(error):.120})", "not checkable"))
    return unreadable + unrecorded


def _list_published(file: str, entries: Any) -> Iterator[Finding]:
    """Yield the results that a file states; its fields are untrusted and may have any type."""
    reason = f"{file} states this result, but facts.json has no record of it for these weights"
    for entry in entries:
        if isinstance(entry, EvalResultEntry):
            name, value = f"{ACCURACIES['top1']} on {entry.dataset_id}, task {entry.task_id}", entry.value
        else:
            name = f"{entry.metric_name} on {entry.dataset_name}, split {entry.dataset_split}"
            value = entry.metric_value
        number = float(value) if isinstance(value, float | int) else None
        yield Finding(to_one_line(name), "not checkable", number, reason=reason)


class DataFinder:
    """Finds the data sets that records were measured on, by public name or in `data_sources`, and loads each once.

    Built-in data sets are generated at `image_size` (height, width) px, the model's.
    """

    def __init__(self, image_size: tuple[int, int] | None, data_sources: Sequence[str] = ()) -> None:
        self.image_size, self.data_sources = image_size, data_sources
        self._loaded: dict[tuple[str, bool, Target], ImageData | UserError] = {}

    def find(self, fact: DataFact, target: Target = "label") -> tuple[ImageData | None, str]:
        """Return the data set that has the record's fingerprint, or None and the reason why there is none."""
        if not fact.fingerprint:
            return None, "its record has no fingerprint of the data"
        names = [*([fact.name] if is_public(fact) else []), *self.data_sources]
        if not names:
            return None, f"{fact.name} is not a public data set; give its path or URL with --data"
        reasons = list[str]()
        for name in names:
            # Streamed data has another fingerprint; only class labels can be streamed.
            for streaming in (False, True) if target == "label" else (False,):
                data = self._load(name, streaming, target)
                if isinstance(data, UserError):
                    reasons.append(str(data))
                    break
                if data.fingerprint == fact.fingerprint:
                    return data, ""
            else:
                reasons.append(f"{name} differs from the evaluated data (its fingerprint is different)")
        return None, "; ".join(reasons)

    def _load(self, name: str, streaming: bool, target: Target) -> ImageData | UserError:
        """Return a data set, or the error that loading it raised; both are kept for the next record."""
        key = name, streaming, target
        options: dict[str, Any] = {"streaming": streaming, "target": target, "image_size": self.image_size}
        if key not in self._loaded:
            try:  # the fingerprint covers only readable images
                self._loaded[key] = load_data(name, skip_bad_images=True, multi_label=True, **options)
            except UserError as error:
                self._loaded[key] = error
        return self._loaded[key]


def is_public(fact: DataFact) -> bool:
    """Return whether this is the name of a public data set rather than a local path; the name may be untrusted."""
    if is_builtin(fact.name):
        return True
    is_hub_name = _DATA_NAME.fullmatch(fact.name) is not None and find_hub_dataset(fact) is not None
    return is_hub_name and not Path(fact.name).expanduser().exists()


@final
class NearTies:
    """The near ties among a classifier's predictions; the model runs once, when they are first needed."""

    def __init__(self, examination: Examination) -> None:
        self._examination = examination

    def count(self, rank: int) -> int:
        """Return the number of images whose logits at this rank (1 or 5) and the next one form a near tie."""
        return int(self._predictions[f"tied_{rank}"].sum())

    def can_explain(self, metric: str, published: float, measured: float) -> bool:
        """Return whether near ties explain another published value of "precision", "recall", "f1" or "ece"."""
        if metric == "ece":  # one swapped image changes the correct predictions of its bin by one
            return abs(published - measured) <= self.count(1) / len(self._predictions["references"])
        lowest, highest = self._metric_ranges.get(metric, (measured, measured))
        return lowest - TOLERANCE <= published <= highest + TOLERANCE

    @cached_property
    def _metric_ranges(self) -> dict[str, tuple[float, float]]:
        """Return for each metric its lowest and highest value that swapping near ties can reach."""
        references = self._predictions["references"]
        first, second = self._predictions["best"].T
        tied_rows = np.flatnonzero(self._predictions["tied_1"])

        def swap(rows: NDArray[Any]) -> dict[str, float]:
            """Return the metrics if the near ties of these images are swapped."""
            predictions = first.copy()
            predictions[rows] = second[rows]
            return compute_macro_averages(references, predictions)

        # Images with the same true class and the same top two classes have the same effect, so one is tried per kind.
        kinds, kind_of_image = np.unique(
            np.stack([references, first, second])[:, tied_rows], axis=1, return_inverse=True
        )
        single_swaps = [swap(tied_rows[kind_of_image == kind][:1]) for kind in range(kinds.shape[1])]
        extremes: dict[str, tuple[float, float]] = {}
        for metric, value in swap(tied_rows[:0]).items():
            effects = np.array([metrics[metric] - value for metrics in single_swaps])[kind_of_image]
            extremes[metric] = (swap(tied_rows[effects < 0])[metric], swap(tied_rows[effects > 0])[metric])
        return extremes

    @cached_property
    def _predictions(self) -> dict[str, NDArray[Any]]:
        """Return per image the true class, the two top classes, and whether ranks 1, 2 or 5, 6 are a near tie."""
        near_tie = NEAR_TIE_16_BITS if _has_16_bits(self._examination) else NEAR_TIE
        batches = list[dict[str, NDArray[Any]]]()
        for logits, labels in self._examination.iterate_logits(self._examination.split):
            best = find_largest(logits, 6)
            ranked = logits.gather(1, best)
            is_tied = ranked[:, :-1] - ranked[:, 1:] <= near_tie * logits.abs().amax(dim=-1, keepdim=True)
            near_ties = {f"tied_{rank}": is_tied[:, rank - 1 : rank].any(dim=1).numpy() for rank in (1, 5)}
            top_two = best[:, [0, min(1, best.shape[1] - 1)]].numpy()
            batches.append({"references": labels.numpy(), "best": top_two, **near_ties})
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
