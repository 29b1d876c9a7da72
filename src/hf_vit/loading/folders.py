"""Checkpoints as transformers, this package and timm save them, loaded with errors a user can act on."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import nn

from hf_vit.conversion.fetching import TIMM, WRAPPER, config_of_wrapper
from hf_vit.conversion.loading import Source
from hf_vit.conversion.progress import quiet_transformers
from hf_vit.display import shortened
from hf_vit.environment import pick_device
from hf_vit.errors import UserError, first_line
from hf_vit.loading.outputs import TASKS
from hf_vit.repositories.reading import WEIGHTS, loading, model_folder

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PreTrainedModel

# The models of a training by step: `OUTPUT/checkpoints/checkpoint-<step>/`.
WORK_FOLDER = "checkpoints"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step a checkpoint folder is named after; -1 for other folders."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints_in(work: Path) -> list[Path]:
    """Checkpoint folders, complete or not, by step."""
    return sorted((path for path in work.glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0), key=step_of)


def load_transformers(
    source: Source, device: str | None = None, *, as_classifier: bool = False
) -> "tuple[PreTrainedModel, Any]":
    """Load a vision model that hf_vit or transformers saved, in evaluation mode, and its image processor.

    Code that comes with a checkpoint is never run. The weights keep the dtype they are stored in. A checkpoint of an
    image classifier and one of segmentation or detection come with their heads, any other as the bare model.
    """
    import transformers
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig

    place, name, folder = pick_device(device), source.name, source.path
    source.need_config()
    assert folder is not None
    if not any((folder / f"{weights}{index}").is_file() for weights in WEIGHTS for index in ("", ".index.json")):
        raise UserError(f"{name} holds no weights: model.safetensors is missing; copy it there or save the model again")
    with quiet_transformers(), loading(name):
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{name} cannot be read as a model: {first_line(error)}") from error
        if (channels := getattr(config, "num_channels", 3)) != 3:
            raise UserError(
                f"{name} takes images with num_channels={channels}; only models for RGB images (3) are supported"
            )
        named = ", ".join(getattr(config, "architectures", None) or []) or "no class named"
        is_known = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if as_classifier and not is_known:
            raise UserError(
                f"{name} holds a {config.model_type} model ({named}), which is not an image classifier; give one, "
                "or fine-tune it (hf-vit finetune)"
            )
        first = named.partition(",")[0]
        with_head = as_classifier or (is_known and "ForImageClassification" in first)
        ending = "ForImageClassification" if with_head else next((each for each in TASKS if first.endswith(each)), "")
        model = load_weights(source, getattr(transformers, f"AutoModel{ending}"), ending)
        processor = _load_processor(source)
    return model.to(place).eval(), processor


def load_weights(source: Source, auto_class: Any, head: str) -> Any:
    """Return a model by an Auto class ("AutoModel" and `head`) with all its weights."""
    name = source.name
    try:
        model, report = auto_class.from_pretrained(source.path, output_loading_info=True, trust_remote_code=False)
    except RuntimeError as error:
        why = "their shapes differ" if "mismatch" in str(error) else first_line(error)
        raise UserError(f"the weights of {name} do not fit its config.json: {why}; save the model again") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be loaded: {first_line(error)}; save the model again") from error
    missing = sorted(report["missing_keys"])
    if not head:  # a bare model may lack the pooler, which checkpoints of other heads do not hold
        missing = [key for key in missing if "pooler" not in key]
    if missing:
        lacking = shortened(missing, 3)
        if head == "ForImageClassification":
            raise UserError(
                f"{name} is not a trained image classifier: its weights lack {lacking}; "
                "fine-tune it first (hf-vit finetune), or save it with its classification head"
            )
        raise UserError(f"the weights of {name} are incomplete: they lack {lacking}; save the model again")
    return model


def _load_processor(source: Source) -> "BaseImageProcessor":
    """Return the image processor, which an image has been tried on."""
    from PIL import Image
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(source.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source.name} has no readable image processor (preprocessor_config.json); save one with "
            "ViTImageProcessor(size=...).save_pretrained(folder)"
        ) from error
    made = processor(images=Image.new("RGB", (64, 64)), return_tensors="pt")
    if "pixel_values" in made and not bool(made["pixel_values"].isfinite().all()):  # ImageGPT's makes input_ids
        raise UserError(
            f"the image processor of {source.name} makes pixels that are not finite (NaN or infinity); see image_mean, "
            "image_std and rescale_factor in preprocessor_config.json"
        )
    return processor


# ---- timm


def load_timm(source: Source, device: str | None = None) -> Any:
    """Load a model of timm with its weights, in evaluation mode: by name, from a file, or from a folder."""
    name, folder = source.name.removeprefix(TIMM), source.path
    try:
        import timm
    except ImportError as error:
        raise UserError(f"timm:{name} needs timm: pip install timm") from error
    if source.stored.get("model_type") == WRAPPER:
        return _from_wrapper(source).to(pick_device(device))
    place, on_hub = pick_device(device), re.fullmatch(r"hf[-_]hub:(.+?)(?:@(.+))?", name, re.IGNORECASE)
    if on_hub is not None:
        folder = model_folder(on_hub[1], on_hub[2])
    try:
        if folder is None and "@" in name:
            model: Any = _from_file(*name.split("@", 1))
        else:
            model = timm.create_model(name if folder is None else f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # unknown names, no weights, no connection: each has an error of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"timm:{name} cannot be loaded ({reason:.200}); timm.list_models(pretrained=True) lists the "
            "models that can be loaded"
        ) from error
    model.problem_type = source.stored.get("problem_type")
    return model.eval().to(place)


def _from_wrapper(source: Source) -> Any:
    """Return the model inside transformers' class around it, which reads the weights in both of its spellings."""
    import transformers

    is_classifier = "ForImageClassification" in str((source.stored.get("architectures") or [""])[0])
    head = "ForImageClassification" if is_classifier else ""
    with quiet_transformers(), loading(source.name):
        model = load_weights(source, getattr(transformers, f"AutoModel{head}"), head).timm_model.float()
        config = config_of_wrapper(source.stored)
        names = {name: source.stored[name] for name in ("label_names", "label_descriptions") if name in source.stored}
        classes = {"num_classes": model.num_classes, **names}  # of a bare model none
        model.pretrained_cfg = {**model.pretrained_cfg, **config["pretrained_cfg"], **classes}
    model.problem_type = source.stored.get("problem_type")
    return model.eval()


