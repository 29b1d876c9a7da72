"""Features of models of several libraries, beside what those libraries say themselves."""

import re
import shutil
from unittest.mock import Mock

import pytest
import timm
import torch
from evaluation.tiny import examine, logits_of, make_classifier, make_data, make_processor, pixels_of
from models.families import FAMILIES, MIXERS, RESNETS
from timm.models.cait import Cait
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from training.conftest import harm, save_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitConfig,
    BitForImageClassification,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    PoolFormerConfig,
    PoolFormerForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ResNetModel,
    SiglipConfig,
    SiglipForImageClassification,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

from hf_vit import from_hub
from hf_vit.errors import UserError
from hf_vit.loading.model import load_model
from hf_vit.loading.outputs import PRE_LOGITS, compute_depth_features, compute_pre_logits, find_class_token
from hf_vit.training import finetune

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}


@pytest.fixture
def pixels():
    return torch.randn(3, 3, 16, 16)


def test_our_resnets_by_block():
    """The channels of every block; AxialResNet's are the last axis of its maps, and its pooled output their mean."""
    for family, row in RESNETS.items():
        model = row.build("classification").eval()
        pixels = torch.randn(2, 3, *_get_sides(model.config.image_size))
        with torch.no_grad():
            found, output = compute_depth_features(model, pixels), model.base_model(pixels)
        blocks = [name for name, _ in model.named_modules() if re.fullmatch(r".*stages\.\d\.\d", name)]
        assert list(found)[:-1] == blocks
        torch.testing.assert_close(found[PRE_LOGITS], output.pooler_output.flatten(1))
        *_, last, _ = found.values()
        assert last.shape == output.pooler_output.flatten(1).shape
        if family == "axial_resnet":
            torch.testing.assert_close(last, found[PRE_LOGITS])


@pytest.mark.parametrize("family", FAMILIES | MIXERS)
def test_ours_give_the_pooler_output(family):
    model = (FAMILIES | MIXERS)[family].build("classification").eval()
    pixels = torch.randn(2, 3, *_get_sides(model.config.image_size))
    with torch.no_grad():
        output = model.base_model(pixels, output_hidden_states=True)
        assert torch.equal(compute_pre_logits(model, pixels), output.pooler_output)
        found = compute_depth_features(model, pixels)
    assert list(found)[-1] == PRE_LOGITS
    assert len(found) == len(output.hidden_states) + 1
    token = find_class_token(model)
    assert (token is None) == (family in ("axial", "mixer"))
    for features, hidden in zip(found.values(), output.hidden_states[:-1], strict=False):
        torch.testing.assert_close(features, hidden.mean(dim=1) if token is None else hidden[:, 0])


def _get_sides(size):
    return (size, size) if isinstance(size, int) else tuple(size)


def test_what_the_heads_of_transformers_see(pixels):
    """The head's own weights on the features give the model's logits."""
    heads = {
        "classifier": [
            make_classifier(image_size=16).eval(),
            Dinov2ForImageClassification(Dinov2Config(**TINY)).eval(),
            ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1])).eval(),
            BitForImageClassification(
                BitConfig(num_groups=4, embedding_size=8, hidden_sizes=[32, 32], depths=[1, 1])
            ).eval(),
            PoolFormerForImageClassification(PoolFormerConfig(hidden_sizes=[8] * 4, depths=[1] * 4)).eval(),
            SiglipForImageClassification(SiglipConfig(vision_config={**TINY, "intermediate_size": 8})).eval(),
        ],
        "cls_classifier": [DeiTForImageClassificationWithTeacher(DeiTConfig(**TINY)).eval()],
    }
    with torch.no_grad():
        for head, models in heads.items():
            for model in models:
                output = model(pixels)
                logits = output.logits if head == "classifier" else output.cls_logits
                torch.testing.assert_close(getattr(model, head)(compute_pre_logits(model, pixels)), logits)


def test_models_of_transformers_without_a_head(pixels):
    resnet = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1])).eval()
    bare = ViTModel(make_classifier(image_size=16).config, add_pooling_layer=False).eval()
    with torch.no_grad():
        assert torch.equal(compute_pre_logits(resnet, pixels), resnet(pixels).pooler_output[:, :, 0, 0])
        assert torch.equal(compute_pre_logits(bare, pixels), bare(pixels).last_hidden_state[:, 0])
        maps = compute_depth_features(resnet, pixels)
    assert [tuple(features.shape) for features in maps.values()] == [(3, 8), (3, 12), (3, 12)]


