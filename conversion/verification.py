"""A converted model beside recorded results of the original code, stage by stage.

The recording is an .npz file: `images` [B, H, W, C] float32 in the model's input range, and any of the stages of
`stage_names` as float32 results of the original. Endings say more: `_f64` the same computed in float64, `_0` the first
image only, `_c8` the first 8 channels only. Further sets of images of other sizes are named `images_<set>`, their
results `logits_<set>` and so on; `posemb_in` and `posemb_out_<set>` are position tables before and after resampling.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_vit.conversion.origins.origin import Pair, size_text
from hf_vit.conversion.planning import Plan
from hf_vit.conversion.readers import NpzReader
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_base import HfBaseConfig
from hf_vit.models.modeling_hf_vit import patch_token_slice
from hf_vit.models.positions_hf_vit import resample_position_table

# Largest difference allowed. Rounding in float32 grows with the numbers (tokens reach 10 and more inside the network),
# so there it is relative to the largest recorded value where that exceeds 1; float64 has room to spare.
# A hybrid normalises kernels and features again and again: the original's own float32 and float64 are further apart.
_FLOAT32 = {"plain": 1e-5, "hybrid": 6e-5, "bit": 6e-5, "mixer": 1e-5}
TOLERANCE = {family: {torch.float32: limit, torch.float64: 1e-10} for family, limit in _FLOAT32.items()}
PRECISION = {torch.float32: "float32", torch.float64: "float64"}
Stages = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RecordedArray:
    """Name of an array, read: "encoded_f64_0" is stage "encoded", float64, first image."""

    array: str
    stage: str
    dtype: torch.dtype
    image_set: str
    first_image: bool
    channels: int | None


class Recording:
    """The recorded results of the original code."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise UserError(f"{path} is not a file; give the path of a recording (.npz)")
        with NpzReader(path) as reader:
            self.name = reader.path.name
            self.arrays = {
                key: reader.read_floats(key)
                for key, member in reader.members.items()
                if member.dtype.kind == "f" and key != "images_u8"
            }
        self.image_sets = {
            key.removeprefix("images").removeprefix("_"): value
            for key, value in self.arrays.items()
            if re.fullmatch(r"images(_\w+)?", key)
        }
        if not self.image_sets:
            raise UserError(f"{self.name} holds no 'images' [B, H, W, C] float array; nothing can be compared")
        for image_set, images in self.image_sets.items():
            if images.ndim != 4 or not images.numel():
                raise UserError(f"images {image_set!r} in {self.name} are {size_text(images.shape)}, not [B, H, W, C]")

    def of_stages(self, stages: Iterable[str]) -> tuple[list[RecordedArray], dict[str, str]]:
        """All arrays that belong to a stage, in the order of the stages; and the others with the reason."""
        order = {stage: place for place, stage in enumerate(stages)}
        arrays: list[RecordedArray] = []
        skipped: dict[str, str] = {}
        for array in self.arrays:
            if re.fullmatch(r"images(_\w+)?", array):
                continue
            recorded = self._read_name(array, order)
            if recorded is None:
                skipped[array] = "no stage of this model, or no images for it"
            else:
                arrays.append(recorded)
        sets = list(self.image_sets)
        arrays.sort(key=lambda one: (sets.index(one.image_set), order[one.stage], str(one.dtype)))
        return arrays, skipped

    def _read_name(self, array: str, stages: Mapping[str, int]) -> RecordedArray | None:
        sets = "|".join(re.escape(name) for name in self.image_sets if name)
        ending = rf"(?:_(?:f64|0|c\d+{'|' + sets if sets else ''}))*"
        # The longest stage name wins: "layer_0" is block 0, not the first image of "layer".
        for stage in sorted(stages, key=len, reverse=True):
            if not re.fullmatch(re.escape(stage) + ending, array):
                continue
            marks = array.removeprefix(stage).split("_")[1:]
            named = [mark for mark in marks if mark in self.image_sets]
            channels = [int(mark[1:]) for mark in marks if re.fullmatch(r"c\d+", mark)]
            image_set = named[0] if named else ""
            if image_set in self.image_sets or stage == "posemb_in":
                dtype = torch.float64 if "f64" in marks else torch.float32
                image_set = image_set if image_set in self.image_sets else next(iter(self.image_sets))
                return RecordedArray(array, stage, dtype, image_set, "0" in marks, channels[0] if channels else None)
        return None


@dataclass(frozen=True)
class ArrayCheck:
    """One recorded array beside the model's."""

    array: str
    stage: str
    precision: str
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


