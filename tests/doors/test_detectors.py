"""The doors into transformers' dense predictors; the package's own heads are in training/test_dense.py."""

import dense_heads
import pytest
import torch
from torch.nn import functional as F
from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, DetrConfig, DetrForObjectDetection

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


DETR = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}


def test_detr_detects(family, tiny_config, learn, tmp_path):
    """Object detection from the last stage's map."""
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


def put_a_token_first(model: DepthAnythingForDepthEstimation) -> None:
    """What is read of the backbone's stages gets a token of zeros in front."""
    model.neck.reassemble_stage.register_forward_pre_hook(
        lambda module, given: ([F.pad(tokens, (0, 0, 1, 0)) for tokens in given[0]], *given[1:])
    )


def test_depth_anything_estimates_depth(family, tiny_config, learn, tmp_path):
    """It cuts one class token off itself; `put_a_token_first` gives an axial model, which has none, one to cut off."""
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


@torch.no_grad()
@pytest.mark.parametrize("head", DENSE_HEADS)
def test_a_heads_backbone_has_its_dtype_and_its_attention(head, tmp_path):
    """And labels of other names have their indices."""
    model, _ = dense_heads.build("plain", head)
    model.save_pretrained(tmp_path / "float32")
    images = dense_heads.batch_for(head)["pixel_values"].double()
    wide = type(model).from_pretrained(tmp_path / "float32", dtype=torch.float64, attn_implementation="eager").eval()
    assert dense_heads.backbone_of(wide).config._attn_implementation == "eager"
    for name in ("sdpa", "flex_attention"):
        implementation = {"backbone_config": name} if head == "mask2former" else name  # its decoder has its own
        wide.set_attn_implementation(implementation)
        for loaded in (wide, type(model).from_pretrained(tmp_path / "float32", attn_implementation=implementation)):
            assert dense_heads.backbone_of(loaded).config._attn_implementation == name
    wide.set_attn_implementation("eager")
    wide.save_pretrained(tmp_path / "float64")
    for loaded in (wide, type(model).from_pretrained(tmp_path / "float64").eval()):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
        loaded(images)
    narrow = type(model).from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).eval()
    assert dense_heads.backbone_of(narrow).dtype == torch.bfloat16
    narrow(images.bfloat16())
    renamed = type(model).from_pretrained(tmp_path / "float32", id2label={"0": "sea", "1": "dog"}).config
    assert (renamed.id2label, renamed.label2id) == ({0: "sea", 1: "dog"}, {"sea": 0, "dog": 1})


@torch.no_grad()
def test_mask_rcnn_needs_the_size_of_every_image():
    model, _ = dense_heads.build("plain", "mask-rcnn")
    images, sizes = dense_heads.batch_for("mask-rcnn")["pixel_values"], [(32, 64), (128, 64)]
    first, second = model.eval()(images, target_sizes=torch.tensor(sizes)).detections
    assert [tuple(each["masks"].shape[2:]) for each in (first, second)] == sizes
    with pytest.raises(ValueError, match="target_sizes are 1 for 2 images; give one for each image"):
        model(images, target_sizes=sizes[:1])


@torch.no_grad()
@pytest.mark.parametrize("head", ["linear", "upernet"])
def test_outputs_that_the_configuration_asks_for(head, tmp_path):
    model, _ = dense_heads.build("plain", head)
    model.eval().save_pretrained(tmp_path)
    images = dense_heads.batch_for(head)["pixel_values"]
    asked = type(model).from_pretrained(tmp_path, output_hidden_states=True, output_attentions=True).eval()
    outputs = asked(images)
    assert (len(outputs.hidden_states), len(outputs.attentions)) == (3, 2)
    assert not asked(images, output_hidden_states=False, output_attentions=False).keys() - {"logits"}


@pytest.mark.parametrize(("family", "head"), [*(("plain", head) for head in DENSE_HEADS), ("axial_resnet", "linear")])
def test_int8_weights(family, head, tmp_path):
    """Quantized when loaded, saved and loaded again."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model, _ = dense_heads.build(family, head)
    model.save_pretrained(tmp_path / "full")
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    quantized = type(model).from_pretrained(tmp_path / "full", quantization_config=quantization).eval()
    quantized.save_pretrained(tmp_path / "int8")
    images = dense_heads.batch_for(head)["pixel_values"]
    with torch.no_grad():
        given, again = (loaded(images)[0] for loaded in (quantized, type(model).from_pretrained(tmp_path / "int8")))
    torch.testing.assert_close(again, given, rtol=0, atol=0)


@pytest.mark.parametrize("head", ["linear", "upernet"])
def test_checkpointed_activations_change_no_gradient(head):
    model, _ = dense_heads.build("plain", head)
    batch, gradients = dense_heads.batch_for(head), []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.activation_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(0)
        model.train()(**batch).loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    assert dense_heads.backbone_of(model).is_activation_checkpointing
    torch.testing.assert_close(gradients[1], gradients[0])
