"""Fill the sections of a model card with values from facts.json and config.json.

Keys of a record's `values` that are read here, besides an evaluation's metrics:

- training and conversion: `space`, user/name of the static Space that shows the model; or `page`, a relative link to a
  page in the same repository. Only the card of a folder that is not on the Hub may link to a parent folder, and only to
  a file of the git repository around it.
- training: `recipe` (hyperparameter -> value) and `base_model` have sections of their own; other keys are listed.
- evaluation: `pictures`, the plots beside the weights. Protocols other than top1: `headline` (name -> fraction) and
  `pictures` (file -> title).
- analysis: `pictures` (file -> title).
- conversion: all keys are listed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.errors import UserError, to_one_line
from hf_vit.families import find_family
from hf_vit.hub.card_metadata import describe_inputs, select_evaluations, select_main_evaluation
from hf_vit.hub.model_folder import ModelConfig, Size, count_parameters
from hf_vit.hub.published_results import find_hub_dataset, parse_hub_id
from hf_vit.repositories.reading import CONFIG, explain_load_errors
from hf_vit.results.facts import Facts, Record, as_fraction

# A relative link to a file of another folder, without Markdown characters. Of an absolute path a name is left here.
_PATH = re.compile(r"(?!/)([\w./-]*/[\w.-]+)(#[\w-]+)?", re.ASCII)
_PICTURES = {
    "confusion_matrix.png": "Confusion matrix",
    "wrong_images.png": "The most confident mistakes: true → predicted class, its probability, index in the split",
}
# Labels of values whose names in facts.json do not explain them.
_LABELS = {"chance_accuracy": "validation accuracy that chance explains, at most"}
_MAX_LISTED_CLASSES = 30
# Plots that contain images of the data.
_IMAGE_PLOTS = re.compile(
    r"(wrong_images|\w+_worst_images|predictions|analysis_(attention_rollout|head_maps)(_\d+)?)\.(png|svg)"
)
# Settings that are off if they are 0, None or "no"; they are listed only if they are on.
_SWITCHES = frozenset(
    {"label_smoothing", "dropout", "drop_path", "sam_rho", "clip", "horizontal_flip", "randaugment", "random_erasing",
     "mixup_alpha", "cutmix_alpha", "shift_px", "rotation_degrees", "shear_degrees", "zoom", "new_head", "head_bias",
     "learning_rates", "auto_augment", "color_jitter", "random_crop", "min_learning_rate", "architecture",
     "scale_jitter"}
)  # fmt: skip
# Setting -> (the setting it depends on, the values for which it applies).
_DEPENDENT_SETTINGS: dict[str, tuple[str, tuple[object, ...]]] = {
    "momentum": ("optimizer", ("sgd", "muon")),
    **dict.fromkeys(("beta1", "beta2"), ("optimizer", ("adamw", "lamb", "lion", "muon"))),
    "cooldown": ("schedule", ("warmup_stable_decay",)),
    "tuned_blocks": ("tune", ("last-blocks",)),
    **dict.fromkeys(("lora_rank", "lora_alpha"), ("tune", ("lora",))),
    "bce_threshold": ("loss", ("bce",)),
}
# Characters of Markdown, HTML, entities, formulas ($) and mentions (@), and those that make plain URLs links.
_MARKUP = re.compile(r"[\\`*_<>|\[\]#~$@&]|:(?=//)|(?<=www)\.", re.IGNORECASE)


class Markdown(str):
    """A string of Markdown that a template prints as it is; all other values are escaped by `escape_markup`."""

    __slots__ = ()


def escape_markup(value: object) -> Markdown:
    """Return a value as one line with its markup escaped, unless it is `Markdown` already."""
    return value if isinstance(value, Markdown) else Markdown(_MARKUP.sub(r"\\\g<0>", to_one_line(value)))


def format_code_span(value: object) -> Markdown:
    """Return a value as an inline code span that no backtick in it can close."""
    line = to_one_line(value)
    ticks = _fence(line, 1)
    padding = " " if "`" in line else ""
    return Markdown(f"{ticks}{padding}{line}{padding}{ticks}")


def format_code_block(code: str, language: str) -> Markdown:
    """Return code as a fenced block that no line in it can close."""
    ticks = _fence(code, 3)
    return Markdown(f"{ticks}{language}\n{code}\n{ticks}")


def _fence(code: str, min_length: int) -> str:
    """Return a run of backticks longer than any in the code."""
    return "`" * max(min_length, 1 + max(map(len, re.findall("`+", code)), default=0))


def shows_images(picture: str) -> bool:
    """Return whether a plot contains images of the data, which its owner may not want to publish."""
    return _IMAGE_PLOTS.fullmatch(picture) is not None


def make_sections(
    folder: Path, config: ModelConfig, facts: Facts, share_images: bool = False, on_hub: bool = False
) -> dict[str, Any]:
    """Return the values of the card's template; None or an empty list where facts are missing.

    Links must not lead out of a folder that is or becomes a Hub repository (`on_hub`).
    """
    values = _make_model_section(folder, config) | _make_origin_sections(facts)
    values |= _make_evaluation_sections(folder, facts)
    values["page"] = _find_page_link(facts, None if on_hub else folder)
    for name in () if share_images else ("pictures", "measured_pictures", "analyses"):
        values[name] = [(file, title) for file, title in values[name] if not shows_images(file)]
    return values


def _make_model_section(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Return architecture, head, size and classes of the model."""
    backbone = config.backbone
    class_names = config.id2label or {}
    head = config.dense_head
    # An export may use transformers' own ViT, which is our plain family.
    family = find_family("hf_vit" if backbone.model_type == "vit" else backbone.model_type)
    layers, width, heads = backbone.num_hidden_layers, backbone.hidden_size, backbone.num_attention_heads
    parameters = None if config.quantization_config else count_parameters(folder)
    shape = {  # phrase -> whether config.json has its value
        f"{layers} layer{'' if layers == 1 else 's'}": isinstance(layers, int),
        f"width {width}": isinstance(width, int),
        f"{heads} attention head{'' if heads == 1 else 's'}": isinstance(heads, int),
        f"patches of {_format_size(backbone.patch_size)} px": backbone.patch_size,
        f"images of {_format_size(backbone.image_size)} px": backbone.image_size,
    }
    return {
        "family": family.label if family else Markdown(f"A model of the type {format_code_span(backbone.model_type)}"),
        "is_classifier": config.is_classifier,
        "is_multi_label": config.is_multi_label,
        "is_regression": config.is_regression,
        "task": None if head is None else head.task,
        "head": None if head is None else head.name,
        "shape": [phrase for phrase, is_known in shape.items() if is_known],
        "parameters": None if parameters is None else f"{parameters:,}",
        "flops": _format_flops(config),
        "classes": [class_names[key] for key in sorted(class_names)] if len(class_names) <= _MAX_LISTED_CLASSES else [],
        "num_classes": len(class_names),
        "learning_curve": (folder / "learning_curve.png").is_file(),
    }


