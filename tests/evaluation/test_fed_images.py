"""How images are fed: JPEG files decoded at a smaller scale (`--draft`), or in their own size (`--max-num-patches`)."""

import functools
import io
import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from comparison import zoo
from data.conftest import tags
from evaluation.tiny import NAMES, examine, make_animals, make_data, our_subject, save_ours
from models.families import OTHERS
from PIL import Image
from transformers import ViTImageProcessor

from hf_vit import HfViTForImageClassification, HfViTModel, UserError, optimize_for_inference
from hf_vit.catalogue.listing import TOP1, list_models
from hf_vit.data.images import decode_image
from hf_vit.evaluation import embed, evaluate, evaluate_protocol, predict
from hf_vit.loading import optimizing
from hf_vit.loading.model import load_model
from hf_vit.loading.optimizing import select_engine
from hf_vit.loading.pixels import fit_grid, keep_image_sizes
from hf_vit.results.facts import Facts

# File -> (height, width) -> of 8 px at least, as libjpeg decodes it; and the nearest whole patches of 4 px, of which
# more than 12 are shrunk in their shape.
SIZES = {"a": (64, 64), "b": (40, 70), "c": (8, 8), "d": (33, 130), "e": (15, 17), "f": (128, 32)}
DECODED = {"a": (8, 8), "b": (10, 18), "c": (8, 8), "d": (9, 33), "e": (15, 17), "f": (32, 8)}
OWN = {"a": (8, 16), "b": (4, 4), "c": (40, 20), "d": (9, 13), "e": (3, 90), "f": (8, 8)}
GRIDS = {"a": (2, 4), "b": (1, 1), "c": (4, 2), "d": (2, 3), "e": (1, 12), "f": (2, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model/ of 8 px; jpg/ and png/, each SPLIT/CLASS/LETTER of two classes; one JPEG is turned by its EXIF data."""
    root = tmp_path_factory.mktemp("fed")
    save_ours(root / "model")
    random = np.random.default_rng(0)
    for kind, sizes in (("jpg", SIZES), ("png", OWN)):
        for split in ("train", "validation", "test"):
            for number, (letter, size) in enumerate(sizes.items()):
                place = root / kind / split / NAMES[number % 2]
                place.mkdir(parents=True, exist_ok=True)
                more = {"exif": tags()} if (kind, letter) == ("jpg", "d") else {}
                image = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
                image.save(place / f"{letter}.{kind}", quality=90, **more)
    return root


@pytest.fixture(scope="module")
def classifier(folder):
    return HfViTForImageClassification.from_pretrained(folder / "model").eval()


def files(folder, kind="jpg"):
    return sorted((folder / kind / "test").rglob(f"*.{kind}"))


@torch.no_grad()
def logits(folder, classifier, draft):
    """By Pillow and transformers' processor, image by image."""
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
        rows.append(classifier(**processor(turned, return_tensors="pt")).logits[0])
    return torch.stack(rows)


def fed(path):
    """[1, C, H, W] of one image in its own size, by Pillow and numpy."""
    h, w = GRIDS[path.stem]
    with Image.open(path) as image:
        pixels = np.asarray(image.resize((4 * w, 4 * h), Image.Resampling.BILINEAR), dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)[None]


def test_a_scale_that_covers_both_sides():
    """Other formats stay whole, and so does a file without a side to cover."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (100, 300, 3), dtype=np.uint8))
    for kind, side, wanted in (("JPEG", 40, (150, 50)), ("JPEG", 101, (300, 100)), ("JPEG", None, (300, 100)),
                               ("PNG", 40, (300, 100))):  # fmt: skip
        content = io.BytesIO()
        noise.save(content, kind)
        image = decode_image(content, side)
        assert image.size == wanted
        assert np.asarray(image).shape == (*wanted[::-1], 3)


@pytest.mark.parametrize("side", [33, 449, 1793])
def test_a_side_that_is_no_multiple_is_not_stretched(side):
    """The decoder ends with a whole pixel, of which only a part is the picture's: a ramp stays where it was."""
    content = io.BytesIO()
    ramp = np.linspace(0, 255, side).round().astype(np.uint8)
    Image.fromarray(np.broadcast_to(ramp, (side, side)).copy()).save(content, "JPEG", quality=95)
    small = decode_image(content, 16)
    assert small.width < side
    whole, reduced = (
        np.asarray(each.resize((16, 16), Image.Resampling.BOX), float) for each in (decode_image(content), small)
    )
    assert abs((whole - reduced).mean()) < 0.5  # stretched it would be 0.8 to 4.3


def test_predictions_accuracy_and_embeddings_are_of_the_smaller_images(folder, classifier, tmp_path):
    model, data, names = str(folder / "model"), str(folder / "jpg"), classifier.config.id2label
    for draft in (True, False):
        found = predict(model, files(folder), top=6, draft=draft)
        for each, row in zip(found, logits(folder, classifier, draft).softmax(-1), strict=True):
            assert dict(each.scores) == pytest.approx({names[k]: float(p) for k, p in enumerate(row)}, abs=2e-6)
    drafted = logits(folder, classifier, True)
    assert (drafted - logits(folder, classifier, False)).abs().max() > 1e-3
    labels = torch.tensor([NAMES.index(path.parent.name) for path in files(folder)])
    wanted = float(torch.nn.functional.cross_entropy(drafted.double(), labels))
    for num_workers in (0, 1):
        given = dict(batch_size=4, progress=False, num_workers=num_workers, draft=True)
        run = evaluate_protocol("top1", model, data, **given)
        assert run.result.loss == pytest.approx(wanted, abs=1e-6)
        assert run.settings["draft"] is True
    given = dict(splits=["test"], predictions=True, top=6)
    embed(model, data, tmp_path / "out", draft=True, **given)
    rows = pq.read_table(next((tmp_path / "out").glob("*.parquet"))).to_pylist()
    for row, wanted in zip(rows, drafted.softmax(-1), strict=True):
        found = dict(zip(row["labels"], row["probabilities"], strict=True))
        assert found == pytest.approx({names[k]: float(p) for k, p in enumerate(wanted)}, abs=2e-6)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]["draft_side"] == 8
    with pytest.raises(UserError):
        embed(model, data, tmp_path / "out", **given)


def test_a_record_and_a_card_say_how_images_were_fed(folder):
    """The card's metadata, by which others compare, leaves such a result out."""
    model, data = str(folder / "model"), str(folder / "jpg")
    for more, told in (
        ({"draft": True}, "JPEG files were decoded at a smaller scale"),
        ({"max_num_patches": 4}, "images kept their size and shape, with at most 4 patches"),
    ):
        evaluate(model, data, progress=False, **more)
        last = json.loads((folder / "model" / "facts.json").read_text())[-1]["values"]
        assert last["fed"] == more
        assert told in last["warnings"][0]
        card = (folder / "model" / "README.md").read_text()
        assert told in card
        assert "model-index" not in card
    for less in ({}, {"draft": True}, {"num_images": 1}):  # the later take no place of the first, nor stand in a list
        evaluate(model, data, progress=False, **less)
        card = (folder / "model" / "README.md").read_text()
        assert "model-index" in card
        assert "were fed" not in card
        (entry,) = list_models([model]).entries
        (score,) = (score for score in entry.scores if score.metric == TOP1)
        assert f"value: {score.value}" in card
        assert f"num_images: {len(files(folder))}" in card
        assert "--draft" not in score.source


def test_the_commands_take_them(folder, tmp_path, succeeds):
    model, data, out = folder / "model", folder / "jpg", tmp_path / "out"
    for words in (
        ("predict", model, files(folder)[0], "--json", "--draft"),
        ("evaluate", model, "--data", data, "--draft"),
        ("embed", model, "--data", data, "--output", out, "--draft"),
        ("evaluate", model, "--data", folder / "png", "--max-num-patches", 12),
    ):
        succeeds(*words)


def test_what_they_do_not_go_with(folder, classifier, tmp_path):
    model, data = str(folder / "model"), str(folder / "jpg")
    one_size = "needs images of one size"
    refusals = [
        ("top1", dict(draft=True, max_num_patches=12), "that resize all images to one size; leave --draft out"),
        (None, dict(draft=True, max_num_patches=12), "--draft cannot be combined with"),
        (None, dict(draft=True, streaming=True), "--draft cannot be combined with"),
        ("top1", dict(draft=True, streaming=True), "--draft cannot be combined with --streaming"),
        *(
            (name, dict(max_num_patches=12), f"protocol {name} {one_size}; leave --max-num-patches out")
            for name in ("linear-probe", "robustness", "corruptions", "patch-drop", "vtab")
        ),
    ]
    for protocol, given, said in refusals:
        measure = functools.partial(evaluate_protocol, protocol) if protocol else embed
        output = {} if protocol else {"output": tmp_path / "out"}
        with pytest.raises(UserError, match=said):
            measure(model, data, **output, **given)
    headless = HfViTModel(classifier.config, add_pooling_layer=False)
    for subject, said in (
        (examine().loaded, "only takes images of one size; leave --max-num-patches out"),
        (load_model((OTHERS["mixer"].build("classification"), ViTImageProcessor())), "only takes images of one size"),
        (load_model((headless, ViTImageProcessor())), "has no pooling layer"),
    ):
        with pytest.raises(UserError, match=said):
            keep_image_sizes(subject, 12)
    with pytest.raises(UserError, match=r"--draft needs a fixed input size, which .* does not have"):
        _ = load_model((classifier, ViTImageProcessor(do_resize=False))).draft_side
    before_a_crop = ViTImageProcessor(
        size={"shortest_edge": 11}, do_center_crop=True, crop_size={"height": 8, "width": 8}
    )
    assert load_model(model).draft_side == 8
    assert load_model((classifier, before_a_crop)).draft_side == 11


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])  # processes that import
def test_answers_in_their_own_size_are_those_of_each_image_alone(folder, classifier, tmp_path, processes):
    model, data = str(folder / "model"), str(folder / "png")
    given = dict(splits=["test"], batch_size=4, rows_per_file=5, num_processes=processes)
    embed(model, data, tmp_path / "out", max_num_patches=12, **given)
    rows = [row for path in (tmp_path / "out").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert {row["image"].rpartition("/")[2] for row in rows} == {f"{letter}.png" for letter in OWN}
    with torch.no_grad():
        for row in rows:
            alone = classifier.vit(fed(folder / "png" / "test" / row["image"])).pooler_output[0]
            np.testing.assert_allclose(row["embedding"], alone, rtol=0, atol=1e-5)
        answers = torch.cat([classifier(fed(path)).logits for path in files(folder, "png")])
    found = evaluate_protocol("top1", model, data, batch_size=4, max_num_patches=12, progress=False)
    labels = torch.tensor([NAMES.index(path.parent.name) for path in files(folder, "png")])
    assert found.result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(answers, labels)), abs=1e-5)
    assert found.result.top1 == pytest.approx(float((answers.argmax(1) == labels).float().mean()))
    assert found.settings["max_num_patches"] == 12


