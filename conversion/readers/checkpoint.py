"""What every reader of checkpoints gives, whatever the format: names, shapes, arrays on demand, and what came along."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
import torch

from hf_vit.errors import UserError

Shape = tuple[int, ...]

MAX_NAME = 200  # characters of a key; about 80 in practice
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}  # all ones in NaN and infinity


@dataclass(frozen=True)
class Companions:
    """What lies beside the weights in a folder that transformers or timm saved; nothing, for a file that stands alone.

    Attributes:
        config: config.json, or open_clip_config.json.
        processor: preprocessor_config.json, or the part of processor_config.json that is about images.
    """

    config: Mapping[str, Any] | None = None
    processor: Mapping[str, Any] | None = None


NOTHING_BESIDE = Companions()


class CheckpointReader(ABC):
    """Abstract: the arrays of one checkpoint by key, read on demand; use as a context manager.

    Opening checks everything that can be checked without reading the arrays: `shapes` is complete and honest.

    Attributes:
        path: the file, or the folder.
        companions: what lies beside the weights.
    """

    path: Path
    companions = NOTHING_BESIDE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.confirm()
        finally:
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the file. Arrays that were read stay valid."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, Shape]:
        """Key -> shape of every array."""

    def sha256(self) -> str:
        """Hash of the whole file, in hexadecimal; of several files, of their bytes one after the other."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @abstractmethod
    def read_floats(self, key: str) -> torch.Tensor:
        """One array of finite floats on the CPU, in the precision of the file.

        Raises:
            UserError: the array is damaged, holds no floats, or NaN or infinite values.
        """

    def is_mapped(self, key: str) -> bool:
        """Whether `map_floats` gives the file's own bytes, as a view that takes no memory of its own."""
        return False

    def map_floats(self, key: str) -> torch.Tensor:
        """As `read_floats`; what the file holds ready for use may come unchecked, until `confirm`."""
        return self.read_floats(key)

    def read_ahead(self, keys: Iterable[str]) -> None:
        """Arrays that `map_floats` is asked for next: a reader may begin with them in other threads."""
        return

    def confirm(self) -> None:
        """Check what `map_floats` gave unchecked; leaving the context does it too.

        Raises:
            UserError: as `read_floats`.
        """
        return

    @final
    def checked(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a UserError where it holds no floats, or such as are not finite."""
        if tensor.dtype not in FLOATS:
            held = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"'{key}' in {self.path.name} holds {held}; weights need float16, bfloat16, float32 or float64"
            )
        if not all_finite(tensor):
            raise UserError(
                f"'{key}' in {self.path.name} holds NaN or infinite values, {int((~torch.isfinite(tensor)).sum())} of "
                f"{tensor.numel()}; the training run that wrote it has diverged or the file is damaged"
            )
        return tensor


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether floats on the CPU hold neither NaN nor infinity.

    By NumPy, in one thread: those that torch would wake for it wait for more to do, on cores that others work on.
    """
    if exponent := _EXPONENTS.get(tensor.dtype):
        return not bool((tensor.view(torch.int16).numpy() & exponent == exponent).any())
    array = tensor.numpy()
    with np.errstate(all="ignore"):  # a sum takes less time, and may overflow
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def existing_file(path: str | Path) -> Path:
    """The path of a file that is there and not empty.

    Raises:
        UserError: it is not.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is no file; give the path of a checkpoint")
    if not path.stat().st_size:
        raise UserError(f"{path.name} is empty; get the file again")
    return path


def refuse_unsafe_key(key: str, file_name: str) -> None:
    """Raise a UserError for a key that no model has: too long, or with characters that would spoil a message."""
    if not key or len(key) > MAX_NAME or not key.isprintable():
        raise UserError(f"{file_name} holds an array with the unsafe name {key[:80]!r}")


def one_line(error: BaseException) -> str:
    """What a library says about damaged bytes, short and in one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__
