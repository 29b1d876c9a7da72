"""Hostile folders and facts: nothing outside is read, no secret or image is shared (`python -m campaigns hostile`)."""

import ast
import json
import re
import shutil
import struct
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from evaluation.tiny import NAMES, make_images
from hub.conftest import save_model, training_record
from markdown_it import MarkdownIt
from safetensors.torch import load_file

import hf_vit.analysis
from campaigns.formats import call, pickled, torch_file, whole
from hf_vit import UserError, conversion, from_hub, push_to_hub
from hf_vit.analysis import ANALYSES
from hf_vit.hub.card import MARKER, render_card, write_card
from hf_vit.hub.card_sections import shows_images
from hf_vit.hub.contents import collect, describe_model
from hf_vit.hub.published_results import RESULTS_FILE
from hf_vit.loading import load_model
from hf_vit.results.documents import Document, Measurements
from hf_vit.results.facts import DataFact, Facts, append_record, make_record
from hf_vit.results.redaction import redact_message

Command = Callable[..., tuple[int, str, str]]
REPO = "alice/my-vit"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
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


def card_with(folder: Path, word: str) -> str:
    """The card of a folder in whose facts and config `word` stands wherever a word can stand."""
    evaluation = {"top1": 0.5, "per_class": {word: 0.5}, "headline": {word: 0.25}}
    training = {"base_model": word, "recipe": {word: word}, word: word}
    fields: dict[str, Any] = {
        "command": word, "versions": {word: word}, "hardware": {"name": word, "cores": word},
        "data": DataFact(name=word, split=word, size=3),
    }  # fmt: skip
    records = [
        training_record(kind="conversion", values={"source": word, "verification": {word: word}}, **fields),
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
    hostile, harmless = card_with(model_folder, EVIL), card_with(other, "words")
    assert structure(hostile) == structure(harmless)
    assert "\u202e" not in hostile
    assert "\x1b" not in hostile
    front, body = hostile.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    # What GitHub makes links, mentions and formulas of, though this reader does not; spans and blocks of code aside.
    prose = re.sub(r"(`+).*?\1", "", body, flags=re.DOTALL).split("## Citation")[0]
    assert not re.search(r"(?<!\\)://|www\.|(?<!\\)[@$]", prose)


def test_a_terminal_gets_words_alone(tmp_path: Path, command: Command) -> None:
    """Of the classes of a model, of folders and of files: no color, no title, no writing turned round."""
    names = ["red \x1b[31m", "title \x1b]0;x\x07", "\u202eturned", "C1 \x9b31m", "[b]rich", "plain"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    model = save_model(tmp_path / "model", image_size=8, **labels)
    for number, image in enumerate(make_images(48)):
        path = tmp_path / "data" / names[number % 6].strip() / f"{number} \x1b[2J.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    path.with_suffix(".bad \x1b[2J.png").write_text("no image")
    for words in (
        ["predict", model, path, "--top", "6"],
        ["data", tmp_path / "data"],
        ["evaluate", model, "--data", tmp_path / "data", "--skip-bad-images", "--device", "cpu"],
        ["evaluate", model, "--data", tmp_path / "data", "--skip-bad-images", "--device", "cpu", "--streaming"],
    ):
        code, *printed = command(*words)
        assert code == 0
        said = "".join(printed)
        assert words[0] == "evaluate" or "turned" in said
        controls = {sign for sign in said if unicodedata.category(sign) in ("Cc", "Cf")}
        assert controls <= set("\n\r\t"), words[0]
    assert "\x1b" not in warnings.formatwarning("a library's words \x1b[31m", UserWarning, "", 0)


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


@pytest.mark.parametrize(
    ("value", "shown"),
    [(float("nan"), "-"), (10**400, "-"), (96.94, "-"), (-0.1, "-"), ([1], "-"), (1, "100.00%")],
    ids=["nan", "huge", "percent", "negative", "list", "one"],
)
def test_what_is_no_share_is_not_told_as_measured(value: Any, shown: str, model_folder: Path) -> None:
    """facts.json of a stranger."""
    values = {"top1": 0.5, "top5": value, "ece": value, "per_class": {"a": value}, "headline": {"b": value}}
    values |= {"pictures": [[1], value], "warnings": value}
    (record,) = json.loads((model_folder / "facts.json").read_text())
    evaluation = record | {"kind": "evaluation", "data": {"name": "digits", "split": "test"}, "values": values}
    (model_folder / "facts.json").write_text(json.dumps([record, evaluation]))
    card = render_card(model_folder)
    assert f"| 0 | 50.00% | {shown} | {shown} | - |" in card
    assert f"| a | {shown} |" in card
    assert f"| b | {shown} |" in card
    (index,) = yaml.safe_load(card.split("---\n")[1])["model-index"]
    indexed = [metric["value"] for result in index["results"] for metric in result["metrics"]]
    assert indexed == [0.5, *([1.0] if value == 1 else [])]
    (model_folder / "facts.json").write_text(json.dumps([record, evaluation | {"values": {"top1": 96.94}}]))
    assert not {"model-index", "model_name", "metrics"} & set(
        yaml.safe_load(render_card(model_folder).split("---\n")[1])
    )


# Files outside, tokens


def refuse(folder: Path, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as told:
        push_to_hub(folder, REPO, **options)
    assert "\n" not in str(told.value)
    assert TOKEN not in str(told.value)


@pytest.mark.parametrize("name", ["{outside}", "../private.safetensors", "sub/a.safetensors", "config.json", ""])
def test_a_weight_index_names_files_of_the_folder_alone(name: str, model_folder: Path, tmp_path: Path) -> None:
    outside = (model_folder / WEIGHTS).rename(tmp_path / "private.safetensors")
    (model_folder / INDEX).write_text(json.dumps({"weight_map": {"a": name.format(outside=outside)}}))
    refuse(model_folder, f"{INDEX} of .* (lists|names) '.*', which is not (inside|a .safetensors file)")


@pytest.mark.parametrize("name", [WEIGHTS, "README.md", "LICENSE", "config.json", "facts.json", "learning_curve.png"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, model_folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / f"private-{name}"
    if name == "LICENSE":
        outside.write_text("private")
    else:
        (model_folder / name).rename(outside)
    (model_folder / name).symlink_to(outside)
    refuse(model_folder, f"{name} is a link to a file outside")
    outside.rename(model_folder / "inside")
    (model_folder / name).unlink()
    (model_folder / name).symlink_to("inside")
    refuse(model_folder, "there is no token")  # nothing is wrong with the folder


def test_a_snapshot_of_the_cache_is_shared_and_no_link_out_of_it(model_folder: Path, tmp_path: Path) -> None:
    """Files in the Hub's cache are links to the repository's own blobs."""
    repository = tmp_path / "hub" / "models--alice--my-vit"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(model_folder.iterdir()):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    refuse(snapshot, "there is no token")
    (repository / "blobs").rename(tmp_path / "blobs")
    (repository / "blobs").symlink_to(tmp_path / "blobs")
    refuse(snapshot, "is a link to a file outside")


def test_code_is_of_the_folder_alone(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private.py").write_text("secret = 1")
    config = json.loads((model_folder / "config.json").read_text())
    for target, match in (
        (f"{tmp_path}/private.Backbone", "auto_map in config.json names .* not inside"),
        ("mallory/code--modeling_hf_vit.HfViTBackbone", "lacks mallory/code--modeling_hf_vit.py, the model's code"),
    ):
        config["auto_map"]["AutoBackbone"] = target
        (model_folder / "config.json").write_text(json.dumps(config))
        refuse(model_folder, match)
    del config["auto_map"]["AutoBackbone"]
    (model_folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((model_folder / "preprocessor_config.json").read_text())
    for targets, match in (
        ({"AutoImageProcessor": "mallory/code--modeling_hf_vit.Evil"},
         "lacks mallory/code--modeling_hf_vit.py.*or remove auto_map if transformers has the model"),
        ({"AutoImageProcessor": {}}, r"preprocessor_config.json of .* is damaged: auto_map"),
    ):  # fmt: skip
        (model_folder / "preprocessor_config.json").write_text(json.dumps(settings | {"auto_map": targets}))
        refuse(model_folder, match)


TOKEN = "hf_" + "aB3" * 11


@pytest.mark.parametrize("fields", [{"num_labels": 10**9}, {"num_hidden_layers": 10**9}, {"inner": {"depth": 10**9}}])
def test_a_config_that_would_fill_the_memory(fields: dict[str, Any], model_folder: Path) -> None:
    path = model_folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("id2label", None)
    path.write_text(json.dumps(config | fields))
    for door in (render_card, load_model):
        with pytest.raises(UserError, match=r"=1000000000, but hf_vit loads models with at most"):
            door(model_folder)


def test_a_processor_reads_no_file_of_another_place(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text('{"0": {"name": "secret", "isthing": 1}}')
    settings = {"image_processor_type": "OneFormerImageProcessor", "repo_path": str(tmp_path)}
    place = {"class_info_file": str(tmp_path / "private.json")}
    refusal = r"refers to another repository \(class_info_file: "
    for fields, match in (
        ({"class_info_file": "private.json"}, refusal),
        ({"inner": place}, refusal),
        (place | {"filler": " " * 2**25}, "preprocessor_config.json of .* bytes, but hf_vit reads at most"),
    ):
        (model_folder / "preprocessor_config.json").write_text(json.dumps(settings | fields))
        with pytest.raises(UserError, match=match):
            load_model(model_folder)


def test_a_card_shares_pictures_alone(model_folder: Path, tmp_path: Path) -> None:
    pictures = {"mine.PNG", "my plot.png", "my map.png", "a.svg", "b.jpg", "c.gif"}
    for name in (".env", "notes.txt", *pictures):
        (model_folder / name).write_text("private")
    (model_folder / "README.md").write_text(
        "---\nlicense: mit\n---\n![a](.env) <img src='notes.txt'> ![b](./mine.PNG) ![c](my%20plot.png?raw=true)\n"
        "![d](<my map.png> 'title') <IMG alt=e src=a.svg> <img width=9 src = \"b.jpg\"/> ![f]( c.gif#f )\n"
    )
    (tmp_path / "scratch").mkdir()
    files = collect(model_folder, REPO, scratch=tmp_path / "scratch").files
    assert pictures <= files.keys()
    assert not files.keys() & {".env", "notes.txt"}


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation_internal", "experts_implementation"])
@pytest.mark.parametrize("value", ["mallory/kernel", {"": "mallory/kernel"}, {"backbone_config": "mallory/kernel:run"}])
def test_a_function_of_the_hub_is_not_fetched(field: str, value: Any, model_folder: Path) -> None:
    path = model_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=f"refers to another repository \\({field}: .*mallory/kernel"):
        load_model(model_folder)


@pytest.mark.parametrize("names", [("pytorch_model.bin",), ("a.bin", "b.bin")])
def test_a_pickle_is_checked_before_a_library_maps_it(names: tuple[str, ...], model_folder: Path) -> None:
    """Libraries neither verify checksums nor limit the memory that a pickle takes."""
    weights = load_file(model_folder / WEIGHTS)
    (model_folder / WEIGHTS).unlink()
    parts = {name: dict(list(weights.items())[number :: len(names)]) for number, name in enumerate(names)}
    for name, part in parts.items():
        torch.save(part, model_folder / name)
    if len(names) > 1:
        weight_map = {key: name for name, part in parts.items() for key in part}
        (model_folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    load_model(model_folder)
    path = model_folder / names[-1]
    good = path.read_bytes()
    values = max(parts[names[-1]].values(), key=torch.numel).numpy().tobytes()
    bomb = torch_file(pickle=whole(pickled(call("builtins bytearray", (2**20,)))))
    for content, told in ((good.replace(values, values[::-1]), "Bad CRC-32"), (bomb, "its pickle calls bytearray")):
        path.write_bytes(content)
        for door in (load_model, from_hub):
            with pytest.raises(UserError, match=f"{model_folder.name}: {path.name} .*{told}"):
                door(model_folder)


def write_token(path: Path) -> None:
    """Where a file of this kind can hold one."""
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.dumps(json.loads(data[8 : 8 + size]) | {"__metadata__": {"format": "pt", "note": TOKEN}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    elif path.name == "facts.json":  # of a version that did not redact
        facts = json.loads(path.read_text())
        facts[0]["command"] += f" --hub_token {TOKEN}"
        path.write_text(json.dumps(facts))
    elif path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"note": TOKEN}))
    elif path.name == "LICENSE":
        path.write_text(f"key {TOKEN}", encoding="utf-16")
    elif path.suffix == ".png":
        path.write_bytes(b"\x89PNG tEXtComment\0" + TOKEN.encode() + b"\xff\x00")
    else:
        path.write_text(f"{path.read_text()}\n# {TOKEN}\n")


@pytest.mark.parametrize(
    "name",
    ["README.md", "preprocessor_config.json", "embeddings_hf_vit.py", "learning_curve.png", "LICENSE", WEIGHTS,
     "facts.json"],
)  # fmt: skip
def test_a_token_in_a_file_is_not_shared(name: str, model_folder: Path) -> None:
    if name == "README.md":
        (model_folder / name).write_text("---\nlicense: mit\n---\n")
    write_token(model_folder / name)
    refuse(model_folder, f"{name} holds what looks like a Hugging Face token")


def test_files_of_a_version_that_redacted_less_are_shared_redacted(model_folder: Path, tmp_path: Path) -> None:
    path = model_folder / "facts.json"
    facts = json.loads(path.read_text())
    facts[0]["command"] = "HF_TOKEN=v4lue python /home/annabel/train.py"
    facts[0]["values"]["settings"] = {"hub_token": ["v4lue"]}
    path.write_text(json.dumps(facts))
    config = json.loads((model_folder / "config.json").read_text())
    old = {"_name_or_path": '/home/annabel/a "b"/vit'}
    (model_folder / "config.json").write_text(json.dumps(old | config, indent=2))  # as transformers 4 wrote it
    shared = collect(model_folder, REPO, scratch=tmp_path, license="mit").files
    assert json.loads(shared["config.json"].readable_text) == config
    (model_folder / "config.json").write_text(json.dumps(config | old, separators=(",", ":")))  # the field is the last
    again = collect(model_folder, REPO, scratch=tmp_path, license="mit").files["config.json"]
    assert json.loads(again.readable_text) == config
    for name in ("facts.json", "README.md"):
        assert "python train.py" in shared[name].readable_text
        assert not re.search("v4lue|annabel", shared[name].readable_text)


def test_a_token_in_a_name_is_not_shared(model_folder: Path, command: Command) -> None:
    """Of a push or of a file; and what is no name is refused by `card`, too."""
    for where in ("message", "tag", "revision", "collection"):
        refuse(model_folder, "looks like a Hugging Face token", **{where: f"v1_{TOKEN}"})
    name = f"plot_{TOKEN}.png"
    (model_folder / "learning_curve.png").rename(model_folder / name)
    (model_folder / "README.md").write_text(f"---\nlicense: mit\n---\n![x]({name})\n")
    refuse(model_folder, "the name of the file plot_REDACTED.png looks like a token")
    assert "cannot be the name of a repository" in command("card", model_folder, "--repo", 'x"; import os; "')[2]


# Secrets in what is written

SECRETS = {  # a text that holds a secret -> the secret; other kinds are in results/test_redaction.py
    f"pushed by {TOKEN}": TOKEN,
    f"run_of_{TOKEN}": TOKEN,
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG": "wJalr",
    "https://ann:pa55@host/x.npz?X-Amz-Signature=0123abcd": "pa55|0123abcd",
    "train --hub_token=v4lue": "v4lue",
    "train --wandb_key v4lue": "v4lue",
    "/home/annabel/cats/train.tar": "annabel",
}


class _Result(Document):
    command = "hf-vit something"

    name: str
    table: dict[str, Any]


def write_facts(folder: Path, text: str) -> None:
    values = {"note": text, "deep": [{text: [text]}], "base_model": text}
    record = make_record("training", values=values, command=["hf-vit", "x", *text.split()], data=DataFact(name=text))
    append_record(folder, record)


def write_old_card(folder: Path, text: str) -> None:
    """Of a record that a version made which redacted less."""
    record = training_record(command=f"hf-vit {text}", values={"note": text}, data=DataFact(name=text))
    Facts(records=[record]).save(folder)
    (folder / "README.md").write_text(render_card(folder))


def write_result(folder: Path, text: str) -> None:
    _Result(name=text, table={text: [text]}).write(folder / "result.json")


def write_measurements(folder: Path, text: str) -> None:
    measured = Measurements(folder / "speed.json", f"hf-vit {text}", "cpu", note=text)
    measured.add({"name": text, "rate": 1.0}, whole=text)


@pytest.mark.parametrize("write", [write_facts, write_old_card, write_result, write_measurements])
def test_no_place_keeps_a_secret(write: Callable[[Path, str], None], model_folder: Path, tmp_path: Path) -> None:
    for number, (text, secret) in enumerate(SECRETS.items()):
        folder = shutil.copytree(model_folder, tmp_path / str(number))
        (folder / "README.md").unlink()
        write(folder, text)
        for path in folder.iterdir():
            if path.suffix in (".json", ".md"):
                assert not re.search(secret, path.read_text()), path.name


def test_an_error_line_holds_no_secret(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be kept in a log; where things lie is for the user to read."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts to reach a server that is not there
    for text, secret in SECRETS.items():
        line = command("cost", text.replace(" ", "_") if "--" not in text else f"x {text}")[2]
        assert secret == "annabel" or not re.search(secret, line), text
    assert redact_message("no room in /home/ann/models") == "no room in /home/ann/models"


def test_no_card_keeps_the_password_of_a_mirror(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://ann:pa55word@hub.corp")
    (model_folder / "examples").mkdir()
    make_images(1)[0].save(model_folder / "examples" / "ant.png")
    data = DataFact(name="alice/ants", split="test", size=3, fingerprint="f" * 16)
    append_record(model_folder, training_record(kind="evaluation", data=data, values={"top1": 0.5}))
    shared = describe_model(model_folder, REPO, license="mit")
    assert {"README.md", RESULTS_FILE} == set(shared)
    for content in shared.values():
        assert b"https://hub.corp/" in content
        assert b"pa55word" not in content


def test_an_exported_graph_tells_no_place(model_folder: Path, tmp_path: Path) -> None:
    conversion.export(model_folder, tmp_path / "graph", "onnx")
    for path in (tmp_path / "graph").iterdir():
        for place in (Path(conversion.__file__).parent, Path(json.__file__).parent, tmp_path):
            assert str(place.resolve()).encode() not in path.read_bytes(), path.name


# Images of the data


def test_images_are_shared_when_asked_for(tmp_path: Path, command: Command) -> None:
    """Of a model that was evaluated and analyzed; the card of an author shows them on purpose alone."""
    showing = {"wrong_images.png", "analysis_attention_rollout.png", "analysis_head_maps.png"}
    model = save_model(tmp_path / "model", image_size=8)
    for number, image in enumerate(make_images(24)):
        path = tmp_path / "data" / "test" / NAMES[number % 6] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    (tmp_path / "scratch").mkdir()
    for words in (
        ["evaluate", model, "--data", tmp_path / "data", "--device", "cpu"],
        ["analyze", model, "--images", tmp_path / "data", "--output", tmp_path / "analysis"],
    ):
        assert command(*words)[0] == 0
    write_card(model, license="mit")
    assert {path.name for path in model.iterdir()} >= showing, "they are drawn, for whoever has the folder"
    assert not any(name in (model / "README.md").read_text() for name in showing)
    shared = collect(model, "me/model", scratch=tmp_path / "scratch")
    assert set(shared.skipped) >= showing
    assert {"confusion_matrix.png", "analysis_attention_distance.png"} <= set(shared.files)
    asked = collect(model, "me/model", scratch=tmp_path / "scratch", share_images=True)
    assert set(asked.files) - set(shared.files) == showing
    card = (model / "README.md").read_text().replace(MARKER, "") + "\n![mine](wrong_images.png)\n"
    (model / "README.md").write_text(card)
    with pytest.raises(UserError, match=r"the card shows wrong_images\.png with images of the data set; add --sha"):
        collect(model, "me/model", scratch=tmp_path / "scratch")
    assert "wrong_images.png" in collect(model, "me/model", scratch=tmp_path / "scratch", share_images=True).files


def test_every_analysis_that_draws_images_is_known() -> None:
    """`to_display_images` is how an analysis gets hold of images to draw."""
    folder = Path(hf_vit.analysis.__file__).parent
    for name, analysis in ANALYSES.items():
        tree = ast.parse((folder / f"{analysis.__module__.rpartition('.')[2]}.py").read_text())
        draws = any(isinstance(node, ast.Name) and node.id == "to_display_images" for node in ast.walk(tree))
        assert shows_images(f"analysis_{name}.png") == shows_images(f"analysis_{name}_2.svg") == draws, name
