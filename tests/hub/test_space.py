"""A page pushed to the loopback Hub as a static Space."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import transformers
from evaluation.tiny import make_images
from hub.conftest import save_model
from hub.test_handler import save_dense
from huggingface_hub import RepoCard
from loopback.client import Client, Loopback, content_hash
from pages.small_runtime import SMALL_FILES, save_runtime
from PIL import Image

from hf_vit.errors import UserError
from hf_vit.hub.card import record_space, render_card, write_card
from hf_vit.hub.push import push_to_hub
from hf_vit.pages.making import make_page
from hf_vit.results.facts import Facts

REPO = "alice/my-page"
SPACE = f"spaces/{REPO}"
PUSH = {"repo_id": REPO, "space": True, "license": "mit"}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    root = tmp_path_factory.mktemp("page")
    models = [save_model(root / name, image_size=8) for name in ("first", "second")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hf_vit.pages.making.FILES", SMALL_FILES)
        make_page(models, root / "page", runtime=save_runtime(root / "runtime"))
    return root / "page"


@pytest.fixture
def page(made: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(made, tmp_path / "my-page")


def test_one_commit_holds_the_page(hub: Loopback, xet_client: Client, page: Path) -> None:
    (page / "notes.txt").write_text("mine")
    (page / "models/0/notes.txt").write_text("mine")
    local = {file.relative_to(page).as_posix(): file for file in page.rglob("*") if file.name != "notes.txt"}
    names = {name for name, file in local.items() if file.is_file()}
    done = xet_client.run("hub.jobs:push", folder=str(page), **PUSH)
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
    again = xet_client.run("hub.jobs:push", folder=str(page), **PUSH)
    assert (again["commit"], again["changed"]) == (done["commit"], False)


def test_license_of_the_models_is_the_page_s(hub: Loopback, xet_client: Client, page: Path) -> None:
    """Both models' cards say apache-2.0."""
    told = xet_client.command("push", page, "my-page", "--space")
    assert f"{hub.endpoint}/{SPACE}/tree/{hub.head(SPACE)}" in told
    (page / "README.md").write_text((page / "README.md").read_text().replace("license: apache-2.0\n", ""))
    without = xet_client.attempt("hub.jobs:command", arguments=["push", str(page), "my-page", "--space"])
    assert (without.code, without.err.count("\n")) == (1, 1)
    assert "the model's license is unknown" in without.err
    with pytest.raises(UserError, match="'Apache 2' is not a license id of the Hub; give one"):
        push_to_hub(page, REPO, space=True, license="Apache 2")


def test_what_follows_a_first_push(hub: Loopback, xet_client: Client, page: Path) -> None:
    """A dry run, failing answers, collections, proposals, images of the data, fewer models, another SDK."""
    done = xet_client.run("hub.jobs:push", folder=str(page), dry_run=True, **PUSH)
    assert (done["commit"], hub.get(f"/api/{SPACE}")) == (None, None)
    refused = xet_client.run("hub.jobs:push", folder=str(page), **PUSH | {"repo_id": "acme/x"}, token="hf_bob_write")
    assert "has no right to create it" in refused["error"]
    hub.fault("/api/repos/create", "lost_reply")
    hub.fault(r"/api/spaces/.*/preupload/", "status", status=503)
    hub.fault(r"/api/spaces/.*/commit/", "lost_reply")
    first = xet_client.run("hub.jobs:push", folder=str(page), collection="Pages", **PUSH)
    assert (first["commit"], hub.fired()) == (hub.head(SPACE), 3)
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
    (page / "examples").mkdir()
    (page / "examples/0.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    told = json.loads((page / "page.json").read_text()) | {"examples": EXAMPLES}
    (page / "page.json").write_text(json.dumps(told | {"models": told["models"][:1]}))
    done = xet_client.run("hub.jobs:push", folder=str(page), tag="v2", share_images=True, **PUSH)
    assert done["deleted"] == ["models/1/model.onnx"]
    files = hub.files(SPACE)
    assert "examples/0.png" in files
    assert "models/1/model.onnx" not in files
    assert [tag["name"] for tag in hub.get(f"/api/{SPACE}/refs")["tags"]] == ["v2"]
    hub.settings(SPACE, sdk="gradio")
    refused = xet_client.run("hub.jobs:push", folder=str(page), share_images=True, **PUSH)
    assert refused["error"].startswith(f"{REPO} is a Space with the SDK gradio, but a page needs a static Space")


EXAMPLES = [{"file": "examples/0.png", "label": "cat"}]
Change = Callable[[Path], object]


def _link_out(name: str) -> Change:
    def change(page: Path) -> None:
        (page / name).rename(page.parent / "elsewhere")
        (page / name).symlink_to(page.parent / "elsewhere")

    return change


def _write(name: str, text: str) -> Change:
    return lambda page: (page / name).write_text(text)


def _state(**fields: Any) -> Change:
    """Another page.json; a folder is that of the first model."""

    def change(page: Path) -> None:
        told = json.loads((page / "page.json").read_text())
        told["models"][0]["folder"] = fields.get("folder", told["models"][0]["folder"])
        (page / "page.json").write_text(json.dumps(told | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda page: (page / "page.json").unlink(), r"holds no page \(page\.json is missing\); make one"),
        (lambda page: (page / "index.html").unlink(), r"lacks the file index\.html; make the page again"),
        (lambda page: (page / "models/1/model.onnx").unlink(), r"lacks the file models/1/model\.onnx; make the page"),
        (lambda page: [file.unlink() for file in (page / "runtime").iterdir()], "lacks the files of ONNX Runtime Web"),
        (_write("page.json", "{"), r"page\.json of .* was not written by hf-vit page"),
        (_write("page.json", '{"models": 3}'), r"page\.json of .* was not written by hf-vit page"),
        (_write("page.json", '{"models": [], "examples": []}'), "does not list the files"),
        (_state(folder="../../elsewhere"), "does not list the files"),
        (_link_out("models/0/model.onnx"), "is a link to a file outside"),
        (_link_out("runtime"), "is a link to a file outside"),
        (_write("README.md", "no metadata"), "is not the card of a static Space"),
        (_write("README.md", "---\nsdk: gradio\n---\n"), "is not the card of a static Space"),
        (_write("README.md", "---\nsdk: [\n---\n"), "has no readable metadata"),
        (_state(examples=EXAMPLES), "shows 1 images of its data set; add --share-images"),
        (_state(note="hf_" + "aB3dE6gH9" * 4), "holds what looks like"),
    ],
)
def test_trouble_is_told_without_the_hub(damage: Change, words: str, page: Path) -> None:
    damage(page)
    with pytest.raises(UserError, match=words) as told:
        push_to_hub(page, REPO, space=True, license="mit")
    assert "\n" not in str(told.value)


