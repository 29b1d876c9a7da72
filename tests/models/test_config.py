"""The configuration: what it accepts and keeps, which choices go together, and what it says about the rest."""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from models.families import FAMILIES, OTHERS, TINY, Family
from transformers import AutoConfig, ViTConfig

from hf_vit import HfViTConfig

INF, NAN = math.inf, math.nan
SIZES = r"int.*tuple\[int, int\]"
Wrong = list[tuple[dict[str, Any], list[str]]]

COUNTS = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "num_channels", "intermediate_size", "image_size"),
    *("fpn_hidden_size", "representation_size", "num_hidden_groups"),
)
# Overrides of a good configuration -> parts that the message must hold, in order: field, value, need.
WRONG: Wrong = [
    *(({name: 0}, [f"{name}=0", "at least 1"]) for name in COUNTS),
    *(({name: -16}, [f"{name}=-16", "at least 1"]) for name in COUNTS),
    *(({name: "7"}, [f"(?=.*'7'){name}", "int"]) for name in COUNTS),
    *(({name: 7.0}, [name, "int"]) for name in COUNTS),
    *(({name: True}, [name, "int"]) for name in COUNTS),
    *(
        ({name: value}, [f"{name}={value}", "not a probability", f"0 <= {name} < 1"])
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
        for value in (1.0, NAN, -0.1, 10)
    ),
    *(
        ({name: value}, [f"{name}={value}", "finite number above 0"])
        for name in ("layer_norm_eps", "initializer_range")
        for value in (0.0, NAN, INF, -0.02)
    ),
    *(
        ({name: value}, [name, "bool", f"got {type(value).__name__}"])
        for name in ("qkv_bias", "is_causal", "reshape_hidden_states")
        for value in ("yes", 1, None)
    ),
    ({"hidden_size": None}, ["hidden_size", "int", "got NoneType"]),
    ({"hidden_size": 30}, ["hidden_size=30", "not divisible by num_attention_heads=4", "divides the hidden size"]),
    ({"num_attention_heads": 5}, ["hidden_size=32", "num_attention_heads=5", "number of heads that divides"]),
    ({"pooling_num_heads": 5}, ["hidden_size=32", "pooling_num_heads=5", "number of heads that divides"]),
    ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000 must be at most 10000"]),
    ({"image_size": None}, ["image_size", "None", SIZES]),
    ({"image_size": (16,)}, ["image_size", r"\(16,\)", SIZES, "length 2"]),
    ({"image_size": (16, 16, 3)}, ["image_size", r"\(16, 16, 3\)", SIZES, "length 2"]),
    ({"image_size": []}, ["image_size", SIZES, "length 2"]),
    ({"image_size": (16, 0)}, [r"image_size=\(16, 0\)", "at least 1"]),
    ({"layer_norm_eps": 0}, ["layer_norm_eps=0 must be a finite number above 0"]),
    ({"layer_norm_eps": "1e-6"}, ["layer_norm_eps", "float", "got str", "1e-6"]),
    ({"hidden_act": "gellu"}, ["hidden_act='gellu'", "activation", "did you mean 'gelu'"]),
    ({"hidden_act": "xyzzy"}, ["hidden_act='xyzzy'", "ACT2FN"]),
    ({"hidden_act": None}, ["hidden_act", "str", "got NoneType"]),
    ({"num_register_tokens": -1}, ["num_register_tokens=-1", "at least 0"]),
    ({"mlp_type": "gelu"}, ["mlp_type", "'dense', 'swiglu'"]),
    ({"rotary_base": 10.0}, ["rotary_base", "no effect", "rotary_embedding", "'axial'"]),
    ({"rotary_embedding": "axial", "num_attention_heads": 32}, ["multiple of [24]", "is 1"]),
    ({"rotary_embedding": "axial", "rotary_periods": (1.0, 0.0)}, ["rotary_periods", "must be [24] finite", "above 0"]),
    ({"rotary_embedding": "axial", "rotary_register_base": 10.0}, ["rotary_register_base", "square", "1, 4, 9"]),
    ({"rotary_embedding": "axial", "rotary_jitter": 2.0}, ["rotary_jitter", "rotary_coordinates='centered'"]),
    ({"rotary_embedding": "axial", "rotary_coordinates": "centered", "rotary_rescale": 0.5},
        ["rotary_rescale=0.5", "at least 1"]),
    ({"rotary_embedding": "axial", "rotary_reference_grid": 0}, ["rotary_reference_grid=0", "at least 1"]),
    ({"norm_after_pooling": True, "representation_size": 8},
        ["norm_after_pooling=True", "representation_size", "norm_after_pooling=False"]),
    ({"drop_path_rate": "0.1"}, ["drop_path_rate", "'0.1'", "float"]),
    ({"drop_path_rate": 0.1, "num_hidden_groups": 1}, ["drop_path_rate=0.1", "num_hidden_groups=1", "more groups"]),
    ({"position_embedding": "learnt"}, ["position_embedding", "one of", "'learned'", "'relative'", "got learnt"]),
    ({"position_embedding": None}, ["position_embedding", "one of", "'none'", "got None"]),
    ({"position_interpolation": "nearest"}, ["position_interpolation", "'bilinear_corners', 'bicubic'", "got nearest"]),
    ({"position_on_class_token": "no"}, ["position_on_class_token", "bool", "got str", "no"]),
    ({"pooling": "cls"}, ["pooling", "'token', 'gap', .*'map'", "got cls"]),
    ({"pooling": "token", "use_class_token": False}, ["pooling='token'", "use_class_token=False", "pooling='gap'"]),
    ({"use_class_token": "yes"}, ["use_class_token", "'yes'", "bool"]),
    ({"layer_scale_init_value": NAN}, ["layer_scale_init_value=nan", "finite number of at least 0, or None"]),
    ({"layer_scale_init_value": -1.0}, ["layer_scale_init_value=-1.0", "at least 0"]),
    ({"layer_scale_init_value": "small"}, ["layer_scale_init_value", "'small'", "float"]),
    ({"num_hidden_groups": 3}, ["num_hidden_groups=3", "exceeds num_hidden_layers=2", "one group per layer"]),
    ({"num_labels": -1}, ["num_labels=-1", "integer of at least 0"]),
    ({"num_labels": "3"}, ["num_labels='3'", "integer of at least 0"]),
    ({"id2label": ["cat", "dog"]}, [r"id2label=\['cat', 'dog'\]", "dict", r"dict\(enumerate\(names\)\)"]),
    ({"id2label": {1: "cat", 2: "dog"}, "num_labels": 2}, ["id2label", r"\[1, 2\]", "0 to 1"]),
    ({"problem_type": "classify"}, ["problem_type='classify'", "'single_label_classification'", "None"]),
    ({"out_features": ["stage9"]}, ["out_features", "stage_names", "stage2", r"got \['stage9'\]"]),
    ({"out_indices": [9]}, ["out_indices", "stage_names", r"got \[9\]"]),
    ({"out_features": ["stage1"], "out_indices": [2]}, ["out_features", "out_indices", "same stages"]),
]  # fmt: skip

