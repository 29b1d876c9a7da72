"""The main job through the command line, and what it leaves."""

import contextlib
import io
import json
from itertools import cycle, islice

import pytest
import torch
from PIL import Image
from training.conftest import write_parquet
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor, pipeline

from hf_vit import HfViTForImageClassification
from hf_vit.data import load_data
from hf_vit.evaluation import evaluate, evaluate_protocol
from hf_vit.loading.start import build_classifier, build_processor, find_model
from hf_vit.models.embeddings_hf_vit import resample_position_table
from hf_vit.models.modeling_hf_vit import HfViTAttention
from hf_vit.results.facts import Facts
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.plan import use_bf16
from hf_vit_cli.main import main

SHORT = ("--steps", "24", "--evaluations", "4", "--batch-size", "12", "--learning-rate", "2e-3", "--precision", "fp32")


@pytest.fixture(scope="module")
def tuned(tiny_checkpoint, colours, tmp_path_factory):
    """A checkpoint fine-tuned by command: the folder, and what was printed."""
    output, printed = tmp_path_factory.mktemp("tuned") / "colours-vit", io.StringIO()
    words = ["finetune", "--model", tiny_checkpoint, "--data", colours, "--output", output, "--image-size", "16x12"]
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main([str(word) for word in (*words, "--seed", "5", *SHORT)])
    assert not ended.value.code
    return output, printed.getvalue()


def test_fine_tuning_a_checkpoint_by_command(tuned, colours):
    output, out = tuned
    assert "50 images of 3 classes" in out
    assert "test accuracy" in out
    assert "saved in" in out
    names = {path.name for path in output.iterdir()}
    assert names >= {"config.json", "model.safetensors", "preprocessor_config.json", "facts.json", "README.md"}
    assert names >= {"learning_curve.png", "confusion_matrix.png", "modeling_hf_vit.py"}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert not any(path.is_dir() for path in output.iterdir())

    config = json.loads((output / "config.json").read_text())
    assert config["id2label"] == {"0": "blue", "1": "green", "2": "red"}
    assert config["label2id"] == {"blue": 0, "green": 1, "red": 2}
    assert config["image_size"] == [16, 12]
    processor = AutoImageProcessor.from_pretrained(output)
    assert (processor.size.height, processor.size.width) == (16, 12)
    assert tuple(processor.image_mean) == (0.4, 0.5, 0.6)
    with Image.open(output / "learning_curve.png") as picture:
        assert picture.width > 100
    assert "| colours | test |" in (output / "README.md").read_text()

    answers = pipeline("image-classification", model=str(output))(str(colours / "red" / "00.png"))
    assert {answer["label"] for answer in answers} == {"blue", "green", "red"}


@pytest.mark.parametrize(("emulated", "attention"), [(False, "eager"), (True, "sdpa")])
def test_bfloat16_on_a_cpu(
    emulated: bool, attention: str, tiny_checkpoint, colours, tmp_path, command, processor, monkeypatch
):
    """Explicit attention where the processor has instructions for it; the saved model has torch's own again."""
    processor(avx512_bf16=not emulated)
    used: list[str] = []
    attend = HfViTAttention.attend

    def watched(self: HfViTAttention, *args, **kwargs):
        if self.training:
            used.append(self.config._attn_implementation)
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(HfViTAttention, "attend", watched)
    arguments = ("--model", tiny_checkpoint, "--data", colours, "--output", tmp_path / "out", "--device", "cpu")
    assert command("finetune", *arguments, "--steps", "2", *SHORT[2:-1], "bf16")[0] == 0
    assert set(used) == {attention}
    assert Facts.load(tmp_path / "out").records[0].values["precision"] == "bf16"
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert (saved.dtype, saved.config._attn_implementation) == (torch.float32, "sdpa")


