"""Which images a model learned from, kept beside it by the hashes of their files.

The file stays out of what is shared: whoever has an image could else find out whether it was among them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from hf_vit.results.writing import write_atomically

TRAINED_NAME = "training_images.txt"
_DIGITS = 16  # of a hash: that any two of a million images agree by chance is a matter of 1 in 30 million


def write_trained(folder: Path, digests: Iterable[str], bases: Iterable[Path] = ()) -> None:
    """Write `folder/training_images.txt`: the first 16 digits of every image's SHA-256, one a line.

    Args:
        digests: of the images that it was trained on here; empty where they are not known.
        bases: folders of the models that it was made from: what they learned from, it has.
    """
    kept = {digest[:_DIGITS] for digest in digests}.union(*map(_trained, bases))
    if kept:
        write_atomically(folder / TRAINED_NAME, "".join(f"{digest}\n" for digest in sorted(kept)))


def count_trained(folder: str | os.PathLike[str], digests: Iterable[str]) -> int:
    """Return how many of these images the model of a folder learned from, as far as that was kept."""
    trained = _trained(Path(folder))
    return sum(digest[:_DIGITS] in trained for digest in digests)


def _trained(folder: Path) -> set[str]:
    try:
        return set((folder / TRAINED_NAME).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return set()
