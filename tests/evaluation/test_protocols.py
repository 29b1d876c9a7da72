"""`evaluate_protocol` and `hf-vit evaluate --protocol`, from what is typed to the files, the facts and the card."""

import json

import numpy as np
import pytest
import torch
from evaluation.tiny import logits_of, make_animals, make_classifier, make_dataset, make_images, make_processor
from PIL import Image

from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation import PROTOCOLS, evaluate, evaluate_protocol
from hf_vit.hub.card import render_card
from hf_vit.results.facts import Facts, append_record, make_record

# Options that keep a protocol quick, as they are typed.
QUICK = {
    "top1": [], "few-shot": ["--shots", 10, "--shots", 2, "--trials", 1], "linear-probe": [],
    "knn": ["--neighbors", 1, "--neighbors", 3], "calibration": [],
    "robustness": ["--epsilons", 1, "--epsilons", 8, "--steps", 2], "corruptions": ["--kinds", "contrast"],
    "patch-drop": ["--patch-size", 2, "--fill", "black"], "multi-label": [], "real": [], "objectnet": [], "vtab": [],
    "segmentation": [], "detection": [],
}  # fmt: skip
# Those with data of their own: tests/training/test_multi_label.py and test_dense.py, test_imagenet_labels.py,
# test_vtab.py.
assert set(QUICK) == set(PROTOCOLS)
OTHERS = ("top1", "multi-label", "real", "objectnet", "vtab", "segmentation", "detection")
OF_ONE_CLASS = [name for name in PROTOCOLS if name not in OTHERS]


@pytest.fixture
def run(succeeds):
    return lambda *arguments: succeeds("evaluate", *arguments, "--device", "cpu")


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    return make_animals(tmp_path_factory.mktemp("data") / "animals", 6, train=10, side=10)


@pytest.mark.parametrize("protocol", OF_ONE_CLASS)
def test_files_facts_and_card(run, save_classifier, animals, tmp_path, protocol):
    folder, name = save_classifier(), protocol.replace("-", "_")
    typed = [folder, "--data", animals, "--protocol", protocol, *QUICK[protocol]]
    assert "12 images" in run(*typed, "--output", tmp_path / "out")
    document = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert (document["format"], document["protocol"], document["seed"]) == (1, protocol, 0)
    assert document["data"].pop("fingerprint")
    assert document["data"] == {"name": "animals", "split": "test", "size": 12, "revision": None}
    (record,) = Facts.load(folder).filter_kind("evaluation")
    assert record.values["protocol"] == protocol
    assert record.values["settings"] == document["settings"]
    assert document["values"].items() <= record.values.items()
    assert record.command.startswith(f"hf-vit evaluate model --data animals --protocol {protocol} ")
    assert str(tmp_path) not in (folder / "facts.json").read_text()
    with Image.open(tmp_path / "out" / f"{name}.png") as picture:
        assert picture.format == "PNG"
    # Again, beside the weights: the same numbers, and the same picture where the card shows it.
    run(*typed)
    again = Facts.load(folder).filter_kind("evaluation")[1]
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


def test_paths_and_ranges_are_recorded(imagenet, save_classifier, animals, tmp_path):
    data, labels, _ = imagenet()
    evaluate(save_classifier("net", WNIDS), data, protocol="real", real_labels=labels, output=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "real.json").read_text())["settings"] == {"real_labels": "real.json"}
    run = evaluate(save_classifier(), animals, protocol="few-shot", shots=range(1, 3), trials=1)
    assert run.record.values["settings"]["shots"] == [1, 2]


def test_a_second_run_writes_the_same_bytes(run, save_classifier, animals, tmp_path):
    folder = save_classifier()
    found = []
    for place, size in ((tmp_path / "one", 2), (tmp_path / "two", 9)):
        typed = [folder, "--data", animals, "--protocol", "robustness", *QUICK["robustness"], "--batch-size", size]
        run(*typed, "--output", place, "--seed", 3, "--num-images", 7)
        found.append({path.name: path.read_bytes() for path in place.iterdir()})
    assert len(found[0]) == 2
    assert found[0] == found[1]
    for extra in ([], ["--streaming"]):  # which reads its shards in another order
        run(folder, "--data", animals, "--protocol", "robustness", *QUICK["robustness"], *extra)
    *_, table, stream = Facts.load(folder).filter_kind("evaluation")
    assert table.values["pgd_accuracy"] == stream.values["pgd_accuracy"]


