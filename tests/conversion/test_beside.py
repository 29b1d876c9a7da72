"""Files beside the weights that hold something else than they should: one line that names them, or the same model."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from originals.pytorch import of_timm, of_transformers, save_timm
from transformers import ViTImageProcessor

import hf_vit.conversion as conversion
from campaigns.forgeries.folders import places, with_value
from hf_vit.conversion.building.model import build_processor
from hf_vit.conversion.origins.transformers.configs import CARRIED
from hf_vit.conversion.readers.checkpoint import Companions
from hf_vit.conversion.readers.opening import open_checkpoint
from hf_vit.errors import UserError

BAD = (-1, 0.5, float("inf"), "x", ["a"], [1, 2, 3], {"a": 1}, {"height": 0, "width": 5})
Shapes = dict[str, tuple[int, ...]]


@cache
def of_library(library: str) -> tuple[Shapes, dict[str, Any], dict[str, Any]]:
    """(shapes, config.json, preprocessor_config.json) of a good model; timm has no such third file."""
    if library == "transformers":
        model: Any = of_transformers("ViTForImageClassification")
        read = ("model_type", "image_size", "patch_size", "id2label", *CARRIED)
        config = {name: value for name, value in model.config.to_dict().items() if name in read}
        processor = json.loads(ViTImageProcessor(size={"height": 12, "width": 12}).to_json_string())
    else:
        model = of_timm()
        config = {"architecture": "vit_tiny_patch16_224", "global_pool": "token", "num_classes": 5}
        pretrained = {"input_size": [3, 12, 12], "crop_pct": 0.9, "mean": [0.5] * 3, "std": [0.5] * 3}
        pretrained |= {"interpolation": "bicubic", "crop_mode": "center", "label_names": None}
        config |= {"pretrained_cfg": pretrained, "model_args": {"num_heads": 3, "act_layer": "gelu", "img_size": 12}}
        processor = {}
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return shapes, config, processor


def refusal(shapes: Shapes, config: Any, processor: Any) -> str | None:
    """The message, or None for what makes a model."""
    try:
        build_processor(conversion.plan(shapes, companions=Companions(config, processor or None)))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_values_of_another_kind(library: str):
    shapes, config, processor = of_library(library)
    assert refusal(shapes, config, processor) is None
    changed = [(with_value(config, place, bad), processor) for place in places(config) for bad in BAD]
    changed += [(config, with_value(processor, place, bad)) for place in places(processor) for bad in BAD]
    refusals = [message for files in changed if (message := refusal(shapes, *files)) is not None]
    assert len(changed) // 4 < len(refusals) < len(changed)
    assert not any("\n" in message for message in refusals)


REFUSED: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "mean": (
        "transformers",
        "processor",
        lambda it: it | {"image_mean": 0.5},
        "preprocessor_config.json gives image_mean",
    ),
    "size": ("transformers", "processor", lambda it: it | {"size": "x"}, "preprocessor_config.json gives size"),
    "sides": ("transformers", "processor", lambda it: it | {"size": {"depth": 3}}, "makes no image processor"),
    "crop": ("timm", "config", lambda it: with_value(it, ("pretrained_cfg", "crop_pct"), "x"), "gives crop_pct='x'"),
    "arguments": ("timm", "config", lambda it: it | {"model_args": [1]}, "config.json gives model_args"),
    "no heads": (
        "transformers",
        "config",
        lambda it: it | {"num_attention_heads": None},
        "gives num_attention_heads=None",
    ),
    "labels of another kind": (
        "transformers",
        "config",
        lambda it: with_value(it, ("id2label", "2"), 7),
        "gives id2label.2=7",
    ),
    "a label less": (
        "transformers",
        "config",
        lambda it: it | {"id2label": {"0": "a", "1": "b"}},
        "it names 2 classes, the weights make 5",
    ),
    "a label left out": ("transformers", "config", lambda it: it | {"id2label": {"1": "b"}}, "no name for class 0"),
    "labels of timm": (
        "timm",
        "config",
        lambda it: with_value(it, ("pretrained_cfg", "label_names"), 5),
        "gives label_names=5",
    ),
    "number as text": (
        "transformers",
        "processor",
        lambda it: it | {"resample": "2"},
        "preprocessor_config.json gives resample='2'",
    ),
    "a mean for less": ("transformers", "processor", lambda it: it | {"image_mean": [0.5]}, "image_mean=.0.5."),
    "margin": (
        "transformers",
        "processor",
        lambda it: it | {"do_pad": True, "pad_size": {"height": 16, "width": 16}},
        "gives do_pad=true, and no processor here pads",
    ),
    "kind": ("transformers", "processor", lambda it: it | {"image_processor_type": 0}, "json is of 0, whose steps"),
    "empty": ("transformers", "processor", lambda it: {"a": 1}, "preprocessor_config.json says nothing of the pixels"),
    "no pixels": ("timm", "config", lambda it: it | {"pretrained_cfg": {"a": 1}}, "pretrained_cfg without input_size"),
    "no mean": ("timm", "config", lambda it: with_value(it, ("pretrained_cfg", "mean"), []), r"gives mean=\[\]"),
    "long act": ("transformers", "config", lambda it: it | {"hidden_act": "x" * 9999}, "make no model: hidden_act='xx"),
    "long": ("transformers", "config", lambda it: it | {"model_type": "x" * 9999}, "says model_type 'x{79}; of"),
    "activation": ("timm", "config", lambda it: with_value(it, ("model_args", "act_layer"), []), "argument act_layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_value_is_named(case: str):
    library, file, change, told = REFUSED[case]
    shapes, config, processor = of_library(library)
    companions = Companions(config, change(processor)) if file == "processor" else Companions(change(config))
    with pytest.raises(UserError, match=told) as error:
        build_processor(conversion.plan(shapes, companions=companions))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[" * 10**5, b"[1]", b"5", b'"x"', b"null"])
def test_files_that_are_no_object(content: bytes, tmp_path: Path):
    save_timm(of_timm(), tmp_path)
    of_transformers("ViTModel").save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    for file in (tmp_path / "config.json", tmp_path / "parts" / "model.safetensors.index.json"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=file.name) as error:
            open_checkpoint(file.parent)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("weight_map", [None, 5, "x", [], ["a"], {}, {"a": 5}, {"a": None}, {"a": ["b"]}])
def test_index_of_something_else(weight_map: Any, tmp_path: Path):
    of_transformers("ViTModel").save_pretrained(tmp_path, max_shard_size="10KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)
