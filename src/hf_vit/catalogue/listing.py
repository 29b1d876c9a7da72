"""List models (the papers' variants, folders, a Hub user's) as a table, JSON or an HTML page with leaderboards.

Accuracies are from arXiv 2010.11929, tables 2 and 6; those of AugReg hybrids (arXiv 2106.10270) from the table in the
README of google-research/vision_transformer. Checkpoint URLs are from the READMEs of google-research/vision_transformer
and google-research/big_transfer, from the Hub (original weights in the layout of transformers) and from timm's model
names. `hf-vit convert` reads all of them.
"""

import functools
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from hf_vit.conversion.loading import find_config
from hf_vit.cost.flops import forward_flops
from hf_vit.display import Displayed, format_amount, format_count
from hf_vit.errors import UserError, to_one_line
from hf_vit.evaluation.protocols.frame import Table, percent
from hf_vit.families import FAMILIES, find_family
from hf_vit.hub.card_metadata import load_facts, select_comparable
from hf_vit.hub.model_folder import count_parameters, read_config
from hf_vit.hub.published_results import ACCURACIES
from hf_vit.repositories.hub import retry
from hf_vit.repositories.reading import CONFIG, guard_hub_access
from hf_vit.results.facts import DataFact, as_fraction
from hf_vit.results.figures import render_report
from hf_vit.variants import VARIANTS, list_variant_names, variant_config
from hf_vit.writing import write_atomically

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

TOP1 = "top-1 accuracy"
_PAPER = "arXiv 2010.11929, table"
_AUGREG_PAGE = "arXiv 2106.10270, google-research/vision_transformer, table of AugReg models, row"


@dataclass(frozen=True)
class Score:
    """A published result: data set (with its split if known), metric, fraction in [0, 1], and its source."""

    data: str
    metric: str
    value: float
    source: str


_TABLE_2_DATA = ("ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100", "Oxford-IIIT Pets", "Oxford Flowers-102", "VTAB")
# Variant -> (row of the table, percent on each of _TABLE_2_DATA).
_TABLE_2 = {
    "H/14": ("Ours-JFT (ViT-H/14)", (88.55, 90.72, 99.50, 94.55, 97.56, 99.68, 77.63)),
    "L/16": ("Ours-I21k (ViT-L/16)", (85.30, 88.62, 99.15, 93.25, 94.67, 99.61, 72.72)),
}
# Variant -> rows of the table as (name, epochs on JFT, percent on ImageNet).
_TABLE_6 = {
    "B/32": (("ViT-B/32", 7, 80.73),),
    "B/16": (("ViT-B/16", 7, 84.15),),
    "L/32": (("ViT-L/32", 7, 84.37),),
    "L/16": (("ViT-L/16", 7, 86.30), ("ViT-L/16", 14, 87.12)),
    "H/14": (("ViT-H/14", 14, 88.08),),
    "R50+B/16": (("R50x1+ViT-B/16", 7, 85.58),),
    "R50+L/32": (("R50x1+ViT-L/32", 7, 85.68),),
    "R50+L/16": (("R50x1+ViT-L/16", 7, 86.60), ("R50x1+ViT-L/16", 14, 87.12)),
}
# Variant -> percent on ImageNet at 384 px.
_AUGREG_SCORES = {"R+Ti/16": 75.40, "R26+S/32": 83.85, "R50+L/32": 85.99}

