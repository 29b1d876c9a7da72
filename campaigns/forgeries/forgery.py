"""What every forger gives: files in a place of work, and what an honest reader may make of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Forgery:
    """A forged or damaged checkpoint.

    Attributes:
        files: name -> bytes, or the place that a symbolic link of that name points to.
        source: the file or folder that is to be converted, one of the names or what they lie below.
        arrays: what the file holds by its own word; None for the arrays of the good file.
        declared: a value that a file beside the weights declares by its own word; None if there is no such.
        never: whether it must be refused, even where the same model could be made of it.
        output: name of the folder that is to be written.
    """

    files: Mapping[str, bytes | str]
    source: str
    arrays: Arrays | None = None
    declared: tuple[str, Any] | None = None
    never: bool = False
    output: str = "model"
    options: Mapping[str, Any] = field(default_factory=dict)
