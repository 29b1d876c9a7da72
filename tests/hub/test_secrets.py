"""Every place where something is kept or shared, and every kind of secret: none of it is in any of these places."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub.conftest import training_record

from hf_vit import UserError, push_to_hub
from hf_vit.hub.card import render_card
from hf_vit.results.documents import Document
from hf_vit.results.facts import DataFact, Facts, append_record, new_record
from hf_vit.results.measurements import Measurements
from hf_vit.results.redaction import redact_message
from hf_vit_cli.main import main

_HF = "hf_" + "aB3" * 11
_SECRETS = {  # kind -> (a text that holds the secret, the secret)
    "a Hugging Face token": (f"pushed by {_HF}", _HF),
    "within a name": (f"run_of_{_HF}", _HF),
    "an organisation's token": ("api_org_" + "Zz9" * 10, "Zz9Zz9"),
    "an AWS key": ("AKIAABCDEFGH12345678", "AKIAABCDEFGH"),
    "AWS's secret": ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalr"),
    "a signed address": ("https://host/x.npz?X-Amz-Signature=0123abcd", "0123abcd"),
    "a password in an address": ("https://ann:pa55@host/x.npz", "pa55"),
    "a GitHub token": ("ghp_" + "x1Y2" * 9, "x1Y2x1Y2"),
    "an OpenAI key": ("sk-proj-" + "q7" * 12, "q7q7"),
    "a W&B key": ("WANDB_API_KEY=0123456789abcdef", "0123456789ab"),
    "--hub_token=": ("train --hub_token=v4lue", "v4lue"),
    "--wandb_key": ("train --wandb_key v4lue", "v4lue"),
    "a home": ("/home/annabel/cats/train.tar", "annabel"),
}  # fmt: skip


class _Result(Document):
    command = "hf-vit something"

    name: str
    table: dict[str, Any]


def _facts(folder: Path, text: str) -> None:
    values = {"note": text, "deep": [{text: [text]}], "base_model": text}
    record = new_record("training", values=values, command=["hf-vit", "x", *text.split()], data=DataFact(name=text))
    append_record(folder, record)


def _card(folder: Path, text: str) -> None:
    """Of a record that a version made which redacted less."""
    record = training_record(command=f"hf-vit {text}", values={"note": text}, data=DataFact(name=text))
    Facts(records=[record]).save(folder)
    (folder / "README.md").write_text(render_card(folder))


def _result(folder: Path, text: str) -> None:
    _Result(name=text, table={text: [text]}).write(folder / "result.json")


def _measurements(folder: Path, text: str) -> None:
    measured = Measurements(folder / "speed.json", f"hf-vit {text}", "cpu", note=text)
    measured.add({"name": text, "rate": 1.0}, whole=text)


PLACES: dict[str, Callable[[Path, str], None]] = {
    "facts.json": _facts, "the card": _card, "a file of results": _result, "a benchmark's file": _measurements,
}  # fmt: skip


@pytest.mark.parametrize("kind", _SECRETS)
@pytest.mark.parametrize("place", PLACES)
def test_no_place_keeps_a_secret(place: str, kind: str, model_folder: Path) -> None:
    text, secret = _SECRETS[kind]
    (model_folder / "README.md").unlink()
    PLACES[place](model_folder, text)
    for path in model_folder.iterdir():
        if path.suffix in (".json", ".md"):
            assert secret not in path.read_text(), path.name


@pytest.mark.parametrize("kind", [kind for kind in _SECRETS if kind != "a home"])
def test_an_error_line_holds_no_secret(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be kept in a log; where things lie is for the user to read."""
    text, secret = _SECRETS[kind]
    with pytest.raises(SystemExit):
        main(["cost", text.replace(" ", "_") if "--" not in text else f"x {text}"])
    assert secret not in capfd.readouterr().err
    assert redact_message("no room in /home/ann/models") == "no room in /home/ann/models"


def _refused(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as told:
        push_to_hub(folder, "alice/my-vit", **options)
    assert _HF not in str(told.value)


@pytest.mark.parametrize("where", ["message", "tag", "revision", "collection"])
def test_a_token_in_what_a_push_is_called_is_not_shared(where: str, model_folder: Path) -> None:
    _refused(model_folder, "looks like a Hugging Face token", **{where: f"v1_{_HF}"})


def test_a_token_in_the_name_of_a_file_is_not_shared(model_folder: Path) -> None:
    name = f"plot_{_HF}.png"
    (model_folder / "learning_curve.png").rename(model_folder / name)
    (model_folder / "README.md").write_text(f"---\nlicense: mit\n---\n![x]({name})\n")
    _refused(model_folder, "the name of the file plot_REDACTED.png looks like a token")


def test_a_token_of_two_bytes_a_sign_is_not_shared(model_folder: Path) -> None:
    (model_folder / "LICENSE").write_text(f"key {_HF}", encoding="utf-16")
    _refused(model_folder, "LICENSE holds what looks like a Hugging Face token")


def test_a_token_in_the_metadata_of_weights_is_not_shared(model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size]) | {"__metadata__": {"format": "pt", "note": _HF}}
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])
    _refused(model_folder, "model.safetensors holds what looks like a Hugging Face token")


def test_an_exported_graph_tells_no_place(model_folder: Path, tmp_path: Path) -> None:
    from hf_vit import conversion

    conversion.export(model_folder, tmp_path / "graph", "onnx")
    for path in (tmp_path / "graph").iterdir():
        for place in (Path(conversion.__file__).parent, Path(json.__file__).parent, tmp_path):
            assert str(place.resolve()).encode() not in path.read_bytes(), path.name


def test_a_snapshot_of_the_cache_is_shared_and_no_link_out_of_it(model_folder: Path, tmp_path: Path) -> None:
    """Files in the Hub's cache are links to the repository's own blobs."""
    repository = tmp_path / "hub" / "models--alice--my-vit"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(model_folder.iterdir()):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    with pytest.raises(UserError, match="there is no token"):  # nothing is wrong with the folder
        push_to_hub(snapshot, "alice/my-vit")
    (snapshot / "LICENSE").symlink_to(tmp_path / "private")
    (tmp_path / "private").write_text("private")
    with pytest.raises(UserError, match="LICENSE is a link to a file outside"):
        push_to_hub(snapshot, "alice/my-vit")
    (snapshot / "LICENSE").unlink()
    (repository / "blobs").rename(tmp_path / "blobs")
    (repository / "blobs").symlink_to(tmp_path / "blobs")
    with pytest.raises(UserError, match="is a link to a file outside"):
        push_to_hub(snapshot, "alice/my-vit")
