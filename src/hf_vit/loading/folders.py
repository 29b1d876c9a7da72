"""Checkpoints of transformers and of this package by folder or Hub id, with errors a user can act on."""

import copy
import importlib.util
import json
import logging
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, final

import torch
from torch import nn

from hf_vit.conversion.fetch.addresses import TIMM
from hf_vit.environment import pick_device
from hf_vit.errors import UserError, first_line
from hf_vit.families import refuse_own_class
from hf_vit.loading.outputs import TASKS
from hf_vit.repositories.reading import CONFIG, WEIGHTS, check_folder, loading, model_folder, read_object

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel


WORK_FOLDER = "checkpoints"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint folder is named after; -1 for other folders."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints_in(work: Path) -> list[Path]:
    """Checkpoint folders, complete or not, by step."""
    return sorted((path for path in work.glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0), key=step_of)


class Library(NamedTuple):
    """What runs a checkpoint.

    Attributes:
        name: None where nothing here does.
        takes_pixels: whether what it makes of the checkpoint is a model of images alone; a CLIP of transformers is not.
    """

    name: Literal["timm", "transformers"] | None
    takes_pixels: bool


# Where heads stand that have no bare model: transformers' UperNet, and this package's.
_DENSE_MAPPINGS = (
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
)
_NONE, _TRANSFORMERS = Library(None, False), Library("transformers", True)


def library_of(source: str, config: dict[str, Any]) -> Library:
    """The library for a folder, file, address, Hub id or "timm:NAME" with this config.json ({} without one)."""
    if source.startswith(TIMM) or is_timm_config(config):
        return Library("timm", True) if importlib.util.find_spec("timm") else _NONE
    if "://" in source or Path(source).expanduser().is_file():
        return _NONE
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str):
        return _TRANSFORMERS  # it says what is wrong
    if kind not in CONFIG_MAPPING:
        return _NONE
    mappings: list[Any] = [MODEL_MAPPING, *(getattr(transformers, name) for name in _DENSE_MAPPINGS)]
    classes = (mapping.get(CONFIG_MAPPING[kind], None) for mapping in mappings)
    first = next((each for each in classes if each is not None), None)
    return Library("transformers", getattr(first, "main_input_name", None) == "pixel_values")


def is_timm_config(config: dict[str, Any]) -> bool:
    """Whether a config.json is timm's."""
    return "architecture" in config and config.get("model_type") in (None, "timm_wrapper")


def config_in(folder: Path) -> dict[str, Any]:
    """config.json of a folder; {} where there is none that can be read."""
    try:
        config: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def load_transformers(
    source: str | Path, device: str | None = None, *, as_classifier: bool = False
) -> "tuple[PreTrainedModel, Any, Path | None]":
    """Load an hf_vit or transformers vision model from a folder or the Hub.

    Code that comes with a checkpoint is never run. The weights keep the dtype they are stored in. A checkpoint of an
    image classifier and one of segmentation or detection come with their heads, any other as the bare model.

    Args:
        source: a folder with config.json and weights, or a Hub id.
        device: a torch device string; by default CUDA where there is one, else the CPU.
        as_classifier: refuse what is no trained image classifier.

    Returns:
        The model in evaluation mode, its image processor, and its folder (None for a model of the Hub).

    Raises:
        UserError: the folder, the Hub id or the device does not exist, or the checkpoint is incomplete or damaged.
    """
    import transformers
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    place = pick_device(device)
    location, folder = _locate(str(source))
    with _quiet(), loading(str(source)):
        config = _read_config(location, str(source))
        named = ", ".join(getattr(config, "architectures", None) or []) or "no class named"
        is_known = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if as_classifier and not is_known:
            raise UserError(
                f"{source} holds a {config.model_type} model ({named}), which is not an image classifier; give one, "
                "or fine-tune it (hf-vit finetune)"
            )
        first = named.partition(",")[0]
        with_head = as_classifier or (is_known and "ForImageClassification" in first)
        ending = "ForImageClassification" if with_head else next((each for each in TASKS if first.endswith(each)), "")
        model = _load_model(location, str(source), getattr(transformers, f"AutoModel{ending}"), ending)
        processor = _load_processor(location, str(source))
    # transformers decorates `to` beyond what its types can tell.
    cast(Any, model).to(place)
    return model.eval(), processor, folder


def stored_config(source: str) -> dict[str, Any]:
    """config.json of a folder or a repository of the Hub; {} of anything else.

    Raises:
        UserError: it looks like a Hub id, and there is no such model.
    """
    path = Path(source).expanduser()
    if path.exists() or "://" in source or source.startswith(TIMM):
        return config_in(path)
    return config_in(_on_hub(source))


def _on_hub(source: str) -> Path:
    """What the cache holds of a model on the Hub."""
    try:
        return model_folder(source)
    except UserError as error:
        raise UserError(f"there is no folder {source}, and as a model of the Hub: {error}") from error


def _locate(source: str) -> tuple[Path, Path | None]:
    """Where to load from, and the local folder if it is one."""
    path = Path(source).expanduser()
    if path.is_dir():
        _require_model(path, str(path))
        return path, path
    if path.exists():
        raise UserError(f"{source} is a file; give the folder that holds config.json and the weights")
    location = _on_hub(source)
    _require_model(location, source)
    return location, None


