"""Idioms of calling: sizes and layouts of images, masks, modes, threads, devices, precision, and copies on the way."""

import copy
import io
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from models.families import HEADS, checkpoint_activations, pad
from torch import nn

from campaigns.idioms.table import EXACT, PLAIN, idiom
from campaigns.idioms.trial import NEW, OLD, Tensors, Trial, tensors_of
from campaigns.idioms.weights import Pair, after
from hf_vit.errors import UserError


def asking(trial: Trial, images: torch.Tensor, model: Any = None, **kwargs: Any) -> Pair:
    """Other images for the old weights."""
    model = trial.done(trial.start() if model is None else model)
    with torch.no_grad():
        return trial.answer(model, images, **kwargs), trial.wanted(trial.exact(OLD), images)


@idiom("sizes: nominal")
def nominal(trial: Trial) -> Pair:
    return asking(trial, trial.images(None))


@idiom("sizes: larger")
def larger(trial: Trial) -> Pair:
    return asking(trial, trial.images((7, 7)))


@idiom("sizes: smaller")
def smaller(trial: Trial) -> Pair:
    return asking(trial, trial.images((2, 2)))


@idiom("sizes: rectangular")
def rectangular(trial: Trial) -> Pair:
    return asking(trial, trial.images((2, 6)))


@idiom("sizes: many, one after the other")
def many(trial: Trial) -> Pair:
    """More than anything keeps, and the first again."""
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    given: Tensors = []
    wanted: Tensors = []
    with torch.no_grad():
        for grid in (*((h, w) for h in (2, 3, 4, 5) for w in (2, 3, 5, 6, 7)), (2, 2), (3, 2)):
            images = trial.images(grid, batch=1)
            given, wanted = given + trial.answer(model, images), wanted + trial.answer(exact, images.double())
    return given, wanted


@idiom("batches: 1, 17")
def batches(trial: Trial) -> Pair:
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    given: Tensors = []
    wanted: Tensors = []
    with torch.no_grad():
        for batch in (1, 17):
            images = trial.images(batch=batch)
            given, wanted = given + trial.answer(model, images), wanted + trial.wanted(exact, images)
    return given, wanted


@idiom("images: channels_last")
def channels_last(trial: Trial) -> Pair:
    return asking(trial, trial.images().contiguous(memory_format=torch.channels_last))


@idiom("images: not contiguous")
def strided(trial: Trial) -> Pair:
    """Every second pixel of a larger image, mirrored axes of a transposed one."""
    images = trial.images()
    wide = torch.zeros(*images.shape[:2], 2 * images.shape[2], 3 * images.shape[3], dtype=images.dtype)
    wide[:, :, ::2, 1::3] = images
    turned = images.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    model = trial.done(trial.start())
    with torch.no_grad():
        given = trial.answer(model, wide[:, :, ::2, 1::3]) + trial.answer(model, turned)
    return given, 2 * trial.wanted(trial.exact(OLD))


@idiom("images: expanded from one")
def expanded(trial: Trial) -> Pair:
    return asking(trial, trial.images(batch=1).expand(4, -1, -1, -1))


@idiom("images: of another dtype")
def other_dtype(trial: Trial) -> Pair:
    """The model's dtype rounds them, as transformers' ViT does; float64 loses nothing of the dtypes here."""
    return asking(trial, trial.images().double())


@idiom("model: channels_last")
def model_channels_last(trial: Trial) -> Pair:
    return asking(trial, trial.images(), trial.start().to(memory_format=torch.channels_last))


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
    """Of every image its part: of maps and tokens those places that are its own."""
    parts: Tensors = []
    config = trial.subject.config
    special = getattr(config, "num_special_tokens", 1)
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
                assert extra in (0, special)
            parts.append(part)
    return parts


@idiom("masks: corrupted patches", takes=lambda subject: subject.head == "masked_prediction")
def corrupted(trial: Trial) -> Pair:
    images = trial.images(None)
    config = trial.subject.config
    if trial.subject.is_ours:
        inputs = HEADS["masked_prediction"].labels(config, images)
    else:
        inputs = {"bool_masked_pos": torch.arange(2 * 16).view(2, 16) % 2 == 0}
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    with torch.no_grad():
        return trial.answer(model, images, **inputs), trial.answer(exact, images.double(), **inputs)


