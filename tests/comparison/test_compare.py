"""`compare` and `hf-vit compare`: every kind of model as its library answers; files, resuming, refusals, facts."""

import csv
import json
import math
import os
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comparison import zoo
from data.conftest import make_folder
from evaluation.tiny import NAMES, fit_probe, make_classifier, make_images, make_processor, save_ours
from training.conftest import save_model

from hf_vit.comparison import ComparisonSettings, ModelResult, SpeedResult, api, compare, save_comparison
from hf_vit.comparison.api import (
    HEAD,
    PROBE,
    ProbedForImageClassification,
    choose_classifier,
    describe_inputs,
    estimate_share,
    measure_model,
)
from hf_vit.cost import forward_flops
from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.evaluation.examination import Examination
from hf_vit.families import FAMILIES
from hf_vit.loading import load_model, load_models
from hf_vit.loading.folders import ImageGPTFeatures
from hf_vit.loading.outputs import compute_pre_logits
from hf_vit.results.facts import Facts

FEW = ComparisonSettings(corruptions=("contrast",), epsilons=(4.0,), robustness_images=8, speed_turns=0)


def run(saved, data, output, *kinds, **options):
    options = {"settings": FEW, "progress": False, **options}
    return compare([saved.source(kind) for kind in kinds], data, output, **options)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_of_somebody_else_is_kept(saved, data, tmp_path):
    (tmp_path / "comparison.csv").write_text("my own")
    with pytest.raises(UserError, match=r"comparison\.csv is not a result of hf-vit compare; choose another --output"):
        run(saved, data, tmp_path, "swin", "igpt", probe=True)
    assert (tmp_path / "comparison.csv").read_text() == "my own"


def test_two_at_once_do_not_mix_and_the_same_inputs_give_the_same_files(saved, data, tmp_path, monkeypatch):
    """The second, of other settings, comes while the first has found an empty folder and measures."""
    measure, refused = api.measure_model, []

    def meet(*arguments, **options):
        monkeypatch.undo()
        with pytest.raises(UserError, match=f"another process is writing to {tmp_path}; wait until it has finished"):
            run(saved, data, tmp_path, "vit", "igpt", probe=True, settings=replace(FEW, robustness_images=4))
        refused.append(True)
        return measure(*arguments, **options)

    monkeypatch.setattr(api, "measure_model", meet)
    first = run(saved, data, tmp_path, "swin", "igpt", probe=True)
    assert refused == [True]
    assert first.measured == ["swin", "igpt"]
    assert not run(saved, data, tmp_path, "swin", "igpt", probe=True).measured
    run(saved, data, tmp_path / "again", "swin", "igpt", probe=True)
    found = contents(tmp_path / "again")
    assert set(found) == {
        *(f"models/{kind}.json" for kind in ("swin", "igpt")),
        *(f"comparison.{kind}" for kind in ("md", "csv", "json", "png", "html")),
    }
    assert found == {name: content for name, content in contents(tmp_path).items() if not name.startswith("again")}


