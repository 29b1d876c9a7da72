"""The original code's initialisation, in statistics: of new models, and of what a checkpoint does not hold."""

import math
from pathlib import Path

import pytest
import torch
from models.families import FAMILIES, Family
from torch import nn

from hf_vit.families import DENSE_HEADS

# Wide enough for statistics: thousands of numbers in every matrix.
WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "representation_size": 72}


def new(family: Family, head: str = "classification", **overrides):
    torch.manual_seed(0)
    return family.classes[head](family.config(**{**WIDE, **overrides})).requires_grad_(False)


def test_kernels_biases_norms_and_tokens(family: Family):
    """Xavier's uniform kernels; next to nothing in an MLP's biases; a head of zeros."""
    model = new(family, pooling="map")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(("classifier", "pooler.dense")):
            fan_out, fan_in = module.weight.shape
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert 0.98 * bound < module.weight.abs().max() <= bound, name
            assert module.weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
            assert module.weight.mean().abs() < 0.03 * bound, name
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
    with_token = new(family, pooling="gap", use_class_token=family.name != "axial")
    for each in (model, with_token):
        for name, parameter in each.named_parameters():
            if name.endswith(("fc1.bias", "fc2.bias")):
                assert 0 < parameter.std() < 2e-6, name
                assert parameter.std() == pytest.approx(1e-6, rel=0.35), name
            elif name.endswith("bias") or "cls_token" in name or name.startswith("classifier"):
                assert not parameter.any(), name
    assert not model(family.images(model.config)).logits.any()


def test_representation_and_patches_are_lecun_normal(family: Family):
    model = new(family, image_size=64, num_channels=8)
    projection = model.vit.embeddings.patch_embeddings.projection.weight
    for weight in (projection, model.vit.pooler.dense.weight):
        wanted = math.sqrt(1 / weight[0].numel())
        assert weight.std() == pytest.approx(wanted, rel=0.05)
        assert weight.abs().max() < 2.3 * wanted, "the normal distribution is truncated at two deviations"


def test_learned_positions_are_normal(family: Family):
    for position in {"learned", "learned_2d", "relative", "relative_bias"} & {"learned", "learned_2d", *family.choices}:
        fields = {"position_embedding": position, "image_size": 128}
        for deviation, model in ((0.02, new(family, **fields)), (0.5, new(family, **fields, initializer_range=0.5))):
            ending = "offset_embeddings" if "relative" in position else "position_embeddings"
            tables = [parameter for key, parameter in model.named_parameters() if key.endswith(ending)]
            assert len(tables) == {"learned": 1, "learned_2d": 2}.get(position, 2)
            for table in tables:
                assert table.std() == pytest.approx(deviation, rel=0.08)
                assert table.mean().abs() < 0.1 * deviation


def test_distillation_layer_scale_and_probe():
    plain = FAMILIES["plain"]
    model = new(plain, use_distillation_token=True, layer_scale_init_value=1e-4)
    assert not model.vit.embeddings.distillation_token.any()
    assert not model.distillation_classifier.weight.any()
    scales = [p for name, p in model.named_parameters() if name.endswith("lambda1")]
    assert len(scales) == 4
    assert all((scale == 1e-4).all() for scale in scales)
    probe = new(plain, pooling="map").vit.pooler.map.probe
    bound = math.sqrt(6 / (1 + 96))  # flax's fans of [1, 1, 96]
    assert 0.8 * bound < probe.abs().max() <= bound


def test_predictions_of_a_detector_are_detectron2s():
    """Small scores, and boxes and masks ten times smaller."""
    backbone = FAMILIES["plain"].config(use_feature_pyramid=True, fpn_hidden_size=64, out_features=["stage2"])
    head = DENSE_HEADS["mask-rcnn"]
    model = head.model_class(head.config_class(backbone_config=backbone, num_labels=50, mask_channels=(64,)))
    deviations = {"rpn.head.bbox_pred": 0.01, "rpn.head.cls_logits": 0.01, "roi_heads.box_predictor.cls_score": 0.01}
    deviations |= {"roi_heads.box_predictor.bbox_pred": 1e-3, "roi_heads.mask_predictor.mask_fcn_logits": 1e-3}
    for name, deviation in deviations.items():
        layer = model.get_submodule(name)
        assert layer.weight.std().item() == pytest.approx(deviation, rel=0.15), name
        assert not layer.bias.any(), name


def test_a_norm_that_a_segmentation_checkpoint_lacks(tmp_path: Path):
    head = DENSE_HEADS["linear"]
    config = head.config_class(backbone_config=FAMILIES["plain"].config(out_features=["stage2"]), num_labels=3)
    head.model_class(config).save_pretrained(tmp_path)
    norm = head.model_class.from_pretrained(tmp_path, use_norm=True).norm
    assert (norm.weight == 1).all()
    assert not norm.bias.any()


def test_what_a_checkpoint_lacks_is_initialised_the_same(family: Family, tmp_path: Path):
    """More blocks, a representation layer and a head of another size: new ones start as in a new model."""
    base = family.build("classification", **{**WIDE, "representation_size": None})
    base.save_pretrained(tmp_path)
    torch.manual_seed(1)
    model = family.classes["classification"].from_pretrained(
        tmp_path, num_hidden_layers=3, representation_size=72, num_labels=5, ignore_mismatched_sizes=True
    )
    model.requires_grad_(False)
    assert not model.classifier.weight.any()
    assert not model.classifier.bias.any()
    assert model.vit.pooler.dense.weight.std() == pytest.approx(96**-0.5, rel=0.05)
    assert not model.vit.pooler.dense.bias.any()
    added = {name: p for name, p in model.vit.layers[2].named_parameters()}
    for name, parameter in added.items():
        if name.endswith(("fc1.bias", "fc2.bias")):
            assert parameter.std() == pytest.approx(1e-6, rel=0.35), name
        elif parameter.ndim == 2:
            bound = math.sqrt(6 / sum(parameter.shape))
            assert 0.98 * bound < parameter.abs().max() <= bound, name
    kept = dict(base.vit.named_parameters())
    for name, parameter in model.vit.named_parameters():
        if name in kept:
            assert torch.equal(parameter, kept[name]), name


def test_a_seed_gives_the_same_model(family: Family):
    """Every head, and every kind of module that a choice brings in."""
    for head, choice in [*((head, "default") for head in family.classes), *(("model", one) for one in family.choices)]:
        models = []
        for _ in range(2):
            torch.manual_seed(5)
            models.append(family.classes[head](family.config(choice)))
        for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(first, second), (head, choice, name)
