"""What was pushed loads anywhere, with hf_vit and without it; `hf-vit verify` says so, and runs no stranger's code."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from hub import jobs
from hub.conftest import save_model
from loopback.client import Client, Loopback, content_hash
from originals.pytorch import of_transformers
from training.conftest import make_colour_folder
from training.dense_jobs import learn
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_vit
from hf_vit.data import scenes
from hf_vit.evaluation import embed
from hf_vit.hub.card import MARKER, render_card
from hf_vit.results.facts import append_record, make_record

REPO = "alice/my-vit"
BACKBONES = {"plain": "HfViTBackbone", "hybrid": "HfHybridViTBackbone", "axial": "HfAxialViTBackbone"}


def same(given: Any, wanted: Any) -> None:
    """Equal up to the rounding of sums that are aligned differently in another process."""
    if isinstance(wanted, dict):
        assert list(given) == list(wanted)
        given, wanted = list(given.values()), list(wanted.values())
    np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5)


def test_every_way_answers_the_same(hub: Loopback, saved_models: dict[str, Path], xet_client: Client, stranger: Client):
    """AutoModel, AutoModelForImageClassification, AutoImageProcessor, pipeline and the backbone by its class."""
    pushes = [{"folder": str(saved_models[family]), "repo_id": f"alice/{family}"} for family in BACKBONES]
    xet_client.run("hub.jobs:push_many", pushes=pushes)
    xet_client.clear()
    loads = [{"repo_id": f"alice/{family}", "trust": True} for family in BACKBONES]
    for client, home in ((xet_client, "hf_vit"), (stranger, "transformers_modules")):
        for family, found in zip(BACKBONES, client.run("hub.jobs:load_many", loads=loads, token=None), strict=True):
            assert found["class"] == home
            here = jobs.load(str(saved_models[family]))
            for key in ("logits", "pooled", "pipeline"):
                same(found[key], here[key])
    assert found["package"] == []
    refused = stranger.run("hub.jobs:logits", repo_id="alice/plain", token=None)
    assert "trust_remote_code" in refused
    for family, name in BACKBONES.items():
        found = xet_client.run("hub.jobs:feature_map", repo_id=f"alice/{family}", name=name)
        same(found, jobs.feature_map(str(saved_models[family]), name))


def test_by_branch_tag_and_commit_and_offline(
    hub: Loopback, xet_client: Client, stranger: Client, make_model: Callable[..., Path]
) -> None:
    folders = [str(make_model(f"m{seed}", seed=seed)) for seed in range(3)]
    pushes = [
        {"folder": folders[0], "tag": "v1"}, {"folder": folders[1]}, {"folder": folders[2], "revision": "next"}
    ]  # fmt: skip
    first, second, third = xet_client.run("hub.jobs:push_many", pushes=pushes)
    wanted = [jobs.logits(folders[number]) for number in (0, 0, 1, 1, 2, 2)]
    revisions = ["v1", first["commit"], "main", second["commit"], "next", third["commit"]]
    loads = [{"repo_id": REPO, "revision": revision} for revision in revisions]
    same(xet_client.run("hub.jobs:logits_many", loads=loads), wanted)
    # From the cache alone: no request is made.
    before = len(hub.log())
    same(xet_client.run("hub.jobs:logits_many", loads=loads, offline=True), wanted)
    assert len(hub.log()) == before
    trusting = [{**load, "trust_remote_code": True} for load in loads[:2]]
    same(stranger.run("hub.jobs:logits_many", loads=trusting), wanted[:2])
    same(stranger.run("hub.jobs:logits_many", loads=trusting, offline=True), wanted[:2])


@pytest.mark.parametrize(
    ("task", "head", "metric"),
    [
        pytest.param("segmentation", "linear", "mean_iou", marks=pytest.mark.slow),  # 18 s
        pytest.param("detection", "mask-rcnn", "mean_average_precision", marks=pytest.mark.slow),  # 15 s
    ],
)
def test_a_dense_model_arrives_whole(
    task: str, head: str, metric: str, hub: Loopback, xet_client: Client, tmp_path: Path, monkeypatch: Any
) -> None:
    """It tells its results, and runs by its card's code alone."""
    monkeypatch.setattr(scenes, "HELD_OUT", 6)
    result = learn(tmp_path / "model", task, head, steps=2, evaluations=1)
    xet_client.command("push", result.folder, REPO, "--license", "mit")
    files = hub.files(REPO)
    assert {"model.safetensors", "facts.json", "learning_curve.png", f"evaluation_{task}.png"} <= set(files)
    assert f"{task}_hf_vit.py" in files, "the code of the head travels"
    assert f"evaluation_{task}_worst_images.png" not in files, "it shows images of the data"
    assert "worst_images" in render_card(result.folder, share_images=True)
    # The examples of the card: with this package, and by the code beside the weights where the package is barred.
    assert xet_client.command("verify", REPO, "--trust-remote-code").count(" printed: ") == 2
    card = xet_client.run("hub.jobs:read", repo_id=REPO, name="README.md")
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["pipeline_tag"] == {"segmentation": "image-segmentation", "detection": "object-detection"}[task]
    (index,) = metadata["model-index"]
    told = {entry["name"]: entry["value"] for each in index["results"] for entry in each["metrics"]}
    assert all(entry["type"] == metric for each in index["results"] for entry in each["metrics"])
    headline = result.test.headline()
    expected = {"Mean IoU": headline["mean IoU"]} if task == "segmentation" else {"Box AP": headline["box AP"]}
    assert {name: told[name] for name in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "model"), [("transformers_vit", "alice/theirs"), ("timm", "timm:vit_base_patch16_clip_quickgelu_224")]
)
def test_a_model_of_another_library(kind: str, model: str, hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    """From the Hub into hf_vit with identical logits, and into a training, an analysis and a count of FLOPs."""
    wanted = xet_client.run("hub.jobs:share", kind=kind, folder=str(tmp_path / kind))
    found = xet_client.run("hub.jobs:take_over", model=model, output=str(tmp_path / "out"), token=None)
    assert np.abs(wanted).max() > 0.1
    for logits in found["logits"]:
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)
    # transformers itself runs what analyze looks at
    # The name decides where timm's CLIPs with QuickGELU share a repository with those of the exact GELU.
    expected = {"transformers_vit": ["transformers_vit", True, 2, "gelu"], "timm": ["timm_vit", True, 3, "quick_gelu"]}
    assert found["told"] == [model, *expected[kind]]


