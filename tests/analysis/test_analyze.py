"""`analyze` and its command: arrays of the documented shapes, files, facts, resuming, refusals, stages."""

import copy
import itertools
import os
import re
import shutil
import weakref
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from comparison.test_compare import contents
from evaluation.tiny import make_dataset, make_images
from models.families import FAMILIES, randomise
from PIL import Image
from training.conftest import save_model
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTForImageClassification

import hf_vit.analysis.api as api
from hf_vit import families
from hf_vit.analysis import (
    ANALYSES,
    AnalysisDocument,
    AnalysisImages,
    AnalysisSettings,
    StagesDocument,
    analyze,
    analyze_stages,
    open_images,
    stage_folders,
)
from hf_vit.analysis.rollout import draw_overlays
from hf_vit.data import ImageData, load_data
from hf_vit.errors import UserError
from hf_vit.evaluation import evaluate_protocol, predict
from hf_vit.hub.card import write_card
from hf_vit.inference.optimize import optimize_for_inference
from hf_vit.loading.model import load_model
from hf_vit.results.facts import Facts, append_record, lock_folder, make_record

SETTINGS = AnalysisSettings(num_images=9, batch_size=4, num_pictures=3, cka_batch_size=5)
ATTENTION = ["attention_distance", "attention_entropy", "attention_rollout", "head_maps"]


