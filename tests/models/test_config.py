"""The configuration: what it accepts and keeps, and what it says about the rest."""

import json
import math
import warnings

import pytest
from huggingface_hub.errors import StrictDataclassError
from models.families import FAMILIES, OTHERS, TINY, Family
from transformers import AutoConfig, ViTConfig

from hf_vit import HfViTConfig

INF, NAN = math.inf, math.nan
SIZES = r"int.*tuple\[int, int\]"

# Overrides of a good configuration -> parts that the message must hold, in order: field, value, need.
WRONG: list[tuple[dict, list[str]]] = [
    ({"hidden_size": "768"}, ["hidden_size", "int", "got str", "768"]),
    ({"hidden_size": 32.0}, ["hidden_size", "int", "got float", "32.0"]),
    ({"hidden_size": True}, ["hidden_size", "int", "got bool"]),
    ({"hidden_size": None}, ["hidden_size", "int", "got NoneType"]),
    ({"hidden_size": 0}, ["hidden_size=0", "at least 1"]),
    ({"hidden_size": 30}, ["hidden_size=30", "not divisible by num_attention_heads=4", "divides the hidden size"]),
    ({"num_attention_heads": 5}, ["hidden_size=32", "num_attention_heads=5", "number of heads that divides"]),
    ({"num_attention_heads": -4}, ["num_attention_heads=-4", "at least 1"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]),
    ({"num_hidden_layers": "12"}, ["num_hidden_layers", "int", "got str", "12"]),
    ({"num_channels": -3}, ["num_channels=-3", "at least 1"]),
    ({"intermediate_size": 0}, ["intermediate_size=0", "at least 1"]),
    ({"fpn_hidden_size": 0}, ["fpn_hidden_size=0", "at least 1"]),
    ({"image_size": "224"}, ["image_size", "'224'", SIZES]),
    ({"image_size": 224.0}, ["image_size", r"224\.0", SIZES]),
    ({"image_size": None}, ["image_size", "None", SIZES]),
    ({"image_size": (16,)}, ["image_size", r"\(16,\)", SIZES, "length 2"]),
    ({"image_size": (16, 16, 3)}, ["image_size", r"\(16, 16, 3\)", SIZES, "length 2"]),
    ({"image_size": []}, ["image_size", SIZES, "length 2"]),
    ({"image_size": 0}, ["image_size=0", "at least 1"]),
    ({"image_size": -16}, ["image_size=-16", "at least 1"]),
    ({"image_size": (16, 0)}, [r"image_size=\(16, 0\)", "at least 1"]),
    ({"layer_norm_eps": 0.0}, ["layer_norm_eps=0.0", "finite number above 0"]),
    ({"layer_norm_eps": NAN}, ["layer_norm_eps=nan", "finite number above 0"]),
    ({"layer_norm_eps": "1e-6"}, ["layer_norm_eps", "float", "got str", "1e-6"]),
    ({"initializer_range": INF}, ["initializer_range=inf", "finite number above 0"]),
    ({"initializer_range": -0.02}, ["initializer_range=-0.02", "finite number above 0"]),
    ({"hidden_act": "gellu"}, ["hidden_act='gellu'", "activation", "did you mean 'gelu'"]),
    ({"hidden_act": "xyzzy"}, ["hidden_act='xyzzy'", "ACT2FN"]),
    ({"hidden_act": None}, ["hidden_act", "str", "got NoneType"]),
    ({"qkv_bias": "yes"}, ["qkv_bias", "bool", "got str", "yes"]),
    ({"qkv_bias": 1}, ["qkv_bias", "bool", "got int"]),
    ({"num_register_tokens": -1}, ["num_register_tokens=-1", "at least 0"]),
    ({"mlp_type": "gelu"}, ["mlp_type", "'dense', 'swiglu'"]),
    (
        {"norm_after_pooling": True, "representation_size": 8},
        ["norm_after_pooling=True", "representation_size", "norm_after_pooling=False"],
    ),
    ({"hidden_dropout_prob": 1.0}, ["hidden_dropout_prob=1.0", "not a probability", "0 <= hidden_dropout_prob < 1"]),
    ({"hidden_dropout_prob": NAN}, ["hidden_dropout_prob=nan", "0 <= hidden_dropout_prob < 1"]),
    ({"attention_probs_dropout_prob": -0.1}, ["attention_probs_dropout_prob=-0.1", "not a probability"]),
    ({"drop_path_rate": 10}, ["drop_path_rate=10", "not a probability", "0 <= drop_path_rate < 1"]),
    ({"drop_path_rate": "0.1"}, ["drop_path_rate", "'0.1'", "float"]),
    ({"drop_path_rate": 0.1, "num_hidden_groups": 1}, ["drop_path_rate=0.1", "num_hidden_groups=1", "more groups"]),
    ({"position_embedding": "learnt"}, ["position_embedding", "one of", "'learned'", "'relative'", "got learnt"]),
    ({"position_embedding": None}, ["position_embedding", "one of", "'none'", "got None"]),
    ({"position_interpolation": "nearest"}, ["position_interpolation", "'bilinear_corners', 'bicubic'", "got nearest"]),
    ({"position_on_class_token": "no"}, ["position_on_class_token", "bool", "got str", "no"]),
    ({"pooling": "cls"}, ["pooling", "'token', 'gap', 'map'", "got cls"]),
    ({"pooling": "token", "use_class_token": False}, ["pooling='token'", "use_class_token=False", "pooling='gap'"]),
    ({"use_class_token": "yes"}, ["use_class_token", "'yes'", "bool"]),
    ({"representation_size": 0}, ["representation_size=0", "at least 1"]),
    ({"representation_size": "768"}, ["representation_size", "'768'", "int"]),
    ({"layer_scale_init_value": NAN}, ["layer_scale_init_value=nan", "finite number of at least 0, or None"]),
    ({"layer_scale_init_value": -1.0}, ["layer_scale_init_value=-1.0", "at least 0"]),
    ({"layer_scale_init_value": "small"}, ["layer_scale_init_value", "'small'", "float"]),
    ({"num_hidden_groups": 0}, ["num_hidden_groups=0", "at least 1"]),
    ({"num_hidden_groups": 3}, ["num_hidden_groups=3", "exceeds num_hidden_layers=2", "at least one layer"]),
    ({"is_causal": "gpt"}, ["is_causal", "bool", "got str", "gpt"]),
    ({"num_labels": -1}, ["num_labels=-1", "integer of at least 0"]),
    ({"num_labels": "3"}, ["num_labels='3'", "integer of at least 0"]),
    ({"id2label": ["cat", "dog"]}, [r"id2label=\['cat', 'dog'\]", "dict", r"dict\(enumerate\(names\)\)"]),
    ({"id2label": {1: "cat", 2: "dog"}, "num_labels": 2}, ["id2label", r"\[1, 2\]", "0 to 1"]),
    ({"problem_type": "classify"}, ["problem_type='classify'", "'single_label_classification'", "None"]),
    ({"out_features": ["stage9"]}, ["out_features", "stage_names", "stage2", r"got \['stage9'\]"]),
    ({"out_indices": [9]}, ["out_indices", "stage_names", r"got \[9\]"]),
    ({"out_features": ["stage1"], "out_indices": [2]}, ["out_features", "out_indices", "same stages"]),
    ({"reshape_hidden_states": None}, ["reshape_hidden_states", "bool", "got NoneType"]),
]

