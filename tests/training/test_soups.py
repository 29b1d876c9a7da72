"""Soups against means and choices made by hand."""

import copy
import functools
import itertools
import os
import shutil

import numpy as np
import pytest
import torch
from training.conftest import save_model
from transformers import AutoModelForImageClassification

from hf_vit import HfAxialResNetConfig, HfAxialResNetForImageClassification, HfViTForImageClassification, UserError
from hf_vit.data import load_data, make_processor
from hf_vit.evaluation import evaluate_protocol
from hf_vit.results.facts import Facts
from hf_vit.training import finetune
from hf_vit.training.soups import average_weights, make_soup

LABELS = {0: "blue", 1: "green", 2: "red"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, colours, tiny_config):
    """Four classifiers, trained a little from one start with other seeds; the last one is spoilt."""
    root = tmp_path_factory.mktemp("shelf")
    torch.manual_seed(0)
    save_model(HfViTForImageClassification(tiny_config(id2label=LABELS)), root / "start")
    for seed, steps in enumerate((24, 12, 6)):
        finetune(str(root / "start"), str(colours), root / f"seed-{seed}", seed=seed, steps=steps, evaluations=1,
                 batch_size=16, learning_rate=3e-3)  # fmt: skip
    spoilt = HfViTForImageClassification.from_pretrained(root / "seed-0")
    with torch.no_grad():
        spoilt.classifier.weight.copy_(-30 * spoilt.classifier.weight)
    save_model(spoilt, root / "spoilt")
    return root


@functools.cache
def weights(folder):
    return {name: value.double().numpy() for name, value in load(folder).state_dict().items()}


def load(folder):
    return AutoModelForImageClassification.from_pretrained(folder)


