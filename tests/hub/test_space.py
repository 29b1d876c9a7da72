"""A page pushed to the loopback Hub as a static Space."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hub.conftest import save_model
from loopback.client import Client, Loopback, content_hash
from pages.small_runtime import SMALL_FILES, save_runtime

from hf_vit.errors import UserError
from hf_vit.hub.card import render_card, write_card
from hf_vit.hub.page_folder import state_space
from hf_vit.hub.push import push_to_hub
from hf_vit.pages.making import make_page
from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

REPO = "alice/my-page"
SPACE = f"spaces/{REPO}"
PUSH = {"repo_id": REPO, "space": True, "license": "mit"}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    root = tmp_path_factory.mktemp("page")
    models = [save_model(root / family, family, image_size=8) for family in ("plain", "axial")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hf_vit.pages.runtime.FILES", SMALL_FILES)
        make_page(models, root / "page", runtime=save_runtime(root / "runtime"))
    return root / "page"


@pytest.fixture
def page(made: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(made, tmp_path / "my-page")


def test_one_commit_holds_the_page(hub: Loopback, client: Client, page: Path) -> None:
    (page / "notes.txt").write_text("mine")
    (page / "models/0/notes.txt").write_text("mine")
    local = {file.relative_to(page).as_posix(): file for file in page.rglob("*") if file.name != "notes.txt"}
    names = {name for name, file in local.items() if file.is_file()}
    done = client.run("hub.jobs:push", folder=str(page), **PUSH)
    assert done["commit"] == hub.head(SPACE)
    files = hub.files(SPACE)
    assert set(files) == set(done["files"]) == names
    assert {"index.html", "page.json", "models/1/model.onnx", "runtime/ort.wasm.min.mjs"} < names
    for name in names - {"README.md"}:
        assert files[name] == content_hash(local[name].read_bytes(), name.endswith(".onnx"))
    assert done["left_out"] == ["notes.txt"]
    assert done["url"] == f"{hub.endpoint}/{SPACE}/tree/{done['commit']}"
    (listed,) = (line for line in done["told"] if line.startswith("public"))
    assert all(name in listed for name in names)
    info = hub.get(f"/api/{SPACE}")
    assert (info["id"], info["sdk"]) == (REPO, "static")
    assert hub.get(f"/api/models/{REPO}") is None
    again = client.run("hub.jobs:push", folder=str(page), **PUSH)
    assert (again["commit"], again["changed"]) == (done["commit"], False)


def test_license_of_the_models_is_the_page_s(hub: Loopback, xet_client: Client, page: Path) -> None:
    """Both models' cards say apache-2.0."""
    done = xet_client.attempt("hub.jobs:command", arguments=["push", str(page), "my-page", "--space"])
    assert done.code == 0, done.err
    assert f"{hub.endpoint}/{SPACE}/tree/{hub.head(SPACE)}" in done.out
    (page / "README.md").write_text((page / "README.md").read_text().replace("license: apache-2.0\n", ""))
    without = xet_client.attempt("hub.jobs:command", arguments=["push", str(page), "my-page", "--space"])
    assert (without.code, without.err.count("\n")) == (1, 1)
    assert "no license is known" in without.err


def test_a_page_of_fewer_models_leaves_nothing_behind(hub: Loopback, xet_client: Client, page: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(page), **PUSH)
    told = json.loads((page / "page.json").read_text())
    (page / "page.json").write_text(json.dumps(told | {"models": told["models"][:1]}))
    done = xet_client.run("hub.jobs:push", folder=str(page), tag="v2", **PUSH)
    assert done["deleted"] == ["models/1/model.onnx"]
    assert "models/1/model.onnx" not in hub.files(SPACE)
    assert [tag["name"] for tag in hub.get(f"/api/{SPACE}/refs")["tags"]] == ["v2"]


def test_what_the_hub_does_wrong_is_tried_again(hub: Loopback, client: Client, page: Path) -> None:
    """A failing server, a reply that was lost after the commit had landed, a repository made though nobody heard."""
    hub.fault("/api/repos/create", "lost_reply")
    hub.fault(r"/api/spaces/.*/preupload/", "status", status=503)
    hub.fault(r"/api/spaces/.*/commit/", "lost_reply")
    done = client.run("hub.jobs:push", folder=str(page), **PUSH)
    assert done["commit"] == hub.head(SPACE)
    assert hub.fired() == 3


