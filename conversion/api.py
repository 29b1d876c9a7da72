"""Convert a checkpoint of another library into a folder that `from_pretrained` reads."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from hf_vit.conversion.fetching import fetch, is_within
from hf_vit.conversion.fill import Weights, build_model, build_processor, load_weights
from hf_vit.conversion.origins.origin import size_text
from hf_vit.conversion.planning import DECLARED, Plan, PlanOptions, PlanSettings, make_plan
from hf_vit.conversion.progress import progress, quiet_transformers
from hf_vit.conversion.readers import CheckpointReader, Shapes
from hf_vit.conversion.verification import Recording, Verification, verify
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.results.delivery import new_folder, prepare_output
from hf_vit.results.facts import append_record, new_record
from hf_vit.results.writing import explain_write_errors, new_file

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
        """Return the rows of the summary that is printed for a result."""
        key_counts = f"{len(self.plan.consumed):,} used, {len(self.plan.ignored):,} ignored"
        verification = (
            {} if self.verification is None else {"verified": f"{len(self.verification.checks):,} arrays agree"}
        )
        model = self.plan.model_class.__name__
        return {"output": self.output, "origin": self.plan.origin, "model": model, "keys": key_counts, **verification}


def convert(
    source: str | Path,
    output: str | Path,
    *,
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
    started = time.perf_counter()
    settings, output_folder = PlanSettings(**options), prepare_output(output, force)
    if recording is not None and is_within(output_folder, recording):
        raise UserError(f"the folder {output} contains --verify {recording}, so it cannot be the output; give another")
    recorded_results = None if recording is None else Recording(recording)
    # The report is delivered first: if the process is killed in between, the same command can replace it.
    with ExitStack() as delivery, ExitStack() as reporting:
        report_file = None if report is None else reporting.enter_context(new_file(_free_report(report, output_folder)))
        checkpoint = fetch(source, sha256)
        if is_within(output_folder, checkpoint.path):
            raise UserError(f"the folder {output} contains the source {checkpoint.name}; give another output folder")
        with checkpoint.open() as reader, quiet_transformers():
            plan = make_plan(reader.shapes, settings, reader.readable_companions, checkpoint.name)
            with progress(f"reading {checkpoint.path.name}", plan.size) as advance:
                weights = load_weights(reader, plan, advance=advance)
            folder = delivery.enter_context(new_folder(output_folder, force))
            with progress(f"writing {output_folder.name}"), explain_write_errors(output_folder):
                build_model(plan, weights.state).save_pretrained(folder)
                build_processor(plan).save_pretrained(folder)
            with progress(f"comparing {output_folder.name}"):
                verification = (
                    None if recorded_results is None else _verify(reader, plan, weights.state, folder, recorded_results)
                )
            with progress(f"finishing {output_folder.name}"), explain_write_errors(output_folder):
                facts = {"source": checkpoint.name} | collect_facts(reader, plan, weights, verification)
                seconds = time.perf_counter() - started
                append_record(folder, new_record("conversion", values=facts, seconds=seconds))
            if report_file is not None:
                with explain_write_errors(Path(report or "")):
                    report_file.write_text(build_report(plan, reader.shapes), encoding="utf-8")
            prepare_output(output_folder, force, folder.parent)  # check again, before the report is delivered
    return ConversionResult(Path(output), plan, weights.rounded, verification, seconds)


def _free_report(path: str | Path, output: Path) -> Path:
    """Return the path of the report.

    Raises:
        UserError: it is in the model's folder, its folder does not exist, or it would replace another file.
    """
    path = Path(path)
    if is_within(output, path):
        raise UserError(f"--report {path} is in the folder of the model; give a path outside of it")
    if not path.parent.is_dir():
        raise UserError(f"the folder of --report {path} does not exist; create it first")
    if not path.exists():
        return path
    with explain_write_errors(path), path.open("rb") as file:
        is_report = file.read(len(REPORT_BEGIN)) == REPORT_BEGIN
    if not is_report:
        raise UserError(f"--report {path} exists and is not a conversion report; choose another name")
    return path


def _verify(
    reader: CheckpointReader, plan: Plan, state: dict[str, torch.Tensor], folder: Path, recording: Recording
) -> Verification:
    """Compare the written model (float32), and the same plan in float64, with the recording."""

    def load_written() -> torch.nn.Module:
        """Load the written model, and check that it has the weights that were saved."""
        model = plan.model_class.from_pretrained(folder).eval()
        saved_state = model.state_dict()
        if not all(torch.equal(saved_state[name], value) for name, value in state.items()):
            raise RuntimeError(f"the model in {folder} does not hold the weights that were saved")
        return model

    def build_in_double() -> torch.nn.Module:
        return build_model(plan, load_weights(reader, plan, torch.float64).state)

    verification = verify(recording, plan, {torch.float32: load_written, torch.float64: build_in_double})
    if (check := verification.first_difference) is not None:
        raise UserError(
            f"the converted model does not reproduce {recording.name}, so nothing was written: the first "
            f"stage that differs is '{check.stage}' ({check.array}: {check.precision} differs by "
            f"{check.difference:.1e}, tolerance {check.tolerance:.0e})"
        )
    return verification


def build_report(plan: Plan, shapes: Shapes) -> str:
    """Return a JSON report: every key of the file with its shape, transform and parameter, and what was assumed."""
    rows = [
        {
            "source": key,
            "shape": row.shape if key is None else shapes[key],
            "transform": row.transform,
            "target": plan.parameter_name(row),
            "target_shape": row.parameter_shape,
        }
        | ({"resampled": asdict(row.resample)} if row.resample else {})
        | ({} if row.block is None else {"block": row.block})
        | ({} if row.piece is None else {"piece": row.piece})
        for row in plan.rows
        for key in (row.key, *row.other_keys)
    ]
    ignored = [{"source": key, "shape": shapes[key], "ignored": reason} for key, reason in plan.ignored.items()]
    lines = ",\n ".join(json.dumps(line) for line in (*rows, *ignored))
    head = {"origin": plan.origin} | ({"assumed": dict(plan.assumed)} if plan.assumed else {})
    return f'{json.dumps(head)[:-1]}, "keys": [\n {lines}\n]}}\n'


def collect_facts(
    reader: CheckpointReader, plan: Plan, weights: Weights, verification: Verification | None
) -> dict[str, Any]:
    """Return the values of the conversion's record in facts.json."""
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
    if plan.resample is not None:
        facts["positions"] = {"from_grid": list(plan.resample.old_grid), "to_grid": list(plan.resample.new_grid)}
    if verification is not None:
        facts["verification"] = {
            "recording": verification.recording,
            "arrays_compared": len(verification.checks),
            "arrays_not_compared": dict(Counter(verification.skipped.values())),
            **{
                check.precision: {
                    "stage": check.stage,
                    "largest_difference": check.difference,
                    "tolerance": check.tolerance,
                }
                for check in verification.worst_checks()
            },
        }
    return facts


