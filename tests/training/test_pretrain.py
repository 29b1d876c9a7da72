"""`hf-vit pretrain` through its end: what it leaves, resuming, fine-tuning from it, and what it refuses."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForMaskedImageModeling

from hf_vit import HfAxialViTConfig, HfViTConfig, HfViTForMaskedPatchPrediction, HfViTModel, UserError
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune, pretrain
from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions

OBJECTIVES = ("masked-patch", "next-patch", "contrastive")
SHORT = dict(steps=6, evaluations=3, batch_size=8, learning_rate=2e-3, shift_px=1)


@pytest.fixture
def train(tiny_config, colours):
    def run(output, objective="masked-patch", config=None, **changes):
        options = FinetuneOptions(
            **{k: changes.pop(k) for k in list(changes) if k in FinetuneOptions.__dataclass_fields__}
        )
        return pretrain(
            config or tiny_config(), str(colours), output, objective=objective, options=options, **(SHORT | changes)
        )

    return run


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_by_command_and_fine_tuned_without_a_flag(objective, command, tiny_checkpoint, colours, tmp_path):
    output, flags = tmp_path / "pretrained", ("--steps", "2", "--evaluations", "1", "--batch-size", "8")
    arguments = ("--model", tiny_checkpoint, "--data", colours, "--output", output, "--objective", objective)
    code, out, err = command("pretrain", *arguments, *flags)
    assert code == 0, err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["step 2 of 2"]
    picture = "embeddings.png" if objective == "contrastive" else "predictions.png"
    names = {path.name for path in output.iterdir()}
    assert names >= {"config.json", "model.safetensors", "preprocessor_config.json", "facts.json", "README.md", picture}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert not any(path.is_dir() for path in output.iterdir())
    assert "validation loss" in out
    assert f"hf-vit finetune --model {output}" in out
    with Image.open(output / picture) as drawn:
        assert drawn.width > 100
    (record,) = Facts.load(output).records
    assert (record.kind, record.values["steps"], record.values["objective"]["objective"]) == ("training", 2, objective)
    assert record.command.startswith("hf-vit pretrain tiny --data colours")
    assert isinstance(record.values["validation_loss"], float)
    assert tuple(AutoImageProcessor.from_pretrained(output).image_mean) == (0.4, 0.5, 0.6)
    if objective == "contrastive":
        assert type(AutoModel.from_pretrained(output)) is HfViTModel
    else:
        model = AutoModelForMaskedImageModeling.from_pretrained(output)
        assert type(model) is HfViTForMaskedPatchPrediction
        assert model.config.image_mean == (0.4, 0.5, 0.6)
        assert model.config.predict_next_patch == model.config.is_causal == (objective == "next-patch")
    code, out, err = command("finetune", "--model", output, "--data", colours, "--output", tmp_path / "tuned", *flags)
    assert code == 0, err
    tuned = Facts.load(tmp_path / "tuned").of_kind("training")[-1]
    assert tuned.values["base_model"].endswith("pretrained")


def test_fine_tuning_starts_from_the_pretrained_weights(train, tiny_config, colours, tmp_path):
    """Of every pooling: what the checkpoint does not have is new, everything else is its own."""
    for pooling in ("token", "map"):
        done = train(tmp_path / pooling, config=tiny_config(pooling=pooling), steps=1, evaluations=1)
        saved = load_file(done.folder / "model.safetensors")
        tuned = finetune(
            str(done.folder), str(colours), tmp_path / f"tuned-{pooling}", steps=1, evaluations=1, learning_rate=1e-9
        )
        own = {
            name: p for name, p in tuned.model.state_dict().items() if not name.startswith(("classifier", "vit.pooler"))
        }
        assert {name for name in saved if name not in own} == {
            "prediction_head.weight", "prediction_head.bias", "vit.embeddings.mask_token"
        }  # fmt: skip
        for name, value in own.items():
            torch.testing.assert_close(value, saved[name], rtol=0, atol=1e-6)


def outcome(result):
    log = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))}
        for entry in result.history
        if "train_runtime" not in entry
    ]
    return load_file(result.folder / "model.safetensors"), result.validation_loss, log


def assert_same(one, other):
    (weights, *numbers), (others, *other_numbers) = outcome(one), outcome(other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert numbers == other_numbers


@pytest.mark.parametrize(
    ("objective", "changes"), [("masked-patch", {}), ("contrastive", {}), ("masked-patch", {"static_masks": True})]
)
def test_resumes_to_the_same_numbers(objective, changes, train, killed, tmp_path):
    done = train(tmp_path / "done", objective, keep_checkpoints=True, **changes)
    assert_same(train(killed(done, "broken"), objective, resume=True, **changes), done)
    if not changes:
        assert_same(train(killed(done, "ended", lost=0), objective, resume=True), done)
    message = "temperature was 0.2" if objective == "contrastive" else "prediction_target was mean_color, now pixels"
    other = dict(target="pixels", contrastive=ContrastiveOptions(temperature=0.5))
    with pytest.raises(UserError, match=message):
        train(killed(done, "other", lost=0), objective, resume=True, **other, **changes)


def test_accumulated_micro_batches_are_one_batch(train, tmp_path):
    """Every image has as many corrupted patches, so that means of micro-batches are the batch's."""
    whole = train(tmp_path / "whole", micro_batch_size=8, static_masks=True, steps=2, evaluations=1)
    parts = train(tmp_path / "parts", micro_batch_size=2, static_masks=True, steps=2, evaluations=1)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], value, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:images of 11x11 px hold 2x2 patches:UserWarning")
