"""Images of somebody's data are in no card and no push, unless that is asked for; what will be public is listed."""

import ast
import shutil
from pathlib import Path

import pytest
from evaluation.tiny import NAMES, make_images, make_processor

import hf_vit.analysis
from hf_vit import HfViTForImageClassification, variant_config
from hf_vit.analysis.analyses.registry import ANALYSES
from hf_vit.errors import UserError
from hf_vit.hub.card import MARKER, write_card
from hf_vit.hub.card_sections import shows_images
from hf_vit.hub.contents import collect
from hf_vit_cli.main import main

SHOWING = {"wrong_images.png", "analysis_attention_rollout.png", "analysis_head_maps.png"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was evaluated and analysed, and may be pushed. Not to be changed."""
    root = tmp_path_factory.mktemp("drawn")
    config = variant_config(
        "Ti/4", image_size=8, id2label=dict(enumerate(NAMES[:2])), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    model = HfViTForImageClassification(config)
    model.classifier.weight.data.normal_()
    model.save_pretrained(root / "model")
    make_processor().save_pretrained(root / "model")
    (root / "model" / "facts.json").write_text(
        '[{"kind": "conversion", "command": "hf-vit convert", "date": "2031-01-01T00:00Z", "values": {"source": "x"}}]'
    )
    images = iter(make_images(24))
    for name in NAMES[:2]:
        (root / "data" / "test" / name).mkdir(parents=True)
        for number in range(12):
            next(images).save(root / "data" / "test" / name / f"{number}.png")
    for arguments in (
        ["evaluate", root / "model", "--data", root / "data", "--device", "cpu"],
        ["analyze", root / "model", "--images", root / "data", "--output", root / "analysis"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert not ended.value.code
    write_card(root / "model", license="mit")
    return root / "model"


@pytest.fixture
def seen(drawn: Path, tmp_path: Path) -> Path:
    """A copy, to be changed, and a folder for what is made on the way beside it."""
    (tmp_path / "scratch").mkdir()
    return shutil.copytree(drawn, tmp_path / "model")


def test_images_are_shared_when_asked_for(seen: Path) -> None:
    names = {path.name for path in seen.iterdir()}
    assert names >= SHOWING, "they are drawn, for whoever has the folder"
    assert not any(name in (seen / "README.md").read_text() for name in SHOWING)
    shared = collect(seen, "me/model", scratch=seen.parent / "scratch")
    assert not SHOWING & set(shared.files)
    assert set(shared.left_out) >= SHOWING
    assert {"confusion_matrix.png", "analysis_attention_distance.png"} <= set(shared.files)
    asked = collect(seen, "me/model", scratch=seen.parent / "scratch", share_images=True)
    assert set(asked.files) - set(shared.files) == SHOWING


def test_a_card_of_ones_own_shows_them_on_purpose_alone(seen: Path) -> None:
    card = (seen / "README.md").read_text().replace(MARKER, "") + "\n![mine](wrong_images.png)\n"
    (seen / "README.md").write_text(card)
    with pytest.raises(
        UserError, match=r"the card shows wrong_images\.png, with images of the data in it; give --share"
    ):
        collect(seen, "me/model", scratch=seen.parent / "scratch")
    assert "wrong_images.png" in collect(seen, "me/model", scratch=seen.parent / "scratch", share_images=True).files


def test_every_analysis_that_draws_images_is_known() -> None:
    """`shown_pixels` is how an analysis gets hold of images to draw."""
    folder = Path(hf_vit.analysis.__file__).parent / "analyses"
    for name, analysis in ANALYSES.items():
        tree = ast.parse((folder / f"{analysis.__module__.rpartition('.')[2]}.py").read_text())
        draws = any(isinstance(node, ast.Name) and node.id == "shown_pixels" for node in ast.walk(tree))
        assert shows_images(f"analysis_{name}.png") == shows_images(f"analysis_{name}_2.svg") == draws, name
