"""One walk over the table of families: what stands behind every door, and that nothing stands beside it."""

import pytest
import torch
import transformers
from models import families as tiny

import hf_vit
from hf_vit.cost import forward_flops
from hf_vit.errors import UserError
from hf_vit.families import AUTO_CLASSES, FAMILIES, Door, family_of

OUTPUTS = {"model": "last_hidden_state", "classification": "logits", "masked_prediction": "reconstruction"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("door", AUTO_CLASSES)
def test_every_family_by_every_door(name: str, door: Door):
    """The Auto class builds the family's class, which computes and is counted; or says that it does not know it."""
    family, row = FAMILIES[name], (tiny.FAMILIES | tiny.OTHERS)[name]
    config, auto_class = row.config(), getattr(transformers, AUTO_CLASSES[door])
    if door in family.not_applicable:
        assert door not in family.classes
        with pytest.raises(ValueError, match=f"Unrecognized configuration class .*{family.config_class.__name__}"):
            auto_class.from_config(config)
        with pytest.raises(UserError, match=family.not_applicable[door]):
            forward_flops(config, task=door)
        return
    model = auto_class.from_config(config).eval()
    assert type(model) is family.classes[door] is getattr(hf_vit, type(model).__name__)
    assert family.door_of(type(model).__name__) == door
    assert forward_flops(config, task=door) > 0
    images = row.images(config)
    with torch.no_grad():
        outputs = model(images, output_hidden_states=True)
    if door != "backbone":
        assert outputs[OUTPUTS[door]].shape[0] == len(images)
    depth = config.num_hidden_layers if family.has_tokens else sum(config.stage_depths)
    assert sum(isinstance(module, family.blocks) for module in model.modules()) == depth
    assert len(outputs.hidden_states) == depth + 1
    assert hasattr(model, family.prefix) == (door != "model")


def test_the_package_shows_the_table_and_what_users_need():
    functions = {"from_hub", "image_processor_from_hub", "keep_freed_memory", "optimize_for_inference", "push_to_hub"}
    commands = {"analyze", "convert", "evaluate", "export", "finetune", "predict", "pretrain"}
    table = {family.config_class.__name__ for family in FAMILIES.values()}
    table |= {model.__name__ for family in FAMILIES.values() for model in family.classes.values()}
    assert set(dir(hf_vit)) == table | functions | commands | {"VARIANTS", "UserError", "variant_config"}
    assert all(getattr(hf_vit, name) is not None for name in dir(hf_vit))
    assert hf_vit.__all__ == sorted(dir(hf_vit))
    with pytest.raises(AttributeError, match="Any"):
        hf_vit.Any  # noqa: B018
    for family in FAMILIES.values():
        assert family_of(family.model_type) is family
        assert transformers.AutoConfig.for_model(family.model_type).__class__ is family.config_class
    assert family_of("vit") is family_of(None) is None