@idiom("outputs: as a tuple, hidden states")
def recorded(trial: Trial) -> Pair:
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    options = {**trial.options(), "output_hidden_states": True}
    with torch.no_grad():
        given = [*model(trial.images(), **options).hidden_states]
        wanted = [*exact(trial.images().double(), **options).hidden_states]
        given += as_tuple(trial, model, trial.images())
        wanted += as_tuple(trial, exact, trial.images().double())
    return given, wanted


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


@idiom("modes: train() and eval()")
def toggled(trial: Trial) -> Pair:
    model = trial.start()
    model.train()
    model.eval()
    return after(trial, model, OLD)


@idiom("modes: a pass of training, then eval()", dtypes=PLAIN)
def trained_and_back(trial: Trial) -> Pair:
    """Batch norms have counted the pass; a fresh model gets what the model holds."""
    model, exact = trial.start(), trial.exact(OLD)
    sum(tensor.square().sum() for tensor in trial.answer(model.train()) if tensor.requires_grad).backward()
    model.eval()
    held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    exact.load_state_dict(held)
    model = trial.done(model)
    with torch.no_grad():
        return trial.answer(model), trial.wanted(exact)


@idiom("modes: norms frozen in training", dtypes=EXACT)
def norms_frozen(trial: Trial) -> Pair:
    """Batch norms in evaluation while all else trains, as detectors are fine-tuned: the answer is evaluation's."""
    model = trial.start().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm) or not list(module.children()):
            module.eval()
    return after(trial, model, OLD)


@idiom("gradients: of all weights", dtypes=EXACT)
def gradients(trial: Trial) -> Pair:
    return gradients_of(trial, trial.done(trial.start()), trial.exact(OLD))


def gradients_of(trial: Trial, model: Any, exact: Any) -> Pair:
    for each, images in ((model, trial.images()), (exact, trial.images().double())):
        sum(tensor.square().mean() for tensor in trial.answer(each, images)).backward()
    given, wanted = dict(model.named_parameters()), dict(exact.named_parameters())
    assert given.keys() == wanted.keys(), "parameters are missing"
    names = [name for name, parameter in wanted.items() if parameter.grad is not None]
    grads: Tensors = [torch.cat([each[name].grad.flatten() for name in names]) for each in (given, wanted)]
    return [grads[0]], [grads[1]]


@idiom("gradients: with checkpointing", dtypes=EXACT, takes=lambda subject: subject.is_vit)
def checkpointed(trial: Trial) -> Pair:
    model = trial.start().train()
    checkpoint_activations(model)
    return gradients_of(trial, trial.done(model), trial.exact(OLD).train())


@idiom("gradients: of the image", dtypes=EXACT)
def of_the_image(trial: Trial) -> Pair:
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    grads = list[torch.Tensor]()
    for each, images in ((model, trial.images()), (exact, trial.images().double())):
        images.requires_grad_()
        sum(tensor.square().mean() for tensor in trial.answer(each, images)).backward()
        grads.append(images.grad)
    return [grads[0]], [grads[1]]


@idiom("attention: eager, set afterwards", takes=lambda subject: subject.is_vit)
def eager_attention(trial: Trial) -> Pair:
    model = trial.start()
    model.set_attn_implementation("eager")
    return after(trial, model, OLD)


@idiom("attention: there and back", takes=lambda subject: subject.is_vit)
def attention_there_and_back(trial: Trial) -> Pair:
    model = trial.start()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        trial.answer(model)
    model.set_attn_implementation("sdpa")
    return after(trial, model, OLD)


