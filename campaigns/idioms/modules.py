"""Idioms that change what a part computes: hooks, parametrisations, adapters, other parts in its place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers.modeling_utils import PreTrainedModel

from campaigns.idioms.table import EXACT, FLOAT32, PLAIN, idiom
from campaigns.idioms.trial import OLD, Subject, Tensors, Trial, distance, inner
from campaigns.idioms.weights import Pair
from hf_vit.errors import UserError
from hf_vit.models.resnet_hf_vit import StdConv2d


def bent(tensor: torch.Tensor) -> torch.Tensor:
    """What a hook makes of an input or an output; no scale and no shift, which a norm would take back."""
    return tensor + 0.5 * torch.sin(3 * tensor)


def first(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor, or a tuple whose first is one, changed."""
    if isinstance(value, tuple):
        return change(value[0]), *value[1:]
    return change(value) if isinstance(value, torch.Tensor) else value


class Watched(nn.Module):
    """A module in a module's place that bends what goes in or what comes out, and keeps what came out."""

    def __init__(self, module: nn.Module, side: str) -> None:
        super().__init__()
        self.module, self.side, self.seen = module, side, list[torch.Tensor]()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.module(*(first(args, bent) if self.side == "input" else args), **kwargs)
        first(outputs, self.keep)
        return first(outputs, bent) if self.side == "output" else outputs

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.append(tensor)
        return tensor


def hookable(model: nn.Module) -> list[str]:
    """One module of every role (of each layer the same), that a pass calls; models are wholes, not parts."""
    roles: dict[str, str] = {}
    called: set[nn.Module] = set()
    handles = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in model.modules()]
    with torch.no_grad():
        model(torch.zeros(1, model.config.num_channels, *size_of(model)).to(next(model.parameters()).dtype))
    for handle in handles:
        handle.remove()
    for name, module in model.named_modules():
        if module in called and not isinstance(module, PreTrainedModel):
            roles.setdefault("".join("0" if part.isdigit() else part for part in name.split(".")), name)
    last = [name for name in (n for n, m in model.named_modules() if m in called) if name.endswith("layers.1")]
    return [*roles.values(), *last]


def size_of(model: Any) -> tuple[int, int]:
    size = model.config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def everywhere(trial: Trial, attempt: Callable[[Trial, str], Pair]) -> Pair:
    """At every part, one after the other: all answers in one list; a refusal of some is a refusal of the idiom."""
    given: Tensors = []
    wanted: Tensors = []
    refusals: list[Exception] = []
    for name in hookable(trial.exact(OLD)):
        try:
            both = attempt(trial, name)
        except (UserError, AttributeError) as refusal:  # a part that an optimized model has no more
            refusals.append(refusal)
            continue
        off = distance(*both, trial.subject.is_rough)
        trial.notes["at"] = f"{name}: {off:.2g}" if off > trial.notes.get("worst", 0) else trial.notes.get("at")
        trial.notes["worst"] = max(off, trial.notes.get("worst", 0))
        given, wanted = given + both[0], wanted + both[1]
    if refusals and trial.notes.get("worst", 0) < 1e-4:
        raise next((each for each in refusals if isinstance(each, UserError)), refusals[0])
    return given, wanted


def bending(side: str) -> Callable[[Trial, str], Pair]:
    """A hook that changes an input or an output."""

    def attempt(trial: Trial, name: str) -> Pair:
        model, exact = trial.start(), trial.exact(OLD)
        module = model.get_submodule(name)
        if side == "output":
            module.register_forward_hook(lambda module, args, output: first(output, bent))
        else:
            module.register_forward_pre_hook(lambda module, args: first(args, bent))
        exact.set_submodule(name, Watched(exact.get_submodule(name), side))
        model = trial.done(model)
        with torch.no_grad():
            return trial.answer(model), trial.answer(exact, trial.images().double())

    return attempt


@idiom("hooks: output changed", slow=True, dtypes=FLOAT32)
def output_hooks(trial: Trial) -> Pair:
    return everywhere(trial, bending("output"))


