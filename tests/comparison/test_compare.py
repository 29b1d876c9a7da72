"""`compare` and `hf-vit compare`: files, resuming, errors before any work, facts."""

import csv
import json
from dataclasses import replace

import pytest
from comparison import zoo
from evaluation.tiny import NAMES, make_classifier, make_images, make_processor

from hf_vit.comparison import ComparisonSettings, ModelResult, SpeedResult, api, compare, save_comparison
from hf_vit.data import ImageData
from hf_vit.errors import UserError
from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

FEW = ComparisonSettings(corruptions=("contrast",), epsilons=(4.0,), robustness_images=8, speed_turns=0)


def run(saved, data, output, *kinds, **options):
    options = {"settings": FEW, "progress": False, **options}
    return compare([saved.source(kind) for kind in kinds], data, output, **options)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_at_once_do_not_mix_and_the_same_inputs_give_the_same_files(saved, data, tmp_path, monkeypatch):
    """The second, of other settings, comes while the first has found an empty folder and measures."""
    measure, refused = api.measure_model, []

    def meet(*arguments, **options):
        monkeypatch.undo()
        with pytest.raises(UserError) as raised:
            run(saved, data, tmp_path, "vit", "igpt", probe=True, settings=replace(FEW, robustness_images=4))
        refused.append(str(raised.value))
        return measure(*arguments, **options)

    monkeypatch.setattr(api, "measure_model", meet)
    first = run(saved, data, tmp_path, "swin", "igpt", probe=True)
    assert refused == [f"another process is writing to {tmp_path}; wait until it is done, or choose another"]
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
    done = run(
        saved, data, tmp_path, "resnet", "regnet", settings=ComparisonSettings(**{**FEW.__dict__, "speed_turns": 2})
    )
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
    header, rule, first, *_ = (tmp_path / "comparison.md").read_text().splitlines()
    assert header.startswith("| model | kind | judged by | px | parameters | FLOPs | top-1 (%) |")
    assert header.count("|") == rule.count("|") == first.count("|")
    assert f"{100 * done.results[0].top1.value:.2f} [" in first
    page = (tmp_path / "comparison.html").read_text()
    assert "<td>regnet</td>" in page
    assert "data:image/png;base64," in page
    assert 'src="http' not in page


def test_a_stopped_run_goes_on_by_model(saved, data, tmp_path, monkeypatch):
    measure = api.measure_model

    def stop(subject, *arguments, **options):
        if subject.name == "regnet":
            raise KeyboardInterrupt
        return measure(subject, *arguments, **options)

    monkeypatch.setattr(api, "measure_model", stop)
    with pytest.raises(KeyboardInterrupt):
        run(saved, data, tmp_path, "resnet", "regnet")
    assert set(contents(tmp_path)) == {"models/resnet.json"}
    before = (tmp_path / "models/resnet.json").stat().st_mtime_ns
    monkeypatch.setattr(api, "measure_model", measure)
    told = []
    done = run(saved, data, tmp_path, "resnet", "regnet", report=told.append)
    assert told == ["resnet: kept, it was finished before", "regnet: measured"]
    assert done.measured == ["regnet"]
    assert (tmp_path / "models/resnet.json").stat().st_mtime_ns == before


def test_a_run_killed_before_it_told_the_facts_tells_them_when_it_goes_on(data, tmp_path):
    names = list(NAMES)
    folder, other = (zoo.save("vit", tmp_path / name, names) for name in ("one", "two"))
    settings = ComparisonSettings(corruptions=(), epsilons=(), speed_turns=0)

    def again():
        return compare([folder, other], data, tmp_path / "out", settings=settings, device="cpu", progress=False)

    again()
    assert save_comparison(again()) == ["one", "two"]
    assert save_comparison(again()) == []
    assert len(Facts.load(folder).of_kind("benchmark")) == 1


def test_speed_is_kept_for_the_same_models_in_the_same_order(saved, data, tmp_path):
    settings = ComparisonSettings(corruptions=(), epsilons=(), speed_turns=1)
    first = run(saved, data, tmp_path, "resnet", "igpt", settings=settings, probe=True)
    again = run(saved, data, tmp_path, "resnet", "igpt", settings=settings, probe=True)
    assert again.speed == first.speed
    turned = run(saved, data, tmp_path, "igpt", "resnet", settings=settings, probe=True)
    assert turned.measured == []
    assert list(turned.speed.rows) == ["igpt", "resnet"]


@pytest.mark.parametrize("change", ["settings", "processor", "weights"])
def test_results_of_other_inputs_are_not_mixed(change, saved, data, tmp_path):
    folders = [zoo.save(kind, tmp_path / kind, NAMES) for kind in ("resnet", "regnet")]
    options = {"settings": FEW, "progress": False}
    compare(folders, data, tmp_path / "out", **options)
    if change == "settings":
        options["settings"] = replace(FEW, severity=2)
    elif change == "processor":
        changed = zoo.processor()
        changed.image_std = [0.5, 0.5, 0.5]
        changed.save_pretrained(folders[0])
    else:
        zoo.enliven(zoo.TRANSFORMERS["resnet"](NAMES)).save_pretrained(folders[0])
    fields = "settings" if change == "settings" else "model"
    with pytest.raises(UserError, match=rf"resnet.json was measured with other inputs \({fields}\)"):
        compare(folders, data, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["vit"], "a comparison needs at least two models"),
        (["vit", "vit"], "vit is given twice"),
        (["vit", "nowhere"], "there is no folder nowhere"),
        (["vit", "timm:nowhere"], "timm:nowhere cannot be loaded"),
        (["vit", "igpt"], "igpt: it has no head with named classes; or let a linear probe answer"),
        (["vit", "other"], r"other: the data has classes the model does not know.* a linear probe answer \(--probe\)"),
    ],
)  # fmt: skip
def test_mistakes_come_before_any_work(kinds, message, saved, data, tmp_path, monkeypatch):
    if "other" in kinds and not (saved.root / "other").exists():
        make_classifier(["x", "y"]).save_pretrained(saved.root / "other")
        zoo.processor().save_pretrained(saved.root / "other")
    monkeypatch.setattr(api, "measure_model", None)
    sources = [kind if "nowhere" in kind else saved.source(kind) for kind in kinds]
    with pytest.raises(UserError, match=message):
        compare(sources, data, tmp_path / "out", settings=FEW, progress=False)
    assert not (tmp_path / "out").exists()


