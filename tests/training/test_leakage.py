"""A model that is measured again after its data changed: nothing is tested that was trained on, or it is said."""

import json
import re
import shutil

import pytest
import yaml
from PIL import Image

from hf_vit.data import load_data
from hf_vit.results.facts import Facts
from hf_vit.training import finetune

SETTINGS = dict(steps=4, evaluations=2, batch_size=8)


@pytest.fixture
def trained(make_colours, tiny_config, tmp_path):
    """Images, and the folder of a model that was trained on them."""
    data = make_colours(tmp_path / "colours", count=20)
    finetune(tiny_config(), str(data), tmp_path / "model", **SETTINGS)
    return data, tmp_path / "model"


def rows(folder):
    """The card's table of results."""
    return re.findall(r"^\| (colours.*?) \| (\w+) \| (\d+) ", (folder / "README.md").read_text(), flags=re.MULTILINE)


def indexed(folder):
    """Splits in the card's metadata, with their accuracy."""
    metadata = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    results = metadata["model-index"][0]["results"]
    return [(result["dataset"]["split"], result["metrics"][0]["value"]) for result in results]


@pytest.mark.parametrize(
    ("kind", "model"), [("folders", "Ti/4"), ("list", "R+Ti/16"), ("folders", "AxialResNet-S"), ("streaming", "Ti/16")]
)
def test_bad_images_are_the_same_for_every_command(kind, model, make_colours, command, tmp_path):
    """Images below a patch and torn ones in every split: nothing has changed, and the card keeps one row of results."""
    data, images = tmp_path / "colours", make_colours(tmp_path / "all", 11)
    for number, (split, first, last) in enumerate((("train", 0, 6), ("validation", 6, 8), ("test", 8, 11))):
        for name in ("blue", "green", "red"):
            (data / split / name).mkdir(parents=True)
            for index in range(first, last):
                with Image.open(images / name / f"{index:02d}.png") as image:
                    image.resize((40, 40)).save(data / split / name / f"{index:02d}.png")
        Image.new("RGB", (3, 12), (99 * number, 0, 0)).save(data / split / "red" / "narrow.png")
        torn = data / split / "red" / f"{first:02d}.png"
        torn.write_bytes(torn.read_bytes()[:-40])
    files = sorted(data.rglob("*.png"))
    if kind == "list":
        entries = [dict(file_name=str(file), label=file.parent.name, split=file.parts[-3]) for file in files]
        data = tmp_path / "colours.jsonl"
        data.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    given = ["--data", data, "--skip-bad-images", *(["--streaming"] if kind == "streaming" else [])]
    quick = ["--image-size", "32", "--steps", "1", "--evaluations", "1", "--batch-size", "4", "--precision", "fp32"]
    code, out, err = command("finetune", "--model", model, "--output", tmp_path / "out", *given, *quick)
    assert code == 0, err
    assert kind == "streaming" or "left out 4 unreadable images" in out, "the narrow ones are judged"
    code, _, err = command("evaluate", tmp_path / "out", *given)
    assert (code, re.findall("warning.*", err)) == (0, [])
    first, second = Facts.load(tmp_path / "out").of_kind("evaluation")
    assert (first.data, first.values["top1"]) == (second.data, second.values["top1"])
    assert [(split, size) for _, split, size in rows(tmp_path / "out")] == [("test", "9")]


def test_images_that_are_added_make_no_training_image_a_test_image(trained, command):
    data, folder = trained
    before, table = load_data(str(data)), Facts.load(folder).of_kind("evaluation")[0]
    for name in ("blue", "green", "red"):
        (data / name / "00.png").write_bytes((data / name / "00.png").read_bytes())
        shutil.copy(data / name / "01.png", data / name / "zz.png")  # a copy of what is there already
        (data / name / "new.bmp").write_bytes(new_bitmap(name))
    code, _, err = command("evaluate", folder, "--data", data)
    assert code == 0
    assert re.search(r"warning: colours has changed since the training \(fingerprint \w{16}, then \w{16}\)\n", err)
    assert "were trained on" not in err
    after = load_data(str(data))
    trained_on = {image.digest for image in before.seen["train"]}
    assert not trained_on & {image.digest for image in after.seen["test"]}
    # The honest row stays, the metadata is its.
    first, second = rows(folder)
    assert first == (f"colours ({before.fingerprint})", "test", str(before.num_examples("test")))
    assert second == (f"colours ({after.fingerprint})", "test", str(after.num_examples("test")))
    assert indexed(folder) == [("test", round(table.values["top1"], 4))]
    assert "has changed since the training" in (folder / "README.md").read_text()


