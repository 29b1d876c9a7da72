"""AxialResNet: equal to the paper's formula written out place by place; sizes, counts, saving, learning; as a stem."""

import copy

import pytest
import torch
from models.families import randomise
from torch.nn import functional as F

from hf_vit import (
    HfAxialResNetConfig,
    HfAxialResNetForImageClassification,
    HfAxialResNetModel,
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfViTConfig,
    HfViTForImageClassification,
    variant_config,
)
from hf_vit.models.modeling_hf_axial_resnet import HEADS, DenseNorm, HfAxialResNetAttention, HfAxialResNetBottleneck

TINY = {"image_size": 32, "stage_depths": (1, 2), "stem_width": 16, "num_labels": 3}


def fill(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Parameters and running statistics that matter, in float64."""
    randomise(module, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
        elif name.endswith("running_var"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return module.double()


def make_attention(height: int, width: int, axis: int) -> HfAxialResNetAttention:
    config = HfAxialResNetConfig(image_size=(4 * height, 4 * width))
    return fill(HfAxialResNetAttention(config, 32, axis, stride=4))


def make_model(**overrides) -> HfAxialResNetForImageClassification:
    return fill(HfAxialResNetForImageClassification(HfAxialResNetConfig(**{**TINY, **overrides}))).eval()


def batch_norm(values: torch.Tensor, norm: torch.nn.BatchNorm1d) -> torch.Tensor:
    """On channels in the last dimension."""
    moved = values.flatten(0, -2)
    mean, variance = norm.running_mean, norm.running_var
    if norm.training:
        mean, variance = moved.mean(0), moved.var(0, unbiased=False)
    return (values - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def dense_norm(module: DenseNorm, features: torch.Tensor) -> torch.Tensor:
    return batch_norm(features @ module.dense.weight.T, module.norm)


def attention_by_loops(attention: HfAxialResNetAttention, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 3 and 4 of arXiv 2003.07853, one pair of places at a time; and the variances [3, A] of the logits."""
    lines = features if attention.axis == 2 else features.transpose(1, 2)
    shape, length = lines.shape, lines.shape[2]
    lines = lines.flatten(0, 1)
    key_size = lines.shape[2] // HEADS // 2
    qkv = dense_norm(attention.qkv, lines).unflatten(2, (HEADS, 4 * key_size))
    q, k, v = qkv[..., :key_size], qkv[..., key_size : 2 * key_size], qkv[..., 2 * key_size :]
    table = attention.offset_embeddings
    r_q, r_k, r_v = table[:, :key_size], table[:, key_size : 2 * key_size], table[:, 2 * key_size :]
    terms = lines.new_zeros(3, len(lines), HEADS, length, length)
    for i in range(length):
        for j in range(length):
            offset = j - i + length - 1
            terms[0, :, :, i, j] = (q[:, i] * k[:, j]).sum(-1)
            terms[1, :, :, i, j] = (q[:, i] * r_q[offset]).sum(-1)
            terms[2, :, :, i, j] = (k[:, j] * r_k[offset]).sum(-1)
    mean, variance = terms.mean((1, 3, 4)), terms.var((1, 3, 4), unbiased=False)
    norm = attention.logit_norm
    if not norm.training:
        mean, variance = torch.full_like(mean, 0.7), norm.running_var  # any mean: it cancels
    normed = (terms - mean[:, None, :, None, None]) / torch.sqrt(variance + norm.eps)[:, None, :, None, None]
    probabilities = (normed * norm.weight[:, None, :, None, None]).sum(0).softmax(-1)
    content, position = (lines.new_zeros(len(lines), length, HEADS, 2 * key_size) for _ in range(2))
    for i in range(length):
        for j in range(length):
            share = probabilities[:, :, i, j, None]
            content[:, i] += share * v[:, j]
            position[:, i] += share * r_v[j - i + length - 1]
    summed = batch_norm(content.flatten(2), attention.content_norm)
    summed = summed + batch_norm(position.flatten(2), attention.position_norm)
    found = summed.reshape(shape)
    return found if attention.axis == 2 else found.transpose(1, 2), variance


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("training", [False, True])
def test_attention_is_the_papers_formula(axis, training):
    attention = make_attention(4, 5, axis).train(training)
    twin = copy.deepcopy(attention)
    features = torch.randn(2, 4, 5, 32, dtype=torch.float64)
    wanted, variance = attention_by_loops(twin, features)
    found = attention(features)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(twin)(features), wanted, rtol=0, atol=1e-10)
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad((found * direction).sum(), list(attention.parameters()))
    expected = torch.autograd.grad((wanted * direction).sum(), list(twin.parameters()))
    for (name, _), ours, theirs in zip(attention.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)
    if training:  # what evaluation will use
        number = (2 * 5 * 4 * 4) if axis == 1 else (2 * 4 * 5 * 5)
        running = twin.logit_norm.running_var * 0.9 + 0.1 * variance * number / (number - 1)
        torch.testing.assert_close(attention.logit_norm.running_var, running, rtol=0, atol=1e-10)


