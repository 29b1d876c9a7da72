"""Idioms that give a model other weights: in place, by name, by averaging, for one call."""

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from campaigns.idioms.table import PLAIN, idiom
from campaigns.idioms.trial import NEW, OLD, Tensors, Trial, inner, named_tensors, tensors_of

Pair = tuple[Tensors, Tensors]


def after(trial: Trial, model: nn.Module, weights: int = NEW) -> Pair:
    """The answer of a changed model, and that of a fresh one with these weights."""
    model = trial.done(model)
    with torch.no_grad():
        return trial.answer(model), trial.wanted(trial.exact(weights))


def pairs(model: nn.Module, source: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What users loop over: the model's parameters with those of the same names, and statistics."""
    theirs = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        yield parameter, theirs[name]
    for name, buffer in source.named_buffers():
        yield model.get_buffer(name), buffer


@idiom("nothing")
def nothing(trial: Trial) -> Pair:
    return after(trial, trial.start(), OLD)


@idiom("weights: copy_", changes=True, dtypes=PLAIN)
def copied(trial: Trial) -> Pair:
    model = trial.start()
    with torch.no_grad():
        for tensor, other in pairs(model, trial.source()):
            tensor.copy_(other)
    return after(trial, model)


@idiom("weights: .data.copy_", changes=True, dtypes=PLAIN)
def copied_through_data(trial: Trial) -> Pair:
    model = trial.start()
    for tensor, other in pairs(model, trial.source()):
        tensor.data.copy_(other)
    return after(trial, model)


@idiom("weights: .data = ...", changes=True, dtypes=PLAIN)
def data_replaced(trial: Trial) -> Pair:
    model = trial.start()
    for tensor, other in pairs(model, trial.source()):
        tensor.data = other.data
    return after(trial, model)


@idiom("weights: numpy view", changes=True, dtypes=("float64", "float32"))
def written_through_numpy(trial: Trial) -> Pair:
    model = trial.start()
    for tensor, other in pairs(model, trial.source()):
        tensor.detach().numpy()[...] = other.detach().numpy()
    return after(trial, model)


@idiom("weights: load_state_dict", changes=True)
def loaded(trial: Trial) -> Pair:
    model = trial.start()
    model.load_state_dict(trial.source().state_dict())
    return after(trial, model)


@idiom("weights: load_state_dict(assign=True)", changes=True)
def assigned(trial: Trial) -> Pair:
    model = trial.start()
    model.load_state_dict(trial.source().state_dict(), assign=True)
    return after(trial, model)


@idiom("weights: parameters replaced", changes=True, dtypes=PLAIN)
def replaced(trial: Trial) -> Pair:
    model, source = trial.start(), trial.source()
    for name, module in source.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            setattr(model.get_submodule(name), own, nn.Parameter(parameter.detach().clone()))
        for own, buffer in module.named_buffers(recurse=False):
            model.get_submodule(name).register_buffer(own, buffer.clone())
    return after(trial, model)


@idiom("weights: vector_to_parameters", changes=True, dtypes=PLAIN, takes=lambda subject: subject.is_vit)
def from_a_vector(trial: Trial) -> Pair:
    model = trial.start()
    vector_to_parameters(parameters_to_vector(trial.source().parameters()).detach(), model.parameters())
    return after(trial, model)


@idiom("weights: optimiser step", changes=True, dtypes=PLAIN, takes=lambda subject: subject.is_vit)
def stepped(trial: Trial) -> Pair:
    """One step of SGD that leads from the old weights to the new ones."""
    model, source = trial.start(), dict(trial.source().named_parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = (parameter - source[name]).detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return after(trial, model)


def averaged(trial: Trial) -> tuple[AveragedModel, nn.Module]:
    """The mean of old and new weights by torch's class, and by hand in float64."""
    average = AveragedModel(trial.source(OLD), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(average.module)
    average.update_parameters(trial.source(NEW))
    old, new = trial.exact(OLD), named_tensors(trial.exact(NEW))
    with torch.no_grad():
        for name, tensor in named_tensors(old).items():
            tensor.copy_(((tensor + new[name]) / 2).to(trial.subject.torch_dtype).double())
    return average, old


@idiom("weights: EMA swapped in", changes=True, dtypes=PLAIN)
def swapped(trial: Trial) -> Pair:
    model, (average, mean) = trial.start(), averaged(trial)
    swap(model, average.module)
    model = trial.done(model)
    with torch.no_grad():
        return trial.answer(model), trial.wanted(mean)


@idiom("weights: EMA swapped in and back", dtypes=PLAIN)
def swapped_back(trial: Trial) -> Pair:
    model, (average, _) = trial.start(), averaged(trial)
    swap(model, average.module)
    with torch.no_grad():
        trial.answer(model)
    swap(model, average.module)
    return after(trial, model, OLD)


def swap(model: nn.Module, other: nn.Module) -> None:
    """As evaluation with averaged weights does it: side by side, through `.data`."""
    for tensor, averaged in pairs(model, other):
        kept = tensor.data.clone()
        tensor.data.copy_(averaged.data)
        averaged.data.copy_(kept)


@idiom("weights: AveragedModel of the model", changes=True, dtypes=PLAIN)
def average_of_it(trial: Trial) -> Pair:
    """It copies the model it is given, and answers by its own weights."""
    average = AveragedModel(trial.start(), use_buffers=True)
    average.update_parameters(trial.source(NEW))
    return after(trial, average.module)


@idiom("weights: functional_call", changes=True, dtypes=(*PLAIN, "int8-torchao"))
def called_with(trial: Trial) -> Pair:
    model, weights = trial.done(trial.start()), named_tensors(trial.source())
    with torch.no_grad():
        outputs = functional_call(model, weights, (trial.images(),), trial.options())
        return trial.answer(lambda *_, **__: outputs), trial.wanted(trial.exact(NEW))


@idiom("weights: stack_module_state and vmap", changes=True, dtypes=PLAIN)
def stacked(trial: Trial) -> Pair:
    """The second of two models that run as one."""
    model = trial.start()
    parameters, buffers = stack_module_state([trial.source(OLD), trial.source(NEW)])
    model = trial.done(model)

    images = trial.images()

    def run(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Tensors:
        return tensors_of(functional_call(model, {**parameters, **buffers}, (images,), trial.options()))

    with torch.no_grad():
        return [both[1] for both in vmap(run)(parameters, buffers)], trial.wanted(trial.exact(NEW))


@idiom("weights: after an averaging in float32", changes=True, dtypes=PLAIN)
def souped(trial: Trial) -> Pair:
    """A soup of two models by lerp_ on a state dict's own tensors."""
    model = trial.start()
    source, (_, mean) = trial.source().state_dict(), averaged(trial)
    for name, tensor in model.state_dict().items():
        tensor.copy_(((tensor.double() + source[name].double()) / 2).to(tensor.dtype))
    model = trial.done(model)
    with torch.no_grad():
        return trial.answer(model), trial.wanted(mean)


@idiom("weights: a block of another model", changes=True)
def part_replaced(trial: Trial) -> Pair:
    """And hidden states, where the head reads them."""
    model, source, exact, other = trial.start(), trial.source(), trial.exact(OLD), trial.exact(NEW)
    name = inner(exact).rsplit(".", 2)[0]
    model.set_submodule(name, source.get_submodule(name))
    exact.set_submodule(name, other.get_submodule(name))
    model = trial.done(model)
    with torch.no_grad():
        return trial.answer(model), trial.wanted(exact)


@idiom("weights: pruned", changes=True, dtypes=PLAIN)
def pruned(trial: Trial) -> Pair:
    model = trial.start()
    torch.manual_seed(0)
    module = prune.random_unstructured(model.get_submodule(inner(trial.exact(OLD))), "weight", 0.5)
    return with_mask(trial, model, module.weight_mask)


@idiom("weights: pruned for good", changes=True, dtypes=PLAIN)
def pruned_for_good(trial: Trial) -> Pair:
    model = trial.start()
    torch.manual_seed(0)
    module = prune.random_unstructured(model.get_submodule(inner(trial.exact(OLD))), "weight", 0.5)
    mask = module.weight_mask.clone()
    prune.remove(module, "weight")
    return with_mask(trial, model, mask)


@torch.no_grad()
def with_mask(trial: Trial, model: nn.Module, mask: torch.Tensor) -> Pair:
    exact = trial.exact(OLD)
    exact.get_submodule(inner(exact)).weight.mul_(mask)
    model = trial.done(model)
    return trial.answer(model), trial.wanted(exact)


@idiom("copies: deepcopy, then the original changes")
def deepcopied(trial: Trial) -> Pair:
    model = trial.start()
    other = copy.deepcopy(model)
    model.load_state_dict(trial.source().state_dict())
    return after(trial, other, OLD)


@idiom("copies: deepcopy, then the copy changes", changes=True)
def copy_changed(trial: Trial) -> Pair:
    other = copy.deepcopy(trial.start())
    other.load_state_dict(trial.source().state_dict())
    return after(trial, other)
