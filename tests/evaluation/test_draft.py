"""JPEG files decoded at a smaller scale (`--draft`): as libjpeg does it, everywhere that files are only answered."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from evaluation.tiny import NAMES, save_ours
from PIL import Image
from transformers import ViTImageProcessor

from hf_vit import HfViTForImageClassification, UserError
from hf_vit.catalogue.listing import list_models
from hf_vit.catalogue.published import TOP1
from hf_vit.data.images import opened
from hf_vit.evaluation import evaluate, evaluate_protocol, predict
from hf_vit.evaluation.embedding.job import embed
from hf_vit.subjects.subject import open_subject
from hf_vit_cli.main import main

SIZES = {"a": (64, 64), "b": (40, 70), "c": (8, 8), "d": (33, 130), "e": (15, 17), "f": (128, 32)}  # (height, width)
DECODED = {"a": (8, 8), "b": (10, 18), "c": (8, 8), "d": (9, 33), "e": (15, 17), "f": (32, 8)}  # of 8 px at least


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ of 8 px, and data/test/CLASS/LETTER.jpg, two classes; one of them turned by its EXIF data."""
    root = tmp_path_factory.mktemp("draft")
    save_ours(root / "model")
    random = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for split in ("train", "validation", "test"):
        for number, (letter, size) in enumerate(SIZES.items()):
            (root / "data" / split / NAMES[number % 2]).mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
            more = {"exif": turned} if letter == "d" else {}
            image.save(root / "data" / split / NAMES[number % 2] / f"{letter}.jpg", quality=90, **more)
    return root


def files(folder: Path) -> list[Path]:
    return sorted((folder / "data" / "test").rglob("*.jpg"))


@torch.no_grad()
def logits(folder: Path, draft: bool) -> torch.Tensor:
    """By Pillow and transformers' processor, image by image."""
    model = HfViTForImageClassification.from_pretrained(folder / "model").eval()
    processor, rows = ViTImageProcessor.from_pretrained(folder / "model"), []
    for path in files(folder):
        with Image.open(path) as image:
            if draft:
                _, box = image.draft("RGB", (8, 8)) or ("", (0, 0, *image.size))
                assert image.size == DECODED[path.stem][::-1]
                image = image.resize(image.size, Image.Resampling.BILINEAR, box=box)
            turned = image.convert("RGB")
        if path.stem == "d":
            turned = turned.transpose(Image.Transpose.ROTATE_270)
        rows.append(model(**processor(turned, return_tensors="pt")).logits[0])
    return torch.stack(rows)


def test_a_scale_that_covers_both_sides() -> None:
    """Other formats stay whole, and so does a file without a side to cover."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (100, 300, 3), dtype=np.uint8))
    for kind, side, wanted in (("JPEG", 40, (150, 50)), ("JPEG", 101, (300, 100)), ("JPEG", None, (300, 100)),
                               ("PNG", 40, (300, 100))):  # fmt: skip
        content = io.BytesIO()
        noise.save(content, kind)
        image = opened(content, side)
        assert image.size == wanted
        assert np.asarray(image).shape == (*wanted[::-1], 3)


@pytest.mark.parametrize("side", [33, 97, 449, 1001, 1793])
def test_a_side_that_is_no_multiple_is_not_stretched(side: int) -> None:
    """The decoder ends with a whole pixel, of which only a part is the picture's: a ramp stays where it was."""
    content = io.BytesIO()
    ramp = np.linspace(0, 255, side).round().astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp, (side, side)).copy()).save(content, "JPEG", quality=95)
    small = opened(content, 16)
    assert small.width < side
    whole, reduced = (
        np.asarray(each.resize((16, 16), Image.Resampling.BOX), float) for each in (opened(content), small)
    )
    assert abs((whole - reduced).mean()) < 0.5  # stretched it would be 0.8 to 4.3


def test_predictions_are_of_the_smaller_images(folder: Path) -> None:
    for draft in (True, False):
        found: Any = predict(str(folder / "model"), files(folder), top=6, draft=draft)
        wanted = logits(folder, draft).softmax(-1)
        names = HfViTForImageClassification.from_pretrained(folder / "model").config.id2label
        for each, row in zip(found, wanted, strict=True):
            assert dict(each.scores) == pytest.approx({names[k]: float(p) for k, p in enumerate(row)}, abs=2e-6)
    assert (logits(folder, True) - logits(folder, False)).abs().max() > 1e-3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_accuracy_is_of_the_smaller_images(folder: Path, num_workers: int) -> None:
    given: dict[str, Any] = dict(batch_size=4, progress=False, num_workers=num_workers, draft=True)
    run = evaluate_protocol("top1", str(folder / "model"), str(folder / "data"), **given)
    names = HfViTForImageClassification.from_pretrained(folder / "model").config.id2label
    labels = torch.tensor([list(names.values()).index(path.parent.name) for path in files(folder)])
    wanted = torch.nn.functional.cross_entropy(logits(folder, True).double(), labels)
    assert run.result.loss == pytest.approx(float(wanted), abs=1e-6)
    assert run.settings["draft"] is True