def test_tables_hold_what_was_measured(saved, data, tmp_path):
    done = run(saved, data, tmp_path, "resnet", "regnet", settings=replace(FEW, speed_turns=2))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert [ModelResult.model_validate(model) for model in stored["models"]] == done.results
    assert SpeedResult.model_validate(stored["speed"]) == done.speed
    with (tmp_path / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, result in zip(rows, done.results, strict=True):
        assert float(row["top1"]) == result.top1.value
        assert float(row["corrupted_contrast"]) == result.corruptions["contrast"]
        assert float(row["fgsm_4"]) == result.fgsm["4"]
        assert float(row["peak_memory"]) == done.speed.rows[result.name].peak_memory > 0
    assert done.speed.rows["resnet"].times_as_fast.median == 1
    header, rule, first, *rest = (tmp_path / "comparison.md").read_text().splitlines()
    assert any("8 images were corrupted (severity 3) and attacked (FGSM, epsilon in 1/255); " in line for line in rest)
    assert header.startswith("| model | kind | judged by | px | parameters | FLOPs | top-1 (%) |")
    assert header.count("|") == rule.count("|") == first.count("|")
    assert f"{100 * done.results[0].top1.value:.2f} [" in first
    page = (tmp_path / "comparison.html").read_text()
    assert "<td>regnet</td>" in page
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    attacked = [result.model_copy(update={"fgsm": {str(size): 0.5 for size in range(12)}}) for result in done.results]
    panel = api.draw_comparison(attacked, done.speed).axes[2]
    assert [line.get_label() for line in panel.lines][1:] == ["corrupted", *(f"FGSM {size}/255" for size in range(12))]


def test_a_run_killed_before_it_told_the_facts_tells_them_when_it_goes_on(data, tmp_path, monkeypatch):
    names = list(NAMES)
    folder, other = (zoo.save("vit", tmp_path / name, names) for name in ("one", "two"))
    settings = ComparisonSettings(corruptions=(), epsilons=(), speed_turns=0)

    def again():
        return compare([folder, other], data, tmp_path / "out", settings=settings, device="cpu", progress=False)

    again()
    done = again()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # as of folders of others; rights do not bind root
        assert save_comparison(done) == []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)  # but it was not used
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="A", total_memory=0))
        assert save_comparison(done) == ["one", "two"]
    assert Facts.load(folder).records[-1].hardware["device"] == "cpu"
    assert save_comparison(again()) == []
    with pytest.raises(UserError, match="none' does not exist"):
        compare([folder, other], tmp_path / "none", tmp_path / "other", device="cpu")
    assert len(Facts.load(folder).filter_kind("benchmark")) == 1


def test_speed_is_kept_for_the_same_models_in_the_same_order(saved, data, tmp_path):
    compared = partial(run, saved, data, tmp_path, settings=ComparisonSettings((), epsilons=(), speed_turns=1))
    first = compared("resnet", "vit")
    assert compared("resnet", "vit").speed == first.speed
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 4096, "others_load": 7777}))
    assert compared("resnet", "vit").speed.others_load < 7777
    turned = compared("vit", "resnet")
    assert turned.measured == []
    assert list(turned.speed.rows) == ["vit", "resnet"]


@pytest.mark.parametrize("change", ["settings", "processor", "weights"])
def test_results_of_other_inputs_are_not_mixed(change, data, tmp_path):
    names = {"resnet": "resnet", "regnet": "token=3"}  # files hide what looks like a token
    folders = [zoo.save(kind, tmp_path / name, NAMES) for kind, name in names.items()]
    options = {"settings": replace(FEW, speed_turns=1), "progress": False}
    for measured in (list(names.values()), []):
        assert compare(folders, data, tmp_path / "out", **options).measured == measured
    if change == "settings":
        options["settings"] = replace(FEW, severity=2)
    elif change == "processor":
        changed = zoo.processor()
        changed.image_std = [0.5, 0.5, 0.5]
        changed.save_pretrained(folders[0])
    else:
        zoo.enliven(zoo.TRANSFORMERS["resnet"](NAMES)).save_pretrained(folders[0])
    fields = "settings" if change == "settings" else "model"
    with pytest.raises(UserError, match=rf"resnet.json was measured with other inputs \({fields} differ\)"):
        compare(folders, data, tmp_path / "out", **options)