@pytest.mark.parametrize("family", ["plain", "hybrid", "axial", "local"])
def test_every_vision_transformer_takes_them(family):
    """Also those that go on with padding."""
    subject, data = keep_image_sizes(our_subject(family), 64), make_data(test=6, side=40)
    subject = replace(subject, prepare=pickle.loads(pickle.dumps(subject.prepare)))  # as workers that are not forked
    small = data.splits["test"].map(lambda row, n: {"image": row["image"].resize((20 + 8 * n, 36))}, with_indices=True)
    data.splits["test"] = small
    features, _ = examine(subject, data, batch_size=6).features("test")
    alone = [examine(subject, data, batch_size=1).features("test", [row])[0][0] for row in range(6)]
    np.testing.assert_allclose(features, np.stack(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("most", [1, 2, 7, 196])
def test_a_grid_is_no_larger_than_asked_and_keeps_its_shape(most):
    random = np.random.default_rng(0)
    for height, width in random.integers(1, 900, (300, 2)).tolist():
        h, w = fit_grid((height, width), (16, 16), most)
        assert 1 <= h * w <= most
        whole = max(1, round(height / 16)), max(1, round(width / 16))
        if whole[0] * whole[1] <= most:
            assert (h, w) == whole
        elif min(h, w) > 1:  # no patch more would have fitted both ways
            assert (h + 1) * (w + 1) > most
            assert 0.5 < (h / w) / (height / width) < 2


COUNT = 24  # images of the test split


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_animals(tmp_path_factory.mktemp("data"), COUNT // 2, train=2, side=8)


@pytest.fixture
def saved(tmp_path):
    save_ours(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(params=["torch", pytest.param("openvino", marks=pytest.mark.slow)])  # each command makes graphs
def engine(request, monkeypatch):
    """Graphs for few images and small models, too, where one is asked for."""
    if request.param == "openvino":
        monkeypatch.setattr(optimizing, "GRAPH_FROM", 0)
        monkeypatch.setattr(optimizing, "GRAPH_PARAMETERS", 0)
    return request.param


def close(given, wanted):
    """Numbers within 1e-5, everything else equal."""
    if isinstance(wanted, dict):
        assert set(given) == set(wanted)
        for name, value in wanted.items():
            close(given[name], value)
    elif isinstance(wanted, list):
        assert len(given) == len(wanted)
        for one, other in zip(given, wanted, strict=True):
            close(one, other)
    else:
        assert given == (pytest.approx(wanted, abs=1e-5) if isinstance(wanted, float) else wanted)


def read(place):
    return json.loads(place.read_text())


# Command -> its words, and its answers in the folder OUT or as printed. Beside another library's model, which stays as
# it is loaded, as do all while they are attacked; an analysis that reads answers alone.
COMMANDS = {
    "evaluate": (("MODEL", "--data", "DATA", "--output", "OUT"), lambda out, shown: read(out / "top1.json")["values"]),
    "predict": (("MODEL", "IMAGES", "--json"), lambda out, shown: json.loads(shown)),
    "compare": (("MODEL", "OTHER", "--data", "DATA", "--output", "OUT", "--speed-turns", 0, "--epsilon", 1),
                lambda out, shown: read(out / "models/model.json")),
    "analyze": (("MODEL", "--only", "shape_bias", "--cue-conflict", "CONFLICTS", "--output", "OUT"),
                lambda out, shown: read(out / "shape_bias.json")),
}  # fmt: skip
BOTH = ("evaluate", "predict")  # by both engines in every run
CASES = [(name, engine) for name in BOTH for engine in ("torch", "openvino")]
CASES += [(name, "torch") for name in ("compare", "analyze")]
CASES += [pytest.param(name, "openvino", marks=pytest.mark.slow) for name in ("compare", "analyze")]


@pytest.mark.parametrize(("name", "engine"), CASES, indirect=["engine"])
def test_an_optimized_model_answers_as_the_one_that_was_loaded(name, engine, saved, data, tmp_path, command):
    """What computed is told and recorded, of a model as loaded nothing."""
    places = {"MODEL": saved, "DATA": data, "IMAGES": data / "test" / "*" / "*.png", "CONFLICTS": tmp_path / "shapes"}
    if name == "compare":
        places["OTHER"] = zoo.save("resnet", tmp_path / "other", NAMES)
    for number, path in enumerate(sorted((data / "test").glob("*/*.png"))):
        shape, texture = NAMES[number % 2], NAMES[(number + 1) % 2]
        (places["CONFLICTS"] / shape).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, places["CONFLICTS"] / shape / f"{shape}{number}-{texture}{number}.png")
    (words, answers), found = COMMANDS[name], []
    for option in (["--no-optimize"], []):
        out = tmp_path / f"out{len(found)}"
        code, printed, err = command(name, *((places | {"OUT": out}).get(word, word) for word in words), *option)
        assert (code, f"optimized for inference, runs on {engine} " in printed + err) == (0, not option)
        found.append(answers(out, printed))
    plain, fast = found
    if "notes" in plain:
        (told,) = set(fast.pop("notes")) - set(plain.pop("notes"))
        assert told.startswith(f"optimized for inference, runs on {engine} ")
    close(fast, plain)
    if name == "compare":
        others = [(tmp_path / out / "models/other.json").read_bytes() for out in ("out0", "out1")]
        assert (others[0] == others[1], plain["fgsm"]["1"] is None) == (True, False)
    else:
        assert len(plain) == COUNT or name != "predict"
        assert name != "analyze" or sum(plain["arrays"]["decisions"]["values"][0]) == COUNT // 2
    records = [record.values for record in Facts.load(saved).records if record.kind in ("evaluation", "analysis")]
    assert ["engine" in values for values in records] == [False, True][: len(records)]
    assert all(values["engine"].startswith(f"{engine} ") for values in records[1:])


def test_embed(saved, data, engine, tmp_path, command):
    """A folder that was begun goes on as it was begun."""
    for name, option in (("plain", ["--no-optimize"]), ("fast", []), ("fast", []), ("plain", [])):
        assert command("embed", saved, "--data", data, "--output", tmp_path / name, "--split", "test", *option)[0] == 0
    rows = {
        name: [row for path in sorted((tmp_path / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
        for name in ("plain", "fast")
    }
    close(rows["fast"], rows["plain"])
    settings = {name: json.loads((tmp_path / name / "manifest.json").read_text())["settings"] for name in rows}
    assert "engine" not in settings["plain"]
    assert settings["fast"]["engine"] == engine


def test_a_fingerprint_stays_that_of_the_weights_and_other_models_stay_as_they_are(saved, data, tmp_path):
    optimized = evaluate(saved, str(data), optimize=True)
    assert optimized.engine == "torch"
    subject = load_model(saved)
    assert optimized.examination.loaded.fingerprint == subject.fingerprint
    # What is made in Python is somebody's; and what reads inside of a model, or its gradients, needs it as loaded.
    assert evaluate((subject.model, subject.processor), str(data), optimize=True).engine is None
    assert evaluate(saved, str(data), protocol="robustness", optimize=True, steps=1).engine is None
    assert evaluate(saved, str(data), protocol="patch-drop", optimize=True).engine is None
    fast = optimize_for_inference(load_model(saved).model, engine="torch"), subject.processor
    with pytest.raises(UserError, match=r"can name its weights \(leave output out to measure"):
        evaluate(fast, "no data", output=tmp_path / "out")  # before any work
    subject.model.train()


REPAID = [(1, True, None), (15, True, None), (16, True, "torch"), (9_999, True, "torch"), (10_000, True, "openvino")]
REPAID += [(None, True, "openvino"), (None, False, "torch"), (10**6, False, "torch")]


@pytest.mark.parametrize(("images", "is_large", "engine"), REPAID)
def test_what_so_many_images_repay(images, is_large, engine, monkeypatch):
    monkeypatch.setattr(optimizing, "GRAPH_PARAMETERS", 0 if is_large else 10**8)
    subject = our_subject("plain")
    assert select_engine(subject, images) == engine
    subject.processor.size = {"height": 32, "width": 32}  # a graph takes the config's size alone, so it would not run
    fed_larger = load_model((subject.model, subject.processor))
    assert select_engine(fed_larger, images) == (engine and "torch")
