"""Read layers, features, class maps and objects from models of any library.

Legend: B batch, C channels, H x W px (height, width), N tokens, D hidden size, n objects.
"""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import BatchFeature

from hf_vit.data.transforms import refuse_crops
from hf_vit.errors import UserError
from hf_vit.families import DenseTask, find_family, refuse_diverged
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.detection_hf_vit import HfMaskRCNNForObjectDetection, HfMaskRCNNOutput
from hf_vit.models.modeling_hf_vit import get_class_token_index, get_patch_token_slice
from hf_vit.models.pretrained_hf_vit import HfPreTrainedModel

# Patterns of the modules that count as layers; the first pattern that matches more than one module is used.
LAYER_NAMES = (
    r"(\w+\.)*(stages|layers)\.\d+\.(blocks|layers)\.\d+",  # transformers' ResNet, Swin; timm's BiT, Swin
    r"layer\d\.\d+",  # timm's and torchvision's ResNets
    r"(resnet\.)?encoder\.stages\.\d+\.\d+",  # our ResNets
    r"(\w+\.)?embeddings|(\w+\.)*(layers?|blocks)\.\d+",  # vision transformers, MLP-Mixer
    r"\w+\.\d+|\w+",  # top modules of any other model
)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that count as a model's layers by name, in the order of their definition."""
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in LAYER_NAMES:
        layers = {name: module for name, module in modules.items() if re.fullmatch(pattern, name)}
        if len(layers) > 1:
            return layers
    return modules


