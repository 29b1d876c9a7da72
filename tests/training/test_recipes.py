import dataclasses
import inspect
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.data.auto_augment import rand_augment_transform
from transformers import TrainingArguments, get_scheduler

from hf_vit import UserError
from hf_vit.data.augmentation import AugmentationConfig, open_policy
from hf_vit.loading.start import find_model
from hf_vit.training import pretrain
from hf_vit.training.plan import Start, make_schedule_arguments
from hf_vit.training.recipes.registry import OVERRIDABLE, RECIPES, find_recipe
from hf_vit.training.tasks.classification import build_for_classes
from hf_vit.training.tasks.patch_prediction import RandomMasking
from hf_vit.training.trainer.optimizers import choose_optimizer
from hf_vit_settings import ContrastiveOptions, DistillationOptions, SelfTrainingOptions


def test_every_recipe_cites_its_source_and_is_frozen():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert recipe.source
        assert recipe.summary
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.learning_rate = 1.0


def test_override_changes_only_what_is_given():
    before = find_recipe("default-small")
    after = before.override(learning_rate=0.5, shift_px=2, momentum=None)
    assert before == find_recipe("default-small")
    changed = {key for key, value in after.settings().items() if value != before.settings()[key]}
    assert changed == {"learning_rate", "shift_px"}
    # Steps replace epochs and the other way round; one crop replaces the other; crop and policy can be switched off.
    recipe = before.override(steps=7)
    assert (recipe.steps, recipe.epochs) == (7, None)
    assert find_recipe("vit-finetune").override(epochs=2).steps is None
    uncropped = before.override(random_resized_crop=(0, 0)).augmentation
    assert uncropped == AugmentationConfig(horizontal_flip=0.5)
    padded = find_recipe("deit").override(random_crop=4, auto_augment="none").augmentation
    assert (padded.random_crop, padded.random_resized_crop, padded.auto_augment) == (4, None, None)
    off = find_recipe("noisy-student").override(random_crop=0, randaugment=(0, 0)).augmentation
    assert (off.random_crop, off.randaugment, off.random_resized_crop) == (None, None, (0.5, 1.0))
    assert find_recipe("rsb-a1").override(loss="ce").bce_threshold is None
    resized = find_recipe("deit3-i21k").override(random_resized_crop=(0.5, 1.0)).augmentation
    assert (resized.random_crop, resized.random_resized_crop) == (None, (0.5, 1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(learning_rate=0.0), "learning_rate = 0.0.*greater than 0"),
        (dict(learning_rate=float("nan")), "learning_rate"), (dict(learning_rate=float("inf")), "learning_rate"),
        (dict(epochs=-1), "epochs = -1.*greater than 0"), (dict(steps=0), "steps = 0"),
        (dict(batch_size=0), "batch_size = 0"), (dict(dropout=1.0), "dropout = 1.0.*less than 1"),
        (dict(optimizer="adam"), "optimizer = 'adam'.*'adamw', 'sgd', 'lamb', 'lion' or 'muon'"),
        (dict(schedule="cosin"), "schedule"), (dict(horizontal_flip=2.0), "horizontal_flip"),
        (dict(leaning_rate=1.0), "did you mean learning_rate"), (dict(steps=7, epochs=1), "--epochs or --steps out"),
        (dict(sam_micro_batches=True), "--sam-micro-batches only works with --sam-rho"),
        (dict(tune="lora", average_decay=0.99), r"^an EMA \(--average-decay\) does not work with"),
        (dict(tune="head", lora_rank=4), "--lora-rank only works with --tune lora"),
        (dict(tuned_blocks=4), "--tuned-blocks only works with --tune last-blocks; add"),
        (dict(bce_threshold=0.2), "only works with --loss bce"), (dict(tune="heads"), "'lora' or 'auto'"),
        (dict(layer_decay=1.5), "less than or equal to 1"), (dict(sam_rho=-1.0), "sam_rho = -1.0"),
        (dict(schedule="linear", min_learning_rate=1e-5), "linear ends at a learning rate of 0"),
        (dict(min_learning_rate=1.0), "min_learning_rate 1 is above the learning rate 0.0003"),
        (dict(repeated_augmentation=0), "repeated_augmentation = 0"),
        (dict(auto_augment="rand-x9"), "auto_augment is rand-x9, but it must be a policy"),
        (dict(random_resized_crop=(0.1, 1.0), random_crop=4), "cannot be combined with random_resized_crop"),
        (dict(loss="bce", class_weights=True), "--class-weights only works with --loss ce"),
        (dict(balanced_sampling=True, class_weights=True), "both balance classes and cannot be combined"),
    ],
)  # fmt: skip
def test_bad_values_are_named(values, message):
    with pytest.raises(UserError, match=message):
        find_recipe("default-small").override(**values)