def test_settings_and_data_that_do_not_fit_are_refused_before_any_work(saved, data, tmp_path, monkeypatch, capsys):
    for changes, message in (
        ({"corruptions": ("rain",)}, "there is no corruption rain"),
        ({"severity": 6}, "severity 6 is not known"),
        ({"epsilons": (0.0,)}, "must be above 0"),
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"speed_turns": -1}, "speed_turns -1"),
    ):
        with pytest.raises(UserError, match=message):
            ComparisonSettings(**changes)
    monkeypatch.setattr(api, "measure_model", None)
    alone = ImageData("colours", "", {"test": data.split("test")}, data.label_names)
    with pytest.raises(UserError, match="has no split 'train'"):
        run(saved, alone, tmp_path / "out", "vit", "igpt", probe=True)
    words = ("--data", "digits", "--output", tmp_path / "out")
    assert typed("compare", saved.source("vit"), "nowhere/at/all", *words) == 1
    error = capsys.readouterr().err
    assert error.startswith("hf-vit: there is no folder nowhere/at/all")
    assert len(error.splitlines()) == 1


def test_built_in_images_of_another_size_are_other_inputs(tmp_path):
    settings = replace(FEW, corruptions=(), epsilons=())
    for name, seed in (("a", 0), ("b", 1)):
        make_classifier([str(digit) for digit in range(10)], seed=seed).save_pretrained(tmp_path / name)
        make_processor().save_pretrained(tmp_path / name)
    sources, options = [tmp_path / "a", tmp_path / "b"], {"settings": settings, "progress": False}
    done = compare(sources, "digits", tmp_path / "out", **options)
    assert done.data.split("test")[0]["image"].size == (8, 8), "the size that both models want"
    assert done.results[0].inputs.settings["image_size"] == [8, 8]
    with pytest.raises(UserError, match=r"a.json was measured with other inputs \(settings\)"):
        compare(sources, "digits", tmp_path / "out", image_size=(16, 16), **options)


@pytest.fixture
def class_folders(tmp_path):
    for split, count in (("train", 6), ("val", 3), ("test", 4)):
        for place, name in enumerate(NAMES):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            for index, image in enumerate(make_images(count, seed=10 * place + len(split))):
                image.save(tmp_path / "pets" / split / name / f"{index}.png")
    return tmp_path / "pets"


def typed(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def test_the_command(saved, class_folders, tmp_path, capsys):
    folders = [zoo.save("vit", tmp_path / name / "model", NAMES) for name in ("a", "b")]
    zoo.save("vit", tmp_path / "b/model", list(reversed(NAMES)))
    names = (*folders, saved.source("efficientnet"))
    options = ["--data", class_folders, "--output", tmp_path / "out", "--corruption", "contrast", "--epsilon", "2"]
    sizes = ["--robustness-images", 6, "--speed-turns", 1, "--device", "cpu"]
    assert typed("compare", *names, *options, *sizes) == 0
    printed = capsys.readouterr().out
    assert "a/model: measured\nb/model: measured\nefficientnet: measured\nspeed: measured\n" in printed
    assert "recorded in facts.json of a/model, b/model" in printed
    assert {path.name for path in (tmp_path / "out/models").iterdir()} == {
        "a--model.json",
        "b--model.json",
        "efficientnet.json",
    }
    (record,) = Facts.load(folders[0]).of_kind("benchmark")
    stored = ModelResult.model_validate_json((tmp_path / "out/models/a--model.json").read_bytes())
    assert record.values["top1"]["value"] == stored.top1.value
    assert record.values["compared_with"] == ["b/model", "efficientnet"]
    assert record.command.startswith("hf-vit compare model model timm:efficientnet --data pets --output out")
    assert (record.data.name, record.data.split, record.data.size) == ("pets", "test", 24)
    assert str(tmp_path) not in (folders[0] / "facts.json").read_text()
    # Nothing is left to do: nothing is recorded.
    assert typed("compare", *names, *options, *sizes) == 0
    assert "a/model: kept, it was finished before" in capsys.readouterr().out
    assert len(Facts.load(folders[0]).records) == 1


def test_a_stopped_command_says_how_it_goes_on(saved, class_folders, capsys, tmp_path, monkeypatch):
    measure, out = api.measure_model, tmp_path / "out"
    stops = []

    def stop(subject, *arguments, **options):
        if subject.name in stops:
            raise KeyboardInterrupt
        return measure(subject, *arguments, **options)

    monkeypatch.setattr(api, "measure_model", stop)
    sources = [saved.source(kind) for kind in ("vit", "swin")]
    for name, said in (
        ("vit", "nothing is finished yet; start again with the same command"),
        ("swin", f"what is finished is in {out}, the same command goes on from it"),
    ):
        stops[:] = [name]
        assert typed("compare", *sources, "--data", class_folders, "--output", out, "--no-robustness") == 130
        assert f"hf-vit: stopped; {said}\n" in capsys.readouterr().err
