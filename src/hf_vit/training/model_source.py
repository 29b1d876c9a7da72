"""Where a training starts from: a named variant with fresh weights, or a checkpoint whose head is replaced."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    PreTrainedConfig,
    PreTrainedModel,
    ViTImageProcessor,
)
from transformers.utils import logging as transformers_logging

from hf_vit.errors import UserError, first_line, strict_reason
from hf_vit.families import FAMILIES, family_of
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig
from hf_vit.variants import variant_config

_VARIANT_LIKE = re.compile(r"[^/\\.]+/\d+")
_HEADS = ("classifier", "distillation_classifier")
_POOLER = ("vit.pooler.", "pooler.")  # which checkpoints of patch prediction do not have


@dataclass(frozen=True)
class ModelSource:
    """What the name after `--model` stands for.

    Attributes:
        name: as given.
        config: of the variant or the checkpoint, before the data's classes are known.
        checkpoint: folder or Hub id to read weights from; None for a variant.
    """

    name: str
    config: HfViTBaseConfig
    checkpoint: str | None


def find_model(name: str | HfViTBaseConfig) -> ModelSource:
    """Find out what a name stands for: an existing folder first, then a variant ("S/16"), then a Hub id.

    A configuration stands for fresh weights of its own.

    Raises:
        UserError: none of the three, or a checkpoint of another architecture.
    """
    if not isinstance(name, str):
        family = type(name).__name__.removeprefix("Hf").removesuffix("Config")
        return ModelSource(f"{family} of {name.num_hidden_layers} layers, {name.hidden_size} wide", name, None)
    path = Path(name).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise UserError(f"{name} holds no model (no config.json); give the folder of a saved model, or a variant")
        return ModelSource(name, _stored_config(str(path), name), str(path))
    if _VARIANT_LIKE.fullmatch(name) or "/" not in name:
        return ModelSource(name, variant_config(name), None)
    return ModelSource(name, _stored_config(name, name), name)


def build_classifier(
    source: ModelSource,
    label_names: Sequence[str],
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    new_head: bool = False,
    head_bias: float = 0.0,
    **fields: Any,
) -> PreTrainedModel:
    """A classifier in float32: of a checkpoint for these very classes with its head, else with a new zero head.

    With a new head a representation layer before the old one is dropped (arXiv 2010.11929, section 3.2). Learned
    positions are resampled where `image_size` differs from the checkpoint's.

    Args:
        source: from `find_model`.
        label_names: the classes, in the order of their numbers.
        image_size: (height, width) in px; None keeps the source's.
        dropout, drop_path: rates; None keeps the source's.
        new_head: for the checkpoint's own classes, too.
        head_bias: first value of a new head's bias.
        **fields: of the configuration; they replace the source's.

    Raises:
        UserError: a value does not fit the model, or the checkpoint's weights do not.
    """
    rows = None if new_head else rows_of_head(source, label_names)
    changes: dict[str, Any] = {
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: index for index, name in enumerate(label_names)},
        "problem_type": None,
        **({"representation_size": None} if rows is None else {}),
        **fields,
        **_rates(dropout, drop_path),
    }
    new = _HEADS if rows is None else () if source.config.has_distillation_head else _HEADS[1:]
    model = _build(source, AutoModelForImageClassification, changes, image_size, new=new)
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            _start_head(head, None if name in new else rows, head_bias)
    return model


def rows_of_head(source: ModelSource, label_names: Sequence[str]) -> list[int] | None:
    """For every one of these classes its row in the head of the checkpoint; None where that is for other classes."""
    config = source.config
    family = family_of(config.model_type)
    is_classifier = family is not None and family.door_of((config.architectures or [""])[0]) == "classification"
    if source.checkpoint is None or not is_classifier:
        return None
    names = [str(config.id2label[row]) for row in sorted(config.id2label)]
    return [names.index(name) for name in label_names] if sorted(names) == sorted(label_names) else None


def _start_head(head: nn.Linear, rows: list[int] | None, bias: float) -> None:
    with torch.no_grad():
        if rows is None:
            nn.init.zeros_(head.weight)
            nn.init.constant_(head.bias, bias)
        else:
            head.weight.copy_(head.weight[rows])
            head.bias.copy_(head.bias[rows])


def build_predictor(
    source: ModelSource,
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """A model with a new patch prediction head, in float32; `fields` of its configuration replace the source's.

    Raises:
        UserError: a value does not fit the model, or the checkpoint's weights do not.
    """
    changes = fields | _rates(dropout, drop_path)
    new = ("prediction_head.", "vit.embeddings.mask_token")
    return _build(source, AutoModelForMaskedImageModeling, changes, image_size, new=new)


def build_encoder(
    source: ModelSource,
    *,
    image_size: tuple[int, int] | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """A bare model with its pooling layer, in float32; `fields` of its configuration replace the source's.

    Raises:
        UserError: a value does not fit the model, or the checkpoint's weights do not.
    """
    return _build(source, AutoModel, fields | _rates(dropout, drop_path), image_size, new=())


def _rates(dropout: float | None, drop_path: float | None) -> dict[str, float]:
    given = {"hidden_dropout_prob": dropout, "drop_path_rate": drop_path}
    return {field: value for field, value in given.items() if value is not None}


def _build(
    source: ModelSource,
    auto_class: Any,
    changes: dict[str, Any],
    image_size: tuple[int, int] | None,
    new: tuple[str, ...],
) -> PreTrainedModel:
    """A variant with fresh weights or a checkpoint with its own, but for those whose names begin as in `new`."""
    side = None if image_size is None else image_size[0] if image_size[0] == image_size[1] else image_size
    try:
        if source.checkpoint is None:
            sizes = {} if side is None else {"image_size": side}
            config = type(source.config).from_dict({**source.config.to_dict(), **changes, **sizes})
            return auto_class.from_config(config, dtype=torch.float32)
        config = type(source.config).from_dict({**source.config.to_dict(), **changes})
        return _load(source, auto_class, config, side, new)
    except StrictDataclassError as error:
        raise UserError(f"{source.name}: {_plain(error)}") from error
    except UserError:
        raise
    except ValueError as error:  # a head that the configuration cannot have
        raise UserError(f"{source.name}: {error}") from error


def build_processor(source: ModelSource, config: PreTrainedConfig) -> ViTImageProcessor:
    """The checkpoint's image processor at the model's size; the original's (pixels in [-1, 1]) for a variant."""
    from hf_vit.data import make_processor

    if source.checkpoint is None:
        return make_processor(config)
    try:
        stored = ViTImageProcessor.get_image_processor_dict(source.checkpoint)[0]
    except OSError:
        return make_processor(config)
    known = {name: stored[name] for name in ("image_mean", "image_std", "resample") if stored.get(name) is not None}
    return make_processor(config, **known)


