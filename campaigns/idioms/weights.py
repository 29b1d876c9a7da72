"""Idioms that give a model other weights: in place, by name, by averaging, for one call."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from models.families import OTHERS
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from campaigns.idioms.trial import EXACT, NEW, OLD, PLAIN, Pair, Tensors, Trial, idiom, inner, named_tensors, tensors_of

Changed = tuple[nn.Module, nn.Module]  # a model, and a fresh one that answers alike


@torch.no_grad()
def answers(trial: Trial, model: Any, exact: nn.Module) -> Pair:
    model = trial.done(model)
    return trial.answer(model), trial.wanted(exact)


def enter(name: str, change: Callable[[Trial, Any], Any], weights: int = NEW, **settings: Any) -> None:
    """Enter an idiom: `change` a model in place, or return another; it answers as a fresh one of `weights`.

    Or return a model, and a fresh one in float64 that answers alike.
    """

    @idiom(name, changes=weights == NEW, **settings)
    def attempt(trial: Trial) -> Pair:
        model = trial.start()
        match change(trial, model):
            case nn.Module() as changed, nn.Module() as exact:
                return answers(trial, changed, exact)
            case nn.Module() as changed:
                return answers(trial, changed, trial.exact(weights))
        return answers(trial, model, trial.exact(weights))


def pairs(model: nn.Module, source: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what users loop over: the model's parameters with those of the same names, and statistics."""
    theirs = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        yield parameter, theirs[name]
    for name, buffer in source.named_buffers():
        yield model.get_buffer(name), buffer


def each_pair(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[Trial, Any], None]:
    def change(trial: Trial, model: Any) -> None:
        for tensor, other in pairs(model, trial.source()):
            write(tensor, other)

    return change


