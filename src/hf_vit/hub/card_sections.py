"""What the sections of a model card say: values of facts.json and config.json in words.

What is read of a record's `values`, beyond the evaluation's own measurements:

- training and conversion: `space`, user/name of the static Space that shows the model; or `page`, the way from the card
  to a page that does, in the same repository: a folder's card that names no place on the Hub may lead up, to a file of
  the git repository around it.
- training: `recipe` (an object: hyperparameter -> value) and `base_model` (what was fine-tuned) have places of their
  own; everything else is listed by name.
- evaluation: `pictures`, the files that were drawn beside the weights. By a protocol other than top1: `headline`, name
  -> fraction, and `pictures`, file -> title.
- analysis: `pictures`, file -> title, likewise.
- conversion: everything is listed by name.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hf_vit.errors import UserError, one_line
from hf_vit.families import family_of
from hf_vit.hub.card_metadata import current_records, latest_evaluations, own_evaluation
from hf_vit.hub.model_folder import ModelConfig, Size, count_parameters
from hf_vit.hub.published_results import hub_dataset, hub_id
from hf_vit.repositories.reading import CONFIG, loading
from hf_vit.results.facts import Facts, Record, fraction

# A relative way, and nothing of Markdown in it.
_PATH = re.compile(r"(?!/)([\w./-]+)(#[\w-]+)?", re.ASCII)
_PICTURES = {
    "confusion_matrix.png": "Confusion matrix",
    "wrong_images.png": "The most confident mistakes: true → predicted class, its probability, place in the split",
}
# Values whose names in facts.json say less than they are.
_NAMES = {"chance_accuracy": "validation accuracy that chance explains, at most"}
_MAX_LISTED_CLASSES = 30
# What is drawn with images of the data in it; other pictures are made of numbers.
_SHOWING_IMAGES = re.compile(
    r"(wrong_images|\w+_worst_images|predictions|analysis_(attention_rollout|head_maps)(_\d+)?)\.(png|svg)"
)
# Settings that are off at 0, None or "no".
_SWITCHES = frozenset(
    {"label_smoothing", "dropout", "drop_path", "sam_rho", "clip", "horizontal_flip", "randaugment", "random_erasing",
     "mixup_alpha", "cutmix_alpha", "shift_px", "rotation_degrees", "shear_degrees", "zoom", "new_head", "head_bias",
     "learning_rates", "auto_augment", "color_jitter", "random_crop", "min_learning_rate", "architecture",
     "scale_jitter"}
)  # fmt: skip
# Settings -> what they belong to: (setting, its values).
_PARTS: dict[str, tuple[str, tuple[object, ...]]] = {
    "momentum": ("optimizer", ("sgd", "muon")),
    **dict.fromkeys(("beta1", "beta2"), ("optimizer", ("adamw", "lamb", "lion", "muon"))),
    "cooldown": ("schedule", ("warmup_stable_decay",)),
    **dict.fromkeys(("lora_rank", "lora_alpha"), ("tune", ("lora",))),
    "bce_threshold": ("loss", ("bce",)),
}
# Markdown's and GitHub's own markup, HTML, entities, formulas ($) and mentions (@); addresses are no links either.
_MARKUP = re.compile(r"[\\`*_<>|\[\]#~$@&]|:(?=//)|(?<=www)\.", re.IGNORECASE)


# Words of others that stay where they stand


class Markdown(str):
    """Markdown as it is meant; of everything else that a template prints the markup is escaped, see `text`."""

    __slots__ = ()


def text(value: object) -> Markdown:
    """Return words that stay inside their line or table cell and are not taken for markup."""
    return value if isinstance(value, Markdown) else Markdown(_MARKUP.sub(r"\\\g<0>", one_line(value)))


def code_span(value: object) -> Markdown:
    """Return a span of code that ends where it should."""
    line = one_line(value)
    ticks, padding = _more_ticks(line, 1), " " if "`" in line else ""
    return Markdown(f"{ticks}{padding}{line}{padding}{ticks}")


def code_block(code: str, language: str) -> Markdown:
    """Return a block of code, which no line of it can close."""
    ticks = _more_ticks(code, 3)
    return Markdown(f"{ticks}{language}\n{code}\n{ticks}")


def _more_ticks(code: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", code)), default=0))


# The sections


def shows_images(picture: str) -> bool:
    """Return whether a picture beside the weights shows images of somebody's data, and so is not everybody's to see."""
    return _SHOWING_IMAGES.fullmatch(picture) is not None


def sections(
    folder: Path, config: ModelConfig, facts: Facts, share_images: bool = False, on_hub: bool = False
) -> dict[str, Any]:
    """Return what the template shows; None, or an empty list, wherever the facts are missing.

    Args:
        folder, config, facts: of the model.
        share_images: show pictures with images of the data, too.
        on_hub: the folder is, or will be, a repository of the Hub by itself: no link leads up from it.
    """
    shown = _model(folder, config) | _origin(facts) | _evaluations(folder, facts)
    shown["page"] = _page(facts, None if on_hub else folder)
    if not share_images:
        for name in ("pictures", "measured_pictures", "analyses"):
            shown[name] = [(file, title) for file, title in shown[name] if not shows_images(file)]
    return shown


def _model(folder: Path, config: ModelConfig) -> dict[str, Any]:
    # transformers' own ViT, as an export saves it, is the plain one.
    inside, names, head = config.backbone, config.id2label or {}, config.dense_head
    family = family_of("hf_vit" if inside.model_type == "vit" else inside.model_type)
    layers, width, heads = inside.num_hidden_layers, inside.hidden_size, inside.num_attention_heads
    shape = {
        f"{layers} layer{'s' * (layers != 1)}": isinstance(layers, int),
        f"width {width}": isinstance(width, int),
        f"{heads} attention head{'s' * (heads != 1)}": isinstance(heads, int),
        f"patches of {_size(inside.patch_size)} px": inside.patch_size,
        f"images of {_size(inside.image_size)} px": inside.image_size,
    }
    return {
        "family": family.label if family else Markdown(f"A model of the type {code_span(inside.model_type)}"),
        "is_classifier": config.is_classifier,
        "is_multi_label": config.is_multi_label,
        "is_regression": config.is_regression,
        "task": None if head is None else head.task,
        "head": None if head is None else head.name,
        "shape": [words for words, is_known in shape.items() if is_known],
        "parameters": _grouped(count_parameters(folder)),
        "flops": _flops(config),
        "classes": [names[key] for key in sorted(names)] if len(names) <= _MAX_LISTED_CLASSES else [],
        "num_classes": len(names),
        "learning_curve": (folder / "learning_curve.png").is_file(),
    }


def _size(value: Size | None) -> str:
    return f"{value}x{value}" if isinstance(value, int) else "x".join(map(str, value or ()))


def _flops(config: ModelConfig) -> str | None:
    """Return those of one image's forward pass, counted from the configuration; None for other packages' models."""
    from hf_vit.cost.flops import forward_flops

    family = family_of(config.model_type)
    if family is None:
        return None
    try:
        with loading(CONFIG):
            built = family.config_class.from_dict(config.model_dump(exclude_unset=True))
            flops = forward_flops(built, task="classification" if config.is_classifier else "model")
    except UserError:  # nothing is said of what cannot be counted
        return None
    return f"{flops / 1e9:.4g} GFLOPs" if flops >= 1e9 else f"{flops / 1e6:.4g} MFLOPs"


def _origin(facts: Facts) -> dict[str, Any]:
    """Return how the weights came about."""
    training, conversion = facts.latest("training"), facts.latest("conversion")
    base_model, recipe = (training.values.get(name) if training else None for name in ("base_model", "recipe"))
    return {
        "training": _run(training, skip=("recipe", "base_model", "parameters", "space", "page")),
        "base_model": code_span(base_model) if base_model else None,
        "recipe": _rows(_in_use(recipe)) if isinstance(recipe, dict) else [],
        "conversion": _run(conversion, skip=("parameters", "verification", "space", "page")),
        "parity": _rows(conversion.values.get("verification")) if conversion else [],
    }


def _in_use(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return the recipe without what was switched off, and without what belongs to it."""
    kept = {name: value for name, value in recipe.items() if value or name not in _SWITCHES}
    if not recipe.get("sam_rho"):
        kept.pop("sam_micro_batches", None)
    if recipe.get("repeated_augmentation") == 1:
        del kept["repeated_augmentation"]
    for name, (setting, values) in _PARTS.items():
        if setting in recipe and recipe[setting] not in values:
            kept.pop(name, None)
    return kept


