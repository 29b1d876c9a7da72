"""The page's list of architectures: each is in the tests' zoo and in the recorded comparison, or told why not."""

import json
from pathlib import Path

import pytest
from comparison import zoo

from hf_vit.families import FAMILIES

ROOT = Path(__file__).parents[2]
# What the page calls the zoo's kinds.
KIND_OF = {
    "ViT": "vit", "Hybrid-ViT": "hybrid", "Axial-ViT": "axial", "Local-ViT": "local", "AxialResNet": "axial_resnet",
    "BiT": "bit", "ResNet": "resnet", "RegNet": "regnet", "Swin": "swin", "DeiT": "deit", "CaiT": "cait",
    "MLP-Mixer": "mixer", "CoAtNet": "coatnet", "NFNet": "nfnet", "TResNet": "tresnet", "EfficientNet": "efficientnet",
    "SKResNet": "skresnet", "HaloNet": "halonet", "CoaT": "coat", "ImageGPT": "igpt",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Architecture -> paper, what is given, whether it is compared; as docs/compare.md lists them."""
    section = (ROOT / "docs/compare.md").read_text().split("## Which architectures\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[1:]}


def test_what_is_compared_is_in_the_zoo_and_in_the_recorded_comparison(rows: dict[str, list[str]]):
    compared = {KIND_OF[name] for name, cells in rows.items() if cells[-1].startswith("yes")}
    assert compared == {*zoo.TRANSFORMERS, *zoo.TIMM, "igpt"}
    recorded = json.loads((ROOT / "benchmarks/results/compare_families.json").read_text())
    assert set(recorded["rates"]) == compared
    for comparison in recorded["comparisons"].values():
        assert {model["inputs"]["model"]["name"] for model in comparison["models"]} == compared


def test_what_is_not_compared_says_why(rows: dict[str, list[str]]):
    others = {name: cells[-1] for name, cells in rows.items() if name not in KIND_OF}
    assert others
    assert all(why.startswith(("no: ", "a training: ")) for why in others.values())


def test_every_family_of_the_package_is_listed(rows: dict[str, list[str]]):
    listed = {
        {"vit": "plain"}.get(KIND_OF[name], KIND_OF[name]) for name, cells in rows.items() if "this package" in cells[1]
    }
    assert listed == set(FAMILIES)


def test_timm_knows_the_architectures_that_are_given_to_it(rows: dict[str, list[str]]):
    import timm

    for name, (_, given, _) in rows.items():
        if "timm" in given and name in KIND_OF and KIND_OF[name] in zoo.TIMM:
            assert timm.is_model(zoo.TIMM[KIND_OF[name]][0])
    assert timm.list_models("tf_efficientnet_*.ns_jft_in1k", pretrained=True)
