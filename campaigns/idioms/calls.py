"""Idioms of calling: images, masks, modes, threads, devices, precision, copies on the way, and graphs of a model."""

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from models.families import HEADS, checkpoint_activations, pad
from torch import nn

from campaigns.idioms.trial import EXACT, FLOAT32, NEW, OLD, PLAIN, Pair, Tensors, Trial, idiom, tensors_of
from campaigns.idioms.weights import Changed, enter, is_vit
from hf_vit.errors import UserError


def wide(trial: Trial) -> torch.Tensor:
    """Every second pixel of a larger image."""
    images = trial.images()
    larger = torch.zeros(*images.shape[:2], 2 * images.shape[2], 3 * images.shape[3], dtype=images.dtype)
    larger[:, :, ::2, 1::3] = images
    return larger[:, :, ::2, 1::3]


def transposed(trial: Trial) -> torch.Tensor:
    """Mirrored axes of a transposed one."""
    return trial.images().permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)


# More than anything keeps, and the first again.
GRIDS = [*((h, w) for h in (2, 3, 4, 5) for w in (2, 3, 5, 6, 7)), (2, 2), (3, 2)]
# Idiom -> the images that a model of the old weights is asked for, one batch after the other.
IMAGES: dict[str, Callable[[Trial], Tensors]] = {
    "sizes: nominal": lambda trial: [trial.images(None)],
    "sizes: larger": lambda trial: [trial.images((7, 7))],
    "sizes: smaller": lambda trial: [trial.images((2, 2))],
    "sizes: rectangular": lambda trial: [trial.images((2, 6))],
    "sizes: many, one after the other": lambda trial: [trial.images(grid, batch=1) for grid in GRIDS],
    "batches: 1, 17": lambda trial: [trial.images(batch=batch) for batch in (1, 17)],
    "images: channels_last": lambda trial: [trial.images().contiguous(memory_format=torch.channels_last)],
    "images: not contiguous": lambda trial: [wide(trial), transposed(trial)],
    "images: expanded from one": lambda trial: [trial.images(batch=1).expand(4, -1, -1, -1)],
    # The model's dtype rounds them, as transformers' ViT does; float64 loses nothing of the dtypes here.
    "images: of another dtype": lambda trial: [trial.images().double()],
}


def asking(images_of: Callable[[Trial], Tensors]) -> Callable[[Trial], Pair]:
    @torch.no_grad()
    def attempt(trial: Trial) -> Pair:
        model, exact, images = trial.done(trial.start()), trial.exact(OLD), images_of(trial)
        given = [tensor for each in images for tensor in trial.answer(model, each)]
        return given, [tensor for each in images for tensor in trial.wanted(exact, each)]

    return attempt


for name, images_of in IMAGES.items():
    idiom(name)(asking(images_of))
enter("model: channels_last", lambda trial, model: model.to(memory_format=torch.channels_last), OLD)


@idiom("masks: padded batch", takes=lambda subject: subject.choice != "no_labels")
def padded(trial: Trial) -> Pair:
    """Every image of a padded batch gets what it gets on its own; a model without such masks refuses."""
    subject, config = trial.subject, trial.subject.config
    grids = [(2, 3), (4, 2), (4, 4)]
    singles = [subject.row.images(config, 1, grid).double() for grid in grids]
    images, mask = pad(config, singles, grids, (4, 4))
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    with torch.no_grad():
        outputs = trial.answer(model, images.to(subject.torch_dtype), patch_attention_mask=mask)
        each = [trial.answer(exact, single.to(subject.torch_dtype).double()) for single in singles]
    return own_parts(trial, outputs, each, grids), [tensor for tensors in each for tensor in tensors]


def own_parts(trial: Trial, outputs: Tensors, each: list[Tensors], grids: list[Any]) -> Tensors:
    """Return every image's part: of maps and tokens those places that are its own."""
    parts: Tensors = []
    config = trial.subject.config
    causal = getattr(config, "is_causal", False)
    for index, (h, w) in enumerate(grids):
        for tensor, single in zip(outputs, each[index], strict=True):
            part = tensor[index : index + 1]
            if part.ndim == 4:
                part = part[:, :, : single.shape[2], : single.shape[3]]
            elif part.ndim == 3 and part.shape != single.shape:
                extra = part.shape[1] - 16
                first, last = (part[:, :16], part[:, 16:]) if causal else (part[:, extra:], part[:, :extra])
                patches = first.unflatten(1, (4, 4))[:, :h, :w].flatten(1, 2)
                part = torch.cat([patches, last] if causal else [last, patches], dim=1)
                assert extra in (0, getattr(config, "num_special_tokens", 1))
            parts.append(part)
    return parts


