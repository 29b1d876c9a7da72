"""`evaluate_protocol` and `hf-vit evaluate --protocol`, from what is typed to the files, the facts and the card."""

import json

import pytest
from evaluation.tiny import make_classifier, make_dataset, make_images, make_processor
from PIL import Image

from hf_vit.data import ImageData
from hf_vit.evaluation import PROTOCOLS, evaluate_protocol
from hf_vit.hub.card import render_card
from hf_vit.results.facts import Facts, append_record, new_record
from hf_vit_cli.main import main

# Options that keep a protocol quick, as they are typed.
QUICK = {
    "top1": [],
    "few-shot": ["--shots", 10, "--shots", 2, "--trials", 1],
    "linear-probe": [],
    "knn": ["--neighbors", 1, "--neighbors", 3],
    "calibration": [],
    "robustness": ["--epsilons", 1, "--epsilons", 8, "--steps", 2],
    "corruptions": ["--kinds", "contrast"],
    "patch-drop": ["--patch-size", 2, "--fill", "black"],
    "multi-label": [],
    "real": [],
    "objectnet": [],
    "vtab": [],
    "segmentation": [],
    "detection": [],
}
# Those with data of their own: tests/training/test_multi_label.py and test_dense.py, test_imagenet_labels.py,
# test_vtab.py.
assert set(QUICK) == set(PROTOCOLS)
OTHERS = ("top1", "multi-label", "real", "objectnet", "vtab", "segmentation", "detection")
OF_ONE_CLASS = [name for name in PROTOCOLS if name not in OTHERS]


