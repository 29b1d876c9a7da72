"""Saving and loading, with the package and without it: the same bits, the same keys, nothing missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from models.families import FAMILIES, HEADS, RESNETS, Family, tensors_of
from safetensors.torch import load_file

OTHER_FAMILIES = RESNETS
ALL_FAMILIES = FAMILIES | RESNETS
KEYS = Path(__file__).parent / "state_dict_keys.json"


def assert_same_bits(given, wanted) -> None:
    for left, right in zip(tensors_of(given), tensors_of(wanted), strict=True):
        assert torch.equal(left, right)


def assert_reloads(family: Family, head: str, choice: str, folder: Path, loaders: list) -> None:
    model = family.build(head, choice)
    images = family.images(model.config)
    model.save_pretrained(folder)
    for loader in loaders:
        loaded, info = loader.from_pretrained(folder, output_loading_info=True)
        assert type(loaded) is family.classes[head]
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
        assert_same_bits(loaded(images), model(images))


def test_every_choice_reloads_with_the_same_bits(family: Family, choice: str, tmp_path: Path):
    assert_reloads(family, "classification", choice, tmp_path, [family.classes["classification"]])


def test_every_head_reloads_with_the_same_bits(family: Family, head: str, tmp_path: Path):
    loaders = [family.classes[head]]
    if head != "backbone":  # transformers' AutoBackbone.from_pretrained does not read folders
        loaders.append(getattr(transformers, HEADS[head].auto_class))
    assert_reloads(family, head, "default", tmp_path, loaders)


def test_saved_folder_holds_the_code_of_every_class(family: Family, head: str, tmp_path: Path):
    family.build(head).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", *(HEADS[name].auto_class for name in family.classes)}
    for auto_class, target in config["auto_map"].items():
        module, class_name = target.split(".")
        assert f"class {class_name}(" in (tmp_path / f"{module}.py").read_text(), auto_class
    classes = {auto_class: target.split(".")[1] for auto_class, target in config["auto_map"].items()}
    for name, own in family.classes.items():
        assert classes[HEADS[name].auto_class] == own.__name__
    assert classes["AutoConfig"] == family.config_class.__name__
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".py", ".safetensors"}, "nothing pickled"


def test_sharded_folder(family: Family, tmp_path: Path):
    model = family.build("classification")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    images = family.images(model.config)
    assert_same_bits(family.classes["classification"].from_pretrained(tmp_path)(images), model(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept_or_chosen(family: Family, dtype: torch.dtype, tmp_path: Path):
    model = family.build("model").to(dtype)
    model.save_pretrained(tmp_path)
    images = family.images(model.config, dtype=dtype)
    kept = family.classes["model"].from_pretrained(tmp_path)
    assert kept.dtype == dtype
    assert_same_bits(kept(images), model(images))
    assert family.classes["model"].from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_model_loads_into_the_other_heads(family: Family, tmp_path: Path):
    base = family.build("model")
    base.save_pretrained(tmp_path / "base")
    images = family.images(base.config)
    classifier, info = family.classes["classification"].from_pretrained(
        tmp_path / "base", num_labels=5, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert_same_bits(classifier.vit(images), base(images))
    assert not classifier(images).logits.any(), "a new head starts at zero"
    classifier.save_pretrained(tmp_path / "classifier")
    loaded, info = family.classes["model"].from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert not info["missing_keys"]
    assert_same_bits(loaded(images), base(images))


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
    assert_same_bits(loaded.vit(images), model.vit(images))


def test_another_size_by_keyword_and_by_config(family: Family, tmp_path: Path):
    model = family.build("classification", dtype=torch.float64)
    model.save_pretrained(tmp_path)
    (stride_h, stride_w), loader = model.config.patch_stride, family.classes["classification"]
    size, images = (5 * stride_h, 6 * stride_w), family.images(model.config, grid=(5, 6), dtype=torch.float64)
    by_keyword = loader.from_pretrained(tmp_path, image_size=size)
    config = family.config_class.from_pretrained(tmp_path, image_size=size)
    by_config = loader.from_pretrained(tmp_path, config=config)
    by_both = loader.from_pretrained(tmp_path, config=family.config_class.from_pretrained(tmp_path), image_size=size)
    by_auto = transformers.AutoModelForImageClassification.from_pretrained(tmp_path, image_size=size)
    for loaded in (by_keyword, by_config, by_both, by_auto):
        assert loaded.config.grid == (5, 6)
        torch.testing.assert_close(loaded(images).logits, model(images).logits, rtol=0, atol=1e-12)
        # and stays that size when saved again
    by_auto.save_pretrained(tmp_path / "resized")
    again = loader.from_pretrained(tmp_path / "resized")
    assert again.config.grid == (5, 6)
    assert_same_bits(again(images), by_auto(images))


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


# Runs where hf_vit cannot be imported: loads every folder, compares with the outputs saved beside it, saves it again.
LOADER = """
import json, sys
from pathlib import Path

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_vit" or name.startswith("hf_vit."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import torch, transformers
from safetensors.torch import load_file, save_file