def _page(facts: Facts, folder: Path | None) -> Markdown | None:
    """Return the link to what shows the model: kept beside the latest training or conversion that has one.

    Args:
        facts: may be a stranger's.
        folder: from which it may lead up.
    """
    space, page = _stated(facts, "space"), _stated(facts, "page")
    if space and hub_id(space) == space:
        return Markdown(f"[{text(space)}](https://huggingface.co/spaces/{space})")
    way = _PATH.fullmatch(page)
    stays = way is not None and (".." not in way[1].split("/") or (folder is not None and _is_around(folder, way[1])))
    return Markdown(f"[its page]({page})") if stays else None


def _is_around(folder: Path, way: str) -> bool:
    """Return whether a way from a folder leads to a file of the git repository that it lies in."""
    target = (folder / way).resolve()
    root = next((above for above in folder.resolve().parents if (above / ".git").exists()), None)
    return root is not None and target.is_relative_to(root) and target.is_file()


def _stated(facts: Facts, name: str) -> str:
    value = next((record.values[name] for record in reversed(facts.origins()) if name in record.values), None)
    return value if isinstance(value, str) else ""


def _run(record: Record | None, skip: Sequence[str]) -> dict[str, Any] | None:
    """Return how a training or conversion was run, on what, and its plain numbers."""
    if record is None:
        return None
    return {
        "command": code_block(one_line(record.command), "bash"),
        "date": f"{record.date:%Y-%m-%d}",
        "data": _linked(record),
        "fingerprint": record.data.fingerprint if record.data else None,
        "revision": record.data.revision if record.data else None,
        "seed": record.seed,
        "time": None if record.seconds is None else _duration(record.seconds),
        "machine": _machine(record.hardware),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "rows": _rows({key: value for key, value in record.values.items() if key not in skip}),
    }