def test_layers_of_clip_give_its_class_token(pixels):
    model = CLIPVisionModel(CLIPVisionConfig(**TINY, intermediate_size=16)).eval()
    with torch.no_grad():
        hidden = model(pixels, output_hidden_states=True).hidden_states
        _, *found, _ = compute_depth_features(model, pixels).values()
    for features, tokens in zip(found, hidden[1:], strict=True):
        torch.testing.assert_close(features, tokens[:, 0])


def test_the_mae_of_transformers_sees_all_patches(pixels, tmp_path):
    """Which transformers itself hides by chance, three of four."""
    model = ViTMAEModel(ViTMAEConfig(**TINY, intermediate_size=16)).eval()
    model.save_pretrained(tmp_path)
    make_processor().save_pretrained(tmp_path)
    model.config.mask_ratio, noise = 0.0, torch.arange(16.0).expand(3, 16)  # which sorts the patches
    with torch.no_grad():
        found = compute_pre_logits(load_model(tmp_path, "cpu").model, pixels)
        torch.testing.assert_close(found, model(pixels, noise=noise).last_hidden_state[:, 0])
    with pytest.raises(UserError, match=r"ViTMAEModel shuffles and hides patches; .* which is converted"):
        load_model((model, make_processor()))


def test_models_of_timm(pixels):
    """The mean over a map's pixels whichever way its axes are ordered; timm's own intermediate features beside it."""
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
    swin = SwinTransformer(img_size=16, patch_size=2, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2))
    resnet = timm.create_model("resnet10t", num_classes=3).eval()
    with torch.no_grad():
        assert torch.equal(compute_pre_logits(vit, pixels), vit.forward_features(pixels)[:, 0])
        tokens = vit.forward_intermediates(pixels, return_prefix_tokens=True, intermediates_only=True)
        for found, (_, prefix) in zip(compute_depth_features(vit, pixels).values(), tokens, strict=False):
            torch.testing.assert_close(found, prefix[:, 0])
        for model in (swin.eval(), resnet):
            maps = model.forward_intermediates(pixels, intermediates_only=True)
            found = list(compute_depth_features(model, pixels).values())
            torch.testing.assert_close(found[-2], maps[-1].mean(dim=(2, 3)))


def test_maps_whose_channels_are_last_in_the_layers_alone():
    """As in timm's Swin V2 CR, TinyViT and SAM, and in transformers' SAM."""
    sizes = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1), "window_size": (4, 4), "num_classes": 3}
    for side in ((64, 64), (64, 32)):
        model, pixels = SwinTransformerV2Cr(img_size=side, **sizes).eval(), torch.randn(2, 3, *side)
        with torch.no_grad():
            by_layer = compute_depth_features(model, pixels)
            maps = model.forward_intermediates(pixels, intermediates_only=True)
        for features, each in zip(by_layer.values(), maps, strict=False):
            torch.testing.assert_close(features, each.mean(dim=(2, 3)))


