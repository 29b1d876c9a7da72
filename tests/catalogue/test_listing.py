"""Lists of models: the papers', a folder's, a user's; and the page of them, whoever wrote what is in it."""

import functools
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import timm
from hub.conftest import save_model, training_record
from loopback.client import Client, Loopback
from safetensors.numpy import load_file
from timm.models import get_pretrained_cfg
from transformers import AutoConfig

from hf_vit.catalogue.listing import Listing, iterate_published_checkpoints, iterate_published_scores, list_models
from hf_vit.cost import forward_flops
from hf_vit.errors import UserError
from hf_vit.hub.card import write_card
from hf_vit.results.facts import DataFact, append_record
from hf_vit.variants import list_variant_names

GOLDEN = Path(__file__).parents[1] / "golden"


def judge(folder: Path, top1: float, data: str = "digits", split: str = "test") -> None:
    fact = DataFact(name=data, fingerprint="f" * 16, split=split, size=360)
    values = {"top1": top1}
    append_record(folder, training_record(kind="evaluation", command="hf-vit evaluate x", data=fact, values=values))
    write_card(folder, license="mit")


@functools.cache
def list_of_imagenet() -> Listing:
    return list_models(search="B/16", data="imagenet")


def test_sizes_are_the_papers() -> None:
    """arXiv 2010.11929, table 1, in millions."""
    sizes = {entry.name: entry.parameters for entry in list_of_imagenet().entries}
    assert list(sizes) == ["B/16", "R50+B/16"]
    assert sizes["B/16"] is not None
    assert sizes["B/16"] / 1e6 == pytest.approx(86, rel=0.01)
    small = list_models(search="Ti/16", max_parameters=6e6).entries
    assert [entry.name for entry in small] == ["Ti/16", "Local-Ti/16"]


def test_published_accuracies() -> None:
    """The best of the paper, in its tables 2 and 6, and what two of its other tables say of two hybrids."""
    best = {(score.data, score.source): score.value for score in iterate_published_scores("H/14")}
    assert best["ImageNet", "arXiv 2010.11929, table 2, Ours-JFT (ViT-H/14)"] == 0.8855
    assert best["ImageNet", "arXiv 2010.11929, table 6, ViT-H/14, 14 epochs on JFT"] == 0.8808
    assert best["VTAB", "arXiv 2010.11929, table 2, Ours-JFT (ViT-H/14)"] == 0.7763
    assert [score.value for score in iterate_published_scores("R+Ti/16")] == [0.754]
    assert [score.value for score in iterate_published_scores("R50+L/32")] == [0.8568, 0.8599]
    boards = dict(list_of_imagenet().make_leaderboards())
    values = [score.value for _, score in boards["ImageNet"]]
    assert len(set(values)) > 1
    assert values == sorted(values, reverse=True)


def test_addresses_are_of_files_that_were_published() -> None:
    """Those of the original code are in the list of layouts that was recorded; timm has weights for its names."""
    layouts = set(json.loads(gzip.decompress((GOLDEN / "published_layouts.json.gz").read_bytes())))
    addresses = [address for name in list_variant_names() for address in iterate_published_checkpoints(name)]
    assert len(addresses) == len(set(addresses)) > 70
    original = {
        address.replace("gs://vit_models/", "").replace("gs://mixer_models/", "mixer ")
        for address in addresses
        if address.startswith("gs://") and "/augreg/" not in address and "bit_models" not in address
    }
    assert len(original) == 21
    assert original <= layouts
    for address in addresses:
        if address.startswith("timm:"):
            released = get_pretrained_cfg(address.removeprefix("timm:"))
            assert timm.is_model(address.removeprefix("timm:"))
            assert released is not None
            assert released.hf_hub_id, address
        else:
            assert address.startswith(("gs://vit_models/", "gs://mixer_models/", "gs://bit_models/", "hf://google/"))


