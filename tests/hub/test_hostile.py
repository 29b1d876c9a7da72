"""Folders and facts that somebody prepared: no file outside is read, no word leaves its place, no token is shared."""

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub.conftest import training_record
from markdown_it import MarkdownIt

from hf_vit import UserError, push_to_hub
from hf_vit.hub.card import render_card, write_card
from hf_vit.results.facts import DataFact, Facts

REPO = "alice/my-vit"
TOKEN = "hf_" + "aB3" * 11
# Ends a block of code, opens one of Python, ends it; HTML, a link, a mention, a formula; turns the writing round.
EVIL = (
    "x\n```\n\n```python\nimport os\n```\n\n```bash\n<script>alert(1)</script> [a](http://b) ![c](d.png) | e\n\n# f\n\n"
    '---\n"; import os #`` www.b.org @g $$h$$ \u202egnp \x1b[31m &lt;'
)


def structure(card: str) -> list[tuple[str, str]]:
    """Every token of a card that is more than words, as another reader of Markdown sees it; its metadata aside."""
    tokens = MarkdownIt("commonmark").enable("table").parse(card.split("\n---\n", 1)[1])
    flat = [inner for token in tokens for inner in [token, *(token.children or [])]]
    plain = ("text", "softbreak", "code_inline")
    return [
        (token.type, token.info + ("" if token.info == "bash" else token.content) if token.type == "fence" else "")
        for token in flat
        if token.type not in plain
    ]


def tell(folder: Path, word: str) -> str:
    """The card of a folder in whose facts and config `word` stands wherever a word can stand."""
    evaluation = {"top1": 0.5, "per_class": {word: 0.5}, "headline": {word: 0.25}}
    training = {"base_model": word, "recipe": {word: word}, word: word}
    fields: dict[str, Any] = {
        "command": word, "versions": {word: word}, "hardware": {"name": word, "cores": word},
        "data": DataFact(name=word, split=word, size=3),
    }  # fmt: skip
    conversion = {"source": word, "verification": {word: word}}
    records = [
        training_record(kind="conversion", values=conversion, **fields),
        training_record(values=training, **fields),
        training_record(kind="evaluation", values=evaluation, **fields),
    ]
    config = json.loads((folder / "config.json").read_text())
    changed = {"id2label": {"0": word, "1": "b"}, "model_type": word, "architectures": ["ViTForImageClassification"]}
    (folder / "config.json").write_text(json.dumps(config | changed))
    Facts(records=records).save(folder)
    return render_card(folder, repo_id="alice/my-vit")


def test_no_word_leaves_its_place(model_folder: Path, tmp_path: Path) -> None:
    """By another reader of Markdown a card of hostile words has the structure of one of harmless words."""
    other = shutil.copytree(model_folder, tmp_path / "other")
    hostile, harmless = tell(model_folder, EVIL), tell(other, "words")
    assert structure(hostile) == structure(harmless)
    assert "\u202e" not in hostile
    assert "\x1b" not in hostile
    front, body = hostile.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    # What GitHub makes links, mentions and formulas of, though this reader does not; spans and blocks of code aside.
    prose = re.sub(r"(`+).*?\1", "", body, flags=re.DOTALL).split("## Citation")[0]
    assert not re.search(r"(?<!\\)://|www\.|(?<!\\)[@$]", prose)


@pytest.mark.parametrize("name", ['my "best" model', "x`y", "a\\", "ünï", "a\nb"])
def test_an_example_is_python_whatever_the_folder_is_called(name: str, model_folder: Path) -> None:
    folder = model_folder.rename(model_folder.parent / name)
    (folder / "README.md").unlink()
    card = write_card(folder).read_text()
    fences = [token for token in MarkdownIt("commonmark").parse(card) if token.type == "fence"]
    for code in (fence.content for fence in fences if fence.info == "python"):
        known: dict[str, Any] = {}
        exec(next(line for line in code.splitlines() if line.startswith("repo = ")), known)
        assert known["repo"] == " ".join(name.split())
    assert write_card(folder).read_text() == card, "the name is kept"


def test_the_card_command_refuses_what_is_no_repository(model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from hf_vit_cli.main import main

    with pytest.raises(SystemExit):
        main(["card", str(model_folder), "--repo", 'x"; import os; "'])
    assert "cannot be the name of a repository" in capfd.readouterr().err


def refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as told:
        push_to_hub(folder, REPO)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["{outside}", "../private.safetensors", "sub/a.safetensors", "config.json", ""])
