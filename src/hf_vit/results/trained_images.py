"""Record which images a model was trained on, as hashes in a file beside it.

The file is not published: with it, anyone who has an image could find out whether the model was trained on it.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_vit.writing import write_atomically

TRAINED_NAME = "training_images.txt"
_DIGITS = 16  # digits of a hash; two of a million images collide with a probability of 1 in 30 million


def write_trained(folder: Path, digests: Iterable[str], bases: Iterable[Path] = ()) -> None:
    """Write `folder/training_images.txt`: the first 16 digits of every training image's SHA-256, one per line.

    Those of the models in the folders `bases`, which this one was fine-tuned or averaged from, are included.
    """
    all_digests = {digest[:_DIGITS] for digest in digests}.union(*map(_read_digests, bases))
    if all_digests:
        write_atomically(folder / TRAINED_NAME, "".join(f"{digest}\n" for digest in sorted(all_digests)))


def count_trained(folder: str | os.PathLike[str], digests: Iterable[str]) -> int:
    """Return how many of these images the model in a folder is known to have been trained on."""
    trained_digests = _read_digests(Path(folder))
    return sum(digest[:_DIGITS] in trained_digests for digest in digests)


def note_trained(folder: str | os.PathLike[str] | None, digests: Sequence[str]) -> list[str]:
    """Return a warning if the model in a folder was trained on some of these images that it is evaluated on."""
    count = 0 if folder is None else count_trained(folder, digests)
    note = f"{count:,} of the {len(digests):,} images were training images, so the result is too good"
    return [note] if count else []


def _read_digests(folder: Path) -> set[str]:
    """Return the recorded digests of a folder; empty if there is no readable record."""
    try:
        return set((folder / TRAINED_NAME).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return set()
