"""Every form of the original's files, against an independent numpy forward pass of the original's mathematics."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

import hf_vit.conversion as conversion
from hf_vit.errors import UserError

FORMS = {
    "plain": {},
    "linen names": {"linen": True},
    "many heads": {"heads": 5, "head_size": 3},
    "one head": {"heads": 1, "head_size": 8},
    "deep": {"depth": 12},
    "GAP": {"token": False},
    "representation layer": {"representation": 7},
    "representation layer and GAP, linen": {"representation": 8, "token": False, "linen": True},
    "no head": {"labels": None},
    "no head but a representation layer": {"labels": None, "representation": 6},
    "one label": {"labels": 1},
    "opt/target": {"prefix": "opt/target/"},
    "params": {"prefix": "params/", "linen": True},
    "non-square patch": {"patch": (2, 5)},
    "one channel": {"channels": 1},
    "four channels": {"channels": 4},
    "float16": {"dtype": "float16"},
    "float64": {"dtype": "float64"},
    "big endian": {"dtype": ">f4"},
}


def images_for(arrays, grid, count=2, seed=1):
    kernel = next(value for key, value in arrays.items() if key.endswith("embedding/kernel"))
    p, q, channels = kernel.shape[:3]
    shape = (count, grid[0] * p, grid[1] * q, channels)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def plain_names(arrays):
    return {key.removeprefix("opt/target/").removeprefix("params/"): value for key, value in arrays.items()}


def run(model, images, dtype=torch.float64):
    with torch.no_grad():
        return model.to(dtype)(torch.from_numpy(images).to(dtype).permute(0, 3, 1, 2))


def assert_same_digits(arrays, output, reference, grid=(3, 3)):
    """The saved model in float64 against the reference on the same weights, rounded to float32 as the file says."""
    arrays = {key: value.astype(np.float32) for key, value in plain_names(arrays).items()}
    images = images_for(arrays, grid)
    expected = reference(arrays, images)
    if "head/kernel" in arrays:
        model = AutoModelForImageClassification.from_pretrained(output)
        np.testing.assert_allclose(run(model, images).logits, expected["logits"], rtol=0, atol=1e-10)
        model = model.vit
    else:
        model = AutoModel.from_pretrained(output)
    found = run(model, images)
    np.testing.assert_allclose(found.last_hidden_state, expected["encoded"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.pooler_output, expected["pre_logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_form_gives_the_references_digits(form, checkpoint, reference, write_npz, tmp_path: Path):
    arrays = checkpoint(**form)
    result = conversion.convert(write_npz(arrays, stored="prefix" in form), tmp_path / "model")
    assert_same_digits(arrays, tmp_path / "model", reference)
    assert sorted(result.plan.consumed) == sorted(arrays)
    assert not result.plan.ignored


def test_reference_gives_the_goldens_digits(golden: Path, reference):
    for case in ("vit_tok", "vit_gap", "vit_tok_rep", "vit_lneps", "vit_optprefix"):
        theirs = np.load(golden / f"{case}.io.npz")
        ours = reference(dict(np.load(golden / f"{case}.ckpt.npz")), theirs["images"])
        np.testing.assert_allclose(ours["logits"], theirs["logits_f64"], rtol=0, atol=1e-10)


def test_fortran_order_is_read(checkpoint, reference, write_npz, tmp_path: Path):
    arrays = {key: np.asfortranarray(value) for key, value in checkpoint().items()}
    for stored in (True, False):
        conversion.convert(write_npz(arrays, stored=stored), tmp_path / f"model{stored}")
        assert_same_digits(arrays, tmp_path / f"model{stored}", reference)


@pytest.mark.parametrize("token", [True, False])
def test_rectangular_grid_needs_its_size_declared(token, checkpoint, reference, write_npz, tmp_path: Path):
    arrays = checkpoint(grid=(2, 3), token=token)
    path = write_npz(arrays)
    with pytest.raises(UserError, match=r"6 patches, which make no square.*--image-size.*8x12"):
        conversion.convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(UserError, match=r"12x12 makes 3x3 = 9 patches of 4x4 px, but the position table has 6"):
        conversion.convert(path, tmp_path / "model", image_size=(12, 12))
    with pytest.raises(UserError, match=r"3x12 px hold no patch of 4x4 px"):
        conversion.convert(path, tmp_path / "model", image_size=(3, 12))
    result = conversion.convert(path, tmp_path / "model", image_size=(8, 12))
    assert result.plan.config.image_size == (8, 12)
    assert_same_digits(arrays, tmp_path / "model", reference, grid=(2, 3))
    assert AutoImageProcessor.from_pretrained(tmp_path / "model").size == {"height": 8, "width": 12}


def test_square_number_of_patches_may_be_declared_rectangular(checkpoint, reference, write_npz, tmp_path: Path):
    arrays = checkpoint(grid=(2, 8))
    conversion.convert(write_npz(arrays), tmp_path / "model", image_size=(8, 32))
    assert_same_digits(arrays, tmp_path / "model", reference, grid=(2, 8))


@pytest.mark.parametrize(("old", "new"), [((3, 3), (5, 2)), ((2, 4), (4, 3)), ((1, 1), (2, 2)), ((3, 3), (1, 1))])
def test_resampling_equals_scipys_zoom(old, new, checkpoint, write_npz, tmp_path: Path):
    from scipy.ndimage import zoom

    arrays = checkpoint(grid=old)
    conversion.convert(
        write_npz(arrays), tmp_path / "model", image_size=(4 * old[0], 4 * old[1]), resize_to=(4 * new[0], 4 * new[1])
    )
    table = arrays["Transformer/posembed_input/pos_embedding"]
    grid = table[0, 1:].reshape(*old, -1).astype(np.float64)
    expected = zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1).reshape(1, new[0] * new[1], -1)
    expected = np.concatenate([table[:, :1], expected], axis=1)
    model = AutoModel.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(model.embeddings.position_embeddings.detach(), expected, rtol=0, atol=1e-7)
    assert model.config.grid == new


def test_new_head_is_zero_and_accounted_for(checkpoint, reference, write_npz, tmp_path: Path):
    arrays = checkpoint(labels=5)
    result = conversion.convert(write_npz(arrays), tmp_path / "model", num_labels=3)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert model.classifier.weight.shape == (3, 8)
    assert not model.classifier.weight.any()
    assert not model.classifier.bias.any()
    assert result.plan.ignored == dict.fromkeys(("head/kernel", "head/bias"), "replaced by a new head")
    images = images_for(arrays, (3, 3))
    found = run(model.vit, images).last_hidden_state
    np.testing.assert_allclose(found, reference(arrays, images)["encoded"], rtol=0, atol=1e-10)


def test_new_head_on_a_headless_source(checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint(labels=None, representation=6)
    conversion.convert(write_npz(arrays), tmp_path / "model", labels=["cat", "dog"])
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert model.config.id2label == {0: "cat", 1: "dog"}
    assert model.classifier.weight.shape == (2, 6)


def test_optimizer_state_is_ignored_by_rule(checkpoint, reference, write_npz, tmp_path: Path):
    arrays = checkpoint(prefix="opt/target/")
    state = {
        "opt/state/step": np.int32(7),
        "opt/state/param_states/head/bias/momentum": np.full(5, np.nan, np.float32),  # never read
        "extra/accum_train_time": np.float64(1.5),
    }
    result = conversion.convert(write_npz(arrays | state), tmp_path / "model")
    assert_same_digits(arrays, tmp_path / "model", reference)
    assert result.plan.ignored == {
        "opt/state/step": "optimizer state",
        "opt/state/param_states/head/bias/momentum": "optimizer state",
        "extra/accum_train_time": "training progress",
    }


def test_values_that_float32_cannot_hold_are_counted(checkpoint, write_npz, tmp_path: Path):
    arrays = checkpoint(dtype="float64")
    result = conversion.convert(write_npz(arrays), tmp_path / "model")
    assert sum(result.rounded.values()) == sum((value != value.astype("f4")).sum() for value in arrays.values()) > 0
    facts = json.loads((tmp_path / "model" / "facts.json").read_text())[0]
    assert facts["values"]["rounded_to_float32"] == sum(result.rounded.values())
    exact = {key: value.astype("f4").astype("f8") for key, value in arrays.items()}
    assert not conversion.convert(write_npz(exact), tmp_path / "exact").rounded


def test_output_is_complete(checkpoint, write_npz, tmp_path: Path):
    import hashlib

    path = write_npz(checkpoint())
    conversion.convert(path, tmp_path / "new" / "model", report=tmp_path / "report.json")
    output = tmp_path / "new" / "model"
    processor = json.loads((output / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "ViTImageProcessor"
    assert processor["image_mean"] == processor["image_std"] == [0.5, 0.5, 0.5]
    assert processor["do_convert_rgb"] is True
    assert processor["size"] == {"height": 12, "width": 12}
    (record,) = json.loads((output / "facts.json").read_text())
    assert record["kind"] == "conversion"
    values = record["values"]
    assert values["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (values["source"], values["origin"]) == ("model.npz", "vit_jax")
    assert values["keys"] == {"in_file": 40, "used": 40, "ignored": 0}
    assert "auto_map" in json.loads((output / "config.json").read_text())
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["model"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["source"] for row in report["keys"]} == set(checkpoint())
    head = next(row for row in report["keys"] if row["source"] == "head/kernel")
    assert head == {
        "source": "head/kernel",
        "shape": [8, 5],
        "transform": "transpose",
        "target": "classifier.weight",
        "target_shape": [5, 8],
    }
