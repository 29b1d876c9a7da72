import inspect
import math
import sys

import pytest
from pydantic import ValidationError
from torchvision.transforms import v2

from hf_vit import UserError
from hf_vit.data.augmentation import AugmentationConfig
from hf_vit.training.recipes.registry import OVERRIDABLE, RECIPES, find_recipe


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
        (dict(optimizer="adam"), "optimizer = 'adam'.*'adamw', 'sgd', 'lamb' or 'lion'"),
        (dict(schedule="cosin"), "schedule"),
        (dict(horizontal_flip=2.0), "horizontal_flip"),
        (dict(leaning_rate=1.0), "did you mean learning_rate"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        find_recipe("default-small").override(**values)


def test_every_value_has_a_flag():
    from hf_vit_cli.train.finetune import finetune

    assert set(inspect.signature(finetune).parameters) >= OVERRIDABLE


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean vit-finetune"):
        find_recipe("vit-finetun")


def test_command_lists_recipes_and_prints_every_value_of_one(command):
    code, out, _ = command("recipes")
    assert code == 0
    for recipe in RECIPES.values():
        assert f" {recipe.name} " in out
    code, out, _ = command("recipes", "vit-finetune")
    assert code == 0
    assert "2010.11929" in out
    assert "default-small" not in out
    for key in find_recipe("digits").settings():
        assert f" {key} " in out or key in ("name", "source")
    assert command("recipes", "nonsense")[0] == 1


# arXiv 2010.11929, table 3, typed from the paper once more: (epochs, rate, schedule, decay, dropout) of a row.
TABLE_3 = {
    "vit-jft-b": (7, 8e-4, "linear", 0.1, 0.0),
    "vit-jft-l32": (7, 6e-4, "linear", 0.1, 0.0),
    "vit-jft-l16": (14, 4e-4, "linear", 0.1, 0.0),
    "vit-jft-h14": (14, 3e-4, "linear", 0.1, 0.0),
    "hybrid-jft-b": (7, 8e-4, "linear", 0.1, 0.0),
    "hybrid-jft-l32": (7, 2e-4, "linear", 0.1, 0.0),
    "hybrid-jft-l16": (14, 4e-4, "linear", 0.1, 0.0),
    "vit-i21k-b": (90, 1e-3, "linear", 0.03, 0.1),
    "vit-i21k-l": (90, 1e-3, "linear", 0.03, 0.1),
    "vit-i1k": (300, 3e-3, "cosine", 0.3, 0.1),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3(name):
    recipe = find_recipe(name)
    row = (recipe.epochs, recipe.learning_rate, recipe.schedule, recipe.weight_decay, recipe.dropout)
    assert row == TABLE_3[name]
    assert (recipe.batch_size, recipe.warmup, recipe.image_size) == (4096, 10_000, (224, 224))
    assert (recipe.optimizer, recipe.beta1, recipe.beta2) == ("adamw", 0.9, 0.999)
    assert recipe.clip == (1.0 if name == "vit-i1k" else 0.0)


@pytest.mark.parametrize(
    ("name", "steps", "grid"),
    [
        ("vit-finetune-imagenet", 20_000, (0.003, 0.01, 0.03, 0.06)),
        ("vit-finetune-cifar", 10_000, (0.001, 0.003, 0.01, 0.03)),
        ("vit-finetune-pets", 500, (0.001, 0.003, 0.01, 0.03)),
    ],
)
def test_table_4(name, steps, grid):
    recipe = find_recipe(name)
    assert (recipe.steps, recipe.learning_rates) == (steps, grid)
    assert recipe.learning_rate in grid
    assert (recipe.optimizer, recipe.momentum, recipe.batch_size, recipe.clip) == ("sgd", 0.9, 512, 1.0)
    assert recipe.warmup < steps


def test_strong_augmentation_is_stronger():
    levels = ["none", "light1", "light2", "medium1", "medium2", "strong1", "strong2"]
    strengths = []
    for level in levels:
        plain, regularized = find_recipe(f"augreg-{level}"), find_recipe(f"augreg-{level}-dropout")
        assert plain.augmentation == regularized.augmentation
        assert (plain.dropout, plain.drop_path, regularized.dropout, regularized.drop_path) == (0.0, 0.0, 0.1, 0.1)
        strengths.append((plain.augmentation.mixup_alpha, plain.augmentation.randaugment or (0, -1)))
    assert strengths == sorted(strengths)
    # Above 10 of the paper's scale torchvision has nothing stronger: medium1 is light2, strong1 is medium2.
    assert len(set(strengths)) == len(levels) - 2


@pytest.mark.parametrize(("name", "degrees"), [("deit", 27), ("rsb-a1", 21), ("rsb-a3", 18), ("augreg-light2", 30)])
def test_randaugment_is_as_strong_as_in_the_source(name: str, degrees: int):
    """At 10 of their scale the sources turn images by 30 degrees."""
    layers, magnitude = find_recipe(name).augmentation.randaugment
    angles, _ = v2.RandAugment(layers, magnitude)._AUGMENTATION_SPACE["Rotate"]
    assert angles(31, 0, 0)[magnitude] == pytest.approx(degrees)


def test_the_bias_of_a_binary_head_answers_every_class_as_often_as_it_comes():
    recipe = find_recipe("rsb-a2")
    assert 1 / (1 + math.exp(-recipe.initial_head_bias(1000))) == pytest.approx(1 / 1000, rel=2e-3)
    # What the original codes round it to.
    assert recipe.initial_head_bias(1000) == pytest.approx(-6.9, abs=0.05)
    assert recipe.initial_head_bias(21_843) == pytest.approx(-10.0, abs=0.05)
    assert recipe.override(head_bias=-3.0).initial_head_bias(10) == -3.0
    assert find_recipe("default-small").initial_head_bias(10) == 0.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(tune="lora", average_decay=0.99), "^LoRA's factors cannot be averaged and merged"),
        (dict(bce_threshold=0.2), "^bce_threshold is .*choose --loss bce"),
        (dict(tune="heads"), "'all', 'head' or 'lora'"),
        (dict(layer_decay=1.5), "less than or equal to 1"),
        (dict(sam_rho=-1.0), "sam_rho = -1.0"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        find_recipe("default-small").override(**values)


@pytest.mark.parametrize(
    ("name", "kind"), [("rsb-a1", "Lamb"), ("lion", "Lion"), ("deit", "AdamW"), ("vit-jax", "SGD")]
)
def test_every_optimizer_takes_a_step_of_its_recipe(name, kind):
    import torch

    from hf_vit.training.trainer.optimizers import optimizer_of

    recipe = find_recipe(name)
    weight = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer_class, settings = optimizer_of(recipe)
    assert optimizer_class.__name__ == kind
    decay = 0.1 if kind == "Lamb" else 0.0
    optimizer = optimizer_class([{"params": [weight], "weight_decay": decay}], **settings)
    weight.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    # The first step by hand: Adam and Lion go along the gradient's sign; LAMB along that plus the decay, as far as w.
    along = {"Lamb": torch.tensor([1.3, 0.6]) * 5 / (1.3**2 + 0.6**2) ** 0.5, "SGD": torch.tensor([30.0, 40.0])}
    expected = recipe.learning_rate * along.get(kind, torch.ones(2))
    torch.testing.assert_close(torch.tensor([3.0, -4.0]) - weight.detach(), expected, rtol=1e-3, atol=1e-6)


def test_a_missing_timm_names_the_extra_before_anything_is_written(monkeypatch, command, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    arguments = ("finetune", "--model", "Ti/16", "--data", "digits", "--output", tmp_path / "out")
    code, _, err = command(*arguments, "--optimizer", "lion")
    assert code == 1
    assert "pip install 'hf-vit[timm]'" in err
    assert not (tmp_path / "out").exists()


def test_values_for_classifiers_are_refused_by_pre_training(command, tmp_path):
    arguments = ("pretrain", "--model", "Ti/16", "--data", "digits", "--output", tmp_path / "out")
    code, _, err = command(*arguments, "--recipe", "rsb-a2")
    assert code == 1
    assert "loss bce of the recipe rsb-a2 is for classifiers" in err