META = dict(teacher=None, unlabelled="", kind="meta-pseudo-labels")
NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (DistillationOptions, dict(teacher=None, kind="firm"), "distillation = 'firm': Input .*'soft' or 'logit'; see"),
        (DistillationOptions, dict(teacher=None, kind="hard", temperature=2.0), "hard distillation uses no temp"),
        (DistillationOptions, dict(teacher=None, temperature=0.0), "temperature = 0.0: .*greater than 0"),
        (DistillationOptions, dict(teacher=None, kind="soft", temperature=NAN), "temperature = nan"),
        (DistillationOptions, dict(teacher=None, weight=1.5), "distillation_weight = 1.5: .*less than or equal to 1"),
        (SelfTrainingOptions, META | dict(kind="loud"), "'loud': Input .*'noisy-student' or 'meta-pseudo-labels'"),
        (SelfTrainingOptions, META | dict(kind="noisy-student", pseudo_labels="firm"), "pseudo_labels = 'firm'"),
        (SelfTrainingOptions, META | dict(kind="noisy-student", confidence=1.5), "confidence = 1.5: .*equal to 1"),
        (SelfTrainingOptions, META | dict(kind="noisy-student", confidence=NAN), "confidence = nan"),
        (SelfTrainingOptions, META | dict(kind="noisy-student", head_dropout=1.0), "head_dropout = 1.0: .*less than 1"),
        (SelfTrainingOptions, META | dict(kind="noisy-student", head_dropout=NAN), "head_dropout = nan"),
        (SelfTrainingOptions, META | dict(kind="noisy-student", uda_weight=1.0), "no effect with noisy-student"),
        (SelfTrainingOptions, META | dict(confidence=0.5), "confidence has no effect with meta-pseudo-labels"),
        (SelfTrainingOptions, META | dict(unlabelled_ratio=0), "unlabeled_ratio = 0: .*equal to 1"),
        (SelfTrainingOptions, META | dict(uda_weight=-1.0), "uda_weight = -1.0: .*equal to 0"),
        (SelfTrainingOptions, META | dict(uda_weight=NAN), "uda_weight = nan"),
        (SelfTrainingOptions, META | dict(uda_temperature=0.0), "uda_temperature = 0.0: .*greater than 0"),
        (SelfTrainingOptions, META | dict(uda_temperature=NAN), "uda_temperature = nan"),
        (SelfTrainingOptions, META | dict(uda_threshold=NAN), "uda_threshold = nan"),
        (ContrastiveOptions, dict(temperature=0.0), "temperature = 0.0: .*greater than 0; see hf-vit pretrain"),
        (ContrastiveOptions, dict(momentum=1.5), "encoder_momentum = 1.5"),
        (ContrastiveOptions, dict(projection_size=0), "projection_size = 0"),
        (ContrastiveOptions, dict(hidden_size=-1), "hidden_size = -1"),
        (ContrastiveOptions, dict(normalization="group"), "normalization = 'group': .*'batch', 'layer' or 'none'"),
        (RandomMasking, dict(rate=0.0), "mask rate is 0.0, but it must be above 0"),
        (RandomMasking, dict(rate=1.1), "mask rate is 1.1, but it must be above 0 and at most 1"),
        (RandomMasking, dict(rate=NAN), "mask rate is nan"),
        (RandomMasking, dict(mask_share=0.8, swap_share=0.3), "is 0.8 and swap_share 0.3, .*together at most 1"),
        (RandomMasking, dict(mask_share=-0.1), "mask_share is -0.1"),
    ],
)
def test_bad_options_are_named(options, values, message):
    with pytest.raises(UserError, match=message):
        options(**values)


def test_every_value_has_a_flag():
    from hf_vit_cli.finetune import finetune

    assert set(inspect.signature(finetune).parameters) >= OVERRIDABLE


def test_command_lists_recipes_and_prints_every_value_of_one(succeeds, fails):
    out = succeeds("recipes")
    for recipe in RECIPES.values():
        assert f" {recipe.name} " in out
    out = succeeds("recipes", "vit-finetune")
    assert "2010.11929" in out
    assert "default-small" not in out
    for key in find_recipe("digits").settings():
        assert f" {key} " in out or key in ("name", "source")
    fails(("recipes", "nonsense"))


# Typed from the papers and their codes, not from the recipes. What no source names is "unnamed": off, or what the
# optimizers' authors propose.
SOURCES = json.loads((Path(__file__).parent / "recipes.json").read_text())
UNNAMED = SOURCES.pop("unnamed")