def test_proposals_branches_and_collections(hub: Loopback, xet_client: Client, page: Path) -> None:
    first = xet_client.run("hub.jobs:push", folder=str(page), collection="Pages", **PUSH)
    slug = first["collection"].removeprefix(f"{hub.endpoint}/collections/")
    assert [(item["id"], item["type"]) for item in hub.get(f"/api/collections/{slug}")["items"]] == [(REPO, "space")]
    (page / "style.css").write_text("body {}")
    proposed, again, branch = xet_client.run(
        "hub.jobs:push_many",
        pushes=[{"folder": str(page), **PUSH, **more} for more in ({"create_pr": True},) * 2 + ({"revision": "next"},)],
    )
    assert proposed["pull_request"] == again["pull_request"] == f"{hub.endpoint}/{SPACE}/discussions/1"
    assert (again["changed"], hub.head(SPACE, "next")) == (False, branch["commit"])
    assert hub.head(SPACE) == first["commit"]


def test_a_space_that_runs_a_program_is_not_overwritten(hub: Loopback, xet_client: Client, page: Path) -> None:
    xet_client.run("hub.jobs:push", folder=str(page), **PUSH)
    hub.settings(SPACE, sdk="gradio")
    refused = xet_client.run("hub.jobs:push", folder=str(page), **PUSH)
    assert refused["error"].startswith(f"{REPO} is a Space of the SDK gradio, and a page needs a static one")


def test_a_dry_run_makes_no_space(hub: Loopback, xet_client: Client, page: Path) -> None:
    done = xet_client.run("hub.jobs:push", folder=str(page), dry_run=True, **PUSH)
    assert (done["commit"], hub.get(f"/api/{SPACE}")) == (None, None)
    refused = xet_client.run("hub.jobs:push", folder=str(page), **PUSH | {"repo_id": "acme/x"}, token="hf_bob_write")
    assert "has no right to create it" in refused["error"]


def _rename_model(page: Path) -> None:
    told = json.loads((page / "page.json").read_text())
    told["models"][0]["folder"] = "../../elsewhere"
    (page / "page.json").write_text(json.dumps(told))


def _link_out(page: Path) -> None:
    (page / "models/0/model.onnx").rename(page.parent / "model.onnx")
    (page / "models/0/model.onnx").symlink_to(page.parent / "model.onnx")


def _link_runtime(page: Path) -> None:
    (page / "runtime").rename(page.parent / "elsewhere")
    (page / "runtime").symlink_to(page.parent / "elsewhere")


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda page: (page / name).write_text(text)


def _show_examples(page: Path) -> None:
    told = json.loads((page / "page.json").read_text())
    (page / "page.json").write_text(json.dumps(told | {"examples": [{"file": "examples/0.png", "label": "cat"}]}))


def _tell_token(page: Path) -> None:
    told = json.loads((page / "page.json").read_text())
    (page / "page.json").write_text(json.dumps(told | {"note": "hf_" + "aB3dE6gH9" * 4}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda page: (page / "page.json").unlink(), r"holds no page: there is no page\.json in it; make one"),
        (lambda page: (page / "index.html").unlink(), r"lacks index\.html; make it again"),
        (lambda page: (page / "models/1/model.onnx").unlink(), r"lacks models/1/model\.onnx; make it again"),
        (lambda page: [file.unlink() for file in (page / "runtime").iterdir()], "lacks the files of its runtime"),
        (_write("page.json", "{"), r"page\.json of .* is no page's"),
        (_write("page.json", '{"models": 3}'), r"page\.json of .* is no page's"),
        (_write("page.json", '{"models": [], "examples": []}'), "names other files than a page's"),
        (_rename_model, "names other files than a page's"),
        (_link_out, "is a link to a file outside"),
        (_link_runtime, "is a link to a file outside"),
        (_write("README.md", "no metadata"), "is not a static Space's"),
        (_write("README.md", "---\nsdk: gradio\n---\n"), "is not a static Space's"),
        (_write("README.md", "---\nsdk: [\n---\n"), "has no readable metadata"),
        (_show_examples, "shows 1 images of its data; give --share-images"),
        (_tell_token, "holds what looks like"),
    ],
)
def test_trouble_is_told_without_the_hub(damage: Callable[[Path], object], words: str, page: Path) -> None:
    damage(page)
    with pytest.raises(UserError, match=words) as told:
        push_to_hub(page, REPO, space=True, license="mit")
    assert "\n" not in str(told.value)