def test_models_are_no_pages_and_pages_no_models(page: Path, model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"holds a page, not a model; share it with hf-vit push DIR REPO --space"):
        push_to_hub(page, REPO, license="mit")
    with pytest.raises(UserError, match=r"holds no page .* or leave --space out to share a model"):
        push_to_hub(model_folder, REPO, space=True)
    with pytest.raises(UserError, match="space=True needs the folder of a page"):
        push_to_hub(object(), REPO, space=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="a model object needs its image processor"):
        push_to_hub(object(), REPO, space="gradio")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="which a page does not have; leave one of them out"):
        push_to_hub(page, REPO, space=True, license="mit", max_shard_size="1MB")


def test_the_card_links_to_the_space(model_folder: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """From then on, also in cards of later facts; before, it says how a page is made."""
    card = write_card(model_folder, license="mit").read_text()
    assert "To make a page that runs it in the browser: `hf-vit page my-vit --output page`" in card
    assert command("card", model_folder, "--space", "alice/my_page")[0] == 0
    for told in ((model_folder / "README.md").read_text(), render_card(model_folder)):
        line = r"Try it in the browser: [alice/my\_page](https://huggingface.co/spaces/alice/my_page)"
        assert line in told.splitlines()
        assert "in the browser: `hf-vit page" not in told
        assert "| space |" not in told


NO_SPACES = ["a](http://x)/b", "a/b\n## c", "<b>/c", "../x", 3, ["a/b"]]
NO_PAGES = ["../../../../settings/tokens#x", "pages/../../x", "//example.org/x", "/etc/passwd", "https://example.org",
            "javascript:alert(1)", "a) [b](c", "a\n## b", ["a"]]  # fmt: skip


def test_a_link_leads_to_a_space_or_into_the_repository(model_folder: Path) -> None:
    """Whatever facts.json holds: what this package writes there has no absolute paths."""
    (record,) = json.loads((model_folder / "facts.json").read_text())
    values = [{"space": space} for space in NO_SPACES] + [{"page": page} for page in NO_PAGES]
    for told in [*values, {"page": "pages/mine/index.html"}]:
        (model_folder / "facts.json").write_text(json.dumps([record | {"values": record["values"] | told}]))
        card = render_card(model_folder)
        is_way = "Try it in the browser: [its page](pages/mine/index.html)" in card.splitlines()
        assert is_way == ("Try it in the browser" in card) == (told == {"page": "pages/mine/index.html"}), told
        assert ("in the browser: `hf-vit page" in card) != is_way, told
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
    for space, words in (("my-page", "has no owner"), ("a/b/c", "cannot be the name"), ("", "cannot be the name")):
        with pytest.raises(UserError, match=words):
            record_space(model_folder, space)
    with pytest.raises(UserError, match="has no training or conversion record"):
        record_space(tmp_path, "alice/my-page")
    assert "space" not in Facts.load(model_folder).records[0].values


class Interface:
    """Stands for gradio's: it keeps what the app gives it."""

    made: ClassVar[list[Any]] = []

    def __init__(self, answer: Any, image: Any, output: str, flagging_mode: str) -> None:
        self.answer, self.function, self.output = lambda upload: answer(image(upload)), answer, output
        Interface.made.append(self)

    def launch(self) -> None:
        assert Interface.made[-1] is self


def take_upload(type: str, image_mode: str | None = "RGB") -> Any:
    """Stands for gradio's Image, which drops transparency by default."""
    return lambda upload: upload.convert(image_mode) if upload and image_mode else upload


@pytest.mark.parametrize(
    ("kind", "output"), [("single_label_classification", "Label"), ("regression", "JSON"), ("linear", "AnnotatedImage")]
)
def test_a_gradio_space_runs_the_model(
    kind: str, output: str, hub: Loopback, xet_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One commit with model, handler and app; the app gives what transformers' pipeline gives. gradio is a stand-in."""
    if kind == "linear":
        folder = save_dense(tmp_path / "model", "linear")
    else:
        folder = save_model(tmp_path / "model", image_size=8, problem_type=kind)
        whole = json.loads((folder / "preprocessor_config.json").read_text()) | {"image_mean": [0.1, 0.2, 0.3]}
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": whole}))  # transformers prefers it
    arguments = ["push", str(folder), "my-app", "--license", "mit", "--space", "gradio"]
    xet_client.command(*arguments)
    assert hub.get("/api/spaces/alice/my-app")["sdk"] == "gradio"
    files = set(hub.files("spaces/alice/my-app"))
    assert {"app.py", "handler.py", "requirements.txt", "README.md", "config.json", "model.safetensors"} <= files
    assert not {"facts.json", "learning_curve.png"} & files
    if kind == "linear":
        assert "already holds this content" in xet_client.command(*arguments)
        again = xet_client.attempt("hub.jobs:command", arguments=[*arguments[:-1], "static"])
        assert "holds no page" in again.err
    space = tmp_path / "space"
    xet_client.run("hub.jobs:fetch_space", repo_id="alice/my-app", folder=str(space))
    assert "gradio\n" in (space / "requirements.txt").read_text()
    python = metadata.metadata("hf-vit")["Requires-Python"].removeprefix(">=")  # Spaces have an older one by default
    assert RepoCard.load(space / "README.md").data.get("python_version") == python
    stand_in = SimpleNamespace(Interface=Interface, Image=take_upload)
    for name in ("Label", "JSON", "AnnotatedImage"):
        setattr(stand_in, name, lambda name=name: name)
    monkeypatch.setitem(sys.modules, "gradio", stand_in)
    monkeypatch.delitem(sys.modules, "handler", raising=False)
    monkeypatch.syspath_prepend(str(space))
    runpy.run_path(str(space / "app.py"))
    monkeypatch.delitem(sys.modules, "handler")
    app, (image,) = Interface.made[-1], make_images(1, side=40)
    assert app.output == output
    assert app.answer(None) is None
    answer = app.answer(image)
    if kind == "linear":
        shown, (first, *others) = answer
        assert shown is image
        assert first[0].shape == (40, 40)
        assert sum(mask for mask, _ in (first, *others)) == pytest.approx(np.ones((40, 40)))
        found = [{"label": "cat", "score": 0.5, "box": {"xmin": -3, "ymin": 2, "xmax": 9, "ymax": 41}}]
        app.function.__globals__.update(task="object-detection", handler=lambda _: found)
        assert app.answer(image) == (image, [((0, 2, 9, 40), "cat 50%")])  # gradio slices arrays by the box
        return
    entries = transformers.pipeline("image-classification", model=str(folder), top_k=6)(image)
    expected = {entry["label"]: pytest.approx(entry["score"], abs=1e-5) for entry in entries}
    given = {entry["label"]: entry["score"] for entry in answer} if kind == "regression" else answer
    assert len(given) == (6 if kind == "regression" else 5)
    assert given == {label: expected[label] for label in given}
    app.function.__globals__["handler"].model.config.id2label = dict.fromkeys(range(6), "crane")  # a bird and a machine
    assert kind == "regression" or app.answer(image) == {"crane": max(given.values())}
    clear = image.convert("RGBA")
    clear.putalpha(0)
    assert app.answer(clear) == app.answer(Image.new("RGB", image.size, "white"))


def test_kinds_of_spaces(model_folder: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    for words, told in (
        ((model_folder, "x", "gradio"), "unexpected argument gradio; write --space gradio"),
        ((model_folder, "x", "--space", "docker"), "unknown kind of Space 'docker'; give static"),
    ):
        code, _, err = command("push", *words)
        assert code != 0
        assert told in err