# What a family has that the others have not.
OWN: dict[str, Wrong] = {
    "plain": [
        ({"rotary_embedding": "axial", "position_embedding": "relative"},
            ["rotary_embedding", "'relative'", "'learned'"]),
        ({"rotary_embedding": "mixed", "rotary_coordinates": "centered"}, ["'mixed'", "rotary_coordinates"]),
        ({"position_interpolation": "bilinear", "position_interpolation_offset": 0.1},
            ["position_interpolation_offset=0.1", "'bilinear'", "'bicubic'"]),
        ({"position_interpolation": "bilinear_square", "position_embedding": "relative_bias"},
            ["position_interpolation='bilinear_square'", "'learned'"]),
        ({"image_size": 3}, ["image_size=3", "patch_size=4", "3x3 px is smaller than a patch of 4x4 px"]),
        ({"image_size": (16, 3)}, [r"image_size=\(16, 3\)", "patch_size=4", "16x3 px is smaller"]),
        ({"image_size": 2}, ["image_size=2 ", "patch_size=4", "4x4"]),
        ({"patch_size": 17}, ["image_size=16", "patch_size=17", "patch of 17x17 px"]),
        ({"patch_size": 32}, ["image_size=16", "patch_size=32", "32x32"]),
        ({"patch_size": 0}, ["patch_size=0", "at least 1"]),
        ({"patch_size": (4, -4)}, [r"patch_size=\(4, -4\)", "at least 1"]),
        ({"patch_size": "4"}, ["patch_size", "'4'", SIZES]),
        ({"patch_size": (4,)}, ["patch_size", SIZES, "length 2"]),
        ({"patch_size": True}, ["patch_size", "True", SIZES]),
        ({"is_causal": True, "position_embedding": "relative"}, ["is_causal=True", "'relative'", "use 'learned'"]),
        ({"is_causal": True, "pooling": "gap", "use_class_token": True},
            ["use_class_token=True", "is_causal=True", "pooling='token'"]),
        ({"is_causal": True, "pooling": "first_patch", "use_class_token": True}, ["pooling='first_patch'", "'token'"]),
        ({"use_distillation_token": True, "pooling": "gap"},
            ["use_distillation_token=True", "pooling='token'", "'gap'"]),
        ({"use_distillation_token": True, "pooling": "map"},
            ["use_distillation_token=True", "pooling='token'", "'map'"]),
        ({"use_distillation_head": True}, ["use_distillation_head=True", "use_distillation_token=True"]),
        ({"use_distillation_token": 1}, ["use_distillation_token", "bool", "got int"]),
        ({"hidden_size": 6, "num_attention_heads": 1, "position_embedding": "sincos_2d"},
            ["'sincos_2d'", "hidden_size=6", "divisible by 4"]),
        ({"hidden_size": 4, "num_attention_heads": 1, "position_embedding": "sincos_2d"},
            ["'sincos_2d'", "two frequencies", "a hidden_size above 4 instead of 4"]),
        ({"hidden_size": 3, "num_attention_heads": 3, "position_embedding": "sincos_1d"},
            ["'sincos_1d'", "hidden_size=3", "divisible by 2"]),
        ({"hidden_size": 3, "num_attention_heads": 3, "position_embedding": "learned_2d"},
            ["'learned_2d'", "hidden_size=3", "divisible by 2"]),
        ({"use_feature_pyramid": True, "patch_size": (4, 8)}, ["use_feature_pyramid=True", "power of two", "4x8 px"]),
        ({"use_feature_pyramid": True, "out_indices": [1, 2]},
            ["use_feature_pyramid=True", "one stage", r"out_features=\['stage1', 'stage2'\]"]),
        ({"predict_next_patch": True}, ["predict_next_patch=True needs is_causal=True"]),
        ({"prediction_target": "colour"}, ["prediction_target"]),
        ({"image_mean": (0.5, 0.5)}, ["image_mean=.*one for each of the 3 channels"]),
        ({"image_std": 0.0}, ["image_std=0.0 must be above 0"]),
        ({"use_feature_pyramid": True, "image_size": 56, "patch_size": 14}, ["two; got 14x14 px.*patch_size=16"]),
        ({"use_feature_pyramid": True, "reshape_hidden_states": False}, ["reshape_hidden_states=False"]),
    ],
    "hybrid": [
        ({"patch_size": 16}, ["patch_size=16", "total stride of the stem", "stage_depths and stem_patch_size"]),
        ({"stage_depths": (1, 0)}, [r"stage_depths=\(1, 0\)", "at least one unit"]),
        ({"stage_depths": "3,4,9"}, ["stage_depths", "int"]),
        ({"stage_depths": 3}, ["stage_depths", "3", "int"]),
        ({"stem_width": 48}, ["stem_width=48", "multiple of 32"]),
        ({"stem_width": 0}, ["stem_width=0", "multiple of 32"]),
        ({"group_norm_eps": 0.0}, ["group_norm_eps=0.0", "above 0", "layer_norm_eps"]),
        ({"weight_standardization": "var"}, ["weight_standardization", "variance"]),
        ({"stem_patch_size": 0}, ["stem_patch_size=0", "at least 1"]),
        ({"stem_patch_size": 5}, ["image_size=32", "32x32 px is smaller than a patch of 40x40 px"]),
        ({"num_register_tokens": 2, "is_causal": True},
            ["num_register_tokens=2", "is_causal=True", "use num_register_tokens=0"]),
    ],
    "axial": [
        ({"pooling": "token"}, ["pooling='token'", "needs a class token", "'gap' or 'map'"]),
        ({"use_class_token": True}, ["use_class_token=True", "needs a class token", "'gap' or 'map'"]),
        ({"use_distillation_token": True}, ["use_distillation_token=True"]),
        ({"is_causal": True}, ["is_causal=True", "Axial"]),
        ({"position_embedding": "relative"}, ["position_embedding='relative'", "Axial", "use 'learned_2d'"]),
        ({"image_size": 3}, ["image_size=3", "patch_size=4", "smaller than a patch of 4x4 px"]),
        ({"num_register_tokens": 4}, ["num_register_tokens=4", "grid", "leave it out"]),
    ],
    "local": [
        ({"attention_pattern": "dilated"}, ["attention_pattern", "local", "strided", "criss_cross"]),
        ({"attention_window": 4}, ["attention_window=4", "odd number of tokens"]),
        ({"attention_window": -1}, ["attention_window=-1", "odd number of tokens"]),
        ({"attention_window": 3.0}, ["attention_window", "int", "float"]),
        ({"attention_stride": 0}, ["attention_stride=0", "at least 1"]),
        ({"is_causal": True}, ["is_causal=True", "Local", "all directions"]),
        ({"position_embedding": "relative"}, ["position_embedding='relative'", "Local", "use 'learned_2d'"]),
        ({"position_embedding": "relative_bias"}, ["position_embedding='relative_bias'", "Local", "use 'learned_2d'"]),
    ],
    "mixer": [
        ({"image_size": (16, 0)}, ["at least 1 px"]),
        ({"token_intermediate_size": 0}, ["token_intermediate_size=0 must be at least 1"]),
        ({"num_hidden_layers": 10**9}, ["must be at most 10000"]),
        ({"drop_path_rate": 1.0}, ["is not a probability"]),
        ({"layer_norm_eps": NAN}, ["must be a finite number above 0"]),
        ({"layer_norm_eps": INF}, ["must be a finite number above 0"]),
        ({"hidden_act": "gleu"}, ["is not an activation"]),
        ({"problem_type": "multilabel"}, ["problem_type='multilabel' is unknown"]),
        ({"id2label": {0: "a", 1: "b", 3: "c"}}, [r"id2label has the indices \[0, 1, 3\]"]),
    ],
    "axial_resnet": [
        ({"stem_width": 20}, ["stem_width=20 must be a positive multiple of 8"]),
        ({"stage_depths": (1, 0)}, ["every stage needs at least one unit"]),
        ({"num_channels": 0}, ["num_channels=0"]),
        ({"num_labels": -1}, ["num_labels=-1"]),
        ({"image_size": (0, 32)}, ["image_size"]),
    ],
}  # fmt: skip
# The axial family with AxialResNet as its stem.
STEM = {"image_size": 48, "patch_size": 16, "stage_depths": (1, 1), "stem_width": 16}
OWN["axial"] += [
    ({**STEM, "patch_size": 12}, ["patch_size=12.*8 px"]),
    ({**STEM, "stem_width": 4}, ["stem_width=4"]),
    ({**STEM, "stage_depths": (0,)}, ["at least one unit"]),
]