def test_a_weight_index_names_files_of_the_folder_alone(name: str, model_folder: Path, tmp_path: Path) -> None:
    outside = shutil.copy(model_folder / "model.safetensors", tmp_path / "private.safetensors")
    (model_folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": name.format(outside=outside)}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(
        model_folder, "model.safetensors.index.json of .* names '.*', (which is no file inside|no .safetensors file)"
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "README.md", "LICENSE", "config.json", "facts.json", "learning_curve.png"]
)
def test_a_link_out_of_the_folder_is_not_followed(name: str, model_folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / f"private-{name}"
    if name == "README.md":
        outside.write_text("---\nlicense: mit\n---\nprivate")
    elif (model_folder / name).exists():
        shutil.copy(model_folder / name, outside)
    else:
        outside.write_text("private")
    (model_folder / name).unlink(missing_ok=True)
    os.symlink(outside, model_folder / name)
    refused(model_folder, f"{name} is a link to a file outside")


def test_a_link_inside_the_folder_is(model_folder: Path) -> None:
    (model_folder / "learning_curve.png").rename(model_folder / "curve.png")
    (model_folder / "learning_curve.png").symlink_to("curve.png")
    refused(model_folder, "there is no token")


def test_code_is_of_the_folder_alone(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private.py").write_text("secret = 1")
    config = json.loads((model_folder / "config.json").read_text())
    config["auto_map"]["AutoBackbone"] = f"{tmp_path}/private.Backbone"
    (model_folder / "config.json").write_text(json.dumps(config))
    refused(model_folder, "auto_map in config.json names .* no file inside")


def write_weights(path: Path, note: str) -> None:
    header = json.dumps({"__metadata__": {"note": note}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "preprocessor_config.json", "positions_hf_vit.py"),
        *("learning_curve.png", "LICENSE", "model.safetensors"),
    ],
)
def test_a_token_anywhere_is_not_shared(name: str, model_folder: Path) -> None:
    path = model_folder / name
    if name == "README.md":
        path.write_text(f"---\nlicense: mit\n---\nlog in with {TOKEN}")
    elif name == "model.safetensors":
        write_weights(path, TOKEN)
    elif name.endswith(".json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"note": TOKEN}))
    elif name == "positions_hf_vit.py":
        path.write_text(f"# {TOKEN}\n{path.read_text()}")
    else:
        path.write_bytes(b"\x89PNG tEXtComment\0" + TOKEN.encode() + b"\xff\x00")
    refused(model_folder, f"{name} holds what looks like a Hugging Face token")


def test_a_token_in_recorded_facts_is_not_shared(model_folder: Path) -> None:
    """Facts of a version that did not redact."""
    facts = json.loads((model_folder / "facts.json").read_text())
    facts[0]["command"] += f" --hub_token {TOKEN}"
    (model_folder / "facts.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="holds what looks like a Hugging Face token") as told:
        push_to_hub(model_folder, REPO)
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(float("nan"), "-"), (10**400, "-"), (96.94, "-"), (-0.1, "-"), ([1], "-"), (1, "100.00%")],
    ids=["nan", "huge", "percent", "negative", "list", "one"],
)
def test_what_is_no_share_is_not_told_as_measured(value: Any, shown: str, model_folder: Path) -> None:
    """facts.json of a stranger."""
    values = {"top1": 0.5, "top5": value, "ece": value, "per_class": {"a": value}, "headline": {"b": value}}
    values |= {"pictures": [[1], value], "warnings": value}
    records = json.loads((model_folder / "facts.json").read_text())
    records.append(records[0] | {"kind": "evaluation", "values": values})
    records[1]["data"] = {"name": "digits", "split": "test"}
    (model_folder / "facts.json").write_text(json.dumps(records))
    card = render_card(model_folder)
    assert f"| 0 | 50.00% | {shown} | {shown} | - |" in card
    assert f"| a | {shown} |" in card
    assert f"| b | {shown} |" in card
    (index,) = yaml.safe_load(card.split("---\n")[1])["model-index"]
    indexed = [metric["value"] for result in index["results"] for metric in result["metrics"]]
    assert indexed == [0.5, *([1.0] if value == 1 else [])]


def test_a_card_without_a_share_has_no_index(model_folder: Path) -> None:
    data = DataFact(name="digits", split="test")
    evaluation = training_record(kind="evaluation", data=data, values={"top1": 96.94})
    Facts(records=[training_record(), evaluation]).save(model_folder)
    card = render_card(model_folder)
    assert "| digits | test | - | 0 | - | - | - | - |" in card
    assert not {"model-index", "model_name", "metrics"} & set(yaml.safe_load(card.split("---\n")[1]))


CONFIGS = {
    "a list": ([], "not an object"),
    "auto_map": ({"auto_map": "x"}, "auto_map"),
    "patch_size": ({"patch_size": [1]}, "patch_size"),
    "id2label": ({"id2label": {"zero": "a"}}, "id2label.zero"),
    "architectures": ({"architectures": "x"}, "architectures"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_damaged_config_is_one_line(what: str, model_folder: Path) -> None:
    values, named = CONFIGS[what]
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps(config | values if isinstance(values, dict) else values))
    refused(model_folder, f"config.json of .* is damaged .*{named}")
    with pytest.raises(UserError, match="is damaged"):
        render_card(model_folder)


@pytest.mark.parametrize("index", [{}, [], 3, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, "broken"])
def test_a_damaged_index_is_one_line(index: Any, model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    text = "{" if index == "broken" else json.dumps(index)
    (model_folder / "model.safetensors.index.json").write_text(text)
    refused(model_folder, "model.safetensors.index.json of .* is damaged")


@pytest.mark.parametrize("code", ["def (", "\0", "x = '\ud800'"])
def test_code_that_is_none_is_one_line(code: str, model_folder: Path) -> None:
    (model_folder / "positions_hf_vit.py").write_bytes(code.encode("utf-8", "surrogatepass"))
    refused(model_folder, "positions_hf_vit.py of .* is not Python code")


def test_a_full_disk_while_sharding_is_one_line(model_folder: Path) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be split into shards in .*; make room for [\d,]+ bytes"):
            push_to_hub(model_folder, REPO, max_shard_size=6000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
