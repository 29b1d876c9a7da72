"""Features of a frozen backbone, which `finetune --tune head --cache-features` computes once and keeps on disk.

    HF_ASSETS_CACHE/hf_vit/features/<key>/<first image>.safetensors

A file has the inputs of the heads for up to 1,024 images and appears when it is complete, so an interrupted computation
continues. The key is a hash of everything that determines the features: weights, configuration, image processor,
images in their order, precision, device and versions. Features differ from those of a training step in the last digits,
because products are summed in another order in batches of another size.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import PIL
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.utils.data import Dataset
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_vit.data.batches import TransformedImages
from hf_vit.data.transforms import Example, keeps_shapes, pad_to_patches
from hf_vit.environment import list_versions, pick_device
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import evaluation_mode, show_progress
from hf_vit.loading.model import load_model
from hf_vit.models.configuration_hf_vit import RATES
from hf_vit.models.modeling_hf_vit import get_class_token_index
from hf_vit.training.plan import Run
from hf_vit.training.processes import run_main_process_first
from hf_vit.writing import cache_folder, write_atomically

_IMAGES_PER_FILE, _BATCH = 1024, 64
_RANDOM_FIELDS = (*RATES, "rotary_shift", "rotary_jitter", "rotary_rescale")


def refuse_random_model(model: nn.Module) -> None:
    """Raise a UserError if the features of a model in training mode change from epoch to epoch."""
    values = {name: getattr(model.config, name, None) for name in _RANDOM_FIELDS}
    varying = [f"{name} {value:g}" for name, value in values.items() if value]
    if varying:
        raise UserError(
            f"--cache-features needs the same features in every epoch, but of this model {' and '.join(varying)} vary "
            "them; use --dropout 0 --drop-path 0 or another model, or leave --cache-features out"
        )


@final
class FeatureImages(Dataset[Example]):
    """The images of a split with the inputs of the heads in place of their pixels.

    Args:
        parts: tensors [n, D] of `_IMAGES_PER_FILE` images each; the last one may be smaller.
        labels: of all images.
    """

    def __init__(self, parts: Sequence[torch.Tensor], labels: Sequence[Any]) -> None:
        self.parts = parts
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        part, row = divmod(index, _IMAGES_PER_FILE)
        return {"pixel_values": self.parts[part][row], "label": self.labels[index], "mixable": False}


def load_features(run: Run, transforms: Mapping[str, Any]) -> list[FeatureImages]:
    """Return the features of a split for every transform, computed by the main process where files are missing.

    Args:
        run: a run of a classifier.
        transforms: split -> transform without random numbers.

    Raises:
        UserError: a file is damaged or holds other features.
    """
    with run_main_process_first(run.options.device, run.options.process_timeout):
        return [_load_split(run, split, transform) for split, transform in transforms.items()]


def _load_split(run: Run, split: str, transform: Any) -> FeatureImages:
    """Return the features of a split; compute those that the cache does not hold for this model, data and machine."""
    model: Any = run.model
    # Synthetic images of several sizes have one digest.
    images_seen = "\n".join(f"{image.digest} {image.height}x{image.width}" for image in run.data.seen[split])
    content = {
        "backbone": load_model((model.base_model, run.processor)).fingerprint,
        "attention": getattr(model.config, "_attn_implementation", None),
        "transform": [type(transform).__name__, run.processor.to_dict()],
        "images": hashlib.sha256(images_seen.encode()).hexdigest(),
        "precision": "bf16" if run.bf16 else "fp32",
        "device": pick_device(run.options.device).type,
        "versions": list_versions() | {"pillow": PIL.__version__},  # which decodes images
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    folder = cache_folder("features", key[:32])
    table = cast(Any, run.data.split(split))
    rows = [range(first, min(first + _IMAGES_PER_FILE, len(table))) for first in range(0, len(table), _IMAGES_PER_FILE)]
    files = [folder / f"{part.start:09d}.safetensors" for part in rows]
    transform.set_epoch(0)  # otherwise its keys, which change nothing, would draw from torch's generator
    images = TransformedImages(table, transform, cache_bytes=0)
    for path, part in zip(files, rows, strict=True):
        if not path.exists():
            values = _compute(run, images, part).contiguous()
            write_atomically(path, save({"features": values}, {"key": key, "sha256": _hash_tensor(values)}))
    features = [_read(path, key, len(part)) for path, part in zip(files, rows, strict=True)]
    return FeatureImages(features, table["label"][:])


def _compute(run: Run, images: TransformedImages, rows: range) -> torch.Tensor:
    """Return the inputs of the heads for some images, [n, D]: the pooled output, then any distillation token."""
    model: Any = run.model
    device = pick_device(run.options.device)
    features: list[torch.Tensor] = []
    model.to(device)
    # Tuples, because `show_progress` counts the last entry of each.
    batches = ((rows[first : first + _BATCH],) for first in range(0, len(rows), _BATCH))
    with evaluation_mode(model), torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=run.bf16):
        for (batch,) in show_progress(batches, len(rows), "computing features"):
            tensors = [example["pixel_values"] for example in images.__getitems__(batch)]
            patch = model.config.patch_stride if keeps_shapes(run.processor) else None
            batch_inputs = {"pixel_values": torch.stack(tensors)} if patch is None else pad_to_patches(tensors, patch)
            outputs = model.base_model(**{name: tensor.to(device) for name, tensor in batch_inputs.items()})
            inputs = [outputs.pooler_output]
            if getattr(model.config, "has_distillation_head", False):
                inputs.append(outputs.last_hidden_state[:, get_class_token_index(model.config) + 1])
            features.append(torch.cat(inputs, dim=1).cpu())
    return torch.cat(features)


def bypass_backbone(model: Any) -> None:
    """Let a classifier take the features of `load_features` in place of images, until `restore_backbone`."""
    config = model.config

    def forward(features: torch.Tensor, **unused: Any) -> BaseModelOutputWithPooling:
        pooled, distilled = features[:, : config.pooled_size], features[:, None, config.pooled_size :]
        states: Any = distilled.expand(-1, 2, -1)  # the head reads the last one alone
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=cast(Any, pooled))

    model.base_model.forward = forward


def restore_backbone(model: Any) -> None:
    """Undo `bypass_backbone`."""
    model.base_model.__dict__.pop("forward", None)


def _read(path: Path, key: str, count: int) -> torch.Tensor:
    """Read the features of `count` images; raise a UserError if they are damaged or belong to another key."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            features = file.get_tensor("features")
        is_right = metadata.get("key") == key and len(features) == count
        if is_right and metadata.get("sha256") == _hash_tensor(features):
            return features
        reason = "its content has changed" if is_right else "it holds other features"
    except (OSError, SafetensorError) as error:
        reason = str(error)
    raise UserError(f"the cached features {path} cannot be used ({reason}); delete {path.parent} and run again")


def _hash_tensor(features: torch.Tensor) -> str:
    return hashlib.sha256(features.contiguous().view(torch.uint8).numpy().data).hexdigest()
