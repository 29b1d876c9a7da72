"""Convert a checkpoint of another library into a folder that `from_pretrained` reads.

With `verify=FILE.npz` the converted model is compared, stage by stage, with recorded results of the original code:
`images` [B, H, W, C] float32 in the model's input range, and float32 results for any stages of `list_stage_modules`.
Suffixes: `_f64` means computed in float64, `_0` the first image only, `_c8` the first 8 channels only. Further sets of
images, of other sizes, are named `images_<set>`, their results `logits_<set>` and so on; `posemb_in` and
`posemb_out_<set>` are position tables before and after resampling.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch

from hf_vit.conversion.fetching import fetch, is_within
from hf_vit.conversion.fill import Weights, build_model, build_processor, load_weights
from hf_vit.conversion.origins.origin import format_size
from hf_vit.conversion.planning import DECLARED, Plan, PlanOptions, PlanSettings, make_plan
from hf_vit.conversion.progress import progress, quiet_transformers
from hf_vit.conversion.readers import CheckpointReader, HeadedReader, NpzReader, Shapes
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.models.embeddings_hf_vit import resample_position_table
from hf_vit.models.modeling_hf_vit import get_patch_token_slice
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.results.facts import Facts, append_record, make_record
from hf_vit.writing import explain_write_errors, replace_file

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
        """Read the images and the other float arrays of a recording, and check the shape of the images."""
        if not Path(path).is_file():
            raise UserError(f"the recording {path} does not exist; give the path of an .npz file with recorded arrays")
        self.image_sets: dict[str, torch.Tensor] = {}  # name of the set ("" for `images`) -> [B, H, W, C]
        self.arrays: dict[str, torch.Tensor] = {}  # all other arrays
        with NpzReader(path) as reader:
            self.name = reader.path.name
            for key, member in reader.members.items():
                if member.dtype.kind != "f":
                    continue
                if match := _IMAGES.fullmatch(key):
                    self.image_sets[match[1] or ""] = reader.read_floats(key)
                else:
                    self.arrays[key] = reader.read_floats(key)
        if not self.image_sets:
            raise UserError(
                f"{self.name} has no float array 'images' of shape [B, H, W, C], which the model is run on; add "
                "it to the recording"
            )
        for image_set, images in self.image_sets.items():
            if images.ndim != 4 or not images.numel():
                array = f"images_{image_set}" if image_set else "images"
                raise UserError(
                    f"'{array}' in {self.name} has the shape {format_size(images.shape)}; write it as [B, H, W, C]"
                )

    def collect_stage_arrays(self, stages: Iterable[str]) -> tuple[list[RecordedArray], dict[str, str]]:
        """Return the arrays of the model's stages in their order, and for every other array why it is skipped."""
        order = {stage: index for index, stage in enumerate(stages)}
        recorded_arrays: list[RecordedArray] = []
        skipped: dict[str, str] = {}
        for array in self.arrays:
            recorded = self._parse_name(array, order)
            if recorded is None:
                skipped[array] = "no stage of this model, or no images for it"
            else:
                recorded_arrays.append(recorded)
        sets = list(self.image_sets)
        recorded_arrays.sort(key=lambda each: (sets.index(each.image_set), order[each.stage], str(each.dtype)))
        return recorded_arrays, skipped

    def _parse_name(self, array: str, stages: Iterable[str]) -> RecordedArray | None:
        """Parse an array's name; None if it belongs to no stage or has no images."""
        suffix = "|".join(("f64", "0", r"c\d+", *(re.escape(name) for name in self.image_sets if name)))
        # The longest stage name wins: "layer_0" is block 0, not the first image of "layer".
        for stage in sorted(stages, key=len, reverse=True):
            if not re.fullmatch(rf"{re.escape(stage)}(?:_(?:{suffix}))*", array):
                continue
            parts = array.removeprefix(stage).split("_")[1:]
            image_set = next((part for part in parts if part in self.image_sets), "")
            if image_set not in self.image_sets:
                if stage != "posemb_in":
                    continue
                image_set = next(iter(self.image_sets))  # the table before resampling is the same for all images
            channels = next((int(part[1:]) for part in parts if re.fullmatch(r"c\d+", part)), None)
            dtype = torch.float64 if "f64" in parts else torch.float32
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

    def find_worst_checks(self) -> list[ArrayCheck]:
        """Return for each precision the comparison closest to, or furthest beyond, its tolerance."""
        groups = ([check for check in self.checks if check.precision == name] for name in PRECISION.values())
        return [max(checks, key=lambda check: check.difference / check.tolerance) for checks in groups if checks]