@dataclass
class Verification:
    """All checks in the order of the computation, and what could not be compared."""

    recording: str
    checks: list[ArrayCheck] = field(default_factory=list[ArrayCheck])
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def first_difference(self) -> ArrayCheck | None:
        return next((check for check in self.checks if not check.agrees), None)

    def largest(self, precision: str) -> ArrayCheck | None:
        """The comparison that comes nearest to its tolerance, or exceeds it most."""
        checks = [check for check in self.checks if check.precision == precision]
        return max(checks, key=lambda check: check.difference / check.tolerance, default=None)


def verify(
    recording: Recording,
    plan: Plan,
    models: Mapping[torch.dtype, Callable[[], torch.nn.Module]],
) -> Verification:
    """Run the original's images through the converted model, in the precision asked for; compare every recorded stage.

    Raises:
        UserError: nothing can be compared, or the images do not fit the model.
    """
    stages = stage_names(plan)
    arrays, skipped = recording.of_stages(stages)
    result = Verification(recording.name, skipped=skipped)
    for one in arrays:
        if reason := _reason_to_skip(recording, plan, one):
            result.skipped[one.array] = reason
    arrays = [one for one in arrays if one.array not in result.skipped]
    if not arrays:
        raise UserError(
            f"{recording.name} holds no results to compare with ("
            + (", ".join(dict.fromkeys(result.skipped.values())) or "it has images only")
            + "); a recording has 'images' and any of the arrays "
            + ", ".join(("embedding", "with_posemb", "layer_0", *stages[-4:]))
        )
    computed: dict[tuple[torch.dtype, str], dict[str, torch.Tensor]] = {}
    for dtype in dict.fromkeys(one.dtype for one in arrays):
        model = models[dtype]()
        for image_set in dict.fromkeys(one.image_set for one in arrays if one.dtype == dtype):
            images = recording.image_sets[image_set].to(dtype).permute(0, 3, 1, 2)
            computed[dtype, image_set] = run_stages(model, images, plan)
    for one in arrays:
        stages_of_set = computed[one.dtype, one.image_set]
        result.checks.append(_compare(recording, one, stages_of_set[one.stage], TOLERANCE[plan.family][one.dtype]))
    return result


def _reason_to_skip(recording: Recording, plan: Plan, one: RecordedArray) -> str | None:
    """Why an array cannot be compared: the head is new, or the model was resampled to answer for one size alone."""
    if plan.new_head and one.stage == "logits":
        return "the head is new"
    if plan.resample is None:
        return None
    height, width = recording.image_sets[one.image_set].shape[1:3]
    try:
        grid = plan.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error
    if one.stage == "posemb_in" or grid != plan.config.grid:
        return "of another image size than --resize-to"
    return None


def _compare(recording: Recording, one: RecordedArray, computed: torch.Tensor, tolerance: float) -> ArrayCheck:
    expected = recording.arrays[one.array]
    if one.first_image:
        computed = computed[:1]
    if one.channels is not None:
        computed = computed[..., : one.channels]
    if computed.shape != expected.shape:
        raise UserError(
            f"'{one.array}' in {recording.name} is {size_text(expected.shape)}, the converted model gives "
            f"{size_text(computed.shape)}: the recording belongs to another model"
        )
    if one.dtype == torch.float32:
        tolerance *= max(1.0, float(expected.abs().max()))
    difference = float((computed.double() - expected.double()).abs().max())
    return ArrayCheck(one.array, one.stage, PRECISION[one.dtype], difference, tolerance)


def stage_names(plan: Plan) -> list[str]:
    """The stages in the order of the computation."""
    if plan.family == "bit":
        return ["stem", *_resnet_stages(plan.config), "logits_2d", "pooled", "pre_logits", "logits"]
    if plan.family == "mixer":
        return ["embedding", *_mixer_stages(plan.config), "pooled", "pre_logits", "logits"]
    blocks = [f"layer_{i}{part}" for i in range(plan.config.num_hidden_layers) for part in ("_attn", "_mlp", "")]
    heads = ("encoded", "pooled", "pre_logits", "logits")
    tables = ("posemb_in", "posemb_out") if plan.config.position_embedding == "learned" else ()
    return [*tables, *_stem_stages(plan), "embedding", "with_posemb", *blocks, *heads]