# Of the plain family: its patch, and what the others do not have.
WRONG_PLAIN: list[tuple[dict, list[str]]] = [
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
    (
        {"is_causal": True, "pooling": "gap", "use_class_token": True},
        ["use_class_token=True", "is_causal=True", "pooling='token'"],
    ),
    ({"use_distillation_token": True, "pooling": "gap"}, ["use_distillation_token=True", "pooling='token'", "'gap'"]),
    ({"use_distillation_token": True, "pooling": "map"}, ["use_distillation_token=True", "pooling='token'", "'map'"]),
    ({"use_distillation_head": True}, ["use_distillation_head=True", "use_distillation_token=True"]),
    ({"use_distillation_token": 1}, ["use_distillation_token", "bool", "got int"]),
    (
        {"hidden_size": 6, "num_attention_heads": 1, "position_embedding": "sincos_2d"},
        ["'sincos_2d'", "hidden_size=6", "divisible by 4"],
    ),
    (
        {"hidden_size": 4, "num_attention_heads": 1, "position_embedding": "sincos_2d"},
        ["'sincos_2d'", "two frequencies", "hidden_size=4 must exceed 4"],
    ),
    (
        {"hidden_size": 3, "num_attention_heads": 3, "position_embedding": "sincos_1d"},
        ["'sincos_1d'", "hidden_size=3", "divisible by 2"],
    ),
    (
        {"hidden_size": 3, "num_attention_heads": 3, "position_embedding": "learned_2d"},
        ["'learned_2d'", "hidden_size=3", "divisible by 2"],
    ),
    ({"use_feature_pyramid": True, "patch_size": (4, 8)}, ["use_feature_pyramid=True", "4x8 px", "power of two"]),
    (
        {"use_feature_pyramid": True, "out_indices": [1, 2]},
        ["use_feature_pyramid=True", r"out_features=\['stage1', 'stage2'\]", "one stage"],
    ),
]

