"""Pushing to the loopback Hub: one complete commit, checked before anything is created and compared afterwards."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub import jobs
from hub.conftest import training_record
from loopback.client import Client, Loopback, content_hash
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from training.conftest import make_colour_folder

from hf_vit import UserError, push_to_hub
from hf_vit.results.facts import Facts

REPO = "alice/my-vit"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def test_one_commit_holds_everything(hub: Loopback, client: Client, model_folder: Path) -> None:
    for name in ("training_args.bin", "notes.txt", "holiday.png"):
        (model_folder / name).write_bytes(b"pickle or private")
    (model_folder / "checkpoints").mkdir()
    before = {path: path.read_bytes() for path in model_folder.rglob("*") if path.is_file()}
    done = client.run("hub.jobs:push", folder=str(model_folder))
    assert done["commit"] == hub.head(REPO)
    files = hub.files(REPO)
    code = {path.name for path in model_folder.glob("*.py")}
    assert {f"{part}_hf_vit.py" for part in ("configuration", "embeddings", "modeling", "pretrained")} <= code
    assert set(files) == {"config.json", WEIGHTS, "preprocessor_config.json", "facts.json", "README.md",
                          "learning_curve.png", "handler.py", "requirements.txt", *code}  # fmt: skip
    assert set(done["files"]) == set(files)
    for name in files:
        if name not in ("README.md", "handler.py", "requirements.txt"):
            assert files[name] == content_hash((model_folder / name).read_bytes(), name.endswith((WEIGHTS, ".png")))
    assert done["left_out"] == ["checkpoints", "holiday.png", "notes.txt", "training_args.bin"]
    assert before == {path: path.read_bytes() for path in model_folder.rglob("*") if path.is_file()}, "not changed"
    again = client.run("hub.jobs:push", folder=str(model_folder))
    assert (again["commit"], again["changed"]) == (done["commit"], False)


def test_the_command(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    told, commit = xet_client.command("push", model_folder, "my-vit", "--tag", "v1"), hub.head(REPO)
    assert "as alice (by the token of the environment variable HF_TOKEN)" in told
    assert f"commit {commit}" in told
    assert f"{hub.endpoint}/{REPO}/tree/{commit}" in told
    tags = {tag["name"]: tag["targetCommit"] for tag in hub.get(f"/api/models/{REPO}/refs")["tags"]}
    assert tags == {"v1": commit}
    hub.fault("/models/alice/former$", "status", status=307, headers={"Location": f"{hub.endpoint}/api/models/{REPO}"})
    assert f"{REPO} already holds this content" in xet_client.command("push", model_folder, "alice/former")


def test_sharded_after_single_and_back(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]) -> None:
    """The trap: a stale single file is loaded before shards, silently."""
    old, new = make_model("old", seed=1), make_model("new", seed=2)
    single, sharded, back = xet_client.run(
        "hub.jobs:push_many",
        pushes=[{"folder": str(old)}, {"folder": str(new), "max_shard_size": "8KB"}, {"folder": str(old)}],
    )
    assert sharded["deleted"] == [WEIGHTS]
    names = set(hub.files(REPO, sharded["commit"]))
    shards = {name for name in names if name.startswith("model-0")}
    assert len(shards) > 1
    assert WEIGHTS not in names
    assert set(back["deleted"]) == {*shards, f"{WEIGHTS}.index.json"}
    loads = [{"repo_id": REPO, "revision": push["commit"]} for push in (single, sharded, back)]
    found = xet_client.run("hub.jobs:logits_many", loads=loads)
    assert found[0] == found[2] == jobs.logits(str(old))
    # Tensors of shards lie elsewhere in memory, and sums are rounded by how they are aligned.
    assert found[1] == pytest.approx(jobs.logits(str(new)), abs=1e-5)


def test_pickles_and_old_code_of_others_are_deleted(
    hub: Loopback, xet_client: Client, model_folder: Path, saved_models: dict[str, Path]
) -> None:
    xet_client.run("hub.jobs:push", folder=str(saved_models["axial"]))
    assert "modeling_hf_axial_vit.py" in hub.files(REPO)
    # transformers would read the last two.
    old = "pytorch_model.bin", "training_args.bin", "adapter_config.json", "processor_config.json"
    files_of_others = "notes.md", "sub/model.bin", "openvino_model.bin"  # the last is a part of a graph
    xet_client.run(
        "hub.jobs:upload_raw",
        repo_id=REPO,
        files=dict.fromkeys(files_of_others, "kept") | dict.fromkeys(old, "{}"),
    )
    done = xet_client.run("hub.jobs:push", folder=str(model_folder))
    assert set(done["deleted"]) >= {*old, "modeling_hf_axial_vit.py"}
    left = set(hub.files(REPO))
    assert {*files_of_others} <= left
    assert not left & set(done["deleted"])
    (model_folder / "processor_config.json").write_text("{}")  # here transformers reads it, too
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    assert xet_client.run("hub.jobs:push", folder=str(model_folder))["deleted"] == []
    assert "processor_config.json" in hub.files(REPO)
    (model_folder / "facts.json").unlink()  # those of the hub are of other weights
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert xet_client.run("hub.jobs:push", folder=str(model_folder))["deleted"] == ["facts.json"]


def test_a_model_object(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    done = xet_client.run("hub.jobs:push_object", folder=str(model_folder), repo_id="acme/other", license="mit")
    assert done["commit"] == hub.head("acme/other")
    assert xet_client.run("hub.jobs:logits", repo_id="acme/other") == jobs.logits(str(model_folder))
    card = xet_client.run("hub.jobs:read", repo_id="acme/other", name="README.md")
    assert 'repo = "acme/other"' in card
    assert "license: mit" in card
    without = xet_client.run("hub.jobs:push_object", folder=str(model_folder), repo_id="alice/bare", facts=False)
    assert "the origin of the weights" in without["error"]
    assert hub.get("/api/models/alice/bare") is None


def test_branches_tags_and_pull_requests(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]) -> None:
    folders = [str(make_model(f"m{seed}", seed=seed)) for seed in range(3)]
    first, again, branch, proposed, same_proposal, taken, moved, unproposable, on, behind = xet_client.run(
        "hub.jobs:push_many",
        pushes=[
            {"folder": folders[0], "tag": "v1"},
            {"folder": folders[0], "tag": "v1"},
            {"folder": folders[1], "revision": "next/try"},
            {"folder": folders[2], "create_pr": True},
            {"folder": folders[2], "create_pr": True},
            {"folder": folders[2], "tag": "v1"},
            {"folder": folders[2], "revision": "v1"},
            {"folder": folders[2], "create_pr": True, "repo_id": "alice/nothing"},
            {"folder": folders[1], "repo_id": "alice/other", "tag": "v1"},
            {"folder": folders[2], "repo_id": "alice/other"},
        ],
    )
    again_behind = xet_client.run("hub.jobs:push", folder=folders[1], repo_id="alice/other", tag="v1")
    assert f"alice/other has a tag v1 already (at {on['commit'][:8]}) with this content" in again_behind["error"]
    assert hub.head("alice/other") == behind["commit"]
    assert hub.head(REPO) == first["commit"]
    assert hub.head(REPO, "next/try") == branch["commit"]
    assert proposed["pull_request"] == f"{hub.endpoint}/{REPO}/discussions/1"
    assert hub.files(REPO, "refs%2Fpr%2F1") == hub.files(REPO, proposed["commit"])
    # The same command again finds its work done, and does nothing.
    for repeated, before in ((again, first), (same_proposal, proposed)):
        assert (repeated["commit"], repeated["changed"]) == (before["commit"], False)
        assert repeated["pull_request"] == before["pull_request"]
    assert "has a tag v1 already" in taken["error"]
    assert "tags cannot be moved" in moved["error"]
    assert "does not exist, so it has no pull requests" in unproposable["error"]
    loads = [{"repo_id": REPO, "revision": revision} for revision in ("main", "v1", "next/try", "refs/pr/1")]
    wanted = [jobs.logits(folders[number]) for number in (0, 0, 1, 2)]
    assert xet_client.run("hub.jobs:logits_many", loads=loads) == wanted
    for model in (f"{REPO}@v1", f"hf://{REPO}"):
        assert xet_client.run("hf_vit.hub.card_metadata:find_license", model=model) == {"license": "apache-2.0"}
    hub.settings(REPO, closed=[1])
    anew = xet_client.run("hub.jobs:push", folder=folders[2], create_pr=True)
    assert (anew["changed"], anew["pull_request"]) == (True, f"{hub.endpoint}/{REPO}/discussions/2")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_temporary_file_is_left(
    how: signal.Signals, hub: Loopback, xet_client: Client, model_folder: Path, tmp_path: Path
) -> None:
    """By a push that is told to end; what a killed one left is removed by the next."""
    given = {"folder": str(model_folder), "scratch": str(tmp_path / "scratch")}
    (tmp_path / "scratch").mkdir()
    hub.fault("^/xet/v1/(xorbs|shards)", "held")
    job = xet_client.start("hub.jobs:push", max_shard_size="8KB", **given)
    hub.wait_for_fault(job)
    assert list((tmp_path / "scratch").rglob("*.safetensors"))
    os.kill(job.pid, how)
    hub.clear_faults()
    assert job.wait().code == (128 + how if how == signal.SIGTERM else -how)
    if how == signal.SIGKILL:
        xet_client.run("hub.jobs:push", **given)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_dry_run_changes_nothing_and_private_is_kept(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    folder, dry = {"folder": str(model_folder)}, {"dry_run": True, "tag": "v1", "revision": "next"}
    pushes = [folder | dry, folder | {"dry_run": True, "collection": "C"}]
    done, made = xet_client.run("hub.jobs:push_many", pushes=pushes)
    assert (done["commit"], made["commit"], made["collection"]) == (None, None, None)
    assert WEIGHTS in done["files"]
    assert hub.get(f"/api/models/{REPO}") is None
    assert {entry["path"] for entry in hub.log() if entry["method"] != "GET"} == {"/api/validate-yaml"}
    hidden, public, refused = xet_client.run(
        "hub.jobs:push_many",
        pushes=[folder | {"repo_id": "alice/hidden", "private": True}, folder, folder | {"private": True}],
    )
    assert hub.get("/api/models/alice/hidden")["private"] is True
    assert hub.get("/api/models/alice/hidden", token="hf_bob_write") is None
    assert hidden["commit"]
    assert public["commit"]
    assert "exists and is public" in refused["error"]


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def with_config(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))

    return change


def only_index(text: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text if isinstance(text, str) else json.dumps(text))

    return change


def card(fields: str) -> Callable[[Path], object]:
    return write("README.md", f"---\n{fields}\n---\n")


def photograph(name: str, card: str | None = None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        exif, text = Image.Exif(), PngInfo()
        exif.get_ifd(0x8825)[1] = "N"
        text.add_itxt("XML:com.adobe.xmp", '<rdf:Description exif:GPSLatitude="48,8.5N"/>')
        (folder / name).parent.mkdir(exist_ok=True)
        place: dict[str, Any] = {"pnginfo": text} if name.endswith(".png") else {"exif": exif}
        Image.new("RGB", (8, 8)).save(folder / name, **place)
        if card is not None:
            (folder / "README.md").write_text(card)

    return change


DAMAGED = "config.json of .* is damaged: .*"
INDEX_DAMAGED = f"{INDEX} of .* (has a weight_map|holds JSON, but not an|cannot be read).*save_pretrained"
# What is wrong with a folder, and what is told.
TROUBLE: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: Facts(records=[]).save(folder), "lacks the origin of the weights"),
    (lambda folder: Facts(records=[training_record(data=None)]).save(folder), r"lacks the training data \(data.name"),
    (with_config(auto_map={}), "lacks AutoConfig, AutoModel, HfViTForImageClassification"),
    (lambda folder: (folder / "embeddings_hf_vit.py").unlink(), "lacks embeddings_hf_vit.py"),
    (lambda folder: (folder / "preprocessor_config.json").unlink(), "holds no image processor"),
    (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
     r"no weights in safetensors format \(pickle files such as pytorch_model.bin"),
    (lambda folder: os.truncate(folder / WEIGHTS, 2000), "weights in .* are damaged"),
    (write(WEIGHTS, "version https://git-lfs.github.com/spec/v1"), "model.safetensors of .* is a Git LFS pointer"),
    (only_index({"weight_map": {"a": "model-1.safetensors"}}), "lacks some of the weight files"),
    (write(INDEX, json.dumps({"weight_map": {"a": WEIGHTS}})), "delete the outdated one"),
    *((only_index(index), INDEX_DAMAGED) for index in ({}, [], {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, "{")),
    (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "merge it by peft's merge_and"),
    (write("config.json", "{"), "config.json of .* cannot be read: it is not valid JSON"),
    (write("config.json", "[]"), "config.json of .* holds JSON, but not an object"),
    (with_config(auto_map="x"), f"{DAMAGED}auto_map"),
    (with_config(patch_size=[1]), f"{DAMAGED}patch_size"),
    (with_config(id2label={"zero": "a"}), f"{DAMAGED}id2label.zero"),
    (with_config(architectures="x"), f"{DAMAGED}architectures"),
    (photograph("examples/x.jpg"), "examples/x.jpg of .* contains the place where it was taken"),
    (photograph("examples/x.png"), "examples/x.png of .* contains the place where it was taken"),
    (photograph("me.jpg", "---\nlicense: mit\n---\n![me](me.jpg)"), "me.jpg of .* contains the place where it was"),
    (write("embeddings_hf_vit.py", "def ("), "embeddings_hf_vit.py of .* is not valid Python code"),
    (write("embeddings_hf_vit.py", "\0"), "embeddings_hf_vit.py of .* is not valid Python code"),
    (lambda folder: (folder / "embeddings_hf_vit.py").write_bytes(b"x = '\xed\xa0\x80'"), "is not valid Python code"),
    (write("README.md", "---\nlicense: mit\n---\n![curve](plots/curve.png)"), "the card shows plots/curve.png"),
    (write("README.md", "---\nlicense: mit\n---\n<img src='plots/other.png'>"), "the card shows plots/other.png"),
    (write("README.md", "mine, without metadata"), "has no metadata"),
    (lambda folder: (folder / "README.md").write_bytes(b"Mod\xe8le"), "README.md of .* is not UTF-8 text; save it as"),
    (card("license: ["), "README.md: while parsing"),
    (card("tags: [vit]"), "license is missing"),
    (card("license: Apache 2"), "'Apache 2' is not a license id"),
    (card("license: mit\ndatasets: [my pictures]"), "datasets: 'my pictures'"),
    (card("license: mit\nlanguage: no"), "language: False is not text"),
    (card("license: mit\nmodel-index: [{name: x, results: [{}]}]"), "model-index: 'task' is missing"),
    (card("license: mit\nmodel-index: [{name: x, results: [{task: {type: t}, dataset: {type: d, name: d, config: 3}, "
          "metrics: [{type: m, value: 1}]}]}]"), "model-index: dataset_config is 3, not text"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TROUBLE)), ids=lambda number: TROUBLE[number][1])
def test_local_trouble_is_told_without_the_hub(number: int, model_folder: Path) -> None:
    """In this process, where the Hub cannot be reached (HF_HUB_OFFLINE): nothing is asked of it."""
    change, message = TROUBLE[number]
    change(model_folder)
    with pytest.raises(UserError, match=message) as told:
        push_to_hub(model_folder, REPO)
    assert "\n" not in str(told.value)


def test_what_cannot_go_together(model_folder: Path) -> None:
    for options, message in (
        ({"create_pr": True, "revision": "next"}, "a pull request always targets main, not next; leave --revision out"),
        ({"create_pr": True, "tag": "v1"}, "leave --tag out"),
        ({"tag": "my tag"}, "cannot be the name of a tag"),
        ({"revision": "refs/pr/1"}, "cannot be the name of a revision"),
        ({"facts": [training_record()]}, "are for a model object"),
    ):
        with pytest.raises(UserError, match=message):
            push_to_hub(model_folder, REPO, **options)
    for name in ("a/b/c", "me/my vit", "me/..", "me/vit.git", "x" * 97):
        with pytest.raises(UserError, match="cannot be the name of a repository"):
            push_to_hub(model_folder, name)


def test_a_full_disk_is_told(model_folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be split into shards in .*; make room for [\d,]+ bytes"):
            push_to_hub(model_folder, REPO, max_shard_size=6000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_collection_is_made_once(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    """By its title, by its slug, when the answer is lost, and when nothing else is left to do."""
    hub.fault("/api/collections$", "lost_reply", method="POST")
    titled, *others = xet_client.run(
        "hub.jobs:push_many",
        pushes=[{"folder": str(model_folder), "collection": "Small models"}] * 2
        + [{"folder": str(model_folder), "repo_id": "alice/second", "collection": "Small models"}],
    )
    assert titled["collection"].startswith(f"{hub.endpoint}/collections/alice/small-models-")
    assert {other["collection"] for other in others} == {titled["collection"]}
    assert [other["changed"] for other in others] == [False, True]
    slug = titled["collection"].removeprefix(f"{hub.endpoint}/collections/")
    items = hub.get(f"/api/collections/{slug}")["items"]
    assert [(item["id"], item["type"]) for item in items] == [(REPO, "model"), ("alice/second", "model")]
    told = xet_client.command("push", model_folder, "third", "--collection", slug)
    assert f"in the collection {titled['collection']}" in told
    assert len(hub.get(f"/api/collections/{slug}")["items"]) == 3
    unknown = xet_client.run("hub.jobs:push", folder=str(model_folder), collection="alice/no-such-collection")
    assert "adding to the collection failed: " in unknown["error"]
    assert "main is unchanged" in unknown["error"]
    refused = xet_client.run("hub.jobs:push", folder=str(model_folder), collection="x", create_pr=True)
    assert "leave --collection out until it is merged" in refused["error"]


TRAINED = "alice/trained"


def train(client: Client, folder: Path, **options: Any) -> Any:
    return client.run("hub.jobs:train", folder=str(folder), **options)


def test_the_trainer_shares_one_commit(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    done = train(xet_client, tmp_path / "trained", hub_model_id=TRAINED)
    files = hub.files(TRAINED)
    wanted = {"model.safetensors", "config.json", "preprocessor_config.json", "facts.json", "README.md"}
    assert {*wanted, "modeling_hf_vit.py"} <= set(files)
    assert not [name for name in files if "checkpoint" in name or name.endswith((".bin", ".pt"))]
    assert (tmp_path / "trained" / "checkpoint-2").is_dir(), "it was there to be left out"
    card = xet_client.run("hub.jobs:read", repo_id=TRAINED, name="README.md")
    for row in ("| Data | colours, split train, 6 images |", "| learning rate | 0.001 |", "| layer decay | 0.5 |"):
        assert row in card
    assert "| validation accuracy | 75.00% |" in card, "of the weights that were loaded at the end"
    assert xet_client.run("hub.jobs:logits", repo_id=TRAINED) == done["logits"]
    # One commit after the Hub's own first one, and no request before the end but questions.
    assert len([entry for entry in hub.log() if entry["method"] == "POST" and "/commit/" in entry["path"]]) == 1
    state = tmp_path / "trained" / "checkpoint-1" / "trainer_state.json"
    state.write_text(re.sub(r'"earlier": [\d.e-]+', '"earlier": 7000', state.read_text()))
    options = dict(named="by the dataset", resume=str(state.parent), again=True)
    train(xet_client, tmp_path / "named", hub_model_id="alice/named", **options)
    record, evaluation = json.loads(xet_client.run("hub.jobs:read", repo_id="alice/named", name="facts.json"))
    assert (record["kind"], evaluation["kind"]) == ("training", "evaluation"), "which is after the last training"
    assert record["seconds"] > 7000, "of both sessions"
    card = xet_client.run("hub.jobs:read", repo_id="alice/named", name="README.md")
    assert "| Data | colours, split train, 6 images |" in card
    assert "Fingerprint" not in card, "the data set's own is not a hash of its images"


def test_trouble_is_told_before_the_training(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    for number, (options, message) in enumerate(
        (
            ({"token": "hf_alice_read"}, "is read-only"),
            ({"token": None}, "there is no token"),
            ({"named": False}, "the model card needs the name of the training data"),
            ({"processor": False}, "processing_class="),
            ({"license": None}, "the model's license is unknown; give one"),
        )
    ):
        done = train(xet_client, tmp_path / str(number), hub_model_id=TRAINED, **options)
        assert message in done["error"]
        assert done["steps"] == 0
    assert hub.get(f"/api/models/{TRAINED}") is None


def test_a_failed_push_ends_the_run(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    hub.fault("/commit/", "status", status=403, times=-1, message="no space left")
    folder = tmp_path / "trained"
    done = xet_client.attempt("hub.jobs:train", folder=str(folder), hub_model_id=TRAINED, catch=False)
    assert done.code != 0
    assert "UserError: the model in" in done.err
    assert "no space left" in done.err
    assert f"push it later with hf-vit push {folder} {TRAINED}" in done.err
    hub.clear_faults()
    xet_client.command("push", folder, TRAINED)
    assert hub.head(TRAINED)


def test_finetune_shares_its_result(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    """Or says that sharing failed, and where the model lies."""
    data = make_colour_folder(tmp_path / "colours")

    def finetune(name: str, **options: Any) -> Any:
        arguments = ["finetune", "--model", "Ti/4", "--image-size", "8", "--data", str(data), "--steps", "2",
                     "--output", str(tmp_path / name), "--evaluations", "1", "--push", TRAINED, "--private",
                     "--license", "mit"]  # fmt: skip
        return xet_client.attempt("hub.jobs:command", arguments=arguments, **options)

    refused = finetune("never", token="hf_alice_read")
    assert refused.code == 1
    assert "is read-only" in refused.err
    assert not (tmp_path / "never").exists()
    hub.fault("/commit/", "status", status=403, times=-1)
    failed = finetune("first")
    assert failed.code == 1
    assert f"hf-vit: the model in {tmp_path / 'first'} is complete, but pushing it failed" in failed.err
    assert (tmp_path / "first" / "model.safetensors").is_file()
    hub.clear_faults()
    done = finetune("second")
    assert done.code == 0, done.err
    assert f"commit {hub.head(TRAINED)}" in done.out
    assert hub.get(f"/api/models/{TRAINED}")["private"] is True
    assert {"learning_curve.png", "facts.json", "model.safetensors"} <= set(hub.files(TRAINED))