def _rows(values: object, prefix: str = "") -> list[tuple[str, str]]:
    """Return a table of two columns; nested values are rows of their own: {"a": {"b_c": 1}} -> ("a b c", "1")."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items() if isinstance(values, Mapping) else ():
        name = f"{prefix}{_NAMES.get(key, key.replace('_', ' '))}"
        if isinstance(value, Mapping):
            rows += _rows(value, f"{name} ")
        elif value is not None:
            is_share = key.endswith("accuracy") and isinstance(value, float)
            rows.append((name, _percent(value) if is_share else _plain(value)))
    return rows


def _evaluations(folder: Path, facts: Facts) -> dict[str, Any]:
    """Return what was measured of these weights."""
    results, own, current = latest_evaluations(facts), own_evaluation(facts), current_records(facts)
    pictured = [record for record in facts.of_kind("evaluation") if isinstance(record.values.get("pictures"), list)]
    training, per_class = facts.latest("training"), own.values.get("per_class") if own else None
    is_listed = isinstance(per_class, dict) and len(per_class) <= _MAX_LISTED_CLASSES
    drawn = cast(Sequence[object], pictured[-1].values["pictures"]) if pictured else ()
    return {
        "results": [_result(record, training, results) for record in results],
        "warnings": [
            f"{_distinct_data_name(record, results)}, split {record.data.split if record.data else None}: {warning}."
            for record in results
            if isinstance(warnings := record.values.get("warnings"), list)
            for warning in warnings
        ],
        "commands": [code_block(line, "bash") for line in dict.fromkeys(one_line(each.command) for each in results)],
        "per_class": [(name, _percent(value)) for name, value in cast(Any, per_class).items()] if is_listed else [],
        "per_class_of": _describe(own) if own else None,
        "pictures": [
            (Markdown(name), title) for name, title in _PICTURES.items() if name in drawn and (folder / name).is_file()
        ],
        "pictured": _describe(pictured[-1]) if pictured else None,
        "measurements": _measurements(current),
        "measured_pictures": _captioned(folder, [record for record in current if record.kind == "evaluation"]),
        "analyses": _captioned(folder, [record for record in current if record.kind == "analysis"]),
    }


def _result(record: Record, training: Record | None, all_results: Sequence[Record]) -> dict[str, Any]:
    values, data = record.values, record.data
    seed = training.seed if training else None
    return {
        "data": _distinct_data_name(record, all_results),
        "split": (data.split if data else None) or "-",
        "images": _grouped(data.size if data else None) or "-",
        "training_seed": "-" if seed is None else seed,
        **{name: _percent(values.get(name)) for name in ("top1", "top5", "ece")},
        "loss": f"{values['loss']:.4f}" if isinstance(values.get("loss"), float) else "-",
        "date": f"{record.date:%Y-%m-%d}",
    }


def _distinct_data_name(record: Record, all_results: Sequence[Record]) -> str:
    """Return the data set's name, with its fingerprint if results of another version of that data set are listed."""
    if record.data is None:
        return "unnamed"
    name = record.data.name
    fingerprints = {other.data.fingerprint for other in all_results if other.data and other.data.name == name}
    return name if len(fingerprints) < 2 else f"{name} ({record.data.fingerprint})"