def _from_file(architecture: str, file: str) -> "nn.Module":
    """Return a checkpoint alone: as many classes as its head has, whose names it does not tell unless they are
    ImageNet's.
    """
    import timm
    from timm.models import get_pretrained_cfg, load_state_dict

    path, config = Path(file).expanduser(), get_pretrained_cfg(architecture)
    if not path.is_file():
        raise UserError(f"there is no file {file}")
    weights, classifier = load_state_dict(str(path)), config.classifier if config else None
    head = weights.get(f"{classifier if isinstance(classifier, str) else (classifier or [''])[0]}.weight")
    options: dict[str, Any] = {} if head is None else {"num_classes": len(head)}
    return timm.create_model(architecture, checkpoint_path=str(path), **options)


def timm_label_names(model: "nn.Module") -> list[list[str]]:
    """Return what a model of timm calls its classes, in the order of its logits: every set of names that is known.

    timm knows the classes of ImageNet (its 1,000 and the larger sets) by WordNet's numbers and by words.
    """
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    config = getattr(model, "pretrained_cfg", None) or {}
    stored = config.get("label_names")
    if isinstance(stored, list | tuple) and len(stored) == model.num_classes:
        names, words = [str(name) for name in stored], config.get("label_descriptions") or {}
        return [names, [str(words[name]) for name in names]] if set(names) <= set(words) else [names]
    subset = infer_imagenet_subset(model)
    if subset is None:
        return []
    imagenet = ImageNetInfo(subset)
    return [list(imagenet.label_names()), cast("list[str]", imagenet.label_descriptions())]


# ---- ImageGPT


@final
class ImageGPTFeatures(nn.Module):
    """The lower half of an ImageGPT: pixels -> color tokens -> the middle layer, averaged over the tokens.

    The middle block's first layer norm ends it (Chen et al., Generative Pretraining from Pixels, 2020: the features of
    linear probes are layer-normed inputs of a block, averaged over the sequence; the best lie in the middle).

    The palette (`clusters`, [V, 3]) is part of the model, so that it takes pixels [B, 3, H, W] like any other. Choosing
    a color has no gradient.
    """

    clusters: torch.Tensor

    def __init__(self, model: Any, clusters: "ArrayLike", size: tuple[int, int]) -> None:
        super().__init__()
        self.config = model.config
        if size[0] * size[1] > self.config.n_positions:
            raise UserError(
                f"the image processor makes {size[0]}x{size[1]} px, one token per pixel, but the ImageGPT "
                f"takes {self.config.n_positions}; set the processor to the size it was trained with"
            )
        # A shallow copy: the model that was given keeps all its layers.
        body = copy.copy(model if hasattr(model, "h") else model.transformer)
        body._modules = dict(body._modules)
        middle = len(body.h) // 2
        body.ln_f, body.h = body.h[middle].ln_1, body.h[:middle]
        self.body = body
        self.register_buffer("clusters", torch.as_tensor(clusters, dtype=torch.float32))

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return [B, H*W, D] of pixels [B, 3, H, W]."""
        from transformers.models.imagegpt.image_processing_imagegpt import color_quantize_torch

        pixels = pixel_values.float().permute(0, 2, 3, 1).reshape(-1, 3)
        tokens = color_quantize_torch(pixels, self.clusters.float()).reshape(len(pixel_values), -1)
        return self.body(input_ids=tokens, use_cache=False).last_hidden_state

    def forward_head(self, hidden_states: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """Return [B, D]: the mean over the tokens; the names of these two methods are timm's."""
        return hidden_states.mean(dim=1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return features [B, D]: there is no head."""
        return self.forward_head(self.forward_features(pixel_values))


def image_gpt_features(model: Any, processor: Any) -> "tuple[nn.Module, Callable[[Sequence[Image]], torch.Tensor]]":
    """Return features that take pixels, in place of a model that takes color tokens, and what makes these pixels."""

    def prepare(images: "Sequence[Image]") -> torch.Tensor:
        return processor(images=list(images), do_color_quantize=False, return_tensors="pt")["pixel_values"]

    size = (int(processor.size["height"]), int(processor.size["width"]))
    return ImageGPTFeatures(model, processor.clusters, size).to(next(model.parameters()).device), prepare
