"""What a page is told of a model: `model.json` beside its graph. All of it is shown as text, never as HTML."""

import json
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from hf_vit.errors import UserError
from hf_vit.families import family_of, problem_type_of
from hf_vit.hub.card_metadata import own_evaluation
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import class_token_index, patch_token_slice
from hf_vit.pages.graph import is_axial
from hf_vit.results.facts import Facts, fraction

_FILTERS = {2: "bilinear", 3: "bicubic"}


def description(model: PreTrainedModel, processor: Any, name: str, folder: Path | None) -> dict[str, Any]:
    """Return labels, geometry, preprocessing and figures of a classifier.

    Args:
        name: what the page calls it.
        folder: of its facts.json, where there is one.
    """
    config: Any = model.config
    family = family_of(config.model_type)
    assert family is not None
    tokens: dict[str, Any] = {"patch_start": 0, "class_token": None}
    if family.is_vit:
        tokens["patch_start"] = patch_token_slice(config).start or 0
        tokens["class_token"] = class_token_index(config) if config.has_class_token else None
    kind = ("axial" if is_axial(config) else "full") if family.is_vit else None
    return {
        "name": name,
        "family": family.label.partition(" ")[2],  # without its article
        "parameters": model.num_parameters(),
        "labels": [str(config.id2label[index]) for index in range(config.num_labels)],
        "multi_label": problem_type_of(config) == "multi_label_classification",
        "image_size": list(as_pair(config.image_size)),
        "grid": list(config.grid),
        "patch_px": list(config.patch_stride),
        "attention": kind,
        "layers": config.num_hidden_layers if family.has_tokens else 0,
        "heads": config.num_attention_heads if family.is_vit else 0,
        **tokens,
        "preprocessing": preprocessing(processor, as_pair(config.image_size)),
        "figures": _figures(folder),
    }


def preprocessing(processor: Any, image_size: tuple[int, int]) -> dict[str, Any]:
    """Return the steps of an image processor as the page takes them; what it does not do is None."""
    settings = processor.to_dict()
    size, crop = dict(settings.get("size") or {}), settings.get("crop_size") if settings.get("do_center_crop") else None
    resize = size if settings.get("do_resize", True) else None
    if resize is not None and set(resize) not in ({"height", "width"}, {"shortest_edge"}):
        raise UserError(f"the page cannot resize to {json.dumps(resize)}; needed: height and width, or shortest_edge")
    if settings.get("do_pad"):
        raise UserError("the page cannot pad images; save an image processor that resizes or crops")
    given = crop or resize
    if given is None or (given.get("height"), given.get("width")) != image_size:
        height, width = image_size
        raise UserError(f"the image processor does not make images of {height}x{width} px, which the model takes")
    resample = settings.get("resample", 2)
    if resize is not None and resample not in _FILTERS:
        raise UserError(f"the page cannot resize with resample={resample}; it can with 2 (bilinear) and 3 (bicubic)")
    normalises = settings.get("do_normalize", True)
    mean, std = (
        [value] * 3 if isinstance(value, int | float) else list(value)
        for value in ((settings["image_mean"], settings["image_std"]) if normalises else (0.0, 1.0))
    )
    return {
        "resize": resize,
        "filter": _FILTERS.get(resample),
        "crop": None if crop is None else {"height": crop["height"], "width": crop["width"]},
        "factor": settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        "mean": mean,
        "std": std,
    }


def _figures(folder: Path | None) -> list[dict[str, str]]:
    """Return accuracy, calibration and speed, as the card has them."""
    record = None if folder is None else own_evaluation(Facts.load(folder))
    if record is None:
        return []
    values, data = record.values, record.data
    judged = "" if data is None else f"{data.name}, {data.split}"
    judged = f"of {data.size:,} images ({judged})" if data and data.size else judged
    shown = (
        ("Accuracy", fraction(values.get("top1")), "{:.1%}", judged),
        ("Calibration error", fraction(values.get("ece")), "{:.1%}", "between confidence and accuracy"),
        ("Speed", values.get("images_per_second"), "{:,.0f} images/s", str(record.hardware.get("name") or "")),
    )
    return [
        {"name": name, "value": form.format(value), "note": note}
        for name, value, form, note in shown
        if isinstance(value, int | float)
    ]
