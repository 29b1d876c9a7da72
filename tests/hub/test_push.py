"""Pushing to the loopback Hub: one complete commit, checked before anything is created and compared afterwards."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hub import jobs
from hub.conftest import training_record
from loopback.client import Client, Loopback, content_hash

from hf_vit.results.facts import Facts

REPO = "alice/my-vit"
WEIGHTS = "model.safetensors"
UPLOADS = r"^/lfs/|^/xet/v1/(xorbs|shards)"


def local_logits(folder: Path) -> list[float]:
    found = jobs.logits(str(folder))
    assert isinstance(found, list), found
    return found


def test_one_commit_holds_everything(hub: Loopback, client: Client, model_folder: Path) -> None:
    for name in ("training_args.bin", "notes.txt", "holiday.png"):
        (model_folder / name).write_bytes(b"pickle or private")
    (model_folder / "checkpoints").mkdir()
    before = {path: path.read_bytes() for path in model_folder.rglob("*") if path.is_file()}
    done = client.run("hub.jobs:push", folder=str(model_folder))
    assert done["commit"] == hub.head(REPO)
    files = hub.files(REPO)
    code = {path.name for path in model_folder.glob("*.py")}
    assert len(code) >= 8
    assert set(files) == {"config.json", WEIGHTS, "preprocessor_config.json", "facts.json", "README.md",
                          "learning_curve.png", *code}  # fmt: skip
    assert set(done["files"]) == set(files)
    for name in files:
        if name != "README.md":
            assert files[name] == content_hash((model_folder / name).read_bytes(), name.endswith((WEIGHTS, ".png")))
    assert done["left_out"] == ["checkpoints", "holiday.png", "notes.txt", "training_args.bin"]
    assert before == {path: path.read_bytes() for path in model_folder.rglob("*") if path.is_file()}, "not changed"
    again = client.run("hub.jobs:push", folder=str(model_folder))
    assert (again["commit"], again["changed"]) == (done["commit"], False)


def test_the_command(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    done = xet_client.attempt("hub.jobs:command", arguments=["push", str(model_folder), "my-vit", "--tag", "v1"])
    assert done.code == 0, done.err
    commit = hub.head(REPO)
    assert "as alice (by the token of the environment variable HF_TOKEN)" in done.out
    assert f"commit {commit}" in done.out
    assert f"{hub.endpoint}/{REPO}/tree/{commit}" in done.out
    tags = {tag["name"]: tag["targetCommit"] for tag in hub.get(f"/api/models/{REPO}/refs")["tags"]}
    assert tags == {"v1": commit}
    wrong = xet_client.attempt("hub.jobs:command", arguments=["push", str(model_folder), "my vit"])
    assert wrong.code == 1
    assert len(wrong.err.strip().splitlines()) == 1
    assert "'my vit' cannot be the name of a repository" in wrong.err


def test_sharded_after_single_and_back(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]) -> None:
    """The trap: a stale single file is loaded before shards, silently."""
    old, new = make_model("old", seed=1), make_model("new", seed=2)
    single, sharded, back = xet_client.run(
        "hub.jobs:push_many",
        pushes=[
            {"folder": str(old)},
            {"folder": str(new), "max_shard_size": "8KB"},
            {"folder": str(old)},
        ],
    )
    assert sharded["deleted"] == [WEIGHTS]
    names = set(hub.files(REPO, sharded["commit"]))
    shards = {name for name in names if name.startswith("model-0")}
    assert len(shards) > 1
    assert WEIGHTS not in names
    assert set(back["deleted"]) == {*shards, f"{WEIGHTS}.index.json"}
    loads = [{"repo_id": REPO, "revision": push["commit"]} for push in (single, sharded, back)]
    found = xet_client.run("hub.jobs:logits_many", loads=loads)
    assert found[0] == found[2] == local_logits(old)
    # Tensors of shards lie elsewhere in memory, and sums are rounded by how they are aligned.
    assert found[1] == pytest.approx(local_logits(new), abs=1e-5)


def test_pickles_and_old_code_of_others_are_deleted(
    hub: Loopback, xet_client: Client, model_folder: Path, saved_models: dict[str, Path]
) -> None:
    xet_client.run("hub.jobs:push", folder=str(saved_models["axial"]))
    assert "modeling_hf_axial_vit.py" in hub.files(REPO)
    xet_client.run(
        "hub.jobs:upload_raw",
        repo_id=REPO,
        files={"pytorch_model.bin": "x", "training_args.bin": "x", "notes.md": "kept", "sub/model.bin": "kept"},
    )
    done = xet_client.run("hub.jobs:push", folder=str(model_folder))
    assert set(done["deleted"]) >= {"pytorch_model.bin", "training_args.bin", "modeling_hf_axial_vit.py"}
    left = set(hub.files(REPO))
    assert {"notes.md", "sub/model.bin"} <= left
    assert not left & set(done["deleted"])


def test_a_model_object(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    done = xet_client.run("hub.jobs:push_object", folder=str(model_folder), repo_id="acme/other", license="mit")
    assert done["commit"] == hub.head("acme/other")
    assert xet_client.run("hub.jobs:logits", repo_id="acme/other") == local_logits(model_folder)
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
    assert again_behind["error"].startswith(
        f"alice/other has a tag v1 already (at {on['commit'][:8]}), of exactly this"
    )
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
    assert "tags do not move" in moved["error"]
    assert "does not exist, so nothing can be proposed" in unproposable["error"]
    loads = [{"repo_id": REPO, "revision": revision} for revision in ("main", "v1", "next/try", "refs/pr/1")]
    wanted = [local_logits(Path(folders[number])) for number in (0, 0, 1, 2)]
    assert xet_client.run("hub.jobs:logits_many", loads=loads) == wanted


def test_a_closed_proposal_is_made_anew(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]) -> None:
    xet_client.run("hub.jobs:push", folder=str(make_model("first", seed=1)))
    folder = str(make_model("second", seed=2))
    xet_client.run("hub.jobs:push", folder=folder, create_pr=True)
    hub.settings(REPO, closed=[1])
    again = xet_client.run("hub.jobs:push", folder=folder, create_pr=True)
    assert (again["changed"], again["pull_request"]) == (True, f"{hub.endpoint}/{REPO}/discussions/2")


def test_a_push_that_is_told_to_end_leaves_nothing(
    hub: Loopback, client: Client, model_folder: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    hub.fault(UPLOADS, "held")
    job = client.start("hub.jobs:push_from", scratch=str(scratch), folder=str(model_folder), max_shard_size="8KB")
    hub.wait_for_fault(job)
    assert list(scratch.rglob("*.safetensors"))
    os.kill(job.pid, signal.SIGTERM)
    hub.clear_faults()
    assert job.wait().code == 128 + signal.SIGTERM
    assert list(scratch.iterdir()) == []


def test_private(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    hidden, public, refused = xet_client.run(
        "hub.jobs:push_many",
        pushes=[
            {"folder": str(model_folder), "repo_id": "alice/hidden", "private": True},
            {"folder": str(model_folder)},
            {"folder": str(model_folder), "private": True},
        ],
    )
    assert hub.get("/api/models/alice/hidden")["private"] is True
    assert hub.get("/api/models/alice/hidden", token="hf_bob_write") is None
    assert hidden["commit"]
    assert public["commit"]
    assert "exists and is public" in refused["error"]


def test_a_dry_run_changes_nothing(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    done = xet_client.run("hub.jobs:push", folder=str(model_folder), dry_run=True, tag="v1", revision="next")
    assert done["commit"] is None
    assert WEIGHTS in done["files"]
    assert hub.get(f"/api/models/{REPO}") is None
    assert {entry["method"] for entry in hub.log()} <= {"GET", "POST"}
    assert [entry["path"] for entry in hub.log() if entry["method"] == "POST"] == ["/api/validate-yaml"]


def test_the_name_on_the_hub_is_in_the_card(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(model_folder), repo_id="my-vit", license="cc-by-4.0")
    card = xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")
    assert f'repo = "{REPO}"' in card
    assert "license: cc-by-4.0" in card


def damage(folder: Path, what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if what == "no card fact":
        Facts(records=[]).save(folder)
    elif what == "no data fact":
        Facts(records=[training_record(data=None)]).save(folder)
    elif what == "no auto_map":
        (folder / "config.json").write_text(json.dumps({**config, "auto_map": {}}))
    elif what == "no code":
        (folder / "embeddings_hf_vit.py").unlink()
    elif what == "no processor":
        (folder / "preprocessor_config.json").unlink()
    elif what == "no weights":
        (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    elif what == "damaged weights":
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    elif what == "missing shard":
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
        (folder / WEIGHTS).unlink()
    elif what == "both kinds":
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"a": WEIGHTS}}))
    elif what == "damaged config":
        (folder / "config.json").write_text("{")
    elif what == "missing picture":
        (folder / "README.md").write_text("---\nlicense: mit\n---\n![curve](plots/curve.png)")
    else:
        (folder / "README.md").write_text(what)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no card fact", "lacks the origin of the weights"),
        ("no data fact", r"lacks the training data \(data.name"),
        ("no auto_map", "lacks AutoConfig, AutoModel, HfViTForImageClassification"),
        ("no code", "lacks embeddings_hf_vit.py"),
        ("no processor", "holds no image processor"),
        ("no weights", r"no weights in safetensors format \(pickles such as pytorch_model.bin"),
        ("damaged weights", "weights in .* are damaged"),
        ("missing shard", "lacks some of the weight files"),
        ("both kinds", "delete the stale one"),
        ("damaged config", "config.json of .* is damaged"),
        ("missing picture", "the card shows plots/curve.png"),
        ("mine, without metadata", "has no metadata"),
        ("---\nlicense: [\n---\n", "README.md: while parsing"),
        ("---\ntags: [vit]\n---\n", "license is missing"),
        ("---\nlicense: Apache 2\n---\n", "'Apache 2' is not a license id"),
        ("---\nlicense: mit\ndatasets: [my pictures]\n---\n", "datasets: 'my pictures'"),
        ("---\nlicense: mit\nmodel-index: [{name: x, results: [{}]}]\n---\n", "model-index: 'task' is missing"),
    ],
)
def test_local_trouble_is_told_without_the_hub(
    what: str, message: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where the Hub cannot be reached (HF_HUB_OFFLINE): nothing is asked of it."""
    from hf_vit import UserError, push_to_hub

    damage(model_folder, what)
    with pytest.raises(UserError, match=message):
        push_to_hub(model_folder, REPO)