WRONG_HYBRID: list[tuple[dict, list[str]]] = [
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
    ({"num_register_tokens": 2, "is_causal": True}, ["num_register_tokens=2", "is_causal=True", "leave the registers"]),
]

WRONG_AXIAL: list[tuple[dict, list[str]]] = [
    ({"pooling": "token"}, ["pooling='token'", "no place for a class token", "'gap' or 'map'"]),
    ({"use_class_token": True}, ["use_class_token=True", "no place for a class token", "'gap' or 'map'"]),
    ({"use_distillation_token": True}, ["use_distillation_token=True"]),
    ({"is_causal": True}, ["is_causal=True", "axial"]),
    ({"position_embedding": "relative"}, ["position_embedding='relative'", "axial", "use 'learned_2d'"]),
    ({"image_size": 3}, ["image_size=3", "patch_size=4", "smaller than a patch of 4x4 px"]),
    ({"num_register_tokens": 4}, ["num_register_tokens=4", "no place for registers", "leave them out"]),
]


WRONG_LOCAL: list[tuple[dict, list[str]]] = [
    ({"attention_pattern": "dilated"}, ["attention_pattern", "local", "strided", "criss_cross"]),
    ({"attention_window": 4}, ["attention_window=4", "odd number of tokens"]),
    ({"attention_window": -1}, ["attention_window=-1", "odd number of tokens"]),
    ({"attention_window": 3.0}, ["attention_window", "int", "float"]),
    ({"attention_stride": 0}, ["attention_stride=0", "at least 1"]),
    ({"is_causal": True}, ["is_causal=True", "local", "all directions"]),
    ({"position_embedding": "relative"}, ["position_embedding='relative'", "local", "use 'learned_2d'"]),
    ({"position_embedding": "relative_bias"}, ["position_embedding='relative_bias'", "local", "use 'learned_2d'"]),
]

OF_ITS_OWN = {"plain": WRONG_PLAIN, "hybrid": WRONG_HYBRID, "axial": WRONG_AXIAL, "local": WRONG_LOCAL}


def test_wrong_values_say_field_value_and_need(family: Family, subtests: pytest.Subtests):
    for wrong, parts in WRONG + OF_ITS_OWN[family.name]:
        with subtests.test(wrong=wrong):
            with pytest.raises((StrictDataclassError, ValueError), match="(?s)" + ".*".join(parts)) as error:
                family.config(**wrong)
            assert "Traceback" not in str(error.value)


def test_values_set_later_are_checked_when_the_model_is_built(family: Family, head: str):
    config = family.config()
    config.hidden_size = 30
    with pytest.raises(StrictDataclassError, match="hidden_size=30 is not divisible by num_attention_heads=4"):
        family.classes[head](config)
    with pytest.raises(StrictDataclassError, match="'token', 'gap', 'map'"):
        config.pooling = "mean"


@pytest.mark.parametrize(
    ("misspelt", "nearest"),
    [
        ("hiden_size", "hidden_size"),
        ("image_sizes", "image_size"),
        ("num_heads", "num_attention_heads"),
        ("num_layers", "num_hidden_layers"),
        ("dropout", "hidden_dropout_prob"),
        ("drop_path", "drop_path_rate"),
        ("postion_embedding", "position_embedding"),
        ("layerscale_init_value", "layer_scale_init_value"),
    ],
)
def test_misspelt_key_is_warned_about_with_the_nearest_name(family: Family, misspelt: str, nearest: str):
    with pytest.warns(UserWarning, match=f"has no field '{misspelt}' \\(value 3\\).*did you mean '{nearest}'"):
        family.config(**{misspelt: 3})


