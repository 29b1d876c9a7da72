"""Idioms that make a graph of a model: compiled, traced, exported, to ONNX; and weights that change afterwards."""

import copy
import io
from typing import Any

import torch
from torch import nn

from campaigns.idioms.table import FLOAT32, idiom
from campaigns.idioms.trial import NEW, OLD, Tensors, Trial
from campaigns.idioms.weights import Pair, after


class Answer(nn.Module):
    """A model that gives tensors alone, as graphs of old want it."""

    def __init__(self, trial: Trial, model: nn.Module) -> None:
        super().__init__()
        self.model, self.trial = model, trial

    def forward(self, images: torch.Tensor) -> Any:
        return tuple(self.trial.answer(self.model, images))


def outputs_of(given: Any) -> Tensors:
    return [given] if isinstance(given, torch.Tensor) else list(given)


@idiom("graphs: torch.compile", slow=True, dtypes=FLOAT32)
def compiled(trial: Trial) -> Pair:
    torch._dynamo.reset()
    model = torch.compile(trial.start(), backend="aot_eager", dynamic=False)
    return after(trial, model, OLD)


@idiom("graphs: torch.compile by inductor", slow=True, dtypes=FLOAT32)
def compiled_by_inductor(trial: Trial) -> Pair:
    torch._dynamo.reset()
    model = torch.compile(trial.start(), dynamic=False)
    return after(trial, model, OLD)


@idiom("graphs: torch.compile, then other weights", slow=True, changes=True, dtypes=FLOAT32)
def compiled_and_changed(trial: Trial) -> Pair:
    torch._dynamo.reset()
    inside = trial.start()
    model = torch.compile(inside, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        trial.answer(model)
    source = dict(trial.source().state_dict())
    for name, tensor in inside.state_dict().items():
        tensor.data.copy_(source[name])
    return after(trial, model)


@idiom("graphs: model.compile()", slow=True, dtypes=FLOAT32)
def compiled_in_place(trial: Trial) -> Pair:
    torch._dynamo.reset()
    model = trial.start()
    model.compile(backend="aot_eager", dynamic=False)
    return after(trial, model, OLD)


@idiom("graphs: torch.jit.trace", slow=True, dtypes=FLOAT32)
@torch.no_grad()
def traced(trial: Trial) -> Pair:
    model = trial.done(trial.start())
    traced = torch.jit.trace(Answer(trial, model), trial.images(), check_trace=False)
    return outputs_of(traced(trial.images())), trial.wanted(trial.exact(OLD))


@idiom("graphs: torch.jit.trace, then other weights", slow=True, changes=True, dtypes=FLOAT32)
@torch.no_grad()
def traced_and_changed(trial: Trial) -> Pair:
    model = trial.done(trial.start())
    traced = torch.jit.trace(Answer(trial, model), trial.images(), check_trace=False)
    model.load_state_dict(trial.source().state_dict())
    return outputs_of(traced(trial.images())), trial.wanted(trial.exact(NEW))


@idiom("graphs: torch.jit.freeze", slow=True, dtypes=FLOAT32)
@torch.no_grad()
def traced_and_frozen(trial: Trial) -> Pair:
    model = trial.done(trial.start())
    traced = torch.jit.freeze(torch.jit.trace(Answer(trial, model), trial.images(), check_trace=False).eval())
    return outputs_of(traced(trial.images())), trial.wanted(trial.exact(OLD))


@idiom("graphs: torch.export", slow=True, dtypes=FLOAT32)
@torch.no_grad()
def exported(trial: Trial) -> Pair:
    model = trial.done(trial.start())
    program = torch.export.export(Answer(trial, model), (trial.images(),))
    return outputs_of(program.module()(trial.images())), trial.wanted(trial.exact(OLD))


@idiom("graphs: torch.export, then other weights", slow=True, changes=True, dtypes=FLOAT32)
@torch.no_grad()
def exported_and_changed(trial: Trial) -> Pair:
    model = trial.done(trial.start())
    module = torch.export.export(Answer(trial, model), (trial.images(),)).module()
    module.load_state_dict(Answer(trial, trial.source()).state_dict())
    return outputs_of(module(trial.images())), trial.wanted(trial.exact(NEW))


@idiom("graphs: of a copy that changes later", slow=True, dtypes=FLOAT32)
@torch.no_grad()
def exported_then_original_changes(trial: Trial) -> Pair:
    """What was exported from a deep copy stays."""
    model = trial.done(trial.start())
    module = torch.export.export(Answer(trial, copy.deepcopy(model)), (trial.images(),)).module()
    model.load_state_dict(trial.source().state_dict())
    return outputs_of(module(trial.images())), trial.wanted(trial.exact(OLD))


@idiom("graphs: ONNX", slow=True, dtypes=FLOAT32)
@torch.no_grad()
def onnx(trial: Trial) -> Pair:
    import onnxruntime

    model, file = trial.done(trial.start()), io.BytesIO()
    torch.onnx.export(Answer(trial, model), (trial.images(),), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    given = session.run(None, {name: trial.images().numpy()})
    return [torch.from_numpy(each) for each in given], trial.wanted(trial.exact(OLD))