@idiom("attention: a function of one's own", changes=True, takes=lambda subject: subject.is_vit)
def other_attention(trial: Trial) -> Pair:
    """It doubles what sdpa gives, which the fresh model does by its output projections."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def doubling(*args: Any, **kwargs: Any) -> Any:
        attended, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
        return 2 * attended, weights

    AttentionInterface.register("doubling_sdpa", doubling)
    model, exact = trial.start(), trial.exact(OLD)
    model.set_attn_implementation("doubling_sdpa")
    with torch.no_grad():
        for name, module in exact.named_modules():
            if name.endswith("attention.o_proj") and "map" not in name:
                module.weight.mul_(2)
        model = trial.done(model)
        return trial.answer(model), trial.wanted(exact)


@idiom("precision: bfloat16 and back", dtypes=EXACT)
def bfloat16_and_back(trial: Trial) -> Pair:
    return cast_and_back(trial, torch.bfloat16)


@idiom("precision: half and back", dtypes=EXACT)
def half_and_back(trial: Trial) -> Pair:
    return cast_and_back(trial, torch.float16)


@idiom("precision: double and back", dtypes=PLAIN)
def double_and_back(trial: Trial) -> Pair:
    return cast_and_back(trial, torch.float64)


def cast_and_back(trial: Trial, dtype: torch.dtype) -> Pair:
    """With a pass in the other dtype; the weights are rounded."""
    model, exact = trial.start().to(dtype), trial.exact(OLD)
    with torch.no_grad():
        trial.answer(model, trial.images().to(dtype))
    model.to(trial.subject.torch_dtype)
    exact = exact.to(dtype).to(trial.subject.torch_dtype).double()
    model = trial.done(model)
    with torch.no_grad():
        return trial.answer(model), trial.wanted(exact)


@idiom("precision: autocast", dtypes=("float32",))
def autocast(trial: Trial) -> Pair:
    """In bfloat16, whose digits alone count here."""
    trial.notes["rough"] = True
    model = trial.done(trial.start())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        given = trial.answer(model)
    return given, trial.wanted(trial.exact(OLD))


@idiom("precision: after autocast", dtypes=("float32",))
def after_autocast(trial: Trial) -> Pair:
    model = trial.start()
    with torch.autocast("cpu", torch.bfloat16):
        trial.answer(model)
    return after(trial, model, OLD)


@idiom("precision: another default dtype")
def default_dtype(trial: Trial) -> Pair:
    model, images = trial.done(trial.start()), trial.images()
    other = torch.float64 if trial.subject.dtype != "float64" else torch.float32
    try:
        torch.set_default_dtype(other)
        with torch.no_grad():
            given = trial.answer(model, images)
    finally:
        torch.set_default_dtype(torch.float32)
    return given, trial.wanted(trial.exact(OLD))


@idiom("threads: eight at once")
def threads(trial: Trial) -> Pair:
    """Images of several sizes through one model, again and again."""
    model, exact = trial.done(trial.start()), trial.exact(OLD)
    grids = [(h, w) for h in (2, 3, 4, 5) for w in (2, 3, 4, 5, 6)] * 2

    def answer(grid: tuple[int, int]) -> Tensors:
        with torch.no_grad():
            return trial.answer(model, trial.images(grid, batch=1))

    with ThreadPoolExecutor(8) as pool:
        given = [tensor for tensors in pool.map(answer, grids) for tensor in tensors]
    with torch.no_grad():
        wanted = [each for grid in grids for each in trial.answer(exact, trial.images(grid, batch=1).double())]
    return given, wanted


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


@idiom("copies: deepcopy")
def deep(trial: Trial) -> Pair:
    return after(trial, copy.deepcopy(trial.start()), OLD)


@idiom("copies: pickle")
def pickled(trial: Trial) -> Pair:
    return after(trial, pickle.loads(pickle.dumps(trial.start())), OLD)


@idiom("copies: torch.save and load")
def saved_whole(trial: Trial) -> Pair:
    file = io.BytesIO()
    torch.save(trial.start(), file)
    file.seek(0)
    return after(trial, torch.load(file, weights_only=False), OLD)


@idiom("copies: save_pretrained and from_pretrained", dtypes=(*PLAIN, "int8-torchao"))
def saved(trial: Trial) -> Pair:
    model = trial.start()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).eval()
    return after(trial, again, OLD)


@idiom("copies: state dict by a file", changes=True)
def by_a_file(trial: Trial) -> Pair:
    model, file = trial.start(), io.BytesIO()
    torch.save(trial.source().state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    return after(trial, model)