def test_a_protocol_leaves_the_pictures_of_top1_in_the_card(run, save_classifier, animals):
    folder = save_classifier()
    for protocol in ("top1", "knn"):
        run(folder, "--data", animals, "--protocol", protocol, *QUICK.get(protocol, []))
    card = (folder / "README.md").read_text()
    assert "](confusion_matrix.png)" in card
    assert "](evaluation_knn.png)" in card
    assert "## Further measurements" in card
    append_record(folder, make_record("training", values={}, command="hf-vit finetune"))
    assert "## Further measurements" not in render_card(folder), "of earlier weights"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--protocol", "magic"], "--protocol magic is unknown; choose one of top1, few-shot, linear-probe"),
        (["--protocol", "knn", "--shots", 1], "--protocol knn has no option --shots; choose --protocol few-shot"),
        (["--shots", 1, "--num-images", 3], "--protocol top1 has no option --shots; choose --protocol few-shot"),
        (["--protocol", "few-shot"], "has 10 training images, too few for 25 shots"),
        (["--protocol", "real"], "give it with --real-labels"),
        (["--protocol", "objectnet"], "with --mappings"),
        (["--mappings", "x"], "--protocol top1 has no option --mappings; choose --protocol objectnet"),
    ],
)
def test_mistakes_end_in_one_line(fails, save_classifier, animals, typed, message):
    folder = save_classifier()
    fails(("evaluate", folder, "--data", animals, *typed, "--device", "cpu"), message)
    assert not (folder / "facts.json").exists()
    (folder / "facts.json").write_text("[")
    fails(("evaluate", folder, "--data", animals), "facts.json is damaged")
    assert not (folder / "confusion_matrix.png").exists()


def test_of_equal_answers_the_first_counts_in_every_protocol():
    """As argmax has it; topk chooses at will. 40 classes whose logits are all the same, and images of the first."""
    names = [f"class {number:02d}" for number in range(40)]
    model = make_classifier(names)
    for parameter in model.classifier.parameters():
        parameter.data.zero_()
    rows = make_dataset(20, names).map(lambda row, index: {"label": index % 5}, with_indices=True)
    data = ImageData("equal", "0", {"test": rows, "validation": rows}, names)
    given = dict(split="test", progress=False)
    top1, calibration = (
        evaluate_protocol(name, (model, make_processor()), data, **given).result for name in ("top1", "calibration")
    )
    assert (top1.top1, top1.top5, calibration.top1) == (4 / 20, 1.0, 4 / 20)


def test_pictures_and_tables_show_the_numbers(animals):
    result = judge("robustness", make_classifier(), animals, epsilons=(1, 8), steps=2)
    assert [row[0] for row in result.table().rows] == ["0", "1", "8"]
    first, second = (container.lines[0] for container in result.draw().axes[0].containers)
    assert first.get_xdata().tolist() == second.get_xdata().tolist() == [0, 1, 8]
    assert second.get_ydata().tolist() == pytest.approx([100 * value for value in (result.clean, *result.pgd)])


PUBLISHED = "ILSVRC2012_val_{:08d}"  # names of images
WNIDS = ("n01440764", "n01443537", "n01484850")
# Of eight images, three a class at most; published names lie in no order within the classes.
LABELS = [[0, 1, 2], [], [1, 2], [2], [0, 1], [1], [], [0, 2]]
ORIGINAL = [0, 2, 1, 1, 0, 2, 1, 2]


def predicted(model, images):
    """The model's classes of every image, the likeliest first."""
    return logits_of(model, images).argsort(dim=-1, descending=True).tolist()


def judge(protocol, model, data, **options):
    return evaluate_protocol(protocol, (model, make_processor()), str(data), progress=False, **options).result