@pytest.fixture
def run(capfd):
    """Run `hf-vit evaluate`: exit code, standard output, standard error."""

    def run(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(["evaluate", *(str(argument) for argument in arguments), "--device", "cpu"])
        shown = capfd.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """train (ten images a class), validation and test (six), of two of the model's classes."""
    root = tmp_path_factory.mktemp("data") / "animals"
    images = iter(make_images(3 * 2 * 10, side=10))
    for split in ("train", "validation", "test"):
        for name in ("fox", "ant"):
            (root / split / name).mkdir(parents=True)
            for index in range(10 if split == "train" else 6):
                next(images).save(root / split / name / f"{index}.png")
    return root


@pytest.mark.parametrize("protocol", OF_ONE_CLASS)
def test_files_facts_and_card(run, save_classifier, animals, tmp_path, protocol):
    folder, name = save_classifier(), protocol.replace("-", "_")
    typed = [folder, "--data", animals, "--protocol", protocol, *QUICK[protocol]]
    code, out, err = run(*typed, "--output", tmp_path / "out")
    assert code == 0, err
    assert "12 images" in out
    document = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert (document["format"], document["protocol"], document["seed"]) == (1, protocol, 0)
    assert document["data"].pop("fingerprint")
    assert document["data"] == {"name": "animals", "split": "test", "size": 12, "revision": None}
    (record,) = Facts.load(folder).of_kind("evaluation")
    assert record.values["protocol"] == protocol
    assert record.values["settings"] == document["settings"]
    assert document["values"].items() <= record.values.items()
    assert record.command.startswith(f"hf-vit evaluate model --data animals --protocol {protocol} ")
    assert str(tmp_path) not in (folder / "facts.json").read_text()
    with Image.open(tmp_path / "out" / f"{name}.png") as picture:
        assert picture.format == "PNG"
    # Again, beside the weights: the same numbers, and the same picture where the card shows it.
    assert run(*typed)[0] == 0
    again = Facts.load(folder).of_kind("evaluation")[1]
    assert {**again.values, "pictures": {}} == record.values
    picture = folder / f"evaluation_{name}.png"
    assert picture.read_bytes() == (tmp_path / "out" / f"{name}.png").read_bytes()
    card = (folder / "README.md").read_text()
    assert f"]({picture.name})" in card
    for headline, value in document["headline"].items():
        assert f"| {headline} | {value:.2%} | animals, split test, 12 images |" in card.replace("\\", "")
    shown = [line.split(" | ")[0].strip("| ") for line in card.splitlines() if "| animals, split test" in line]
    assert protocol != "few-shot" or shown == [f"{shots}-shot accuracy" for shots in (2, 10)]
    assert card.count("| animals, split test") == len(document["headline"]), "of the same measurement the latest"


def test_top1_by_the_same_door(run, save_classifier, animals, tmp_path):
    """Its record is its values and the speed: no protocol, nothing told twice in the card."""
    folder = save_classifier()
    code, out, err = run(folder, "--data", animals, "--num-images", 7, "--output", tmp_path / "out")
    assert code == 0, err
    assert out.startswith("animals, split test, 7 images\n")
    document = json.loads((tmp_path / "out" / "top1.json").read_text())
    (record,) = Facts.load(folder).of_kind("evaluation")
    of_classes = {"precision", "recall", "f1", "auc", "thresholds", "num_classes", "per_class"}
    assert set(record.values) == {"top1", "top5", "loss", "ece", "images_per_second", *of_classes}
    speed = {"images_per_second": record.values["images_per_second"]}
    assert document["values"] | speed == record.values
    assert record.data is not None
    assert record.data.size == document["data"]["size"] == 7
    assert "## Further measurements" not in (folder / "README.md").read_text()


def test_a_second_run_writes_the_same_bytes(run, save_classifier, animals, tmp_path):
    folder = save_classifier()
    found = []
    for place, size in ((tmp_path / "one", 2), (tmp_path / "two", 9)):
        typed = [folder, "--data", animals, "--protocol", "robustness", *QUICK["robustness"], "--batch-size", size]
        assert run(*typed, "--output", place, "--seed", 3, "--num-images", 7)[0] == 0
        found.append({path.name: path.read_bytes() for path in place.iterdir()})
    assert len(found[0]) == 2
    assert found[0] == found[1]
    for extra in ([], ["--streaming"]):  # which reads its shards in another order
        assert run(folder, "--data", animals, "--protocol", "robustness", *QUICK["robustness"], *extra)[0] == 0
    *_, table, stream = Facts.load(folder).of_kind("evaluation")
    assert table.values["pgd_accuracy"] == stream.values["pgd_accuracy"]


def test_a_protocol_leaves_the_pictures_of_top1_in_the_card(run, save_classifier, animals):
    folder = save_classifier()
    for protocol in ("top1", "knn"):
        assert run(folder, "--data", animals, "--protocol", protocol, *QUICK.get(protocol, []))[0] == 0
    card = (folder / "README.md").read_text()
    assert "](confusion_matrix.png)" in card
    assert "](evaluation_knn.png)" in card
    assert "## Further measurements" in card
    append_record(folder, new_record("training", values={}, command="hf-vit finetune"))
    assert "## Further measurements" not in render_card(folder), "of earlier weights"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--protocol", "magic"], "there is no protocol 'magic'; there are top1, few-shot, linear-probe"),
        (["--protocol", "knn", "--shots", 1], "protocol knn has no --shots; choose --protocol few-shot"),
        (["--shots", 1, "--num-images", 3], "protocol top1 has no --shots; choose --protocol few-shot"),
        (["--protocol", "few-shot"], "has 10 images to learn from, 25 shots need 25 a class"),
        (["--protocol", "knn", "--split", "train"], "split 'train' is fitted on and cannot judge as well"),
        (["--protocol", "calibration", "--split", "validation"], "--no-temperature does without"),
        (["--protocol", "robustness", "--epsilons", 0], "must lie in 0 < epsilon <= 255"),
    ],
)
def test_mistakes_end_in_one_line(run, save_classifier, animals, typed, message):
    folder = save_classifier()
    code, out, err = run(folder, "--data", animals, *typed)
    assert (code, out) == (1, "")
    assert err.startswith("hf-vit: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "facts.json").exists()
    (folder / "facts.json").write_text("[")
    assert "facts.json is damaged" in run(folder, "--data", animals)[2], "before the work"
    assert not (folder / "confusion_matrix.png").exists()


def test_of_equal_answers_the_first_counts_in_every_protocol():
    """As argmax has it; topk chooses at will. 40 classes whose logits are all the same, and images of the first."""
    names = [f"class {number:02d}" for number in range(40)]
    model = make_classifier(names)
    for parameter in model.classifier.parameters():
        parameter.data.zero_()
    rows = make_dataset(20, names).map(lambda row, index: {"label": index % 5}, with_indices=True)
    data = ImageData("equal", "0", {"test": rows, "validation": rows}, names)
    top1, calibration = (
        evaluate_protocol(name, (model, make_processor()), data, split="test", progress=False).result
        for name in ("top1", "calibration")
    )
    assert (top1.top1, top1.top5, calibration.top1) == (4 / 20, 1.0, 4 / 20)


def test_pictures_show_the_numbers(animals):
    model = (make_classifier(), make_processor())
    result = evaluate_protocol("robustness", model, str(animals), epsilons=(1, 8), steps=2, progress=False).result
    first, second = (container.lines[0] for container in result.draw().axes[0].containers)
    assert first.get_xdata().tolist() == second.get_xdata().tolist() == [0, 1, 8]
    assert second.get_ydata().tolist() == pytest.approx([100 * value for value in (result.clean, *result.pgd)])