def test_a_record_says_so(folder: Path) -> None:
    """And so does the card; its metadata, by which others compare, leave such a result out."""
    model, data = str(folder / "model"), str(folder / "data")
    for more, told in (
        ({"draft": True}, "JPEG files were decoded at a smaller scale"),
        ({"max_num_patches": 4}, "images were fed in their own size and shape, of 4 patches at most"),
    ):
        evaluate(model, data, progress=False, **more)
        last = json.loads((folder / "model" / "facts.json").read_text())[-1]["values"]
        assert last["fed"] == more
        assert told in last["warnings"][0]
        card = (folder / "model" / "README.md").read_text()
        assert told in card
        assert "model-index" not in card
    evaluate(model, data, progress=False)
    for less in ({}, {"draft": True}, {"num_images": 1}):  # which take no place of it, nor stand in a list
        evaluate(model, data, progress=False, **less)
        card = (folder / "model" / "README.md").read_text()
        assert "model-index" in card
        assert "were fed" not in card
        (entry,) = list_models([model]).entries
        (score,) = (score for score in entry.scores if score.metric == TOP1)
        assert f"value: {score.value}" in card
        assert f"num_images: {len(files(folder))}" in card
        assert "--draft" not in score.source


def test_embeddings_are_of_the_smaller_images_and_a_folder_stays_with_them(folder: Path, tmp_path: Path) -> None:
    model, data = str(folder / "model"), str(folder / "data")
    given: dict[str, Any] = dict(splits=["test"], predictions=True, top=6)
    embed(model, data, tmp_path / "out", draft=True, **given)
    rows = pq.read_table(next((tmp_path / "out").glob("*.parquet"))).to_pylist()
    names = HfViTForImageClassification.from_pretrained(folder / "model").config.id2label
    for row, wanted in zip(rows, logits(folder, True).softmax(-1), strict=True):
        found = dict(zip(row["labels"], row["probabilities"], strict=True))
        assert found == pytest.approx({names[k]: float(p) for k, p in enumerate(wanted)}, abs=2e-6)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]["draft_side"] == 8
    with pytest.raises(UserError):
        embed(model, data, tmp_path / "out", **given)


def test_the_commands_take_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(folder / "model"), str(folder / "data")
    for words in (
        ("predict", model, str(files(folder)[0]), "--json", "--draft"),
        ("evaluate", model, "--data", data, "--draft"),
        ("embed", model, "--data", data, "--output", str(tmp_path / "out"), "--draft"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        assert not stop.value.code, capsys.readouterr().err


def test_what_it_does_not_go_with(folder: Path, tmp_path: Path) -> None:
    model, data = str(folder / "model"), str(folder / "data")
    with pytest.raises(UserError, match="resized to one size, and not for masks or boxes; leave it out"):
        evaluate_protocol("top1", model, data, draft=True, max_num_patches=12)
    with pytest.raises(UserError, match="resized to one size; leave it out"):
        embed(model, data, tmp_path / "out", draft=True, max_num_patches=12)
    with pytest.raises(UserError, match="resized to one size; leave it out"):
        embed(model, data, tmp_path / "out", draft=True, streaming=True)
    with pytest.raises(UserError, match="a stream decodes its images as they are; leave --streaming or --draft out"):
        evaluate_protocol("top1", model, data, draft=True, streaming=True)
    own = open_subject(model)
    processor = ViTImageProcessor(do_resize=False)
    with pytest.raises(UserError, match="does not say what size its images are resized to; leave --draft out"):
        _ = open_subject((own.model, processor)).draft_side
    assert own.draft_side == 8


def test_the_side_before_a_crop(folder: Path) -> None:
    model = open_subject(str(folder / "model")).model
    processor = ViTImageProcessor(size={"shortest_edge": 11}, do_center_crop=True, crop_size={"height": 8, "width": 8})
    assert open_subject((model, processor)).draft_side == 11
