"""ONNX Runtime Web, which runs a graph in the browser: of one version, known by its SHA-256, and kept once fetched."""

import hashlib
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from hf_vit.conversion.fetch.download import download
from hf_vit.errors import UserError

VERSION = "1.30.0"
ADDRESS = f"https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"
SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
# For WebAssembly, and for WebGPU where the browser has it.
FILES = (
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)


def check_runtime(source: str | Path | None) -> None:
    """Raise a UserError where `source` is given and is no folder of these files."""
    missing = [name for name in FILES if source is not None and not (Path(source) / name).is_file()]
    if missing:
        raise UserError(
            f"--runtime {source} has no {missing[0]}; give the folder dist of the npm package onnxruntime-web {VERSION}"
        )


def copy_runtime(folder: Path, source: str | Path | None = None) -> None:
    """Write the files into `folder`, which is made.

    Args:
        source: a folder that holds them, as `dist` of the npm package does; by default they are fetched, once.

    Raises:
        UserError: they cannot be had.
    """
    check_runtime(source)
    archive = _fetched() if source is None else None
    folder.mkdir(parents=True)
    if source is not None:
        for name in FILES:
            shutil.copyfile(Path(source) / name, folder / name)
    if archive is not None:
        with tarfile.open(archive) as opened:
            for member in opened:
                if (name := PurePosixPath(member.name).name) in FILES and (content := opened.extractfile(member)):
                    with content, (folder / name).open("wb") as file:
                        shutil.copyfileobj(content, file)


def _fetched() -> Path:
    try:
        archive = download(ADDRESS, checked_later=True)
    except UserError as error:
        raise UserError(f"{error}; or give the files with --runtime DIR") from error
    with archive.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != SHA256:
        archive.unlink()  # get it anew next time
        raise UserError(f"{ADDRESS} is another file than it was; try again, or give the files with --runtime DIR")
    return archive
