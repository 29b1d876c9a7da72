"""Saving and loading with the package: the same bits, the same keys, the files that travel, older versions."""

import json
import os
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from models.families import FAMILIES, HEADS, OTHERS, Family, assert_same_bits
from packaging.version import Version
from safetensors.torch import load_file

import hf_vit
from hf_vit.families import DENSE_HEADS
from hf_vit.loading import load_model

OTHER_FAMILIES = OTHERS
ALL_FAMILIES = FAMILIES | OTHERS
KEYS = Path(__file__).parent / "state_dict_keys.json"
MODELS = Path(hf_vit.models.__file__).parent


# One for each module, table or shape that a choice brings in; test_config.py reloads every configuration.
@pytest.mark.choices(
    *("map", "gap", "layer_scale", "two_groups_of_three", "distillation", "representation", "no_qkv_bias", "no_labels"),
    *("learned", "learned_2d", "sincos_1d", "sincos_2d", "relative", "no_position", "table_before_class_token"),
    *("relative_bias", "positions_of_registers", "map_with_registers", "no_last_norm", "rotary", "rotary_mixed"),
    *("rectangular", "rectangular_patch", "root_alone", "patches_of_the_stem", "resnet_stem", "post_activation"),
    *("zero_padded_pool",),
)
def test_every_head_and_choice_reloads_with_the_same_bits(family: Family, choice: str, tmp_path: Path):
    for head in family.classes if choice == "default" else ["classification"]:
        model = family.build(head, choice)
        images = family.images(model.config)
        model.save_pretrained(tmp_path)
        loaders = [family.classes[head]]
        if choice == "default" and head != "backbone":  # transformers' AutoBackbone does not read folders
            loaders.append(getattr(transformers, HEADS[head].auto_class))
        for loader in loaders:
            loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
            assert type(loaded) is family.classes[head]
            assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
            assert_same_bits(loaded(images), model(images))


BASE = {"configuration_hf_vit", "pretrained_hf_vit"}
VIT = {*BASE, "embeddings_hf_vit", "modeling_hf_vit", "backbone_hf_vit", "pretraining_hf_vit"}
RESNET = {*BASE, "configuration_hf_resnet", "modeling_hf_resnet"}
AXIAL_RESNET = {*RESNET, "configuration_hf_axial_resnet", "modeling_hf_axial_resnet"}
HYBRID = {"configuration_hf_hybrid_vit", "modeling_hf_hybrid_vit", "configuration_hf_resnet", "resnet_hf_vit"}
TRAVELLING = {
    "plain": VIT,
    "hybrid": {*VIT, *HYBRID},
    "axial": {*VIT, *AXIAL_RESNET, "configuration_hf_axial_vit", "modeling_hf_axial_vit"},
    "local": {*VIT, "configuration_hf_local_vit", "modeling_hf_local_vit"},
    "axial_resnet": AXIAL_RESNET,
    "bit": {*RESNET, "configuration_hf_bit", "modeling_hf_bit", "resnet_hf_vit"},
    "mixer": {*BASE, "configuration_hf_mixer", "modeling_hf_mixer"},
}


def test_what_travels(family: Family, head: str, tmp_path: Path):
    """The same code from every head, with every class of the family and no more; a stale copy becomes today's."""
    family.build(head).save_pretrained(tmp_path / "old")
    for file in (tmp_path / "old").glob("*.py"):
        file.write_text("raise RuntimeError('old code')\n")
    family.classes[head].from_pretrained(tmp_path / "old").save_pretrained(tmp_path)
    files = {path.stem: path.read_text() for path in tmp_path.glob("*.py")}
    assert files.keys() == TRAVELLING[family.name]
    assert files == {name: (MODELS / f"{name}.py").read_text() for name in files}
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".py", ".safetensors", ""}, "nothing pickled"
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    wanted = {HEADS[name].auto_class: own.__name__ for name, own in family.classes.items()}
    assert {auto_class: target.split(".")[1] for auto_class, target in named.items()} == {
        "AutoConfig": family.config_class.__name__,
        **wanted,
    }
    for target in named.values():
        module, name = target.split(".")
        assert f"class {name}(" in files[module]


