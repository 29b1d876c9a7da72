"""Idioms that change what a part computes: hooks, parametrisations, adapters, other parts in its place."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers.modeling_utils import PreTrainedModel

from campaigns.idioms.trial import EXACT, FLOAT32, OLD, PLAIN, Pair, Subject, Tensors, Trial, distance, idiom, inner
from campaigns.idioms.weights import Changed, answers, enter
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
        first(outputs, self.seen.append)
        return first(outputs, bent) if self.side == "output" else outputs


def hookable(model: nn.Module) -> list[str]:
    """One module of every role (of each layer the same), that a pass calls; models are wholes, not parts."""
    roles: dict[str, str] = {}
    called: set[nn.Module] = set()
    handles = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in model.modules()]
    size = model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    with torch.no_grad():
        model(torch.zeros(1, model.config.num_channels, height, width).to(next(model.parameters()).dtype))
    for handle in handles:
        handle.remove()
    for name, module in model.named_modules():
        if module in called and not isinstance(module, PreTrainedModel):
            roles.setdefault("".join("0" if part.isdigit() else part for part in name.split(".")), name)
    last = [name for name in (n for n, m in model.named_modules() if m in called) if name.endswith("layers.1")]
    return [*roles.values(), *last]


def at_every_part(attempt: Callable[[Trial, str], Pair], trial: Trial) -> Pair:
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


def hooked(side: str, trial: Trial, name: str) -> Pair:
    """A hook that changes an input or an output, or reads what comes out."""
    model, exact, seen = trial.start(), trial.exact(OLD), list[torch.Tensor]()
    module, watched = model.get_submodule(name), Watched(exact.get_submodule(name), side)
    if side == "input":
        module.register_forward_pre_hook(lambda module, args: first(args, bent))
    elif side == "output":
        module.register_forward_hook(lambda module, args, output: first(output, bent))
    else:
        module.register_forward_hook(lambda module, args, output: (first(output, seen.append), None)[1])
    exact.set_submodule(name, watched)
    model = trial.done(model)
    with torch.no_grad():
        pair = trial.answer(model), trial.answer(exact, trial.images().double())
    return (seen, watched.seen) if side == "nothing" else pair


for name, side in {"output changed": "output", "input changed": "input", "output read": "nothing"}.items():
    attempt = functools.partial(at_every_part, functools.partial(hooked, side))
    idiom(f"hooks: {name}", slow=True, dtypes=FLOAT32)(attempt)


def accelerate_hooks(trial: Trial, model: Any) -> Changed:
    """A forward that was replaced on one object."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Bending(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return first(output, bent)

    exact = trial.exact(OLD)
    add_hook_to_module(model.get_submodule(inner(exact)), Bending())
    exact.set_submodule(inner(exact), Watched(exact.get_submodule(inner(exact)), "output"))
    return model, exact


enter("hooks: accelerate's", accelerate_hooks, OLD, dtypes=EXACT)


