"""The cards in model_cards/: what their recorded facts say, and nothing else."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_vit.data import load_data, to_rgb
from hf_vit.hub.card import render_card
from hf_vit.hub.card_metadata import metadata_errors
from hf_vit.hub.contents import find_pictures, missing_facts
from hf_vit.hub.model_folder import count_parameters
from hf_vit.results.facts import Facts

CARDS = Path(__file__).parents[2] / "model_cards"
FAMILIES = {
    "vit-digits": "hf_vit",
    "hybrid-digits": "hf_hybrid_vit",
    "axial-digits": "hf_axial_vit",
    "local-digits": "hf_local_vit",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_card_is_what_the_facts_say(name: str, tmp_path: Path) -> None:
    """Rendered again from facts, pictures and an untrained model of the same configuration: the same text."""
    folder = CARDS / name
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == FAMILIES[name]
    made = AutoModelForImageClassification.from_config(CONFIG_MAPPING[FAMILIES[name]].from_dict(config))
    again = tmp_path / "model_cards" / name
    for place in (".git", "docs/page.md"):  # the card's link leads to another file of its repository
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    made.save_pretrained(again)
    for path in folder.iterdir():
        if path.suffix in (".json", ".png"):
            shutil.copy(path, again)
    card = (folder / "README.md").read_text()
    assert render_card(again, license="apache-2.0", share_images=True) == card  # the data is public
    assert metadata_errors(card) == []
    assert missing_facts(folder) == []
    assert find_pictures(folder, card) == {"learning_curve.png", "confusion_matrix.png", "wrong_images.png"}
    (accuracy,) = (record.values["top1"] for record in Facts.load(folder).of_kind("evaluation"))
    row = next(line for line in (CARDS / "README.md").read_text().splitlines() if f"({name}/" in line)
    assert f"| {accuracy:.2%} | {count_parameters(again):,} |" in row


@pytest.mark.parametrize("name", ["vit-digits", "hybrid-digits", "axial-digits"])
def test_the_weights_are_those_that_were_measured(name: str) -> None:
    measured = next(record.values for record in Facts.load(CARDS / name).of_kind("evaluation"))
    images = load_data("digits").split("test")
    processor = AutoImageProcessor.from_pretrained(CARDS / name)
    model = AutoModelForImageClassification.from_pretrained(CARDS / name).eval()
    with torch.no_grad():
        logits = model(**processor(images=[to_rgb(each) for each in images["image"]], return_tensors="pt")).logits
    labels = torch.tensor(images["label"])
    assert (logits.argmax(-1) == labels).double().mean() == pytest.approx(measured["top1"])
    assert cross_entropy(logits, labels).item() == pytest.approx(measured["loss"], rel=1e-4)


@pytest.mark.parametrize("card", [path.relative_to(CARDS) for path in sorted(CARDS.rglob("README.md"))], ids=str)
def test_links_lead_somewhere(card: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (CARDS / card).read_text(), flags=re.DOTALL)
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", text):
        path = CARDS / card.parent / target
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE) if heading else []
        assert not heading or heading in [re.sub(r"[^\w-]", "", each.lower().replace(" ", "-")) for each in headings]


def test_they_stay_small() -> None:
    sizes = {path: path.stat().st_size for name in FAMILIES for path in (CARDS / name).iterdir()}
    assert sum(size for path, size in sizes.items() if path.suffix != ".safetensors") < 500_000
    assert sum(sizes.values()) < 3_000_000