def test_a_class_token_that_joins_later(pixels):
    """The layers before it give the mean of the patches."""
    sizes = {"img_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    cait, xcit = Cait(**sizes, patch_size=4), Xcit(**sizes, patch_size=8)
    for model, images in ((cait, pixels), (xcit, pixels), (xcit, torch.randn(3, 3, 24, 32))):
        with torch.no_grad():
            found = compute_depth_features(model.eval(), images)
            maps = model.forward_intermediates(images, intermediates_only=True)
        assert list(found) == ["blocks.0", "blocks.1", PRE_LOGITS]
        for features, each in zip(found.values(), maps, strict=False):
            torch.testing.assert_close(features, each.mean(dim=(2, 3)))


def test_the_mean_leaves_registers_out(pixels):
    ours = FAMILIES["plain"].build("classification", "registers_gap").eval()
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    theirs = VisionTransformer(**sizes, class_token=False, reg_tokens=4, global_pool="avg").eval()
    with torch.no_grad():
        hidden = ours.base_model(pixels, output_hidden_states=True).hidden_states
        for found, tokens in zip(compute_depth_features(ours, pixels).values(), hidden, strict=False):
            torch.testing.assert_close(found, tokens[:, 3:].mean(dim=1))
        maps = theirs.forward_intermediates(pixels, intermediates_only=True)
        for found, each in zip(compute_depth_features(theirs, pixels).values(), maps, strict=False):
            torch.testing.assert_close(found, each.mean(dim=(2, 3)))


def test_layers_that_run_twice_are_numbered(pixels):
    model = FAMILIES["plain"].build("classification", num_hidden_groups=1).eval()
    with torch.no_grad():
        found = compute_depth_features(model, pixels)
        hidden = model.base_model(pixels, output_hidden_states=True).hidden_states
    assert list(found) == ["vit.embeddings", "vit.layers.0", "vit.layers.0 (2)", PRE_LOGITS]
    torch.testing.assert_close(found["vit.layers.0"], hidden[1][:, 0])


def test_an_examination_streams_features_and_logits():
    """Any batch size, and rows in any choice, give what one plain forward gives."""
    data, model = make_data(), make_classifier()
    images = data.splits["test"]["image"]
    with torch.no_grad():
        wanted, features = logits_of(model, images), model.vit(pixels_of(images)).last_hidden_state[:, 0]
    examination = examine(model, data, batch_size=7)
    logits, labels = zip(*examination.iterate_logits("test"), strict=True)
    torch.testing.assert_close(torch.cat(logits), wanted)
    assert torch.cat(labels).tolist() == data.splits["test"]["label"]
    found, _ = examination.features("test", [5, 2])
    torch.testing.assert_close(torch.from_numpy(found), features[[5, 2]])
    few = examine(model, data, num_images=11, seed=3)
    chosen, labels = few.features("test")
    assert len(chosen) == len(labels) == 11
    rows = [int((features - row).abs().sum(1).argmin()) for row in torch.from_numpy(chosen)]
    assert rows == sorted(set(rows)) != list(range(11))
    assert len(few.features("train")[0]) == 72, "only the images that judge are fewer"


def test_what_an_examination_cannot_do_is_refused(pixels, monkeypatch):
    other_names, bare = make_classifier([f"k{index}" for index in range(6)]), ViTModel(make_classifier().config)
    for act, said in (
        (lambda: examine(batch_size=0), "the batch size is 0, but it must be at least 1"),
        (lambda: examine(num_images=0), "the number of images is 0, but it must be at least 1"),
        (lambda: examine(split="holdout"), "has no split 'holdout'"),
        (lambda: compute_pre_logits(torch.nn.Linear(1, 1), pixels), "features of a Linear cannot be read"),
        (lambda: list(examine(bare).iterate_pixels()), "ViTModel has no class names .*; choose --protocol few-shot"),
        (lambda: list(examine(other_names).iterate_pixels()), "that the model does not have"),
    ):
        with pytest.raises(UserError, match=said):
            act()
    model = make_classifier()
    monkeypatch.setattr(model.vit, "forward", Mock(side_effect=MemoryError))
    with pytest.raises(UserError, match="out of memory for a batch of 9 images of 8x8 px; choose a smaller batch"):
        examine(model, batch_size=9).features("test")


def open_classifier(source, device=None):
    return load_model(source, device, as_classifier=True)


def bert():
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    return BertForSequenceClassification(BertConfig(**sizes))


CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "preprocessor_config.json"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("", None, "there is no file or folder .*; give a path, or owner/name of a model on the Hub"),
        (CONFIG, None, r"because it has no config\.json; give a folder"),
        (CONFIG, "{", r"config\.json of .* cannot be read: it is not valid JSON"),
        (CONFIG, "{}", "cannot be read as a model"),
        (CONFIG, "{}" + 2**25 * " ", r"^config\.json of \S+ has 33,554,434 bytes, but hf_vit reads at most 33,554,432"),
        (CONFIG, {"model_type": "perceptron"}, "cannot be read as a model: .*perceptron"),
        (CONFIG, '{"model_type": "hf_vit", "image_size": 8, "patch_size": 9}', "image_size=8 does not fit patch"),
        (CONFIG, {"hidden_size": 32}, r"do not fit its config\.json: their shapes differ"),
        (CONFIG, {"num_hidden_layers": 2}, r"the weights vit\.layers\.1\..* and 13 more of .* are missing; download"),
        (CONFIG, {"num_channels": 1}, "num_channels=1"),
        (WEIGHTS, None, r"no weights, because model\.safetensors"),
        (WEIGHTS, "half", "weights of .* are damaged"),
        (WEIGHTS, "", "weights of .* are damaged"),
        (WEIGHTS, "version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer .*git lfs"),
        (PROCESSOR, None, r"no readable image processor"),
        (PROCESSOR, "{", r"preprocessor_config\.json of .* is not valid JSON.*; download it again, or save it"),
        (PROCESSOR, {"image_std": [0.5, 0, 0.5]}, r"pixels that are not finite .* correct image_mean, image_std"),
        ("", lambda: ViTModel(make_classifier().config),
         r"no trained classification head .the weights classifier\.bias, classifier\.weight are missing"),
        ("", bert, r"holds a bert model \(BertForSequenceClassification\), which is not an image classifier"),
    ],
)  # fmt: skip
def test_what_does_not_load_is_told(save_classifier, name, change, message, capfd):
    folder = save_classifier()
    harm(folder, name, change)
    capfd.readouterr()
    with pytest.raises(UserError, match=message) as caught:
        open_classifier(folder, "cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "loading is quiet"


def test_a_folder_that_has_only_graphs_names_theirs(save_classifier):
    """As export --to transformers.js writes it."""
    harm(folder := save_classifier(), WEIGHTS, None)
    (folder / "onnx").mkdir()
    with pytest.raises(UserError, match=rf"no weights, .*; give {re.escape(str(folder))}/onnx for its graph$"):
        load_model(folder)


def test_layers_that_the_config_leaves_out_are_told(save_classifier):
    harm(folder := save_classifier(num_hidden_layers=2), CONFIG, {"num_hidden_layers": 1})
    with pytest.raises(UserError, match=r"do not fit its config\.json, whose model has no vit\.layers\.1\."):
        load_model(folder)


@pytest.mark.parametrize(
    ("fields", "changed", "unread"),
    [
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 1}, "vit.layers.1.attention.k_proj.bias"),
        ({"use_qk_norm": True}, {"use_qk_norm": False}, "vit.layers.0.attention.k_layernorm.bias"),
        ({"num_register_tokens": 2}, {"num_register_tokens": 0}, "vit.embeddings.register_tokens"),
        ({"norm_before_layers": True}, {"norm_before_layers": False}, "vit."),
    ],
)
def test_weights_that_the_config_leaves_out_are_told(fields, changed, unread, tmp_path):
    """transformers ignores them, and the model computes something else."""
    folder = save_model(FAMILIES["plain"].build("classification", **fields), tmp_path / "model")
    harm(folder, CONFIG, changed)
    for load in (load_model, from_hub, lambda folder: finetune(folder, "digits", tmp_path / "out")):
        with pytest.raises(UserError, match=rf"do not fit its config\.json, whose model has no {unread}"):
            load(folder)


