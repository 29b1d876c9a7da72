"""Describe models: the papers' variants, the model folders below a path, and the repositories of a Hub user."""

import functools
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from hf_vit.catalogue.published import TOP1, Score, published_checkpoints, published_scores
from hf_vit.cost import find_config, forward_flops
from hf_vit.errors import UserError, one_line
from hf_vit.families import family_of
from hf_vit.hub.card_metadata import load_facts, select_comparable
from hf_vit.hub.model_folder import count_parameters, read_config
from hf_vit.hub.published_results import ACCURACIES
from hf_vit.repositories.hub import retry
from hf_vit.repositories.reading import CONFIG, guard_hub_access
from hf_vit.results.facts import DataFact, Facts, as_fraction
from hf_vit.variants import variant_config, variant_names

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

PAPERS = "papers"  # this name stands for the papers' variants
_NUM_CLASSES = 1000  # classes of the head with which a variant's parameters and FLOPs are counted
_MAX_REPOSITORIES = 1000  # of one user
_MAX_TEXT_LENGTH = 200


@final
@dataclass(frozen=True)
class Entry:
    """The description of one model.

    Attributes:
        kind: "variant" of a paper, local "folder" or Hub "repository".
        name: the variant's name, the folder's path, or user/name.
        model_type: the architecture's name in config.json; "" if unknown.
        parameters: number of stored values; for a variant with a head for 1,000 classes.
        forward_flops: FLOPs for one image of the configured size (a multiply-add counts 2); None for repositories and
            for architectures that hf_vit cannot count.
        scores: published or recorded results.
        checkpoints: published weights, named as `hf-vit convert` accepts them.
        problem: the error, if a folder could not be read.
    """

    kind: Literal["variant", "folder", "repository"]
    name: str
    model_type: str = ""
    parameters: int | None = None
    forward_flops: int | None = None
    scores: tuple[Score, ...] = field(default=())
    checkpoints: tuple[str, ...] = field(default=())
    problem: str | None = None

    def select_data(self, data: str) -> "Entry":
        """Return a copy of this entry with only the results on data sets whose name contains `data` (in any case)."""
        return replace(self, scores=tuple(score for score in self.scores if data.lower() in score.data.lower()))


def list_entries(source: str) -> Iterator[Entry]:
    """Return the models of a folder, a Hub user, or "papers", without FLOPs, which `add_flops` counts.

    Raises:
        UserError: there is no such folder or Hub user.
    """
    if source == PAPERS:
        return map(_describe_variant, variant_names())
    folder = Path(source).expanduser()
    if folder.is_dir():
        return map(_describe_folder, find_model_folders(folder))
    if "/" in source or source.startswith((".", "~")):
        raise UserError(
            f"the folder {source} does not exist; give a folder, a user or organization on the Hub, or {PAPERS}"
        )
    return iter(_list_repositories(source))


