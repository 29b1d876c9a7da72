"""Compare a converted model with recorded results of the original code, stage by stage.

A recording is an .npz file with `images` [B, H, W, C] float32 in the model's input range, and float32 results of the
original for any stages of `stage_modules`. Suffixes: `_f64` means computed in float64, `_0` the first image only, `_c8`
the first 8 channels only. Further sets of images, of other sizes, are named `images_<set>`, their results
`logits_<set>` and so on; `posemb_in` and `posemb_out_<set>` are position tables before and after resampling.
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

# Largest difference allowed. Rounding in float32 grows with the values (tokens reach 10 and more inside the network),
# so in float32 the difference is relative to the largest recorded value if that exceeds 1.
# A hybrid normalizes kernels and features many times, so even the original's float32 and float64 differ more.
_FLOAT32 = {"plain": 1e-5, "hybrid": 6e-5, "bit": 6e-5, "mixer": 1e-5}
TOLERANCE = {family: {torch.float32: limit, torch.float64: 1e-10} for family, limit in _FLOAT32.items()}
PRECISION = {torch.float32: "float32", torch.float64: "float64"}
_IMAGES = re.compile(r"images(?:_(\w+))?")


class RecordedArray(NamedTuple):
    """The parsed name of an array: "encoded_f64_0" is stage "encoded" in float64 for the first image."""

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
            dtypes = {key: member.dtype for key, member in reader.members.items() if key != "images_u8"}
            arrays = {key: reader.read_floats(key) for key, dtype in dtypes.items() if dtype.kind == "f"}
        self.image_sets = {match[1] or "": arrays[key] for key in arrays if (match := _IMAGES.fullmatch(key))}
        self.arrays = {key: value for key, value in arrays.items() if not _IMAGES.fullmatch(key)}
        if not self.image_sets:
            raise UserError(f"{self.name} has no float array 'images' [B, H, W, C] to compare; record the images too")
        for image_set, images in self.image_sets.items():
            if images.ndim != 4 or not images.numel():
                raise UserError(
                    f"images {image_set!r} in {self.name} have shape {size_text(images.shape)}; they must be "
                    "[B, H, W, C]"
                )

    def arrays_of_stages(self, stages: Iterable[str]) -> tuple[list[RecordedArray], dict[str, str]]:
        """Return the arrays of the model's stages in their order, and for every other array why it is skipped."""
        order = {stage: index for index, stage in enumerate(stages)}
        parsed_names = {array: self._parse_name(array, order) for array in self.arrays}
        reason = "no stage of this model, or no images for it"
        skipped = {array: reason for array, recorded in parsed_names.items() if recorded is None}
        image_sets = list(self.image_sets)

        def position(recorded: RecordedArray) -> tuple[int, int, str]:
            return image_sets.index(recorded.image_set), order[recorded.stage], str(recorded.dtype)

        return sorted(filter(None, parsed_names.values()), key=position), skipped

    def _parse_name(self, array: str, stages: Iterable[str]) -> RecordedArray | None:
        """Parse an array's name; None if it belongs to no stage or has no images."""
        sets = "|".join(re.escape(name) for name in self.image_sets if name)
        suffixes = rf"(?:_(?:f64|0|c\d+{'|' + sets if sets else ''}))*"
        # The longest stage name wins: "layer_0" is block 0, not the first image of "layer".
        for stage in sorted(stages, key=len, reverse=True):
            if not re.fullmatch(re.escape(stage) + suffixes, array):
                continue
            parts = array.removeprefix(stage).split("_")[1:]
            image_set = next((part for part in parts if part in self.image_sets), "")
            channels = next((int(part[1:]) for part in parts if re.fullmatch(r"c\d+", part)), None)
            if image_set in self.image_sets or stage == "posemb_in":
                dtype = torch.float64 if "f64" in parts else torch.float32
                image_set = image_set if image_set in self.image_sets else next(iter(self.image_sets))
                return RecordedArray(array, stage, dtype, image_set, "0" in parts, channels)
        return None