def test_everything_in_models_travels(tmp_path: Path):
    """A head of dense prediction takes every backbone along, as the file that all heads share knows them all."""
    every, dense = set().union(*TRAVELLING.values()), {f"{kind.task}_hf_vit" for kind in DENSE_HEADS.values()}
    assert every | dense | {"dense_hf_vit"} == {path.stem for path in MODELS.glob("*.py")} - {"__init__"}
    for head, kind in DENSE_HEADS.items():
        kind.config_class().save_pretrained(tmp_path / head)
        files = {path.stem for path in (tmp_path / head).glob("*.py")}
        assert files == every | {"dense_hf_vit", f"{kind.task}_hf_vit"}, head
    for family in OTHERS.values():
        for head in family.classes:
            assert not [name for name in family.build(head).state_dict() if "vit" in name]


def test_offloaded_weights_give_the_same_bits(family: Family, head: str, tmp_path: Path):
    """accelerate brings them from memory or from a file when a module is called; until then they are on meta."""
    model = family.build(head)
    images = family.images(model.config)
    model.save_pretrained(tmp_path)
    wanted = model(images)
    if Version(accelerate.__version__) < Version("1.15"):  # `device_map` cannot name the disk alone
        on_disk = accelerate.disk_offload(family.classes[head].from_pretrained(tmp_path), tmp_path / "off")
    else:
        loader = family.classes[head].from_pretrained
        on_disk = loader(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "off")
    for offloaded in (on_disk, accelerate.cpu_offload(model, torch.device("cpu"))):
        assert all(parameter.is_meta for parameter in offloaded.parameters())
        assert_same_bits(offloaded(images), wanted)


def test_fsdp_finds_the_blocks_of_every_form():
    """By `_no_split_modules`; accelerate refuses the names of blocks that a model does not have."""
    for family in ALL_FAMILIES.values():
        for choice in family.choices.keys() & {"default", "root_alone", "post_activation"}:
            plugin = accelerate.FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
            plugin.set_auto_wrap_policy(family.build("classification", choice))
            assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] or family.name == "axial_resnet"


def test_dtype_is_kept_or_chosen(family: Family, tmp_path: Path):
    for dtype in (torch.bfloat16, torch.float64):
        model = family.build("model").to(dtype)
        model.save_pretrained(tmp_path)
        images = family.images(model.config, dtype=dtype)
        kept = family.classes["model"].from_pretrained(tmp_path)
        assert kept.dtype == dtype
        assert_same_bits(kept(images), model(images))
        assert family.classes["model"].from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_another_number_of_labels(family: Family, tmp_path: Path):
    model = family.build("classification")
    model.save_pretrained(tmp_path)
    loader = family.classes["classification"]
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        loader.from_pretrained(tmp_path, num_labels=7)
    loaded = loader.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    images = family.images(model.config)
    assert loaded(images).logits.shape == (2, 7)
    assert not loaded(images).logits.any()
    assert_same_bits(loaded.base_model(images), model.base_model(images))
    for names in (["cat", "dog"], ["LABEL_2", "LABEL_0", "LABEL_1"]):
        loaded = loader.from_pretrained(tmp_path, id2label=dict(enumerate(names)), ignore_mismatched_sizes=True)
        assert loaded.config.label2id == {name: index for index, name in enumerate(names)}


def test_another_size_by_keyword_and_by_config(family: Family, tmp_path: Path):
    model = family.build("classification", dtype=torch.float64)
    model.save_pretrained(tmp_path)
    if family.one_size:
        refuses_another_size(model, tmp_path)
        return
    (stride_h, stride_w), loader = model.config.patch_stride, family.classes["classification"]
    size, images = (5 * stride_h, 6 * stride_w), family.images(model.config, grid=(5, 6), dtype=torch.float64)
    by_keyword = loader.from_pretrained(tmp_path, image_size=size)
    config = family.config_class.from_pretrained(tmp_path, image_size=size)
    by_config = loader.from_pretrained(tmp_path, config=config)
    by_both = loader.from_pretrained(tmp_path, config=family.config_class.from_pretrained(tmp_path), image_size=size)
    by_auto = transformers.AutoModelForImageClassification.from_pretrained(tmp_path, image_size=size)
    config.save_pretrained(tmp_path / "config")
    by_path = loader.from_pretrained(tmp_path, config=tmp_path / "config")
    for loaded in (by_keyword, by_config, by_path, by_both, by_auto):
        assert loaded.config.grid == (5, 6)
        torch.testing.assert_close(loaded(images).logits, model(images).logits, rtol=0, atol=1e-12)
        # and stays that size when saved again
    by_auto.save_pretrained(tmp_path / "resized")
    again = loader.from_pretrained(tmp_path / "resized")
    assert again.config.grid == (5, 6)
    assert_same_bits(again(images), by_auto(images))


