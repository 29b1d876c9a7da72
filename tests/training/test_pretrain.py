"""Pre-training: commands, resuming and refusals; masks against counts by hand, contrast against its formula."""

import copy
import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training.conftest import assert_complete, same_weights, untimed_log, write_parquet
from transformers import AutoImageProcessor, AutoModel, AutoModelForMaskedImageModeling

from hf_vit import (
    HfAxialViTConfig,
    HfAxialViTModel,
    HfBitConfig,
    HfHybridViTConfig,
    HfHybridViTModel,
    HfViTConfig,
    HfViTForMaskedPatchPrediction,
    HfViTModel,
    UserError,
)
from hf_vit.data import AugmentationConfig, load_data, make_processor, transform_split
from hf_vit.results.facts import Facts
from hf_vit.training import finetune, pretrain
from hf_vit.training.tasks.momentum_contrast import (
    ContrastiveOptions,
    MomentumContrast,
    MomentumUpdate,
    TwoViews,
    build_mlp,
    compute_momentum,
    contrastive_loss,
)
from hf_vit.training.tasks.patch_prediction import MaskingCollator, NextPatch, RandomMasking, load_validation_images
from hf_vit.training.trainer.distributed import synchronize_batch_norms

OBJECTIVES = ("masked-patch", "next-patch", "contrastive")
SHORT = dict(steps=6, evaluations=3, batch_size=8, learning_rate=2e-3, shift_px=1)


@pytest.fixture
def train(tiny_config, colours):
    def run(output, objective="masked-patch", config=None, data=None, **changes):
        settings = SHORT | changes
        return pretrain(config or tiny_config(), data or str(colours), output, objective=objective, **settings)

    return run


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_by_command_and_fine_tuned_without_a_flag(objective, command, tiny_checkpoint, colours, tmp_path, monkeypatch):
    output, flags = tmp_path / "out/pre trained", ("--steps", "2", "--evaluations", "1", "--batch-size", "8")
    arguments = ("--model", tiny_checkpoint, "--data", colours, "--output", output, "--objective", objective)
    code, out, err = command("pretrain", *arguments, *flags)
    assert code == 0, err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["step 2 of 2"]
    assert_complete(output, "embeddings.png" if objective == "contrastive" else "predictions.png")
    assert "validation loss" in out
    assert f"hf-vit finetune --model '{output}' --data DATA" in out
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
    monkeypatch.chdir(tmp_path)
    assert command("finetune", "--model", "out/pre trained", "--data", colours, "--output", "tuned", *flags)[0] == 0
    tuned = Facts.load(tmp_path / "tuned").filter_kind("training")[-1]
    assert tuned.values["base_model"] == "pre trained", "not a name of the Hub, which the card would link to"


def test_fine_tuning_starts_from_the_pretrained_weights(train, tiny_config, colours, tmp_path):
    """Of every pooling: what the checkpoint does not have is new, everything else is its own."""
    for pooling in ("token", "map"):
        done = train(tmp_path / pooling, config=tiny_config(pooling=pooling), steps=1, evaluations=1)
        saved = load_file(done.folder / "model.safetensors")
        settings = dict(steps=1, evaluations=1, learning_rate=1e-9)
        tuned = finetune(str(done.folder), str(colours), tmp_path / f"tuned-{pooling}", **settings)
        new = ("classifier", "vit.pooler")
        own = {name: p for name, p in tuned.model.state_dict().items() if not name.startswith(new)}
        left = {"prediction_head.weight", "prediction_head.bias", "vit.embeddings.mask_token"}
        assert saved.keys() - own.keys() == left
        for name, value in own.items():
            torch.testing.assert_close(value, saved[name], rtol=0, atol=1e-6)


def assert_same(one, other):
    assert same_weights(one.folder, other.folder)
    assert (one.validation_loss, untimed_log(one)) == (other.validation_loss, untimed_log(other))


