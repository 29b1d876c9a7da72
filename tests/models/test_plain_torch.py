"""What transforms modules by torch's public functions works on a model as loaded, as on transformers' own ViT."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, Family, checkpoint_activations, randomise
from packaging.version import Version
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from transformers import ViTConfig, ViTForImageClassification

from hf_vit.models.resnet_hf_vit import StdConv2d

# Upstream: torch has no batching rule for its fused attention on CPUs, and says that vmap is slow there.
# peft asks for `is_gradient_checkpointing`, which transformers renames.
pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

Build = Callable[[int], Any]
# Weights of several models, and the logits of each.
Wanted = list[tuple[dict[str, torch.Tensor], torch.Tensor]]
NUM_WEIGHTS = 3


def transformers_vit(seed: int) -> nn.Module:
    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    config.num_labels = 3
    return randomise(ViTForImageClassification(config), seed).eval()


MODELS: dict[str, Build] = {
    name: lambda seed, family=family: family.build("classification", seed=seed) for name, family in FAMILIES.items()
}
MODELS["transformers"] = transformers_vit


@pytest.fixture(params=MODELS, scope="module")
def build(request) -> Build:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def images(build: Build) -> torch.Tensor:
    """Three images of a size that is not the nominal one, so that position tables are resampled."""
    config = build(0).config
    stride = getattr(config, "patch_stride", (config.patch_size,) * 2)
    return torch.rand(3, 3, 5 * stride[0], 3 * stride[1], generator=torch.Generator().manual_seed(1)) * 2 - 1


def logits(model: nn.Module, images: torch.Tensor, **weights: Any) -> torch.Tensor:
    kwargs = {"interpolate_pos_encoding": True}  # transformers' ViT asks for it; ours accept it
    if weights:
        return functional_call(model, weights["weights"], (images,), kwargs).logits
    return model(images, **kwargs).logits


@pytest.fixture(scope="module")
def wanted(build: Build, images: torch.Tensor) -> Wanted:
    models = [build(seed) for seed in range(NUM_WEIGHTS)]
    with torch.no_grad():
        return [(copy.deepcopy(model.state_dict()), logits(model, images)) for model in models]


@torch.no_grad()
def test_vmap_over_stacked_models(build: Build, images: torch.Tensor, wanted: Wanted):
    """And one after another, by a model that has computed with weights of its own: the same bits."""
    model = build(99)
    if Version(torch.__version__) < Version("2.12") and any(
        isinstance(module, nn.GroupNorm) for module in model.modules()
    ):
        pytest.skip("torch 2.11 has no batching rule for the memory layout of maps in GroupNorm")
    before = logits(model, images)
    for weights, outputs in wanted:
        assert torch.equal(logits(model, images, weights=weights), outputs)
        assert (outputs - before).abs().max() > 1e-2
    models = [build(seed) for seed in range(NUM_WEIGHTS)]
    parameters, buffers = stack_module_state(models)

    def run(parameters: Any, buffers: Any) -> torch.Tensor:
        return logits(models[0], images, weights={**parameters, **buffers})

    outputs = vmap(run)(parameters, buffers)
    torch.testing.assert_close(outputs, torch.stack([each for _, each in wanted]), rtol=1e-4, atol=1e-4)


def test_gradients_of_each_sample(build: Build, images: torch.Tensor):
    model, images, labels = build(0).double(), images.double(), torch.tensor([0, 1, 2])
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits(model, image[None], weights=weights), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, images, labels)
    for index in range(len(images)):
        model.zero_grad()
        nn.functional.cross_entropy(logits(model, images[index : index + 1]), labels[index : index + 1]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][index], parameter.grad, rtol=1e-8, atol=1e-10, msg=name)


# Upstream: torch.jit says that it is old.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_grad_modes_earlier_calls_and_a_trace(build: Build, images: torch.Tensor, wanted: Wanted):
    """None changes a bit; a trace holds the weights themselves, nothing derived from them."""
    model = build(0)
    assert torch.equal(logits(model, images), wanted[0][1])
    logits(model, nn.functional.interpolate(images, scale_factor=2))
    with torch.inference_mode():
        assert torch.equal(logits(copy.deepcopy(model), images), wanted[0][1])
    assert torch.equal(logits(model.requires_grad_(False), images), wanted[0][1])
    traced = torch.jit.trace(Logits(model), images, check_trace=False)
    for weights, outputs in wanted[:2]:
        model.load_state_dict(weights)
        torch.testing.assert_close(traced(images), outputs, rtol=0, atol=1e-5)


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return logits(self.model, images)


# Upstream: torch.ao says that it is old.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@torch.no_grad()
def test_dynamic_quantisation_reaches_the_blocks(build: Build, images: torch.Tensor, wanted: Wanted):
    """Every dense layer, by torch's exact types; the outputs stay near."""
    model = build(0)
    dense = sum(isinstance(module, nn.Linear) for module in model.modules())
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    kinds = [type(module).__name__ for module in quantised.modules() if "quantized" in type(module).__module__]
    layers = 2 * (2 if "axial" in type(model.config).__name__.lower() else 1)
    assert kinds.count("Linear") == dense == 6 * layers + 1
    off = (logits(quantised, images) - wanted[0][1]).norm() / wanted[0][1].norm()
    assert 0 < off < 0.1


