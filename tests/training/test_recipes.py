import inspect

import pytest
from pydantic import ValidationError

from hf_vit import UserError
from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.training.recipes import OVERRIDABLE, RECIPES, find_recipe


def test_every_recipe_cites_its_source_and_is_frozen():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert recipe.source
        assert recipe.summary
        with pytest.raises(ValidationError, match="frozen"):
            recipe.learning_rate = 1.0


def test_vit_finetune_is_table_4():
    values = find_recipe("vit-finetune").settings()
    table = dict(optimizer="sgd", momentum=0.9, batch_size=512, schedule="cosine", weight_decay=0.0, clip=1.0)
    assert {key: values[key] for key in table} == table
    assert values["image_size"] == [384, 384]
    assert values["learning_rate"] in (0.001, 0.003, 0.01, 0.03)


def test_override_changes_only_what_is_given():
    before = find_recipe("default-small")
    after = before.override(learning_rate=0.5, shift_px=2, momentum=None)
    assert before == find_recipe("default-small")
    changed = {key for key, value in after.settings().items() if value != before.settings()[key]}
    assert changed == {"learning_rate", "shift_px"}
    assert after.augmentation.random_resized_crop == before.augmentation.random_resized_crop


def test_length_is_in_epochs_or_in_steps():
    recipe = find_recipe("default-small").override(steps=7)
    assert (recipe.steps, recipe.epochs) == (7, None)
    assert find_recipe("vit-finetune").override(epochs=2).steps is None
    with pytest.raises(UserError, match="not both"):
        recipe.override(steps=7, epochs=1)


def test_crop_can_be_switched_off():
    assert find_recipe("default-small").override(random_resized_crop=(0, 0)).augmentation == AugmentationConfig(
        horizontal_flip=0.5
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(learning_rate=0.0), "learning_rate = 0.0.*greater than 0"),
        (dict(learning_rate=float("nan")), "learning_rate"),
        (dict(learning_rate=float("inf")), "learning_rate"),
        (dict(epochs=-1), "epochs = -1.*greater than 0"),
        (dict(steps=0), "steps = 0"),
        (dict(batch_size=0), "batch_size = 0"),
        (dict(dropout=1.0), "dropout = 1.0.*less than 1"),
        (dict(optimizer="adam"), "optimizer = 'adam'.*'adamw' or 'sgd'"),
        (dict(schedule="cosin"), "schedule"),
        (dict(horizontal_flip=2.0), "horizontal_flip"),
        (dict(leaning_rate=1.0), "did you mean learning_rate"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        find_recipe("default-small").override(**values)


def test_every_value_has_a_flag():
    from hf_vit.cli.finetune import finetune

    assert set(inspect.signature(finetune).parameters) >= OVERRIDABLE


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean vit-finetune"):
        find_recipe("vit-finetun")


def test_command_prints_every_recipe_and_value(command):
    code, out, _ = command("recipes")
    assert code == 0
    for recipe in RECIPES.values():
        assert recipe.name in out
    for key in find_recipe("digits").settings():
        assert key in out or key in ("name", "source")
    code, out, _ = command("recipes", "vit-finetune")
    assert "2010.11929" in out
    assert "default-small" not in out
    assert command("recipes", "nonsense")[0] == 1
