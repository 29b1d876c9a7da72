"""The doors into transformers' and torchvision's dense predictors, one test and one recipe each.

Every recipe starts at a backbone config; `import hf_vit` has registered it with `AutoBackbone`, so the libraries build
`HfViTBackbone` (or `HfHybridViTBackbone`, `HfAxialViTBackbone`) from it. The built model has random weights; give its
backbone those of a checkpoint with

    model.<path>.load_state_dict(HfViTBackbone.from_pretrained(FOLDER, <the same backbone options>).state_dict())

where <path> is `backbone` (UperNet, DepthAnything), `model.backbone.model` (DETR) or
`model.pixel_level_module.encoder` (Mask2Former).
"""

from collections import OrderedDict

import dense_heads
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import hf_vit
from hf_vit.families import DENSE_HEADS


def backbone_of(family: str) -> type:
    return getattr(hf_vit, f"{family}Backbone")


def square(batch: int = 2, side: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with one bright square each, and its mask [B, H, W]: something to find."""
    pixel_values, mask = torch.randn(batch, 3, side, side) * 0.1, torch.zeros(batch, side, side, dtype=torch.bool)
    for index in range(batch):
        top = 8 + 16 * index
        mask[index, top : top + 24, 16:48] = True
        pixel_values[index, :, mask[index]] += 1.0
    return pixel_values, mask


@torch.no_grad()
def assert_same_after_reload(model, tmp_path, pixel_values, read, prepare=lambda model: None):
    model.eval().save_pretrained(tmp_path / "saved")
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    prepare(again)
    assert not info["missing_keys"] | info["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    # The last bit of a convolution depends on where its kernel lies in memory.
    torch.testing.assert_close(read(again.eval()(pixel_values)), read(model(pixel_values)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pyramid", [False, True])
def test_upernet_segments(family, pyramid, tiny_config, learn, tmp_path):
    """Semantic segmentation: four stages of the plain backbone, or the pyramid's four maps.

    UperNetConfig(backbone_config=HfViTConfig(..., out_features=["stage3", "stage6", "stage9", "stage12"]))
    """
    stages = {"use_feature_pyramid": True} if pyramid else {"out_features": [f"stage{i}" for i in range(1, 5)]}
    config = UperNetConfig(
        backbone_config=tiny_config(family, fpn_hidden_size=16, **stages),
        hidden_size=16,
        pool_scales=[1, 2],
        auxiliary_channels=8,
        num_labels=2,
    )
    model = UperNetForSemanticSegmentation(config)
    assert type(model.backbone) is backbone_of(family)
    pixel_values, mask = square()
    learn(family, model, model.backbone, lambda: model(pixel_values, labels=mask.long()).loss)
    assert_same_after_reload(model, tmp_path, pixel_values, lambda outputs: outputs.logits)


DETR = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}


def test_detr_detects(family, tiny_config, learn, tmp_path):
    """Object detection from the last stage's map. Needs scipy for the matching.

    DetrConfig(use_timm_backbone=False, backbone_config=HfViTConfig(...))
    """
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in DETR.items()}
    config = DetrConfig(
        **{"use_timm_backbone": False, "backbone_config": tiny_config(family), "num_labels": 2, "dropout": 0.0},
        **{"d_model": 32, "num_queries": 4, **sizes},
    )
    model = DetrForObjectDetection(config)
    assert type(model.model.backbone.model) is backbone_of(family)
    pixel_values, _ = square()
    labels = [  # boxes are centre, width and height, relative to the image
        {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, (20 + 16 * index) / 64, 0.5, 0.375]])}
        for index in range(2)
    ]
    learn(family, model, model.model.backbone.model, lambda: model(pixel_values, labels=labels).loss)
    assert_same_after_reload(model, tmp_path, pixel_values, lambda outputs: outputs.pred_boxes)


def test_mask2former_segments(family, tiny_config, learn, tmp_path):
    """Universal segmentation; its pixel decoder expects strides 4, 8, 16 and 32, hence the pyramid. Needs scipy.

    Mask2FormerConfig(backbone_config=HfViTConfig(..., use_feature_pyramid=True))
    """
    config = Mask2FormerConfig(
        backbone_config=tiny_config(family, use_feature_pyramid=True, fpn_hidden_size=16),
        **dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim"), 32),
        **{"dim_feedforward": 32, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2},
        **{"num_queries": 4, "train_num_points": 256, "num_labels": 2},
    )
    model = Mask2FormerForUniversalSegmentation(config)
    backbone = model.model.pixel_level_module.encoder
    assert type(backbone) is backbone_of(family)
    pixel_values, mask = square()
    mask_labels = list(torch.stack([~mask, mask], dim=1).float())  # one mask a class and image
    class_labels = [torch.tensor([0, 1])] * 2
    targets = {"mask_labels": mask_labels, "class_labels": class_labels}
    learn(family, model, backbone, lambda: model(pixel_values, **targets).loss.sum())
    assert_same_after_reload(model, tmp_path, pixel_values, lambda outputs: outputs.masks_queries_logits)


def put_a_token_first(model: DepthAnythingForDepthEstimation) -> None:
    """What is read of the backbone's stages gets a token of zeros in front."""
    model.neck.reassemble_stage.register_forward_pre_hook(
        lambda module, given: ([F.pad(tokens, (0, 0, 1, 0)) for tokens in given[0]], *given[1:])
    )


def test_depth_anything_estimates_depth(family, tiny_config, learn, tmp_path):
    """Depth: four stages as tokens. It cuts off one class token itself, so the pooling must be "token".

    An axial model has no class token: `put_a_token_first` gives it one to cut off.

    DepthAnythingConfig(backbone_config=HfViTConfig(..., out_features=[four stages], reshape_hidden_states=False),
                        patch_size=16, reassemble_hidden_size=768)
    """
    stages = [f"stage{i}" for i in range(1, 5)]
    config = DepthAnythingConfig(
        backbone_config=tiny_config(family, out_features=stages, reshape_hidden_states=False),
        **{"patch_size": 16, "reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16]},
        **{"fusion_hidden_size": 8, "head_hidden_size": 8},
    )
    model = DepthAnythingForDepthEstimation(config)
    prepare = put_a_token_first if family == "HfAxialViT" else lambda model: None
    prepare(model)
    assert type(model.backbone) is backbone_of(family)
    pixel_values, mask = square()
    # transformers has no loss for it yet ("Training is not implemented"), its heads learn all the same.
    learn(family, model, model.backbone, lambda: F.mse_loss(model(pixel_values).predicted_depth, 1.0 + mask.float()))
    assert_same_after_reload(model, tmp_path, pixel_values, lambda outputs: outputs.predicted_depth, prepare)


class Maps(nn.Module):
    """What torchvision's detectors ask of a backbone: named maps, and `out_channels`, the channels of each."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.out_channels = backbone.channels[0]

    def forward(self, pixel_values: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
        maps = self.backbone(pixel_values).feature_maps
        return OrderedDict((str(index), feature_map) for index, feature_map in enumerate(maps))


def mask_rcnn(backbone: nn.Module) -> nn.Module:
    """torchvision's Mask R-CNN on the pyramid: one anchor size a map; it resizes and pads the images itself.

    The heads are narrow for speed: leave the four arguments out, with `num_classes=2` in their place.
    """
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    maps = Maps(backbone)
    channels = maps.out_channels
    heads = {
        "box_head": TwoMLPHead(channels * 7 * 7, 64),
        "box_predictor": FastRCNNPredictor(64, num_classes=2),
        "mask_head": MaskRCNNHeads(channels, (32, 32), dilation=1),
        "mask_predictor": MaskRCNNPredictor(32, 32, num_classes=2),
    }
    anchors = AnchorGenerator(sizes=((16,), (32,), (64,), (128,)), aspect_ratios=((0.5, 1.0, 2.0),) * 4)
    few = {"rpn_post_nms_top_n_train": 50, "box_batch_size_per_image": 8, "box_detections_per_img": 4}  # for speed
    return MaskRCNN(
        maps,
        **heads,
        rpn_anchor_generator=anchors,
        min_size=64,
        max_size=64,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        **few,
    )


def test_mask_rcnn_detects_and_segments(family, tiny_config, learn, tmp_path):
    """Instance segmentation by torchvision's Mask R-CNN, as ViTDet does: see `Maps` and `mask_rcnn` above.

    Save the backbone with `save_pretrained` as ever, and the whole detector by its state dict.
    """
    from safetensors.torch import load_model, save_model

    model = mask_rcnn(backbone_of(family)(tiny_config(family, use_feature_pyramid=True, fpn_hidden_size=16)))
    pixel_values, mask = square()
    targets = [
        {
            "boxes": torch.tensor([[16.0, 8.0 + 16 * index, 48.0, 32.0 + 16 * index]]),  # x0, y0, x1, y1 in px
            "labels": torch.tensor([1]),
            "masks": mask[index : index + 1].to(torch.uint8),
        }
        for index in range(2)
    ]
    loss = lambda: sum(model(list(pixel_values), targets).values())  # noqa: E731
    learn(family, model, model.backbone, loss, to=0.3, steps=20, lr=2e-3)

    model.backbone.backbone.save_pretrained(tmp_path / "backbone")
    save_model(model, tmp_path / "detector.safetensors")
    again = mask_rcnn(backbone_of(family).from_pretrained(tmp_path / "backbone")).eval()
    load_model(again, tmp_path / "detector.safetensors")
    with torch.no_grad():
        before, after = model(list(pixel_values)), again(list(pixel_values))
    assert len(before[0]["boxes"])
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in ("boxes", "labels", "scores", "masks"))


def test_a_detectors_backbone_takes_pretrained_weights(family, tiny_config, tmp_path):
    options = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    pretrained = getattr(hf_vit, f"{family}Model")(tiny_config(family))
    pretrained.save_pretrained(tmp_path / "pretrained")
    model = UperNetForSemanticSegmentation(
        UperNetConfig(backbone_config=tiny_config(family, **options), hidden_size=16)
    )
    model.backbone.load_state_dict(backbone_of(family).from_pretrained(tmp_path / "pretrained", **options).state_dict())
    for name, parameter in pretrained.named_parameters():
        assert torch.equal(model.backbone.vit.get_parameter(name), parameter), name


@torch.no_grad()
@pytest.mark.parametrize("head", DENSE_HEADS)
def test_a_heads_backbone_has_its_dtype_and_its_attention(head, tmp_path):
    model, _ = dense_heads.build("plain", head)
    model.save_pretrained(tmp_path / "float32")
    images = dense_heads.batch_for(head)["pixel_values"].double()
    wide = type(model).from_pretrained(tmp_path / "float32", dtype=torch.float64, attn_implementation="eager").eval()
    assert dense_heads.backbone_of(wide).config._attn_implementation == "eager"
    wide.save_pretrained(tmp_path / "float64")
    for loaded in (wide, type(model).from_pretrained(tmp_path / "float64").eval()):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
        loaded(images)
