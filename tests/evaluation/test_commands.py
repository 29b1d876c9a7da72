"""`hf-vit evaluate` and `hf-vit predict`, as a user meets them."""

import itertools
import json
import os
import re
import shutil
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from data.conftest import write_idx
from evaluation.tiny import NAMES, logits_of, make_animals, make_classifier, make_images, save_ours
from PIL import Image
from transformers import pipeline

from hf_vit import HfViTConfig, UserError
from hf_vit.data import load_data
from hf_vit.evaluation import evaluate, evaluate_protocol, plot_wrong_images, predict
from hf_vit.evaluation.protocols import registry
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, find_recipe
from hf_vit.training.run import Job, open_start


@pytest.fixture
def class_folders(tmp_path):
    return make_animals(tmp_path / "animals", 4)


def test_evaluate_prints_records_draws_and_writes_the_card(succeeds, save_classifier, class_folders, tmp_path):
    """Its record is its values and the speed: no protocol, nothing told twice in the card."""
    folder = save_classifier()
    given = ("evaluate", folder, "--data", class_folders, "--batch-size", 3, "--device", "cpu")
    out = succeeds(*given)
    (record,) = Facts.load(folder).records
    assert record.kind == "evaluation"
    assert record.command == "hf-vit evaluate model --data animals --batch-size 3 --device cpu"
    assert record.data is not None
    assert (record.data.name, record.data.split, record.data.size) == ("animals", "test", 8)
    assert record.data.fingerprint
    assert f"{record.values['top1']:.2%}" in out
    assert "8 images" in out
    assert set(record.values["per_class"]) == {"ant", "fox"}
    for name in record.values["pictures"]:
        with Image.open(folder / str(name)) as picture:
            assert picture.format == "PNG"
    card = (folder / "README.md").read_text()
    assert f"{record.values['top1']:.2%}" in card
    assert "confusion_matrix.png" in card
    assert str(class_folders.parent) not in card + (folder / "facts.json").read_text()
    out = succeeds(*given, "--num-images", 7, "--output", tmp_path / "out")
    assert out.startswith("animals, split test, 7 images\n")
    document, few = json.loads((tmp_path / "out" / "top1.json").read_text()), Facts.load(folder).records[1]
    of_classes = {"precision", "recall", "f1", "auc", "thresholds", "num_classes", "per_class"}
    assert set(few.values) == {"top1", "top5", "loss", "ece", "images_per_second", *of_classes}
    assert document["values"] | {"images_per_second": few.values["images_per_second"]} == few.values
    assert few.data.size == document["data"]["size"] == 7
    assert "## Further measurements" not in (folder / "README.md").read_text()


def test_streams_other_splits_and_folders(command, save_classifier, class_folders, tmp_path):
    """All as transformers' pipeline answers; a card written by hand stays."""
    folder, pictures = save_classifier(), tmp_path / "new" / "pictures"
    (folder / "README.md").write_text("my own words")
    given = ("evaluate", folder, "--data", class_folders, "--device", "cpu")
    for more in ([], ["--streaming"], ["--output", pictures, "--split", "train"]):
        before = (folder / "confusion_matrix.png").is_file()
        assert command(*given, *more)[0] == 0
        assert (folder / "confusion_matrix.png").is_file() or not before
    table, stream, elsewhere = Facts.load(folder).records
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    files = sorted((class_folders / "test").glob("*/*.png"))
    assert table.values["top1"] == sum(classify(str(file))[0]["label"] == file.parent.name for file in files) / 8
    # A stream comes in another order, whose sum rounds differently in float64's last place.
    assert table.values["loss"] == pytest.approx(stream.values["loss"], rel=1e-14)
    assert ["--streaming" in record.command for record in (table, stream)] == [False, True]
    assert (pictures / "confusion_matrix.png").is_file()
    assert "pictures" not in elsewhere.values
    assert elsewhere.data is not None
    assert elsewhere.data.split == "train"
    assert (folder / "README.md").read_text() == "my own words"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_pictures_of_others_are_left_alone(elsewhere, command, save_classifier, class_folders, tmp_path, caplog):
    """Those that an evaluation has drawn are replaced, and removed where there is none any more."""
    folder = save_classifier()
    place = tmp_path if elsewhere else folder
    given = ["evaluate", folder, "--data", class_folders, *(["--output", place] if elsewhere else [])]
    own = [place / "confusion_matrix.png", place / "wrong_images.png"]
    for path in own:
        path.write_bytes(b"mine")
    assert command(*given)[0] == command(*given)[0] == 0
    assert [path.read_bytes() for path in own] == [b"mine"] * 2
    assert [str(path) in caplog.text for path in own] == [True] * 2
    assert not Facts.load(folder).records[0].values.get("pictures")
    for path in own:
        path.unlink()
    assert command(*given)[0] == 0
    drawn = own[0].read_bytes()
    own[0].write_bytes(b"")
    assert command(*given)[0] == 0
    assert own[0].read_bytes() == drawn