@pytest.mark.parametrize("name", OWN)
def test_wrong_values_say_field_value_and_need(name: str, subtests: pytest.Subtests):
    family = (FAMILIES | OTHERS)[name]
    for wrong, parts in [*(WRONG if name in FAMILIES else []), *OWN[name]]:
        with subtests.test(wrong=wrong):
            with pytest.raises((StrictDataclassError, ValueError), match="(?s)" + ".*".join(parts)) as error:
                family.config(**wrong)
            assert "Traceback" not in str(error.value)


def test_values_set_later_are_checked_when_the_model_is_built(family: Family, head: str):
    config = family.config()
    config.hidden_size = 30
    with pytest.raises(StrictDataclassError, match="hidden_size=30 is not divisible by num_attention_heads=4"):
        family.classes[head](config)
    with pytest.raises(StrictDataclassError, match=r"'token', 'gap', .*'map'"):
        config.pooling = "mean"


NEAREST = {
    **{"hiden_size": "hidden_size", "image_sizes": "image_size", "num_heads": "num_attention_heads"},
    **{"num_layers": "num_hidden_layers", "dropout": "hidden_dropout_prob", "drop_path": "drop_path_rate"},
    **{"postion_embedding": "position_embedding", "layerscale_init_value": "layer_scale_init_value"},
}


