"""The files that travel with a checkpoint: which they are for each family, and how few a forward pass needs."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from models.families import FAMILIES, HEADS, OTHERS, Family

import hf_vit.models
from hf_vit.families import DENSE_HEADS

OTHER_FAMILIES = OTHERS
MODELS = Path(hf_vit.models.__file__).parent
VIT = {
    *("configuration_hf_base", "configuration_hf_vit", "pretrained_hf_vit", "embeddings_hf_vit", "positions_hf_vit"),
    *("modeling_hf_vit", "loss_hf_vit", "backbone_hf_vit", "pretraining_hf_vit"),
}
RESNET = {
    *("configuration_hf_base", "configuration_hf_resnet", "pretrained_hf_vit", "modeling_hf_resnet", "loss_hf_vit"),
}
TRAVELLING = {
    "plain": VIT,
    "hybrid": {
        *(*VIT, "configuration_hf_hybrid_vit", "modeling_hf_hybrid_vit"),
        *("configuration_hf_resnet", "resnet_hf_vit"),
    },
    "axial": {
        *(*VIT, "configuration_hf_axial_vit", "modeling_hf_axial_vit"),
        *("configuration_hf_axial_resnet", "modeling_hf_axial_resnet", "configuration_hf_resnet", "modeling_hf_resnet"),
    },
    "local": {*VIT, "configuration_hf_local_vit", "modeling_hf_local_vit"},
    "axial_resnet": {*RESNET, "configuration_hf_axial_resnet", "modeling_hf_axial_resnet"},
    "bit": {*RESNET, "configuration_hf_bit", "modeling_hf_bit", "resnet_hf_vit"},
    "mixer": {
        *("configuration_hf_base", "configuration_hf_mixer", "pretrained_hf_vit", "modeling_hf_mixer", "loss_hf_vit"),
    },
}


def test_what_travels(family: Family, tmp_path: Path):
    """The same from every head, and no more: a ResNet takes no attention of a ViT along."""
    for head in family.classes:
        family.build(head).save_pretrained(tmp_path / head)
        assert {path.stem for path in (tmp_path / head).glob("*.py")} == TRAVELLING[family.name], head
        for path in (tmp_path / head).glob("*.py"):
            assert path.read_text() == (MODELS / path.name).read_text()


@pytest.mark.parametrize("head", DENSE_HEADS)
def test_what_travels_with_a_head_of_dense_prediction(head: str, tmp_path: Path):
    """Every backbone, as the file that all heads share knows them all, and the head's own file."""
    kind = DENSE_HEADS[head]
    kind.config_class().save_pretrained(tmp_path)
    files = {path.stem for path in tmp_path.glob("*.py")}
    assert files == set().union(*TRAVELLING.values()) | {"dense_hf_vit", f"{kind.task}_hf_vit"}


def test_everything_in_models_travels():
    dense = {"dense_hf_vit", *(f"{kind.task}_hf_vit" for kind in DENSE_HEADS.values())}
    assert set().union(*TRAVELLING.values()) | dense == {path.stem for path in MODELS.glob("*.py")} - {"__init__"}


def test_no_parameter_of_another_family_is_a_vits():
    for family in OTHERS.values():
        for head in family.classes:
            assert not [name for name in family.build(head).state_dict() if "vit" in name]


def files_that_run(model: torch.nn.Module, **inputs: Any) -> set[str]:
    """Files of models/ whose functions a call of the model enters."""
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == MODELS:
            seen.add(path.stem)

    sys.setprofile(profile)
    try:
        model(**inputs)
    finally:
        sys.setprofile(None)
    return seen


def test_a_forward_pass_needs_five_files():
    """For any choice of the plain family, at any size, masked or not, with gradients or without."""
    plain = FAMILIES["plain"]
    for choice in plain.choices:
        model = plain.shared("model", choice)
        images, others = (plain.images(model.config, grid=grid) for grid in (None, (2, 3)))
        entered = files_that_run(model, pixel_values=images)
        with torch.no_grad():
            entered |= files_that_run(model, pixel_values=others, patch_attention_mask=torch.ones(2, 2, 3))
        of_vits = {"modeling_hf_vit", "embeddings_hf_vit", "positions_hf_vit", "configuration_hf_vit"}
        assert entered <= of_vits | {"pretrained_hf_vit"}, choice


@pytest.mark.parametrize("name", ["hybrid", "axial", "axial_resnet", "bit", "mixer"])
def test_the_other_families_need_two_more(name: str):
    family = (FAMILIES | OTHERS)[name]
    model = family.shared("model")
    assert len(files_that_run(model, pixel_values=family.images(model.config))) <= 7


def test_every_auto_class_is_in_a_file_that_travels(family: Family):
    config = family.config()
    assert set(config.auto_classes) == {"AutoConfig", *(HEADS[head].auto_class for head in family.classes)}
    for target in config.auto_classes.values():
        module, name = target.split(".")
        assert module in TRAVELLING[family.name]
        assert f"class {name}(" in (MODELS / f"{module}.py").read_text()