def _format_size(value: Size | None) -> str:
    """Return a size in pixels such as 224x224."""
    return f"{value}x{value}" if isinstance(value, int) else "x".join(map(str, value or ()))


def _format_flops(config: ModelConfig) -> str | None:
    """Return the FLOPs of one image's forward pass with their unit; None for architectures of other packages."""
    from hf_vit.cost.flops import forward_flops

    family = find_family(config.model_type)
    if family is None:
        return None
    try:
        with explain_load_errors(CONFIG):
            built = family.config_class.from_dict(config.model_dump(exclude_unset=True))
            flops = forward_flops(built, task="classification" if config.is_classifier else "model")
    except UserError:  # FLOPs of this configuration cannot be counted
        return None
    return f"{flops / 1e9:.4g} GFLOPs" if flops >= 1e9 else f"{flops / 1e6:.4g} MFLOPs"


def _make_origin_sections(facts: Facts) -> dict[str, Any]:
    """Return how the weights were trained and converted."""
    training, conversion = facts.find_latest("training"), facts.find_latest("conversion")
    base_model, recipe = (training.values.get(name) if training else None for name in ("base_model", "recipe"))
    run_section = _make_run_section(training, skipped_keys=("recipe", "base_model", "parameters", "space", "page"))
    trained_on = None
    # A soup is not trained; its data chose or evaluated its ingredients.
    if training and run_section and run_section["data"] and not (isinstance(recipe, dict) and recipe.get("soup")):
        verb, only = "fine-tuned" if base_model else "trained", "" if "unlabelled" in training.values else " only"
        trained_on = Markdown(f"{verb} on {run_section['data']}{only}")
    return {
        "training": run_section,
        "trained_on": trained_on,
        "base_model": format_code_span(base_model) if base_model else None,
        "recipe": _make_rows(_drop_inactive_settings(recipe)) if isinstance(recipe, dict) else [],
        "conversion": _make_run_section(conversion, skipped_keys=("parameters", "verification", "space", "page")),
        "parity": _make_rows(conversion.values.get("verification")) if conversion else [],
    }