def test_a_uniform_soup_is_the_mean_of_its_ingredients(shelf, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = [shelf / name for name in ("seed-0", "seed-1", "seed-2")]
    soup = make_soup(folders, "~/soup")
    expected = [weights(folder) for folder in folders]
    for name, value in weights(tmp_path / "soup").items():
        mean = np.mean([one[name] for one in expected], axis=0)
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-7, err_msg=name)
    assert (soup.accuracy, soup.test) == (None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["soup"]
    record = Facts.load(soup.folder).filter_kind("training")[-1]
    assert record.values["recipe"]["ingredients"] == "seed-0, seed-1, seed-2"
    assert "uniform" in (soup.folder / "README.md").read_text()


def noisy(model, seed):
    """A copy with other weights and statistics."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for value in other.state_dict().values():
        if value.is_floating_point():
            value.add_(0.1 * torch.rand(value.shape, generator=generator).to(value.dtype))
    return other.eval()


def exact_means(models):
    states = [model.state_dict() for model in models]
    means = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
    return {name: mean for name, mean in means.items() if states[0][name].is_floating_point()}


def test_running_statistics_are_averaged_whatever_the_order():
    torch.manual_seed(0)
    config = HfAxialResNetConfig(image_size=16, num_labels=3, stage_depths=(1,), stem_width=8)
    start = HfAxialResNetForImageClassification(config)
    models = [noisy(start, seed) for seed in range(3)]
    expected = exact_means(models)
    assert any(name.endswith("running_mean") for name in expected)
    for order in itertools.permutations(models):
        found = average_weights(order).state_dict()
        for name, mean in expected.items():
            torch.testing.assert_close(found[name].double(), mean, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_soup_is_the_exact_mean_rounded_once(dtype):
    torch.manual_seed(0)
    start = torch.nn.Linear(30, 30).to(dtype)
    models = [noisy(start, seed) for seed in range(10)]
    found = average_weights(models).state_dict()
    for name, mean in exact_means(models).items():
        assert found[name].dtype == dtype
        error, least = (found[name].double() - mean).abs(), (mean.to(dtype).double() - mean).abs()
        assert (error <= least + (1e-15 if dtype == torch.float64 else 1e-7)).all()


def test_a_soup_has_the_widest_dtype_whatever_the_order():
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    models = [model, noisy(model, 1).bfloat16()]
    found = average_weights(models).weight
    assert found.dtype == torch.float32
    assert torch.equal(average_weights(models[::-1]).weight, found)


def test_what_all_ingredients_have_in_common_stays_to_the_bit():
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 30)
    assert torch.equal(average_weights([model] * 7).weight, model.weight)


def test_folders_of_one_name_are_told_apart(shelf, colours, tmp_path):
    folders = [tmp_path / parent / "vit" for parent in "ab"]
    for folder, name in zip(folders, ("spoilt", "seed-0"), strict=True):
        shutil.copytree(shelf / name, folder)
    (folders[0] / "training_images.txt").write_text("0123456789abcdef\n")
    soup = make_soup([*folders, shelf / "seed-1"], tmp_path / "soup", greedy=True, data=str(colours))
    values = Facts.load(soup.folder).filter_kind("training")[-1].values
    alone = {
        name: evaluate_protocol("top1", str(folder), str(colours), split="validation", progress=False).result.top1
        for name, folder in (("vit #1", folders[0]), ("vit #2", folders[1]), ("seed-1", shelf / "seed-1"))
    }
    assert values["validation_accuracies"] == alone
    assert "vit #1" not in values["recipe"]["ingredients"].split(", ")
    assert {one.name: one.is_in for one in soup.ingredients}["vit #2"]
    # What the one that was left out has learnt from, the soup has not.
    assert "0123456789abcdef" not in (soup.folder / "training_images.txt").read_text()


def test_a_greedy_soup_makes_the_choices_of_the_paper(shelf, colours, tmp_path):
    names = ("spoilt", "seed-2", "seed-0", "seed-1")
    soup = make_soup([shelf / name for name in names], tmp_path / "soup", greedy=True, data=str(colours))

    data = load_data(str(colours), image_size=(8, 8))
    judge, processor = load(shelf / "seed-0"), make_processor(load(shelf / "seed-0").config)

    def accuracy(chosen, split="validation"):
        means = {
            name: torch.from_numpy(np.mean([weights(shelf / one)[name] for one in chosen], axis=0)).float()
            for name in judge.state_dict()
        }
        judge.load_state_dict(means)
        return evaluate_protocol("top1", (judge, processor), data, split=split, progress=False).result.top1

    alone = {name: accuracy([name]) for name in names}
    ranked = sorted(names, key=lambda name: -alone[name])
    kept, best = ranked[:1], alone[ranked[0]]
    for name in ranked[1:]:
        if (found := accuracy([*kept, name])) >= best:
            kept, best = [*kept, name], found
    assert [one.name for one in soup.ingredients] == ranked
    assert [one.name for one in soup.ingredients if one.is_in] == kept
    assert "spoilt" not in kept
    assert [one.accuracy for one in soup.ingredients] == [alone[name] for name in ranked]
    assert soup.accuracy == best
    assert soup.test.top1 == accuracy(kept, "test")
    assert [record.kind for record in Facts.load(soup.folder).records] == ["training", "evaluation"]


def test_by_command(shelf, colours, tmp_path, command):
    output = tmp_path / "soup"
    words = ("soup", shelf / "seed-0", shelf / "spoilt", "--output", output, "--data", colours, "--greedy")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert "not used" in out
    assert "test accuracy of the soup" in out
    assert Facts.load(output).records[0].command.startswith("hf-vit soup seed-0 spoilt --output soup")


def test_bad_input_is_told(shelf, tmp_path, tiny_checkpoint, tiny_config):
    one = shelf / "seed-0"
    deeper = HfViTForImageClassification(tiny_config(num_hidden_layers=3, id2label=LABELS))
    save_model(deeper, tmp_path / "deeper")
    save_model(load(one), tmp_path / "scaled", image_std=[0.25] * 3)
    for models, options, message in (
        ([one], {}, "a model soup averages at least 2"),
        ([one, one], {"greedy": True}, "with --data"),
        ([one, tmp_path / "deeper"], {}, "because they differ in num_hidden_layers"),
        ([one, tiny_checkpoint], {}, "because they differ in classes"),
        ([one, tmp_path / "scaled"], {}, "because they differ in the image processor"),
    ):
        with pytest.raises(UserError, match=message):
            make_soup(models, tmp_path / "no", **options)
    with pytest.raises(UserError, match="is not empty; choose a new folder"):
        make_soup([one, one], shelf)
    assert not (tmp_path / "no").exists()


def test_a_soup_appears_in_one_move(shelf, tmp_path, monkeypatch):
    """A kill between the moves of single files would leave a part of it, which stands in the way of the next."""
    arguments, output = [shelf / "seed-0", shelf / "seed-1"], tmp_path / "soup"
    seen = []

    def watch(name, real):
        def moving(source, target, *args, **kwargs):
            seen.append(output.exists())
            return real(source, target, *args, **kwargs)

        monkeypatch.setattr(os, name, moving)

    for name in ("replace", "rename"):
        watch(name, getattr(os, name))
    make_soup(arguments, output)
    assert not any(seen)
    assert {path.name for path in tmp_path.iterdir()} == {"soup"}
