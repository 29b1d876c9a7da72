"""`hf-vit convert`: options, messages, exit codes, and an output that is complete or absent."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from originals.google import make_checkpoint
from rich.console import Console
from safetensors import SafetensorError

import hf_vit.conversion as conversion
from hf_vit.errors import UserError
from hf_vit.models.modeling_hf_vit import HfViTModel
from hf_vit.results.delivery import MARKER
from hf_vit.results.facts import append_record


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("vit_tok", "vit_jax: 3 layers, 64 wide, 4 heads, patch 16x16, 64x64 px, token pooling, 10 labels"),
        ("mixer", "mixer: 3 layers, 64 wide, 32 across the tokens, patch 16x16, 64x64 px, 10 labels"),
    ],
)
def test_golden_case_by_command(case: str, told: str, golden: Path, tmp_path: Path, command):
    source, recording, report = golden / f"{case}.ckpt.npz", golden / f"{case}.io.npz", tmp_path / "report.json"
    code, out, _ = command("convert", source, tmp_path / "model", "--verify", recording, "--report", report)
    count = len(np.load(source).files)
    assert code == 0
    assert told in out
    assert f"keys: {count} used, 0 ignored" in out
    assert f"verified: {len(np.load(recording).files) - 1} recorded arrays agree" in out
    assert len(json.loads(report.read_text())["keys"]) == count
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert str(tmp_path) not in (tmp_path / "model" / "facts.json").read_text()


def test_all_options_reach_the_conversion(write_npz, tmp_path: Path, command):
    labels = tmp_path / "labels.txt"
    labels.write_text("cat\ndog\nÄpfel\n", encoding="utf-8")
    source = write_npz(make_checkpoint(grid=(2, 3)))
    words = ("--image-size", "8x12", "--resize-to", "16", "--labels", labels)
    code, out, _ = command("convert", source, tmp_path / "model", *words)
    assert code == 0
    assert "16x16 px, token pooling, 3 labels (new head)" in out
    assert "2 ignored; 2 replaced by a new head" in out
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "Äpfel"}
    assert config["image_size"] == 16


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--image-size", "12y12"], "'12y12' is not a size; give one side in pixels (384) or HEIGHTxWIDTH"),
        (["--resize-to", "0"], "--resize-to '0' is not a size"),
        (["--num-labels", "0"], "a classifier needs at least 1 label, but 0 were given"),
        (["--labels", "absent.txt"], "there is no label file absent.txt"),
        (["--report", "absent/report.json"], "--report absent/report.json is in a folder that does not exist"),
        (["--verify", "absent.npz"], "absent.npz does not exist"),
        (["--drop-pre-logits"], "leave --drop-pre-logits out"),
    ],
)
def test_bad_option_is_one_line(options, told, source, tmp_path: Path, fails):
    fails(("convert", source, tmp_path / "model", *options), told)
    assert not (tmp_path / "model").exists()


FULL = "No space left on device"
FAILURES = {
    "the system's": (OSError(28, FULL), 1, f"{FULL}"),
    "safetensors'": (SafetensorError(f"I/O error: {FULL} (os error 28)"), 1, "No space left"),
    "ended by hand": (KeyboardInterrupt(), 130, "hf-vit: stopped; no incomplete files remain\n"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_is_left_when_writing_fails(failure, source, tmp_path: Path, monkeypatch, command):
    error, expected, told = FAILURES[failure]

    def fail(self, folder, **_):
        (Path(folder) / "half").write_text("half a model")
        raise error

    monkeypatch.setattr(HfViTModel, "save_pretrained", fail)
    code, _, err = command("convert", source, tmp_path / "model")
    assert (code, err.count("\n")) == (expected, 1)
    assert told in err
    assert ("model cannot be written: " in err) == (expected == 1)
    assert [file.name for file in tmp_path.iterdir()] == ["model.npz"]


def test_a_kill_between_report_and_model_leaves_what_the_same_command_replaces(source, tmp_path: Path, monkeypatch):
    report = tmp_path / "report.json"

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hf_vit.results.delivery._replace", stop)
        with pytest.raises(KeyboardInterrupt):
            conversion.convert(source, tmp_path / "model", report=report)
    assert {file.name for file in tmp_path.iterdir()} == {"model.npz", "report.json"}
    conversion.convert(source, tmp_path / "model", report=report)
    assert {file.name for file in tmp_path.iterdir()} == {"model.npz", "report.json", "model"}


def test_links_are_followed(source, tmp_path: Path):
    for name, there in (("link", True), ("dangling", False)):
        if there:
            (tmp_path / f"{name} leads here").mkdir()
        (tmp_path / name).symlink_to(tmp_path / f"{name} leads here")
        conversion.convert(source, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / f"{name} leads here" / "model.safetensors").is_file()


def test_places_that_cannot_be_a_folder_are_told_first(source, tmp_path: Path, fails):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "full" / "precious").mkdir(parents=True)
    for place, said in (
        (tmp_path / "full", "is not empty"),
        (source, "exists and is not a folder"),
        (tmp_path / "model\udcff", r"model\udcff cannot be written (the name is not valid UTF-8); choose another path"),
        (tmp_path / "file" / "model", "file is not a folder"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "loop", "(loop is a broken link)"),
    ):
        fails(("convert", source, place), said)
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "file", "loop", "full"}
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_report_comes_with_the_model_and_replaces_nothing_else(source, tmp_path: Path, monkeypatch):
    content = source.read_bytes()
    with pytest.raises(UserError, match="exists and is not a conversion report"):
        conversion.convert(source, tmp_path / "model", report=source)
    assert source.read_bytes() == content
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        conversion.convert(source, tmp_path / "model", report=tmp_path)
    (empty := tmp_path / "empty").mkdir()
    for inside in (empty / "report.json", empty):
        with pytest.raises(UserError, match=r"is in the output folder .*; give a path outside"):
            conversion.convert(tmp_path / "none.npz", empty, report=inside)
    empty.rmdir()
    for number in (1, 2):
        conversion.convert(source, tmp_path / f"model{number}", report=tmp_path / "report.json")
    report = (tmp_path / "report.json").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_vit.conversion.api.build_report", fail)
    with pytest.raises(UserError, match=r"report\.json cannot be written: No space left"):
        conversion.convert(source, tmp_path / "model3", report=tmp_path / "report.json")
    assert (tmp_path / "report.json").read_bytes() == report
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "model1", "model2", "report.json"}


def test_a_refused_model_leaves_the_earlier_report(source, tmp_path: Path, monkeypatch):
    output, report = tmp_path / "model", tmp_path / "report.json"
    conversion.convert(source, output, report=report)
    before = report.read_bytes()
    shutil.rmtree(output)

    def be_slower(*given):
        output.mkdir()
        (output / "theirs").touch()
        return append_record(*given)

    monkeypatch.setattr("hf_vit.conversion.api.append_record", be_slower)
    with pytest.raises(UserError, match="is not empty"):
        conversion.convert(source, output, report=report, num_labels=7)
    assert report.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "model", "report.json"}
    assert [path.name for path in output.iterdir()] == ["theirs"]


def test_force_replaces_what_this_package_wrote(source, write_npz, tmp_path: Path, command, monkeypatch):
    output = tmp_path / "model"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").touch()
    assert command("convert", source, tmp_path / "theirs", "--force")[0] == 1
    assert (tmp_path / "theirs" / "thesis.txt").exists()
    conversion.convert(source, output)
    (output / "README.md").write_text(MARKER)
    assert command("convert", source, output)[0] == 1
    with pytest.raises(UserError, match="is not empty"):
        conversion.convert(source, output)
    monkeypatch.setattr("hf_vit.conversion.api._verify", lambda *_: 1 / 0)
    recording = write_npz({"images": np.zeros((1, 12, 12, 3), "f4")}, "io.npz")
    with pytest.raises(ZeroDivisionError):
        conversion.convert(source, output, force=True, recording=recording)
    assert (output / "README.md").exists()
    assert command("convert", source, output, "--force")[0] == 0
    assert not (output / "README.md").exists()
    with pytest.raises(UserError, match=r"--verify .*export\.npz is in the output folder"):
        conversion.convert(source, output, force=True, recording=output / "export.npz")
    with pytest.raises(UserError, match="is in the output folder"):
        conversion.convert(output / "model.safetensors", output, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "model", "theirs", "io.npz"}


def test_bars_on_a_terminal_and_nothing_elsewhere(source, tmp_path: Path, capsys, monkeypatch):
    conversion.convert(source, tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=120)
    monkeypatch.setattr("hf_vit.conversion.progress.Console", lambda **_: terminal)
    conversion.convert(source, tmp_path / "model")
    for words in ("reading model.npz", "writing model"):
        assert words in shown.getvalue()


def test_label_files(tmp_path: Path):
    path = tmp_path / "labels.txt"
    path.write_bytes("\ufeffcat\r\nbig dog\r\n".encode())
    assert conversion.read_labels(path) == ["cat", "big dog"]
    path = tmp_path / "labels.json"
    path.write_text('["cat", "dog"]')
    assert conversion.read_labels(path) == ["cat", "dog"]
    for name, text, told in (
        ("labels.txt", b"", "holds no class name"),
        ("labels.txt", b"cat\n\ndog\n", "holds an empty class name"),
        ("labels.txt", b"cat\ndog\ncat\n", "has cat more than once"),
        ("labels.txt", b"\xff\xfe\x00", "cannot be read as a label file"),
        ("labels.json", b"{", "cannot be read as a label file"),
        ("labels.json", b'{"0": "cat"}', "not a list of class names"),
        ("labels.json", b"[1, 2]", "not a list of class names"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(UserError, match=told):
            conversion.read_labels(tmp_path / name)
