"""Load checkpoints that transformers, hf_vit and timm saved, with errors that a user can act on."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
import transformers
from numpy.typing import ArrayLike
from PIL import Image
from torch import nn

from hf_vit.conversion.fetching import TIMM, WRAPPER, convert_wrapper_config
from hf_vit.conversion.loading import Source
from hf_vit.conversion.progress import quiet_transformers
from hf_vit.conversion.readers import check_archive
from hf_vit.display import shorten_list
from hf_vit.environment import pick_device
from hf_vit.errors import UserError, get_first_line
from hf_vit.families import get_first_class_name, refuse_other_channels
from hf_vit.loading.outputs import TASKS
from hf_vit.repositories.reading import WEIGHTS, download_model, explain_load_errors, refuse_unread_weights

# Folder of a training's checkpoints: `OUTPUT/checkpoints/checkpoint-<step>/`.
WORK_FOLDER = "checkpoints"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def parse_step(checkpoint: Path) -> int:
    """Return the optimizer step in the name of a checkpoint folder; -1 for other folders."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def list_checkpoints(work: Path) -> list[Path]:
    """Return all checkpoint folders, complete or not, in the order of their steps."""
    folders = [path for path in work.glob("checkpoint-*") if path.is_dir() and parse_step(path) >= 0]
    return sorted(folders, key=parse_step)


def load_transformers(
    source: Source, device: str | None = None, *, as_classifier: bool = False
) -> tuple[transformers.PreTrainedModel, Any]:
    """Load a vision model that hf_vit or transformers saved, in evaluation mode, and its image processor.

    Remote code is never run, and weights keep their dtype. Checkpoints for classification, segmentation and detection
    are loaded with their heads, all others as bare models.
    """
    torch_device = pick_device(device)
    name = source.name
    folder = source.path
    source.require_config()
    assert folder is not None
    if not any((folder / f"{weights}{index}").is_file() for weights in WEIGHTS for index in ("", ".index.json")):
        remedy = "copy it there, or save the model again with save_pretrained"
        remedy = f"give {name}/onnx for its graph" if (folder / "onnx").is_dir() else remedy
        raise UserError(f"{name} holds no weights, because model.safetensors is missing; {remedy}")
    with quiet_transformers(), explain_load_errors(name):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{name} cannot be read as a model: {get_first_line(error)}") from error
        refuse_other_channels(config, name)
        first_class = get_first_class_name(getattr(config, "architectures", None)) or "no class named"
        is_classifier = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if as_classifier and not is_classifier:
            raise UserError(
                f"{name} holds a {config.model_type} model ({first_class}), which is not an image classifier; give a "
                "classifier, or fine-tune it (hf-vit finetune)"
            )
        with_head = as_classifier or (is_classifier and "ForImageClassification" in first_class)
        head = "ForImageClassification" if with_head else next(filter(first_class.endswith, TASKS), "")
        model = load_weights(source, getattr(transformers, f"AutoModel{head}"), head)
        processor = _load_processor(source)
    return model.to(torch_device).eval(), processor


def load_weights(source: Source, auto_class: Any, head: str) -> Any:
    """Load a model with an Auto class ("AutoModel" + `head`); raise UserError if weights are missing or do not fit."""
    name = source.name
    try:
        model, report = auto_class.from_pretrained(source.path, output_loading_info=True, trust_remote_code=False)
    except RuntimeError as error:
        reason = "their shapes differ" if "mismatch" in str(error) else get_first_line(error)
        raise UserError(
            f"the weights of {name} do not fit its config.json: {reason}; give the config.json that belongs "
            "to them, or save the model again with save_pretrained"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name} cannot be loaded: {get_first_line(error)}; save the model again with save_pretrained"
        ) from error
    refuse_unread_weights(model, report["unexpected_keys"], name)
    missing = sorted(report["missing_keys"])
    if not head and any("pooler" in key for key in missing):  # checkpoints of other heads have none
        model.pooler = None  # its weights would be random
        missing = [key for key in missing if "pooler" not in key]
    if missing:
        missing_names = shorten_list(missing, 3)
        is_head_missing = not all(key.startswith(f"{model.base_model_prefix}.") for key in missing)
        if head == "ForImageClassification" and is_head_missing:
            raise UserError(
                f"{name} has no trained classification head (the weights {missing_names} are missing); fine-tune "
                "it first with hf-vit finetune"
            )
        raise UserError(
            f"the weights {missing_names} of {name} are missing; download the model again, or save it again "
            "with save_pretrained"
        )
    return model


