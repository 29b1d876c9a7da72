"""Models by what is known of them: the papers' variants, the model folders of a place, the repositories of a user."""

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
from hf_vit.hub.card_metadata import indexed_evaluations, load_facts
from hf_vit.hub.model_folder import count_parameters, read_config
from hf_vit.hub.published_results import ACCURACIES
from hf_vit.repositories.hub import try_again
from hf_vit.repositories.reading import CONFIG, reading
from hf_vit.results.facts import DataFact, Facts, fraction
from hf_vit.variants import variant_config, variant_names

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

PAPERS = "papers"  # what stands for the papers' variants among folders and users
_CLASSES = 1000  # of the head that parameters and FLOPs of a variant are counted with
_MOST = 1000  # repositories of a user
_LONGEST = 200


@final
@dataclass(frozen=True)
class Entry:
    """A model, and what is known of it.

    Attributes:
        kind: a variant of a paper, a folder of this machine, or a repository of the Hub.
        name: the variant's, the folder's path, or user/name.
        model_type: as config.json calls the architecture; "" where it is not told.
        parameters: stored values; of a variant with a head for 1,000 classes.
        forward_flops: of one image at the size of its configuration, a multiply-add counts 2; None of models that are
            not at hand, or that this package does not count.
        scores: its results.
        checkpoints: where weights are found, as `hf-vit convert` takes them.
        problem: why nothing is known of a folder.
    """

    kind: Literal["variant", "folder", "repository"]
    name: str
    model_type: str = ""
    parameters: int | None = None
    forward_flops: int | None = None
    scores: tuple[Score, ...] = field(default=())
    checkpoints: tuple[str, ...] = field(default=())
    problem: str | None = None

    def judged_on(self, data: str) -> "Entry":
        """Return the same with those results alone whose data has this in its name."""
        return replace(self, scores=tuple(score for score in self.scores if data.lower() in score.data.lower()))


def entries_of(place: str) -> Iterator[Entry]:
    """Iterate over the models of a folder, a user of the Hub, or "papers"; FLOPs take their time: see `with_flops`."""
    if place == PAPERS:
        return map(_variant, variant_names())
    folder = Path(place).expanduser()
    if folder.is_dir():
        return map(_folder, model_folders(folder))
    if "/" in place or place.startswith((".", "~")):
        raise UserError(f"there is no folder {place}; give one, a user or organization on the Hub, or {PAPERS}")
    return iter(_repositories(place))


def with_flops(entry: Entry) -> Entry:
    """Return the same with the FLOPs of a forward pass, where they can be counted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a configuration has to say is for those who load it, not for a list
            if entry.kind == "variant":
                return replace(entry, forward_flops=forward_flops(variant_config(entry.name, num_labels=_CLASSES)))
            if entry.kind == "folder" and family_of(entry.model_type) is not None:
                config, task = find_config(entry.name)
                return replace(entry, forward_flops=forward_flops(config, task=task))
    except UserError as error:
        return replace(entry, problem=one_line(error))
    return entry


def _variant(name: str) -> Entry:
    from transformers import AutoModelForImageClassification

    config = variant_config(name, num_labels=_CLASSES)
    with torch.device("meta"):
        model: Any = AutoModelForImageClassification.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scores, checkpoints = tuple(published_scores(name)), tuple(published_checkpoints(name))
    return Entry("variant", name, config.model_type, parameters, None, scores, checkpoints)


def model_folders(root: Path) -> list[Path]:
    """Return the folders with a config.json in and below `root`; within one of them no other is looked for."""
    folders = list[Path]()
    for path, below, files in os.walk(root):
        below[:] = [] if CONFIG in files else sorted(name for name in below if not name.startswith("."))
        if CONFIG in files:
            folders.append(Path(path))
    return folders


def _folder(folder: Path) -> Entry:
    try:
        config, parameters = read_config(folder), count_parameters(folder)
        facts = load_facts(folder, config)
    except (UserError, OSError) as error:
        return Entry("folder", str(folder), problem=one_line(error))
    return Entry("folder", str(folder), one_line(config.model_type), parameters, None, tuple(_scores_in(facts)))


def _scores_in(facts: Facts) -> Iterator[Score]:
    for record in indexed_evaluations(facts):
        data = record.data or DataFact(name="unnamed data")
        for name, metric in ACCURACIES.items():
            if (value := fraction(record.values.get(name))) is not None:
                yield Score(_data(data.name, data.split), metric.lower(), value, one_line(record.command))


def _repositories(owner: str) -> list[Entry]:
    """Return a user's models by what the Hub tells of them; nothing of theirs is downloaded."""
    from huggingface_hub import HfApi

    asked: Any = ["cardData", "model-index", "evalResults", "safetensors", "config"]
    listed = functools.partial(HfApi().list_models, author=owner, expand=asked, limit=_MOST)
    try:
        with reading(owner):
            entries = list(map(_repository, try_again(lambda: list(listed()), "listing the models")))
    except UserError as error:
        raise UserError(f"there is no folder {owner}, and as a user of the Hub: {error}") from error
    if not entries:
        raise UserError(f"there is no folder {owner}, and no user of that name on the Hub has a public model")
    return entries


def _repository(info: "ModelInfo") -> Entry:
    name, model_type = _text(info.id), _text((info.config or {}).get("model_type", ""))
    parameters = info.safetensors.total if info.safetensors is not None else None
    total = parameters if isinstance(parameters, int) else None
    scores = tuple(dict.fromkeys((*_of_index(info), *_of_results(info))))
    return Entry("repository", name, model_type, total, None, scores, (f"hf://{name}",))


def _of_index(info: "ModelInfo") -> Iterator[Score]:
    """Return the results in a card's `model-index`."""
    from huggingface_hub.repocard_data import model_index_to_eval_results

    told: Any = info.model_index or []
    try:
        results: Iterable[Any] = model_index_to_eval_results(told)[1] if told else []
    except (KeyError, TypeError, ValueError, AttributeError):
        return
    for result in results:
        data = _data(result.dataset_name, result.dataset_split)
        yield from _score(data, result.metric_name or result.metric_type, result.metric_value, result.source_name)


def _of_results(info: "ModelInfo") -> Iterator[Score]:
    """Of `.eval_results`, whose form has no split; what stands in `model-index` as well is told once."""
    if info.model_index:
        return
    for result in info.eval_results or []:
        yield from _score(_text(result.dataset_id), TOP1, result.value, result.source_name)


def _score(data: str, metric: object, value: object, source: object) -> Iterator[Score]:
    """Return the score of an accuracy; values above 1 are percents, and plain accuracy is top-1."""
    name = _text(metric).lower()
    name = TOP1 if name == "accuracy" else name
    if "accuracy" not in name or isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= 100:
        return
    yield Score(data, name, float(value) if value <= 1 else value / 100, _text(source or "its card"))


def _data(name: object, split: object) -> str:
    return _text(f"{name}, split {split}" if split else name)


def _text(value: object) -> str:
    return one_line(value)[:_LONGEST]


def is_of_family(entry: Entry, family: str) -> bool:
    """Return whether an entry is of a family, by its name in this package ("hybrid") or its model_type."""
    known = family_of(entry.model_type)
    return family in (entry.model_type, known.name if known is not None else None)