def test_results_of_optimized_models_are_not_those_of_the_models_as_loaded(data, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        save_ours(folder)
    settings = ComparisonSettings(corruptions=(), epsilons=(), speed_turns=0, batch_size=np.int64(8))

    def run_again(**options):
        return compare(folders, data, tmp_path / "out", settings=settings, progress=False, **options)

    assert run_again(optimize=True).measured == ["one", "two"]
    assert run_again(optimize=True).measured == []
    with pytest.raises(UserError, match=r"one.json was measured with --optimize; add --optimize, choose another"):
        run_again()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["vit"], "a comparison needs at least two models"),
        (["vit", "vit"], "vit was given twice"),
        (["vit", "nowhere"], "there is no file or folder nowhere"),
        (["vit", "timm:nowhere"], "timm:nowhere cannot be loaded"),
        (["vit", "igpt"], "igpt has no class names; give a classifier that has them; or add --probe"),
        (["vit", "other"], r"other cannot be compared: the data has classes .* or add --probe"),
    ],
)  # fmt: skip
def test_mistakes_come_before_any_work(kinds, message, saved, data, tmp_path, monkeypatch):
    if "other" in kinds and not (saved.root / "other").exists():
        save_model(make_classifier(["x", "y"]), saved.root / "other")
    monkeypatch.setattr(api, "measure_model", None)
    sources = [kind if "nowhere" in kind else saved.source(kind) for kind in kinds]
    with pytest.raises(UserError, match=message):
        compare(sources, data, tmp_path / "out", settings=FEW, progress=False)
    assert not (tmp_path / "out").exists()


def test_settings_and_data_that_do_not_fit_are_refused_before_any_work(saved, data, tmp_path, monkeypatch):
    for changes, message in (
        ({"corruptions": ("rain",)}, "corruption rain is unknown"),
        ({"severity": 6}, "severity 6 is out of range"),
        ({"epsilons": (0.0,)}, "are not all above 0"),
        ({"batch_size": 0}, "batch_size is 0, but at least 1 is needed"),
        ({"speed_turns": -1}, "speed_turns is -1"),
    ):
        with pytest.raises(UserError, match=message):
            ComparisonSettings(**changes)
    monkeypatch.setattr(api, "measure_model", None)
    alone = ImageData("colours", "", {"test": data.split("test")}, data.label_names)
    with pytest.raises(UserError, match="has no split 'train'"):
        run(saved, alone, tmp_path / "out", "vit", "igpt", probe=True)
    with pytest.raises(UserError, match="--image-size only works with built-in data"):
        run(saved, alone, tmp_path / "out", "vit", "igpt", image_size=(16, 16))


def test_built_in_images_of_another_size_are_other_inputs(tmp_path):
    settings = replace(FEW, corruptions=(), epsilons=())
    for name, seed in (("a", 0), ("b", 1)):
        save_model(make_classifier([str(digit) for digit in range(10)], seed=seed), tmp_path / name)
    sources, options = [tmp_path / "a", tmp_path / "b"], {"settings": settings, "progress": False}
    done = compare(sources, "digits", tmp_path / "out", **options)
    assert done.data.split("test")[0]["image"].size == (8, 8), "the size that both models want"
    assert done.results[0].inputs.settings["image_size"] == [8, 8]
    with pytest.raises(UserError, match=r"a.json was measured with other inputs \(settings differ\)"):
        compare(sources, "digits", tmp_path / "out", image_size=(16, 16), **options)


@pytest.fixture
def class_folders(tmp_path):
    for seed, (split, count) in enumerate({"train": 6, "val": 3, "test": 4}.items()):
        make_folder(tmp_path / "pets" / split, dict.fromkeys(NAMES, count), seed=100 * seed)
    return tmp_path / "pets"


def test_the_command(saved, class_folders, tmp_path, succeeds):
    folders = [zoo.save("vit", tmp_path / name / "model", NAMES) for name in ("a", "b")]
    zoo.save("vit", tmp_path / "b/model", list(reversed(NAMES)))
    names = (*folders, saved.source("efficientnet"))
    options = ["--data", class_folders, "--output", tmp_path / "out", "--corruption", "contrast", "--epsilon", "2"]
    sizes = ["--robustness-images", 6, "--speed-turns", 1, "--device", "cpu"]
    printed = succeeds("compare", *names, *options, *sizes)
    assert "a/model: measured\nb/model: measured\nefficientnet: measured\nspeed: measured\n" in printed
    assert "recorded in facts.json of a/model, b/model" in printed
    written = {path.name for path in (tmp_path / "out/models").iterdir()}
    assert written == {"a--model.json", "b--model.json", "efficientnet.json"}
    (record,) = Facts.load(folders[0]).filter_kind("benchmark")
    stored = ModelResult.model_validate_json((tmp_path / "out/models/a--model.json").read_bytes())
    assert record.values["top1"]["value"] == stored.top1.value
    assert record.values["compared_with"] == ["b/model", "efficientnet"]
    assert record.command.startswith("hf-vit compare model model timm:efficientnet --data pets --output out")
    assert (record.data.name, record.data.split, record.data.size) == ("pets", "test", 24)
    assert str(tmp_path) not in (folders[0] / "facts.json").read_text()
    # Nothing is left to do: nothing is recorded.
    assert "a/model: already measured, using the stored result" in succeeds("compare", *names, *options, *sizes)
    assert len(Facts.load(folders[0]).records) == 1