def _require_model(folder: Path, name: str) -> None:
    """Config and weights, which name no other place."""
    if not (folder / CONFIG).is_file():
        inside = sorted(str(config.parent) for config in folder.glob("*/config.json"))
        hint = f"did you mean {inside[-1]}?" if inside else "give the folder of a saved model"
        raise UserError(f"{name} holds no model: there is no config.json in it; {hint}")
    check_folder(folder, name)
    refuse_own_class(read_object(folder / CONFIG, name), name)
    if not any((folder / f"{weights}{index}").is_file() for weights in WEIGHTS for index in ("", ".index.json")):
        raise UserError(
            f"{name} holds no weights: model.safetensors is not in it; copy it there or save the model again"
        )


def _read_config(location: Path, source: str) -> "PreTrainedConfig":
    """A vision model's config."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} cannot be read as a model: {first_line(error)}") from error
    channels = getattr(config, "num_channels", 3)
    if channels != 3:
        raise UserError(
            f"{source} takes images with num_channels={channels}; only models for RGB images (3) are supported"
        )
    return config


def _load_model(location: Path, source: str, auto_class: Any, head: str) -> "PreTrainedModel":
    try:
        loaded = auto_class.from_pretrained(location, output_loading_info=True, trust_remote_code=False)
    except RuntimeError as error:
        why = "their shapes differ" if "mismatch" in str(error) else first_line(error)
        raise UserError(f"the weights of {source} do not fit its config.json: {why}; save the model again") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{source} cannot be loaded: {first_line(error)}; save the model again") from error
    model, report = loaded
    _refuse_missing(source, sorted(report["missing_keys"]), head)
    return model


def _refuse_missing(source: str, missing: list[str], head: str) -> None:
    """A bare model may lack the pooler, which checkpoints of other heads do not hold."""
    if not head:
        missing = [name for name in missing if "pooler" not in name]
    if not missing:
        return
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if head == "ForImageClassification":
        raise UserError(
            f"{source} is not a trained image classifier: its weights lack {shown}; "
            "fine-tune it first (hf-vit finetune), or save it with its classification head"
        )
    raise UserError(f"the weights of {source} are incomplete: they lack {shown}; save the model again")


def _load_processor(location: Path, source: str) -> "BaseImageProcessor":
    """The image processor, which an image has been tried on."""
    from PIL import Image
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(location, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source} has no readable image processor (preprocessor_config.json); save one with "
            "ViTImageProcessor(size=...).save_pretrained(folder)"
        ) from error
    made = processor(images=Image.new("RGB", (64, 64)), return_tensors="pt")
    if "pixel_values" in made and not bool(made["pixel_values"].isfinite().all()):  # ImageGPT's makes input_ids
        raise UserError(
            f"the image processor of {source} makes pixels that are not finite (NaN or infinity); see image_mean, "
            "image_std and rescale_factor in preprocessor_config.json"
        )
    return processor


@contextmanager
def _quiet() -> Generator[None]:
    """Silence transformers' load report and bars: what matters of them is raised as an error here."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@final
class ImageGPTFeatures(nn.Module):
    """The lower half of an ImageGPT: pixels -> colour tokens -> the middle layer, averaged over the tokens.

    The middle block's first layer norm ends it (Chen et al., Generative Pretraining from Pixels, 2020: the features of
    linear probes are layer-normed inputs of a block, averaged over the sequence; the best lie in the middle).

    The palette is part of the model, so that it takes pixels [B, 3, H, W] like any other. Choosing a colour has no
    gradient.

    Args:
        model: transformers' ImageGPT, bare or with a head.
        clusters: the palette [V, 3], colours as the processor scales them.
        size: (H, W) px of the images.

    Raises:
        UserError: the model has no place for so many pixels.
    """

    clusters: torch.Tensor

    def __init__(self, model: Any, clusters: "ArrayLike", size: tuple[int, int]) -> None:
        super().__init__()
        self.config = model.config
        if size[0] * size[1] > self.config.n_positions:
            raise UserError(
                f"the image processor makes {size[0]}x{size[1]} px, a token each, and the ImageGPT takes "
                f"{self.config.n_positions}; give the processor the size it was trained with"
            )
        # A shallow copy: the model that was given keeps all its layers.
        body = copy.copy(model if hasattr(model, "h") else model.transformer)
        body._modules = dict(body._modules)
        middle = len(body.h) // 2
        body.ln_f, body.h = body.h[middle].ln_1, body.h[:middle]
        self.body = body
        self.register_buffer("clusters", torch.as_tensor(clusters, dtype=torch.float32))

    def forward_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, H*W, D] of pixels [B, 3, H, W]."""
        from transformers.models.imagegpt.image_processing_imagegpt import color_quantize_torch

        pixels = pixel_values.float().permute(0, 2, 3, 1).reshape(-1, 3)
        tokens = color_quantize_torch(pixels, self.clusters.float()).reshape(len(pixel_values), -1)
        return self.body(input_ids=tokens, use_cache=False).last_hidden_state

    def forward_head(self, hidden_states: torch.Tensor, pre_logits: bool = True) -> torch.Tensor:
        """[B, D]: the mean over the tokens; the names of these two methods are timm's."""
        return hidden_states.mean(dim=1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Features [B, D]: there is no head."""
        return self.forward_head(self.forward_features(pixel_values))