def add_flops(entry: Entry) -> Entry:
    """Return the entry with the FLOPs of a forward pass, if they can be counted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about a configuration matter when it is loaded, not here
            if entry.kind == "variant":
                return replace(entry, forward_flops=forward_flops(variant_config(entry.name, num_labels=_NUM_CLASSES)))
            if entry.kind == "folder" and family_of(entry.model_type) is not None:
                config, task = find_config(entry.name)
                return replace(entry, forward_flops=forward_flops(config, task=task))
    except UserError as error:
        return replace(entry, problem=one_line(error))
    return entry


def _describe_variant(name: str) -> Entry:
    """Return the entry of a variant; the model is built without memory for its weights."""
    from transformers import AutoModelForImageClassification

    config = variant_config(name, num_labels=_NUM_CLASSES)
    with torch.device("meta"):
        model: Any = AutoModelForImageClassification.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scores, checkpoints = tuple(published_scores(name)), tuple(published_checkpoints(name))
    return Entry("variant", name, config.model_type, parameters, None, scores, checkpoints)


def find_model_folders(root: Path) -> list[Path]:
    """Return all folders with a config.json in and below `root`; folders inside a model folder are not searched."""
    folders = list[Path]()
    for path, subfolders, files in os.walk(root):
        subfolders[:] = [] if CONFIG in files else sorted(name for name in subfolders if not name.startswith("."))
        if CONFIG in files:
            folders.append(Path(path))
    return folders


def _describe_folder(folder: Path) -> Entry:
    """Return the entry of a model folder, with the error as its `problem` if it cannot be read."""
    try:
        config, parameters = read_config(folder), count_parameters(folder)
        facts = load_facts(folder, config)
    except (UserError, OSError) as error:
        return Entry("folder", str(folder), problem=one_line(error))
    return Entry("folder", str(folder), one_line(config.model_type), parameters, None, tuple(_record_scores(facts)))


def _record_scores(facts: Facts) -> Iterator[Score]:
    """Yield the accuracies recorded in facts.json that a card would show."""
    for record in select_comparable(facts):
        data = record.data or DataFact(name="unnamed data")
        for name, metric in ACCURACIES.items():
            if (value := as_fraction(record.values.get(name))) is not None:
                yield Score(_name_data(data.name, data.split), metric.lower(), value, one_line(record.command))


def _list_repositories(owner: str) -> list[Entry]:
    """Return the public models of a Hub user from the Hub's metadata, without downloading files.

    Raises:
        UserError: there is no such user, the user has no public model, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    expand: Any = ["cardData", "model-index", "evalResults", "safetensors", "config"]
    list_models = functools.partial(HfApi().list_models, author=owner, expand=expand, limit=_MAX_REPOSITORIES)
    try:
        with guard_hub_access(owner):
            entries = list(map(_describe_repository, retry(lambda: list(list_models()), "listing the models")))
    except UserError as error:
        raise UserError(
            f"the folder {owner} does not exist, and the Hub user {owner} cannot be read: {error}"
        ) from error
    if not entries:
        raise UserError(
            f"the folder {owner} does not exist, and no Hub user of that name has a public model; give a folder "
            "or another user"
        )
    return entries


def _describe_repository(info: "ModelInfo") -> Entry:
    """Return the entry of a Hub repository."""
    name, model_type = _shorten(info.id), _shorten((info.config or {}).get("model_type", ""))
    parameters = info.safetensors.total if info.safetensors is not None else None
    total = parameters if isinstance(parameters, int) else None
    scores = tuple(dict.fromkeys((*_index_scores(info), *_eval_result_scores(info))))
    return Entry("repository", name, model_type, total, None, scores, (f"hf://{name}",))


def _index_scores(info: "ModelInfo") -> Iterator[Score]:
    """Yield the accuracies in a card's `model-index`; a malformed one yields nothing."""
    from huggingface_hub.repocard_data import model_index_to_eval_results

    model_index: Any = info.model_index or []
    try:
        results: Iterable[Any] = model_index_to_eval_results(model_index)[1] if model_index else []
    except (KeyError, TypeError, ValueError, AttributeError):
        return
    for result in results:
        data = _name_data(result.dataset_name, result.dataset_split)
        yield from _make_score(data, result.metric_name or result.metric_type, result.metric_value, result.source_name)


def _eval_result_scores(info: "ModelInfo") -> Iterator[Score]:
    """Yield the accuracies in `.eval_results`, unless `model-index` states them, which also names the split."""
    if info.model_index:
        return
    for result in info.eval_results or []:
        yield from _make_score(_shorten(result.dataset_id), TOP1, result.value, result.source_name)


def _make_score(data: str, metric: object, value: object, source: object) -> Iterator[Score]:
    """Yield the score if the metric is an accuracy: values above 1 are percents, and plain "accuracy" means top-1."""
    name = _shorten(metric).lower()
    name = TOP1 if name == "accuracy" else name
    if "accuracy" not in name or isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= 100:
        return
    yield Score(data, name, float(value) if value <= 1 else value / 100, _shorten(source or "its card"))


def _name_data(name: object, split: object) -> str:
    """Return the name of a data set with its split, if known."""
    return _shorten(f"{name}, split {split}" if split else name)


def _shorten(value: object) -> str:
    """Return a value as one line of limited length."""
    return one_line(value)[:_MAX_TEXT_LENGTH]


def belongs_to_family(entry: Entry, family: str) -> bool:
    """Return whether an entry belongs to a family, given its name in hf_vit ("hybrid") or its model_type."""
    entry_family = family_of(entry.model_type)
    return family in (entry.model_type, entry_family.name if entry_family is not None else None)