def describe(result: ConversionResult) -> str:
    """Return a few lines about a result: the model, the counts and the comparison."""
    plan, verification = result.plan, result.verification
    head = f"{plan.config.num_labels} labels{' (new head)' if plan.new_head else ''}" if plan.has_head else "no head"
    lines = [
        f"{plan.origin}: {_describe_network(plan)}, {head}",
        f"keys: {len(plan.consumed)} used, {len(plan.ignored)} ignored"
        + "".join(f"; {count} {reason}" for reason, count in Counter(plan.ignored.values()).items()),
    ]
    if result.rounded:
        lines.append(f"rounded: {sum(result.rounded.values())} float64 values to the nearest float32 value")
    if verification is not None:
        lines.append(
            f"verified: {len(verification.checks)} recorded arrays agree; closest to its tolerance: "
            + ", ".join(
                f"{check.precision} {check.difference:.1e} at {check.stage}" for check in verification.worst_checks()
            )
        )
        lines += [f"not compared: {array} ({reason})" for array, reason in verification.skipped.items()]
    return "\n".join([*lines, f"saved in {result.output} after {result.seconds:.1f} s"])


def assumption(plan: Plan) -> str | None:
    """Return one line that says what was assumed and how to set it; None if nothing was assumed."""
    if not plan.assumed:
        return None
    options = [option for name, option in (DECLARED | {"image_size": "--image-size"}).items() if name in plan.assumed]
    remedies = [f"set it ({', '.join(options)})"] if options else []
    if "layer_norm_eps" in plan.assumed or "hidden_act" in plan.assumed:
        remedies.append("give the folder with the config.json")
    hint = f"; if that is wrong, {' or '.join(remedies)}" if remedies else ""
    return f"assumed, because the source does not record it: {'; '.join(plan.assumed.values())}{hint}"


def _describe_network(plan: Plan) -> str:
    """Return the model's sizes, such as "12 layers, 768 wide, 12 heads, patch 16x16, 224x224 px, token pooling"."""
    config, size = plan.config, size_text(as_pair(plan.config.image_size))
    if plan.family == "bit":
        units = "+".join(map(str, config.stage_depths)) or "no"
        form = "pre" if config.pre_activation else "post"
        return f"{units} {form}-activation units, {config.hidden_size} wide, {size} px"
    layers = f"{config.num_hidden_layers} layers, {config.hidden_size} wide"
    patches = f"patch {size_text(config.patch_stride)}, {size} px"
    if plan.family == "mixer":
        return f"{layers}, {config.token_intermediate_size} across the tokens, {patches}"
    return f"{layers}, {config.num_attention_heads} heads, {patches}, {config.pooling} pooling"
