"""Class names for a new head."""

import json
from pathlib import Path

from hf_vit.errors import UserError


def read_labels(path: str | Path) -> list[str]:
    """Read class names in order: a text file with one a line, or a JSON list of strings.

    Raises:
        UserError: the file is missing, is no text, holds no name, an empty one or one twice.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no label file {path}; give a text file with one name a line, or a JSON list")
    try:
        text = path.read_text(encoding="utf-8-sig")
        names: object = json.loads(text) if path.suffix == ".json" else [line.strip() for line in text.splitlines()]
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise UserError(f"{path.name} is no label file: {error}; give UTF-8 text, one name a line") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'{path.name} is no JSON list of names; give ["cat", "dog"]')
    labels: list[str] = names
    if not labels or not all(label.strip() for label in labels):
        raise UserError(f"{path.name} holds {'an empty name' if labels else 'no name'}; give one name a line")
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise UserError(f"{path.name} names {', '.join(twice[:3])} more than once; every class needs its own name")
    return labels


def names_of(found: object) -> tuple[str, ...] | None:
    """The names of a source's classes in order, or None where they are no list of names.

    A name may stand there twice, as ImageNet's "crane" does.
    """
    if not isinstance(found, list) or not found or not all(isinstance(name, str) and name for name in found):
        return None
    names: list[str] = found
    return tuple(names)
