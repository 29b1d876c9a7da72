"""Which images a model learnt from, kept beside it by the hashes of their files.

The file stays out of what is shared: whoever has an image could else find out whether it was among them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from hf_vit.results.writing import write_atomically

TRAINED_NAME = "training_images.txt"
_DIGITS = 16  # of a hash: that any two of a million images agree by chance is a matter of 1 in 30 million


def write_trained(folder: Path, digests: Iterable[str]) -> None:
    """Write `folder/training_images.txt`: the first 16 digits of every image's SHA-256, one a line."""
    kept = sorted({digest[:_DIGITS] for digest in digests})
    write_atomically(folder / TRAINED_NAME, "".join(f"{digest}\n" for digest in kept))


def count_trained(folder: str | os.PathLike[str], digests: Iterable[str]) -> int:
    """How many of these images the model of a folder learnt from, as far as that was kept."""
    try:
        trained = set((Path(folder) / TRAINED_NAME).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return 0
    return sum(digest[:_DIGITS] in trained for digest in digests)
