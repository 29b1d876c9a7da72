"""The model card, README.md, rendered from facts.json and config.json: it states what was measured and nothing else.

What the card reads from a record's `values`, beyond the evaluation's own measurements:

- training: `recipe` (an object: hyperparameter -> value) and `base_model` (what was fine-tuned) have places of their
  own; everything else is listed by name.
- evaluation: `pictures`, the files that were drawn beside the weights. By a protocol other than top1: `headline`, name
  -> fraction, and `pictures`, file -> title.
- analysis: `pictures`, file -> title, likewise.
- conversion: everything is listed by name.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.errors import UserError
from hf_vit.families import family_of
from hf_vit.results.facts import Facts, Record
from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

CARD_NAME = "README.md"
MARKER = "<!-- Rendered by hf-vit from facts.json and config.json; edits here are lost when it is rendered again. -->"
DEFAULT_LICENSE = "apache-2.0"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_PICTURES = {
    "confusion_matrix.png": "Confusion matrix",
    "wrong_images.png": "The most confident mistakes: true → predicted class, its probability, place in the split",
}
_MAX_LISTED_CLASSES = 30


def write_card(folder: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write `folder/README.md` in one move, replacing what is there; the arguments are those of `render_card`."""
    path = Path(folder) / CARD_NAME
    write_atomically(path, render_card(folder, repo_id=repo_id, license=license))
    return path


def refresh_card(folder: str | os.PathLike[str]) -> Path | None:
    """Render the card again after new facts, unless somebody wrote README.md by hand (None then)."""
    if (Path(folder) / CARD_NAME).exists() and not is_rendered(folder):
        return None
    return write_card(folder)