def bottleneck_by_hand(unit: HfAxialResNetBottleneck, features: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(dense_norm(unit.reduce, features))
    hidden, _ = attention_by_loops(unit.column, hidden)
    hidden, _ = attention_by_loops(unit.row, hidden)
    if unit.stride == 2:
        height, width = hidden.shape[1:3]
        pooled = [
            torch.stack([hidden[:, y : y + 2, x : x + 2].mean((1, 2)) for x in range(0, width, 2)], dim=1)
            for y in range(0, height, 2)
        ]
        hidden = torch.stack(pooled, dim=1)
    residual = features
    if unit.projection is not None:
        residual = dense_norm(unit.projection, features[:, :: unit.stride, :: unit.stride])
    return torch.relu(dense_norm(unit.expand, torch.relu(hidden)) + residual)


@pytest.mark.parametrize("size", [(32, 32), (37, 42)], ids=["nominal", "odd"])
def test_the_whole_network_by_hand(size):
    model = make_model(image_size=size)
    stem, images = model.resnet.encoder, torch.randn(2, 3, *size, dtype=torch.float64)
    norm = stem.root_norm
    root = F.conv2d(images, stem.root_conv.weight, stride=2, padding=3)
    root = F.batch_norm(root, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    features = F.max_pool2d(torch.relu(root), 3, stride=2, padding=1).permute(0, 2, 3, 1)
    maps = [features]
    for stage in stem.stages:
        for unit in stage:
            maps.append(bottleneck_by_hand(unit, maps[-1]))
    outputs = model(images, output_hidden_states=True)
    for ours, theirs in zip(outputs.hidden_states, maps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    base = model.resnet(images)
    assert base.last_hidden_state.shape == (2, -(-size[0] // 8) * -(-size[1] // 8), 128)
    assert model.config.grid == tuple(maps[-1].shape[1:3])
    torch.testing.assert_close(base.last_hidden_state, maps[-1].flatten(1, 2), rtol=0, atol=1e-10)
    torch.testing.assert_close(base.pooler_output, maps[-1].mean((1, 2)), rtol=0, atol=1e-10)
    logits = base.pooler_output @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(outputs.logits, logits, rtol=0, atol=1e-10)


@torch.no_grad()
def test_another_size_resamples_the_tables():
    model = make_model()
    unit = model.resnet.encoder.stages[0][0]
    old = unit.column.offset_embeddings.clone()  # offsets -7 to 7
    model.resize_to(image_size=(48, 40))
    new = unit.column.offset_embeddings  # -11 to 11, the corners aligned
    assert (len(new), len(unit.row.offset_embeddings)) == (2 * 12 - 1, 2 * 10 - 1)
    for row in range(23):
        at = row * 14 / 22
        low = min(int(at), 13)
        torch.testing.assert_close(new[row], old[low] + (old[low + 1] - old[low]) * (at - low), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "millions"), [("S", 12.5), ("M", 26.5), ("L", 45.6)])
def test_parameter_counts(name, millions):
    """The paper's numbers are of tables for spans of up to 255 places; ours are as long as the map."""
    with torch.device("meta"):
        model = HfAxialResNetForImageClassification(variant_config(f"AxialResNet-{name}", num_labels=1000))
    count = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, HfAxialResNetAttention):
            rows, columns = module.offset_embeddings.shape
            count += (2 * 255 - 1 - rows) * columns
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


def test_initialisation_and_the_first_steps():
    torch.manual_seed(0)
    model = HfAxialResNetForImageClassification(HfAxialResNetConfig(**TINY))
    assert not model.classifier.weight.any()
    assert all(not unit.expand.norm.weight.any() for stage in model.resnet.encoder.stages for unit in stage)
    attention = model.resnet.encoder.stages[1][1].row
    assert attention.qkv.dense.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert attention.offset_embeddings.std().item() == pytest.approx(8**-0.5, rel=0.15)
    images, labels, losses = torch.randn(6, 3, 32, 32), torch.arange(6) % 3, []
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(model(images, labels=labels).loss)
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert losses[0].item() == pytest.approx(1.0986, abs=1e-3)
    assert losses[-1].item() < 0.1


def test_logits_that_hardly_vary_leave_the_statistics_finite():
    """Their variance is the difference of two large numbers, which rounding makes negative."""
    torch.manual_seed(0)
    model = HfAxialResNetForImageClassification(HfAxialResNetConfig(**TINY)).train()
    for name, parameter in model.named_parameters():
        if ".qkv.norm." in name:
            torch.nn.init.constant_(parameter, 5.0 if name.endswith("bias") else 1e-3)
    model(torch.randn(4, 3, 32, 32))
    assert all(buffer.isfinite().all() for buffer in model.buffers())


# As the stem of the Axial-ViT.

VIT = {"image_size": 64, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
STEM = {**VIT, "num_attention_heads": 4, "num_labels": 3, "stage_depths": (1, 1), "stem_width": 16}


@torch.no_grad()
def test_the_stem_of_an_axial_vit():
    """Its patches are those of AxialResNet's map, through a convolution; the rest is the Axial-ViT's."""
    model = fill(HfAxialViTForImageClassification(HfAxialViTConfig(**STEM))).eval()
    embeddings, images = model.vit.embeddings.patch_embeddings, torch.randn(2, 3, 64, 64, dtype=torch.float64)
    resnet = HfAxialResNetModel(HfAxialResNetConfig(image_size=64, stage_depths=(1, 1), stem_width=16)).double().eval()
    resnet.encoder.load_state_dict(embeddings.stem.state_dict())
    features = resnet(images).last_hidden_state.unflatten(1, (8, 8))
    kernel, bias = embeddings.projection.weight, embeddings.projection.bias
    assert kernel.shape == (32, 128, 2, 2)
    patches = features.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2) @ kernel.flatten(1).T + bias
    torch.testing.assert_close(embeddings(images), patches, rtol=0, atol=1e-10)
    plain = copy.deepcopy(model)
    plain.vit.embeddings.patch_embeddings = torch.nn.Identity()
    plain.vit.embeddings.patch_embeddings.forward = lambda pixel_values: patches
    torch.testing.assert_close(model(images).logits, plain(images).logits, rtol=0, atol=1e-10)


def test_what_a_stem_cannot_take_over():
    vit = HfViTForImageClassification(HfViTConfig(**VIT, num_attention_heads=4))
    with pytest.raises(ValueError, match="stage_depths"):
        HfAxialViTForImageClassification.from_vit(vit, stage_depths=(1, 1), stem_width=16)
    model = HfAxialViTForImageClassification(HfAxialViTConfig(**STEM))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="patch_size"):
        model.resize_to(patch_size=8)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


# Upstream: peft asks for a name that transformers renames.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@torch.no_grad()
def test_every_layer_is_called_in_evaluation_too():
    """By hooks and adapters they are reached: LoRA on the products trained, and was left out of evaluation."""
    from peft import LoraConfig, get_peft_model

    model = fill(HfAxialResNetForImageClassification(HfAxialResNetConfig(**TINY))).eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    leaves = {name: module for name, module in leaves.items() if not isinstance(module, HfAxialResNetAttention)}
    called = dict.fromkeys(leaves, False)
    for name, module in leaves.items():
        module.register_forward_hook(lambda *_, name=name: called.update({name: True}))
    model(images)
    assert [name for name in called if not called[name]] == []
    names = [name for name, module in leaves.items() if name.endswith(".dense")]
    merged = copy.deepcopy(model)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=names)).eval()
    for index, name in enumerate(names):
        layer, weight = model.get_submodule(name), merged.get_submodule(name).weight
        a, b = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
        generator = torch.Generator().manual_seed(index)
        for each in (a, b):
            each.copy_(0.2 * torch.randn(each.shape, generator=generator))
        weight.add_(3 * b @ a)
    torch.testing.assert_close(adapted(images).logits, merged(images).logits, rtol=0, atol=1e-10)