def test_folders(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here: 18 px hold two patches of 8 px and leave some over, and a field is misspelt."""
    for name, top1 in (("worse", 0.5), ("better", 0.75), (":dog:é", 0.6)):
        judge(save_model(tmp_path / name), top1)
    for name, fields in (("other", {"data": "<i>photos"}), ("training", {"split": "train"}), ("percent", {})):
        judge(save_model(tmp_path / name), 94.0 if name == "percent" else 0.9, **fields)
    config = tmp_path / "<b>warns/config.json"
    fields = json.loads((save_model(config.parent) / "config.json").read_text()) | {"hiden_size": 3, "image_size": 18}
    config.write_text(json.dumps(fields))
    (save_model(tmp_path / "cut") / "model.safetensors").write_bytes(b"version https://git-lfs")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    (tmp_path / "better/checkpoint").mkdir()
    (tmp_path / "better/checkpoint/config.json").write_text("{}")
    listing = list_models([str(tmp_path)])
    known = {Path(entry.name).name: entry for entry in listing.entries}
    assert list(known) == [":dog:é", "<b>warns", "better", "broken", "cut", "other", "percent", "training", "worse"]
    assert "are damaged" in (known["cut"].problem or "")
    assert "not valid JSON" in (known["broken"].problem or "")
    assert not known["<b>warns"].problem
    assert known["<b>warns"].forward_flops
    values = sum(tensor.size for tensor in load_file(tmp_path / "better/model.safetensors").values())
    assert known["better"].parameters == values
    assert known["better"].forward_flops == forward_flops(AutoConfig.from_pretrained(tmp_path / "better"))
    assert known["training"].scores == known["percent"].scores == ()  # they say nothing, or no share
    board = list_models([str(tmp_path)], data="digits").make_leaderboards()
    assert [(data, [Path(entry.name).name for entry, _ in rows]) for data, rows in board] == [
        ("digits, split test", ["better", ":dog:é", "worse"])
    ]
    code, out, err = command(
        "models", tmp_path, "--json", "--judged-on", "digits", "--output", tmp_path / "digits.html"
    )
    assert (code, err) == (0, f"3 models in {tmp_path / 'digits.html'}\n")
    assert out.isascii(), "JSON in any encoding of the output"
    told = json.loads(out)
    assert [(entry["kind"], entry["scores"][0]["value"], entry["scores"][0]["source"]) for entry in told] == [
        ("folder", 0.6, "hf-vit evaluate x"),
        ("folder", 0.75, "hf-vit evaluate x"),
        ("folder", 0.5, "hf-vit evaluate x"),
    ]
    monkeypatch.setenv("COLUMNS", "400")
    assert ":dog:" in command("models", tmp_path, "--search", "dog")[1], "text, not an emoji"
    listing.save_page(tmp_path / "models.html")
    page = Page((tmp_path / "models.html").read_text())
    assert not {"b", "i"} & set(page.tags)
    assert "<b>warns" in page.text
    assert "<i>photos" in page.text


class Page(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = list[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_user_s_repositories(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    """On two pages; one is private, one is of a stranger who writes what may not be read as HTML, or as a number."""
    for number, name in enumerate(("first", "second", "third")):
        folder = save_model(tmp_path / name)
        judge(folder, 0.5 + number / 10)
        xet_client.run("hub.jobs:push", folder=str(folder), repo_id=f"alice/{name}", private=name == "third")
    hub.settings("alice/second", listed={"safetensors": {"parameters": {"F32": 7}, "total": 7}})
    evil = "<script>alert(1)</script>\u202e\x1b[31m"
    entry = {"task": {"type": "x"}, "dataset": {"type": "d", "name": evil}}
    metrics = [{"type": "accuracy", "value": value} for value in (91.5, "0.9", 1e9, -1, True, None)]
    index = [{"name": evil, "results": [{**entry, "metrics": metrics}]}]
    card = f"---\n{json.dumps({'license': 'mit', 'model-index': index})}\n---\n"
    hub.plant("acme/evil", {"README.md": card.encode(), "config.json": b"{}"}, like="alice/first")
    hub.settings("acme/evil", listed={"config": {"model_type": evil}})
    assert "4 models in " in xet_client.command("models", "alice", "acme", "--output", tmp_path / "models.html")
    page = Page((tmp_path / "models.html").read_text())
    assert not {"script", "a", "img"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert not {"\u202e", "\x1b"} & set(page.text)
    assert "91.50%" in page.text
    assert "alice/third" in page.text
    told = json.loads(xet_client.command("models", "alice", "--json"))
    assert [(each["name"], each["parameters"], each["scores"][0]["value"]) for each in told] == [
        ("alice/first", None, 0.5), ("alice/second", 7, 0.6), ("alice/third", None, 0.7),
    ]  # fmt: skip
    nobody = xet_client.attempt("hub.jobs:command", arguments=["models", "nobody"])
    assert (nobody.code, len(nobody.err.splitlines())) == (1, 1)
    assert "the folder nobody does not exist, and no Hub user of that name has a public model" in nobody.err


def test_what_cannot_be_listed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the folder no/such does not exist; give a folder, a user"):
        list_models(["no/such"])
    with pytest.raises(UserError, match="the family 'cnn!' is unknown; choose from plain, hybrid"):
        list_models(family="cnn!")
    with pytest.raises(UserError, match=r"ends in \.html"):
        Listing(("papers",), []).save_page(tmp_path / "models.txt")
