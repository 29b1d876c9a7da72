"""timm's MLP-Mixers (`mixer_*`): the original's numbers but for the exact GELU."""

import re
from collections.abc import Mapping
from typing import Any

from hf_vit.conversion.origins.beside import checked
from hf_vit.conversion.origins.google import mixer
from hf_vit.conversion.origins.origin import Declared, Dims, KeyNames, Origin
from hf_vit.conversion.origins.pytorch.timm_vit import ASSUMED, TimmConfig, declared_by
from hf_vit.conversion.origins.transformers.transformers_clip import dense
from hf_vit.conversion.origins.wrapped import prefixes, unwrapped
from hf_vit.conversion.readers.checkpoint import Companions, Shape
from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError

_STEM = "stem.proj.weight"
_BLOCK, _TARGET = "blocks.{i}", "layers.{i}"
_ARCHITECTURE = re.compile(r"mixer_[a-z](16|32)_\w+")
# Arguments that names and shapes tell as well, or that only training notices.
_NEEDLESS = frozenset(
    (
        *("img_size", "patch_size", "in_chans", "num_classes", "num_blocks", "embed_dim", "mlp_ratio", "global_pool"),
        *("drop_rate", "proj_drop_rate", "drop_path_rate", "nlhb", "stem_norm"),
    )
)

RULES = (
    *dense("stem.proj", ("D", "C", "P", "Q"), "embeddings.patch_embeddings.projection"),
    *dense(f"{_BLOCK}.norm1", ("D",), f"{_TARGET}.layernorm_before"),
    *dense(f"{_BLOCK}.mlp_tokens.fc1", ("S", "T"), f"{_TARGET}.token_mlp.fc1"),
    *dense(f"{_BLOCK}.mlp_tokens.fc2", ("T", "S"), f"{_TARGET}.token_mlp.fc2"),
    *dense(f"{_BLOCK}.norm2", ("D",), f"{_TARGET}.layernorm_after"),
    *dense(f"{_BLOCK}.mlp_channels.fc1", ("M", "D"), f"{_TARGET}.mlp.fc1"),
    *dense(f"{_BLOCK}.mlp_channels.fc2", ("D", "M"), f"{_TARGET}.mlp.fc2"),
    *dense("norm", ("D",), "layernorm"),
    *dense("head", ("L", "D"), "classifier", "head"),
)


def recognises(shapes: Mapping[str, Shape]) -> bool:
    return bool(prefixes(shapes, _STEM)) and any(".mlp_tokens." in key for key in shapes)


def names(shapes: Mapping[str, Shape]) -> KeyNames:
    return unwrapped(shapes, _STEM, {})


def configure(
    dims: Dims, parts: frozenset[str], shapes: Mapping[str, Shape], image_size: Pair | None
) -> dict[str, Any]:
    """Fields of `HfMixerConfig`."""
    return mixer.configure(dims, parts, shapes, image_size) | {"hidden_act": "gelu"}


def declared(companions: Companions, shapes: Mapping[str, Shape]) -> Declared:
    """What timm's config.json says of architecture, arguments and preprocessing.

    Raises:
        UserError: it is of another library, or asks for what no model here does.
    """
    if companions.config is None:
        return Declared()
    beside = checked(TimmConfig, companions.config, "config.json")
    architecture, arguments = (beside.architecture or "").partition(".")[0], beside.model_args or {}
    if not _ARCHITECTURE.fullmatch(architecture):
        raise UserError(f"timm's architecture '{architecture:.80}' is none of mixer_*, whose keys lie beside it")
    if unknown := sorted(set(arguments) - _NEEDLESS):
        raise UserError(f"config.json gives timm's argument {unknown[0]!r:.80}, which no MLP-Mixer here has")
    pooling = arguments.get("global_pool") or beside.global_pool or "avg"
    if pooling != "avg":
        raise UserError(f"config.json gives global_pool={pooling!r:.80}; the MLP-Mixers here take the mean")
    return declared_by(beside, companions.config, {})


ORIGIN = Origin(
    name="timm_mixer",
    title="timm's MLP-Mixers (mixer_*), .safetensors or .pth",
    legend=mixer.LEGEND,
    rules=RULES,
    block_pattern=r"blocks\.(0|[1-9]\d*)\.",
    without={},
    ignored={},
    recognises=recognises,
    names=names,
    configure=configure,
    family="mixer",
    declared=declared,
    assumed={name: ASSUMED[name] for name in ("hidden_act", "processor")},
    package="timm",
    notes=("Becomes an `HfMixerForImageClassification` with timm's exact GELU, unlike Google's tanh.",),
)