def _measurements(records: Sequence[Record]) -> list[tuple[str, str, str | None, str]]:
    """Return (name, percentage, data, date) of what protocols call their headlines; of each the latest."""

    def numbers_in_order(name: str) -> list[str | int]:  # "5-shot" before "10-shot"
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    latest: dict[object, tuple[str, str, str | None, str]] = {}
    for record in records:
        headline, data = record.values.get("headline"), record.data
        if not isinstance(headline, dict) or (data is not None and data.split == "train"):
            continue
        for name in sorted(headline, key=numbers_in_order):
            row = (name, _percent(headline[name]), _describe(record), f"{record.date:%Y-%m-%d}")
            latest[name, row[2], data and data.fingerprint] = row
    return list(latest.values())


def _captioned(folder: Path, records: Sequence[Record]) -> list[tuple[Markdown, str]]:
    """Return (file, caption) of the pictures with titles that were put beside the weights; of each the latest."""
    captions: dict[Markdown, str] = {}
    for record in records:
        pictures = record.values.get("pictures")
        for name, title in pictures.items() if isinstance(pictures, dict) else ():
            if re.fullmatch(r"\w[\w.\-]*\.(png|svg)", name) and (folder / name).is_file():
                captions[Markdown(name)] = ", ".join(part for part in (str(title), _describe(record)) if part)
    return list(captions.items())


def _describe(record: Record) -> str | None:
    """Return data, split and size: "digits, split test, 360 images"."""
    if (data := record.data) is None:
        return None
    split = f", split {data.split}" if data.split else ""
    return f"{data.name}{split}" + ("" if data.size is None else f", {data.size:,} images")


def _linked(record: Record) -> Markdown | None:
    """Return as `_describe`; with a link to a data set of the Hub."""
    described, dataset = _describe(record), hub_dataset(record.data) if record.data else None
    if described is None or dataset is None or not re.fullmatch(r"[\w./-]+", dataset):
        return None if described is None else text(described)
    return Markdown(f"{text(described)} ([on the Hub](https://huggingface.co/datasets/{dataset}))")


def _machine(hardware: Mapping[str, Any]) -> str | None:
    if not hardware.get("name"):
        return None
    cores = f", {hardware['cores']} CPU cores" if "cores" in hardware else ""
    return f"{hardware['name']}{cores}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _percent(value: object) -> str:
    return "-" if (share := fraction(value)) is None else f"{100 * share:.2f}%"


def _grouped(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"