@dataclass(frozen=True)
class ArrayCheck:
    """The comparison of one recorded array with the model's."""

    array: str
    stage: str
    precision: str
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Return whether the difference is within the tolerance."""
        return self.difference <= self.tolerance  # False for NaN


@dataclass
class Verification:
    """All comparisons in the order of the computation, and the arrays that could not be compared."""

    recording: str
    checks: list[ArrayCheck] = field(default_factory=list[ArrayCheck])
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def first_difference(self) -> ArrayCheck | None:
        """Return the first array that differs; None if all agree."""
        return next((check for check in self.checks if not check.agrees), None)

    def worst_checks(self) -> list[ArrayCheck]:
        """Return for each precision the comparison closest to, or furthest beyond, its tolerance."""
        groups = [[check for check in self.checks if check.precision == name] for name in PRECISION.values()]
        return [max(group, key=lambda check: check.difference / check.tolerance) for group in groups if group]


def verify(
    recording: Recording, plan: Plan, models: Mapping[torch.dtype, Callable[[], torch.nn.Module]]
) -> Verification:
    """Run the original's images through the converted model and compare every recorded stage.

    `models` has for each precision a function that returns the converted model.
    """
    stages = list(stage_modules(plan))
    arrays, skipped = recording.arrays_of_stages(stages)
    for recorded in arrays:
        if reason := _reason_to_skip(recording, plan, recorded):
            skipped[recorded.array] = reason
    result = Verification(recording.name, skipped=skipped)
    arrays = [recorded for recorded in arrays if recorded.array not in skipped]
    if not arrays:
        raise UserError(
            f"{recording.name} has no results that can be compared ("
            + (", ".join(dict.fromkeys(skipped.values())) or "it has images only")
            + "); a recording needs 'images' and any of the arrays "
            + ", ".join(("embedding", "with_posemb", "layer_0", *stages[-4:]))
        )
    computed: dict[tuple[torch.dtype, str], dict[str, torch.Tensor]] = {}
    for dtype in dict.fromkeys(recorded.dtype for recorded in arrays):
        model = models[dtype]()
        for image_set in dict.fromkeys(recorded.image_set for recorded in arrays if recorded.dtype == dtype):
            images = recording.image_sets[image_set].to(dtype).permute(0, 3, 1, 2)
            computed[dtype, image_set] = run_stages(model, images, plan)
    for recorded in arrays:
        outputs = computed[recorded.dtype, recorded.image_set][recorded.stage]
        result.checks.append(_compare(recording, recorded, outputs, TOLERANCE[plan.family][recorded.dtype]))
    return result


def _reason_to_skip(recording: Recording, plan: Plan, recorded: RecordedArray) -> str | None:
    """Return why an array cannot be compared: the head is new, or the model was resampled to one size; else None."""
    if plan.new_head and recorded.stage == "logits":
        return "the head is new"
    if plan.resample is None:
        return None
    height, width = recording.image_sets[recorded.image_set].shape[1:3]
    try:
        grid = plan.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error
    if recorded.stage == "posemb_in" or grid != plan.config.grid:
        return "its image size is not that of --resize-to"
    return None


def _compare(recording: Recording, recorded: RecordedArray, computed: torch.Tensor, tolerance: float) -> ArrayCheck:
    """Compare one array with the model's, reduced to the images and channels that were recorded."""
    expected = recording.arrays[recorded.array]
    if recorded.first_image:
        computed = computed[:1]
    if recorded.channels is not None:
        computed = computed[..., : recorded.channels]
    if computed.shape != expected.shape:
        raise UserError(
            f"'{recorded.array}' in {recording.name} has shape {size_text(expected.shape)}, the converted model's is "
            f"{size_text(computed.shape)}; give a recording of this model"
        )
    if recorded.dtype == torch.float32:
        tolerance *= max(1.0, float(expected.abs().max()))
    difference = float((computed.double() - expected.double()).abs().max())
    return ArrayCheck(recorded.array, recorded.stage, PRECISION[recorded.dtype], difference, tolerance)


