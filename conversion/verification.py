"""A converted model beside recorded results of the original code, stage by stage.

The recording is an .npz file: `images` [B, H, W, C] float32 in the model's input range, and any of the stages of
`stage_modules` as float32 results of the original. Endings say more: `_f64` the same computed in float64, `_0` the
first image only, `_c8` the first 8 channels only. Further sets of images of other sizes are named `images_<set>`, their
results `logits_<set>` and so on; `posemb_in` and `posemb_out_<set>` are position tables before and after resampling.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_vit.conversion.origins.origin import size_text
from hf_vit.conversion.planning import Plan
from hf_vit.conversion.readers import NpzReader
from hf_vit.errors import UserError
from hf_vit.models.embeddings_hf_vit import resample_position_table
from hf_vit.models.modeling_hf_vit import patch_token_slice

# Largest difference allowed. Rounding in float32 grows with the numbers (tokens reach 10 and more inside the network),
# so there it is relative to the largest recorded value where that exceeds 1; float64 has room to spare.
# A hybrid normalizes kernels and features again and again: the original's own float32 and float64 are further apart.
_FLOAT32 = {"plain": 1e-5, "hybrid": 6e-5, "bit": 6e-5, "mixer": 1e-5}
TOLERANCE = {family: {torch.float32: limit, torch.float64: 1e-10} for family, limit in _FLOAT32.items()}
PRECISION = {torch.float32: "float32", torch.float64: "float64"}
_IMAGES = re.compile(r"images(?:_(\w+))?")


class RecordedArray(NamedTuple):
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
            kept = [key for key, member in reader.members.items() if member.dtype.kind == "f" and key != "images_u8"]
            arrays = {key: reader.read_floats(key) for key in kept}
        self.image_sets = {match[1] or "": arrays[key] for key in arrays if (match := _IMAGES.fullmatch(key))}
        self.arrays = {key: value for key, value in arrays.items() if not _IMAGES.fullmatch(key)}
        if not self.image_sets:
            raise UserError(f"{self.name} holds no 'images' [B, H, W, C] float array; nothing can be compared")
        for image_set, images in self.image_sets.items():
            if images.ndim != 4 or not images.numel():
                raise UserError(f"images {image_set!r} in {self.name} are {size_text(images.shape)}, not [B, H, W, C]")

    def of_stages(self, stages: Iterable[str]) -> tuple[list[RecordedArray], dict[str, str]]:
        """Return all arrays that belong to a stage, in the order of the stages; and the others with the reason."""
        order = {stage: place for place, stage in enumerate(stages)}
        read = {array: self._read_name(array, order) for array in self.arrays}
        skipped = {array: "no stage of this model, or no images for it" for array, one in read.items() if one is None}
        sets = list(self.image_sets)
        arrays = [one for one in read.values() if one is not None]
        arrays.sort(key=lambda one: (sets.index(one.image_set), order[one.stage], str(one.dtype)))
        return arrays, skipped

    def _read_name(self, array: str, stages: Iterable[str]) -> RecordedArray | None:
        sets = "|".join(re.escape(name) for name in self.image_sets if name)
        ending = rf"(?:_(?:f64|0|c\d+{'|' + sets if sets else ''}))*"
        # The longest stage name wins: "layer_0" is block 0, not the first image of "layer".
        for stage in sorted(stages, key=len, reverse=True):
            if not re.fullmatch(re.escape(stage) + ending, array):
                continue
            marks = array.removeprefix(stage).split("_")[1:]
            image_set = next((mark for mark in marks if mark in self.image_sets), "")
            channels = next((int(mark[1:]) for mark in marks if re.fullmatch(r"c\d+", mark)), None)
            if image_set in self.image_sets or stage == "posemb_in":
                dtype = torch.float64 if "f64" in marks else torch.float32
                image_set = image_set if image_set in self.image_sets else next(iter(self.image_sets))
                return RecordedArray(array, stage, dtype, image_set, "0" in marks, channels)
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

    def worst(self) -> list[ArrayCheck]:
        """Return for each precision the comparison that comes nearest to its tolerance, or exceeds it most."""
        checks = [[check for check in self.checks if check.precision == each] for each in PRECISION.values()]
        return [max(each, key=lambda check: check.difference / check.tolerance) for each in checks if each]


def verify(
    recording: Recording, plan: Plan, models: Mapping[torch.dtype, Callable[[], torch.nn.Module]]
) -> Verification:
    """Run the original's images through the converted model, in the precision asked for; compare every recorded stage.

    Raises:
        UserError: nothing can be compared, or the images do not fit the model.
    """
    stages = list(stage_modules(plan))
    arrays, skipped = recording.of_stages(stages)
    for one in arrays:
        if reason := _reason_to_skip(recording, plan, one):
            skipped[one.array] = reason
    result = Verification(recording.name, skipped=skipped)
    arrays = [one for one in arrays if one.array not in skipped]
    if not arrays:
        raise UserError(
            f"{recording.name} holds no results to compare with ("
            + (", ".join(dict.fromkeys(skipped.values())) or "it has images only")
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
        found = computed[one.dtype, one.image_set][one.stage]
        result.checks.append(_compare(recording, one, found, TOLERANCE[plan.family][one.dtype]))
    return result


def _reason_to_skip(recording: Recording, plan: Plan, one: RecordedArray) -> str | None:
    """Return why an array cannot be compared: the head is new, or the model was resampled to answer for one size."""
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


def stage_modules(plan: Plan) -> dict[str, str]:
    """Return the stages in the order of the computation, each with the module that gives it, or "" for none.

    A BiT's "stem" is what its first stage gets.
    """
    config: Any = plan.config
    family = plan.family
    end = dict.fromkeys(("pooled", "pre_logits", "logits"), "")
    patches = "embeddings.patch_embeddings"
    if family == "bit":
        last = {"norm_pre_head": "encoder.norm"} if config.pre_activation else {}
        return {"stem": "encoder.stages.0", **_units(config, "encoder"), **last, "logits_2d": ""} | end
    if family == "mixer":
        layers = {f"layer_{i}": f"layers.{i}" for i in range(config.num_hidden_layers)}
        return {"embedding": f"{patches}.projection", **layers, "encoded": "layernorm"} | end
    tables: dict[str, str] = {}
    if config.position_embedding == "learned":
        tables = dict.fromkeys(("posemb_in", "posemb_out"), "")
    stem: dict[str, str] = {}
    if family == "hybrid":
        root = {f"{old}_root": f"{patches}.stem.root_{new}" for old, new in {"conv": "conv", "gn": "norm"}.items()}
        stem = root | _units(config, f"{patches}.stem")
    blocks: dict[str, str] = {}
    for i in range(config.num_hidden_layers):
        blocks |= {f"layer_{i}_attn": f"layers.{i}.attention", f"layer_{i}_mlp": f"layers.{i}.mlp"}
        blocks[f"layer_{i}"] = f"layers.{i}"
    start = {"embedding": f"{patches}.projection", "with_posemb": "embeddings"}
    return tables | stem | start | blocks | {"encoded": ""} | end


def _units(config: Any, place: str) -> dict[str, str]:
    return {f"block{i + 1}": f"{place}.stages.{i}" for i in range(len(config.stage_depths))}


def run_stages(model: Any, pixel_values: torch.Tensor, plan: Plan) -> dict[str, torch.Tensor]:
    """Return all stages of one forward pass over [B, C, H, W], with the axes of the original: channels last."""
    body, config = model.base_model, model.base_model.config
    stages: dict[str, torch.Tensor] = {}

    def watch(stage: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            output = inputs if stage == "stem" else output
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "hidden_states", output).clone()  # what follows may write into it
            stages[stage] = output.permute(0, 2, 3, 1) if output.ndim == 4 else output

        return hook

    modules = {stage: body.get_submodule(name) for stage, name in stage_modules(plan).items() if name}
    handles = [module.register_forward_hook(watch(stage)) for stage, module in modules.items()]
    try:
        with torch.no_grad():
            output = body(pixel_values)
            head = model.classifier if plan.has_head else torch.nn.Identity()
            pooled, logits = output.pooler_output, head(output.pooler_output)
            if plan.family == "bit":
                stages["logits_2d"] = head(output.last_hidden_state).unflatten(
                    1, config.grid_of(*pixel_values.shape[2:])
                )
            elif plan.family != "mixer":
                stages["encoded"] = output.last_hidden_state
                pooled = body.pooler.pool(output.last_hidden_state)
                # big_vision attaches the class token later; its loader adds the row that older tables have for it.
                is_attached_later = plan.origin == "big_vision" or not config.position_on_class_token
                if is_attached_later:
                    stages["with_posemb"] = stages["with_posemb"][:, patch_token_slice(config)]
                if plan.has_head and config.has_distillation_head:  # of two heads the mean, as the classifier gives it
                    logits = (logits + model.distillation_classifier(output.last_hidden_state[:, 1])) / 2
                if config.position_embedding == "learned":
                    stored, rows = body.embeddings.position_embeddings.detach(), body.embeddings.num_special_rows
                    h, w = stages["embedding"].shape[1:3]
                    first = rows if is_attached_later else 0
                    stages["posemb_in"] = stored[:, first:]
                    stages["posemb_out"] = resample_position_table(stored, config.grid, (h, w), rows)[:, first:]
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return stages | {"pooled": pooled, "pre_logits": output.pooler_output, "logits": logits}