def verify(
    recording: Recording, plan: Plan, models: Mapping[torch.dtype, Callable[[], torch.nn.Module]]
) -> Verification:
    """Run the original's images through the converted model and compare every recorded stage.

    `models` has for each precision a function that returns the converted model.
    """
    stages = list(list_stage_modules(plan))
    stage_arrays, skipped = recording.collect_stage_arrays(stages)
    arrays: list[RecordedArray] = []
    for recorded in stage_arrays:
        reason = _find_reason_to_skip(recording, plan, recorded)
        if reason is None:
            arrays.append(recorded)
        else:
            skipped[recorded.array] = reason
    if not arrays:
        reasons = "; ".join(dict.fromkeys(skipped.values())) or "it has only images"
        raise UserError(
            f"{recording.name} has no array that can be compared ({reasons}); add to the file at least one of the "
            f"arrays {', '.join(('embedding', 'with_posemb', 'layer_0', *stages[-4:]))}, computed by the original code"
        )
    # Build the model once for each precision, and run it once on each set of images.
    computed: dict[tuple[torch.dtype, str], dict[str, torch.Tensor]] = {}
    for dtype in dict.fromkeys(recorded.dtype for recorded in arrays):
        model = models[dtype]()
        for image_set in dict.fromkeys(recorded.image_set for recorded in arrays if recorded.dtype == dtype):
            images = recording.image_sets[image_set].to(dtype).permute(0, 3, 1, 2)
            computed[dtype, image_set] = run_stages(model, images, plan)
    result = Verification(recording.name, skipped=skipped)
    for recorded in arrays:
        outputs = computed[recorded.dtype, recorded.image_set][recorded.stage]
        result.checks.append(_compare(recording, recorded, outputs, TOLERANCE[plan.family][recorded.dtype]))
    return result


def _find_reason_to_skip(recording: Recording, plan: Plan, recorded: RecordedArray) -> str | None:
    """Return why an array cannot be compared: the head is new, or the model was resampled to one size; else None."""
    if plan.new_head and recorded.stage == "logits":
        return "the head is new"
    if plan.resample is None:  # the model takes images of every size that the original takes
        return None
    height, width = recording.image_sets[recorded.image_set].shape[1:3]
    try:
        grid = plan.config.grid_of(height, width)
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}; give a recording of this model") from error
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
            f"'{recorded.array}' in {recording.name} has the shape {format_size(expected.shape)}, but the "
            f"converted model's has {format_size(computed.shape)}; give a recording of this model"
        )
    if recorded.dtype == torch.float32:
        tolerance *= max(1.0, float(expected.abs().max()))
    difference = float((computed.double() - expected.double()).abs().max())  # NaN if one of them has NaN
    return ArrayCheck(recorded.array, recorded.stage, PRECISION[recorded.dtype], difference, tolerance)


def list_stage_modules(plan: Plan) -> dict[str, str]:
    """Return the stages in the order of the computation, each with the module whose output it is, or "" for none.

    The "stem" of a BiT is the input of its first stage.
    """
    config: Any = plan.config
    last_stages = dict.fromkeys(("pooled", "pre_logits", "logits"), "")
    patches = "embeddings.patch_embeddings"
    if plan.family == "bit":
        final_norm = {"norm_pre_head": "encoder.norm"} if config.pre_activation else {}
        blocks = {"stem": "encoder.stages.0", **_list_stage_blocks(config, "encoder")}
        return blocks | final_norm | {"logits_2d": ""} | last_stages
    if plan.family == "mixer":
        layers = {f"layer_{i}": f"layers.{i}" for i in range(config.num_hidden_layers)}
        return {"embedding": f"{patches}.projection", **layers, "encoded": "layernorm"} | last_stages
    stages: dict[str, str] = {}
    if config.position_embedding == "learned":
        stages |= {"posemb_in": "", "posemb_out": ""}
    if plan.family == "hybrid":
        stages |= {"conv_root": f"{patches}.stem.root_conv", "gn_root": f"{patches}.stem.root_norm"}
        stages |= _list_stage_blocks(config, f"{patches}.stem")
    stages |= {"embedding": f"{patches}.projection", "with_posemb": "embeddings"}
    for i in range(config.num_hidden_layers):
        stages |= {f"layer_{i}_attn": f"layers.{i}.attention", f"layer_{i}_mlp": f"layers.{i}.mlp"}
        stages[f"layer_{i}"] = f"layers.{i}"
    return stages | {"encoded": ""} | last_stages