def test_a_stopped_command_goes_on_by_model(saved, class_folders, command, tmp_path, monkeypatch):
    measure, out, stops = api.measure_model, tmp_path / "out", []

    def stop(loaded, *arguments, **options):
        if loaded.name in stops:
            raise KeyboardInterrupt
        return measure(loaded, *arguments, **options)

    monkeypatch.setattr(api, "measure_model", stop)
    sources = [saved.source(kind) for kind in ("vit", "swin")]
    words = ("compare", *sources, "--data", class_folders, "--output", out, "--no-robustness", "--speed-turns", 0)
    for name, said in (
        ("vit", "nothing is finished yet; run the same command again"),
        ("swin", f"finished parts are in {out}; run the same command again to continue"),
    ):
        stops[:] = [name]
        code, _, told = command(*words)
        assert (code, f"hf-vit: stopped; {said}\n" in told) == (130, True)
    assert set(contents(out)) == {"models/vit.json"}
    before, stops[:] = (out / "models/vit.json").stat().st_mtime_ns, []
    code, printed, _ = command(*words)
    assert (code, "vit: already measured, using the stored result\nswin: measured\n" in printed) == (0, True)
    assert (out / "models/vit.json").stat().st_mtime_ns == before


# What is measured of each kind

SETTINGS = ComparisonSettings(corruptions=("contrast",), epsilons=(8.0,), robustness_images=None, speed_turns=0)
MEAN, STD = (torch.tensor(zoo.SCALE[name])[:, None, None] for name in ("image_mean", "image_std"))


def library_model(saved, kind):
    """The saved model as its own library loads it; timm's weights are read by hand."""
    if kind in zoo.TIMM:
        import timm
        from safetensors.torch import load_file

        architecture, fields = zoo.TIMM[kind]
        model = timm.create_model(architecture, num_classes=len(NAMES), **fields)
        model.load_state_dict(load_file(saved.folder(kind) / "model.safetensors"))
        return model.eval()
    from transformers import AutoModelForImageClassification

    return AutoModelForImageClassification.from_pretrained(saved.folder(kind)).eval()


def pixels_of(data, side=zoo.SIDE):
    """The test images in 0..1, resized as both libraries' processors do here: bilinear or bicubic, by Pillow."""
    from PIL import Image

    images = [image.resize((side, side), Image.Resampling.BILINEAR) for image in data.split("test")["image"]]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 255


def answers(model, values):
    output = model(values)
    return getattr(output, "logits", output)


def measured(saved, data, kind, probe=False, **changes):
    subject, settings = load_model(saved.source(kind)), replace(SETTINGS, **changes)
    inputs = describe_inputs(subject, choose_classifier(subject, data, probe), data, "test", settings)
    return subject, measure_model(subject, data, inputs, settings, progress=False)