def run_hooks(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which all hooks of a model run, of which code that torch has compiled leaves out some."""
    is_compiled = any(module._compiled_call_impl or hasattr(module, "_orig_mod") for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


@contextmanager
def watch_layers(model: nn.Module, receive: Callable[[str, torch.Tensor], None]) -> Generator[None]:
    """Call `receive(name, features)` with the output of every layer that runs inside the `with` block."""

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[object, ...], output: object) -> None:
            features = get_layer_tensor(output)
            if features is not None:
                receive(name, features)

        return hook

    with ExitStack() as handles, run_hooks(model):
        for name, module in find_layers(model).items():
            handles.enter_context(module.register_forward_hook(make_hook(name)))
        yield


def get_layer_tensor(output: object) -> torch.Tensor | None:
    """Return the features in a module's output, which may be a tensor, a tuple or an output object; else None."""
    first: object = output[0] if isinstance(output, tuple | list) and output else output
    features = getattr(first, "hidden_states", first)
    return features if isinstance(features, torch.Tensor) and features.ndim > 1 else None


PRE_LOGITS = "pre_logits"


def call_model(model: nn.Module, pixel_values: torch.Tensor | BatchFeature, **options: Any) -> Any:
    """Call a model with images of one size, [B, C, H, W], or of mixed sizes (see `keep_image_sizes`)."""
    return model(**pixel_values) if isinstance(pixel_values, BatchFeature) else model(pixel_values, **options)


def refuse_dense(model: nn.Module) -> None:
    """Raise a UserError for a segmentation or detection model where features of a whole image are needed."""
    if task := get_dense_task(model):
        raise UserError(
            f"{type(model).__name__} is a {task} model, which has no features of the whole image; give the "
            "classifier or pre-trained model that it was made from"
        )


def compute_pre_logits(model: Any, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    """Return the input of the classification head, [B, D]; without a head the pooled output.

    Without a pooled output it is the class token, and without a class token the mean over the patches.

    Raises:
        UserError: the model is of an unknown library, or nothing runs after its encoder.
    """
    if hasattr(model, "forward_head") and hasattr(model, "forward_features"):
        images: Any = pixel_values if isinstance(pixel_values, BatchFeature) else {"pixel_values": pixel_values}
        return model.forward_head(model.forward_features(*images.values()), pre_logits=True)
    if not hasattr(model, "base_model"):
        raise UserError(
            f"the features of a {type(model).__name__} cannot be read; give a model of hf_vit, transformers "
            "or timm (instead of an exported graph, the model that it was exported from)"
        )
    refuse_dense(model)
    encoder: Any = model.base_model
    if encoder is model:
        output = call_model(encoder, pixel_values)
        if not hasattr(output, "logits"):
            pooled = getattr(output, "pooler_output", None)
            return pool(model, output.last_hidden_state) if pooled is None else pooled.flatten(1)
        encoder = next(model.children())  # as in the classifiers of CLIP and SigLIP
    head_input = _record_head_input(model, encoder, pixel_values)
    return head_input.mean(dim=1) if head_input.ndim == 3 else head_input.flatten(1)  # mean over the tokens


def _record_head_input(model: nn.Module, encoder: nn.Module, pixel_values: torch.Tensor | BatchFeature) -> torch.Tensor:
    """Run the model, and return the input of the first module with a linear layer, or of any, after the encoder."""
    others = [child for child in model.children() if child is not encoder]
    heads = [child for child in others if any(isinstance(module, nn.Linear) for module in child.modules())]
    # Hooks, because this module need not be defined first.
    inputs: list[torch.Tensor] = []

    def record_input(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        inputs.append(arguments[0])

    with ExitStack() as handles, run_hooks(model):
        for head in heads or others:  # PoolFormer's head begins with a norm and a mean
            handles.enter_context(head.register_forward_pre_hook(record_input))
        call_model(model, pixel_values)
    if not inputs:
        raise UserError(
            f"{type(model).__name__} has no module after its encoder, so its features cannot be read; give "
            "only its encoder"
        )
    return inputs[0]


FEATURES = ("class", "mean", "class+mean", "patches")


class FeatureChoice(NamedTuple):
    """The `read_layer_features` that take the place of the head's input."""

    kind: str
    layers: int = 1
    norm: bool = True

    @classmethod
    def parse(
        cls, features: str | None, layers: int = 1, norm: bool = True, kinds: Sequence[str] = FEATURES
    ) -> "FeatureChoice | None":
        """Return the choice of the options --features, --layers and --no-norm; None without --features.

        Raises:
            UserError: an option is of no use, or --features is not one of `kinds`.
        """
        if features is None:
            if layers != 1 or not norm:
                raise UserError(
                    f"--layers and --no-norm only work with --features; add --features with one of {', '.join(kinds)}"
                )
            return None
        if features not in kinds or layers < 1:
            raise UserError(
                f"--features {features} with --layers {layers} does not work; give one of {', '.join(kinds)}, and at "
                "least one layer"
            )
        return cls(features, layers, norm)


def refuse_features(model: nn.Module, choice: FeatureChoice) -> None:
    """Raise a UserError if a model does not have these `read_layer_features`."""
    kind, layers, _ = choice
    refuse_dense(model)
    if not isinstance(model, HfPreTrainedModel):
        raise UserError(
            f"--features {kind} needs a model of hf_vit, but this is a {type(model).__name__}; convert it "
            "first with hf-vit convert"
        )
    count = model.config.num_stages
    if layers > count:
        raise UserError(f"--layers {layers} does not fit a model with {count} layers; give 1 to {count}")
    if "class" in kind and not getattr(model.config, "has_class_token", False):
        raise UserError(f"--features {kind} needs a class token, which this model does not have; use --features mean")
    family = find_family(model.config.model_type)
    if kind == "patches" and layers > 1 and family is not None and not family.has_tokens:
        raise UserError("--features patches needs layers with the same grid, but this model's differ; use --layers 1")


def read_layer_features(
    model: Any, pixel_values: torch.Tensor | BatchFeature, choice: FeatureChoice
) -> list[torch.Tensor]:
    """Return features of a model's last layers for every image, see `get_intermediate_layers`.

    Args:
        choice: "class": the class tokens of all `layers`, [layers * D]; "mean": the means of their patch tokens,
            [layers * D]; "class+mean": the class tokens and the mean of the last layer's patch tokens, which DINOv2's
            linear heads take, [(layers + 1) * D]; "patches": the patch tokens of all layers, [h*w, layers * D].
    """
    kind, layers, norm = choice
    images: Any = pixel_values if isinstance(pixel_values, BatchFeature) else {"pixel_values": pixel_values}
    states = model.get_intermediate_layers(**images, layers=layers, norm=norm)
    class_tokens = [state.class_token for state in states if state.class_token is not None]
    mask = images.get("patch_attention_mask")
    features: list[torch.Tensor] = []
    for index in range(len(states[0].patch_tokens)):
        is_image = slice(None) if mask is None else mask[index].flatten().bool()
        patches = [state.patch_tokens[index, is_image] for state in states]
        if kind == "patches":
            features.append(torch.cat(patches, dim=1))
            continue
        means = [tokens.mean(dim=0) for tokens in patches]
        classes = [token[index] for token in class_tokens]
        features.append(torch.cat({"class": classes, "mean": means, "class+mean": [*classes, means[-1]]}[kind]))
    return features


def compute_depth_features(model: nn.Module, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the pooled features [B, D] after every layer (see `find_layers`) in running order, then the `pre_logits`.

    A layer that runs several times (shared weights) has several entries: "layers.0", "layers.0 (2)".
    """
    pooled: dict[str, torch.Tensor] = {}
    runs: dict[str, int] = {}

    def receive(name: str, features: torch.Tensor) -> None:
        if features.ndim > 2 and len(features) == len(pixel_values):
            runs[name] = runs.get(name, 0) + 1
            key = name if runs[name] == 1 else f"{name} ({runs[name]})"
            pooled[key] = pool(model, features, pixel_values)

    with watch_layers(model, receive):
        last = compute_pre_logits(model, pixel_values)
    return {**pooled, PRE_LOGITS: last}


def pool(model: nn.Module, features: torch.Tensor, pixel_values: torch.Tensor | None = None) -> torch.Tensor:
    """Return one vector for every image, [B, D]: the class token, or the mean over patches or pixels without one.

    Features are [B, N, D] or a map, [B, C, H, W] ([B, H, W, C] for AxialResNets and timm's "NHWC" models, and for the
    `pixel_values` of a layer if these axes have the image's shape, as in SAM). If there are as many tokens as patches,
    the class token joins in a later layer, as in CaiT and XCiT, and the mean is returned.
    """
    height, width = (0, 0) if pixel_values is None else pixel_values.shape[2:]
    if features.ndim == 4:
        first, second, third = features.shape[1:]
        # The height and width of a map have about the ratio of the image's.
        is_last = width > 0 and abs(first / second - height / width) < abs(second / third - height / width)
        return features.mean(dim=(1, 2) if is_last or is_channels_last(model) else (2, 3))
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)  # of timm
    if patch is not None and features.shape[1] == height // as_pair(patch)[0] * (width // as_pair(patch)[1]):
        return features.mean(dim=1)
    if (token := find_class_token(model)) is not None:
        return features[:, token]
    config: Any = getattr(model, "config", None)
    is_ours = hasattr(config, "num_special_tokens")
    patches = get_patch_token_slice(config) if is_ours else slice(getattr(model, "num_prefix_tokens", 0), None)
    return features[:, patches].mean(dim=1)


def find_class_token(model: nn.Module) -> int | None:
    """Return the index of the class token, or None for a model without one."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "has_class_token"):
        return get_class_token_index(config) if config.has_class_token else None
    names = ("cls_token", "class_embedding")  # CLIP's is the latter
    return 0 if any(name.rpartition(".")[2] in names for name, _ in model.named_parameters()) else None


def find_output_token(config: Any) -> int | None:
    """Return the index of the class token or first patch that the pooling of a Vision Transformer reads, or None."""
    if config.pooling == "first_patch":
        return get_patch_token_slice(config).start
    reads_class_token = config.has_class_token and config.pooling in ("token", "token_and_gap")
    return get_class_token_index(config) if reads_class_token else None


def is_channels_last(model: nn.Module) -> bool:
    """Return whether the feature maps of a model are [B, H, W, C]."""
    if getattr(getattr(model, "config", None), "model_type", None) == "hf_axial_resnet":
        return True
    return str(getattr(model, "output_fmt", "NCHW")).endswith("NHWC")


# Ends of the names of transformers' classes and Auto classes.
TASKS: dict[str, DenseTask] = {
    "ForSemanticSegmentation": "segmentation",
    "ForUniversalSegmentation": "segmentation",
    "ForObjectDetection": "detection",
}


def get_dense_task(model: nn.Module | str) -> DenseTask | None:
    """Return the dense task of a model of transformers or hf_vit, or of its class by name; None without one."""
    name = model if isinstance(model, str) else type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), None)


def check_finite(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return outputs or features of a model; raise UserError, which names their kind, if they are NaN or infinite."""
    if not bool(values.isfinite().all()):
        raise UserError(
            f"the model's {kind} are NaN or infinite, so its weights are damaged or diverged; use another checkpoint"
        )
    return values


def _check_outputs(outputs: Any) -> Any:
    """Return the outputs of a dense model in float32, as bfloat16 rounds boxes; raise UserError if they are NaN."""
    for name in ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits"):
        if (values := getattr(outputs, name, None)) is not None:
            setattr(outputs, name, check_finite(values.to(torch.promote_types(values.dtype, torch.float32)), "outputs"))
    return outputs


def limit_batch(model: nn.Module, processor: Any, batch_size: int) -> int:
    """Return how many images `segment` and `detect` take at once.

    Without a fixed size, the processors of DETR and Mask2Former pad the images of a batch, and no mask tells the model.

    Raises:
        UserError: the processor crops images or is of another kind of model, or a Mask R-CNN has weights that are NaN.
    """
    refuse_crops(processor)
    name, kind = type(model).__name__, type(processor).__name__
    task = "semantic_segmentation" if get_dense_task(model) == "segmentation" else "object_detection"
    if isinstance(model, HfMaskRCNNForObjectDetection):
        refuse_diverged(model, name, "used")  # torchvision drops objects that are NaN
    elif not hasattr(processor, f"post_process_{task}"):
        raise UserError(f"a {kind} cannot read the outputs of a {name}; give the image processor of its training")
    size = getattr(processor, "size", None) or {}
    return batch_size if size.get("height") and size.get("width") else 1


def _process_blank(processor: Any, sizes: Sequence[tuple[int, int]]) -> Any:
    """Process black images of `sizes` (height, width) px, to learn from the result where the processor puts images."""
    return processor(images=[np.zeros((*size, 3), dtype=np.uint8) for size in sizes], return_tensors="pt")


def _find_canvases(pixel_mask: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return the (height, width) of padded images in px of the images, which `pixel_mask` [B, H, W] marks."""
    pairs = zip(pixel_mask.float(), sizes, strict=True)
    return [(height / float(mask[:, 0].mean()), width / float(mask[0].mean())) for mask, (height, width) in pairs]


@torch.no_grad()
def segment(
    model: nn.Module, processor: Any, pixel_values: torch.Tensor, sizes: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Predict the class of every pixel, [H, W] for every image of `sizes` (height, width) px, as the processor does."""
    outputs = _check_outputs(model(pixel_values=pixel_values))
    canvases = [(height, width) for height, width in sizes]
    if getattr(processor, "do_split_image", None):  # EoMT's divides images, and joins the parts with their offsets
        outputs.patch_offsets = _process_blank(processor, sizes)["patch_offsets"]
    elif hasattr(processor, "do_split_image") and processor.do_pad:  # or pads them to squares
        canvases = [(max(size), max(size)) for size in sizes]
    elif getattr(processor, "pad_size", None):  # Mask2Former's pads them, too
        padded_sizes = _find_canvases(_process_blank(processor, sizes)["pixel_mask"], sizes)
        canvases = [(round(height), round(width)) for height, width in padded_sizes]
    maps = processor.post_process_semantic_segmentation(outputs, target_sizes=canvases)
    return [class_map[:height, :width] for class_map, (height, width) in zip(maps, sizes, strict=True)]


@torch.no_grad()
def detect(
    model: nn.Module,
    processor: Any,
    pixel_values: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    threshold: float = 0.0,
) -> list[dict[str, torch.Tensor]]:
    """Predict the objects of every image of `sizes` (height, width) px, as the processor or torchvision does.

    Scores must exceed `threshold`, and for Mask R-CNN also the threshold in its config.

    Returns:
        For every image boxes [n, 4] (x1, y1, x2, y2 in px of the image), labels [n] and scores [n] in descending order;
        for a Mask R-CNN with masks also masks [n, H, W], bool.
    """
    targets: list[Any] = [(int(height), int(width)) for height, width in sizes]
    inputs: dict[str, Any] = {"pixel_values": pixel_values}
    if isinstance(model, HfMaskRCNNForObjectDetection):
        inputs["target_sizes"] = targets
    elif getattr(processor, "do_pad", None) and getattr(processor, "pad_size", None):
        # The boxes are shares of the padded image, in which the mask shows where the image is.
        inputs["pixel_mask"] = _process_blank(processor, targets)["pixel_mask"].to(pixel_values.device)
        targets = _find_canvases(inputs["pixel_mask"], targets)
    return compute_detections(_check_outputs(model(**inputs)), processor, targets, threshold)


def compute_detections(
    outputs: Any, processor: Any, sizes: Sequence[tuple[float, float]], threshold: float = 0.0
) -> list[dict[str, torch.Tensor]]:
    """Compute detections from a model's outputs, see `detect`; those of Mask R-CNN keep their sizes."""
    if isinstance(outputs, HfMaskRCNNOutput):
        detections = outputs.detections or []
        images = [{name: value[image["scores"] > threshold] for name, value in image.items()} for image in detections]
    else:
        images = processor.post_process_object_detection(outputs, threshold, list(sizes))
    return list(map(_sort_objects, images))


def _sort_objects(objects: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sort objects by descending score, and turn the probabilities of their masks into bool."""
    order = objects["scores"].argsort(descending=True, stable=True)
    ordered = {name: value[order] for name, value in objects.items()}
    return ordered | ({"masks": ordered["masks"][:, 0] >= 0.5} if "masks" in ordered else {})