def _load_processor(source: Source) -> transformers.BaseImageProcessor:
    """Load the image processor and process one image; raise UserError if it is missing or gives NaN or infinity."""
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(source.path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source.name} has no readable image processor (preprocessor_config.json); save one with "
            "ViTImageProcessor(size=...).save_pretrained(folder)"
        ) from error
    pixel_values = processor(images=Image.new("RGB", (64, 64)), return_tensors="pt").get("pixel_values")
    if pixel_values is not None and not bool(pixel_values.isfinite().all()):  # ImageGPT's returns input_ids
        raise UserError(
            f"the image processor of {source.name} gives pixels that are not finite (NaN or infinity); correct "
            "image_mean, image_std and rescale_factor in preprocessor_config.json"
        )
    return processor


# ---- timm


def load_timm(source: Source, device: str | None = None) -> Any:
    """Load a model of timm in evaluation mode by name, from a file (NAME@FILE), a folder or the Hub."""
    name = source.name.removeprefix(TIMM)
    torch_device = pick_device(device)
    try:
        import timm
    except ImportError as error:
        raise UserError(f"timm:{name} needs timm; install it with pip install timm") from error
    if source.stored.get("model_type") == WRAPPER:
        return _load_from_wrapper(source).to(torch_device)
    # A name of the Hub as timm writes it: hf-hub:owner/name or hf_hub:owner/name@revision.
    hub_name = re.fullmatch(r"hf[-_]hub:(.+?)(?:@(.+))?", name, re.IGNORECASE)
    folder = source.path if hub_name is None else download_model(hub_name[1], hub_name[2])
    try:
        if folder is not None:
            model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True)
        elif "@" in name:
            model = _load_from_file(*name.split("@", 1))
        else:
            model = timm.create_model(name, pretrained=True)
    except Exception as error:  # unknown names, missing weights and lost connections raise different errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"timm:{name} cannot be loaded ({reason:.200}); choose a name from timm.list_models(pretrained=True)"
        ) from error
    refuse_other_channels(model, source.name)
    model.problem_type = source.stored.get("problem_type")
    return model.eval().to(torch_device)


def _load_from_wrapper(source: Source) -> Any:
    """Return the timm model that a checkpoint of transformers' TimmWrapper contains, with its class names."""
    is_classifier = "ForImageClassification" in get_first_class_name(source.stored.get("architectures"))
    head = "ForImageClassification" if is_classifier else ""
    with quiet_transformers(), explain_load_errors(source.name):
        model = load_weights(source, getattr(transformers, f"AutoModel{head}"), head).timm_model.float()
        config = convert_wrapper_config(source.stored)
        names = {name: source.stored[name] for name in ("label_names", "label_descriptions") if name in source.stored}
        classes = {"num_classes": model.num_classes, **names}  # 0 for a bare model
        model.pretrained_cfg = {**model.pretrained_cfg, **config["pretrained_cfg"], **classes}
    model.problem_type = source.stored.get("problem_type")
    return model.eval()