def test_misspelt_key_is_warned_about_with_the_nearest_name(family: Family):
    for misspelt, nearest in NEAREST.items():
        with pytest.warns(UserWarning, match=f"has no field '{misspelt}' \\(value 3\\).*did you mean '{nearest}'"):
            family.config(**{misspelt: 3})
    with pytest.warns(UserWarning, match="HfBitConfig has no field 'stem_widht'.*did you mean 'stem_width'"):
        OTHERS["bit"].config(stem_widht=3)


def test_keys_of_others_are_kept_without_a_word(family: Family, tmp_path: Path):
    """Of newer versions, of transformers' ViT, and what all of transformers' configurations hold besides fields."""
    written = ViTConfig(hidden_size=96, num_attention_heads=3, qkv_bias=False).to_dict()
    del written["model_type"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family.config(zyx_of_version_nine={"a": 1}).save_pretrained(tmp_path)
        assert family.config_class.from_pretrained(tmp_path).zyx_of_version_nine == {"a": 1}
        HfViTConfig(tie_word_embeddings=False, is_encoder_decoder=False, add_cross_attention=False)
        config = HfViTConfig(**written)
    assert (config.hidden_size, config.num_attention_heads, config.qkv_bias) == (96, 3, False)


def test_round_trip(family: Family, tmp_path: Path):
    """Of every choice, in memory and through a file; and of every field of its own at once."""
    configs = {choice: family.config(choice) for choice in family.choices}
    changed = {
        **{**TINY, **family.tiny, "hidden_act": "relu", "layer_norm_eps": 1e-5, "qkv_bias": False},
        **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "drop_path_rate": 0.3},
        **{"initializer_range": 0.1, "position_embedding": "learned_2d", "position_on_class_token": False},
        **{"position_interpolation": "bicubic", "pooling": "gap", "use_class_token": False, "representation_size": 7},
        **{"layer_scale_init_value": 0.5, "num_hidden_groups": 2, "reshape_hidden_states": False},
        **{"apply_layernorm": False, "fpn_hidden_size": 9, "id2label": {0: "cat", 1: "dog", 2: "eel"}},
    }
    del changed["num_labels"]
    configs["changed"] = family.config_class(**changed)
    for choice, config in configs.items():
        assert family.config_class(**config.to_dict()).to_dict() == config.to_dict(), choice
        config.save_pretrained(tmp_path)
        for loader in (family.config_class, AutoConfig):
            loaded = loader.from_pretrained(tmp_path)
            assert type(loaded) is family.config_class
            assert loaded.to_diff_dict() == config.to_diff_dict(), choice
            for name in ("grid", "num_labels", "id2label"):
                assert getattr(loaded, name) == getattr(config, name), choice
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == config.model_type
    assert {name: getattr(loaded, name) for name in changed} == changed