def test_keys_of_newer_versions_are_kept_without_a_word(family: Family, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = family.config(zyx_of_version_nine={"a": 1})
        config.save_pretrained(tmp_path)
        assert family.config_class.from_pretrained(tmp_path).zyx_of_version_nine == {"a": 1}


def test_a_config_of_transformers_vit_is_read_without_a_word():
    written = ViTConfig(hidden_size=96, num_attention_heads=3, qkv_bias=False).to_dict()
    del written["model_type"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = HfViTConfig(**written)
    assert (config.hidden_size, config.num_attention_heads, config.qkv_bias) == (96, 3, False)


def test_round_trip(family: Family, choice: str, tmp_path):
    config = family.config(choice)
    again = family.config_class(**config.to_dict())
    assert again.to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    for loader in (family.config_class, AutoConfig):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is family.config_class
        assert loaded.to_diff_dict() == config.to_diff_dict()
        assert (loaded.grid, loaded.num_labels, loaded.id2label) == (config.grid, config.num_labels, config.id2label)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == config.model_type


def test_every_field_survives_saving(family: Family, tmp_path):
    """No field of its own is lost: each set to something other than its default."""
    changed = {
        **{**TINY, **family.tiny, "hidden_act": "relu", "layer_norm_eps": 1e-5, "qkv_bias": False},
        **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "drop_path_rate": 0.3},
        **{"initializer_range": 0.1, "position_embedding": "learned_2d", "position_on_class_token": False},
        **{"position_interpolation": "bicubic", "pooling": "gap", "use_class_token": False, "representation_size": 7},
        **{"layer_scale_init_value": 0.5, "num_hidden_groups": 2, "reshape_hidden_states": False},
        **{"apply_layernorm": False, "fpn_hidden_size": 9, "id2label": {0: "cat", 1: "dog", 2: "eel"}},
    }
    del changed["num_labels"]
    config = family.config_class(**changed)
    config.save_pretrained(tmp_path)
    loaded = family.config_class.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in changed} == changed


@pytest.mark.parametrize("sizes", [{"image_size": [12, 16]}, {"image_size": (12, 16)}, {"image_size": 16}])
def test_sizes_may_be_pairs_and_lists(sizes: dict):
    config = HfViTConfig(**sizes, patch_size=[3, 4] if sizes["image_size"] != 16 else 4)
    assert config.grid == (4, 4)
    assert not isinstance(config.image_size, list)
    assert not isinstance(config.patch_size, list)


def test_defaults_are_the_papers_b16():
    config = HfViTConfig()
    assert (config.image_size, config.patch_size, config.grid) == (224, 16, (14, 14))
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (12, 768, 3072)
    assert (config.num_attention_heads, config.hidden_act, config.layer_norm_eps) == (12, "gelu_pytorch_tanh", 1e-6)
    assert (config.pooling, config.has_class_token, config.position_embedding) == ("token", True, "learned")


def test_as_many_layers_as_a_number_can_say_is_refused_at_once():
    with pytest.raises(StrictDataclassError, match="num_hidden_layers=1000000000 is more than 10000"):
        HfViTConfig(num_hidden_layers=10**9)


def test_keys_that_transformers_writes_are_not_taken_for_misspelt(recwarn):
    """What its configurations hold besides fields, such as "tie_word_embeddings"."""
    HfViTConfig(**{name: False for name in ("tie_word_embeddings", "is_encoder_decoder", "add_cross_attention")})
    assert [str(warning.message) for warning in recwarn] == []


def test_a_whole_number_is_an_epsilon_too():
    with pytest.raises(StrictDataclassError, match="layer_norm_eps=0 must be a finite number above 0"):
        HfViTConfig(layer_norm_eps=0)


@pytest.mark.parametrize("name", FAMILIES | OTHERS)
def test_indices_of_labels_as_json_writes_them(name: str, tmp_path):
    family = (FAMILIES | OTHERS)[name]
    names = {"0": "cat", "1": "dog", "2": "eel"}
    family.build("classification").save_pretrained(tmp_path)
    loaded = family.classes["classification"].from_pretrained(tmp_path, id2label=names).config
    for config in (family.config(id2label=names), loaded):
        assert config.id2label == {0: "cat", 1: "dog", 2: "eel"}