@idiom("hooks: input changed", slow=True, dtypes=FLOAT32)
def input_hooks(trial: Trial) -> Pair:
    return everywhere(trial, bending("input"))


def reading(trial: Trial, name: str) -> Pair:
    model, exact, seen = trial.start(), trial.exact(OLD), list[torch.Tensor]()

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        first(output, lambda tensor: (seen.append(tensor), tensor)[1])

    model.get_submodule(name).register_forward_hook(keep)
    watched = Watched(exact.get_submodule(name), "nothing")
    exact.set_submodule(name, watched)
    model = trial.done(model)
    with torch.no_grad():
        trial.answer(model)
        trial.answer(exact, trial.images().double())
    return seen, watched.seen


@idiom("hooks: output read", slow=True, dtypes=FLOAT32)
def reading_hooks(trial: Trial) -> Pair:
    return everywhere(trial, reading)


@idiom("hooks: accelerate's", dtypes=EXACT)
def accelerate_hooks(trial: Trial) -> Pair:
    """A forward that was replaced on one object."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Bending(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return first(output, bent)

    model, exact = trial.start(), trial.exact(OLD)
    add_hook_to_module(model.get_submodule(inner(exact)), Bending())
    exact.set_submodule(inner(exact), Watched(exact.get_submodule(inner(exact)), "output"))
    return of(trial, model, exact)


@torch.no_grad()
def of(trial: Trial, model: Any, exact: nn.Module) -> Pair:
    model = trial.done(model)
    return trial.answer(model), trial.wanted(exact)


class Shifted(nn.Module):
    """A parametrisation that adds fixed noise."""

    def __init__(self, noise: torch.Tensor) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.noise.to(weight.dtype)


def noise_like(tensor: torch.Tensor, seed: int = 7) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise.to(tensor.dtype) * (0.3 * tensor.detach().double().std()).to(tensor.dtype)


@idiom("parametrised: added noise", changes=True, dtypes=PLAIN)
def parametrised(trial: Trial) -> Pair:
    return all_with(trial, lambda module: parametrize.register_parametrization(module, "weight", shift(module)))


def shift(module: Any) -> Shifted:
    return Shifted(noise_like(module.weight))


def with_weights(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]


def all_with(trial: Trial, change: Callable[[Any], object]) -> Pair:
    """Every weight gets the same noise, by the change and by hand."""
    model, exact = trial.start(), trial.exact(OLD)
    plain = trial.source(OLD)
    for name in with_weights(plain):
        noise = noise_like(plain.get_submodule(name).weight)
        change(model.get_submodule(name))
        with torch.no_grad():
            weight = exact.get_submodule(name).weight
            weight.copy_((plain.get_submodule(name).weight + noise).double())
    return of(trial, model, exact)


@idiom("parametrised: and taken off", changes=True, dtypes=PLAIN)
def parametrised_for_good(trial: Trial) -> Pair:
    def change(module: Any) -> None:
        parametrize.register_parametrization(module, "weight", shift(module))
        parametrize.remove_parametrizations(module, "weight")

    return all_with(trial, change)


@idiom("parametrised: weight_norm", changes=True, dtypes=EXACT)
def weight_normed(trial: Trial) -> Pair:
    """Its magnitudes changed, one an input channel, on every product and convolution."""
    model, exact = trial.start(), trial.exact(OLD)
    for name in (name for name, layer in exact.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)):
        module = parametrizations.weight_norm(model.get_submodule(name), dim=1)
        magnitude = module.parametrizations.weight.original0
        factor = 1.1 + 0.2 * torch.linspace(0, 1, magnitude.numel(), dtype=torch.float64).view_as(magnitude)
        with torch.no_grad():
            magnitude.mul_(factor.to(magnitude.dtype))
            exact.get_submodule(name).weight.mul_(factor)
    return of(trial, model, exact)


def has_linears(subject: Subject) -> bool:
    return subject.head == "classification" or subject.family != "bit"


LORA = 0.2  # standard deviation of LoRA's matrices
ADAPTED = (*PLAIN, "int8-torchao")


def lora(trial: Trial, kinds: Any, model: Any = None) -> tuple[Any, nn.Module]:
    """A model with random LoRA on all layers of some kinds, and a fresh one whose weights hold its products."""
    from peft import LoraConfig, get_peft_model

    model, exact = trial.start() if model is None else model, trial.exact(OLD)
    names = [name for name, module in exact.named_modules() if isinstance(module, kinds)]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=names)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for index, name in enumerate(names):
            layer = adapted.base_model.model.get_submodule(name)
            a, b = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
            a.copy_(LORA * noise(a, 2 * index))
            b.copy_(LORA * noise(b, 2 * index + 1))
            product = 3 * torch.einsum("or,ri->oi", b.flatten(1).double(), a.flatten(1).double())
            add(exact.get_submodule(name), product, trial.notes.get("merged", False))
    return adapted.eval(), exact


def noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(tensor.dtype)


def add(module: Any, product: torch.Tensor, merged: bool) -> None:
    """LoRA's product to a weight, beside a standardised kernel, or to what is standardised once it is merged."""
    product = product.view_as(module.weight)
    if isinstance(module, StdConv2d) and not merged:
        standardised = module.standardized()
        module.standardized = lambda: standardised + product
    else:
        module.weight.add_(product)


