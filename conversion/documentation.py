"""README.md of this folder, made from the tables that the code uses: `python -m hf_vit.conversion.documentation`."""

from pathlib import Path

from .families import FAMILIES, ORIGINS
from .origins import Origin
from .transforms import TRANSFORMS

README = Path(__file__).parent / "README.md"

_HEAD = """\
# Conversion

`hf-vit convert SOURCE OUT` turns a checkpoint of an original code base into a folder that `from_pretrained` reads.
This page is generated from the tables that the code uses (`python -m hf_vit.conversion.documentation`); a test keeps
it up to date.

Every key of the source is used exactly once or ignored for a reason, and every parameter of the model is filled exactly
once; otherwise nothing is written and all keys that do not fit are listed. `--report FILE` writes the whole account.

`{i}` is the number of a block. Parameters are those of `HfViTModel`; inside `HfViTForImageClassification` they begin
with `vit.`, except `classifier`.

## Transforms

| name | what it does |
|------|--------------|
"""


def render() -> str:
    """The whole page."""
    lines = [f"| {transform.name} | {transform.meaning} |" for transform in TRANSFORMS.values()]
    lines += ["| zeros | a new head (`--num-labels`, `--labels`) |", ""]
    for origin in ORIGINS:
        lines += _origin(origin)
    lines += ["## Recognised, and refused by name", ""]
    lines += [f"- {family.name}" for family in FAMILIES]
    return _HEAD + "\n".join(lines) + "\n"


def _origin(origin: Origin) -> list[str]:
    lines = [f"## {origin.name}", "", f"{origin.title}.", ""]
    lines += [f"- {note}" for note in origin.notes]
    lines += ["", "Axes: " + "; ".join(f"{letter} {meaning}" for letter, meaning in origin.legend.items()) + ".", ""]
    lines += ["| source key | axes | transform | parameter | optional part |", "|---|---|---|---|---|"]
    lines += [
        f"| `{rule.source}` | {', '.join(rule.axes)} | {rule.transform} | `{rule.target}` | {rule.part} |"
        for rule in origin.rules
    ]
    lines += ["", "| ignored keys (regular expression) | why |", "|---|---|"]
    escaped = {pattern.replace("|", "\\|"): reason for pattern, reason in origin.ignored.items()}
    return [*lines, *(f"| `{pattern}` | {reason} |" for pattern, reason in escaped.items()), ""]


if __name__ == "__main__":
    README.write_text(render(), encoding="utf-8")
