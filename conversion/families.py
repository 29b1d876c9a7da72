"""Which kind of checkpoint a file is: an origin that can be converted, or a refusal that names the likely family."""

import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_vit.errors import UserError

from . import vit_jax, vit_jax_hybrid
from .origins import Origin
from .reader import Shape

ORIGINS: tuple[Origin, ...] = (vit_jax.ORIGIN, vit_jax_hybrid.ORIGIN)

_STEM = r"(^|/)(conv_root|root_block|block\d+/unit\d+)/"
_TRANSFORMER = r"(^|/)Transformer/encoder"


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint that is known by its keys but not converted.

    Attributes:
        name: what a message calls it.
        marks: regular expressions; each must be found in some key.
    """

    name: str
    marks: tuple[str, ...]


# The first that fits is named.
FAMILIES = (
    Family("an MLP-Mixer (arXiv 2105.01601), which is no vision transformer", (r"(^|/)MixerBlock_\d+/",)),
    Family(
        "a hybrid ViT of another code (ResNet stem, Transformer), which is not supported yet", (_STEM, _TRANSFORMER)
    ),
    Family("a BiT ResNet (arXiv 1912.11370), which is not supported yet", (_STEM,)),
    Family("a two-tower model of big_vision (image and text), which is not supported yet", (r"^params/(img|txt)/",)),
    Family("a ViT of big_vision, which is not supported yet", (_TRANSFORMER,)),
    Family("a ViT of timm, which is not supported yet", (r"(^|\.)blocks\.\d+\.(attn\.qkv|norm1)\.",)),
    Family(
        "a ViT of transformers, which is not supported yet",
        (r"(^|\.)(layer\.\d+\.attention\.attention\.query|layers\.\d+\.attention\.q_proj)\.",),
    ),
)

_READABLE = "; hf-vit convert reads: " + ", ".join(origin.title for origin in ORIGINS)
_HEAD_BYTES = 4 * 2**20  # of a header or a pickle that is searched for key names


def find_origin(shapes: Mapping[str, Shape], file_name: str) -> Origin:
    """The origin of a file with these keys.

    Raises:
        UserError: no origin recognises it; the message names the likely family.
    """
    for origin in ORIGINS:
        if origin.recognises(shapes):
            return origin
    examples = ", ".join(list(shapes)[:3])
    family = likely_family(shapes) or f"no checkpoint that is known here (it holds {examples}, ...)"
    raise UserError(f"{file_name} looks like {family}{_READABLE}")


def likely_family(keys: Iterable[str]) -> str | None:
    """Name of the first family all of whose marks are found among the keys."""
    known = list(keys)
    for family in FAMILIES:
        if all(any(re.search(mark, key) for key in known) for mark in family.marks):
            return family.name
    return None


def refuse_other_formats(path: Path) -> None:
    """Return if the file may be an .npz archive; otherwise say what it is instead.

    Raises:
        UserError: it is a folder, missing, empty, or in another format.
    """
    if path.is_dir():
        what = "a folder saved by transformers" if (path / "config.json").is_file() else "a folder"
        raise UserError(f"{path} is {what}, not a checkpoint file{_READABLE}")
    if not path.is_file():
        raise UserError(f"there is no file {path}; give the path of a checkpoint{_READABLE}")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise UserError(f"{path.name} is empty; get the file again")
    what = _other_format(path, head)
    if what is not None:
        raise UserError(f"{path.name} is {what}{_READABLE}")


def _other_format(path: Path, head: bytes) -> str | None:
    if head.startswith(b"PK"):
        return _torch_archive(path)
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return "a .safetensors file" + _content(head)
    signatures = {
        b"\x93NUMPY": "a single .npy array, not an .npz archive of many",
        b"\x89HDF": "an HDF5 file (Keras)",
        b"\x80": "a Python pickle (an old .pth or .bin file), which is never loaded",
        b"\x1f\x8b": "compressed by gzip; unpack it first",
    }
    for signature, what in signatures.items():
        if head.startswith(signature):
            return what
    return "no .npz archive: it is damaged, or another kind of file"


def _torch_archive(path: Path) -> str | None:
    """A .pth file is a zip archive too, with its names in a pickle; the pickle is searched, never loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if not pickles:
                return None
            with archive.open(pickles[0]) as file:
                return "a PyTorch file (.pth or .bin)" + _content(file.read(_HEAD_BYTES))
    except Exception:  # damaged: the reader says how, with every check it has
        return None


def _content(head: bytes) -> str:
    names = [name.decode() for name in re.findall(rb"[A-Za-z_][\w./]{3,200}", head)]
    family = likely_family(names)
    return f" that looks like {family}" if family else ""