def test_every_value_is_as_its_source_has_it():
    assert SOURCES.keys() == RECIPES.keys()
    wrong = {}
    for name, recipe in RECIPES.items():
        values, expected = recipe.settings(), {**UNNAMED, **SOURCES[name]}
        del values["name"], values["source"]
        assert values.keys() == expected.keys(), name
        wrong |= {(name, k): (v, expected[k]) for k, v in values.items() if v != pytest.approx(expected[k])}
    assert not wrong, "value in the recipe, in the source"


@pytest.mark.parametrize(
    ("policy", "degrees"), [("rand-m9-mstd0-inc1", 27), ("rand-m0-n2-p1", 0), ("rand-m20-n2-p1-mmax20", 60)]
)
def test_randaugment_turns_as_far_as_in_the_sources(policy: str, degrees: float):
    """At 10 of the sources' scale by 30 degrees; AugReg's strong levels go beyond."""
    transform = rand_augment_transform(policy, {"translate_const": 100, "img_mean": (0, 0, 0)})
    turn = next(op for op in transform.ops if op.name == "Rotate")
    upper = turn.magnitude_max or 10
    assert abs(turn.level_fn(min(turn.magnitude, upper), {})[0]) == pytest.approx(degrees)


def test_every_policy_of_a_recipe_is_one_of_timms():
    policies = {recipe.augmentation.auto_augment for recipe in RECIPES.values()} - {None}
    assert len(policies) > 4
    images, keys = torch.zeros(1, 3, 16, 16, dtype=torch.uint8), torch.tensor([1])
    for policy in policies:
        assert open_policy(policy).transform_all(images, keys)[0].shape == (3, 16, 16)


def test_the_bias_of_a_binary_head_answers_every_class_as_often_as_it_comes():
    recipe = find_recipe("rsb-a2")
    assert 1 / (1 + math.exp(-recipe.initial_head_bias(1000))) == pytest.approx(1 / 1000, rel=2e-3)
    # What the original codes round it to.
    assert recipe.initial_head_bias(1000) == pytest.approx(-6.9, abs=0.05)
    assert recipe.initial_head_bias(21_843) == pytest.approx(-10.0, abs=0.05)
    assert recipe.override(head_bias=-3.0).initial_head_bias(10) == -3.0
    assert find_recipe("default-small").initial_head_bias(10) == 0.0


@pytest.mark.parametrize(
    ("name", "kind"), [("rsb-a1", "Lamb"), ("lion", "Lion"), ("deit", "AdamW"), ("vit-jax", "SGD")]
)
def test_every_optimizer_takes_a_step_of_its_recipe(name, kind):
    recipe = find_recipe(name)
    weight = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer_class, settings = choose_optimizer(recipe)
    assert optimizer_class.__name__ == kind
    decay = 0.1 if kind == "Lamb" else 0.0
    optimizer = optimizer_class([{"params": [weight], "weight_decay": decay}], **settings)
    weight.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    # The first step by hand: Adam and Lion go along the gradient's sign; LAMB along that plus the decay, as far as w.
    along = {"Lamb": torch.tensor([1.3, 0.6]) * 5 / (1.3**2 + 0.6**2) ** 0.5, "SGD": torch.tensor([30.0, 40.0])}
    expected = recipe.learning_rate * along.get(kind, torch.ones(2))
    torch.testing.assert_close(torch.tensor([3.0, -4.0]) - weight.detach(), expected, rtol=1e-3, atol=1e-6)


def test_a_missing_timm_names_the_extra_before_anything_is_written(monkeypatch, fails, tmp_path):
    for name in ("timm", "timm.data.auto_augment"):
        monkeypatch.setitem(sys.modules, name, None)
    arguments = ("finetune", "--model", "Ti/16", "--data", "digits", "--output", tmp_path / "out")
    for wanted in (("--optimizer", "lion"), ("--auto-augment", "3a"), ("--recipe", "deit")):
        fails((*arguments, *wanted), "pip install 'hf-vit[timm]'")
        assert not (tmp_path / "out").exists()