root, found = Path(sys.argv[1]), {}
for folder in sorted(path.parent for path in root.glob("*-*-*/config.json")):
    family, head, choice = folder.name.split("-")
    auto = getattr(transformers, json.loads((root / "auto.json").read_text())[head])
    saved = load_file(folder / "outputs" / "outputs.safetensors")
    config = transformers.AutoConfig.from_pretrained(root / f"config-{family}", trust_remote_code=True)
    model = auto.from_pretrained(folder, trust_remote_code=True)
    assert type(model.config).__name__ == type(config).__name__ and "hf_vit" not in sys.modules
    assert config.grid == model.config.grid or choice != "default"
    with torch.no_grad():
        outputs = [v for v in model(saved.pop("images")).to_tuple() if isinstance(v, torch.Tensor)]
    same = len(outputs) == len(saved) and all(torch.equal(v, saved[str(i)]) for i, v in enumerate(outputs))
    found[folder.name] = [type(model).__module__.split(".")[0], type(model).__name__, same]
    if len(sys.argv) > 2:
        again = Path(sys.argv[2]) / folder.name
        model.save_pretrained(again)
        config.save_pretrained(again.parent / f"config-{family}")
        (again / "outputs").mkdir()
        (again / "outputs" / "outputs.safetensors").write_bytes(
            (folder / "outputs" / "outputs.safetensors").read_bytes()
        )
print(json.dumps(found))
"""


def run_without_package(tmp: Path, *arguments: Path) -> dict[str, list]:
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp / "modules"), "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOADER, *map(str, arguments)]
    finished = subprocess.run(command, env=environment, cwd=tmp, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


WITHOUT_PACKAGE = [
    *((family, head, "default") for family in ALL_FAMILIES for head in ("model", "classification")),
    *(("plain", "classification", choice) for choice in ("map", "relative", "distillation", "causal", "layer_scale")),
    ("plain", "model", "rectangular_patch"),
]


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory) -> Path:
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("saved")
    (root / "auto.json").write_text(json.dumps({name: head.auto_class for name, head in HEADS.items()}))
    for family in ALL_FAMILIES.values():
        family.config().save_pretrained(root / f"config-{family.name}")  # a configuration alone
    for family, head, choice in WITHOUT_PACKAGE:
        folder = root / f"{family}-{head}-{choice}"
        model = ALL_FAMILIES[family].build(head, choice)
        model.save_pretrained(folder)
        images = ALL_FAMILIES[family].images(model.config)
        with torch.no_grad():
            tensors = {str(index): tensor.clone() for index, tensor in enumerate(tensors_of(model(images)))}
        (folder / "outputs").mkdir()
        save_file({"images": images, **tensors}, folder / "outputs" / "outputs.safetensors")
    return root


def test_without_the_package(saved_folders: Path, tmp_path: Path):
    """Loads by trust_remote_code alone, gives the same bits, and what it saves loads again in the same way."""
    (tmp_path / "again").mkdir()
    wanted = {
        f"{family}-{head}-{choice}": ["transformers_modules", ALL_FAMILIES[family].classes[head].__name__, True]
        for family, head, choice in WITHOUT_PACKAGE
    }
    assert run_without_package(tmp_path, saved_folders, tmp_path / "again") == wanted
    (tmp_path / "again" / "auto.json").write_text((saved_folders / "auto.json").read_text())
    second = tmp_path / "second"
    second.mkdir()
    assert run_without_package(second, tmp_path / "again") == wanted
    # With the package, the folder that was saved without it loads into the package's own class.
    for family, head, choice in WITHOUT_PACKAGE:
        folder = tmp_path / "again" / f"{family}-{head}-{choice}"
        loaded = getattr(transformers, HEADS[head].auto_class).from_pretrained(folder, trust_remote_code=True)
        assert type(loaded) is ALL_FAMILIES[family].classes[head]
        saved = load_file(folder / "outputs" / "outputs.safetensors")
        with torch.no_grad():
            assert torch.equal(tensors_of(loaded(saved["images"]))[0], saved["0"])


def test_saving_a_loaded_folder_refreshes_its_code(family: Family, tmp_path: Path):
    """A folder with a stale copy of the code: loading it with the package and saving again writes today's code."""
    family.build("classification").save_pretrained(tmp_path / "old")
    for file in (tmp_path / "old").glob("*.py"):
        file.write_text("raise RuntimeError('old code')\n")
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "old")
    model.save_pretrained(tmp_path / "new")
    assert all("old code" not in file.read_text() for file in (tmp_path / "new").glob("*.py"))
    assert len(list((tmp_path / "new").glob("*.py"))) == len(list((tmp_path / "old").glob("*.py")))