@idiom("masks: corrupted patches", takes=lambda subject: subject.head == "masked_prediction")
def corrupted(trial: Trial) -> Pair:
    images = trial.images(None)
    inputs = {"bool_masked_pos": torch.arange(2 * 16).view(2, 16) % 2 == 0}
    if trial.subject.is_ours:
        inputs = HEADS["masked_prediction"].labels(trial.subject.config, images)
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    with torch.no_grad():
        return trial.answer(model, images, **inputs), trial.answer(exact, images.double(), **inputs)


@idiom("outputs: as a tuple, hidden states")
def recorded(trial: Trial) -> Pair:
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    outputs: list[Tensors] = []
    with torch.no_grad():
        for each, images in ((model, trial.images()), (exact, trial.images().double())):
            states = each(images, **{**trial.options(), "output_hidden_states": True}).hidden_states
            outputs.append([*states, *as_tuple(trial, each, images)])
    return outputs[0], outputs[1]


def as_tuple(trial: Trial, model: Any, images: torch.Tensor) -> Tensors:
    """Without the colours that masked prediction picks by its logits: a rounding of these picks others."""
    outputs = tensors_of(list(model(images, return_dict=False, **trial.options())))
    subject = trial.subject
    return outputs[subject.is_ours and subject.is_rough and subject.head == "masked_prediction" :]


@idiom("modes: no_grad, inference_mode, gradients")
def grad_modes(trial: Trial) -> Pair:
    model, given = trial.done(trial.start()), list[torch.Tensor]()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            given += [tensor.detach().clone() for tensor in trial.answer(model)]
    given += trial.answer(model.requires_grad_(False))
    return given, 4 * trial.wanted(trial.exact(OLD))


@idiom("modes: built and loaded in inference_mode", changes=True, dtypes=PLAIN)
def built_in_inference_mode(trial: Trial) -> Pair:
    with torch.inference_mode():
        model = trial.start()
        model.load_state_dict(trial.source().state_dict())
        model = trial.done(model)
        given = [tensor.clone() for tensor in trial.answer(model)]
    return given, trial.wanted(trial.exact(NEW))


enter("modes: train() and eval()", lambda trial, model: model.train().eval(), OLD)