def _load_from_file(architecture: str, file: str) -> nn.Module:
    """Load the weights of a file into an architecture of timm with as many classes as the file's head."""
    import timm
    from timm.models import get_pretrained_cfg, load_state_dict

    path = Path(file).expanduser()
    config = get_pretrained_cfg(architecture)
    if not path.is_file():
        raise UserError(f"the file {file} does not exist; check its path")
    check_archive(path)
    weights = load_state_dict(str(path))
    classifier = config.classifier if config else None
    head = weights.get(f"{classifier if isinstance(classifier, str) else (classifier or [''])[0]}.weight")
    return timm.create_model(architecture, checkpoint_path=str(path), num_classes=0 if head is None else len(head))


def get_timm_label_names(model: nn.Module) -> list[list[str]]:
    """Return all known sets of class names of a timm model, in the order of its logits.

    timm has the classes of ImageNet (1,000 and larger sets) as WordNet numbers and as words.
    """
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    config = getattr(model, "pretrained_cfg", None) or {}
    stored_names = config.get("label_names")
    if isinstance(stored_names, list | tuple) and len(stored_names) == model.num_classes:
        names = [str(name) for name in stored_names]
        words: Any = config.get("label_descriptions")
        has_words = isinstance(words, dict) and set(names) <= set(words)
        return [names, [str(words[name]) for name in names]] if has_words else [names]
    subset = infer_imagenet_subset(model)
    if subset is None:
        return []
    imagenet = ImageNetInfo(subset)
    return [list(imagenet.label_names()), cast("list[str]", imagenet.label_descriptions())]


# ---- ImageGPT


@final
class ImageGPTFeatures(nn.Module):
    """The lower half of an ImageGPT, which turns pixels into features.

    Features are the input of the middle block after its first layer norm, averaged over the tokens; these gave the best
    linear probes (Chen et al., Generative Pretraining from Pixels, 2020). The palette (`clusters`, [V, 3]: V colors) is
    part of the model, so that it takes pixels [B, 3, H, W] like other models. Choosing a color has no gradient.
    """

    clusters: torch.Tensor

    def __init__(self, model: Any, clusters: ArrayLike, size: tuple[int, int]) -> None:
        super().__init__()
        self.config = model.config
        if size[0] * size[1] > self.config.n_positions:
            raise UserError(
                f"the image processor makes {size[0]}x{size[1]} px, but this ImageGPT takes "
                f"{self.config.n_positions} pixels; set the size of its training in preprocessor_config.json"
            )
        # A shallow copy, so that the caller's model keeps all its layers.
        body = copy.copy(model if hasattr(model, "h") else model.transformer)
        body._modules = dict(body._modules)
        middle = len(body.h) // 2
        body.ln_f = body.h[middle].ln_1
        body.h = body.h[:middle]
        self.body = body
        self.register_buffer("clusters", torch.as_tensor(clusters, dtype=torch.float32))

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of all tokens, [B, H*W, D] (hidden size D), of pixels [B, 3, H, W]."""
        from transformers.models.imagegpt.image_processing_imagegpt import color_quantize_torch

        pixels = pixel_values.float().permute(0, 2, 3, 1).reshape(-1, 3)
        tokens = color_quantize_torch(pixels, self.clusters.float()).reshape(len(pixel_values), -1)
        return self.body(input_ids=tokens, use_cache=False).last_hidden_state

    def forward_head(self, hidden_states: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """Average over the tokens, [B, D]; timm's models have methods of these names."""
        return hidden_states.mean(dim=1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return features, [B, D]; there is no head."""
        return self.forward_head(self.forward_features(pixel_values))


def wrap_image_gpt(model: Any, processor: Any) -> tuple[nn.Module, Callable[[Sequence[Image.Image]], torch.Tensor]]:
    """Return an `ImageGPTFeatures` in place of an ImageGPT, and the function that prepares its pixels."""

    def prepare(images: Sequence[Image.Image]) -> torch.Tensor:
        return processor(images=list(images), do_color_quantize=False, return_tensors="pt")["pixel_values"]

    size = (int(processor.size["height"]), int(processor.size["width"]))
    return ImageGPTFeatures(model, processor.clusters, size).to(next(model.parameters()).device), prepare