def refuses_another_size(model, folder: Path) -> None:
    """In one line, by every way; the size that it has is none."""
    loader, height, width = type(model), *model.config.nominal_size
    images = torch.rand(1, model.config.num_channels, height, width, dtype=torch.float64)
    assert_same_bits(loader.from_pretrained(folder, image_size=[height, width])(images), model(images))
    config = model.config_class.from_pretrained(folder, image_size=2 * height)
    for attempt in (
        lambda: loader.from_pretrained(folder, image_size=2 * height),
        lambda: loader.from_pretrained(folder, patch_size=2),
        lambda: loader.from_pretrained(folder, config=config),
        lambda: model.resize_to(image_size=(height, 2 * width)),
    ):
        with pytest.raises(ValueError, match=r"cannot be resized to .* a weight for every patch") as error:
            attempt()
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="px only, as its token MLP"):
        model(torch.zeros(1, model.config.num_channels, 2 * height, width))


def test_state_dict_keys_are_frozen():
    """Checkpoints out there hold these names; HF_VIT_FREEZE_KEYS=1 writes the file anew, for additions."""
    keys = {
        f"{name}-{head}-{choice}": {key: list(value.shape) for key, value in build_empty(family, head, choice).items()}
        for name, family in ALL_FAMILIES.items()
        for head in family.classes
        for choice in family.choices
    }
    if os.environ.get("HF_VIT_FREEZE_KEYS"):
        KEYS.write_text(json.dumps(compact(keys), indent=1) + "\n")
    frozen = json.loads(KEYS.read_text())
    assert compact(keys) == frozen


def build_empty(family: Family, head: str, choice: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return family.classes[head](family.config(choice)).state_dict()


def compact(keys: dict[str, dict[str, list[int]]]) -> dict[str, dict[str, str]]:
    """The defaults in full; of every other choice, what it adds and what it leaves out."""
    found: dict[str, dict[str, str]] = {}
    for name, shapes in keys.items():
        family, head, choice = name.split("-")
        default = {} if choice == "default" else keys[f"{family}-{head}-default"]
        found[name] = {key: "x".join(map(str, shape)) for key, shape in shapes.items() if default.get(key) != shape}
        found[name] |= {key: "absent" for key in default if key not in shapes}
    return found


FIXTURES = Path(__file__).parents[1] / "fixtures"
# Renamed once, before the first release on a Hub.
REFUSED = [("release_0.1.0", "bit"), ("release_0.1.0", "axial_resnet")]
# What version 0.2 wrote into its trainings with a teacher, embeddings, analyses and comparisons.
FINGERPRINTS = {
    "axial": "5b282ed639cb58bb",
    "axial_resnet": "28b742023e3b7c35",
    "bit": "50cc1a08d7e00e9d",
    "hybrid": "309cb4f973724c97",
    "mixer": "eb1e580b78844fdf",
    "plain": "accf83b280803e47",
}


@pytest.mark.parametrize(
    ("release", "name"), sorted((path.parent.name, path.name) for path in FIXTURES.glob("release_*/*"))
)
def test_checkpoints_of_released_versions_answer_the_same_or_are_refused(release: str, name: str):
    folder = FIXTURES / release / name
    if (release, name) in REFUSED:
        for auto_class in (transformers.AutoModel, transformers.AutoModelForImageClassification):
            with pytest.raises(OSError, match=r"saved by hf_vit 0\.1\.0.*`hf-vit convert`.*train the model") as refusal:
                auto_class.from_pretrained(folder)
            assert str(folder) in str(refusal.value)
            assert "\n" not in str(refusal.value)
        return
    answers = load_file(folder / "answers.safetensors")
    loader = transformers.AutoModelForImageClassification
    model, info = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        outputs = model(answers["images"], output_hidden_states=True)
    torch.testing.assert_close(outputs.logits, answers["logits"], rtol=0, atol=1e-5)
    if "last_hidden_state" in answers:
        torch.testing.assert_close(outputs.hidden_states[-1], answers["last_hidden_state"], rtol=0, atol=1e-5)
    assert transformers.AutoImageProcessor.from_pretrained(folder).size["height"] == 16
    if release == "release_0.2.0" and transformers.__version__ == "5.23.0":  # whose configs have these fields
        assert load_model(folder).fingerprint == FINGERPRINTS[name]


def test_there_is_a_fixture_of_this_release():
    assert (FIXTURES / f"release_{hf_vit.__version__}").is_dir(), "see tests/fixtures/make_release.py"
