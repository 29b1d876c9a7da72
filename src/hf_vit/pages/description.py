"""Describe a model for its page, which shows the description as text, never as HTML."""

from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.targets.graphs.preprocessing import list_unsupported_steps
from hf_vit.data.transforms import get_pixel_scale, refuse_own_shapes
from hf_vit.errors import UserError
from hf_vit.families import find_family, get_problem_type
from hf_vit.hub.card_metadata import select_main_evaluation
from hf_vit.loading.outputs import find_output_token
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.modeling_hf_vit import get_patch_token_slice
from hf_vit.pages.graph import is_axial
from hf_vit.results.facts import Facts, as_fraction

_FILTERS = {2: "bilinear", 3: "bicubic"}  # number of the filter in Pillow -> its name on the page


def describe_model(model: PreTrainedModel, processor: Any, name: str, folder: Path | None) -> dict[str, Any]:
    """Return labels, geometry and preprocessing of a classifier of hf_vit, and metrics from `folder`/facts.json.

    Raises:
        UserError: the page does not support the image processor.
    """
    config: Any = model.config
    family = find_family(config.model_type)
    assert family is not None
    return {
        "name": name,
        "family": family.label.partition(" ")[2],  # drops the article
        "parameters": model.num_parameters(),
        "labels": [str(config.id2label[index]) for index in range(config.num_labels)],
        "multi_label": get_problem_type(config) == "multi_label_classification",
        "image_size": list(as_pair(config.image_size)),
        "grid": list(config.grid),
        "patch_px": list(config.patch_stride),
        "attention": ("axial" if is_axial(config) else "full") if family.is_vit else None,
        "layers": config.num_hidden_layers if family.has_tokens else 0,
        "heads": config.num_attention_heads if family.is_vit else 0,
        "patch_start": (get_patch_token_slice(config).start or 0) if family.is_vit else 0,
        "class_token": find_output_token(config) if family.is_vit else None,  # the output's, whose maps are shown
        "preprocessing": describe_preprocessing(processor, as_pair(config.image_size)),
        "figures": _make_metric_rows(folder),
    }


def describe_preprocessing(processor: Any, image_size: tuple[int, int]) -> dict[str, Any]:
    """Return the image processor's steps as the page needs them; steps that are switched off are None.

    Raises:
        UserError: the page cannot do one of the steps.
    """
    refuse_own_shapes(processor, "the page")
    where = "in preprocessor_config.json"
    if steps := list_unsupported_steps(processor):
        problem = f"the image processor has settings that the page cannot compute: {', '.join(steps)}"
        raise UserError(f"{problem}; change them {where}")
    settings = processor.to_dict()
    resize = dict(settings["size"]) if settings["do_resize"] else None
    crop = settings["crop_size"] if settings.get("do_center_crop") else None
    output_size = crop or resize or {}
    if (output_size.get("height"), output_size.get("width")) != image_size:
        px = f"{image_size[0]}x{image_size[1]} px"
        raise UserError(f"the image processor does not return images of {px}, the model's input size; set it {where}")
    factor, mean, std = get_pixel_scale(processor)
    return {
        "resize": resize,
        "filter": _FILTERS.get(settings.get("resample")),
        "crop": None if crop is None else {"height": crop["height"], "width": crop["width"]},
        "factor": factor,
        "mean": list(mean),
        "std": list(std),
    }


def _make_metric_rows(folder: Path | None) -> list[dict[str, str]]:
    """Return accuracy, calibration error and speed with notes, as the card states them; empty without an evaluation."""
    record = None if folder is None else select_main_evaluation(Facts.load(folder))
    if record is None:
        return []
    values, data = record.values, record.data
    data_note = "" if data is None else f"{data.name}, {data.split}"
    if data is not None and data.size:
        data_note = f"of {data.size:,} images ({data_note})"
    metrics = (
        ("Accuracy", as_fraction(values.get("top1")), "{:.1%}", data_note),
        ("Calibration error", as_fraction(values.get("ece")), "{:.1%}", "between confidence and accuracy"),
        ("Speed", values.get("images_per_second"), "{:,.0f} images/s", str(record.hardware.get("name") or "")),
    )
    return [
        {"name": name, "value": template.format(value), "note": note}
        for name, value, template, note in metrics
        if isinstance(value, int | float)
    ]