_MIXERS = ("Mixer-B_16", "Mixer-L_16")
# Folder in gs:// -> files; "ViT-B_16-224" was fine-tuned at 224 px, fine-tuned files without that suffix at 384 px.
_FOLDERS = {
    "vit_models/imagenet21k": ("ViT-B_8", "ViT-B_16", "ViT-B_32", "ViT-L_16", "ViT-L_32", "ViT-H_14", "R50+ViT-B_16"),
    "vit_models/imagenet21k+imagenet2012": (
        *("ViT-B_8", "ViT-B_16", "ViT-B_16-224", "ViT-B_32", "ViT-L_16", "ViT-L_16-224", "ViT-L_32", "R50+ViT-B_16"),
    ),
    "mixer_models/imagenet1k": _MIXERS,
    "mixer_models/imagenet21k": _MIXERS,
    "mixer_models/sam": ("Mixer-B_16", "Mixer-B_32"),
}
# Variant -> (file in gs://vit_models/augreg, learning rate in the name of its fine-tuned version).
_AUGREG = {
    "L/16": ("L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "B/16": ("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", "0.03"),
    "S/16": ("S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", "0.03"),
    "R50+L/32": ("R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", "0.01"),
    "R26+S/32": ("R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "Ti/16": ("Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "0.03"),
    "B/32": ("B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "S/32": ("S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", "0.01"),
    "R+Ti/16": ("R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "0.03"),
}
_BIT_NAMES = ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
_HUB_NAMES = {
    "B/16": ("vit-base-patch16-224-in21k", "vit-base-patch16-224", "vit-base-patch16-384"),
    "B/32": ("vit-base-patch32-224-in21k", "vit-base-patch32-384"),
    "L/16": ("vit-large-patch16-224-in21k", "vit-large-patch16-224", "vit-large-patch16-384"),
    "L/32": ("vit-large-patch32-224-in21k", "vit-large-patch32-384"),
    "H/14": ("vit-huge-patch14-224-in21k",),
    "BiT-R50x1": ("bit-50",),
}
_TIMM_NAMES = {
    **{
        f"{size}/{patch}": f"vit_{width}_patch{patch}_224"
        for size, width in (("Ti", "tiny"), ("S", "small"), ("B", "base"), ("L", "large"), ("H", "huge"))
        for patch in VARIANTS[size].patches
    },
    "R+Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
    "Mixer-B/16": "mixer_b16_224",
    "Mixer-L/16": "mixer_l16_224",
    **{f"BiT-{name}": f"resnetv2_{name[1:]}_bit" for name in _BIT_NAMES},
}


def iterate_published_scores(variant: str) -> Iterator[Score]:
    """Yield the results that the papers state for a variant."""
    if variant in _TABLE_2:
        row, percents = _TABLE_2[variant]
        for data, percent in zip(_TABLE_2_DATA, percents, strict=True):
            metric = "mean accuracy of 19 tasks" if data == "VTAB" else TOP1
            yield Score(data, metric, _to_fraction(percent), f"{_PAPER} 2, {row}")
    for row, epochs, percent in _TABLE_6.get(variant, ()):
        yield Score("ImageNet", TOP1, _to_fraction(percent), f"{_PAPER} 6, {row}, {epochs} epochs on JFT")
    if variant in _AUGREG_SCORES:
        yield Score("ImageNet", TOP1, _to_fraction(_AUGREG_SCORES[variant]), f"{_AUGREG_PAGE} {variant}, 384 px")


def iterate_published_checkpoints(variant: str) -> Iterator[str]:
    """Yield the published checkpoints of a variant, named as `hf-vit convert` accepts them."""
    for folder, files in _FOLDERS.items():
        for file in files:
            if file.removesuffix("-224").replace("ViT-", "").replace("_", "/") == variant:
                yield f"gs://{folder}/{file}.npz"
    if variant in _AUGREG:
        file, rate = _AUGREG[variant]
        yield f"gs://vit_models/augreg/{file}.npz"
        yield f"gs://vit_models/augreg/{file}--imagenet2012-steps_20k-lr_{rate}-res_384.npz"
    name = variant.removeprefix("BiT-")
    if name in _BIT_NAMES:
        yield from (f"gs://bit_models/BiT-{kind}.npz" for kind in (f"S-{name}", f"M-{name}", f"M-{name}-ILSVRC2012"))
    yield from (f"hf://google/{repo}" for repo in _HUB_NAMES.get(variant, ()))
    if variant in _TIMM_NAMES:
        yield f"timm:{_TIMM_NAMES[variant]}"


def _to_fraction(percent: float) -> float:
    """Return a percentage as a fraction, without the noise of the division."""
    return round(percent / 100, 6)


PAPERS = "papers"  # this name stands for the papers' variants
_NUM_CLASSES = 1000  # classes of the head with which a variant's parameters and FLOPs are counted
_MAX_REPOSITORIES = 1000  # largest number of repositories that are listed for one user
_MAX_TEXT_LENGTH = 200  # longest text from the Hub that is shown, in characters


@final
@dataclass(frozen=True)
class Entry:
    """The description of one model.

    Attributes:
        kind: "variant" of a paper, local "folder" or Hub "repository".
        name: the variant's name, the folder's path, or user/name.
        model_type: the architecture's name in config.json; "" if unknown.
        parameters: their number; for a variant with a head for 1,000 classes.
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


def list_entries(source: str, search: str = "") -> Iterator[Entry]:
    """Return the models of a folder, a Hub user, or "papers", without FLOPs, which `add_flops` counts.

    Variants of the papers are built to be described: only those whose lower-case name contains `search`.

    Raises:
        UserError: there is no such folder or Hub user.
    """
    if source == PAPERS:
        return (_describe_variant(name) for name in list_variant_names() if search in name.lower())
    folder = Path(source).expanduser()
    if folder.is_dir():
        return map(_describe_folder, find_model_folders(folder))
    if "/" in source or source.startswith((".", "~")):
        raise UserError(f"the folder {source} does not exist; give a folder, a user on the Hub, or {PAPERS}")
    return iter(_list_repositories(source))


def add_flops(entry: Entry) -> Entry:
    """Return the entry with the FLOPs of a forward pass, if they can be counted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about a configuration matter when it is loaded, not here
            if entry.kind == "variant":
                return replace(entry, forward_flops=forward_flops(variant_config(entry.name, num_labels=_NUM_CLASSES)))
            if entry.kind == "folder" and find_family(entry.model_type) is not None:
                config, task = find_config(entry.name)
                return replace(entry, forward_flops=forward_flops(config, task=task))
    except UserError as error:
        return replace(entry, problem=to_one_line(error))
    return entry


def _describe_variant(name: str) -> Entry:
    """Return the entry of a variant; the model is built without memory for its weights."""
    from transformers import AutoModelForImageClassification

    config = variant_config(name, num_labels=_NUM_CLASSES)
    with torch.device("meta"):
        model: Any = AutoModelForImageClassification.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scores = tuple(iterate_published_scores(name))
    checkpoints = tuple(iterate_published_checkpoints(name))
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
        config = read_config(folder)
        facts = load_facts(folder, config)
        parameters = None if config.quantization_config else count_parameters(folder)
    except (UserError, OSError) as error:
        return Entry("folder", str(folder), problem=to_one_line(error))
    scores: list[Score] = []
    for record in select_comparable(facts):
        data = record.data or DataFact(name="unnamed data")
        for name, metric in ACCURACIES.items():
            if (value := as_fraction(record.values.get(name))) is not None:
                source = to_one_line(record.command)
                scores.append(Score(_name_data(data.name, data.split), metric.lower(), value, source))
    return Entry("folder", str(folder), to_one_line(config.model_type), parameters, None, tuple(scores))


def _list_repositories(owner: str) -> list[Entry]:
    """Return the public models of a Hub user, at least one, from the Hub's metadata, without downloading files."""
    from huggingface_hub import HfApi

    expand: Any = ["cardData", "model-index", "evalResults", "safetensors", "config"]
    find = functools.partial(HfApi().list_models, author=owner, expand=expand, limit=_MAX_REPOSITORIES)
    problem = f"the folder {owner} does not exist, and"
    try:
        with guard_hub_access(owner):
            entries = list(map(_describe_repository, retry(lambda: list(find()), "listing the models")))
    except UserError as error:
        raise UserError(f"{problem} the Hub user {owner} cannot be read: {error}") from error
    if not entries:
        raise UserError(f"{problem} no Hub user of that name has a public model; give a folder or another user")
    return entries


def _describe_repository(info: "ModelInfo") -> Entry:
    name = _shorten(info.id)
    model_type = _shorten((info.config or {}).get("model_type", ""))
    parameters: object = info.safetensors.total if info.safetensors is not None else None
    total = parameters if isinstance(parameters, int) else None
    scores = tuple(dict.fromkeys(_list_published_scores(info)))
    return Entry("repository", name, model_type, total, None, scores, (f"hf://{name}",))


def _list_published_scores(info: "ModelInfo") -> Iterator[Score]:
    """Yield the accuracies in a card's `model-index`, which names the split, or else those in `.eval_results`."""
    from huggingface_hub.repocard_data import model_index_to_eval_results

    index: Any = info.model_index
    if not index:
        for result in info.eval_results or []:
            yield from _make_score(_shorten(result.dataset_id), TOP1, result.value, result.source_name)
        return
    try:
        results: Iterable[Any] = model_index_to_eval_results(index)[1]
    except (KeyError, TypeError, ValueError, AttributeError):  # it is malformed
        return
    for result in results:
        data = _name_data(result.dataset_name, result.dataset_split)
        yield from _make_score(data, result.metric_name or result.metric_type, result.metric_value, result.source_name)


def _make_score(data: str, metric: object, value: object, source: object) -> Iterator[Score]:
    """Yield the score if the metric is an accuracy: values above 1 are percents, and plain "accuracy" means top-1."""
    name = _shorten(metric).lower()
    if "accuracy" not in name or isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value <= 100:
        return
    fraction = float(value) if value <= 1 else value / 100
    yield Score(data, TOP1 if name == "accuracy" else name, fraction, _shorten(source or "its card"))


def _name_data(name: object, split: object) -> str:
    """Return the name of a data set with its split, if known."""
    return _shorten(f"{name}, split {split}" if split else name)


def _shorten(value: object) -> str:
    """Return a value as one line of limited length."""
    return to_one_line(value)[:_MAX_TEXT_LENGTH]


_BODY = """
<p class="quiet">{{ entries|length }} models from {{ places }}. Accuracies were published or recorded by the named
source; none was measured for this page.</p>
{% for data, rows in boards %}
<h2>{{ data }}</h2>
<div class="wide"><table>
<tr><th></th><th>model</th><th>{{ metric }}</th><th>parameters</th><th>FLOPs</th><th>source</th></tr>
{% for entry, score in rows %}
<tr><td>{{ loop.index }}</td><td>{{ entry.name }}</td><td>{{ percent(score.value) }}</td>
<td>{{ amount(entry.parameters) }}</td><td>{{ amount(entry.forward_flops) }}</td><td>{{ score.source }}</td></tr>
{% endfor %}
</table></div>
{% endfor %}
<h2>All models</h2>
<div class="wide"><table>
<tr><th>model</th><th>kind</th><th>architecture</th><th>parameters</th><th>FLOPs</th><th>checkpoints</th></tr>
{% for entry in entries %}
<tr><td>{{ entry.name }}</td><td>{{ entry.kind }}</td><td>{{ entry.problem or entry.model_type }}</td>
<td>{{ amount(entry.parameters) }}</td><td>{{ amount(entry.forward_flops) }}</td>
<td>{% for checkpoint in entry.checkpoints %}<code>{{ checkpoint }}</code><br>{% endfor %}</td></tr>
{% endfor %}
</table></div>
<p class="quiet">FLOPs are those of one image's forward pass (a multiply-add counts 2). FLOPs and parameters of a
paper's variant include a head for 1,000 classes.</p>
"""


@final
@dataclass(frozen=True, repr=False)
class Listing(Displayed):
    """The listed models in display order, and the folders, users or "papers" that were searched."""

    places: tuple[str, ...]
    entries: list[Entry]

    def overview(self) -> dict[str, object]:
        """Return where models were searched, and their number."""
        return {"places": ", ".join(self.places), "models": f"{len(self.entries):,}"}

    def make_leaderboards(self) -> list[tuple[str, list[tuple[Entry, Score]]]]:
        """Return (data set, models by top-1 accuracy) pairs; the data set with most models comes first."""
        boards: dict[str, list[tuple[Entry, Score]]] = {}
        for entry in self.entries:
            for score in entry.scores:
                if score.metric == TOP1:
                    boards.setdefault(score.data, []).append((entry, score))
        ranked = sorted(boards.items(), key=lambda board: (-len(board[1]), board[0]))
        return [(data, sorted(rows, key=lambda row: -row[1].value)) for data, rows in ranked]

    def tables(self) -> list[Table]:
        """Return the tables printed in a terminal: the models, and their results."""
        models: list[list[str]] = []
        results: list[list[str]] = []
        for entry in self.entries:
            name = to_one_line(entry.name)
            sizes = format_amount(entry.parameters), format_amount(entry.forward_flops)
            models.append([name, entry.problem or entry.model_type, *sizes, str(len(entry.checkpoints) or "")])
            for score in entry.scores:
                results.append([name, score.data, f"{percent(score.value)} {score.metric}", score.source])
        header = ["model", "architecture", "parameters", "FLOPs", "checkpoints"]
        tables = [Table(header, models, f"{format_count(len(models), 'model')} from {', '.join(self.places)}")]
        if results:
            tables.append(Table(["model", "data", "result", "source"], results, "published and recorded results"))
        return tables

    def to_json(self) -> str:
        """Return all entries as JSON."""
        return json.dumps([asdict(entry) for entry in self.entries], indent=2)

    def save_page(self, output: str | os.PathLike[str]) -> None:
        """Write the models as an HTML page; text from the Hub is escaped.

        Raises:
            UserError: the file name does not end in .html or .htm, or the file cannot be written.
        """
        if Path(output).suffix.lower() not in (".html", ".htm"):
            raise UserError(f"the output {output} is not an HTML file name; give a name that ends in .html")
        values = {"entries": self.entries, "places": ", ".join(self.places), "boards": self.make_leaderboards()}
        formats: dict[str, Any] = {"amount": format_amount, "percent": percent, "metric": TOP1}
        write_atomically(Path(output), render_report("Models", _BODY, width=90, **values, **formats))


def list_models(
    places: Sequence[str] = (),
    *,
    search: str | None = None,
    family: str | None = None,
    data: str | None = None,
    max_parameters: float | None = None,
) -> Listing:
    """Return the models of the papers, of folders and of Hub users that match all filters.

    Args:
        places: folders, users or organizations of the Hub, and "papers" for the papers' variants (the default).
        search: keep models whose name contains this text, in any case.
        family: keep models of this family ("hybrid") or model_type ("hf_hybrid_vit").
        data: keep results on data sets whose name contains this text, and models with such a result.
        max_parameters: keep models that are known to have at most this many parameters.

    Returns:
        The models in the order of the places; folders are sorted by path, variants as the papers list them.

    Raises:
        UserError: a place or the family does not exist, or the Hub cannot be reached.
    """
    from rich.console import Console
    from rich.progress import track

    if family is not None and family not in FAMILIES and not family.isidentifier():
        raise UserError(f"the family '{family}' is unknown; choose from {', '.join(FAMILIES)}")
    places = tuple(dict.fromkeys(places)) or (PAPERS,)
    model_types = (family, FAMILIES[family].model_type) if family is not None and family in FAMILIES else (family,)
    entries, text = list[Entry](), (search or "").lower()
    for entry in (entry for place in places for entry in list_entries(place, text)):
        if text not in entry.name.lower():
            continue
        if family is not None and entry.model_type not in model_types:
            continue
        if max_parameters is not None and (entry.parameters is None or entry.parameters > max_parameters):
            continue
        if data is not None:
            entry = replace(entry, scores=tuple(score for score in entry.scores if data.lower() in score.data.lower()))
        if data is None or entry.scores:
            entries.append(entry)
    console = Console(stderr=True)
    uncounted = track(entries, "counting FLOPs", console=console, transient=True, disable=not console.is_terminal)
    return Listing(places, list(map(add_flops, uncounted)))