def run_stages(model: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    """Return all stages of one forward pass over [B, C, H, W], with the axes of the original: channels last."""
    run = {"bit": _run_resnet, "mixer": _run_mixer}.get(plan.family, _run_transformer)
    body = model.base_model
    try:
        with torch.no_grad():
            return run(model, body, pixel_values, plan)
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error


def _blocks(config: HfBaseConfig, inside: str) -> dict[str, str]:
    """Stage -> module of a ResNet, for its stages of units."""
    return {f"block{i + 1}": f"{inside}.stages.{i}" for i in range(len(config.stage_depths))}


def _stem_stages(plan: Plan) -> dict[str, str]:
    """Stage -> module below the patch embeddings, for what precedes the patches of a hybrid; channels last too."""
    if plan.family == "plain":
        return {}
    return {"conv_root": "stem.root_conv", "gn_root": "stem.root_norm", **_blocks(plan.config, "stem")}


def _resnet_stages(config: HfBaseConfig) -> dict[str, str]:
    """Stage -> module, for what follows the root; the norm before the head comes with its ReLU still to follow."""
    return _blocks(config, "encoder") | ({"norm_pre_head": "encoder.norm"} if config.pre_activation else {})


def _mixer_stages(config: Any) -> dict[str, str]:
    """Stage -> module, after the patches."""
    return {f"layer_{i}": f"layers.{i}" for i in range(config.num_hidden_layers)} | {"encoded": "layernorm"}


def _run_transformer(model: Any, body: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    embeddings = body.embeddings
    watched: dict[str, Any] = {"embedding": embeddings.patch_embeddings.projection, "with_posemb": embeddings}
    stem = _stem_stages(plan)
    watched |= {stage: embeddings.patch_embeddings.get_submodule(name) for stage, name in stem.items()}
    for i, layer in enumerate(body.layers):
        watched |= {f"layer_{i}_attn": layer.attention, f"layer_{i}_mlp": layer.mlp, f"layer_{i}": layer}
    with _watching(watched) as stages:
        output = body(pixel_values)
    for stage in ("embedding", *stem):
        stages[stage] = stages[stage].permute(0, 2, 3, 1)
    if not body.config.position_on_class_token:  # that original attaches the class token later
        stages["with_posemb"] = stages["with_posemb"][:, patch_token_slice(body.config)]
    stages["encoded"], stages["pre_logits"] = output.last_hidden_state, output.pooler_output
    stages["pooled"] = body.pooler.pool(output.last_hidden_state)
    stages["logits"] = _logits(model, output, plan)
    if body.config.position_embedding == "learned":
        h, w = stages["embedding"].shape[1:3]
        stages |= _tables(body, (h, w))
    return stages


def _run_resnet(model: Any, body: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    watched = {stage: body.get_submodule(name) for stage, name in _resnet_stages(body.config).items()}
    with _watching(watched) as stages, _watching({"stem": body.encoder.stages[0]}, inputs=True) as roots:
        output = body(pixel_values)
    stages = {stage: maps.permute(0, 2, 3, 1) for stage, maps in (roots | stages).items()}
    grid = body.config.grid_of(*pixel_values.shape[2:])
    head: Callable[[torch.Tensor], torch.Tensor] = model.classifier if plan.has_head else lambda features: features
    stages["logits_2d"] = head(output.last_hidden_state).unflatten(1, grid)
    stages["pooled"] = stages["pre_logits"] = output.pooler_output
    return stages | {"logits": head(output.pooler_output)}


def _run_mixer(model: Any, body: Any, pixel_values: torch.Tensor, plan: Plan) -> Stages:
    watched = {stage: body.get_submodule(name) for stage, name in _mixer_stages(body.config).items()}
    with _watching({"embedding": body.embeddings.patch_embeddings.projection, **watched}) as stages:
        output = body(pixel_values)
    stages["embedding"] = stages["embedding"].permute(0, 2, 3, 1)
    stages["pooled"] = stages["pre_logits"] = output.pooler_output
    return stages | {"logits": model.classifier(output.pooler_output) if plan.has_head else output.pooler_output}


@contextmanager
def _watching(modules: Mapping[str, torch.nn.Module], inputs: bool = False) -> Generator[Stages]:
    """Keeps what the modules give, or get, in the forward passes within."""
    stages: Stages = {}

    def keep(stage: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
            output = given if inputs else output
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "hidden_states", output)
            stages[stage] = output.clone()  # what follows may write into it

        return hook

    handles = [module.register_forward_hook(keep(stage)) for stage, module in modules.items()]
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


def _logits(model: Any, output: Any, plan: Plan) -> torch.Tensor:
    """The head's answer, or what a head would see; of two heads their mean, as the classifier gives it."""
    if not plan.has_head:
        return output.pooler_output
    logits = model.classifier(output.pooler_output)
    if not plan.config.has_distillation_head:
        return logits
    return (logits + model.distillation_classifier(output.last_hidden_state[:, 1])) / 2


def _tables(body: Any, grid: Pair) -> Stages:
    """The position table as stored, and as the forward pass used it."""
    stored = body.embeddings.position_embeddings.detach()
    special = body.embeddings.num_special_rows
    return {"posemb_in": stored, "posemb_out": resample_position_table(stored, body.config.grid, grid, special)}