def test_evaluate_refuses_in_one_line(succeeds, fails, save_classifier, class_folders, tmp_path):
    folder, birds = save_classifier(), save_classifier("birds", ("ant", "owl"))
    (tmp_path / "out").mkdir()
    for model, data, more, needed in (
        (tmp_path / "none", class_folders, [], ["none"]),
        (folder, tmp_path / "none", [], ["none"]),
        (folder, class_folders, ["--split", "holdout"], ["holdout", "train"]),
        (birds, class_folders, [], ["'fox'", "'owl'"]),
        (folder, class_folders, ["--device", "abacus"], ["abacus"]),
    ):
        fails(("evaluate", model, "--data", data, *more), *needed)
    for content in ("mine", "[]", "{}"):
        (tmp_path / "out" / "top1.json").write_text(content)
        fails(("evaluate", folder, "--data", class_folders, "--output", tmp_path / "out"), "move it, or choose another")
        assert (tmp_path / "out" / "top1.json").read_text() == content
    (class_folders / "test" / "ant" / "2.png").write_bytes(b"not an image")
    fails(("evaluate", folder, "--data", class_folders), "2.png")
    assert not (folder / "facts.json").exists()
    out = succeeds("evaluate", folder, "--data", class_folders, "--skip-bad-images")
    assert "7 images" in out
    assert "left out" in out


def test_what_was_measured_is_told_where_it_cannot_be_kept(
    fails, save_classifier, class_folders, monkeypatch, tmp_path
):
    """Another model takes the folder while the first is measured: it gets no record of the first."""
    folder, evaluated = save_classifier(), registry.evaluate_protocol

    def act_meanwhile(act):
        def measure(*arguments, **options):
            done = evaluated(*arguments, **options)
            act()
            return done

        monkeypatch.setattr(registry, "evaluate_protocol", measure)

    act_meanwhile(lambda: make_classifier(seed=1).save_pretrained(folder))
    before = sorted(folder.iterdir())
    words = ("evaluate", folder, "--data", class_folders)
    fails(words, "was replaced during the measurement", "(the results are: top-1 accuracy ")
    assert sorted(folder.iterdir()) == before
    act_meanwhile((tmp_path / "out").touch)
    fails((*words, "--output", tmp_path / "out"), "File exists", "(the results are: top-1 accuracy ")


def test_a_read_only_model_is_told_before_it_is_measured(fails, save_classifier, class_folders, monkeypatch, tmp_path):
    """And measured with an output of its own."""
    folder = save_classifier()
    before = sorted(folder.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)  # rights do not bind root
    with monkeypatch.context() as context:
        context.setattr(registry, "evaluate_protocol", None)
        fails(("evaluate", folder, "--data", class_folders), "is read-only", "add --output DIR")
    evaluate(folder, class_folders, output=tmp_path / "out")
    assert (tmp_path / "out" / "top1.json").is_file()
    assert sorted(folder.iterdir()) == before
    (graph := tmp_path / "exported").mkdir()  # whose evaluation writes nothing into it
    (graph / "model.onnx").write_bytes(b"no graph")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    fails(("evaluate", graph, "--data", class_folders), "model.onnx")