def stage_modules(plan: Plan) -> dict[str, str]:
    """Return the stages in the order of the computation, each with the module whose output it is, or "" for none.

    The "stem" of a BiT is the input of its first stage.
    """
    config: Any = plan.config
    family = plan.family
    last_stages = dict.fromkeys(("pooled", "pre_logits", "logits"), "")
    patches = "embeddings.patch_embeddings"
    if family == "bit":
        final_norm = {"norm_pre_head": "encoder.norm"} if config.pre_activation else {}
        blocks = {"stem": "encoder.stages.0", **_stage_blocks(config, "encoder")}
        return blocks | final_norm | {"logits_2d": ""} | last_stages
    if family == "mixer":
        layers = {f"layer_{i}": f"layers.{i}" for i in range(config.num_hidden_layers)}
        return {"embedding": f"{patches}.projection", **layers, "encoded": "layernorm"} | last_stages
    tables: dict[str, str] = {}
    if config.position_embedding == "learned":
        tables = dict.fromkeys(("posemb_in", "posemb_out"), "")
    stem: dict[str, str] = {}
    if family == "hybrid":
        root = {f"{old}_root": f"{patches}.stem.root_{new}" for old, new in {"conv": "conv", "gn": "norm"}.items()}
        stem = root | _stage_blocks(config, f"{patches}.stem")
    blocks: dict[str, str] = {}
    for i in range(config.num_hidden_layers):
        blocks |= {f"layer_{i}_attn": f"layers.{i}.attention", f"layer_{i}_mlp": f"layers.{i}.mlp"}
        blocks[f"layer_{i}"] = f"layers.{i}"
    first_stages = {"embedding": f"{patches}.projection", "with_posemb": "embeddings"}
    return tables | stem | first_stages | blocks | {"encoded": ""} | last_stages


def _stage_blocks(config: Any, parent: str) -> dict[str, str]:
    """Return the recorded names of a ResNet's stages with their modules."""
    return {f"block{i + 1}": f"{parent}.stages.{i}" for i in range(len(config.stage_depths))}


def run_stages(model: Any, pixel_values: torch.Tensor, plan: Plan) -> dict[str, torch.Tensor]:
    """Run one forward pass over [B, C, H, W]; return all stages with the axes of the original, channels last."""
    body, config = model.base_model, model.base_model.config
    stages: dict[str, torch.Tensor] = {}

    def make_hook(stage: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        """Return a hook that stores a module's output, or for a BiT's stem its input, as a stage."""

        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            output = inputs if stage == "stem" else output
            output = output[0] if isinstance(output, tuple) else output
            output = getattr(output, "hidden_states", output).clone()  # later operations may be in place
            stages[stage] = output.permute(0, 2, 3, 1) if output.ndim == 4 else output

        return hook

    modules = {stage: body.get_submodule(name) for stage, name in stage_modules(plan).items() if name}
    handles = [module.register_forward_hook(make_hook(stage)) for stage, module in modules.items()]
    try:
        with torch.no_grad():
            output = body(pixel_values)
            head = model.classifier if plan.has_head else torch.nn.Identity()
            pooled, logits = output.pooler_output, head(output.pooler_output)
            if plan.family == "bit":
                grid = config.grid_of(*pixel_values.shape[2:])
                stages["logits_2d"] = head(output.last_hidden_state).unflatten(1, grid)
            elif plan.family != "mixer":
                stages["encoded"] = output.last_hidden_state
                pooled = body.pooler.pool(output.last_hidden_state)
                # big_vision attaches the class token after the positions; its loader adds the row of older tables.
                is_attached_later = plan.origin == "big_vision" or not config.position_on_class_token
                if is_attached_later:
                    stages["with_posemb"] = stages["with_posemb"][:, patch_token_slice(config)]
                if plan.has_head and config.has_distillation_head:  # the mean of both heads, as in the classifier
                    logits = (logits + model.distillation_classifier(output.last_hidden_state[:, 1])) / 2
                if config.position_embedding == "learned":
                    stored, rows = body.embeddings.position_embeddings.detach(), body.embeddings.num_special_rows
                    h, w = stages["embedding"].shape[1:3]
                    first_row = rows if is_attached_later else 0
                    stages["posemb_in"] = stored[:, first_row:]
                    stages["posemb_out"] = resample_position_table(stored, config.grid, (h, w), rows)[:, first_row:]
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return stages | {"pooled": pooled, "pre_logits": output.pooler_output, "logits": logits}
