"""What a conversion did, told to people, to `facts.json` and to `--report FILE`."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_vit.conversion.building.weights import Weights
from hf_vit.conversion.planning.plan import DECLARED, Plan
from hf_vit.conversion.readers.checkpoint import CheckpointReader, Shape
from hf_vit.conversion.sizes import size_text
from hf_vit.conversion.verification.comparing import PRECISION, Verification
from hf_vit.display import Displayed
from hf_vit.models.configuration_hf_vit import as_pair

REPORT_BEGIN = b'{"origin": '


@dataclass(frozen=True, repr=False)
class ConversionResult(Displayed):
    """What was converted, and how well it was shown to be right.

    Attributes:
        output: the folder that was written.
        plan: every key and parameter, and the configuration.
        rounded: key -> values that float32 cannot hold exactly (float64 sources only).
        verification: the comparison with recorded results, if one was asked for; it agreed, or there were no result.
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


def report_of(plan: Plan, shapes: Mapping[str, Shape]) -> str:
    """Every key of the file with its shape, transform and parameter, as JSON, one key a line; and what was assumed."""
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
    if plan.resample is not None:
        facts["positions"] = {"from_grid": list(plan.resample.old_grid), "to_grid": list(plan.resample.new_grid)}
    if verification is not None:
        facts["verification"] = {
            "recording": verification.recording,
            "arrays_compared": len(verification.checks),
            "arrays_not_compared": dict(Counter(verification.skipped.values())),
        } | {
            precision: {"stage": worst.stage, "largest_difference": worst.difference, "tolerance": worst.tolerance}
            for precision in PRECISION.values()
            if (worst := verification.largest(precision)) is not None
        }
    return facts


def describe(result: ConversionResult) -> str:
    """A few lines for people: what the model is, what was counted and what was compared."""
    plan, verification = result.plan, result.verification
    head = f"{plan.config.num_labels} labels{' (new head)' if plan.new_head else ''}" if plan.has_head else "no head"
    lines = [
        f"{plan.origin}: {_network(plan)}, {head}",
        f"keys: {len(plan.consumed)} used, {len(plan.ignored)} ignored"
        + "".join(f"; {count} {reason}" for reason, count in Counter(plan.ignored.values()).items()),
    ]
    if result.rounded:
        lines.append(f"rounded: {sum(result.rounded.values())} float64 values that float32 cannot hold exactly")
    if verification is not None:
        worst = [one for precision in PRECISION.values() if (one := verification.largest(precision)) is not None]
        lines.append(
            f"verified: {len(verification.checks)} recorded arrays agree; nearest to its tolerance: "
            + ", ".join(f"{one.precision} {one.difference:.1e} at {one.stage}" for one in worst)
        )
        lines += [f"not compared: {array} ({reason})" for array, reason in verification.skipped.items()]
    return "\n".join([*lines, f"saved in {result.output} after {result.seconds:.1f} s"])


def assumption(plan: Plan) -> str | None:
    """What was assumed and may be wrong, in one line; None where nothing was."""
    if not plan.assumed:
        return None
    options = [option for name, option in (DECLARED | {"image_size": "--image-size"}).items() if name in plan.assumed]
    remedies = [f"declare it ({', '.join(options)})"] if options else []
    if "layer_norm_eps" in plan.assumed or "hidden_act" in plan.assumed:
        remedies.append("give the folder with the config.json")
    where = f"; where that is wrong, {' or '.join(remedies)}" if remedies else ""
    return f"assumed, as the source does not tell: {'; '.join(plan.assumed.values())}{where}"


def _network(plan: Plan) -> str:
    """ "12 layers, 768 wide, 12 heads, patch 16x16, 224x224 px, token pooling"."""
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