class Shifted(nn.Module):
    """A parametrisation that adds fixed noise."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.noise = noise_like(weight)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.noise.to(weight.dtype)


def noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(tensor.dtype)


def noise_like(tensor: torch.Tensor) -> torch.Tensor:
    return noise(tensor, 7) * (0.3 * tensor.detach().double().std()).to(tensor.dtype)


def parametrised(trial: Trial, model: Any, for_good: bool = False) -> Changed:
    """Every weight gets the same noise, by the change and by hand."""
    exact, plain = trial.exact(OLD), trial.source(OLD)
    for name, layer in plain.named_modules():
        if not isinstance(getattr(layer, "weight", None), nn.Parameter):
            continue
        module = model.get_submodule(name)
        parametrize.register_parametrization(module, "weight", Shifted(module.weight))
        if for_good:
            parametrize.remove_parametrizations(module, "weight")
        with torch.no_grad():
            exact.get_submodule(name).weight.copy_((layer.weight + noise_like(layer.weight)).double())
    return model, exact


def weight_normed(trial: Trial, model: Any) -> Changed:
    """Its magnitudes changed, one an input channel, on every product and convolution."""
    exact = trial.exact(OLD)
    for name in (name for name, layer in exact.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)):
        module = parametrizations.weight_norm(model.get_submodule(name), dim=1)
        magnitude = module.parametrizations.weight.original0
        factor = 1.1 + 0.2 * torch.linspace(0, 1, magnitude.numel(), dtype=torch.float64).view_as(magnitude)
        with torch.no_grad():
            magnitude.mul_(factor.to(magnitude.dtype))
            exact.get_submodule(name).weight.mul_(factor)
    return model, exact


enter("parametrised: added noise", parametrised, dtypes=PLAIN)
enter("parametrised: and taken off", functools.partial(parametrised, for_good=True), dtypes=PLAIN)
enter("parametrised: weight_norm", weight_normed, dtypes=EXACT)


def has_linears(subject: Subject) -> bool:
    return subject.head == "classification" or subject.family != "bit"


LORA = 0.2  # standard deviation of LoRA's matrices
ADAPTED = (*PLAIN, "int8-torchao")


def lora(trial: Trial, model: Any, kinds: Any = nn.Linear, is_merged: bool = False, is_added: bool = False) -> Any:
    """A model with random LoRA on all layers of some kinds, and a fresh one whose weights hold its products.

    Args:
        is_merged: the products are added to what is standardised, no longer beside a standardised kernel.
        is_added: by transformers' own door to peft, which puts no PeftModel around the model.
    """
    from peft import LoraConfig, get_peft_model

    exact = trial.exact(OLD)
    names = [name for name, module in exact.named_modules() if isinstance(module, kinds)]
    config = LoraConfig(r=2, lora_alpha=6, target_modules=names)
    adapted = model
    if is_added:
        model.add_adapter(config)
    else:
        adapted = get_peft_model(model, config)
    with torch.no_grad():
        for index, name in enumerate(names):
            layer = (model if is_added else adapted.base_model.model).get_submodule(name)
            a, b = (getattr(layer, f"lora_{part}")["default"].weight for part in "AB")
            a.copy_(LORA * noise(a, 2 * index))
            b.copy_(LORA * noise(b, 2 * index + 1))
            product = 3 * torch.einsum("or,ri->oi", b.flatten(1).double(), a.flatten(1).double())
            add(exact.get_submodule(name), product, is_merged)
    return adapted.eval(), exact


def add(module: Any, product: torch.Tensor, is_merged: bool) -> None:
    product = product.view_as(module.weight)
    if isinstance(module, StdConv2d) and not is_merged:
        standardised = module.standardized()
        module.standardized = lambda: standardised + product
    else:
        module.weight.add_(product)


def merged(trial: Trial, model: Any, kinds: Any = nn.Linear) -> Changed:
    model, exact = lora(trial, model, kinds, is_merged=True)
    return model.merge_and_unload(), exact


def unmerged(trial: Trial, model: Any) -> Changed:
    model, exact = lora(trial, model)
    model.merge_adapter()
    with torch.no_grad():
        trial.answer(model)
    model.unmerge_adapter()
    return model, exact


enter("adapters: LoRA", lora, dtypes=ADAPTED, takes=has_linears)
enter("adapters: LoRA, merged", merged, dtypes=PLAIN, takes=has_linears)
enter("adapters: LoRA, merged and unmerged", unmerged, dtypes=EXACT, takes=has_linears)


@idiom("adapters: LoRA, switched off", dtypes=ADAPTED, takes=has_linears)
def switched_off(trial: Trial) -> Pair:
    model, _ = lora(trial, trial.start())
    with model.disable_adapter():
        return answers(trial, model, trial.exact(OLD))


def unloaded(trial: Trial, model: Any) -> nn.Module:
    return lora(trial, model)[0].unload()


on_convolutions = functools.partial(lora, kinds=nn.Conv2d)
enter("adapters: LoRA, unloaded", unloaded, OLD, dtypes=ADAPTED, takes=has_linears)
enter("adapters: LoRA on convolutions", on_convolutions, dtypes=PLAIN)
enter("adapters: LoRA on convolutions, merged", functools.partial(merged, kinds=nn.Conv2d), dtypes=EXACT)
added = functools.partial(lora, is_merged=True, is_added=True)
enter("adapters: transformers' add_adapter", added, dtypes=EXACT, takes=has_linears)