def test_examples_are_shared_when_asked_to(hub: Loopback, xet_client: Client, page: Path) -> None:
    (page / "examples").mkdir()
    (page / "examples/0.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    _show_examples(page)
    xet_client.run("hub.jobs:push", folder=str(page), share_images=True, **PUSH)
    assert "examples/0.png" in hub.files(SPACE)


def test_models_are_no_pages_and_pages_no_models(page: Path, model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"holds a page, no model; share it with hf-vit push DIR REPO --space"):
        push_to_hub(page, REPO, license="mit")
    with pytest.raises(UserError, match=r"holds no page: .* or leave --space out to share a model"):
        push_to_hub(model_folder, REPO, space=True)
    with pytest.raises(UserError, match="a page is shared from its folder"):
        push_to_hub(object(), REPO, space=True)  # pyright: ignore[reportArgumentType]


def test_what_splits_weights_does_nothing_to_a_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["push", str(page), REPO, "--space", "--license", "mit", "--max-shard-size", "1MB"])
    told = "hf-vit: --max-shard-size splits weight files, and a page has none; leave it out, or --space\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, told)


def test_the_card_links_to_the_space(model_folder: Path) -> None:
    """From then on, also in cards of later facts; before, it says how a page is made."""
    card = write_card(model_folder, license="mit").read_text()
    assert "A page that runs it in the browser is made by `hf-vit page plain --output page`" in card
    with pytest.raises(SystemExit) as ended:
        main(["card", str(model_folder), "--space", "alice/my_page"])
    assert ended.value.code == 0
    for told in ((model_folder / "README.md").read_text(), render_card(model_folder)):
        line = r"Try it in the browser: [alice/my\_page](https://huggingface.co/spaces/alice/my_page)"
        assert line in told.splitlines()
        assert "is made by `hf-vit page" not in told
        assert "| space |" not in told


@pytest.mark.parametrize("space", ["a](http://x)/b", "a/b\n## c", "<b>/c", "../x", 3, ["a/b"]])
def test_what_is_no_space_is_no_link(space: object, model_folder: Path) -> None:
    """facts.json of a stranger."""
    facts = Facts.load(model_folder)
    facts.records[0].values["space"] = space
    facts.save(model_folder)
    assert "Try it in the browser" not in render_card(model_folder)


@pytest.mark.parametrize(
    ("page", "is_way"),
    [
        ("../../../../settings/tokens#x", False),
        ("pages/../../x", False),
        ("pages/mine/index.html", True),
        ("//example.org/x", False),
        ("/etc/passwd", False),
        ("https://example.org", False),
        ("javascript:alert(1)", False),
        ("a) [b](c", False),
        ("a\n## b", False),
        (["a"], False),
    ],
)
def test_a_way_to_a_page_in_the_repository_is_linked(page: object, is_way: bool, model_folder: Path) -> None:
    """Whatever facts.json holds: what this package writes there has no absolute paths."""
    records = json.loads((model_folder / "facts.json").read_text())
    records[0]["values"]["page"] = page
    (model_folder / "facts.json").write_text(json.dumps(records))
    card = render_card(model_folder)
    assert (f"Try it in the browser: [its page]({page})" in card.splitlines()) == is_way
    assert ("is made by `hf-vit page" in card) != is_way
    assert "| page |" not in card


@pytest.mark.parametrize("way", ["../../docs/page.md#x", "../../docs/other.md", "../../../private.md"])
def test_a_way_up_stays_in_a_git_repository(way: str, model_folder: Path, tmp_path: Path) -> None:
    """Of a card that is kept in one, until it goes to the Hub, where its folder is all that there is."""
    for name in ("private.md", "git/docs/page.md", "git/.git/HEAD", "git/models/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folder = model_folder.rename(tmp_path / "git/models/mine")
    facts = Facts.load(folder)
    facts.records[0].values["page"] = way
    facts.save(folder)
    assert (f"[its page]({way})" in render_card(folder)) == (way == "../../docs/page.md#x")
    assert "its page" not in render_card(folder, repo_id="alice/mine")


def test_what_cannot_be_linked_to(model_folder: Path, tmp_path: Path) -> None:
    for space, words in (("my-page", "lacks its owner"), ("a/b/c", "cannot be the name"), ("", "cannot be the name")):
        with pytest.raises(UserError, match=words):
            state_space(model_folder, space)
    with pytest.raises(UserError, match="tells of no training or conversion"):
        state_space(tmp_path, "alice/my-page")
    assert "space" not in Facts.load(model_folder).records[0].values
