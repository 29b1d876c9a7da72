"""`hf-vit data`: what it says of a folder is what lies there."""

import re
import shutil
from collections import Counter

import numpy as np
import pytest
from evaluation.tiny import make_images
from PIL import Image

from hf_vit import HfViTConfig
from hf_vit.data import load_data
from hf_vit.training import FinetuneOptions, find_recipe
from hf_vit.training.run import Job, open_start
from hf_vit_cli.main import main


@pytest.fixture
def told(tmp_path, capsys):
    """30 cats of 12x12 px and 8 dogs of 20x16 px; one copied, one damaged, one of 12 bits in 16."""
    images = iter(make_images(40))
    root = tmp_path / "pets"
    for name, count in (("cat", 30), ("dog", 8)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = next(images)
            (image if name == "cat" else image.resize((16, 20))).save(root / name / f"{number}.png")
    shutil.copy(root / "cat" / "3.png", root / "cat" / "again.png")
    (root / "dog" / "torn.png").write_bytes((root / "dog" / "0.png").read_bytes()[:60])
    Image.fromarray(np.full((12, 12), 4095, np.uint16)).save(root / "dog" / "scan.png")

    def run(*options):
        with pytest.raises(SystemExit) as ended:
            main(["data", str(root), *map(str, options)])
        assert not ended.value.code
        return capsys.readouterr().out

    return run


def test_it_tells_what_is_there(told, tmp_path):
    out = told("--output", tmp_path / "look")
    numbers = {name: [int(n) for n in re.findall(r"\d+", line)] for name in ("cat", "dog", "all")
               for line in out.splitlines() if f" {name} " in line[:8]}  # fmt: skip
    assert sum(numbers["cat"]) == 31
    assert sum(numbers["dog"]) == 9
    assert [a + b for a, b in zip(numbers["cat"], numbers["dog"], strict=True)] == numbers["all"]
    assert "sizes: 12x12 to 20x16 px (height x width), the middle one 12x12" in out
    assert "note: 1 image is there more than once: cat/3.png = cat/again.png" in out
    assert "note: class 'cat' has 31 images and 'dog' 9" in out
    assert "unreadable: 1 images (dog/torn.png); other commands need --skip-bad-images" in out
    assert "unreadable: 1 images (dog/torn.png)\n" in told("--skip-bad-images")
    assert "were cut from the 40 training images (by content" in out
    with Image.open(tmp_path / "look" / "contact_sheet.png") as sheet:
        assert sheet.height == 2 * (96 + 16)
        assert len(np.unique(np.asarray(sheet).reshape(-1, 3), axis=0)) > 100


def test_dark_scans_are_told(told):
    out = told()
    assert "kinds: RGB 39, I;16 1 of those looked into" in out
    assert "images of 16 bits reach 4,095 of 65,535, so they are seen in 6% of the brightness" in out
    assert "contact_sheet" not in out


def test_finetune_repeats_the_notes(told, tmp_path):
    """Whatever `data` notes, dark scans and uneven classes among it, is said before a training."""
    notes = re.findall(r"^note: (.*)$", told(), re.MULTILINE)
    said = []
    config, options = HfViTConfig(image_size=12, patch_size=4), FinetuneOptions(skip_bad_images=True)
    open_start(Job(config, str(tmp_path / "pets"), tmp_path, find_recipe("default-small"), options), said.append)
    assert len(notes) == 4
    assert said[:4] == [f"note: {note}" for note in notes]


@pytest.mark.parametrize(("target", "unit"), [("mask", "pixels"), ("objects", "objects")])
def test_masks_and_objects_are_counted_and_drawn(tmp_path, capsys, target, unit):
    name = "scenes:images=12,size=32"
    with pytest.raises(SystemExit) as ended:
        main(["data", name, "--target", target, "--output", str(tmp_path / "look")])
    assert not ended.value.code
    out = capsys.readouterr().out
    data = load_data(name, target=target)
    for split, column in (("train", 0), ("test", 2)):
        counts = Counter()
        for row in data.splits[split]:
            values = np.array(row["mask"]).ravel().tolist() if target == "mask" else row["objects"]["category"]
            counts.update(data.label_names[value] for value in values)
        for label, count in counts.items():
            line = next(line for line in out.splitlines() if f" {label} " in line[:14])
            assert int(re.findall(r"[\d,]+", line)[column].replace(",", "")) == count
        total = next(line for line in out.splitlines() if f" all {unit} " in line)
        assert int(re.findall(r"[\d,]+", total)[column].replace(",", "")) == sum(counts.values())
    with Image.open(tmp_path / "look" / "contact_sheet.png") as sheet:
        assert sheet.size == (8 * 192, 3 * 192 + 16)
        pixels = np.asarray(sheet)
    plain, drawn = pixels[:188, :188].astype(int), pixels[:188, 192 : 192 + 188].astype(int)
    assert (plain != drawn).any(-1).mean() > 0.03
    if target == "objects":  # outside of the boxes nothing is drawn
        left, top, width, height = np.array(data.splits["train"][0]["objects"]["bbox"]).T * 188 / 32
        rows, columns = np.mgrid[:188, :188]
        outside = np.ones((188, 188), bool)
        for x, y, w, h in zip(left, top, width, height, strict=True):
            outside &= (columns < x - 3) | (columns > x + w + 3) | (rows < y - 3) | (rows > y + h + 3)
        assert (plain == drawn)[outside].all()