def test_lora_on_convolutions(build: Build, images: torch.Tensor):
    """It starts from the same outputs, trains, and merges; a standardised kernel becomes std(W + s BA)."""
    from peft import LoraConfig, get_peft_model

    base = build(0)
    names = [name for name, module in base.named_modules() if isinstance(module, nn.Conv2d)]
    before = logits(base, images).detach()
    kernels = {name: base.get_submodule(name).weight.detach().clone() for name in names}
    model: Any = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=names)).eval()
    assert torch.equal(logits(model, images), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(logits(model, images), torch.tensor([0, 1, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    adapted, lora = logits(model, images).detach(), {}
    if hasattr(base, "resize_to"):
        base.resize_to(image_size=images.shape[2:])
        torch.testing.assert_close(logits(model, images), adapted, rtol=0, atol=1e-5)
    for name in names:
        layer = base.get_submodule(name)
        a, b = (getattr(layer, f"lora_{part}")["default"].weight.detach() for part in "AB")
        lora[name] = 2 * torch.einsum("or,rihw->oihw", b[:, :, 0, 0], a)  # s = alpha / r
        assert lora[name].any(), name
    merged = model.merge_and_unload()
    assert type(merged) is type(base)
    plain = build(0)
    with torch.no_grad():
        for name in names:
            plain.get_submodule(name).weight.copy_(kernels[name] + lora[name])
    torch.testing.assert_close(logits(merged, images), logits(plain, images), rtol=0, atol=1e-5)
    if not any(isinstance(module, StdConv2d) for module in merged.modules()):
        torch.testing.assert_close(logits(merged, images), adapted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("padding", ["same", "even"])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (7, 2)])
@torch.no_grad()
def test_lora_beside_a_standardised_kernel(kernel: int, stride: int, padding: str):
    """Before merging: the outputs with the kernel std(W) + s BA, computed as one convolution, at odd and even sizes."""
    from peft import LoraConfig, get_peft_model

    conv = StdConv2d(5, 4, kernel, stride, padding=padding, standardization="std").double()
    wanted = StdConv2d(5, 4, kernel, stride, padding=padding).double()  # whose kernel stays as it is
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    model: Any = get_peft_model(nn.Sequential(conv), config)
    layer = model.base_model.model[0]
    a, b = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
    wanted.weight.copy_(conv.standardized() + 3 * torch.einsum("or,rihw->oihw", b[:, :, 0, 0], a))
    for size in ((8, 9), (7, 6)):
        images = torch.randn(2, 5, *size, dtype=torch.float64)
        torch.testing.assert_close(model(images), wanted(images), rtol=0, atol=1e-12)


def test_lora(family: Family, tmp_path: Path):
    """Train q and v, activations checkpointed, save, load onto a fresh base, merge: the same logits all along."""
    from peft import LoraConfig, PeftModel, get_peft_model

    images = family.images(family.config())
    base = family.build("classification")
    before = base(images).logits.detach()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    model = get_peft_model(base, config)
    torch.testing.assert_close(model(images).logits, before, rtol=0, atol=0)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    blocks = 2 * len(family.attentions_of(torch.zeros(1, 1), (1, 1)))
    assert len(trainable) == blocks * 2 * 2 + 2, "A and B of q and v in every attention, and the head"
    checkpoint_activations(base.train())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    for _ in range(2):  # B starts at zero, so that A moves in the second step
        loss = model(images, labels=torch.tensor([0, 1])).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.any() for name, p in model.named_parameters() if "lora_B" in name)
        optimizer.step()
    after = model.eval()(images).logits.detach()
    assert (after - before).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".md"}
    again = PeftModel.from_pretrained(family.build("classification"), tmp_path).eval()
    torch.testing.assert_close(again(images).logits, after, rtol=0, atol=0)
    merged = again.merge_and_unload()
    assert type(merged) is family.classes["classification"]
    torch.testing.assert_close(merged(images).logits, after, rtol=0, atol=1e-5)


def test_arguments_of_text_models_that_are_none_change_nothing(family: Family):
    """peft passes them with task_type="FEATURE_EXTRACTION", as transformers' ViT takes them."""
    model = family.build("classification")
    images = family.images(model.config)
    nothing = dict.fromkeys(("input_ids", "attention_mask", "inputs_embeds"))
    torch.testing.assert_close(model(pixel_values=images, **nothing).logits, model(images).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"give patch_attention_mask \[B, h, w\] for padding"):
        model(images, attention_mask=torch.ones(2, 4))


def test_torchao_int8_weights(family: Family, tmp_path: Path):
    """Quantised when loaded, saved, loaded again: the same logits, close to the full ones, in a smaller file."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model = family.build("classification", hidden_size=64, intermediate_size=128)
    images = family.images(model.config)
    model.save_pretrained(tmp_path / "full")
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    loader = family.classes["classification"]
    quantised = loader.from_pretrained(tmp_path / "full", quantization_config=quantization).eval()
    with torch.no_grad():
        wanted, given = model(images).logits, quantised(images).logits
    assert 0 < (given - wanted).norm() < 0.05 * wanted.norm()
    quantised.save_pretrained(tmp_path / "int8")
    full, int8 = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "int8"))
    dense = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert full - int8 > 0.8 * 3 * dense, "three of four bytes are gone, but for the scales"
    again = loader.from_pretrained(tmp_path / "int8").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images).logits, given, rtol=0, atol=0)