@pytest.mark.parametrize("settings", [{}, {"average_decay": 0.9}, {"tune": "lora"}, {"task": "segmentation"}], ids=str)
def test_after_bfloat16_the_saved_model_is_judged(settings, tiny_checkpoint, colours, tmp_path, processor, monkeypatch):
    """`evaluate` of the saved folder gives the same digits; the record says what the validation was computed in."""
    processor(avx512_bf16=True)
    monkeypatch.setattr("hf_vit.data.scenes.HELD_OUT", 6)
    data = "scenes:images=16,size=32" if "task" in settings else str(colours)
    quick = dict(steps=4, evaluations=2, batch_size=8, learning_rate=1e-3, precision="bf16", device="cpu")
    done = finetune(tiny_checkpoint, data, tmp_path / "out", **quick, **settings)
    judged = evaluate(str(tmp_path / "out"), data, device="cpu", progress=False).result.values()
    assert judged == done.test.values()
    assert Facts.load(tmp_path / "out").records[0].values["validation_precision"] == "bf16"


AMX, WITHOUT = {"amx_bf16": True}, {"avx512_bf16": True}
CHOICES = [("auto", 128, AMX, True), ("auto", 64, AMX, False), ("auto", 768, WITHOUT, False)]
CHOICES += [("fp32", 768, AMX, False), ("bf16", 64, WITHOUT, True)]


@pytest.mark.parametrize(("precision", "width", "capabilities", "is_bf16"), CHOICES)
def test_precision_auto_is_bfloat16_for_wide_models_with_matrix_units(
    precision, width, capabilities, is_bf16, processor, tiny_config
):
    processor(**capabilities)
    options = FinetuneOptions(device="cpu", precision=precision)
    assert use_bf16(options, tiny_config(hidden_size=width)) == is_bf16


def test_facts_record_what_was_used_and_found(tuned, colours):
    output, _ = tuned
    facts = Facts.load(output)
    assert [record.kind for record in facts.records] == ["training", "evaluation"]
    training, evaluation = facts.records
    assert training.seed == 5
    assert training.command.startswith("hf-vit finetune tiny --data colours --output colours-vit --image-size 16x12 ")
    assert " --seed 5 " in training.command
    assert training.data.model_dump()["split"] == "train"
    assert training.data.size == 50
    values = training.values
    assert values["recipe"]["learning_rate"] == 2e-3
    assert values["recipe"]["optimizer"] == "adamw"
    assert values["recipe"]["image_size"] == [16, 12]
    assert (values["recipe"]["dropout"], values["recipe"]["drop_path"]) == (0, 0)
    assert (values["steps"], values["planned_steps"], values["precision"]) == (24, 24, "fp32")
    batch = values["recipe"]["batch_size"]
    batches = [min(batch, 50 - start) for start in range(0, 50, batch)]
    assert 50 % batch
    assert values["images_seen"] == sum(islice(cycle(batches), 24))
    assert values["base_model"].endswith("tiny")

    # The recorded accuracy is that of the saved folder, and the images the untouched ones.
    data = load_data(str(colours), image_size=(16, 12))
    assert evaluation.data.fingerprint == data.fingerprint
    assert (evaluation.data.split, evaluation.data.size) == ("test", 2)
    model = AutoModelForImageClassification.from_pretrained(output)
    processor = AutoImageProcessor.from_pretrained(output)
    again = evaluate_protocol("top1", (model, processor), data, progress=False).result
    assert again.top1 == evaluation.values["top1"]
    assert again.loss == pytest.approx(evaluation.values["loss"], rel=1e-5)


def test_it_learns_and_keeps_the_best_checkpoint(colours, tiny_config, tmp_path):
    result = finetune(
        tiny_config(), str(colours), tmp_path / "out", steps=120, evaluations=6, batch_size=16, learning_rate=3e-3
    )
    evaluations = {entry["step"]: entry for entry in result.history if "eval_accuracy" in entry}
    assert list(evaluations) == [20, 40, 60, 80, 100, 120]
    best = max(evaluations.values(), key=lambda entry: (entry["eval_accuracy"], -entry["eval_loss"]))
    assert result.best_step == best["step"]
    assert result.validation == {"accuracy": best["eval_accuracy"], "loss": best["eval_loss"]}
    assert result.test.top1 >= 5 / 6
    data = load_data(str(colours), image_size=(8, 8))
    judged = (result.model, result.processor)
    validation = evaluate_protocol("top1", judged, data, split="validation", progress=False).result
    assert validation.top1 == pytest.approx(best["eval_accuracy"])