@pytest.mark.parametrize("kind", [*zoo.TRANSFORMERS, *zoo.TIMM])
def test_a_kind_as_its_library_answers(kind, saved, data):
    subject, result = measured(saved, data, kind)
    reference, truth = library_model(saved, kind), torch.tensor(data.split("test")["label"])
    with torch.no_grad():
        logits = answers(reference, subject.prepare(data.split("test")["image"])).double()
    best = logits.argsort(dim=1, descending=True) == truth[:, None]
    assert result.top1.value == pytest.approx(float(best[:, 0].double().mean()))
    assert result.top5.value == pytest.approx(float(best[:, :5].any(dim=1).double().mean()))
    assert result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, truth)), rel=1e-4)
    assert result.clean == result.top1.value
    assert set(result.corruptions) == {"contrast"}
    assert result.parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert (result.image_size, result.inputs.model.judged_by) == ((zoo.SIDE, zoo.SIDE), HEAD)
    assert result.inputs.model.kind == (type(reference).__name__ if kind in zoo.TIMM else reference.config.model_type)


def test_every_family_of_the_package_is_among_the_kinds():
    assert {"vit" if name == "plain" else name for name in FAMILIES} <= {*zoo.TRANSFORMERS, *zoo.TIMM}


def test_images_are_prepared_as_by_hand(saved, data):
    models = load_models([saved.source("vit"), saved.source("swin")])
    for subject in models:
        prepared = subject.prepare(data.split("test")["image"])
        assert torch.allclose(prepared * STD + MEAN, pixels_of(data), atol=1.01 / 255)


@pytest.mark.parametrize("kind", ["bit", "coatnet"])
def test_fgsm_as_by_hand(kind, saved, data):
    """In the model's own units: a step of epsilon / std, cut where a pixel would leave black and white."""
    subject, result = measured(saved, data, kind, epsilons=(8.0, 8.0))  # as an option that is given twice
    reference, truth = library_model(saved, kind), torch.tensor(data.split("test")["label"])
    values = subject.prepare(data.split("test")["image"]).requires_grad_()
    torch.nn.functional.cross_entropy(answers(reference, values), truth, reduction="sum").backward()
    moved = values.detach() + 8 / 255 / STD * values.grad.sign()
    moved = torch.minimum(torch.maximum(moved, -MEAN / STD), (1 - MEAN) / STD)
    with torch.no_grad():
        hits = answers(reference, moved).argmax(dim=1) == truth
    assert result.fgsm == {"8": pytest.approx(float(hits.double().mean()), abs=1 / 24 + 1e-9)}


def test_flops_as_the_configuration_tells(saved, data):
    for kind in ("vit", "hybrid", "axial", "axial_resnet"):
        subject, result = measured(saved, data, kind, corruptions=(), epsilons=())
        assert result.flops == pytest.approx(forward_flops(subject.model.config), rel=0.01)
        assert (result.clean, result.corruptions, result.fgsm) == (None, {}, None)


def test_wilsons_interval_in_closed_form():
    z, images, hits = 1.959963984540054, 24, 3
    middle = (hits + z**2 / 2) / (images + z**2)
    half = z / (images + z**2) * math.sqrt(hits * (images - hits) / images + z**2 / 4)
    found = estimate_share(hits, images)
    assert (found.value, found.low, found.high) == pytest.approx((hits / images, middle - half, middle + half))


def test_image_gpt_by_its_middle_layer_and_a_probe(saved, data, tmp_path):
    """Against the whole model: the input of the middle block, normed by it, averaged over the pixels."""
    from transformers import AutoImageProcessor, ImageGPTModel

    subject = load_model(saved.source("igpt"))
    images = list(data.split("test")["image"])
    whole = ImageGPTModel.from_pretrained(saved.folder("igpt")).eval()
    tokens = AutoImageProcessor.from_pretrained(saved.folder("igpt"))(images=images, return_tensors="pt")
    with torch.no_grad():
        states = whole(**tokens, output_hidden_states=True).hidden_states
        expected = whole.h[2].ln_1(states[2]).mean(dim=1)
        found = compute_pre_logits(subject.model, subject.prepare(images))
        given = ImageGPTFeatures(whole, subject.model.clusters, (8, 8))(subject.prepare(images))
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(given, expected, atol=1e-6)
    assert len(whole.h) == 4, "the model that was given is left as it was"
    _, result = measured(saved, data, "igpt", probe=True)
    assert (result.inputs.model.judged_by, result.fgsm, set(result.corruptions)) == (PROBE, None, {"contrast"})
    assert result.notes[-1] == "the model was not attacked, because its color quantization has no gradient"
    assert result.clean == result.top1.value
    folder = zoo.save_image_gpt(tmp_path / "small")
    AutoImageProcessor.from_pretrained(folder, size={"height": 16, "width": 16}).save_pretrained(folder)
    with pytest.raises(UserError, match=r"makes 16x16 px, but this ImageGPT takes 64"):
        load_models([str(folder), saved.source("vit")])


