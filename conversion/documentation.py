"""README.md of this folder, made from the tables that the code uses: `python -m hf_vit.conversion.documentation`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_vit.conversion.origins import timm
from hf_vit.conversion.origins.origin import COMPUTATIONS, LEGEND, TRANSFORMS, Origin, axis_factor
from hf_vit.conversion.origins.registry import NOT_HERE, ORIGINS, STRANGERS
from hf_vit.conversion.targets.registry import TARGETS
from hf_vit.conversion.targets.target import ANY, Target
from hf_vit.conversion.targets.transformers_folder import KINDS, TransformersFolder

README = Path(__file__).parent / "README.md"

_HEAD = """\
# Conversion

`hf-vit convert SOURCE OUT` turns a checkpoint of an original code base into a folder that `from_pretrained` reads.
This page is generated from the tables that the code uses (`python -m hf_vit.conversion.documentation`); a test keeps
it up to date.

Every key of the source is used exactly once or ignored for a reason, and every parameter of the model is filled exactly
once; otherwise nothing is written and all keys that do not fit are listed. `--report FILE` writes the whole account.

Files may be .npz, .safetensors, PyTorch's .pth, .pt and .bin (`torch.load(weights_only=True)`, after their checksums),
or a folder that transformers or timm saved, in one file or several; pickled objects are never loaded. A .safetensors
file has no checksum: a number that was changed in it is noticed by `--sha256` alone.

Bad input ends in one line, never in a model of other numbers. `python -m campaigns forged` forges and damages files of
every reader and origin (bytes, arrays, archives, headers, storages, pickles, shards, configs, names and sizes); no
pickle runs, no earlier output is touched, and memory stays in proportion to the file. `python -m campaigns kills` kills
conversions, as every other command that writes. What they counted, and when, is in `campaigns/results/`.

A model of transformers or timm is converted on the fly by `hf_vit.from_hub("google/vit-base-patch16-224")`, or from a
folder; `hf_vit.image_processor_from_hub` gives the pixels it was made for.

`{i}` is the number of a block. Parameters are those of the bare model; inside `HfViTForImageClassification` they begin
with `vit.` (in `HfBitForImageClassification` with `resnet.`), except `classifier` and `distillation_classifier`.
`{q,k,v}` are as many parameters, which get equal parts of the array along its first axis.

## Transforms

| name | what it does |
|------|--------------|
"""


_OUT = """\
`hf-vit export MODEL OUT --to TARGET` goes the same tables backwards. Settings of the config that are not listed must
have their defaults here; everything else is refused by name.
"""


def render() -> str:
    """The whole page."""
    moves = [*TRANSFORMS.values(), *COMPUTATIONS.values()]
    lines = [f"| {move.name} | {move.meaning} |" for move in moves]
    lines += ["| zeros | a new head (`--num-labels`, `--labels`) |", ""]
    for origin in ORIGINS:
        lines += _origin(origin)
    lines += ["## Recognised, and refused by name", ""]
    lines += [f"- {name}" for name in STRANGERS]
    lines += [f"- `model_type` {name!r} of transformers: {feature}" for name, feature in NOT_HERE.items()]
    lines += [f"- timm's `{name}`: {feature}" for name, feature in timm.NOT_HERE.items()]
    lines += ["", "## Out again", "", _OUT]
    for target in TARGETS.values():
        lines += _target(target)
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _origin(origin: Origin) -> list[str]:
    lines = [f"## {origin.name}", "", f"{origin.title}.", ""]
    lines += [f"- {note}" for note in origin.notes]
    letters = dict.fromkeys(axis_factor(axis)[1] for rule in origin.rules for axis in rule.axes)
    legend = {letter: (LEGEND | dict(origin.legend))[letter] for letter in letters if letter}
    lines += ["", "Axes: " + "; ".join(f"{letter} {meaning}" for letter, meaning in legend.items()) + ".", ""]
    lines += ["| source key | axes | transform | parameter | optional part |", "|---|---|---|---|---|"]
    lines += [
        f"| `{rule.key}` | {', '.join(rule.axes)} | {rule.transform} | `{rule.parameter}` | {rule.part} |"
        for rule in origin.rules
    ]
    lines += ["", *_table("ignored keys (regular expression) | why", origin.ignored)]
    if origin.refused:
        lines += _table("refused keys (regular expression) | what no model here has", origin.refused)
    if origin.foreign_heads:
        told = "; ".join(origin.foreign_heads.values())
        lines += [f"Replaced by a new head (`--num-labels`, `--labels`), or refused: {told}.", ""]
    if origin.assumed:
        assumed = "; ".join(origin.assumed.values())
        lines += [f"Assumed, and printed, where the source does not tell: {assumed}.", ""]
    return lines


def _table(head: str, rows: Mapping[str, str]) -> list[str]:
    escaped = {pattern.replace("|", "\\|"): reason for pattern, reason in rows.items()}
    return [f"| {head} |", "|---|---|", *(f"| `{pattern}` | {reason} |" for pattern, reason in escaped.items()), ""]


def _target(target: Target) -> list[str]:
    lines = [f"### {target.name}", ""]
    if target.name == TransformersFolder.name:
        lines += ["The class follows from what the model has; what came from one of these goes back to it.", ""]
        kinds = [_expressed(f"{kind.title}, by the table of {kind.table.name}", kind.expresses) for kind in KINDS]
        return [*lines, *[line for kind in kinds for line in (f"- {kind}",)], ""]
    if target.tables is None:
        return [*lines, f"{target.title}: every model.", ""]
    tables = ", ".join(f"{model_type} by the table of {origin.name}" for model_type, origin in target.tables.items())
    return [*lines, _expressed(f"{target.title}: {tables}", target.expresses), ""]


def _expressed(title: str, expresses: Mapping[str, Sequence[Any]]) -> str:
    free = ", ".join(f"`{name}`" for name, values in expresses.items() if values is ANY)
    bound = [
        f"`{name}` may be " + ", ".join(f"`{value}`" for value in values) + "."
        for name, values in expresses.items()
        if values is not ANY
    ]
    return " ".join([f"{title}. Any {free}.", *bound])


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
