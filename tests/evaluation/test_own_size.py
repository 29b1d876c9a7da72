"""Images in their own size and shape (`--max-num-patches`): each is judged as the plain model judges it alone."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from evaluation.tiny import NAMES, examine, make_data, our_subject, save_ours
from models.families import OTHERS
from PIL import Image
from transformers import ViTImageProcessor

from hf_vit import HfViTForImageClassification, HfViTModel, UserError
from hf_vit.evaluation import evaluate_protocol
from hf_vit.evaluation.embedding.job import embed
from hf_vit.subjects.own_size import at_own_size, own_grid
from hf_vit.subjects.subject import open_subject
from hf_vit_cli.main import main

SIZES = {"a": (8, 16), "b": (4, 4), "c": (40, 20), "d": (9, 13), "e": (3, 90), "f": (8, 8)}  # px
# The nearest whole patches of 4 px; those that hold more than 12 are shrunk in their shape.
GRIDS = {"a": (2, 4), "b": (1, 1), "c": (4, 2), "d": (2, 3), "e": (1, 12), "f": (2, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and data/test/CLASS/LETTER.png, two classes."""
    root = tmp_path_factory.mktemp("own_size")
    save_ours(root / "model")
    random = np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        for number, (letter, size) in enumerate(SIZES.items()):
            (root / "data" / split / NAMES[number % 2]).mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "data" / split / NAMES[number % 2] / f"{letter}.png")
    return root


@pytest.fixture(scope="module")
def classifier(folder: Path) -> HfViTForImageClassification:
    return HfViTForImageClassification.from_pretrained(folder / "model")


def fed(path: Path) -> torch.Tensor:
    """[1, C, H, W] of one image, by Pillow and numpy."""
    h, w = GRIDS[path.stem]
    with Image.open(path) as image:
        pixels = np.asarray(image.resize((4 * w, 4 * h), Image.Resampling.BILINEAR), dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)[None]


@pytest.mark.parametrize("processes", [1, 2])
def test_embeddings_are_those_of_each_image_alone(
    classifier: HfViTForImageClassification, folder: Path, tmp_path: Path, processes: int
) -> None:
    embed(
        str(folder / "model"), str(folder / "data"), tmp_path / "out", splits=["test"], max_num_patches=12,
        batch_size=4, rows_per_file=5, num_processes=processes,
    )  # fmt: skip
    rows = [row for path in (tmp_path / "out").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert {row["image"].rpartition("/")[2] for row in rows} == {f"{letter}.png" for letter in SIZES}
    for row in rows:
        with torch.no_grad():
            alone = classifier.vit(fed(folder / "data" / "test" / row["image"])).pooler_output[0]
        np.testing.assert_allclose(row["embedding"], alone, rtol=0, atol=1e-5)


def test_accuracy_and_loss_are_those_of_each_image_alone(
    classifier: HfViTForImageClassification, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate_protocol(
        "top1", str(folder / "model"), str(folder / "data"), batch_size=4, max_num_patches=12, progress=False
    )
    paths = sorted((folder / "data" / "test").glob("*/*.png"))
    with torch.no_grad():
        logits = torch.cat([classifier(fed(path)).logits for path in paths])
    labels = torch.tensor([NAMES.index(path.parent.name) for path in paths])
    assert found.result.values()["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, labels)), abs=1e-5
    )
    assert found.result.headline()["top-1 accuracy"] == pytest.approx(
        float((logits.argmax(1) == labels).float().mean())
    )
    assert found.settings["max_num_patches"] == 12
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(folder / "model"), "--data", str(folder / "data"), "--max-num-patches", "12"])
    assert not stopped.value.code
    assert f"{found.result.headline()['top-1 accuracy']:.2%}" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["plain", "hybrid", "axial", "local"])
def test_every_vision_transformer_takes_them(family: str) -> None:
    """Also those that go on with padding."""
    subject = our_subject(family)
    data = make_data(test=6, side=40)
    small = data.splits["test"].map(lambda row, n: {"image": row["image"].resize((20 + 8 * n, 36))}, with_indices=True)
    data.splits["test"] = small
    features, _ = examine(at_own_size(subject, 64), data, batch_size=6).features("test")
    alone = [examine(at_own_size(subject, 64), data, batch_size=1).features("test", [row])[0][0] for row in range(6)]
    np.testing.assert_allclose(features, np.stack(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("protocol", ["linear-probe", "robustness", "corruptions", "patch-drop", "vtab"])
def test_protocols_of_one_size_refuse(protocol: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"protocol {protocol} takes images of one size; leave --max-num-patches out"):
        evaluate_protocol(protocol, str(folder / "model"), str(folder / "data"), max_num_patches=12)


def test_models_of_one_size_refuse() -> None:
    with pytest.raises(UserError, match="takes images of one size; --max-num-patches is for Vision Transformers"):
        at_own_size(examine().subject, 12)
    with pytest.raises(UserError, match="takes images of one size"):
        at_own_size(open_subject((OTHERS["mixer"].build("classification"), ViTImageProcessor())), 12)


def test_a_model_that_pools_nothing_is_refused(classifier: HfViTForImageClassification) -> None:
    bare = HfViTModel(classifier.config, add_pooling_layer=False), ViTImageProcessor()
    with pytest.raises(UserError, match="pools nothing"):
        at_own_size(open_subject(bare), 12)


@pytest.mark.parametrize("most", [1, 2, 7, 196])
def test_a_grid_is_no_larger_than_asked_and_keeps_its_shape(most: int) -> None:
    random = np.random.default_rng(0)
    for height, width in random.integers(1, 900, (300, 2)).tolist():
        h, w = own_grid((height, width), (16, 16), most)
        assert 1 <= h * w <= most
        whole = max(1, round(height / 16)), max(1, round(width / 16))
        if whole[0] * whole[1] <= most:
            assert (h, w) == whole
        elif min(h, w) > 1:  # no patch more would have fitted both ways
            assert (h + 1) * (w + 1) > most
            assert 0.5 < (h / w) / (height / width) < 2