@idiom("adapters: LoRA", changes=True, dtypes=ADAPTED, takes=has_linears)
def adapted(trial: Trial) -> Pair:
    return of(trial, *lora(trial, nn.Linear))


@idiom("adapters: LoRA, merged", changes=True, dtypes=PLAIN, takes=has_linears)
def merged(trial: Trial) -> Pair:
    trial.notes["merged"] = True
    model, exact = lora(trial, nn.Linear)
    return of(trial, model.merge_and_unload(), exact)


@idiom("adapters: LoRA, merged and unmerged", changes=True, dtypes=EXACT, takes=has_linears)
def unmerged(trial: Trial) -> Pair:
    model, exact = lora(trial, nn.Linear)
    model.merge_adapter()
    with torch.no_grad():
        trial.answer(model)
    model.unmerge_adapter()
    return of(trial, model, exact)


@idiom("adapters: LoRA, switched off", dtypes=ADAPTED, takes=has_linears)
def switched_off(trial: Trial) -> Pair:
    model, _ = lora(trial, nn.Linear)
    with model.disable_adapter():
        return of(trial, model, trial.exact(OLD))


@idiom("adapters: LoRA, unloaded", dtypes=ADAPTED, takes=has_linears)
def unloaded(trial: Trial) -> Pair:
    model, _ = lora(trial, nn.Linear)
    return of(trial, model.unload(), trial.exact(OLD))


@idiom("adapters: LoRA on convolutions", changes=True, dtypes=PLAIN)
def adapted_convolutions(trial: Trial) -> Pair:
    return of(trial, *lora(trial, nn.Conv2d))


@idiom("adapters: LoRA on convolutions, merged", changes=True, dtypes=EXACT)
def merged_convolutions(trial: Trial) -> Pair:
    trial.notes["merged"] = True
    model, exact = lora(trial, nn.Conv2d)
    return of(trial, model.merge_and_unload(), exact)


@idiom("adapters: transformers' add_adapter", changes=True, dtypes=EXACT, takes=has_linears)
def added(trial: Trial) -> Pair:
    """transformers' own door to peft, which puts no PeftModel around it."""
    from peft import LoraConfig

    model, exact = trial.start(), trial.exact(OLD)
    names = [name for name, module in exact.named_modules() if isinstance(module, nn.Linear)]
    model.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=names))
    with torch.no_grad():
        for index, name in enumerate(names):
            layer = model.get_submodule(name)
            a, b = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
            a.copy_(LORA * noise(a, 2 * index))
            b.copy_(LORA * noise(b, 2 * index + 1))
            add(exact.get_submodule(name), 3 * b.double() @ a.double(), True)
    return of(trial, model.eval(), exact)
