"""From a path to the reader that its content asks for: a file, or a folder that transformers or timm saved."""

import zipfile
from pathlib import Path
from typing import Any

from hf_vit.conversion.readers.checkpoint import CheckpointReader, Companions
from hf_vit.conversion.readers.json import read_json
from hf_vit.conversion.readers.npz import NpzReader
from hf_vit.conversion.readers.safetensors import SafetensorsReader
from hf_vit.conversion.readers.shards import ShardedReader
from hf_vit.conversion.readers.torch import TorchReader
from hf_vit.errors import UserError

CONFIG, OF_OPEN_CLIP = "config.json", "open_clip_config.json"  # the first that is there is read; so of the others
PROCESSOR, WHOLE_PROCESSOR = "preprocessor_config.json", "processor_config.json"  # the latter of text, too
# As transformers, timm and OpenCLIP name the weights of a folder.
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")

READABLE = "a .npz, .safetensors or PyTorch file, or a folder that transformers or timm saved"
_SIGNATURES = {
    b"\x93NUMPY": "a single .npy array, not an .npz archive of many",
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x80": "a Python pickle (an old .pth or .bin file), which is never loaded; save its tensors as .safetensors",
    b"\x1f\x8b": "compressed by gzip; unpack it first",
}


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint file, or a folder with config.json and weights.

    Raises:
        UserError: there is nothing, or nothing that can be read; the message says what it is instead.
    """
    path = Path(path)
    if not path.is_dir():
        return open_file(path)
    try:
        return _open_folder(path)
    except UserError as error:  # of one of its files, by its name alone
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from error


def open_file(path: Path) -> CheckpointReader:
    """Open a single file by its content, whatever its name; see `open_checkpoint`."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; give {READABLE}")
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise UserError(f"{path.name} is empty; get the file again")
    if head.startswith(b"PK"):
        return TorchReader(path) if _is_torch_archive(path) else NpzReader(path)
    if head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return SafetensorsReader(path)
    what = next((what for signature, what in _SIGNATURES.items() if head.startswith(signature)), None)
    what = what or "no .npz archive, .safetensors or PyTorch file: it is damaged, or another kind of file"
    raise UserError(f"{path.name} is {what}; give {READABLE}")


def _open_folder(folder: Path) -> CheckpointReader:
    """Open the weights of a saved folder, and read what its config and preprocessor files say.

    Raises:
        UserError: a file is missing, damaged, or does not fit the others.
    """
    configs = [folder / name for name in (CONFIG, OF_OPEN_CLIP) if (folder / name).is_file()]
    if not configs:
        raise UserError(
            f"{folder} is a folder without {CONFIG}; give a file, or a folder that transformers or timm saved"
        )
    companions = Companions(read_json(configs[0]), _processor(folder))
    weights = [name for name in WEIGHTS if (folder / name).is_file() or (folder / f"{name}.index.json").is_file()]
    if not weights:
        raise UserError(f"{folder} holds no weights; it needs {' or '.join(WEIGHTS)}, or the index of its parts")
    single = folder / weights[0]
    reader = open_file(single) if single.is_file() else ShardedReader(folder / f"{single.name}.index.json", open_file)
    reader.companions = companions
    return reader


def _processor(folder: Path) -> dict[str, Any] | None:
    """What is said of the pixels, in a file of its own or beside what is said of texts."""
    if (folder / PROCESSOR).is_file():
        return read_json(folder / PROCESSOR)
    whole = read_json(folder / WHOLE_PROCESSOR) if (folder / WHOLE_PROCESSOR).is_file() else {}
    inner: object = whole.get("image_processor")
    if not isinstance(inner, dict | None):
        raise UserError(f"{WHOLE_PROCESSOR} gives image_processor={inner!r:.80}; it needs the fields of one")
    return inner


def _is_torch_archive(path: Path) -> bool:
    """Whether a zip archive has the pickle that PyTorch writes; what is damaged is left to the reader of .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") or name == "data.pkl" for name in archive.namelist())
    except Exception:  # damaged: the reader says how, with every check it has
        return False