def _stored_config(location: str, name: str) -> HfViTBaseConfig:
    try:
        stored: dict[str, Any] = PreTrainedConfig.get_config_dict(location)[0]
    except (OSError, ValueError, HFValidationError, HfHubHTTPError) as error:
        raise UserError(
            f"'{name}' is no folder, and no such model can be read from the Hub ({_plain(error)}); check the name, or "
            "start from a variant such as S/16"
        ) from error
    kind = stored.get("model_type")
    family = family_of(kind)
    if family is None or not family.is_vit:
        ours = sorted(each.model_type for each in FAMILIES.values() if each.is_vit)
        raise UserError(
            f"{name} is a checkpoint of another architecture ('{kind or 'unknown'}'); a training starts from "
            f"{', '.join(ours)}: convert it first (hf-vit convert), or start from a variant such as S/16"
        )
    try:
        return cast(HfViTBaseConfig, family.config_class.from_dict(stored))
    except (StrictDataclassError, TypeError) as error:
        raise UserError(f"the config.json of {name} is not usable: {_plain(error)}") from error


def _load(
    source: ModelSource,
    auto_class: Any,
    config: HfViTBaseConfig,
    image_size: int | tuple[int, int] | None,
    new: tuple[str, ...],
) -> PreTrainedModel:
    sizes = {} if image_size is None else {"image_size": image_size}
    verbosity = transformers_logging.get_verbosity()
    # Its report would tell of the head that is replaced on purpose; what else does not fit is raised below.
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        model, report = auto_class.from_pretrained(
            str(source.checkpoint),
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **sizes,
        )
    except (OSError, RuntimeError, SafetensorError, EOFError, json.JSONDecodeError) as error:
        raise UserError(f"the weights of {source.name} cannot be loaded: {_plain(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if "ForMaskedPatchPrediction" in ((source.config.architectures or [""])[0]):
        new = (*new, *_POOLER)
    mismatched = {key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]}
    wrong = sorted(key for key in {*report["missing_keys"], *mismatched} if not key.startswith(new))
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise UserError(f"the weights of {source.name} lack or do not fit {shown}; save the checkpoint again")
    return model


def _plain(error: BaseException) -> str:
    """The telling line of an error."""
    return strict_reason(error) if isinstance(error, StrictDataclassError) else first_line(error)