@pytest.mark.parametrize("sizes", [{"image_size": [12, 16]}, {"image_size": (12, 16)}, {"image_size": 16}])
def test_sizes_may_be_pairs_and_lists(sizes: dict):
    config = HfViTConfig(**sizes, patch_size=[3, 4] if sizes["image_size"] != 16 else 4)
    assert config.grid == (4, 4)
    assert not isinstance(config.image_size, list)
    assert not isinstance(config.patch_size, list)


@pytest.mark.parametrize("name", FAMILIES | OTHERS)
def test_indices_of_labels_as_json_writes_them(name: str, tmp_path: Path):
    family = (FAMILIES | OTHERS)[name]
    names = {"0": "cat", "1": "dog", "2": "eel"}
    family.build("classification").save_pretrained(tmp_path)
    loaded = family.classes["classification"].from_pretrained(tmp_path, id2label=names).config
    for config in (family.config(id2label=names), loaded):
        assert config.id2label == {0: "cat", 1: "dog", 2: "eel"}


PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
# Fields of all configurations in the table, and of its hybrid, whose stem has two stages.
TABLE = {**TINY, "image_size": 32, "num_attention_heads": 2}
OF_TABLE = {"hybrid": {"stage_depths": (1, 1), "stem_width": 32, "stem_patch_size": 2}}