def trained_and_back(trial: Trial, model: Any) -> Changed:
    """Batch norms have counted the pass; a fresh model gets what the model holds."""
    exact = trial.exact(OLD)
    sum(tensor.square().sum() for tensor in trial.answer(model.train()) if tensor.requires_grad).backward()
    model.eval()
    exact.load_state_dict({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    return model, exact


def norms_frozen(trial: Trial, model: Any) -> None:
    """Batch norms in evaluation while all else trains, as detectors are fine-tuned: the answer is evaluation's."""
    for module in model.train().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm) or not list(module.children()):
            module.eval()


enter("modes: a pass of training, then eval()", trained_and_back, OLD, dtypes=PLAIN)
enter("modes: norms frozen in training", norms_frozen, OLD, dtypes=EXACT)


@idiom("gradients: of all weights", dtypes=EXACT)
def gradients(trial: Trial) -> Pair:
    return gradients_of(trial, trial.done(trial.start()), trial.exact(OLD))


def gradients_of(trial: Trial, model: Any, exact: Any) -> Pair:
    backward(trial, model, exact)
    given, wanted = dict(model.named_parameters()), dict(exact.named_parameters())
    assert given.keys() == wanted.keys(), "parameters are missing"
    names = [name for name, parameter in wanted.items() if parameter.grad is not None]
    grads: Tensors = [torch.cat([each[name].grad.flatten() for name in names]) for each in (given, wanted)]
    return [grads[0]], [grads[1]]


def backward(trial: Trial, *models: Any, of_images: bool = False) -> list[torch.Tensor]:
    """Return the images that a model and the exact one have had a backward pass with."""
    images = [each.requires_grad_(of_images) for each in (trial.images(), trial.images().double())]
    for model, each in zip(models, images, strict=True):
        sum(tensor.square().mean() for tensor in trial.answer(model, each)).backward()
    return images


@idiom("gradients: with checkpointing", dtypes=EXACT, takes=is_vit)
def checkpointed(trial: Trial) -> Pair:
    model = trial.start().train()
    checkpoint_activations(model)
    return gradients_of(trial, trial.done(model), trial.exact(OLD).train())


@idiom("gradients: of the image", dtypes=EXACT)
def of_the_image(trial: Trial) -> Pair:
    given, wanted = backward(trial, trial.done(trial.start()), trial.exact(OLD), of_images=True)
    return [given.grad], [wanted.grad]


def there_and_back(trial: Trial, model: Any) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        trial.answer(model)
    model.set_attn_implementation("sdpa")


def other_attention(trial: Trial, model: Any) -> Changed:
    """It doubles what sdpa gives, which the fresh model does by its output projections."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def doubling(*args: Any, **kwargs: Any) -> Any:
        attended, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
        return 2 * attended, weights

    AttentionInterface.register("doubling_sdpa", doubling)
    exact = trial.exact(OLD)
    model.set_attn_implementation("doubling_sdpa")
    with torch.no_grad():
        for name, module in exact.named_modules():
            if name.endswith("attention.o_proj") and "map" not in name:
                module.weight.mul_(2)
    return model, exact


enter("attention: eager, set afterwards", lambda _, model: model.set_attn_implementation("eager"), OLD, takes=is_vit)
enter("attention: there and back", there_and_back, OLD, takes=is_vit)
enter("attention: a function of one's own", other_attention, takes=is_vit)


def cast_and_back(trial: Trial, model: Any, dtype: torch.dtype) -> Changed:
    """With a pass in the other dtype; the weights are rounded."""
    with torch.no_grad():
        trial.answer(model.to(dtype), trial.images().to(dtype))
    own = trial.subject.torch_dtype
    return model.to(own), trial.exact(OLD).to(dtype).to(own).double()


for name, dtype in {"bfloat16": torch.bfloat16, "half": torch.float16, "double": torch.float64}.items():
    dtypes = PLAIN if name == "double" else EXACT
    enter(f"precision: {name} and back", partial(cast_and_back, dtype=dtype), OLD, dtypes=dtypes)


@idiom("precision: autocast", dtypes=FLOAT32)
def autocast(trial: Trial) -> Pair:
    """In bfloat16, whose digits alone count here."""
    trial.notes["rough"] = True
    model = trial.done(trial.start())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given = trial.answer(model)
    return given, trial.wanted(trial.exact(OLD))


def after_autocast(trial: Trial, model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        trial.answer(model)


enter("precision: after autocast", after_autocast, OLD, dtypes=FLOAT32)


@idiom("precision: another default dtype")
def default_dtype(trial: Trial) -> Pair:
    model, images = trial.done(trial.start()), trial.images()
    try:
        torch.set_default_dtype(torch.float64 if trial.subject.dtype != "float64" else torch.float32)
        with torch.no_grad():
            given = trial.answer(model, images)
    finally:
        torch.set_default_dtype(torch.float32)
    return given, trial.wanted(trial.exact(OLD))


@idiom("threads: eight at once")
def threads(trial: Trial) -> Pair:
    """Images of several sizes through one model, again and again."""
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    images = [trial.images((h, w), batch=1) for h in (2, 3, 4, 5) for w in (2, 3, 4, 5, 6)] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(torch.no_grad()(lambda each: trial.answer(model, each)), images)
        given = [tensor for tensors in answers for tensor in tensors]
    return given, [tensor for each in images for tensor in trial.wanted(exact, each)]


@idiom("devices: a part on meta", dtypes=(*PLAIN, "int8-torchao"))
def part_on_meta(trial: Trial) -> Pair:
    """Each part with weights in turn, as a file that lacks its weights leaves it: no number can come of it.

    torch.ao's packed products stay where they are.
    """
    names = [name for name, module in trial.exact(OLD).named_modules() if list(module.parameters(recurse=False))]
    errors: list[Exception] = []
    for name in names[:: 1 if trial.state == "as-loaded" else 3]:
        model = trial.start()
        try:
            model.get_submodule(name).to("meta")
            model = trial.done(model)
            with torch.no_grad():
                outputs = trial.answer(model)
        except Exception as error:
            errors.append(error)
            continue
        if not any(tensor.is_meta for tensor in outputs):
            trial.notes["at"] = name
            return outputs, [torch.full_like(tensor, torch.inf) for tensor in outputs]
    raise next((error for error in errors if isinstance(error, UserError)), errors[-1])


@idiom("devices: images on meta")
def images_on_meta(trial: Trial) -> Pair:
    model = trial.done(trial.start())
    with torch.no_grad():
        return trial.answer(model, trial.images().to("meta")), trial.wanted(trial.exact(OLD))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved(trial: Trial, model: Any) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).eval()


enter("copies: deepcopy", lambda trial, model: copy.deepcopy(model), OLD)
enter("copies: pickle", lambda trial, model: pickle.loads(pickle.dumps(model)), OLD)
enter("copies: torch.save and load", lambda trial, model: through_a_file(model), OLD)
enter("copies: save_pretrained and from_pretrained", saved, OLD, dtypes=(*PLAIN, "int8-torchao"))
enter(
    "copies: state dict by a file",
    lambda trial, model: model.load_state_dict(through_a_file(trial.source().state_dict())),
)


# Of graphs: compiled, traced, exported, to ONNX; and weights that change afterwards.
COMPILED: dict[str, Any] = {"slow": True, "dtypes": FLOAT32}


class Answer(nn.Module):
    """A model that gives tensors alone, as graphs of old want it."""

    def __init__(self, trial: Trial, model: nn.Module) -> None:
        super().__init__()
        self.model, self.trial = model, trial

    def forward(self, images: torch.Tensor) -> Any:
        return tuple(self.trial.answer(self.model, images))


def compiled(trial: Trial, model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False, **options)


def compiled_and_changed(trial: Trial, inside: Any) -> Any:
    model = compiled(trial, inside, backend="aot_eager")
    with torch.no_grad():
        trial.answer(model)
    source = dict(trial.source().state_dict())
    for name, tensor in inside.state_dict().items():
        tensor.data.copy_(source[name])
    return model


def compiled_in_place(trial: Trial, model: Any) -> None:
    torch._dynamo.reset()
    model.compile(backend="aot_eager", dynamic=False)


enter("graphs: torch.compile", lambda *given: compiled(*given, backend="aot_eager"), OLD, **COMPILED)
enter("graphs: torch.compile by inductor", compiled, OLD, **COMPILED)
enter("graphs: torch.compile, then other weights", compiled_and_changed, **COMPILED)
enter("graphs: model.compile()", compiled_in_place, OLD, **COMPILED)


def graph(name: str, weights: int = OLD) -> Callable[[Callable[[Trial, Any], Any]], None]:
    """Enter an idiom that makes a function of images from a model, which answers as a fresh one of `weights`."""

    def decorate(make: Callable[[Trial, Any], Any]) -> None:
        @idiom(name, changes=weights == NEW, **COMPILED)
        @torch.no_grad()
        def attempt(trial: Trial) -> Pair:
            given = make(trial, trial.done(trial.start()))(trial.images())
            tensors = [given] if isinstance(given, torch.Tensor) else list(given)
            return tensors, trial.wanted(trial.exact(weights))

    return decorate


def traced(trial: Trial, model: Any) -> Any:
    return torch.jit.trace(Answer(trial, model), trial.images(), check_trace=False)


def exported(trial: Trial, model: Any) -> Any:
    return torch.export.export(Answer(trial, model), (trial.images(),)).module()


graph("graphs: torch.jit.trace")(traced)


@graph("graphs: torch.jit.trace, then other weights", NEW)
def traced_and_changed(trial: Trial, model: Any) -> Any:
    function = traced(trial, model)
    model.load_state_dict(trial.source().state_dict())
    return function


graph("graphs: torch.jit.freeze")(lambda trial, model: torch.jit.freeze(traced(trial, model).eval()))
graph("graphs: torch.export")(exported)


@graph("graphs: torch.export, then other weights", NEW)
def exported_and_changed(trial: Trial, model: Any) -> Any:
    module = exported(trial, model)
    module.load_state_dict(Answer(trial, trial.source()).state_dict())
    return module


@graph("graphs: of a copy that changes later")
def exported_then_original_changes(trial: Trial, model: Any) -> Any:
    """What was exported from a deep copy stays."""
    module = exported(trial, copy.deepcopy(model))
    model.load_state_dict(trial.source().state_dict())
    return module


@graph("graphs: ONNX")
def onnx(trial: Trial, model: Any) -> Any:
    import onnxruntime

    file = io.BytesIO()
    torch.onnx.export(Answer(trial, model), (trial.images(),), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    return lambda images: [torch.from_numpy(each) for each in session.run(None, {name: images.numpy()})]