def _drop_inactive_settings(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return a recipe without settings that are switched off, or that depend on one that is."""
    active = {name: value for name, value in recipe.items() if value or name not in _SWITCHES}
    if not recipe.get("sam_rho"):
        active.pop("sam_micro_batches", None)
    if recipe.get("repeated_augmentation") == 1:
        del active["repeated_augmentation"]
    for name, (setting, values) in _DEPENDENT_SETTINGS.items():
        if setting in recipe and recipe[setting] not in values:
            active.pop(name, None)
    return active


def _find_page_link(facts: Facts, folder: Path | None) -> Markdown | None:
    """Return a link to the Space or page that shows the model, as its latest training or conversion names it.

    The facts are untrusted. A link to a parent of `folder` must lead to a file of the git repository around it; None
    allows no such link.
    """
    values: dict[str, Any] = {}
    for record in facts.list_origins():
        values |= record.values
    space, page = (value if isinstance(value, str) else "" for value in (values.get("space"), values.get("page")))
    if space and parse_hub_id(space) == space:
        return Markdown(f"[{escape_markup(space)}](https://huggingface.co/spaces/{space})")
    match = _PATH.fullmatch(page)
    if match is None:
        return None
    if ".." in match[1].split("/"):
        parents = folder.resolve().parents if folder is not None else ()
        root = next((parent for parent in parents if (parent / ".git").exists()), None)
        target = Path(folder or "", match[1]).resolve()
        if root is None or not target.is_relative_to(root) or not target.is_file():
            return None
    return Markdown(f"[its page]({page})")


def _make_run_section(record: Record | None, skipped_keys: Sequence[str]) -> dict[str, Any] | None:
    """Return the command, data, machine and further values of a training or conversion."""
    if record is None:
        return None
    machine = record.hardware.get("name")
    if machine and "cores" in record.hardware:
        machine = f"{machine}, {record.hardware['cores']} CPU cores"
    return {
        "command": format_code_block(to_one_line(record.command), "bash"),
        "date": f"{record.date:%Y-%m-%d}",
        "data": _link_data(record),
        "fingerprint": record.data.fingerprint if record.data else None,
        "revision": record.data.revision if record.data else None,
        "seed": record.seed,
        "time": None if record.seconds is None else _format_duration(record.seconds),
        "machine": machine,
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "rows": _make_rows({key: value for key, value in record.values.items() if key not in skipped_keys}),
    }


def _make_rows(values: object, prefix: str = "") -> list[tuple[str, str]]:
    """Return (name, value) rows; nested values get joined names: {"a": {"b_c": 1}} gives ("a b c", "1")."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items() if isinstance(values, Mapping) else ():
        name = f"{prefix}{_LABELS.get(key, key.replace('_', ' '))}"
        if isinstance(value, Mapping):
            rows += _make_rows(value, f"{name} ")
        elif value is not None:
            is_share = key.endswith("accuracy") and isinstance(value, float)
            rows.append((name, _format_percent(value) if is_share else _format_value(value)))
    return rows


def _make_evaluation_sections(folder: Path, facts: Facts) -> dict[str, Any]:
    """Return results, plots and further measurements of the current weights."""
    results = select_evaluations(facts)
    main = select_main_evaluation(facts)
    current_records = facts.select_current()
    training = facts.find_latest("training")
    commands = dict.fromkeys(to_one_line(record.command) for record in results)
    per_class: Any = main.values.get("per_class") if main else None
    if not isinstance(per_class, dict) or len(per_class) > _MAX_LISTED_CLASSES:
        per_class = {}
    evaluations = [record for record in current_records if record.kind == "evaluation"]
    # A list of names are the plots of the standard evaluation; those of a protocol come with captions, as a dict.
    with_plots = [record for record in evaluations if isinstance(record.values.get("pictures"), list)]
    plots: Any = with_plots[-1].values["pictures"] if with_plots else ()
    drawn = [name for name in _PICTURES if name in plots and (folder / name).is_file()]
    return {
        "has_replaced_weights": facts.has_replaced_weights,
        "results": [_make_result_row(record, training, results) for record in results],
        "warnings": [line for record in results for line in _make_warning_lines(record, results)],
        "commands": [format_code_block(command, "bash") for command in commands],
        "per_class": [(name, _format_percent(value)) for name, value in per_class.items()],
        "per_class_of": _describe_data(main) if main else None,
        "pictures": [(Markdown(name), _PICTURES[name]) for name in drawn],
        "pictured": _describe_data(with_plots[-1]) if with_plots else None,
        "measurements": _make_headline_rows(current_records),
        "measured_pictures": _list_plots(folder, evaluations),
        "analyses": _list_plots(folder, [record for record in current_records if record.kind == "analysis"]),
    }


def _make_warning_lines(record: Record, all_results: Sequence[Record]) -> list[str]:
    """Return a record's warnings, each with the name of the data and its split."""
    warnings: Any = record.values.get("warnings")
    data = f"{_make_distinct_data_name(record, all_results)}, split {record.data.split if record.data else None}"
    return [f"{data}: {warning}." for warning in warnings] if isinstance(warnings, list) else []


def _make_result_row(record: Record, training: Record | None, all_results: Sequence[Record]) -> dict[str, Any]:
    values, data = record.values, record.data
    seed = training.seed if training else None
    return {
        "data": _make_distinct_data_name(record, all_results),
        "split": (data.split if data else None) or "-",
        "images": f"{data.size:,}" if data and data.size is not None else "-",
        "training_seed": "-" if seed is None else seed,
        **{name: _format_percent(values.get(name)) for name in ("top1", "top5", "ece")},
        "loss": f"{values['loss']:.4f}" if isinstance(values.get("loss"), float) else "-",
        "date": f"{record.date:%Y-%m-%d}",
    }


def _make_distinct_data_name(record: Record, all_results: Sequence[Record]) -> str:
    """Return the data set's name, with its fingerprint if results of another version of that data set are listed."""
    if record.data is None:
        return "unnamed"
    name = record.data.name
    fingerprints = {other.data.fingerprint for other in all_results if other.data and other.data.name == name}
    return name if len(fingerprints) < 2 else f"{name} ({record.data.fingerprint})"


def _make_headline_rows(records: Sequence[Record]) -> list[tuple[str, str, str | None, str]]:
    """Return the latest (name, percentage, data, date) of every headline metric and data set; not of train splits.

    The records are in the order of their dates.
    """

    def split_numbers(name: str) -> list[str | int]:  # to sort "5-shot" before "10-shot"
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]

    latest: dict[object, tuple[str, str, str | None, str]] = {}
    for record in records:
        headline = record.values.get("headline")
        data = record.data
        if not isinstance(headline, dict) or (data is not None and data.split == "train"):
            continue
        description = _describe_data(record)
        for name in sorted(headline, key=split_numbers):
            label = name + describe_inputs(record)
            row = (label, _format_percent(headline[name]), description, f"{record.date:%Y-%m-%d}")
            latest[label, description, None if data is None else data.fingerprint] = row
    return list(latest.values())