def test_embeddings_of_the_hub_are_those_of_a_disk(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    given = {"model": str(save_model(tmp_path / "model")), "data": "digits", "splits": ["test"], "rows_per_file": 100}
    embed(output=tmp_path / "disk", **given)
    parts = {path.name: path.read_bytes() for path in (tmp_path / "disk").glob("*.parquet")}
    told = xet_client.run("hub.jobs:embed_into", repo_id="alice/vectors", within="digits", **given)
    assert told[0].startswith("hf://alice/vectors/digits/manifest.json cannot be written, as the bucket or folder")
    assert told[1:] == [0, len(parts)]
    there = hub.files("alice/vectors")
    assert there.pop("digits/manifest.json")
    assert {name: there.get(f"digits/{name}") for name in parts} == {
        name: content_hash(content, lfs=True) for name, content in parts.items()
    }


def test_thresholds_of_the_hub_are_those_of_a_disk(hub: Loopback, xet_client: Client, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", problem_type="multi_label_classification")
    jobs.make_image().save(tmp_path / "image.png")
    (prediction,) = hf_vit.predict(folder, tmp_path / "image.png")
    (first, _), *others = prediction.scores
    thresholds = {first: 1.0} | {name: score / 2 for name, score in others}
    append_record(folder, make_record("evaluation", values={"thresholds": thresholds}))
    xet_client.run("hub.jobs:push", folder=str(folder))
    told = xet_client.command("predict", REPO, tmp_path / "image.png", "--json", token=None)
    assert set(json.loads(told)[0]["labels"]) == {name for name, _ in others}


TOWERS = {
    "clip": ("CLIPVisionModel", {}, transformers.CLIPImageProcessor),
    "dinov2": ("Dinov2WithRegistersModel", {"mlp_ratio": 2, "num_register_tokens": 3}, transformers.BitImageProcessor),
}


@pytest.mark.parametrize("kind", ["clip", pytest.param("dinov2", marks=pytest.mark.slow)])  # clip shows the way
def test_a_tower_is_fine_tuned_and_shared(
    kind: str, hub: Loopback, xet_client: Client, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """From transformers' folder to a shared, fine-tuned model."""
    name, fields, processor_class = TOWERS[kind]
    saved, tower, tuned = tmp_path / "saved", tmp_path / "tower", tmp_path / "tuned"
    of_transformers(name, **fields).save_pretrained(saved)
    processor_class(size={"shortest_edge": 14}, crop_size={"height": 12, "width": 12}).save_pretrained(saved)
    data = make_colour_folder(tmp_path / "colours")
    short = ("--steps", "2", "--evaluations", "1", "--batch-size", "12", "--precision", "fp32")
    for words in (("convert", saved, tower), ("finetune", "--model", tower, "--data", data, "--output", tuned, *short)):
        assert command(*words)[0] == 0
    model = hf_vit.HfViTForImageClassification.from_pretrained(tuned).eval()
    before = hf_vit.HfViTModel.from_pretrained(tower).config
    for field in ("norm_before_layers", "norm_after_pooling", "num_register_tokens", "image_mean"):
        assert getattr(model.config, field) == getattr(before, field)
    xet_client.command("push", tuned, REPO, "--license", "mit")
    same(xet_client.run("hub.jobs:logits", repo_id=REPO), jobs.logits(str(tuned)))


# Printed by an example of a card: what it finds of the user's secrets.
SEARCH = (
    "import os, huggingface_hub\n"
    "print('token', huggingface_hub.get_token(), [name for name in os.environ if 'TOKEN' in name or 'SECRET' in name],"
    " os.path.exists(os.path.expanduser('~/.secret')))\n"
)


def own_card(folder: Path, example: str) -> None:
    """The rendered card with one more example, as its author's own."""
    card = render_card(folder).replace(MARKER, "") + f"\n```python\n{example}```\n"
    (folder / "README.md").write_text(card)


def label_of_noise(folder: Path) -> str:
    """The class of the image that `hf-vit verify` shows to examples: 64x64 px of noise."""
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    model = AutoModelForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        found = model(**AutoImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt")).logits
    return model.config.id2label[found.argmax(-1).item()]


def test_nothing_of_the_author_runs_unasked(hub: Loopback, xet_client: Client, model_folder: Path, tmp_path: Path):
    """A record's command that ends its block and begins another, which the card then holds: it is not our example."""
    traces = [tmp_path / name for name in ("from facts", "from card")]
    lines = [f"open({str(trace)!r}, 'w').close()\n" for trace in traces]
    own_card(model_folder, lines[0] + "```\n\n```python\n" + lines[1])
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    records = json.loads((model_folder / "facts.json").read_text())
    records[0]["command"] = f"x\n```\n\n```python\n{lines[0]}```\n\n```bash\nx"
    xet_client.run("hub.jobs:upload_raw", repo_id=REPO, files={"facts.json": json.dumps(records)})
    told = xet_client.command("verify", REPO, token=None)
    assert "all checksums match" in told
    assert f"commit {hub.head(REPO)}" in told
    assert f"the example of hf_vit printed: {label_of_noise(model_folder)}\n" in told
    unasked = [f"not run: example {number} of the card is code from {REPO}" in told for number in (1, 2, 3, 4)]
    assert unasked == [False, True, True, True]
    assert [trace.exists() for trace in traces] == [False, False]


def test_what_is_trusted_runs_without_a_token(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    """The card's example with the package, the one without it, and the author's own."""
    own_card(model_folder, SEARCH)
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    told = xet_client.command("verify", REPO, "--trust-remote-code", secrets=True)
    label = label_of_noise(model_folder)
    assert [line for line in told.splitlines() if " printed: " in line] == [
        f"the example of hf_vit printed: {label}",
        f"example 2 of the card printed: {label}",
        "example 3 of the card printed: token None [] False",
    ]
    assert "running example 3 of the card" in told


def test_when_no_example_can_run_it_fails(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\n```python\nimport sys\nsys.exit('ran')\n```\n")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    config = json.loads((model_folder / "config.json").read_text()) | {"model_type": "their_own"}
    xet_client.run("hub.jobs:upload_raw", repo_id=REPO, files={"config.json": json.dumps(config)})
    done = xet_client.attempt("hub.jobs:command", arguments=["verify", REPO], token=None)
    assert done.code == 1
    assert "all checksums match, but no example was run: the architecture 'their_own' is defined by code" in done.err
    told = xet_client.run("hub.jobs:verify", examples=True, trust_remote_code=True)["error"]
    assert told.startswith("example 1 of the card failed: ran; correct the example in the card, or push the model")
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\nno example")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    assert "the example of hf_vit printed" in xet_client.command("verify", REPO, token=None), "it needs no card"


def test_weights_of_another_place_are_refused(hub: Loopback, xet_client: Client, model_folder: Path, tmp_path: Path):
    """An index that names a file of this machine: it would be loaded, and all would look well."""
    outside = shutil.copy(model_folder / "model.safetensors", tmp_path / "private.safetensors")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    for name in (str(outside), "../../../private.safetensors", "elsewhere.safetensors"):
        index = {"metadata": {}, "weight_map": {"classifier.weight": name}}
        xet_client.run("hub.jobs:upload_raw", repo_id=REPO, files={"model.safetensors.index.json": json.dumps(index)})
        told = xet_client.run("hub.jobs:verify", examples=True)["error"]
        assert re.search("is not (inside the model's folder|in the repository|a .safetensors file in its folder)", told)