def is_rendered(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder/README.md` was rendered from facts, so that rendering it again loses nobody's words."""
    try:
        return MARKER in (Path(folder) / CARD_NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False


def render_card(folder: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None) -> str:
    """The card of a model folder, metadata included. A section whose facts are missing is absent.

    Args:
        folder: holds config.json; weights, facts.json and pictures are used as far as they are there.
        repo_id: the name in the code examples; by default the one of the card that is there, else the folder's name.
        license: Hub license id; by default the one of the card that is there, else "apache-2.0".

    Raises:
        UserError: there is no config.json, or facts.json is damaged.
    """
    from huggingface_hub import ModelCard

    folder = Path(folder)
    config = _config(folder)
    facts = Facts.load(folder)
    results = _latest_evaluations(facts)
    name = repo_id or _repo_there(folder) or folder.resolve().name
    context = _context(folder, config, facts, results) | {"marker": MARKER, "repo_id": name}
    context["title"] = name.rpartition("/")[2]
    data = _metadata(config, facts, results, context["title"], license or _license_there(folder))
    template = resources.files("hf_vit.model_cards").joinpath("card_template.md").read_text(encoding="utf-8")
    return str(ModelCard.from_template(data, template_str=template, **context)).rstrip() + "\n"


def count_parameters(folder: str | os.PathLike[str]) -> int | None:
    """Number of stored values, from the headers of the safetensors files; None where there are none."""
    from safetensors import safe_open

    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    total = 0
    for name in names:
        if not (Path(folder) / name).is_file():
            return None
        with cast(Any, safe_open)(str(Path(folder) / name), framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                total += _product(file.get_slice(key).get_shape())
    return total


def _product(shape: Sequence[int]) -> int:
    result = 1
    for side in shape:
        result *= side
    return result


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no model: there is no config.json in it; give a saved model's folder"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); save the model again") from error


def _license_there(folder: Path) -> str:
    """The license that the present card declares."""
    import yaml
    from huggingface_hub import ModelCard

    path = folder / CARD_NAME
    if not path.is_file():
        return DEFAULT_LICENSE
    try:
        return str(ModelCard.load(path).data.get("license") or DEFAULT_LICENSE)
    except (ValueError, TypeError, yaml.YAMLError):  # no readable metadata: nothing is declared
        return DEFAULT_LICENSE


def _repo_there(folder: Path) -> str | None:
    """The name in the code examples of the present card, if it was rendered."""
    if not is_rendered(folder):
        return None
    found = re.search(r'^repo = "(.*)"$', (folder / CARD_NAME).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return found[1] if found else None


def _latest_evaluations(facts: Facts) -> list[Record]:
    """The last evaluation of every data split, of those made after the weights were last changed."""
    latest: dict[tuple[str | None, str | None], Record] = {}
    for record in _of_these_weights(facts):
        if record.kind == "evaluation" and isinstance(record.values.get("top1"), float | int):
            data = record.data
            key = (data.name, data.split) if data else (None, None)
            latest.pop(key, None)
            latest[key] = record
    return list(latest.values())


def _of_these_weights(facts: Facts) -> list[Record]:
    """The records from the last change of the weights on."""
    changed = [place for place, record in enumerate(facts.records) if record.kind in ("training", "conversion")]
    return facts.records[changed[-1] if changed else 0 :]


def _metadata(
    config: dict[str, Any], facts: Facts, results: list[Record], model_name: str, license: str
) -> "ModelCardData":
    from huggingface_hub import ModelCardData

    trainings = facts.of_kind("training")
    hub_data = [name for record in trainings if record.data and (name := _hub_id(record.data.name))]
    bases = [name for record in trainings if (name := _hub_id(str(record.values.get("base_model", ""))))]
    task = _task(config)
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=[task, "vision", str(config.get("model_type", "vit"))],
        datasets=sorted(set(hub_data)) or None,
        base_model=bases[-1] if bases else None,
        metrics=["accuracy"] if results else None,
        model_name=model_name if results else None,
        eval_results=[entry for record in results for entry in _eval_results(record)] or None,
    )


def _eval_results(record: Record) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    name = " ".join(record.data.name.split()) if record.data else "unnamed"
    names = {"top1": "Top-1 accuracy", "top5": "Top-5 accuracy"}
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=_hub_id(name) or re.sub(r"[^\w.\-]+", "-", name),
            dataset_name=name,
            dataset_split=record.data.split if record.data else None,
            metric_type="accuracy",
            metric_name=title,
            metric_value=round(float(cast(float, record.values[key])), 4),
        )
        for key, title in names.items()
        if isinstance(record.values.get(key), float | int)
    ]


def _task(config: dict[str, Any]) -> str:
    architecture = (config.get("architectures") or [""])[0]
    return "image-classification" if "ForImageClassification" in architecture else "image-feature-extraction"


def _hub_id(name: str) -> str | None:
    """`user/name` of a Hub repository (without its configuration), or None for other names."""
    plain = name.partition(":")[0]
    return plain if _HUB_ID.fullmatch(plain) else None


def _context(folder: Path, config: dict[str, Any], facts: Facts, results: list[Record]) -> dict[str, Any]:
    """What the template shows; None, or an empty list, wherever the facts are missing."""
    trainings, conversions = facts.of_kind("training"), facts.of_kind("conversion")
    training = trainings[-1] if trainings else None
    pictured = [record for record in facts.of_kind("evaluation") if isinstance(record.values.get("pictures"), list)]
    current = _of_these_weights(facts)
    model_type = str(config.get("model_type", ""))
    # transformers' own ViT, as an export saves it, is the plain one.
    family = family_of("hf_vit" if model_type == "vit" else model_type)
    code = config.get("auto_map") or {}
    travels = any((folder / f"{str(path).split('.')[0]}.py").is_file() for path in code.values())
    return {
        "family": f"A model of the type `{model_type}`" if family is None else family.label,
        "is_classifier": _task(config) == "image-classification",
        "is_ours": model_type.startswith("hf_"),
        "has_code": travels,
        "auto_class": _auto_class(config),
        "shape": _shape(config),
        "parameters": _grouped(count_parameters(folder)),
        "flops": _flops(config),
        "classes": _classes(config),
        "num_classes": len(config.get("id2label") or {}),
        "training": _run(training, skip=("recipe", "base_model", "parameters")),
        "base_model": training.values.get("base_model") if training else None,
        "recipe": _rows(training.values.get("recipe")) if training else [],
        "conversion": _run(conversions[-1], skip=("parameters", "verification")) if conversions else None,
        "parity": _rows(conversions[-1].values.get("verification")) if conversions else [],
        "results": [_result(record, training) for record in results],
        "per_class": _per_class(results[-1]) if results else [],
        "per_class_of": _describe(results[-1]) if results else None,
        "learning_curve": (folder / "learning_curve.png").is_file(),
        "pictures": _pictures(folder, pictured[-1]) if pictured else [],
        "pictured": _describe(pictured[-1]) if pictured else None,
        "measurements": _measurements(current),
        "measured_pictures": _captioned(folder, [record for record in current if record.kind == "evaluation"]),
        "analyses": _captioned(folder, [record for record in current if record.kind == "analysis"]),
    }


def _auto_class(config: dict[str, Any]) -> str:
    return "AutoModelForImageClassification" if _task(config) == "image-classification" else "AutoModel"


def _shape(config: dict[str, Any]) -> list[str]:
    """What config.json says about the model, in words."""
    found: list[str] = []
    if isinstance(layers := config.get("num_hidden_layers"), int):
        found.append(f"{layers} layer{'s' * (layers != 1)}")
    if isinstance(width := config.get("hidden_size"), int):
        found.append(f"width {width}")
    if isinstance(heads := config.get("num_attention_heads"), int):
        found.append(f"{heads} attention head{'s' * (heads != 1)}")
    if config.get("patch_size"):
        found.append(f"patches of {_size(config['patch_size'])} px")
    if config.get("image_size"):
        found.append(f"images of {_size(config['image_size'])} px")
    return found


def _size(value: Any) -> str:
    height, width = cast(Sequence[int], value) if isinstance(value, list | tuple) else (value, value)
    return f"{height}x{width}"


def _flops(config: dict[str, Any]) -> str | None:
    """Of one image's forward pass, counted from the configuration; None for models of other packages."""
    from huggingface_hub.errors import StrictDataclassError

    from hf_vit.cost.flops import forward_flops

    family = family_of(config.get("model_type"))
    if family is None:
        return None
    task: Any = "classification" if _task(config) == "image-classification" else "model"
    try:
        flops = forward_flops(family.config_class.from_dict(config), task=task)
    except (UserError, StrictDataclassError):  # nothing is said of what cannot be counted
        return None
    return f"{flops / 1e9:.4g} GFLOPs" if flops >= 1e9 else f"{flops / 1e6:.4g} MFLOPs"


def _classes(config: dict[str, Any]) -> list[str]:
    names: dict[str, Any] = config.get("id2label") or {}
    ordered = [_cell(names[key]) for key in sorted(names, key=int)]
    return ordered if len(ordered) <= _MAX_LISTED_CLASSES else []


def _run(record: Record | None, skip: Sequence[str] = ()) -> dict[str, Any] | None:
    """A training or conversion: how it was run, on what, and its own plain numbers."""
    if record is None:
        return None
    plain = {key: value for key, value in record.values.items() if key not in skip}
    return {
        "command": record.command,
        "date": f"{record.date:%Y-%m-%d}",
        "data": _describe(record),
        "seed": record.seed,
        "time": None if record.seconds is None else _duration(record.seconds),
        "machine": _machine(record.hardware),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items())),
        "rows": _rows(plain),
    }


def _rows(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A table of two columns; what is nested becomes one row a value: {"a": {"b_c": 1}} -> ("a b c", "1")."""
    found: list[tuple[str, str]] = []
    for key, value in cast(Mapping[str, Any], values or {}).items():
        name = f"{prefix}{key.replace('_', ' ')}"
        if isinstance(value, Mapping):
            found += _rows(value, f"{name} ")
        elif value is not None:
            shown = _percent(value) if key.endswith("accuracy") and isinstance(value, float) else _plain(value)
            found.append((_cell(name), _cell(shown)))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in cast(list[Any], value))
    return str(value)


def _result(record: Record, training: Record | None) -> dict[str, Any]:
    values = record.values
    seed = training.seed if training else None
    return {
        "data": _cell(record.data.name if record.data else "unnamed"),
        "split": _cell((record.data.split if record.data else None) or "-"),
        "images": _grouped(record.data.size if record.data else None) or "-",
        "training_seed": "-" if seed is None else seed,
        "top1": _percent(values.get("top1")),
        "top5": _percent(values.get("top5")),
        "ece": _percent(values.get("ece")),
        "loss": f"{values['loss']:.4f}" if isinstance(values.get("loss"), float) else "-",
        "date": f"{record.date:%Y-%m-%d}",
    }


def _per_class(record: Record) -> list[tuple[str, str]]:
    table = record.values.get("per_class")
    if not isinstance(table, dict) or len(table) > _MAX_LISTED_CLASSES:
        return []
    return [(_cell(name), _percent(value)) for name, value in table.items()]


def _pictures(folder: Path, record: Record) -> list[tuple[str, str]]:
    names = cast(Sequence[str], record.values["pictures"])
    return [(name, _PICTURES[name]) for name in names if name in _PICTURES and (folder / name).is_file()]


def _measurements(records: Sequence[Record]) -> list[tuple[str, str, str | None, str]]:
    """(what, percentage, data, date) of the fractions that protocols call their headlines; of each the latest."""
    found: dict[tuple[str, str | None], tuple[str, str, str | None, str]] = {}
    for record in records:
        headline = record.values.get("headline")
        named = sorted(headline, key=_numbers_in_order) if isinstance(headline, dict) else []
        for name, value in ((name, cast(Any, headline)[name]) for name in named):
            data = _describe(record)
            found[name, data] = (_cell(name), _percent(value), data, f"{record.date:%Y-%m-%d}")
    return list(found.values())


def _numbers_in_order(name: str) -> list[str | int]:
    """Sorts "5-shot" before "10-shot": the file keeps names alphabetically."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _captioned(folder: Path, records: Sequence[Record]) -> list[tuple[str, str]]:
    """(file, caption) of the pictures with titles that were put beside the weights; of each the latest."""
    found: dict[str, str] = {}
    for record in records:
        pictures = record.values.get("pictures")
        for name, title in pictures.items() if isinstance(pictures, dict) else ():
            if re.fullmatch(r"\w[\w.\-]*\.(png|svg)", name) and (folder / name).is_file():
                found[name] = ", ".join(part for part in (_cell(title), _describe(record)) if part)
    return list(found.items())


def _describe(record: Record) -> str | None:
    """Data, split and size: "digits, split test, 360 images"."""
    if record.data is None:
        return None
    parts = [_cell(record.data.name)]
    if record.data.split:
        parts.append(f"split {_cell(record.data.split)}")
    if record.data.size is not None:
        parts.append(f"{_grouped(record.data.size)} images")
    return ", ".join(parts)


def _machine(hardware: Mapping[str, Any]) -> str | None:
    if not hardware.get("name"):
        return None
    cores = f", {hardware['cores']} CPU cores" if "cores" in hardware else ""
    return f"{hardware['name']}{cores}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _percent(value: Any) -> str:
    return f"{100 * value:.2f}%" if isinstance(value, float | int) else "-"


def _grouped(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


def _cell(value: Any) -> str:
    """Text that stays inside its table cell and is not taken for markup."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*_<>|\[\]#~])", r"\\\1", text)
