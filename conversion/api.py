"""Convert a checkpoint of another code into a folder that `from_pretrained` reads."""

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
from hf_vit.conversion.planning import DECLARED, Plan, PlanOptions, Wishes, make_plan
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
        rounded: key -> values that float32 cannot hold exactly (float64 sources only).
        verification: the comparison with recorded results, if one was asked for.
        seconds: from opening the source to the finished folder.
    """

    output: Path
    plan: Plan
    rounded: Mapping[str, int]
    verification: Verification | None
    seconds: float

    def overview(self) -> dict[str, object]:
        used = f"{len(self.plan.consumed):,} used, {len(self.plan.ignored):,} ignored"
        agreed = {} if self.verification is None else {"verified": f"{len(self.verification.checks):,} arrays agree"}
        model = self.plan.model_class.__name__
        return {"output": self.output, "origin": self.plan.origin, "model": model, "keys": used, **agreed}


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
    """Convert a checkpoint of an original code base; the folder appears complete or not at all.

    Args:
        source: a local file or folder, an https:// or gs:// address, or `hf://owner/name/file`; see `fetching.fetch`.
        output: folder to write: weights, code, processor, facts.json. Must be absent or empty.
        recording: .npz with images and results of the original code; the converted model must give the same
            (see `verification`), or nothing is written.
        report: file for a list of every key, its shape, transform and parameter (JSON); an earlier report is replaced,
            another file never.
        sha256: what the source file must be; checked before anything is read.
        force: replace `output` where it is a folder that this package wrote.
        options: what is declared of the source and wanted of the model; see `Wishes`.

    Raises:
        UserError: the source cannot be read or mapped completely, the output is not free, or the converted model does
            not give the recorded results.
    """
    started = time.perf_counter()
    wishes, place = Wishes(**options), prepare_output(output, force)
    if recording is not None and is_within(place, recording):
        raise UserError(f"the folder {output} holds --verify {recording}; give another one")
    recorded = None if recording is None else Recording(recording)
    # The report comes first: a kill between the two then leaves what the same command replaces.
    with ExitStack() as delivery, ExitStack() as reporting:
        report_file = None if report is None else reporting.enter_context(new_file(_free_report(report, place)))
        checkpoint = fetch(source, sha256)
        if is_within(place, checkpoint.path):
            raise UserError(f"the folder {output} holds the source {checkpoint.name}; give another one")
        with checkpoint.open() as reader, quiet_transformers():
            plan = make_plan(reader.shapes, wishes, reader.beside, checkpoint.name)
            with progress(f"reading {checkpoint.path.name}", plan.size) as advance:
                weights = load_weights(reader, plan, advance=advance)
            folder = delivery.enter_context(new_folder(place, force))
            with progress(f"writing {place.name}"), explain_write_errors(place):
                build_model(plan, weights.state).save_pretrained(folder)
                build_processor(plan).save_pretrained(folder)
            with progress(f"comparing {place.name}"):
                verification = None if recorded is None else _verify(reader, plan, weights.state, folder, recorded)
            with progress(f"finishing {place.name}"), explain_write_errors(place):
                facts = {"source": checkpoint.name} | facts_of(reader, plan, weights, verification)
                seconds = time.perf_counter() - started
                append_record(folder, new_record("conversion", values=facts, seconds=seconds))
            if report_file is not None:
                with explain_write_errors(Path(report or "")):
                    report_file.write_text(report_of(plan, reader.shapes), encoding="utf-8")
            prepare_output(place, force, folder.parent)  # or the report would come of a model that is refused
    return ConversionResult(Path(output), plan, weights.rounded, verification, seconds)


def _free_report(path: str | Path, output: Path) -> Path:
    """Return where to write a report; raise a UserError in the model's folder, in none, or over another file."""
    path = Path(path)
    if is_within(output, path):
        raise UserError(f"--report {path} is in the folder of the model; give a place outside")
    if not path.parent.is_dir():
        raise UserError(f"the folder of --report {path} does not exist; create it first")
    if not path.exists():
        return path
    with explain_write_errors(path), path.open("rb") as file:
        is_report = file.read(len(REPORT_BEGIN)) == REPORT_BEGIN
    if not is_report:
        raise UserError(f"--report {path} already exists and is not a conversion report; choose another name")
    return path