def read_table() -> list[tuple[str, list[str]]]:
    """Return the rows of docs/combinations.md: fields, and "works" or "raises" for each family."""
    rows = re.findall(r"^\| `(.+?)` \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) >= 25
    return [(fields, cells) for fields, *cells in rows]


def make_config(name: str, fields: str) -> Any:
    """Return the configuration of a family with the fields of a row."""
    return FAMILIES[name].config_class(**{**TABLE, **OF_TABLE.get(name, {"patch_size": 16}), **eval(f"dict({fields})")})


def write_table() -> None:
    """Write the cells of docs/combinations.md anew for the fields in its rows."""
    text = PAGE.read_text()
    for fields, _ in read_table():
        cells = []
        for name in FAMILIES:
            try:
                make_config(name, fields)
                cells.append("works")
            except StrictDataclassError:
                cells.append("raises")
        row = f"| `{fields}` | {' | '.join(cells)} |"
        text = re.sub(rf"^\| `{re.escape(fields)}` \|.*$", lambda _, row=row: row, text, flags=re.MULTILINE)
    PAGE.write_text(text)


@pytest.mark.parametrize(("fields", "cells"), read_table())
def test_which_choices_go_together(fields: str, cells: list[str]):
    for (name, family), expected in zip(FAMILIES.items(), cells, strict=True):
        if expected == "raises":
            with pytest.raises(StrictDataclassError, match=r"cannot|needs|not possible|no effect|use"):
                make_config(name, fields)
        else:
            assert expected == "works"
            assert_works(family, make_config(name, fields), learns="drop" not in fields)


def assert_works(family: Family, config: Any, learns: bool) -> None:
    """Every parameter gets a gradient, and settings and weights make the same model again."""
    torch.manual_seed(0)
    model = family.classes["classification"](config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # zero heads and zero norms would hide what lies behind them
            parameter.add_(0.02 * torch.randn_like(parameter))
    images = family.images(config, batch=4)
    if learns:
        model(images, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        zero = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
        # A key's bias adds one number to all logits of a softmax. In the last layer only the class token's query is
        # read, and pairs with the class token have no offset.
        silent = r"k_proj\.bias|layers\.1\..*offset_embeddings"
        assert (without, [name for name in zero if not re.search(silent, name)]) == ([], [])
    again = family.classes["classification"](type(config)(**json.loads(config.to_json_string(use_diff=False))))
    again.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images).logits, again.eval()(images).logits)


if __name__ == "__main__":
    write_table()