def test_muon_takes_torchs_steps_on_matrices_and_adams_on_the_others():
    """torch has a second implementation, of matrices alone."""
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    ours, theirs, bias = (torch.nn.Parameter(value.clone()) for value in (weight, weight, weight[0]))
    recipe = find_recipe("muon")
    optimizer_class, settings = choose_optimizer(recipe)
    group = {"params": [ours, bias], "weight_decay": recipe.weight_decay}
    optimizer = optimizer_class([group], **settings)
    sizes = dict(lr=3e-4, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    muon = torch.optim.Muon([theirs], nesterov=True, **sizes)
    for step in range(5):
        noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(step + 1))
        ours.grad, theirs.grad, bias.grad = noise.clone(), noise.clone(), noise[0].clone()
        optimizer.step()
        muon.step()
        if step == 0:  # Adam's first step is along the gradient's sign; Nesterov's momentum looks 0.9 of one ahead
            expected = weight[0] * (1 - 3e-4 * 0.05) - 3e-4 * 1.9 * noise[0].sign()
            torch.testing.assert_close(bias.detach(), expected, rtol=0, atol=1e-7)
    # Five products in bfloat16: about a hundredth of a step.
    step = (theirs - weight).detach().abs().mean()
    assert (ours - theirs).detach().abs().mean() < 0.02 * step


def rates(recipe, steps):
    """The learning rate before every step, as the Trainer sets it."""
    run = SimpleNamespace(recipe=recipe, steps=steps)
    chosen = make_schedule_arguments(run)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=recipe.learning_rate)
    arguments = TrainingArguments(max_steps=steps, warmup_steps=recipe.warmup, use_cpu=True, report_to="none", **chosen)
    warmup, more = arguments.get_warmup_steps(steps), {"scheduler_specific_kwargs": arguments.lr_scheduler_kwargs}
    schedule = get_scheduler(arguments.lr_scheduler_type, optimizer, warmup, steps, **more)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_warmup_stable_decay_warms_up_stays_and_falls():
    values = dict(learning_rate=1.0, warmup=0.1, cooldown=0.2, min_learning_rate=0.25)
    recipe = find_recipe("default-small").override(schedule="warmup_stable_decay", **values)
    seen = rates(recipe, 100)
    assert seen[10:80] == pytest.approx([1.0] * 70)
    assert seen[5] == pytest.approx(0.25 + 0.75 * 0.5)
    for step in range(80, 101):
        assert seen[step] == pytest.approx(0.25 + 0.75 * (1 - math.sqrt((step - 80) / 20)), abs=1e-6)
    # Steps instead of shares.
    assert rates(recipe.override(warmup=10, cooldown=20), 100) == pytest.approx(seen)
    # A cooldown longer than what is left of a short training begins after the warm-up.
    assert rates(recipe.override(warmup=2, cooldown=50), 10)[2:4] == pytest.approx([1.0, 0.25 + 0.75 * (1 - 8**-0.5)])


def test_cosine_ends_at_the_smallest_learning_rate():
    recipe = find_recipe("default-small").override(learning_rate=1.0, warmup=0.0, min_learning_rate=0.1)
    seen = rates(recipe, 40)
    assert seen == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * step / 40)) / 2 for step in range(41)])
    assert rates(recipe.override(min_learning_rate=0.0), 40)[-1] == pytest.approx(0.0, abs=1e-9)


def test_a_recipes_architecture_is_of_fresh_weights_alone(tiny_config, tiny_checkpoint):
    recipe = find_recipe("deit3").override(dropout=0.0, drop_path=0.0)
    data = SimpleNamespace(label_names=["a", "b"])
    model, _ = build_for_classes(Start(find_model(tiny_config()), data, None), recipe)
    assert (model.config.layer_scale_init_value, model.config.position_on_class_token) == (1e-4, False)
    gammas = [value for name, value in model.named_parameters() if "scale" in name]
    assert gammas
    assert all((gamma == 1e-4).all() for gamma in gammas)
    kept, _ = build_for_classes(Start(find_model(str(tiny_checkpoint)), data, None), recipe)
    assert kept.config.layer_scale_init_value is None
    # An explicit field wins, and a family without it is told.
    other, _ = build_for_classes(Start(find_model(tiny_config()), data, None), recipe, layer_scale_init_value=0.5)
    assert other.config.layer_scale_init_value == 0.5
    with pytest.raises(UserError, match="sets layer_scale_init_value and position_on_class_token of the model, but"):
        build_for_classes(Start(find_model("BiT-R50x1"), data, None), recipe)


def test_values_for_classifiers_are_refused_by_pre_training(fails, tmp_path):
    arguments = ("pretrain", "--model", "Ti/16", "--data", "digits", "--output", tmp_path / "out")
    for recipe, names in (
        ("rsb-a2", "loss bce, repeated_augmentation, mixup_alpha, cutmix_alpha"),
        ("better-vit", "architecture, mixup_alpha"),
    ):
        fails((*arguments, "--recipe", recipe), f"hf-vit pretrain does not support {names} of the recipe {recipe}")
    with pytest.raises(UserError, match=r"pretrain does not support mixup_alpha, patience of the recipe"):
        pretrain("Ti/16", "digits", tmp_path / "out", mixup_alpha=0.2, patience=3)