def write_by_numpy(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.detach().numpy()[...] = other.detach().numpy()


def is_vit(subject: Any) -> bool:
    return subject.family not in OTHERS


def replaced(trial: Trial, model: Any) -> None:
    for name, module in trial.source().named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            setattr(model.get_submodule(name), own, nn.Parameter(parameter.detach().clone()))
        for own, buffer in module.named_buffers(recurse=False):
            model.get_submodule(name).register_buffer(own, buffer.clone())


def load_state(trial: Trial, model: Any, **options: bool) -> None:
    model.load_state_dict(trial.source().state_dict(), **options)


def from_a_vector(trial: Trial, model: Any) -> None:
    vector_to_parameters(parameters_to_vector(trial.source().parameters()).detach(), model.parameters())


def stepped(trial: Trial, model: Any) -> None:
    """One step of SGD that leads from the old weights to the new ones."""
    source = dict(trial.source().named_parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = (parameter - source[name]).detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


enter("nothing", lambda trial, model: None, OLD)
enter("weights: copy_", each_pair(torch.no_grad()(lambda tensor, other: tensor.copy_(other))), dtypes=PLAIN)
enter("weights: .data.copy_", each_pair(lambda tensor, other: tensor.data.copy_(other)), dtypes=PLAIN)
enter("weights: .data = ...", each_pair(lambda tensor, other: setattr(tensor, "data", other.data)), dtypes=PLAIN)
enter("weights: numpy view", each_pair(write_by_numpy), dtypes=EXACT)
enter("weights: load_state_dict", load_state)
enter("weights: load_state_dict(assign=True)", partial(load_state, assign=True))
enter("weights: parameters replaced", replaced, dtypes=PLAIN)
enter("weights: vector_to_parameters", from_a_vector, dtypes=PLAIN, takes=is_vit)
enter("weights: optimiser step", stepped, dtypes=PLAIN, takes=is_vit)


def averaged(trial: Trial) -> tuple[AveragedModel, nn.Module]:
    """Return the mean of old and new weights by torch's class, and by hand in float64."""
    average = AveragedModel(trial.source(OLD), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(average.module)
    average.update_parameters(trial.source(NEW))
    old, new = trial.exact(OLD), named_tensors(trial.exact(NEW))
    with torch.no_grad():
        for name, tensor in named_tensors(old).items():
            tensor.copy_(((tensor + new[name]) / 2).to(trial.subject.torch_dtype).double())
    return average, old


def swapped(trial: Trial, model: Any) -> Changed:
    average, mean = averaged(trial)
    swap(model, average.module)
    return model, mean


def swapped_back(trial: Trial, model: Any) -> None:
    average, _ = averaged(trial)
    swap(model, average.module)
    with torch.no_grad():
        trial.answer(model)
    swap(model, average.module)


def swap(model: nn.Module, other: nn.Module) -> None:
    """As evaluation with averaged weights does it: side by side, through `.data`."""
    for tensor, mean in pairs(model, other):
        kept = tensor.data.clone()
        tensor.data.copy_(mean.data)
        mean.data.copy_(kept)


def average_of_it(trial: Trial, model: Any) -> nn.Module:
    """It copies the model it is given, and answers by its own weights."""
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(trial.source(NEW))
    return average.module


enter("weights: EMA swapped in", swapped, dtypes=PLAIN)
enter("weights: EMA swapped in and back", swapped_back, OLD, dtypes=PLAIN)
enter("weights: AveragedModel of the model", average_of_it, dtypes=PLAIN)


@idiom("weights: functional_call", changes=True, dtypes=(*PLAIN, "int8-torchao"))
def called_with(trial: Trial) -> Pair:
    model, weights = trial.done(trial.start()), named_tensors(trial.source())
    with torch.no_grad():
        outputs = functional_call(model, weights, (trial.images(),), trial.options())
        return trial.answer(lambda *_, **__: outputs), trial.wanted(trial.exact(NEW))


@idiom("weights: stack_module_state and vmap", changes=True, dtypes=PLAIN)
def stacked(trial: Trial) -> Pair:
    """The second of two models that run as one."""
    model, images = trial.start(), trial.images()
    parameters, buffers = stack_module_state([trial.source(OLD), trial.source(NEW)])
    model = trial.done(model)

    def run(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Tensors:
        return tensors_of(functional_call(model, {**parameters, **buffers}, (images,), trial.options()))

    with torch.no_grad():
        return [both[1] for both in vmap(run)(parameters, buffers)], trial.wanted(trial.exact(NEW))


def souped(trial: Trial, model: Any) -> Changed:
    """A soup of two models, written over a state dict's own tensors."""
    source, (_, mean) = trial.source().state_dict(), averaged(trial)
    for name, tensor in model.state_dict().items():
        tensor.copy_(((tensor.double() + source[name].double()) / 2).to(tensor.dtype))
    return model, mean


def part_replaced(trial: Trial, model: Any) -> Changed:
    """And hidden states, where the head reads them."""
    source, exact, other = trial.source(), trial.exact(OLD), trial.exact(NEW)
    name = inner(exact).rsplit(".", 2)[0]
    model.set_submodule(name, source.get_submodule(name))
    exact.set_submodule(name, other.get_submodule(name))
    return model, exact


def pruned(trial: Trial, model: Any, for_good: bool = False) -> Changed:
    exact = trial.exact(OLD)
    torch.manual_seed(0)
    module = prune.random_unstructured(model.get_submodule(inner(exact)), "weight", 0.5)
    mask = module.weight_mask.clone()
    if for_good:
        prune.remove(module, "weight")
    with torch.no_grad():
        exact.get_submodule(inner(exact)).weight.mul_(mask)
    return model, exact


enter("weights: after an averaging in float32", souped, dtypes=PLAIN)
enter("weights: a block of another model", part_replaced)
enter("weights: pruned", pruned, dtypes=PLAIN)
enter("weights: pruned for good", partial(pruned, for_good=True), dtypes=PLAIN)


def deepcopied(trial: Trial, model: Any, copy_changes: bool) -> nn.Module:
    other = copy.deepcopy(model)
    load_state(trial, other if copy_changes else model)
    return other


enter("copies: deepcopy, then the original changes", partial(deepcopied, copy_changes=False), OLD)
enter("copies: deepcopy, then the copy changes", partial(deepcopied, copy_changes=True))