@pytest.mark.parametrize(
    ("objective", "changes"), [("masked-patch", {}), ("contrastive", {}), ("masked-patch", {"static_masks": True})]
)
def test_resumes_to_the_same_numbers(objective, changes, train, killed, tmp_path):
    done = train(tmp_path / "done", objective, keep_checkpoints=True, **changes)
    assert_same(train(killed(done, "broken"), objective, resume=True, **changes), done)
    if not changes:
        assert_same(train(killed(done, "ended", lost=0), objective, resume=True), done)
    other = dict(target="pixels", static_masks=not changes)
    messages = ["was mean_color and is now pixels", "static_masks was"]
    if objective == "contrastive":
        other, messages = dict(contrastive=ContrastiveOptions(temperature=0.5)), ["temperature was 0.2"]
    with pytest.raises(UserError) as error:
        train(killed(done, "other", lost=0), objective, resume=True, **other)
    assert all(message in str(error.value) for message in messages)


def test_an_epoch_of_contrast_has_full_batches_only(train, colours, tmp_path):
    """And a single validation image is enough, for the picture too."""
    data = load_data(str(colours))
    data = replace(data, splits=data.splits | {"validation": data.splits["validation"].select([0])})
    result = train(tmp_path / "out", "contrastive", data=data, steps=None, epochs=2, batch_size=20)
    full, rest = divmod(data.num_examples("train"), 20)
    assert rest
    assert result.steps == 2 * full


@pytest.mark.filterwarnings("ignore:images of 11x11 px hold 2x2 whole patches:UserWarning")
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
    choices = dict(class_token=False, num_hidden_groups=1, causal=True, target="pixels")
    done = train(tmp_path / "out", steps=1, evaluations=1, **choices)
    config = done.model.config
    assert (config.pooling, config.has_class_token, config.num_hidden_groups) == ("gap", False, 1)
    assert (config.is_causal, config.predict_next_patch, config.prediction_target) == (True, False, "pixels")