@pytest.fixture
def imagenet(tmp_path):
    """test/<WordNet number>/<file>, real.json and the images in the order of real.json."""

    def make(name=PUBLISHED):
        images = make_images(len(LABELS))
        for wnid in WNIDS:
            (tmp_path / "imagenet/test" / wnid).mkdir(parents=True)
        for index, (image, label) in enumerate(zip(images, ORIGINAL, strict=True)):
            image.save(tmp_path / "imagenet/test" / WNIDS[label] / f"{name.format(index + 1)}.png")
        (tmp_path / "real.json").write_text(json.dumps(LABELS))
        return tmp_path / "imagenet", tmp_path / "real.json", images

    return make


@pytest.mark.parametrize("name", [PUBLISHED, f"{PUBLISHED}_n01440764", "image {:02d}"])
def test_real_labels(imagenet, name):
    """The file's i-th list is of image i + 1, whatever class its folder is of; images without a label do not count."""
    data, labels, images = imagenet(name)
    model = make_classifier(WNIDS)
    answers = [best[0] for best in predicted(model, images)]
    result = judge("real", model, data, real_labels=labels, batch_size=3)
    assert result.num_images == 8
    assert result.num_labelled == 6
    assert result.top1 == pytest.approx(np.mean([a == b for a, b in zip(answers, ORIGINAL, strict=True)]))
    judged = [answer in allowed for answer, allowed in zip(answers, LABELS, strict=True) if allowed]
    assert result.real == pytest.approx(np.mean(judged))
    assert result.real != result.top1
    if PUBLISHED in name:  # fewer images are found by their published numbers
        (data / "test" / WNIDS[0] / f"{name.format(1)}.png").unlink()
        result = judge("real", model, data, real_labels=labels)
        judged = [answer in allowed for answer, allowed in zip(answers[1:], LABELS[1:], strict=True) if allowed]
        assert (result.num_images, result.num_labelled) == (7, 5)
        assert result.real == pytest.approx(np.mean(judged))
        assert judge("real", model, data, real_labels=labels, num_images=3).num_images == 3