def test_what_cannot_go_together(model_folder: Path) -> None:
    from hf_vit import UserError, push_to_hub

    for options, message in (
        ({"create_pr": True, "revision": "next"}, "leave --revision next out"),
        ({"create_pr": True, "tag": "v1"}, "leave --tag out"),
        ({"tag": "my tag"}, "cannot be a tag's name"),
        ({"revision": "refs/pr/1"}, "cannot be a revision's name"),
        ({"facts": [training_record()]}, "go with a model object"),
    ):
        with pytest.raises(UserError, match=message):
            push_to_hub(model_folder, REPO, **options)
    for name in ("a/b/c", "me/my vit", "me/..", "me/vit.git", "x" * 97):
        with pytest.raises(UserError, match="cannot be the name of a repository"):
            push_to_hub(model_folder, name)


def test_shards_hold_the_same_weights(model_folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from hf_vit.hub.contents import find_weights

    shards = find_weights(model_folder, tmp_path, 8000)
    index = json.loads((tmp_path / f"{WEIGHTS}.index.json").read_text())
    whole = load_file(model_folder / WEIGHTS)
    assert set(index["weight_map"]) == set(whole)
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(shards[file])[name], whole[name])
    assert find_weights(model_folder, tmp_path, "5GB") == {WEIGHTS: model_folder / WEIGHTS}