def axes_of(model, images=9):
    """The length of every named axis that a model and the settings fix."""
    h, w = model.config.grid
    return {
        "layer": model.config.num_hidden_layers, "head": model.config.num_attention_heads,
        "image": min(images, SETTINGS.num_pictures), "row": h, "column": w, "other_row": h, "other_column": w,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
@pytest.mark.parametrize("form", ["torch.compile", "model.compile()", "peft"])
def test_compiled_models_and_adapters_give_what_the_model_gives(form, with_processor):
    """Also after a pass, when compiled code would run without the hooks that read layers and features."""
    model, images = FAMILIES["plain"].build("classification"), make_images(9)
    changed, processor = with_processor(copy.deepcopy(model))
    pixel_values = processor(images=images, return_tensors="pt")["pixel_values"]
    if form == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        changed = peft.get_peft_model(changed, config)
        model = copy.deepcopy(changed).merge_and_unload()
    elif form == "torch.compile":
        changed = torch.compile(changed, backend="eager")
    else:
        changed.compile(backend="eager")
    changed(pixel_values)
    names = list(model.config.id2label.values())
    data = ImageData("noise", "", {"test": make_dataset(5, names)}, names)
    results = []
    for pair in ((model, processor), (changed, processor)):
        run = analyze(pair, images, only=["cka", "receptive_field", "attention_entropy"], settings=SETTINGS)
        arrays = [run["cka"]["cka"], run["receptive_field"]["radius"], run["attention_entropy"]["entropy"]]
        scores = [score for answer in predict(pair, images) for _, score in sorted(answer.scores)]
        features, _ = evaluate_protocol("top1", pair, data, progress=False).examination.features("test")
        results.append([*arrays, scores, features])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_arrays_have_the_documented_shapes(family, with_processor):
    model = FAMILIES[family].build("classification")
    run = analyze(with_processor(model), itertools.cycle(make_images(9)), settings=SETTINGS)
    assert set(run) | {"cka_between", "shape_bias"} == set(ANALYSES)
    assert list(run.left_out) == ["cka_between", "shape_bias"]
    sizes = axes_of(model)
    for name, arrays in run.items():
        for array, values in arrays.items():
            axes = ANALYSES[name].arrays[array].axes
            assert values.dtype == np.float32
            assert np.isfinite(values).all()
            if name in (*ATTENTION, "position_similarity"):
                assert values.shape == tuple(sizes[axis] for axis in axes)
    assert run["cka"]["cka"].shape == (3, 3)  # embeddings and two layers
    assert ("distance_rows" in run["attention_distance"]) == (family == "axial")
    assert ("root_components" in run["patch_filters"]) == (family == "hybrid")


@pytest.mark.parametrize("name", ["axial_resnet", "bit"])
def test_resnets_are_looked_at_where_it_makes_sense(name, with_processor):
    family = families.FAMILIES[name]
    config = family.config_class(image_size=32, stage_depths=(1, 1), stem_width=32)
    model = randomise(family.classes["classification"](config))
    settings = AnalysisSettings(num_images=4, cka_batch_size=4)
    run = analyze(with_processor(model), make_images(4), settings=settings)
    assert set(run) == {"patch_filters", "cka", "equivariance", "patch_permutation", "receptive_field"}
    assert set(run.left_out) == {*ATTENTION, "position_similarity", "cka_between", "shape_bias"}
    assert all(np.isfinite(values).all() for arrays in run.values() for values in arrays.values())
    with pytest.raises(UserError, match=f"attention_rollout cannot be applied: .*, but not from {family.model_type}$"):
        analyze(with_processor(model), make_images(4), only=["attention_rollout"])


def build_ours(side):
    choice = {"choice": "registers", "mlp_type": "swiglu", "norm_before_layers": True}
    return FAMILIES["plain"].build("classification", **choice, image_size=side)


def build_theirs(side):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return randomise(ViTForImageClassification(ViTConfig(**sizes, image_size=side, patch_size=8)), 0).eval()


@pytest.mark.parametrize(("build", "side", "whole"), [(build_ours, 18, 16), (build_theirs, 30, 24)])
def test_what_makes_no_whole_patch_is_left_out(build, side, whole, with_processor):
    """Images are those that the whole patches are cut from, in every array; 30 px are not three patches of 10 px."""
    large, small = build(side), build(whole)
    images = make_images(4, side=side)
    cut = [image.crop((0, 0, whole, whole)) for image in images]
    settings = AnalysisSettings(num_images=4, num_pictures=2, cka_batch_size=4)
    only = [name for name in ANALYSES if name not in ("cka", "cka_between", "shape_bias")]
    given, wanted = (
        analyze(with_processor(model), pictures, only=only, settings=settings)
        for model, pictures in ((large, images), (small, cut))
    )
    for name in only:
        for array in wanted[name]:
            np.testing.assert_allclose(given[name][array], wanted[name][array], rtol=1e-5, atol=1e-6)


def test_a_place_of_a_rollout_covers_its_patch():
    """A hybrid's last patches reach beyond an image of 72 px; the picture ends with the image."""
    shares = np.full((1, 5, 4), 0.05, np.float32)
    figure = draw_overlays(np.zeros((1, 72, 64, 3), np.uint8), shares, (16, 16), ["label 3\nprediction 5"])
    above, below, scale = figure.axes
    assert above.get_title() == "label 3\nprediction 5"
    assert scale.get_xlabel() == "share of the attention"
    assert [label.get_text() for label in scale.get_xticklabels()] == ["0", "5.0%"]
    assert below.images[1].get_extent() == [-0.5, 63.5, 79.5, -0.5]
    assert (below.get_xlim(), below.get_ylim()) == ((-0.5, 63.5), (71.5, -0.5))
    # One patch of 20 gets 90%, as in models without registers: the others are still seen, and the scale says so.
    shares[0, 2, 1] = 0.9
    *_, below, scale = draw_overlays(np.zeros((1, 72, 64, 3), np.uint8), shares, (16, 16)).axes
    assert below.images[1].get_clim() == (0, pytest.approx(0.0925))  # 0.85 / 20 above the other patches
    assert scale.get_xticklabels()[1].get_text() == "95th percentile, 9.3%, to 90.0%"


@pytest.mark.parametrize(
    ("choice", "read", "fields"),
    [
        ("gap_with_class_token", slice(1, None), {}),
        ("token_and_gap", slice(1), {}),
        ("default", slice(1, 2), {"pooling": "first_patch", "use_class_token": True}),
    ],
)
def test_a_rollout_begins_at_the_tokens_that_the_output_is_read_from(choice, read, fields, with_processor):
    model = FAMILIES["plain"].build("classification", choice, **fields)
    found = analyze(with_processor(model), make_images(2), only="attention_rollout", rollout_identity=0.0)
    maps = model.attention_maps(load_model(with_processor(model)).pixel_values(make_images(2)))
    rolled = maps[1].mean(1) @ maps[0].mean(1)
    wanted = rolled[:, read, maps.patch_tokens].mean(1).unflatten(1, maps.grid)
    np.testing.assert_allclose(found["attention_rollout"]["rollout"], wanted.detach(), rtol=1e-5)


def test_batches_do_not_change_the_numbers(with_processor):
    subject = with_processor(FAMILIES["plain"].build("classification"))
    one, other = (
        analyze(subject, make_images(9), only=ATTENTION, settings=AnalysisSettings(num_images=9, batch_size=size))
        for size in (9, 2)
    )
    for name in ATTENTION:
        for array in one[name]:
            np.testing.assert_allclose(one[name][array], other[name][array], rtol=1e-4, atol=1e-6)


def test_images_are_read_when_needed_and_let_go(with_processor):
    """At most two batches are alive at a time, however many images there are."""
    alive = most = 0

    def let_go():
        nonlocal alive
        alive -= 1

    def read(index):
        nonlocal alive, most
        image = make_images(1, seed=index)[0]
        weakref.finalize(image, let_go)
        alive += 1
        most = max(most, alive)
        return image

    images = AnalysisImages("many", "0" * 16, 40, read)
    subject = with_processor(FAMILIES["plain"].build("classification"))
    settings = AnalysisSettings(num_images=40, batch_size=4, num_pictures=1, cka_batch_size=4)
    analyze(subject, images, only=["attention_distance", "cka"], settings=settings)
    assert 4 <= most <= 8


@pytest.fixture(scope="module")
def whole(saved, pictures, tmp_path_factory):
    """A run of everything, and its folder."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return analyze(saved, pictures, out, settings=SETTINGS, against=saved, device="cpu"), out


def test_files_and_report(whole):
    run, out = whole
    names = {path.name for path in out.iterdir()}
    made = [name for name in ANALYSES if name != "shape_bias"]  # which needs other images
    assert names == {f"{name}.json" for name in made} | {path.name for path in run.pictures} | {"report.html"}
    assert run.images.skipped == ["photos/broken.png"]
    for name in made:
        document = AnalysisDocument.model_validate_json((out / f"{name}.json").read_bytes())
        assert document.inputs.images.skipped == ["photos/broken.png"]
        assert document.inputs.model.name == "tiny"
        for array, stored in document.arrays.items():
            np.testing.assert_array_equal(stored.array(), run[name][array])
    page = (out / "report.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == len(run.pictures)
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert all(ANALYSES[name].title in page for name in made)
    assert "analyzed with 9 images" in page
    assert "photos/broken.png" in page
    # Two models with the same weights are one: both CKAs are the same numbers, and 1 on the diagonal.
    np.testing.assert_allclose(run["cka_between"]["cka"], run["cka"]["cka"], rtol=1e-5)
    np.testing.assert_allclose(run["cka"]["cka"].diagonal(), 1, rtol=1e-5)
    assert str(out.parent) not in page + "".join((out / f"{name}.json").read_text() for name in made)


CHEAP = ["attention_entropy", "attention_distance", "cka"]


def test_the_same_inputs_give_the_same_bytes(saved, pictures, tmp_path, whole):
    """In a run of a part as well."""
    only = ["attention_distance", "attention_rollout", "patch_permutation", "receptive_field"]
    run = analyze(saved, pictures, tmp_path / "part", only=only, settings=SETTINGS, device="cpu")
    names = {*(f"{name}.json" for name in only), *(path.name for path in run.pictures)}
    assert len(names) == 4 + 6
    for name in names:
        assert (tmp_path / "part" / name).read_bytes() == (whole[1] / name).read_bytes()
    given = dict(only=only[:2], settings=SETTINGS, picture_format="svg", device="cpu")
    for folder in ("one", "two"):
        analyze(saved, pictures, tmp_path / folder, **given)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len(one) == 5
    assert one == two


def test_an_interrupted_run_goes_on(saved, pictures, tmp_path, monkeypatch):
    """What was finished is neither made again nor changed, and the end is that of a run in one piece."""
    options = {"only": CHEAP, "settings": SETTINGS, "device": "cpu"}
    with monkeypatch.context() as patch:
        patch.setattr(ANALYSES["cka"], "measure", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            analyze(saved, pictures, tmp_path / "out", **options)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert set(before) >= {"attention_distance.json", "attention_entropy.json"}
    assert "cka.json" not in before
    lines = []
    run = analyze(saved, pictures, tmp_path / "out", report=lines.append, **options)
    assert run.measured == ["cka"]
    kept = [f"attention_{name} was already finished; its result is kept" for name in ("distance", "entropy")]
    assert lines[:2] == kept
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before
    whole = analyze(saved, pictures, tmp_path / "whole", **options)
    for name in whole:
        for array in whole[name]:
            np.testing.assert_array_equal(run[name][array], whole[name][array])
    assert (tmp_path / "out/report.html").read_bytes() == (tmp_path / "whole/report.html").read_bytes()


def test_an_interrupted_write_leaves_no_finished_analysis(saved, pictures, tmp_path, monkeypatch):
    """The JSON is what says "finished": it comes after the pictures."""
    monkeypatch.setattr(api, "encode_figure", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        analyze(saved, pictures, tmp_path / "out", only=["cka"], settings=SETTINGS, device="cpu")
    assert list((tmp_path / "out").iterdir()) == []


def test_results_of_other_inputs_are_not_mixed(saved, pictures, tmp_path, with_processor):
    out, busy, mine = (tmp_path / name for name in ("out", "busy", "mine"))
    only = {"only": ["attention_entropy"], "device": "cpu"}

    def refused(said, model=saved, output=out, settings=SETTINGS):
        with pytest.raises(UserError, match=said):
            analyze(model, pictures, output, settings=settings, **only)

    analyze(saved, pictures, out, settings=SETTINGS, **only)
    hidden = shutil.copytree(pictures, tmp_path / "token=3")  # files hide what looks like a token
    for measured in (only["only"], []):
        assert analyze(saved, hidden, tmp_path / "hidden", settings=SETTINGS, **only).measured == measured
    other = with_processor(FAMILIES["plain"].build("classification", seed=1))
    refused(r"attention_entropy of a run with other inputs \(model differ\); choose", other)
    edited = shutil.copytree(saved, tmp_path / saved.name) / "preprocessor_config.json"
    edited.write_text(edited.read_text().replace('"resample": 2', '"resample": 3'))
    refused(r"other inputs \(processor differ\)", edited.parent)
    between = {"only": ["cka_between"], "device": "cpu", "settings": SETTINGS, "output": tmp_path / "between"}
    analyze(saved, pictures, against=saved, **between)
    with pytest.raises(UserError, match=r"other inputs \(against_processor differ\)"):
        analyze(saved, pictures, against=edited.parent, **between)
    busy.mkdir()
    with lock_folder(busy):
        refused("another process is writing to", output=busy)
    refused(r"of a run with other inputs \(images, settings differ\)", settings=AnalysisSettings(num_images=4))
    mine.mkdir()
    (mine / "report.html").write_text("my own")
    refused("is not a report of hf-vit analyze; choose another --output, or move it", output=mine)
    (out / "attention_entropy.json").write_text('{"name": "something else"}')
    refused(r"attention_entropy.json was not written by this version of hf-vit analyze")


def test_what_cannot_be_done_is_said_before_any_work(saved, pictures, tmp_path, with_processor):
    out = tmp_path / "out"
    optimized = with_processor(optimize_for_inference(FAMILIES["plain"].build("classification"), engine="torch"))
    relative = with_processor(FAMILIES["plain"].build("classification", "relative"))
    for model, images, only, said in (
        (saved, pictures, "cka_between", r"cka_between cannot be applied: .* give --against MODEL"),
        (saved, make_images(3), "cka", r"at least 4 images, but got 3"),
        (optimized, pictures, "cka", r"is optimized for inference, so its layers cannot be read; give it as it was"),
        (optimized[0], pictures, "cka", r"the model is a \w+; give a path, a Hub id or, .* the pair \(model, image p"),
        (relative, pictures, "position_similarity", "the model has no additive position embeddings"),
    ):
        with pytest.raises(UserError, match=said):
            analyze(model, images, out, only=[only])
    diverged = FAMILIES["plain"].build("classification")
    torch.nn.init.constant_(diverged.classifier.weight, torch.nan)
    for against in (None, saved):
        with pytest.raises(UserError, match=r"has weights that are NaN or infinite, so it cannot be analyzed; use a"):
            analyze(against or with_processor(diverged), pictures, out, against=against and with_processor(diverged))
    torch.nn.init.constant_(diverged.classifier.weight, 3e38)
    for only in ("patch_permutation", "attention_rollout"):
        with pytest.raises(UserError, match="the model's outputs are NaN or infinite"):
            analyze(with_processor(diverged), pictures, only=[only])
    with pytest.raises(UserError, match=r"cka_batch_size=3 is too small"):
        AnalysisSettings(cka_batch_size=3)
    assert not out.exists()


def test_images_are_drawn_by_seed(pictures):
    one, again, other = (open_images(pictures, 4, seed=seed) for seed in (0, 0, 1))
    assert one.size == 4
    assert one.fingerprint == again.fingerprint != other.fingerprint
    read = [image.tobytes() for batch in one.batches(3) for image in batch]
    assert read == [again.read(index).tobytes() for index in range(4)]
    assert [len(batch) for batch in one.batches(3)] == [3, 1]
    assert [len(batch) for batch in one.batches(3, limit=2)] == [2]


def test_open_images_files_and_loaded_data(pictures):
    files = sorted(pictures.glob("[0-9].png"))
    opened = [Image.open(file) for file in files]
    of_files, of_images = open_images(map(str, files)), open_images(opened)
    assert of_files.fingerprint == of_images.fingerprint
    assert [of_files.read(index).tobytes() for index in range(9)] == [image.tobytes() for image in opened]
    assert open_images(opened[0]).fingerprint == open_images(opened[:1]).fingerprint
    with pytest.raises(UserError, match=r"there is no image none\.png"):
        open_images(["none.png"])
    scenes = load_data("scenes:images=40,size=32", target="mask")
    assert open_images(scenes, 2).size == 2
    digits = load_data("digits")
    loaded = open_images(digits, 8).fingerprint
    for other in (digits.splits["test"].select(range(359, -1, -1)), digits.splits["train"]):
        digits.splits["test"] = other
        assert open_images(digits, 8).fingerprint != loaded, "which is of the images that are drawn"
    with pytest.raises(UserError, match="the data is a Dataset; give a path"):
        open_images(scenes.split("test"))


def test_pictures_from_white_are_not_inverted(tmp_path):
    """As TIFF files of scanners are: 0 is white."""
    for name, value in (("dark", 65535), ("white", 0)):
        (tmp_path / "test" / name).mkdir(parents=True)
        scan = Image.fromarray(np.full((8, 8), value, np.uint16))
        scan.save(tmp_path / "test" / name / "scan.tif", tiffinfo={262: 0, 274: 1})
    images = open_images(tmp_path)
    colors = {name: images.read(index).getpixel((0, 0)) for index, name in enumerate(images.labels)}
    assert colors == {"dark": (0, 0, 0), "white": (255, 255, 255)}


def test_streams_are_read_again_by_every_pass(saved):
    stream = load_data("digits", streaming=True)
    first = [row["image"].tobytes() for row in itertools.islice(stream.split("test"), 7)]
    images = open_images(stream, 7)
    assert (images.name, images.split, images.size) == ("digits", "test", 7)
    assert "its first 7 images are used" in images.notes[-1]
    for limit in (7, 3, 7):  # a pass may stop early
        found = [image.tobytes() for batch in images.batches(4, limit) for image in batch]
        assert found == first[:limit]
    assert images.read(5).tobytes() == first[5]
    assert images.read(0).tobytes() == first[0]
    assert open_images(load_data("digits", streaming=True), 10**6).size == 360
    # The same images, whether they flow or lie there, give the same numbers.
    pictures = [row["image"] for row in itertools.islice(stream.split("test"), 7)]
    one, other = (analyze(saved, given, only=["attention_distance"], device="cpu") for given in (images, pictures))
    np.testing.assert_array_equal(one["attention_distance"]["distance"], other["attention_distance"]["distance"])


def test_a_folder_without_a_readable_image(tmp_path):
    (tmp_path / "one.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"none of the 1 images in .* can be read"):
        open_images(tmp_path)
    with pytest.raises(UserError, match="the list of images is empty"):
        open_images([])


# --- the command ---


@pytest.fixture(scope="module")
def axial(tmp_path_factory):
    folder = save_model(FAMILIES["axial"].build("classification"), tmp_path_factory.mktemp("axial") / "my-axial")
    write_card(folder)
    return folder


@pytest.fixture
def model(axial, tmp_path):
    """A copy of it, to write into."""
    return Path(shutil.copytree(axial, tmp_path / axial.name))


def typed(model, pictures, tmp_path, *more):
    sizes = ("--num-images", 8, "--num-pictures", 2, "--device", "cpu")
    return ["analyze", model, "--images", pictures, "--output", tmp_path / "out", *sizes, *more]


def test_a_run_and_its_repetition(model, pictures, tmp_path, command, monkeypatch):
    few = ("attention_distance", "attention_rollout", "cka", "cka_between")
    monkeypatch.setattr(api, "ANALYSES", {name: ANALYSES[name] for name in few})  # all there are, drawn sooner
    code, printed, err = command(*typed(model, pictures, tmp_path))
    assert code == 0
    assert "skipped 1 unreadable image: photos/broken.png" in err
    assert "did not run cka_between: it needs a second model" in printed
    (record,) = Facts.load(model).filter_kind("analysis")
    words = "my-axial --output out --images photos --num-images 8 --num-pictures 2 --device cpu"
    assert record.command == f"hf-vit analyze {words}"
    assert set(record.values["analyses"]) == set(few) - {"cka_between"}
    assert len(record.values["analyses"]["attention_distance"]["distance_px_by_layer"]) == 2
    assert record.values["skipped_images"] == 1
    assert (record.data.name, record.data.size, record.seed) == ("photos", 8, 0)
    assert str(tmp_path) not in (model / "facts.json").read_text()
    # The card shows the pictures, which lie beside the weights.
    card = (model / "README.md").read_text()
    for name in record.values["pictures"]:
        assert (model / name).read_bytes() == (tmp_path / "out" / name.removeprefix("analysis_")).read_bytes()
        assert (f"]({name})" in card) == ("rollout" not in name), "pictures of images are not shared unasked"
    assert "![Attention distance by depth, photos, 8 images](analysis_attention_distance.png)" in card
    # Nothing is left to do: nothing is recorded.
    code, printed, _ = command(*typed(model, pictures, tmp_path))
    assert (code, "attention_distance was already finished; its result is kept" in printed) == (0, True)
    assert len(Facts.load(model).records) == 1


def test_a_card_shows_no_pictures_of_earlier_weights(model, pictures, tmp_path, command):
    assert command(*typed(model, pictures, tmp_path, "--only", "cka"))[0] == 0
    assert "## Analysis" in write_card(model).read_text()
    append_record(model, make_record("training", values={}, command="hf-vit finetune"))
    assert "## Analysis" not in write_card(model).read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "colour"], "the analysis colour is unknown; choose from patch_filters"),
        (["--picture-format", "jpg"], "--picture-format jpg is unknown; use png or svg"),
        (["--against", "nowhere/at/all"], "there is no file or folder nowhere/at/all"),
        (["--rollout-identity", "1"], "rollout_identity=1.0 is out of range"),
    ],
)
def test_mistakes_end_in_one_line(model, pictures, tmp_path, fails, more, message):
    fails(typed(model, pictures, tmp_path, *more), f"hf-vit: {message}")
    assert not (tmp_path / "out").exists()


def test_a_stopped_run_says_how_it_goes_on(model, pictures, tmp_path, command, monkeypatch):
    stop = Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patched:
        patched.setattr(api, "load_model", stop)
        code, _, said = command(*typed(model, pictures, tmp_path))
    assert (code, said) == (130, "hf-vit: stopped; nothing is finished yet; run the same command again\n")
    monkeypatch.setattr(ANALYSES["cka"], "measure", stop)
    code, _, said = command(*typed(model, pictures, tmp_path, "--only", "attention_entropy", "--only", "cka"))
    assert (code, "run the same command again" in said) == (130, True)
    assert (tmp_path / "out/attention_entropy.json").is_file()


def test_a_run_killed_before_it_told_the_facts_tells_them_later(model, pictures, tmp_path, succeeds, monkeypatch):
    words = typed(model, pictures, tmp_path, "--only", "attention_entropy")
    with monkeypatch.context() as patched:
        patched.setattr("hf_vit.analysis.api.save_analyses", lambda *arguments, **options: None)
        succeeds(*words)
    (model / "README.md").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: Path(path) != model)  # read-only, but rights do not bind root
        assert "recorded" not in succeeds(*words)
    assert not (model / "README.md").exists()
    assert not Facts.load(model).filter_kind("analysis")
    for _ in range(2):
        succeeds(*words)
    (record,) = Facts.load(model).filter_kind("analysis")
    assert set(record.values["analyses"]) == {"attention_entropy"}
    assert record.seconds is None, "the killed run measured them"
    (model / "README.md").unlink()  # as if the kill had come between the record and the card
    succeeds(*words)
    assert "attention_entropy" in (model / "README.md").read_text()


def test_bare_models_of_transformers(pictures, tmp_path):
    """A checkpoint without a classifier, in half precision."""
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    folder = save_model(Dinov2Model(Dinov2Config(**tiny)).to(torch.bfloat16), tmp_path / "dino")
    found = analyze(folder, pictures, settings=AnalysisSettings(num_images=8), device="cpu")
    assert set(found) == set(ANALYSES) - {"cka_between", "shape_bias"}


# --- stages of a training ---


FOUR = AnalysisSettings(num_images=4, batch_size=4)
ONLY = ["attention_entropy", "cka"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Three checkpoints; the order of their steps is not that of their names."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for seed, step in enumerate((5, 20, 100)):
        save_model(FAMILIES["plain"].build("classification", seed=seed), folder / f"checkpoint-{step}")
    (folder / "checkpoint-200").mkdir()  # half-written
    (folder / "logs").mkdir()
    return folder


def test_numbers_are_those_of_every_checkpoint(checkpoints, pictures, tmp_path, monkeypatch):
    before = contents(checkpoints)
    out = tmp_path / "out"
    found = analyze_stages(checkpoints, pictures, out, only=ONLY, settings=FOUR, device="cpu")
    assert [(stage.name, stage.step) for stage in found.stages] == [(f"checkpoint-{n}", n) for n in (5, 20, 100)]
    assert set(found.numbers) == {"attention_entropy"}  # of CKA facts keep none
    for place, stage in enumerate(found.stages):
        alone = analyze(checkpoints / stage.name, pictures, only=ONLY, settings=FOUR, device="cpu")
        assert stage.fingerprint == alone.subject.fingerprint
        for analysis, numbers in found.numbers.items():
            assert {name: values[place] for name, values in numbers.items()} == alone.summaries[analysis]
    assert len({str(one) for one in found.numbers["attention_entropy"]["entropy_nats_by_layer"]}) == 3
    assert StagesDocument.model_validate_json((out / "stages.json").read_bytes()) == found
    assert contents(checkpoints) == before
    written = contents(out)
    assert {"stages_attention_entropy.png", "checkpoint-20/report.html", "report.html"} <= set(written)
    page = written["report.html"].decode()
    assert page.count('src="data:image/png;base64,') == 1
    assert 'href="checkpoint-100/report.html"' in page
    # Again: everything is kept, nothing changes.
    for name in ONLY:
        monkeypatch.setattr(ANALYSES[name], "measure", None)
    assert analyze_stages(checkpoints, pictures, out, only=ONLY, settings=FOUR, device="cpu") == found
    assert contents(out) == written


def test_lines_over_the_steps_are_named_as_in_the_plots_of_a_checkpoint(checkpoints, pictures, tmp_path):
    only = ["attention_entropy", "patch_permutation"]
    analyze_stages(checkpoints, pictures, tmp_path, only=only, settings=FOUR, device="cpu", picture_format="svg")
    entropy, permutation = (
        re.findall(r"<!-- ((?:layer|depth) \d+|\d+%) -->", (tmp_path / f"stages_{name}.svg").read_text())
        for name in only
    )
    assert entropy == ["layer 1", "layer 2"]
    assert permutation == ["depth 0", "depth 1", "depth 2", "10%", "25%", "50%", "75%", "100%"]


def test_folders_of_checkpoints(checkpoints, tmp_path):
    names = ["checkpoint-5", "checkpoint-20", "checkpoint-100"]
    assert [path.name for path in stage_folders(checkpoints)] == names
    assert [path.name for path in stage_folders(checkpoints.parent)] == names
    assert stage_folders(checkpoints / "checkpoint-5") == stage_folders("google/vit") == stage_folders(tmp_path) == []
    with pytest.raises(UserError, match="holds no checkpoint-<step> folders with weights"):
        analyze_stages(tmp_path, None, tmp_path / "out")


def test_checkpoints_by_command(checkpoints, pictures, tmp_path, succeeds):
    printed = succeeds(*typed(checkpoints, pictures, tmp_path, "--only", "attention_entropy"))
    stages = [line for line in printed.splitlines() if line.endswith(":")]
    assert stages == [f"checkpoint-{step}:" for step in (5, 20, 100)]
    assert (tmp_path / "out" / "stages_attention_entropy.png").is_file()
    assert not (checkpoints / "checkpoint-5" / "facts.json").exists()


class AppleTensor(torch.Tensor):
    """A tensor that refuses float64, as those on Apple's GPUs, until it is moved to the CPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.cpu:
            return output.as_subclass(torch.Tensor)
        if isinstance(output, cls) and output.dtype == torch.float64:
            raise TypeError(f"{func} made float64")
        return output


def test_apple_gpus_need_no_float64(pictures, with_processor):
    model, processor = with_processor(FAMILIES["plain"].build("classification"))
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_hook(lambda module, inputs, output: output.as_subclass(AppleTensor))
    assert predict((model, processor), pictures, skip_bad_images=True)
    only = ["patch_permutation", "attention_distance", "equivariance", "cka"]
    assert analyze((model, processor), make_images(9), only=only, settings=SETTINGS)


@pytest.mark.gpu
def test_a_gpu_gives_the_numbers_of_the_cpu(saved, pictures):
    cpu, gpu = (analyze(saved, pictures, settings=SETTINGS, device=device) for device in ("cpu", "cuda"))
    for name in cpu:
        for array in cpu[name]:
            np.testing.assert_allclose(gpu[name][array], cpu[name][array], rtol=1e-3, atol=1e-4)
