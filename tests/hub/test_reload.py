"""What was pushed loads anywhere: fresh process, empty cache, with hf_vit and without it, and gives the same logits."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub import jobs
from loopback.client import Client, Loopback
from transformers import AutoModelForImageClassification

FAMILIES = ("plain", "hybrid", "axial")


def same(given: Any, wanted: Any) -> None:
    """Equal up to the rounding of sums that are aligned differently in another process."""
    if isinstance(wanted, dict):
        assert list(given) == list(wanted)
        given, wanted = list(given.values()), list(wanted.values())
    np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-5)


@pytest.fixture
def pushed(hub: Loopback, xet_client: Client, saved_models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Family -> what its push returned; the repositories are alice/FAMILY."""
    pushes = [{"folder": str(saved_models[family]), "repo_id": f"alice/{family}"} for family in FAMILIES]
    return dict(zip(FAMILIES, xet_client.run("hub.jobs:push_many", pushes=pushes), strict=True))


def test_every_way_answers_the_same(
    pushed: dict[str, Any], saved_models: dict[str, Path], xet_client: Client, stranger: Client
) -> None:
    """AutoModel, AutoModelForImageClassification, AutoImageProcessor and pipeline."""
    xet_client.clear()
    loads = [{"repo_id": f"alice/{family}", "trust": True} for family in FAMILIES]
    for client, home in ((xet_client, "hf_vit"), (stranger, "transformers_modules")):
        for family, found in zip(FAMILIES, client.run("hub.jobs:load_many", loads=loads, token=None), strict=True):
            assert found["class"] == home
            here = jobs.load(str(saved_models[family]))
            for key in ("logits", "pooled", "pipeline"):
                same(found[key], here[key])
    assert found["package"] == []
    refused = stranger.run("hub.jobs:logits", repo_id="alice/plain", token=None)
    assert "trust_remote_code" in refused


def test_masked_image_modelling(
    hub: Loopback, xet_client: Client, stranger: Client, saved_models: dict[str, Path], tmp_path: Path
) -> None:
    from hf_vit import HfViTForMaskedPatchPrediction

    folder = shutil.copytree(saved_models["plain"], tmp_path / "masked")
    (folder / "README.md").unlink()
    config = AutoModelForImageClassification.from_pretrained(folder).config
    torch.manual_seed(3)
    HfViTForMaskedPatchPrediction(config).save_pretrained(folder)
    xet_client.run("hub.jobs:push", folder=str(folder), repo_id="alice/masked", license="mit")
    here = jobs.reconstruct(str(folder))
    for client in (xet_client, stranger):
        same(client.run("hub.jobs:reconstruct", repo_id="alice/masked", trust=True), here)


def test_the_backbone_by_its_class(pushed: dict[str, Any], saved_models: dict[str, Path], xet_client: Client) -> None:
    for family, name in zip(FAMILIES, ("HfViTBackbone", "HfHybridViTBackbone", "HfAxialViTBackbone"), strict=True):
        found = xet_client.run("hub.jobs:feature_map", repo_id=f"alice/{family}", name=name)
        same(found, jobs.feature_map(str(saved_models[family]), name))


def test_by_branch_tag_and_commit_and_offline(
    hub: Loopback, xet_client: Client, stranger: Client, make_model: Callable[..., Path]
) -> None:
    folders = [make_model(f"m{seed}", seed=seed) for seed in range(3)]
    first, second, third = xet_client.run(
        "hub.jobs:push_many",
        pushes=[
            {"folder": str(folders[0]), "tag": "v1"},
            {"folder": str(folders[1])},
            {"folder": str(folders[2]), "revision": "next"},
        ],
    )
    wanted = [jobs.logits(str(folders[number])) for number in (0, 0, 1, 1, 2, 2)]
    revisions = ["v1", first["commit"], "main", second["commit"], "next", third["commit"]]
    loads = [{"repo_id": "alice/my-vit", "revision": revision} for revision in revisions]
    same(xet_client.run("hub.jobs:logits_many", loads=loads), wanted)
    # From the cache alone: no request is made.
    before = len(hub.log())
    same(xet_client.run("hub.jobs:offline_logits", loads=loads), wanted)
    assert len(hub.log()) == before
    trusting = [{**load, "trust_remote_code": True} for load in loads[:2]]
    same(stranger.run("hub.jobs:logits_many", loads=trusting), wanted[:2])
    same(stranger.run("hub.jobs:offline_logits", loads=trusting), wanted[:2])
