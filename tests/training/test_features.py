"""Heads that learn from cached features are those that learn from images; what varies features is refused."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from training.conftest import make_tiny_config, same_weights, untimed_log

from hf_vit import HfAxialResNetConfig, HfMixerConfig, HfViTModel, UserError
from hf_vit.cost import cost_summary
from hf_vit.data import load_data
from hf_vit.loading.start import find_model
from hf_vit.training import finetune, pretrain
from hf_vit.training.tasks.dense import build_dense_model

STEADY = dict(tune="head", steps=12, evaluations=3, batch_size=16, learning_rate=1e-2)
STEADY |= dict(random_resized_crop=(0, 0), horizontal_flip=0.0, rotation_degrees=0.0)
DISTILLED = dict(use_distillation_token=True, pooling="token")
ROTARY = dict(position_embedding="none", rotary_embedding="axial", rotary_coordinates="centered", rotary_jitter=1.1)
MIXER = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, tokens_mlp_dim=8, channels_mlp_dim=32)


@pytest.fixture(autouse=True)
def cache():
    """The folder of the features, empty."""
    folder = Path(huggingface_hub.constants.HF_ASSETS_CACHE) / "hf_vit" / "features"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def files(cache):
    return {path: path.stat().st_mtime_ns for path in sorted(cache.rglob("*.safetensors"))}


@pytest.fixture
def train(colours, tmp_path):
    def run(name, config=None, data=colours, **settings):
        torch.set_num_threads(1)
        return finetune(config or make_tiny_config(), data, tmp_path / name, **(STEADY | settings))

    return run


def test_a_file_in_place_of_the_cache_is_told_before_any_work(train, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="remove a file in its place, or set HF_ASSETS_CACHE"):
        train("none", data="nothing is read", cache_features=True)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (make_tiny_config(), {}),
        (make_tiny_config(**DISTILLED), dict(average_decay=0.9, micro_batch_size=4)),
        (make_tiny_config(**DISTILLED, is_causal=True), {}),
        (HfMixerConfig(**MIXER), dict(optimizer="sgd", precision="bf16", sam_rho=0.05)),
        (HfAxialResNetConfig(image_size=8, stage_depths=[1, 1, 1], stem_width=8), {}),  # of a stride of 16 px
    ],
    ids=["vit", "distilled", "distilled-causal", "mixer-bf16", "batch-norms"],
)
def test_heads_are_those_of_images(config, settings, train, cache):
    """Sums in batches of another size differ in the last digits: 2**-23 of float32, or 2**-8 of bfloat16."""
    plain, cached = (train(name, config, **settings, cache_features=name == "cached") for name in ("plain", "cached"))
    ours, theirs = (load_file(result.folder / "model.safetensors") for result in (cached, plain))
    assert ours.keys() == theirs.keys()
    heads = [name for name in ours if "classifier" in name]
    tolerance = 2e-2 if settings.get("precision") == "bf16" else 1e-5
    for name in ours:
        bound = tolerance * theirs[name].abs().max() if name in heads else 0
        assert (ours[name] - theirs[name]).abs().max() <= bound, name
    assert all(theirs[name].abs().max() > 0 for name in heads if name.endswith("weight"))  # they have learnt
    assert cached.test.loss == pytest.approx(plain.test.loss, rel=10 * tolerance)
    written = files(cache)
    again = train("again", config, **settings, cache_features=True)
    assert same_weights(again.folder, cached.folder)
    assert untimed_log(again) == untimed_log(cached)
    assert files(cache) == written
    assert cost_summary(cached.folder).measured.flops_per_second is None  # the backbone did not run


def test_resume_is_exact_and_an_interrupted_cache_is_completed(train, killed, cache, tmp_path):
    """Also where other weights have been saved in the folder of the model since."""
    encoder, config = str(tmp_path / "encoder"), make_tiny_config()
    HfViTModel(config).save_pretrained(encoder)
    whole = train("whole", encoder, data="digits", cache_features=True, keep_checkpoints=True)
    written = files(cache)
    assert sorted(path.name[:9] for path in written) == ["000000000", "000000000", "000001024"]
    lost = next(path for path in written if path.name.startswith("000001024"))
    lost.unlink()
    again = killed(whole, "again")
    HfViTModel(config).save_pretrained(encoder)
    with pytest.raises(UserError, match="cache_features was True and is now"):
        train("again", encoder, data="digits", resume=True)
    train("again", encoder, data="digits", resume=True, cache_features=True)
    assert same_weights(again, whole.folder)
    assert [path for path, time in files(cache).items() if written[path] != time] == [lost]


def test_features_are_those_of_the_rows_of_a_table_that_was_shuffled(train, colours):
    data = load_data(colours)
    train("before", data=data, cache_features=True)
    data.splits["train"] = data.splits["train"].shuffle(seed=0)
    ours, theirs = (train(f"{cached}", data=data, cache_features=cached).model.state_dict() for cached in (True, False))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["patch prediction", "segmentation"])
def test_attention_pooling_that_is_new_is_trained_with_the_head(kind, train, colours, tmp_path):
    """Such a checkpoint has none, and features of a random pooling would be learned from otherwise."""
    config, encoder = make_tiny_config(pooling="map"), tmp_path / "encoder"
    if kind == "segmentation":
        for part in build_dense_model(find_model(config), "linear", ["sky", "cat"]):
            part.save_pretrained(encoder)
    else:
        pretrain(config, colours, encoder, steps=1, evaluations=1, batch_size=16, micro_batch_size=8)
    before = train("one", encoder, steps=1, learning_rate=1e-9).model.state_dict()
    after = train("more", encoder).model.state_dict()
    changed = {name for name, weight in after.items() if (weight - before[name]).abs().max() > 1e-4}
    assert {name.partition("vit.")[2].partition(".")[0] for name in changed} == {"pooler", ""}
    with pytest.raises(UserError, match=r"needs a frozen backbone, but .* was pre-trained without the pooling layer"):
        train("cached", encoder, cache_features=True)


def test_images_of_another_size_have_other_features(train, cache):
    """Fractals of two sizes have the same names, and so the same digests; a model resizes both to its own size."""
    size = "fractals:classes=2,images=8,size={}"
    results = [train(f"{px}", data=size.format(px), cache_features=True) for px in (32, 8)]
    plain = train("plain", data=size.format(8))
    assert len(files(cache)) == 4
    ours, theirs = (load_file(result.folder / "model.safetensors") for result in (results[1], plain))
    torch.testing.assert_close(ours["classifier.weight"], theirs["classifier.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["truncated", "changed", "foreign"])
def test_damaged_and_foreign_features_are_refused(how, train, cache):
    train("first", cache_features=True)
    (first, *_), content = files(cache), None
    content = bytearray(first.read_bytes())
    if how == "foreign":
        train("other", make_tiny_config(num_hidden_layers=1), cache_features=True)
        other = next(path for path in files(cache) if path.name == first.name and path.parent != first.parent)
        shutil.copy(other, first)
    else:
        content[-1] ^= 1
        first.write_bytes(content[:-8] if how == "truncated" else content)
    with pytest.raises(UserError, match=f"{first} cannot be used.*delete {first.parent} and run again"):
        train("second", cache_features=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(tune="all"), "--tune all trains"),
        (dict(rotation_degrees=5.0), "rotation_degrees 5.0"),
        (dict(mixup_alpha=0.2), "mixup_alpha 0.2"),
        (dict(streaming=True), "leave --streaming out"),
        (dict(task="segmentation"), "needs a classifier that has no teacher"),
        (dict(drop_path=0.1), "drop_path_rate 0.1"),
        (dict(dropout=0.1), "hidden_dropout_prob 0.1"),
        (dict(config=make_tiny_config(**ROTARY)), "jitter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_varies_features_is_refused(settings, reason, train, cache, tmp_path):
    with pytest.raises(UserError, match=f"--cache-features.*{reason}.*leave --cache-features out"):
        train("refused", **settings, cache_features=True)
    assert not (tmp_path / "refused").exists()
    assert not cache.exists()