def test_what_a_killed_push_left_is_removed_by_the_next(
    hub: Loopback, xet_client: Client, model_folder: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    hub.fault(UPLOADS, "held")
    job = xet_client.start("hub.jobs:push_from", scratch=str(scratch), folder=str(model_folder), max_shard_size="8KB")
    hub.wait_for_fault(job)
    job.kill()
    job.wait()
    hub.clear_faults()
    assert list(scratch.iterdir())
    xet_client.run("hub.jobs:push_from", scratch=str(scratch), folder=str(model_folder))
    assert list(scratch.iterdir()) == []


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
    words = ["push", str(model_folder), "third", "--collection", slug]
    done = xet_client.attempt("hub.jobs:command", arguments=words)
    assert done.code == 0, done.err
    assert f"in the collection {titled['collection']}" in done.out
    assert len(hub.get(f"/api/collections/{slug}")["items"]) == 3
    unknown = xet_client.run("hub.jobs:push", folder=str(model_folder), collection="alice/no-such-collection")
    assert "adding to the collection failed: " in unknown["error"]
    assert "main is unchanged" in unknown["error"]
    refused = xet_client.run("hub.jobs:push", folder=str(model_folder), collection="x", create_pr=True)
    assert "leave --collection out until it is merged" in refused["error"]


def test_a_dry_run_makes_no_collection(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    done = xet_client.run("hub.jobs:push", folder=str(model_folder), collection="Small models", dry_run=True)
    assert (done["commit"], done["collection"]) == (None, None)
    assert not [entry for entry in hub.log() if "/api/collections" in entry["path"]]