def test_a_model_that_orders_its_classes_otherwise(imagenet):
    """Numbers of the file are those of the data's classes; the model's are matched by their names."""
    data, labels, _ = imagenet()
    found = []
    for names in (WNIDS, WNIDS[::-1]):
        model = make_classifier(names)
        if names is not WNIDS:
            with torch.no_grad():
                model.classifier.weight.copy_(make_classifier(WNIDS).classifier.weight.flip(0))
        found.append(judge("real", model, data, real_labels=labels).values())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("content", "name", "told"),
    [
        (None, PUBLISHED, "does not exist; download real.json"),
        ("[[0], [1", PUBLISHED, "is not valid JSON"),
        *((no, PUBLISHED, "not a list with the class numbers") for no in ('{"0": [1]}', "[[0], 1]", "[[0], [true]]")),
        ("[[0], [3]]", PUBLISHED, "has the class 3, but the data set only has 3 classes; give one with"),
        ("[[0], [1]]", PUBLISHED, "has labels of 2 images, but none of image number 8"),
        (str([[(label + 1) % 3] for label in ORIGINAL]), PUBLISHED, "only 0 of 8 images have their own class"),
        ("[[0], [1]]", "{}", "has labels of 2 images, but the split has 8 whose names are not ImageNet's"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(imagenet, content, name, told):
    data, labels, _ = imagenet(name)
    labels.unlink() if content is None else labels.write_text(content)
    with pytest.raises(UserError, match=told) as error:
        judge("real", make_classifier(WNIDS), data, real_labels=labels)
    assert "\n" not in str(error.value)


WORDS = ("analog clock", "digital clock", "backpack, back pack", "tench, Tinca tinca", "barber chair")
MAPPING = {
    "Alarm clock": "analog clock; digital clock",
    "Backpack": "backpack, back pack",
    "Chair": "barber chair; analog clock",  # a class that another one has, too
}
OBJECTS = {"alarm_clock": "Alarm clock", "backpack": "Backpack", "air_freshener": "Air freshener", "chair": "Chair"}


@pytest.fixture
def photographs(tmp_path):
    """images/<folder>/<file> with a red border of two px, beside the authors' folder of mappings."""
    root, found, images = tmp_path / "objectnet-1.0", {}, iter(make_images(12, side=12))
    for folder in OBJECTS:
        found[folder] = [next(images) for _ in range(3)]
        (root / "images/test" / folder).mkdir(parents=True)
        for index, image in enumerate(found[folder]):
            framed = Image.new("RGB", (16, 16), (255, 0, 0))
            framed.paste(image, (2, 2))
            framed.save(root / "images/test" / folder / f"{index}.png")
    (root / "mappings").mkdir()
    (root / "mappings/folder_to_objectnet_label.json").write_text(json.dumps(OBJECTS))
    (root / "mappings/objectnet_to_imagenet_1k.json").write_text(json.dumps(MAPPING))
    return root / "images", root / "mappings", found


def test_objectnet(photographs):
    """Any of the classes that the mapping names is right; folders that ImageNet lacks, and the border, do not count."""
    data, mappings, images = photographs
    model = make_classifier(WORDS)
    right = {"alarm_clock": {0, 1}, "backpack": {2}, "chair": {0, 4}}
    hits = {}
    for folder, allowed in right.items():
        for best in predicted(model, images[folder]):
            shared = next(answer for answer in best if answer != 3)  # the tench is in no folder
            hits.setdefault(folder, []).append((best[0] in allowed, shared in allowed))
    result = judge("objectnet", model, data, mappings=mappings, batch_size=2)
    everything = [hit for each in hits.values() for hit in each]
    assert result.num_images == len(everything) == 9
    assert result.top1 == pytest.approx(np.mean([hit for hit, _ in everything]))
    assert result.top1_of_shared == pytest.approx(np.mean([hit for _, hit in everything]))
    assert result.top5 == 1.0  # of five classes
    assert result.per_class == {name: pytest.approx(np.mean([hit for hit, _ in hits[name]])) for name in right}
    assert 0 < result.top1 < 1


def test_a_mapping_that_does_not_fit_is_refused(photographs, tmp_path):
    data, mappings, _ = photographs

    def refused(names, place, said):
        with pytest.raises(UserError, match=said):
            judge("objectnet", make_classifier(names), data, mappings=place)

    words = ("n02708093", "n03196217", "n02769748", "n01440764", "n02791124")
    refused(words, mappings, r"the model lacks the class 'analog clock' of .*missing classes: 4")
    refused(WORDS, tmp_path, r"folder_to_objectnet_label.json does not exist; give the folder 'mappings'")
    (mappings / "objectnet_to_imagenet_1k.json").write_text('["Alarm clock"]')
    refused(WORDS, mappings, r"objectnet_to_imagenet_1k\.json is not a JSON object from names to names")


def test_both_by_the_command(run, imagenet, photographs, save_classifier, tmp_path):
    """What is printed, the files, and facts that tell no place of this machine."""
    data, labels, _ = imagenet()
    for protocol, names, place, options, title in (
        ("real", WNIDS, data, ["--real-labels", labels], "reassessed labels (ReaL)"),
        ("objectnet", WORDS, photographs[0], ["--mappings", photographs[1]], "ObjectNet top-1 accuracy"),
    ):
        folder, output = save_classifier(f"model-{protocol}", names), tmp_path / f"out-{protocol}"
        assert title in run(folder, "--data", place, "--protocol", protocol, *options, "--output", output)
        (record,) = Facts.load(folder).filter_kind("evaluation")
        document = json.loads((output / f"{protocol}.json").read_text())
        assert document["values"].items() <= record.values.items()
        assert str(tmp_path) not in (folder / "facts.json").read_text() + json.dumps(document)
        card = (folder / "README.md").read_text().replace("\\", "")
        assert "name: Top-1 accuracy" not in card  # only the protocol top1 is published under this name
        for headline in document["headline"]:
            assert headline in card