def test_nothing_is_written_among_the_images(fails, save_classifier, class_folders):
    folder, before = save_classifier(), sorted(class_folders.rglob("*"))
    given = ("--data", class_folders, "--output")
    for output in (class_folders, class_folders / "out", class_folders / "test" / ".." / "out"):
        for name in ("evaluate", "embed", "compare", "finetune", "pretrain"):
            fails((name, folder, *given, output), "in the folder of the data", "choose one outside that folder")
        for name in ("soup", "diff"):
            fails((name, folder, folder, *given, output), "in the folder of the data")
        for name in ("analyze", "page"):
            fails((name, folder, "--images", class_folders, "--output", output), "in the folder of the data")
        fails(("data", class_folders, "--output", output), "in the folder of the data")
    assert sorted(class_folders.rglob("*")) == before
    (loop := folder.parent / "loop").symlink_to(loop)
    fails(("embed", folder, "--data", loop, "--output", folder.parent / "out"), str(loop))


def _probabilities(images):
    return logits_of(make_classifier(), images).softmax(-1)


def test_predict_answers_as_the_model(succeeds, save_classifier, tmp_path):
    """A folder, a list of files, JSON and a table; whatever the mode of the image."""
    model, folder = save_classifier(), tmp_path / "pictures"
    folder.mkdir()
    files = [folder / name for name in ("a.JPG", "b.png", "ç\N{DOG}.png")]
    for image, file in zip(make_images(3), files, strict=True):
        image.save(file)
    (folder / "notes.txt").write_text("no image")
    images = [Image.open(file).convert("RGB") for file in files]
    out = succeeds("predict", model, folder, "--json", "--top", 2, "--batch-size", 2, "--device", "cpu")
    assert out.isascii(), "JSON in any encoding of the output"
    for found, file, row in zip(json.loads(out), files, _probabilities(images), strict=True):
        assert found["image"] == str(file)
        best = row.topk(2)
        assert [entry["label"] for entry in found["predictions"]] == [NAMES[i] for i in best.indices]
        assert [entry["score"] for entry in found["predictions"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    out = succeeds("predict", model, files[0], "--top", 99, "--device", "cpu")
    for name, probability in zip(NAMES, _probabilities(images[:1])[0].tolist(), strict=True):
        assert name in out
        assert f"{probability:.2%}" in out
    expected = [answer.scores for answer in predict(model, folder, device="cpu")]
    for given in (iter(files), images):  # of paths, and of open images
        answers = predict(model, given, device="cpu")
        assert [answer.scores for answer in answers] == expected
    assert [answer.image for answer in answers] == ["image 1", "image 2", "image 3"]
    assert predict(model, images[0], device="cpu")[0].image == "image 1"
    for value in (np.asarray(images[0]), 3.5):
        with pytest.raises(UserError, match=f"an image is a {type(value).__name__}; give a file or a Pillow image"):
            predict(model, [value], device="cpu")
    with pytest.raises(UserError, match="an image is a float"):
        predict(model, 3.5, device="cpu")
    modes = [("I;16", 65535), ("RGB", (255, 255, 255)), ("RGBA", (0, 0, 0, 0))]
    for mode, color in modes:
        Image.new(mode, (9, 9), color).save(tmp_path / f"{mode[0]}{len(mode)}.png")
    out = succeeds("predict", model, *(tmp_path / f"{mode[0]}{len(mode)}.png" for mode, _ in modes), "--json")
    deep, white, clear = (found["predictions"] for found in json.loads(out))
    assert deep == white == clear


def test_predict_takes_class_folders_and_idx_files_as_the_images_in_them(succeeds, save_classifier, tmp_path, caplog):
    pixels = np.random.RandomState(0).randint(0, 256, (5, 9, 7)).astype(np.uint8)
    write_idx(tmp_path / "mnist" / "t10k-images-idx3-ubyte", pixels)
    for row, image in enumerate(pixels):
        (tmp_path / "folders" / str(row % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "folders" / str(row % 2) / f"{row}.png")
    model, answers = save_classifier(), {}
    for name in ("folders", "mnist", "mnist/t10k-images-idx3-ubyte", "mnist/t10k*"):
        out = succeeds("predict", model, tmp_path / name, "--json", "--device", "cpu")
        answers[name] = {re.search(r"(\d)(.png)?$", row["image"])[1]: row["predictions"] for row in json.loads(out)}
    assert caplog.text.count("the 5 in the folders below it are used") == 1
    assert set(answers["folders"]) == set("01234")
    assert all(answer == answers["folders"] for answer in answers.values())
    assert "ignored the folders" not in caplog.text
    Image.fromarray(pixels[0]).save(tmp_path / "folders" / "5.png")
    out = succeeds("predict", model, tmp_path / "folders", "--json", "--device", "cpu")
    assert [Path(row["image"]).name for row in json.loads(out)] == ["5.png"]
    assert "ignored the folders in 'folders', such as '0', as it has images itself" in caplog.text


def test_photographs_are_prepared_a_few_at_a_time(save_classifier, tmp_path, monkeypatch):
    """A batch of 12 gives what single images give, with at most 5 decoded photographs in memory."""
    for number in range(12):
        Image.new("RGB", (2500, 1800), (20 * number, 255 - 20 * number, 90)).save(tmp_path / f"{number:02d}.jpg")
    one, alive, most = predict(save_classifier(), tmp_path, batch_size=1), weakref.WeakValueDictionary(), []
    read = Image.open

    def count(*given):
        image = read(*given)
        alive[len(most)] = image
        most.append(len(alive))
        return image

    monkeypatch.setattr(Image, "open", count)
    many = predict(save_classifier(), tmp_path, batch_size=12)
    assert len(most) == 12
    assert max(most) <= 5
    for single, batched in zip(one, many, strict=True):
        assert single.image == batched.image
        assert dict(single.scores) == pytest.approx(dict(batched.scores), rel=1e-5)


def test_predict_refuses_in_one_line_or_leaves_bad_images_out(command, fails, save_classifier, tmp_path, monkeypatch):
    model, (image,), good = save_classifier(), make_images(1, side=40), tmp_path / "good.png"
    image.save(good)
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:500])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    bad, address = [tmp_path / name for name in ("cut.png", "text.png", "missing.png")], "https://example.com/cat.png"
    for path in (*bad, tmp_path / "empty"):
        for extra in ([], ["--json"]):
            err = fails(("predict", model, good, path, "--batch-size", 1, *extra), path.name)
            assert ("convert or replace it" in err) == (path in bad[:2])
    code, out, err = command("predict", model, bad[0], good, *bad[1:], "--json", "--skip-bad-images", "--batch-size", 1)
    assert code == 0
    assert [found["image"] for found in json.loads(out)] == [str(good)]
    for line, path in zip(err.splitlines(), bad, strict=True):
        assert line.startswith("skipped: ")
        assert path.name in line
    fails(("predict", model, address), f"{address} has an unknown scheme; give")
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in command("predict", model, good)[1], "whole names, wherever the table goes"
    fails(("predict", model, good, "--output", tmp_path / "t.xlsx"), "ends in .csv or .parquet")
    fails(("predict", model, good, "--output", tmp_path / "t.csv", "--json"), "leave one of them out")
    pattern = tmp_path / "*.jpg"
    fails(("predict", model, pattern, "--output", tmp_path / "t.csv"), f"no image matches {pattern}")
    fails(("predict", tmp_path / "no model", pattern), f"no image matches {pattern}")  # before the model is loaded
    assert not list(tmp_path.glob("*t.csv*"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    fails(("predict", model, good), "good.png is too large", "resize the image")


@pytest.mark.parametrize(("ending", "read"), [(".csv", pandas.read_csv), (".parquet", pandas.read_parquet)])
def test_predict_writes_a_table_of_many_images(command, save_classifier, tmp_path, ending, read):
    (tmp_path / "photos/more").mkdir(parents=True)
    images, places = make_images(3), ("photos/a.png", "photos/c.png", "photos/more/d.png")
    for name, image in zip(places, images, strict=True):
        image.save(tmp_path / name)
    (tmp_path / "photos/b.png").write_text("hello")
    (tmp_path / "photos/b.txt").write_text("no image")
    model, table = save_classifier(), tmp_path / f"table{ending}"
    asked = (model, tmp_path / "photos/**/*.*", "--output", table, "--top", 2)
    code, _, err = command("predict", *asked, "--batch-size", 3)
    lines = err.splitlines()
    assert code == 1, "the table has a hole"
    assert lines[0].startswith("skipped: ")
    assert "b.png" in lines[0]
    assert "--skip-bad-images" in lines[1]
    rows = read(table)
    assert list(rows) == ["image", "label", "score", "label_2", "score_2", "problem"]
    assert [Path(name).relative_to(tmp_path).as_posix() for name in rows["image"]] == [
        "photos/a.png", "photos/b.png", "photos/c.png", "photos/more/d.png",
    ]  # fmt: skip
    assert rows["problem"].notna().tolist() == [False, True, False, False]
    for (_, row), probabilities in zip(rows[rows["problem"].isna()].iterrows(), _probabilities(images), strict=True):
        best = probabilities.topk(2)
        assert [row["label"], row["label_2"]] == [NAMES[i] for i in best.indices]
        assert [row["score"], row["score_2"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    assert command("predict", *asked, "--skip-bad-images")[0] == 0


def test_predict_takes_a_model_of_timm(succeeds, tmp_path):
    """With its own preparation and names of classes; the words where it knows words."""
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model("test_efficientnet", num_classes=3).eval()
    config = {"label_names": ["n1", "n2", "n3"], "label_descriptions": {"n1": "ant", "n2": "bee", "n3": "cow"}}
    fed = {"input_size": (3, 16, 16), "crop_pct": 1.0, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    save_for_hf(model, tmp_path / "timm", model_config=config, data_config=fed, safe_serialization=True)
    (image,) = make_images(1, side=16)
    image.save(tmp_path / "a.png")
    out = succeeds("predict", tmp_path / "timm", tmp_path / "a.png", "--json", "--device", "cpu")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        expected = dict(zip(("ant", "bee", "cow"), model(pixels).softmax(-1)[0].tolist(), strict=True))
    found = {entry["label"]: entry["score"] for entry in json.loads(out)[0]["predictions"]}
    assert found == pytest.approx(expected, abs=1e-5)
    for split, name in itertools.product(("train", "validation", "test"), expected):
        (tmp_path / "data" / split / name).mkdir(parents=True)
        image.save(tmp_path / "data" / split / name / "a.png")
    options = ("--predictions", "--split", "test", "--device", "cpu", "--output", tmp_path / "out")
    succeeds("embed", tmp_path / "timm", "--data", tmp_path / "data", *options)
    rows = pandas.read_parquet(next((tmp_path / "out").glob("*.parquet")))
    assert set(rows["label"]) == {name for names in rows["labels"] for name in names} == set(expected)


def test_a_multi_label_model_is_warned_of(class_folders, tmp_path):
    """Its answers to an image need not sum to 1, which the loss of one class an image takes for granted."""
    folder = tmp_path / "model"
    model = save_ours(folder)
    assert "warnings" not in evaluate(folder, class_folders, progress=False).record.values
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(folder)
    (told,) = evaluate(folder, class_folders, progress=False).record.values["warnings"]
    assert told.startswith("this is a multi-label model, but loss, calibration error")
    assert told in (folder / "README.md").read_text()


def test_mistakes_carry_the_names_of_their_files(save_classifier, class_folders):
    """Every mistake is named after the file that shows it, also where a few images were drawn."""
    for few in (None, 9):
        run = evaluate_protocol("top1", str(save_classifier()), str(class_folders), num_images=few, progress=False)
        wrong = run.result.wrong
        assert wrong
        names = {path.name for path in (class_folders / "test").glob("*/*.png")}
        for entry in wrong:
            assert entry.file in names
            with Image.open(class_folders / "test" / entry.label / entry.file) as image:
                shown = image.convert("RGB")
            shown.thumbnail((160, 160))
            assert np.array_equal(np.asarray(shown), np.asarray(entry.thumbnail))
        titles = [axes.get_title() for axes in plot_wrong_images(wrong).axes]
        assert all(entry.file in title for entry, title in zip(wrong, titles, strict=True))


@pytest.fixture
def told(tmp_path, succeeds):
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

    return partial(succeeds, "data", root)


def test_it_tells_what_is_there(told, tmp_path):
    out = told("--output", tmp_path / "look")
    numbers = {name: [int(n) for n in re.findall(r"\d+", line)] for name in ("cat", "dog", "all")
               for line in out.splitlines() if f" {name} " in line[:8]}  # fmt: skip
    assert sum(numbers["cat"]) == 31
    assert sum(numbers["dog"]) == 9
    assert [a + b for a, b in zip(numbers["cat"], numbers["dog"], strict=True)] == numbers["all"]
    assert "sizes: 12x12 to 20x16 px (height x width), median 12x12" in out
    assert "note: 1 duplicate image in one split: cat/3.png = cat/again.png" in out
    assert "note: class 'cat' has 31 images and class 'dog' only 9" in out
    assert "unreadable: 1 image (dog/torn.png); other commands need --skip-bad-images" in out
    assert "unreadable: 1 image (dog/torn.png)\n" in told("--skip-bad-images")
    assert "were split off the 40 training images (by content" in out
    with Image.open(tmp_path / "look" / "contact_sheet.png") as sheet:
        assert sheet.height == 2 * (96 + 16)
        assert len(np.unique(np.asarray(sheet).reshape(-1, 3), axis=0)) > 100
    assert "modes: RGB 39, I;16 1 (of 40 images inspected)" in out
    assert "the 16-bit images look dark (6% brightness): their highest value is 4,095 of 65,535" in out
    assert "contact_sheet" not in told()


def test_the_median_of_photographs_held_upright_and_not_is_the_more_frequent(succeeds, tmp_path):
    for number, split in enumerate(("train", "validation", "test")):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            size = (6, 8) if (split, name) == ("validation", "dog") else (8, 6)
            make_images(6)[number].resize(size).save(tmp_path / "pets" / split / name / "0.png")
    assert "sizes: 6x8 to 8x6 px (height x width), median 6x8" in succeeds("data", tmp_path / "pets")


def test_a_built_in_name_is_not_the_folder_of_that_name(succeeds, tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    out = succeeds("data", "digits", "--output", "digits/look")
    assert "digits: 1,797 images" in out
    assert "note: 'digits' is built in; for the folder give ./digits\n" in out


def test_finetune_repeats_the_notes(told, tmp_path):
    """Whatever `data` notes, dark scans and uneven classes among it, is said before a training."""
    notes = re.findall(r"^note: (.*)$", told(), re.MULTILINE)
    said = []
    config, options = HfViTConfig(image_size=12, patch_size=4), FinetuneOptions(skip_bad_images=True)
    open_start(Job(config, str(tmp_path / "pets"), tmp_path, find_recipe("default-small"), options), said.append)
    assert len(notes) == 4
    assert said[:4] == [f"note: {note}" for note in notes]


@pytest.mark.parametrize(("target", "unit"), [("mask", "pixels"), ("objects", "objects")])
def test_masks_and_objects_are_counted_and_drawn(tmp_path, succeeds, target, unit):
    name = "scenes:images=12,size=32"
    out = succeeds("data", name, "--target", target, "--output", tmp_path / "look")
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