def _list_plots(folder: Path, records: Sequence[Record]) -> list[tuple[Markdown, str]]:
    """Return (file, caption) of the plots beside the weights; a later record's caption replaces an earlier one."""
    captions: dict[Markdown, str] = {}
    for record in records:
        pictures = record.values.get("pictures")
        for name, title in pictures.items() if isinstance(pictures, dict) else ():
            if re.fullmatch(r"\w[\w.\-]*\.(png|svg)", name) and (folder / name).is_file():
                parts = str(title) + describe_inputs(record), _describe_data(record)
                captions[Markdown(name)] = ", ".join(part for part in parts if part)
    return list(captions.items())


def _describe_data(record: Record) -> str | None:
    """Return data set, split and size, such as "digits, split test, 360 images"; None if the record has no data."""
    data = record.data
    if data is None:
        return None
    split = f", split {data.split}" if data.split else ""
    size = "" if data.size is None else f", {data.size:,} images"
    return f"{data.name}{split}{size}"


def _link_data(record: Record) -> Markdown | None:
    """Return the data as `_describe_data` does, with a link if the data set is on the Hub."""
    if record.data is None:
        return None
    description = escape_markup(_describe_data(record))
    dataset = find_hub_dataset(record.data)
    if dataset is None or not re.fullmatch(r"[\w./-]+", dataset):
        return description
    return Markdown(f"{description} ([on the Hub](https://huggingface.co/datasets/{dataset}))")


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_format_value(item) for item in value)
    return str(value)


def _format_duration(seconds: float) -> str:
    """Return seconds as "95.0 s", "3.2 min" or "4.1 h"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _format_percent(value: object) -> str:
    """Return a fraction as a percentage; "-" if it is not a number in [0, 1]."""
    share = as_fraction(value)
    return "-" if share is None else f"{100 * share:.2f}%"