def test_a_checkpoint_may_lose_what_choices_leave_out(train, tiny_checkpoint, tmp_path):
    """Layers of a group share their weights, so the second layer's are not read; that is no misfit of config.json.

    Nor does a model without a head keep the classes that a fine-tuning gave to the checkpoint.
    """
    first = shutil.copytree(tiny_checkpoint, tmp_path / "first")
    config = json.loads((first / "config.json").read_text()) | {"id2label": {"0": "dog", "1": "cat", "2": "cow"}}
    (first / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    done = train(tmp_path / "grouped", config=str(first), num_hidden_groups=1, steps=1, evaluations=1)
    assert (done.model.config.num_hidden_groups, done.model.config.problem_type) == (1, None)
    assert "dog" not in (done.folder / "README.md").read_text() + (done.folder / "config.json").read_text()


@pytest.mark.parametrize("folders", [".", "all", "train val"])
def test_images_need_no_class_folders(folders, colours, tiny_config, tmp_path):
    """Images of a validation split are not learnt from."""
    names, lines = folders.split(), []
    for number, path in enumerate(sorted(colours.rglob("*.png"))):
        copied = tmp_path / "images" / names[number % len(names)] / f"{number}.png"
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    settings = SHORT | dict(steps=1, evaluations=1, report=lines.append)
    pretrain(tiny_config(), str(tmp_path / "images"), tmp_path / "out", **settings)
    assert f"were split off the {60 // len(names)} training images" in "".join(lines)


def test_pictures_show_images_of_the_whole_split(colours, tiny_config):
    data, processor = load_data(str(colours)), make_processor(tiny_config())
    shown = load_validation_images(SimpleNamespace(data=data, processor=processor), 5)
    labels = data.splits["validation"]["label"][:]
    assert (len(labels), [label for _, label in shown]) == (8, [labels[row] for row in (0, 1, 3, 4, 6)])


BIT = HfBitConfig(image_size=8, stage_depths=(1,), stem_width=32)
REFUSED = [
    ({"objective": "jigsaw"}, "--objective jigsaw is unknown; choose one of masked-patch, next-patch, contrastive"),
    ({"target": "edges"}, "target 'edges' is unknown; choose one of mean_color, downsampled, pixels"),
    ({"objective": "contrastive", "micro_batch_size": 4}, "cannot be split into micro-batches of 4"),
    ({"objective": "contrastive", "batch_size": 64}, "batch size 64 is larger than the 50"),
    ({"objective": "contrastive", "batch_size": 1}, "compares the images of a batch; give a --batch-size of at least"),
    ({"static_masks": True, "streaming": True}, "--static-masks .*--streaming; leave"),
    ({"num_hidden_groups": 7}, "num_hidden_groups=7 exceeds num_hidden_layers=2"),
    ({"config": HfViTConfig(image_size=8, patch_size=2), "target": "downsampled"}, "to 4x4; a patch of 2x2 px"),
    ({"config": HfAxialViTConfig(image_size=8, patch_size=4), "objective": "next-patch"}, "possible for an Axial-V"),
    ({"config": BIT, "objective": "contrastive", "class_token": False}, "sets pooling and use_class_token of the mo"),
    ({"config": BIT, "objective": "contrastive", "causal": True}, "sets is_causal of the model, but Bit of 1 stages"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_input(changes, message, train, tmp_path):
    with pytest.raises(UserError, match=message):
        train(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists(), "the next attempt finds the folder free"


CONFIG = HfViTConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("rate", "count"), [(0.5, 8), (0.15, 2), (1.0, 16), (0.001, 1)])
def test_every_image_has_the_same_number_of_corrupted_patches(rate, count):
    masked, sources = RandomMasking(rate).draw(50, 16, seeded())
    assert masked.sum(dim=1).tolist() == [count] * 50
    assert masked.dtype == torch.bool
    assert sources.dtype == torch.int64


def test_what_is_seen_in_place_of_corrupted_patches_is_80_10_10():
    masked, sources = RandomMasking().draw(4000, 16, seeded())
    own = torch.arange(16).expand(4000, -1)
    counts = {"mask": 0, "other": 0, "kept": 0}
    for image_mask, image_sources in zip(masked.tolist(), sources.tolist(), strict=True):
        for place, source in enumerate(image_sources):
            if image_mask[place]:
                counts["mask" if source == -1 else "kept" if source == place else "other"] += 1
    total = sum(counts.values())
    assert total == 4000 * 8
    # Three standard deviations of a share of 10% among 32,000 are 0.5%.
    shares = {name: round(number / total, 2) for name, number in counts.items()}
    assert shares == {"mask": 0.8, "other": 0.1, "kept": 0.1}
    # Every place is corrupted as often, and every other patch is shown as often.
    assert masked.float().mean(dim=0).sub(0.5).abs().max() < 0.03
    distance = ((sources - own) % 16)[masked & (sources >= 0) & (sources != own)]
    assert set(distance.tolist()) == set(range(1, 16))
    assert torch.bincount(distance, minlength=16)[1:].float().div(len(distance)).sub(1 / 15).abs().max() < 0.02


def test_shares_can_be_others():
    masked, sources = RandomMasking(0.5, mask_share=1.0, swap_share=0.0).draw(10, 16, seeded())
    assert (sources[masked] == -1).all()
    masked, sources = RandomMasking(0.5, mask_share=0.0, swap_share=0.0).draw(10, 16, seeded())
    assert torch.equal(sources, torch.arange(16).expand(10, -1))
    assert RandomMasking().draw(3, 1, seeded())[1].max() <= 0, "an image of one patch has no other"


def test_next_patch_hides_nothing():
    masked, sources = NextPatch().draw(2, 5)
    assert masked.tolist() == [[False, True, True, True, True]] * 2
    assert sources.tolist() == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(UserError, match=r"have only one patch, .* at least two"):
        NextPatch().draw(2, 1)


def examples(indices, mixable=True, index=True):
    made = [{"pixel_values": torch.full((3, 16, 16), float(i)), "label": 0, "mixable": mixable} for i in indices]
    return [{**one, "index": i} if index else one for one, i in zip(made, indices, strict=True)]


def test_static_masks_stay_with_their_image_and_dynamic_ones_do_not():
    static = MaskingCollator(RandomMasking(), CONFIG, static=True, seed=3)
    first, again = static(examples([4, 7, 9])), static(examples([9, 4]))
    for name in ("bool_masked_pos", "patch_sources"):
        assert torch.equal(first[name][[2, 0]], again[name])
        assert not torch.equal(first[name][0], first[name][1])
    other = MaskingCollator(RandomMasking(), CONFIG, True, seed=4)(examples([4]))
    assert not torch.equal(other["patch_sources"], again["patch_sources"][1:])
    dynamic = MaskingCollator(RandomMasking(), CONFIG, seed=3)
    torch.manual_seed(0)
    one, two = dynamic(examples([4])), dynamic(examples([4]))
    assert not torch.equal(one["bool_masked_pos"], two["bool_masked_pos"])
    torch.manual_seed(0)
    assert torch.equal(dynamic(examples([4]))["patch_sources"], one["patch_sources"])


def test_images_to_be_judged_by_always_have_the_same_masks():
    dynamic = MaskingCollator(RandomMasking(), CONFIG)
    one, two = (dynamic(examples([1, 2], mixable=False)) for _ in range(2))
    assert torch.equal(one["patch_sources"], two["patch_sources"])
    streamed = [dynamic(examples([1, 2], mixable=False, index=False)) for _ in range(2)]
    assert torch.equal(streamed[0]["bool_masked_pos"], streamed[1]["bool_masked_pos"])
    assert not torch.equal(streamed[0]["bool_masked_pos"][0], streamed[0]["bool_masked_pos"][1])
    assert set(one) == {"pixel_values", "bool_masked_pos", "patch_sources"}
    with pytest.raises(UserError, match=r"--static-masks .*--streaming; leave"):
        MaskingCollator(RandomMasking(), CONFIG, static=True)(examples([1], index=False))


SIZES = dict(image_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
OPTIONS = dict(hidden_size=12, projection_size=8)


def learner(normalization="batch", seed=0, **options):
    torch.manual_seed(seed)
    encoder = HfViTModel(HfViTConfig(patch_size=8, **SIZES))
    torch.nn.init.normal_(encoder.embeddings.cls_token)
    chosen = ContrastiveOptions(normalization=normalization, **{**OPTIONS, **options})
    return MomentumContrast(encoder, chosen).double().train()


def views(batch=6, seed=1):
    return torch.randn(batch, 2, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_loss(queries, keys, temperature):
    """Algorithm 1 of arXiv 2104.02057, one query at a time."""
    total = 0.0
    for i, query in enumerate(queries):
        query = query / math.sqrt(sum(v * v for v in query))
        scores = []
        for key in keys:
            key = key / math.sqrt(sum(v * v for v in key))
            scores.append(sum(a * b for a, b in zip(query, key, strict=True)) / temperature)
        total += math.log(sum(math.exp(score) for score in scores)) - scores[i]
    return 2 * temperature * total / len(queries)


@pytest.mark.parametrize("temperature", [0.07, 0.2, 1.0])
def test_loss_is_the_formula(temperature):
    random = np.random.RandomState(0)
    queries, keys = random.randn(5, 8), random.randn(5, 8)
    found = contrastive_loss(torch.tensor(queries), torch.tensor(keys), temperature)
    assert found.item() == pytest.approx(slow_loss(queries, keys, temperature), rel=1e-12)
    single = torch.tensor(queries).float(), torch.tensor(keys).float(), temperature
    with torch.autocast("cpu", torch.bfloat16):
        rounded = contrastive_loss(*single)
    assert rounded == contrastive_loss(*single)


@pytest.mark.parametrize("normalization", ["batch", "layer", "none"])
def test_symmetric_loss_of_both_views(normalization):
    model = learner(normalization)
    with torch.no_grad():
        for parameter in (*model.momentum_encoder.parameters(), *model.momentum_projector.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))  # so that the copies are not the originals
    images = views()
    twin = copy.deepcopy(model)
    first, second = images[:, 0], images[:, 1]
    queries = [twin.predictor(twin.projector(twin.encoder(v).pooler_output)).detach().numpy() for v in (first, second)]
    keys = [twin.momentum_projector(twin.momentum_encoder(v).pooler_output).detach().numpy() for v in (first, second)]
    wanted = slow_loss(queries[0], keys[1], 0.2) + slow_loss(queries[1], keys[0], 0.2)
    assert model(images)["loss"].item() == pytest.approx(wanted, rel=1e-9)


def test_only_the_learning_side_gets_gradients():
    model = learner()
    model(views())["loss"].backward()
    slow = [p for p in (*model.momentum_encoder.parameters(), *model.momentum_projector.parameters())]
    assert all(p.grad is None and not p.requires_grad for p in slow)
    frozen = {name for name, p in model.encoder.named_parameters() if not p.requires_grad}
    assert frozen == {"embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.projection.bias"}
    learning = [*model.encoder.parameters(), *model.projector.parameters(), *model.predictor.parameters()]
    assert all(p.grad is not None for p in learning if p.requires_grad)
    free = learner(freeze_patches=False)
    assert all(p.requires_grad for p in free.encoder.parameters())


def test_the_papers_heads():
    """Projector of three layers, predictor of two; a norm after each, the last one of both without scale (MoCo v3)."""
    model = learner()
    kinds = [type(layer).__name__ for layer in model.projector]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [layer.affine for layer in model.projector if hasattr(layer, "affine")] == [True, True, False]
    kinds = [type(layer).__name__ for layer in model.predictor]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [layer.affine for layer in model.predictor if hasattr(layer, "affine")] == [True, False]
    assert ContrastiveOptions() == ContrastiveOptions(0.2, 0.99, 256, None, "batch", True)
    widths = {width: build_width(width) for width in (64, 192, 384, 768)}
    assert widths == {64: 768, 192: 2304, 384: 4096, 768: 4096}
    assert not any(isinstance(layer, torch.nn.BatchNorm1d) for layer in build_mlp([4, 4, 4], "none"))


def build_width(hidden_size):
    with torch.device("meta"):
        config = HfViTConfig(**{**SIZES, "patch_size": 8, "hidden_size": hidden_size})
        return MomentumContrast(HfViTModel(config)).projector[0].out_features


def test_momentum_moves_the_copies_by_the_rest():
    model = learner()
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.add_(1.0)
    before = {name: p.clone() for name, p in model.momentum_encoder.named_parameters()}
    model.update_momentum(0.9)
    fast = dict(model.encoder.named_parameters())
    for name, moved in model.momentum_encoder.named_parameters():
        torch.testing.assert_close(moved, 0.9 * before[name] + 0.1 * fast[name], rtol=0, atol=1e-14)
    assert [round(compute_momentum(step, 100, 0.99), 6) for step in (0, 50, 100)] == [0.99, 0.995, 1.0]
    assert MomentumUpdate(model).model is model


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (HfHybridViTModel, HfHybridViTConfig(stage_depths=(), stem_width=32, **SIZES)),
        (HfAxialViTModel, HfAxialViTConfig(patch_size=8, **SIZES)),
    ],
)
def test_other_families(model_class, config):
    model = MomentumContrast(model_class(config), ContrastiveOptions(**OPTIONS)).train()
    loss = model(views().float())["loss"]
    loss.backward()
    assert loss.isfinite()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.encoder.parameters())
    patches = model.encoder.embeddings.patch_embeddings
    assert all(p.requires_grad == hasattr(patches, "stem") for p in patches.parameters()), "only a projection is frozen"


def test_synchronised_batch_norms_keep_names_weights_and_judgement():
    model = learner("batch")
    twin = copy.deepcopy(model)
    twin.projector[1].weight.requires_grad_(False)
    synchronize_batch_norms(twin)
    ours, theirs = ({name: value.shape for name, value in each.state_dict().items()} for each in (twin, model))
    assert ours == theirs
    assert not twin.projector[1].weight.requires_grad
    assert twin.projector[4].weight.requires_grad
    features = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(twin.eval().projector(features), model.eval().projector(features), rtol=0, atol=0)


def test_two_views_are_a_function_of_seed_epoch_and_image():
    """Different from each other and in every epoch; the same again whatever ran before; judged ones never change."""
    processor = make_processor(HfViTConfig(patch_size=8, **SIZES))
    random = np.random.RandomState(0)
    images = [Image.fromarray(random.randint(0, 255, (24, 24, 3), dtype=np.uint8)) for _ in range(3)]
    crops = AugmentationConfig(random_resized_crop=(0.2, 1.0), horizontal_flip=0.5)

    def look(transform, epoch, order=(0, 1, 2)):
        transform.set_epoch(epoch)
        prepared = transform.prepare([images[i] for i in order])
        return torch.stack(transform.finish(prepared, np.asarray(order, dtype=np.uint64)))

    first = look(TwoViews(processor, crops, seed=1), 0)
    assert first.shape == (3, 2, 3, 16, 16)
    assert not torch.equal(first[:, 0], first[:, 1])
    other_order = TwoViews(processor, crops, seed=1)
    torch.rand(7)
    look(other_order, 5)
    assert torch.equal(look(other_order, 0, order=(2, 0)), first[[2, 0]])
    for another in (look(other_order, 1), look(TwoViews(processor, crops, seed=2), 0)):
        assert not any(map(torch.equal, another.flatten(0, 1), first.flatten(0, 1)))
    judged = TwoViews(processor, crops, seed=1, is_validation=True)
    assert torch.equal(look(judged, 3), look(judged, 4))
    assert (judged.mixable, other_order.mixable) == (False, True)
    state = torch.get_rng_state()
    look(other_order, 2)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's numbers are drawn"


def test_colors_of_views_change_as_in_byol():
    """A fifth of the images becomes gray; of the second views a fifth is solarized (2006.07733, appendix B)."""
    processor = make_processor(HfViTConfig(patch_size=8, **SIZES))
    views = TwoViews(processor, None, seed=3)
    prepared = views.prepare([Image.new("RGB", (16, 16), (230, 200, 170))] * 600)
    pixels = torch.stack(views.finish(prepared, np.arange(600, dtype=np.uint64))).mean(dim=(3, 4))  # [600, 2, 3]
    is_gray = (pixels.amax(dim=2) - pixels.amin(dim=2)) < 0.01
    is_solarized = pixels.amax(dim=2) < -0.1  # what was bright is dark
    assert is_gray.double().mean(dim=0).tolist() == pytest.approx([0.2, 0.2], abs=0.06)
    assert is_solarized.double().mean(dim=0).tolist() == pytest.approx([0, 0.2], abs=0.06)


def test_a_stream_of_views_is_shuffled(colours, tiny_config, tmp_path):
    """Else a batch of files that are sorted by class would compare images of one class, the same in every epoch."""
    write_parquet(tmp_path / "colours.parquet", sorted(colours.rglob("*.png")))
    data, views = load_data(tmp_path / "colours.parquet", streaming=True), TwoViews(make_processor(tiny_config()), None)
    labels = [[example["label"] for example, _ in transform_split(data, "train", views).examples(0)] for _ in range(2)]
    assert sorted(labels[0]) != labels[0] == labels[1]


def test_one_view_is_refused():
    with pytest.raises(ValueError, match=r"shape \(6, 3, 16, 16\).*\[B, 2, C, H, W\]"):
        learner()(views()[:, 0])
