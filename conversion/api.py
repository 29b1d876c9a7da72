"""Converting a checkpoint file into a folder that `from_pretrained` reads."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hf_vit.conversion.delivery import new_folder, refuse_used_folder
from hf_vit.conversion.fetch.addresses import fetch
from hf_vit.conversion.opening import open_checkpoint
from hf_vit.conversion.origins.registry import find_origin
from hf_vit.conversion.plan.building import build_model, build_processor, without_progress_bars
from hf_vit.conversion.plan.planning import NOTHING_BESIDE, Plan, make_plan
from hf_vit.conversion.plan.weights import Weights, load_weights
from hf_vit.conversion.readers.checkpoint import CheckpointReader, Companions, Shape
from hf_vit.conversion.sizes import Pair, size_text
from hf_vit.conversion.verification import Comparison, Recording, Verification, verify
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.writing import write_atomically


@dataclass(frozen=True)
class ConversionResult:
    """What was converted, and how well it was shown to be right.

    Attributes:
        output: the folder that was written.
        plan: every source key and parameter, and the configuration.
        rounded: source key -> values that float32 cannot hold exactly (float64 sources only).
        verification: the comparison with recorded results, if one was asked for; it agreed, or there were no result.
        seconds: from opening the source to the finished folder.
    """

    output: Path
    plan: Plan
    rounded: Mapping[str, int]
    verification: Verification | None
    seconds: float


def plan(
    shapes: Mapping[str, Shape],
    *,
    image_size: Pair | None = None,
    resize_to: Pair | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    drop_pre_logits: bool = False,
    file_name: str = "the checkpoint",
    companions: Companions = NOTHING_BESIDE,
) -> Plan:
    """Decide a conversion on names and shapes alone; nothing is read.

    Args:
        shapes: key -> shape of every array of the checkpoint.
        image_size: (height, width) in px the source was made for; needed if its position table is not square.
        resize_to: (height, width) in px to resample the position table to, as the original's fine-tuning does.
        num_labels: size of a new, zero head.
        labels: names of the classes of a new, zero head.
        drop_pre_logits: leave out the representation layer, as the original's fine-tuning does; the source's head was
            made for it and goes too, so that without a new one the result is the bare model.
        file_name: what messages call the checkpoint.
        companions: what lies beside the weights.

    Raises:
        UserError: the checkpoint is of an unknown kind, incomplete, holds more than a model, or does not fit itself.
    """
    if num_labels is not None and labels is not None:
        raise UserError("give either the number of labels or their names, not both")
    if (num_labels is not None and num_labels < 1) or (labels is not None and not labels):
        raise UserError(f"{num_labels or 0} labels make no classifier; give at least 1")
    origin = find_origin(shapes, file_name)
    return make_plan(
        origin,
        shapes,
        image_size=image_size,
        resize_to=resize_to,
        num_labels=num_labels,
        labels=labels,
        drop_pre_logits=drop_pre_logits,
        companions=companions,
    )


def convert(
    source: str | Path,
    output: str | Path,
    *,
    image_size: Pair | None = None,
    resize_to: Pair | None = None,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
    drop_pre_logits: bool = False,
    recording: str | Path | None = None,
    report: str | Path | None = None,
    sha256: str | None = None,
) -> ConversionResult:
    """Convert a checkpoint of an original code base; the folder appears complete or not at all.

    Args:
        source: a local file or folder, an https:// or gs:// address, or `hf://owner/name/file`; see `sources.fetch`.
        output: folder to write: weights, code, processor, facts.json. Must be absent or empty.
        image_size, resize_to, num_labels, labels, drop_pre_logits: see `plan`.
        recording: .npz with images and results of the original code; the converted model must give the same
            (see `verification`), or nothing is written.
        report: file for a list of every source key, its shape, transform and target (JSON).
        sha256: what the source file must be; checked before anything is read.

    Raises:
        UserError: the source cannot be read or mapped completely, the output is not free, or the converted model does
            not give the recorded results.
    """
    started = time.perf_counter()
    output = Path(output)
    refuse_used_folder(output)
    if report is not None and not Path(report).absolute().parent.is_dir():
        raise UserError(f"the folder of --report {report} does not exist; create it first")
    recorded = None if recording is None else Recording(recording)
    found = fetch(source, sha256)
    with open_checkpoint(found.path) as reader, without_progress_bars():
        made = plan(
            reader.shapes,
            image_size=image_size,
            resize_to=resize_to,
            num_labels=num_labels,
            labels=labels,
            drop_pre_logits=drop_pre_logits,
            file_name=found.name,
            companions=reader.companions,
        )
        weights = load_weights(reader, made, mapped=True)
        with new_folder(output) as folder:
            _save(made, weights.state, folder)
            reader.confirm()
            verification = None
            if recorded is not None:
                verification = _verify(reader, made, weights, folder, recorded)
            facts = {"source": found.name} | _facts(reader, made, weights, recorded, verification)
            seconds = time.perf_counter() - started
            append_record(folder, new_record("conversion", values=facts, seconds=seconds))
    if report is not None:
        write_report(made, reader.shapes, Path(report))
    return ConversionResult(output, made, weights.rounded, verification, seconds)


def write_report(plan: Plan, shapes: Mapping[str, Shape], path: Path) -> None:
    """Write every source key with its shape, transform and target as JSON, one key a line."""
    rows = [
        {
            "source": row.source,
            "shape": row.source_shape,
            "transform": row.transform,
            "target": plan.parameter_name(row),
            "target_shape": row.target_shape,
        }
        | ({"resampled": asdict(row.resample)} if row.resample else {})
        | ({} if row.block is None else {"block": row.block})
        | ({} if row.piece is None else {"piece": row.piece})
        for row in plan.rows
    ]
    ignored = [{"source": key, "shape": shapes[key], "ignored": reason} for key, reason in plan.ignored.items()]
    lines = ",\n ".join(json.dumps(line) for line in (*rows, *ignored))
    write_atomically(path, f'{{"origin": {json.dumps(plan.origin)}, "keys": [\n {lines}\n]}}\n')


def _save(plan: Plan, state: dict[str, torch.Tensor], folder: Path) -> None:
    model = build_model(plan, state)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # a full disk, said by the Rust side
        raise UserError(f"the weights cannot be written beside {folder.parent.name}: {error}") from error
    build_processor(plan).save_pretrained(folder)


def _verify(reader: CheckpointReader, plan: Plan, weights: Weights, folder: Path, recording: Recording) -> Verification:
    """Compare the model as written (float32), and the same plan carried out in float64, with the recording."""

    def written() -> torch.nn.Module:
        model = plan.model_class.from_pretrained(folder).eval()
        state = model.state_dict()
        if not all(torch.equal(state[name], value) for name, value in weights.state.items()):
            raise RuntimeError(f"the model in {folder} does not hold the weights that were saved")
        return model

    def in_double() -> torch.nn.Module:
        return build_model(plan, load_weights(reader, plan, torch.float64).state)

    found = verify(recording, plan, {torch.float32: written, torch.float64: in_double})
    first = found.first_difference
    if first is not None:
        raise UserError(
            f"the converted model does not give the results of {recording.name}, so nothing is written: the first "
            f"stage that differs is '{first.stage}' ({first.array}: {_text(first)})"
        )
    return found


def _facts(
    reader: CheckpointReader,
    plan: Plan,
    weights: Weights,
    recording: Recording | None,
    verification: Verification | None,
) -> dict[str, Any]:
    """What facts.json says about a conversion."""
    facts: dict[str, Any] = {
        "sha256": reader.sha256(),
        "origin": plan.origin,
        "keys": {"in_file": len(reader.shapes), "used": len(plan.consumed), "ignored": len(plan.ignored)},
        "ignored": dict(Counter(plan.ignored.values())),
        "parameters": sum(tensor.numel() for tensor in weights.state.values()),
        "new_head": plan.new_head,
        "rounded_to_float32": sum(weights.rounded.values()),
    }
    if plan.assumed:
        facts["assumed"] = dict(plan.assumed)
    resample = next((row.resample for row in plan.rows if row.resample), None)
    if resample is not None:
        facts["positions"] = {"from_grid": list(resample.old_grid), "to_grid": list(resample.new_grid)}
    if recording is not None and verification is not None:
        facts["verification"] = {
            "recording": recording.name,
            "arrays_compared": len(verification.comparisons),
            "arrays_not_compared": dict(Counter(verification.skipped.values())),
        } | {
            precision: {"stage": worst.stage, "largest_difference": worst.difference, "tolerance": worst.tolerance}
            for precision in ("float32", "float64")
            if (worst := verification.largest(precision)) is not None
        }
    return facts


def _text(comparison: Comparison) -> str:
    return f"{comparison.precision} differs by {comparison.difference:.1e}, tolerance {comparison.tolerance:.0e}"


def _network(plan: Plan) -> str:
    """ "12 layers, 768 wide, 12 heads, patch 16x16, 224x224 px, token pooling"."""
    config, size = plan.config, size_text(as_pair(plan.config.image_size))
    if plan.family == "bit":
        units = "+".join(map(str, config.stage_depths)) or "no"
        form = "pre" if config.pre_activation else "post"
        return f"{units} {form}-activation units, {config.hidden_size} wide, {size} px"
    return (
        f"{config.num_hidden_layers} layers, {config.hidden_size} wide, {config.num_attention_heads} heads, "
        f"patch {size_text(config.patch_stride)}, {size} px, {config.pooling} pooling"
    )


def describe(result: ConversionResult) -> str:
    """A few lines for people: what the model is, what was counted and what was compared."""
    config, plan = result.plan.config, result.plan
    head = f"{config.num_labels} labels{' (new head)' if plan.new_head else ''}" if plan.has_head else "no head"
    lines = [
        f"{plan.origin}: {_network(plan)}, {head}",
        f"keys: {len(plan.consumed)} used, {len(plan.ignored)} ignored"
        + "".join(f"; {count} {reason}" for reason, count in Counter(plan.ignored.values()).items()),
    ]
    if plan.assumed:
        lines.append("assumed, as no config.json tells: " + "; ".join(plan.assumed.values()))
    if result.rounded:
        lines.append(f"rounded: {sum(result.rounded.values())} float64 values that float32 cannot hold exactly")
    if result.verification is not None:
        found = result.verification
        worst = [one for precision in ("float32", "float64") if (one := found.largest(precision)) is not None]
        lines.append(
            f"verified: {len(found.comparisons)} recorded arrays agree; nearest to its tolerance: "
            + ", ".join(f"{one.precision} {one.difference:.1e} at {one.stage}" for one in worst)
        )
        lines += [f"not compared: {array} ({reason})" for array, reason in found.skipped.items()]
    return "\n".join([*lines, f"saved in {result.output} after {result.seconds:.1f} s"])