def test_images_that_leave_pixels_over(train, tiny_config, tmp_path):
    """Masked, judged and drawn are the patches that are seen."""
    train(tmp_path / "out", config=tiny_config(image_size=11, patch_size=5, num_register_tokens=2))
    model = HfViTForMaskedPatchPrediction.from_pretrained(tmp_path / "out")
    assert (model.config.grid, model.config.num_register_tokens) == ((2, 2), 2)
    assert (tmp_path / "out" / "predictions.png").is_file()


def test_it_learns_what_colours_follow_from_the_rest(train, tmp_path):
    done = train(tmp_path / "out", steps=80, evaluations=4, batch_size=16, learning_rate=5e-3)
    losses = [entry["eval_loss"] for entry in done.history if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    assert done.validation_loss == losses[-1]


def test_choices_reach_the_model(train, tmp_path):
    done = train(
        tmp_path / "out", class_token=False, num_hidden_groups=1, causal=True, target="pixels", steps=1, evaluations=1
    )
    config = done.model.config
    assert (config.pooling, config.has_class_token, config.num_hidden_groups) == ("gap", False, 1)
    assert (config.is_causal, config.predict_next_patch, config.prediction_target) == (True, False, "pixels")


REFUSED = [
    ({"objective": "jigsaw"}, "objective 'jigsaw' is unknown; choose masked-patch, next-patch, contrastive"),
    ({"target": "edges"}, "target 'edges' is unknown; choose mean_color, downsampled, pixels"),
    ({"objective": "contrastive", "micro_batch_size": 4}, "cannot be accumulated from parts of 4"),
    ({"objective": "contrastive", "batch_size": 64}, "50 training images are fewer than a batch of 64"),
    ({"static_masks": True, "streaming": True}, "static masks.*stream.*dynamic"),
    ({"num_hidden_groups": 7}, "num_hidden_groups=7 exceeds num_hidden_layers=2"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_input(changes, message, train, tmp_path):
    with pytest.raises(UserError, match=message):
        train(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists(), "the next attempt finds the folder free"


def test_targets_and_attention_that_cannot_be(train, tmp_path):
    sizes = dict(image_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(UserError, match="shrinks patches to 4x4; a patch of 2x2 px"):
        train(tmp_path / "out", config=HfViTConfig(patch_size=2, **sizes), target="downsampled")
    with pytest.raises(UserError, match="is_causal=True does not go with an axial model"):
        train(tmp_path / "out", "next-patch", config=HfAxialViTConfig(patch_size=4, **sizes))
    assert not (tmp_path / "out").exists()