def new_bitmap(name):
    """A picture that no other is."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (12, 12), name).save(buffer, "BMP")
    return buffer.getvalue()


def test_training_images_in_a_test_folder_are_told(trained, command, tmp_path):
    data, folder = trained
    source = load_data(str(data))
    holdout = tmp_path / "holdout" / "test"
    for image in [*source.seen["train"][:5], *source.seen["test"]]:
        name = image.name.split("/")[-2]
        (holdout / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(image.name, holdout / name)
    metadata = indexed(folder)
    code, _, err = command("evaluate", folder, "--data", tmp_path / "holdout")
    total = 5 + source.num_examples("test")
    assert code == 0
    assert f"warning: 5 of the {total} images were trained on: the result says little of new images\n" in err
    record = Facts.load(folder).records[-1]
    assert record.values["trained_images"] == 5
    assert f"5 of the {total} images were trained on" in (folder / "README.md").read_text()
    assert indexed(folder) == metadata, "no number for others to compare by"


def test_what_a_base_or_an_ingredient_learnt_from_is_told_of_its_heirs(trained, make_colours, command, tmp_path):
    data, folder = trained
    heir, soup = tmp_path / "heir", tmp_path / "soup"
    others = make_colours(tmp_path / "others", colours={"blue": (0, 0, 9), "green": (0, 9, 0), "red": (9, 0, 0)})
    finetune(str(folder), str(others), heir, **SETTINGS)
    assert command("soup", folder, heir, "--output", soup)[0] == 0
    count = load_data(str(data)).num_examples("train")
    for model in (heir, soup):
        _, _, err = command("evaluate", model, "--data", data, "--split", "train")
        assert f"warning: {count} of the {count} images were trained on" in err


def test_results_of_training_images_stay_out_of_the_card(trained, command):
    data, folder = trained
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".png", ".md")}
    code, out, err = command("evaluate", folder, "--data", data, "--split", "train")
    assert code == 0
    assert "images were trained on" in err
    assert "pictures none (--output DIR draws them)" in out
    assert Facts.load(folder).records[-1].data.split == "train"
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert command("evaluate", folder, "--data", data, "--split", "train", "--protocol", "calibration")[0] == 0
    assert {name: (folder / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_of_an_evaluation_is_not_that_of_the_splits(trained, command, seed):
    data, folder = trained
    code, _, err = command("evaluate", folder, "--data", data, "--seed", seed)
    assert (code, "warning" in err) == (0, False)
    first, last = Facts.load(folder).of_kind("evaluation")
    assert (first.values["top1"], first.data.fingerprint) == (last.values["top1"], last.data.fingerprint)


def test_the_hashes_of_training_images_stay_at_home(trained):
    from hf_vit.hub.contents import collect

    data, folder = trained
    kept = (folder / "training_images.txt").read_text().split()
    assert sorted(image.digest[:16] for image in load_data(str(data)).seen["train"]) == kept
    scratch = folder.parent / "scratch"
    scratch.mkdir()
    assert "training_images.txt" in collect(folder, "me/model", scratch=scratch, license="mit").left_out


def test_a_run_that_was_split_otherwise_is_not_gone_on_with(make_colours, tiny_config, tmp_path):
    """As version 0.1 began it: its test images would now be trained on."""
    import json

    from hf_vit import UserError
    from hf_vit.training import FinetuneOptions, HfViTTrainer

    data = make_colours(tmp_path / "colours", count=10)
    step = HfViTTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HfViTTrainer, "training_step", stop)
        with pytest.raises(KeyboardInterrupt):
            finetune(tiny_config(), str(data), tmp_path / "out", **SETTINGS)
    run = tmp_path / "out" / "checkpoints" / "run.json"
    settings = json.loads(run.read_text())
    assert settings.pop("splits") == "validation and test cut by content"
    run.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"splits was \(not set\), now validation and test cut by content; give"):
        finetune(tiny_config(), str(data), tmp_path / "out", options=FinetuneOptions(resume=True), **SETTINGS)
