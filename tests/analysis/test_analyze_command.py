"""`hf-vit analyze`, from what is typed to the files, the facts and the card."""

import shutil
from pathlib import Path

import pytest
import torch
from models.families import FAMILIES

import hf_vit.analysis.api as api
from hf_vit.analysis import ANALYSES, AnalysisSettings, analyze
from hf_vit.data import make_processor
from hf_vit.hub.card import write_card
from hf_vit.results.facts import Facts
from hf_vit_cli.main import main


@pytest.fixture(scope="module")
def axial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axial") / "my-axial"
    made = FAMILIES["axial"].build("classification")
    made.save_pretrained(folder)
    make_processor(made.config).save_pretrained(folder)
    write_card(folder)
    return folder


@pytest.fixture
def model(axial, tmp_path):
    """A copy of it, to write into."""
    return Path(shutil.copytree(axial, tmp_path / axial.name))


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def typed(model, pictures, tmp_path, *more):
    sizes = ("--num-images", 8, "--num-pictures", 2, "--device", "cpu")
    return ["analyze", model, "--images", pictures, "--output", tmp_path / "out", *sizes, *more]


def test_a_run_and_its_repetition(model, pictures, tmp_path, capsys, monkeypatch):
    few = ("attention_distance", "attention_rollout", "cka", "cka_between")
    monkeypatch.setattr(api, "ANALYSES", {name: ANALYSES[name] for name in few})  # all there are, drawn sooner
    assert run(*typed(model, pictures, tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "1 unreadable images left out: photos/broken.png" in printed
    assert "cka_between: left out, it compares with a second model" in printed
    (record,) = Facts.load(model).of_kind("analysis")
    assert (
        record.command
        == "hf-vit analyze my-axial --output out --images photos --num-images 8 --num-pictures 2 --device cpu"
    )
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
    assert run(*typed(model, pictures, tmp_path)) == 0
    assert "attention_distance: kept, it was finished before" in capsys.readouterr().out
    assert len(Facts.load(model).records) == 1


def test_a_card_shows_no_pictures_of_earlier_weights(model, pictures, tmp_path):
    from hf_vit.results.facts import append_record, new_record

    assert run(*typed(model, pictures, tmp_path, "--only", "cka")) == 0
    assert "## How it sees" in write_card(model).read_text()
    append_record(model, new_record("training", values={}, command="hf-vit finetune"))
    assert "## How it sees" not in write_card(model).read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--only", "colour"], "there is no analysis colour; there are patch_filters"),
        (["--picture-format", "jpg"], "picture format 'jpg' is not known; choose png or svg"),
        (["--against", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["--rollout-identity", "2"], "rollout_identity 2.0 must be a share"),
    ],
)
def test_mistakes_end_in_one_line(model, pictures, tmp_path, capsys, more, message):
    assert run(*typed(model, pictures, tmp_path, *more)) != 0
    error = capsys.readouterr().err
    assert error.startswith(f"hf-vit: {message}")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_stopped_run_says_how_it_goes_on(model, pictures, tmp_path, capsys, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(api, "load_model", stop)
        assert run(*typed(model, pictures, tmp_path)) == 130
    said = "hf-vit: stopped; nothing is finished yet; start again with the same command\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(ANALYSES["cka"], "measure", stop)
    assert run(*typed(model, pictures, tmp_path, "--only", "attention_entropy", "--only", "cka")) == 130
    assert "the same command goes on from it" in capsys.readouterr().err
    assert (tmp_path / "out/attention_entropy.json").is_file()


def test_a_run_killed_before_it_told_the_facts_tells_them_when_it_goes_on(model, pictures, tmp_path, monkeypatch):
    few = ("--only", "attention_entropy")
    with monkeypatch.context() as patched:
        patched.setattr("hf_vit.analysis.api.save_analyses", lambda *arguments, **options: None)
        assert run(*typed(model, pictures, tmp_path, *few)) == 0
    assert not Facts.load(model).of_kind("analysis")
    for _ in range(2):
        assert run(*typed(model, pictures, tmp_path, *few)) == 0
    (record,) = Facts.load(model).of_kind("analysis")
    assert set(record.values["analyses"]) == {"attention_entropy"}
    (model / "README.md").unlink()  # as if the kill had come between the record and the card
    assert run(*typed(model, pictures, tmp_path, *few)) == 0
    assert "attention_entropy" in (model / "README.md").read_text()


def test_bare_models_of_transformers(pictures, tmp_path):
    """A checkpoint without a classifier, in half precision."""
    from transformers import Dinov2Config, Dinov2Model

    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    made = Dinov2Model(Dinov2Config(**tiny)).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "dino")
    make_processor(made.config).save_pretrained(tmp_path / "dino")
    found = analyze(tmp_path / "dino", pictures, settings=AnalysisSettings(num_images=8), device="cpu")
    assert set(found) == set(ANALYSES) - {"cka_between", "shape_bias"}