def _verify(
    reader: CheckpointReader, plan: Plan, state: dict[str, torch.Tensor], folder: Path, recording: Recording
) -> Verification:
    """Compare the model as written (float32), and the same plan carried out in float64, with the recording."""

    def written() -> torch.nn.Module:
        model = plan.model_class.from_pretrained(folder).eval()
        saved = model.state_dict()
        if not all(torch.equal(saved[name], value) for name, value in state.items()):
            raise RuntimeError(f"the model in {folder} does not hold the weights that were saved")
        return model

    def in_double() -> torch.nn.Module:
        return build_model(plan, load_weights(reader, plan, torch.float64).state)

    verification = verify(recording, plan, {torch.float32: written, torch.float64: in_double})
    if (check := verification.first_difference) is not None:
        raise UserError(
            f"the converted model does not reproduce {recording.name}, so nothing was written: the first "
            f"stage that differs is '{check.stage}' ({check.array}: {check.precision} differs by "
            f"{check.difference:.1e}, tolerance {check.tolerance:.0e})"
        )
    return verification


def report_of(plan: Plan, shapes: Shapes) -> str:
    """Return every key of the file with its shape, transform and parameter as JSON, and what was assumed."""
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
        for key in (row.key, *row.beside)
    ]
    ignored = [{"source": key, "shape": shapes[key], "ignored": reason} for key, reason in plan.ignored.items()]
    lines = ",\n ".join(json.dumps(line) for line in (*rows, *ignored))
    head = {"origin": plan.origin} | ({"assumed": dict(plan.assumed)} if plan.assumed else {})
    return f'{json.dumps(head)[:-1]}, "keys": [\n {lines}\n]}}\n'


def facts_of(
    reader: CheckpointReader, plan: Plan, weights: Weights, verification: Verification | None
) -> dict[str, Any]:
    """Return the values of a conversion's record in facts.json."""
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
                one.precision: {"stage": one.stage, "largest_difference": one.difference, "tolerance": one.tolerance}
                for one in verification.worst()
            },
        }
    return facts


def describe(result: ConversionResult) -> str:
    """Return a few lines for people: the model, the counts and the comparison."""
    plan, verification = result.plan, result.verification
    head = f"{plan.config.num_labels} labels{' (new head)' if plan.new_head else ''}" if plan.has_head else "no head"
    lines = [
        f"{plan.origin}: {_network(plan)}, {head}",
        f"keys: {len(plan.consumed)} used, {len(plan.ignored)} ignored"
        + "".join(f"; {count} {reason}" for reason, count in Counter(plan.ignored.values()).items()),
    ]
    if result.rounded:
        lines.append(f"rounded: {sum(result.rounded.values())} float64 values without an exact float32 value")
    if verification is not None:
        lines.append(
            f"verified: {len(verification.checks)} recorded arrays agree; nearest to its tolerance: "
            + ", ".join(f"{one.precision} {one.difference:.1e} at {one.stage}" for one in verification.worst())
        )
        lines += [f"not compared: {array} ({reason})" for array, reason in verification.skipped.items()]
    return "\n".join([*lines, f"saved in {result.output} after {result.seconds:.1f} s"])


def assumption(plan: Plan) -> str | None:
    """Return what was assumed and may be wrong, in one line; None where nothing was."""
    if not plan.assumed:
        return None
    options = [option for name, option in (DECLARED | {"image_size": "--image-size"}).items() if name in plan.assumed]
    remedies = [f"set it ({', '.join(options)})"] if options else []
    if "layer_norm_eps" in plan.assumed or "hidden_act" in plan.assumed:
        remedies.append("give the folder with the config.json")
    where = f"; where that is wrong, {' or '.join(remedies)}" if remedies else ""
    return f"assumed, because the source does not record it: {'; '.join(plan.assumed.values())}{where}"


def _network(plan: Plan) -> str:
    """Return "12 layers, 768 wide, 12 heads, patch 16x16, 224x224 px, token pooling"."""
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