def test_the_seed_decides_everything(colours, tiny_config, tmp_path):
    def weights(name, seed, before):
        torch.manual_seed(before)
        run = finetune(tiny_config(), colours, tmp_path / name, seed=seed, steps=2, evaluations=1)
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    first = weights("a", seed=1, before=10)
    assert torch.equal(weights("b", seed=1, before=11), first)
    assert not torch.equal(weights("c", seed=2, before=10), first)


def test_new_head_and_resampled_positions(tiny_checkpoint):
    source = find_model(str(tiny_checkpoint))
    old = AutoModelForImageClassification.from_pretrained(tiny_checkpoint)
    new = build_classifier(source, ["a", "b"], image_size=(16, 8), dropout=0.25, drop_path=0.5)
    assert old.classifier.weight.abs().min() > 0
    assert not new.classifier.weight.any()
    assert not new.classifier.bias.any()
    assert new.config.id2label == {0: "a", 1: "b"}
    assert (new.config.hidden_dropout_prob, new.config.drop_path_rate) == (0.25, 0.5)
    assert new.config.image_size == (16, 8)
    expected = resample_position_table(old.vit.embeddings.position_embeddings, (2, 2), (4, 2))
    torch.testing.assert_close(new.vit.embeddings.position_embeddings.detach(), expected.detach())
    kept = {name: p for name, p in new.state_dict().items() if "classifier" not in name and "position" not in name}
    before = old.state_dict()
    assert all(torch.equal(before[name], p) for name, p in kept.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.1], "resample": 3},
        {"do_normalize": False},
        {"do_rescale": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
    ],
    ids=str,
)
def test_images_are_prepared_as_the_checkpoint_s(settings, tiny_config, tmp_path):
    config = tiny_config()
    HfViTForImageClassification(config).save_pretrained(tmp_path)
    size = {"height": config.image_size, "width": config.image_size}
    given = ViTImageProcessor(size=size, **settings)
    given.save_pretrained(tmp_path)
    made = build_processor(find_model(str(tmp_path)), config)
    image = Image.linear_gradient("L").convert("RGB")
    expected, found = (of(image, return_tensors="pt")["pixel_values"].float() for of in (given, made))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_bare_and_half_precision_checkpoints(tiny_config, tmp_path):
    from hf_vit import HfViTModel

    bare = HfViTModel(tiny_config()).to(torch.bfloat16)
    bare.save_pretrained(tmp_path / "bare")
    model = build_classifier(find_model(str(tmp_path / "bare")), ["a", "b"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.vit.layernorm.weight.bfloat16(), bare.layernorm.weight)
    assert torch.equal(model.vit.layers[0].mlp.fc1.weight.bfloat16(), bare.layers[0].mlp.fc1.weight)


@pytest.mark.parametrize(("name", "patch", "width"), [("Ti/4", 4, 192), ("ViT-S/16", 16, 384)])
def test_variants_start_afresh(name, patch, width):
    config = find_model(name).config
    assert (config.patch_size, config.hidden_size) == (patch, width)


def test_streamed_training(tiny_config, tmp_path, colours, killed):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train.parquet", sorted(colours.glob("*/*.png")))
    settings = dict(steps=30, evaluations=3, batch_size=12, learning_rate=3e-3)

    def train(output, **more):
        chosen = FinetuneOptions(streaming=True, keep_checkpoints=True, **more)
        return finetune(tiny_config(), str(tmp_path / "data"), output, options=chosen, **settings)

    done = train(tmp_path / "done")
    assert done.steps == 30
    assert done.validation["accuracy"] > 0.5
    # Interrupted in the third pass over the stream, it finds its place again.
    again = train(killed(done, "again"), resume=True)
    for one, other in zip(done.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