def test_other_sources_and_devices_are_told(save_classifier, tmp_path):
    folder = save_classifier()
    for step in (9, 10):
        shutil.copytree(folder, tmp_path / "unfinished" / "checkpoints" / f"checkpoint-{step}")
    for source, device, said in (
        (folder.parent, None, f"did you mean {folder}"),
        *((tmp_path / place, None, f"did you mean {tmp_path}/unfinished/checkpoints/checkpoint-10[?]")
          for place in ("unfinished", "unfinished/checkpoints")),
        (folder / "model.safetensors", None, r"or give the folder with their config\.json"),
        ("nobody/nothing", None, r"no folder nobody/nothing, .* the Hub cannot be reached"),
        ("one/two/three", None, "no file or folder one/two/three"),
        *((folder, name, r"cannot be used here .*use --device cpu") for name in ("gpu", "cuda:99", "meta?")),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            open_classifier(source, device)


def test_a_processor_of_another_model_is_told(save_classifier, tmp_path):
    from PIL import Image
    from transformers import ViTImageProcessor

    from hf_vit.evaluation import embed, predict_images

    folder = save_classifier()
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    told = r"does not take images of 24x24 px, but its image processor resizes to that size \(Input image"
    with pytest.raises(UserError, match=told):
        predict_images(open_classifier(folder, "cpu"), [tmp_path / "image.png"])
    for level in range(6):
        wide = tmp_path / "data" / "ab"[level % 2] / f"{level}.png"
        wide.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 8), (level, 0, 0)).save(wide)
    with pytest.raises(UserError, match=told):
        embed(str(folder), str(tmp_path / "data"), tmp_path / "out")
    ViTImageProcessor(do_resize=False).save_pretrained(folder)
    with pytest.raises(UserError, match=r"processor cannot put images of different sizes into a batch \(.*\); set"):
        predict_images(open_classifier(folder, "cpu"), [tmp_path / "image.png", wide])