@pytest.mark.parametrize(("missing", "classes"), [(None, 6), (5, 6), (None, 2)])
def test_a_probe_answers_as_scikit_learn(missing, classes, saved, data):
    splits = {name: table.filter(lambda row: row["label"] < classes) for name, table in data.splits.items()}
    splits["train"] = splits["train"].filter(lambda row: row["label"] != missing)
    data = ImageData("colours", "", splits, data.label_names[:classes])
    subject = load_model(saved.source("swin"))
    examination = Examination(subject, data, progress=False)
    head, strength = api.fit_probe(examination)
    model = ProbedForImageClassification(subject.model, head, data.label_names)
    with torch.no_grad():
        found = model(subject.prepare(data.split("test")["image"])).softmax(dim=1)
    probe = fit_probe(*examination.features("train"), strength)
    expected = probe.predict_proba(examination.features("test")[0])
    assert found[:, probe.classes_].numpy() == pytest.approx(expected, abs=1e-4)
    assert missing is None or not found[:, missing].any()


@pytest.mark.parametrize("knows_all", [True, False])
def test_a_probe_that_never_saw_a_class_has_no_loss(knows_all, saved, data):
    missing = None if knows_all else data.split("test")["label"][0]
    train = data.split("train").filter(lambda row: row["label"] != missing)
    data = ImageData("colours", "", {**data.splits, "train": train}, data.label_names)
    subject = load_model(saved.source("swin"))
    settings = replace(SETTINGS, corruptions=(), epsilons=())
    found = measure_model(
        subject, data, describe_inputs(subject, PROBE, data, "test", settings), settings, progress=False
    )
    assert (found.loss is not None) == knows_all
    assert found.loss is None or found.loss < 100


def test_timm_by_folder_and_by_file(saved, data, tmp_path):
    folder = saved.folder("efficientnet")
    sources = [str(folder), f"timm:test_efficientnet@{folder / 'model.safetensors'}"]
    pixel_values = torch.rand(2, 3, zoo.SIDE, zoo.SIDE)
    by_folder, by_file = load_models(sources)
    assert by_file.name == "timm:test_efficientnet@model.safetensors", "without folders, which results do not keep"
    pictures = make_images(2)
    prepare = pickle.loads(pickle.dumps(by_file.prepare))  # as workers that are not forked
    assert torch.equal(prepare(pictures), by_file.prepare(pictures))
    with torch.no_grad():
        assert torch.equal(by_folder.model(pixel_values), by_file.model(pixel_values))
        body = {name: value for name, value in by_file.model.state_dict().items() if not name.startswith("classifier.")}
        torch.save(body, tmp_path / "body.pth")
        features = load_model(f"timm:test_efficientnet@{tmp_path / 'body.pth'}").model(pixel_values)
        assert torch.equal(features, compute_pre_logits(by_file.model, pixel_values))
    with pytest.raises(UserError, match="has no class names; give a classifier that has them; or add --probe"):
        choose_classifier(by_file, data, probe=False)
    for mistake in ("test_efficientnet@nowhere.pth", "test_resnet@" + sources[1].partition("@")[2]):
        with pytest.raises(UserError, match="cannot be loaded"):
            load_models([f"timm:{mistake}", sources[0]])


def test_models_of_one_class_from_python_are_numbered():
    pairs = [(make_classifier(NAMES, seed=seed), make_processor()) for seed in range(2)]
    assert [loaded.name for loaded in load_models(pairs)] == [f"ViTForImageClassification{end}" for end in ("", " #2")]