def _list_stage_blocks(config: Any, parent: str) -> dict[str, str]:
    """Return the recorded names of a ResNet's stages with their modules."""
    return {f"block{i + 1}": f"{parent}.stages.{i}" for i in range(len(config.stage_depths))}


def run_stages(model: Any, pixel_values: torch.Tensor, plan: Plan) -> dict[str, torch.Tensor]:
    """Run one forward pass over [B, C, H, W]; return all stages with the axes of the original, channels last."""
    body = model.base_model
    stages: dict[str, torch.Tensor] = {}

    def make_hook(stage: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        """Return a hook that stores a module's output, or for a BiT's stem its input, as a stage."""

        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            result = inputs if stage == "stem" else output
            first_result = result[0] if isinstance(result, tuple) else result
            # Later operations may change the tensor in place.
            features: torch.Tensor = getattr(first_result, "hidden_states", first_result).clone()
            stages[stage] = features.permute(0, 2, 3, 1) if features.ndim == 4 else features

        return hook

    modules = {stage: body.get_submodule(name) for stage, name in list_stage_modules(plan).items() if name}
    handles = [module.register_forward_hook(make_hook(stage)) for stage, module in modules.items()]
    try:
        with torch.no_grad():
            output = body(pixel_values)
            _add_last_stages(stages, model, plan, output, pixel_values.shape[2:])
    except ValueError as error:
        raise UserError(f"the recorded images do not fit the model: {error}; give a recording of this model") from error
    finally:
        for handle in handles:
            handle.remove()
    return stages


def _add_last_stages(
    stages: dict[str, torch.Tensor], model: Any, plan: Plan, output: Any, image_size: Sequence[int]
) -> None:
    """Add what follows the encoder to the stages that hooks have stored: pooling and heads, and a ViT's tokens."""
    body = model.base_model
    head = model.classifier if plan.has_head else torch.nn.Identity()
    tokens = output.last_hidden_state
    pooled = output.pooler_output
    logits = head(pooled)
    if plan.family == "bit":
        stages["logits_2d"] = head(tokens).unflatten(1, body.config.grid_of(*image_size))
    elif plan.family != "mixer":
        pooled = body.pooler.pool(tokens)  # before the representation layer
        _add_token_stages(stages, body, plan, tokens)
        if plan.has_head and body.config.has_distillation_head:  # the mean of both heads, as in the classifier
            logits = (logits + model.distillation_classifier(tokens[:, 1])) / 2
    stages.update({"pooled": pooled, "pre_logits": output.pooler_output, "logits": logits})


def _add_token_stages(stages: dict[str, torch.Tensor], body: Any, plan: Plan, tokens: torch.Tensor) -> None:
    """Add the encoded tokens of a model with tokens, and its positions, to the stages that hooks have stored."""
    config = body.config
    stages["encoded"] = tokens
    # Where special tokens are attached after the positions are added, the recorded stages are without them. big_vision
    # always does so; tables of its older files have a row for the class token, which its loader adds to the token.
    is_attached_later = plan.origin == "big_vision" or not config.position_on_class_token
    if is_attached_later:
        stages["with_posemb"] = stages["with_posemb"][:, get_patch_token_slice(config)]
    if config.position_embedding == "learned":
        table = body.embeddings.position_embeddings.detach()
        num_special = body.embeddings.num_special_rows
        h, w = stages["embedding"].shape[1:3]
        first_row = num_special if is_attached_later else 0
        stages["posemb_in"] = table[:, first_row:]
        stages["posemb_out"] = resample_position_table(table, config.grid, (h, w), num_special)[:, first_row:]


REPORT_BEGIN = b'{"origin": '


@dataclass(frozen=True, repr=False)
class ConversionResult(Displayed):
    """The result of a conversion.

    Attributes:
        output: the folder that was written.
        plan: every key and parameter, and the configuration.
        rounded: key -> number of values that float32 cannot hold exactly (float64 sources only).
        verification: the comparison with recorded results, if requested.
        seconds: duration, from opening the source to the finished folder.
    """

    output: Path
    plan: Plan
    rounded: Mapping[str, int]
    verification: Verification | None
    seconds: float

    def overview(self) -> dict[str, object]:
        keys = f"{len(self.plan.consumed):,} used, {len(self.plan.ignored):,} ignored"
        model = self.plan.model_class.__name__
        rows: dict[str, object] = {"output": self.output, "origin": self.plan.origin, "model": model, "keys": keys}
        if self.verification is not None:
            rows["verified"] = f"{len(self.verification.checks):,} arrays agree"
        return rows


def convert(
    source: str | Path,
    output: str | Path,
    *,
    head: str | Path | None = None,
    recording: str | Path | None = None,
    report: str | Path | None = None,
    sha256: str | None = None,
    force: bool = False,
    **options: Unpack[PlanOptions],
) -> ConversionResult:
    """Convert a checkpoint of another library; the output folder appears complete or not at all.

    Args:
        source: a local file or folder, an https:// or gs:// address, or `hf://owner/name/file`; see `fetching.fetch`.
        output: folder for weights, code, processor and facts.json. It must be absent or empty.
        head: file with the linear classifier of a DINOv2 or DINOv3 backbone, which their code keeps separately.
        recording: .npz file with images and results of the original code. The converted model must reproduce them (see
            `verification`), or nothing is written.
        report: JSON file for a list of every key with its shape, transform and parameter. An earlier report is
            replaced, any other file is refused.
        sha256: SHA-256 digest that the source file must have; checked before anything is read.
        force: replace `output` if this package wrote it.
        options: facts about the source and changes to the model; see `PlanSettings`.

    Raises:
        UserError: the source cannot be read or mapped completely, the output exists, or the converted model does not
            reproduce the recorded results.
    """
    start = time.perf_counter()
    settings = PlanSettings(**options)
    output_folder = prepare_output(output, force)
    for flag, path in (("--verify", recording), ("--head", head)):
        if path is not None and is_within(output_folder, path):
            raise UserError(
                f"{flag} {path} is in the output folder {output}, which will be replaced; give another output folder"
            )
    recorded_results = None if recording is None else Recording(recording)
    # The report is delivered first: if the process is killed in between, the same command can replace it.
    with ExitStack() as delivery, ExitStack() as reporting:
        report_file = None
        if report is not None:
            report_file = reporting.enter_context(replace_file(_check_report_path(report, output_folder)))
        checkpoint = fetch(source, sha256)
        if is_within(output_folder, checkpoint.path):
            raise UserError(
                f"the source {checkpoint.name} is in the output folder {output}, which will be replaced; give "
                "another output folder"
            )
        backbone = checkpoint.open()
        reader = backbone if head is None else HeadedReader(backbone, Path(head))
        with reader, quiet_transformers():
            plan = make_plan(reader.shapes, settings, reader.readable_companions, checkpoint.name)
            with progress(f"reading {checkpoint.path.name}", plan.size) as advance:
                weights = load_weights(reader, plan, advance=advance)
            folder = delivery.enter_context(deliver_folder(output_folder, force))
            with progress(f"writing {output_folder.name}"), explain_write_errors(output_folder):
                build_model(plan, weights.state).save_pretrained(folder)
                build_processor(plan).save_pretrained(folder)
            verification = None
            if recorded_results is not None:
                with progress(f"comparing {output_folder.name}"):
                    verification = _verify(reader, plan, weights.state, folder, recorded_results)
            with progress(f"finishing {output_folder.name}"), explain_write_errors(output_folder):
                sources = {"source": checkpoint.name} | ({} if head is None else {"linear_head": Path(head).name})
                facts = sources | collect_facts(reader, plan, weights, verification)
                if plan.config.problem_type == "multi_label_classification" and checkpoint.path.is_dir():
                    facts["thresholds"] = Facts.load(checkpoint.path).find_thresholds()  # if it was exported
                seconds = time.perf_counter() - start
                append_record(folder, make_record("conversion", values=facts, seconds=seconds))
            if report_file is not None:
                with explain_write_errors(Path(report or "")):
                    report_file.write_text(build_report(plan, reader.shapes), encoding="utf-8")
            prepare_output(output_folder, force, folder.parent)  # check again, before the report is delivered
    return ConversionResult(Path(output).expanduser(), plan, weights.rounded, verification, seconds)


def _check_report_path(report: str | Path, output: Path) -> Path:
    """Return the path of the report; raise a UserError in the model's folder or if it would replace another file."""
    path = Path(report)
    if is_within(output, path):
        raise UserError(f"--report {path} is in the output folder {output}; give a path outside that folder")
    if not path.parent.is_dir():
        raise UserError(f"--report {path} is in a folder that does not exist; create it: mkdir -p {path.parent}")
    if not path.exists():
        return path
    with explain_write_errors(path), path.open("rb") as file:
        is_report = file.read(len(REPORT_BEGIN)) == REPORT_BEGIN
    if not is_report:
        raise UserError(f"--report {path} already exists and is not a conversion report; choose another file name")
    return path


def _verify(
    reader: CheckpointReader, plan: Plan, state: dict[str, torch.Tensor], folder: Path, recording: Recording
) -> Verification:
    """Compare the written model (float32), and the same plan in float64, with the recording; raise if they differ."""

    def load_written() -> torch.nn.Module:
        """Load the written model, and check that it has the weights that were saved."""
        model = plan.model_class.from_pretrained(folder).eval()
        saved_state = model.state_dict()
        if not all(torch.equal(saved_state[name], value) for name, value in state.items()):
            raise RuntimeError(
                f"reading the saved model back from {folder} gave other weights than were written; check the disk "
                "and convert again"
            )
        return model

    def build_in_double() -> torch.nn.Module:
        return build_model(plan, load_weights(reader, plan, torch.float64).state)

    verification = verify(recording, plan, {torch.float32: load_written, torch.float64: build_in_double})
    if (check := verification.first_difference) is not None:
        raise UserError(
            f"the converted model does not reproduce {recording.name}, so nothing was written: the first "
            f"stage that differs is '{check.stage}' ({check.array}: {check.precision} differs by "
            f"{check.difference:.1e}, tolerance {check.tolerance:.0e}); give a recording of this checkpoint"
        )
    return verification


def build_report(plan: Plan, shapes: Shapes) -> str:
    """Return a JSON report: every key of the file with its shape, transform and parameter, and what was assumed."""
    entries: list[dict[str, Any]] = []
    for row in plan.rows:
        target = {"target": plan.parameter_name(row), "target_shape": row.parameter_shape}
        for key in (row.key, *row.other_keys):
            shape = row.shape if key is None else shapes[key]
            entry: dict[str, Any] = {"source": key, "shape": shape, "transform": row.transform, **target}
            if row.resample:
                entry["resampled"] = asdict(row.resample)
            if row.block is not None:
                entry["block"] = row.block
            if row.piece is not None:
                entry["piece"] = row.piece
            entries.append(entry)
    for key, reason in plan.ignored.items():
        entries.append({"source": key, "shape": shapes[key], "ignored": reason})
    lines = ",\n ".join(map(json.dumps, entries))  # one key a line
    head = {"origin": plan.origin} | ({"assumed": dict(plan.assumed)} if plan.assumed else {})
    return f'{json.dumps(head)[:-1]}, "keys": [\n {lines}\n]}}\n'


def collect_facts(
    reader: CheckpointReader, plan: Plan, weights: Weights, verification: Verification | None
) -> dict[str, Any]:
    """Return the values of the conversion's record in facts.json."""
    facts: dict[str, Any] = {
        **reader.list_digests(),
        "origin": plan.origin,
        "keys": {"in_file": len(reader.shapes), "used": len(plan.consumed), "ignored": len(plan.ignored)},
        "ignored": dict(Counter(plan.ignored.values())),
        "parameters": sum(tensor.numel() for tensor in weights.state.values()),
        "new_head": plan.new_head,
        "rounded_to_float32": sum(weights.rounded.values()),
    }
    if plan.assumed:
        facts["assumed"] = dict(plan.assumed)
    if plan.resample is not None:
        facts["positions"] = {"from_grid": list(plan.resample.old_grid), "to_grid": list(plan.resample.new_grid)}
    if verification is not None:
        comparison: dict[str, Any] = {
            "recording": verification.recording,
            "arrays_compared": len(verification.checks),
            "arrays_not_compared": dict(Counter(verification.skipped.values())),
        }
        for check in verification.find_worst_checks():
            difference = {"largest_difference": check.difference, "tolerance": check.tolerance}
            comparison[check.precision] = {"stage": check.stage, **difference}
        facts["verification"] = comparison
    return facts


def describe(result: ConversionResult) -> str:
    """Return a few lines about a result: the model, the counts and the comparison."""
    plan = result.plan
    verification = result.verification
    new_note = " (new head)" if plan.new_head else ""
    head = f"{plan.config.num_labels} labels{new_note}" if plan.has_head else "no head"
    ignored_counts = [f"; {count} {reason}" for reason, count in Counter(plan.ignored.values()).items()]
    lines = [
        f"{plan.origin}: {_describe_network(plan)}, {head}",
        f"keys: {len(plan.consumed)} used, {len(plan.ignored)} ignored{''.join(ignored_counts)}",
    ]
    if result.rounded:
        lines.append(f"rounded {sum(result.rounded.values())} float64 values to the nearest float32 value")
    if verification is not None:
        worst = [
            f"{check.precision} {check.difference:.1e} at {check.stage}" for check in verification.find_worst_checks()
        ]
        count = f"{len(verification.checks)} recorded arrays agree"
        lines.append(f"verified: {count}; largest differences relative to the tolerance: {', '.join(worst)}")
        lines += [f"not compared: {array} ({reason})" for array, reason in verification.skipped.items()]
    return "\n".join([*lines, f"saved in {result.output} after {result.seconds:.1f} s"])


def assumption(plan: Plan) -> str | None:
    """Return one line that says what was assumed and how to set it; None if nothing was assumed."""
    if not plan.assumed:
        return None
    option_of_field = DECLARED | {"image_size": "--image-size"}
    options = [option for name, option in option_of_field.items() if name in plan.assumed]
    remedies = [f"give the right value ({', '.join(options)})"] if options else []
    if "labels" in plan.assumed:
        remedies.append("write the names of the classes into id2label of the new config.json")
    if "layer_norm_eps" in plan.assumed or "hidden_act" in plan.assumed:
        remedies.append("give the folder with the config.json of these weights")
    hint = f"; if that is wrong, {' or '.join(remedies)}" if remedies else ""
    return f"assumed, as the checkpoint does not record it: {'; '.join(plan.assumed.values())}{hint}"


def _describe_network(plan: Plan) -> str:
    """Return the model's sizes, such as "12 layers, 768 wide, 12 heads, patch 16x16, 224x224 px, token pooling"."""
    config = plan.config
    size = format_size(as_pair(plan.config.image_size))
    if plan.family == "bit":
        units = "+".join(map(str, config.stage_depths)) or "no"
        form = "pre" if config.pre_activation else "post"
        return f"{units} {form}-activation units, {config.hidden_size} wide, {size} px"
    layers = f"{config.num_hidden_layers} layers, {config.hidden_size} wide"
    patches = f"patch {format_size(config.patch_stride)}, {size} px"
    if plan.family == "mixer":
        return f"{layers}, {config.token_intermediate_size} across the tokens, {patches}"
    return f"{layers}, {config.num_attention_heads} heads, {patches}, {config.pooling} pooling"
