"""Provide ONNX Runtime Web, which runs a graph in the browser: one version, checked by SHA-256 and cached."""

import hashlib
import shutil
from pathlib import Path

from hf_vit.conversion.fetching import download
from hf_vit.errors import UserError

VERSION = "1.30.0"
BASE_URL = f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{VERSION}/dist"
# File -> SHA-256; the files cover WebAssembly, and WebGPU if the browser supports it.
FILES = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "ort-wasm-simd-threaded.asyncify.mjs": "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",
    "ort-wasm-simd-threaded.asyncify.wasm": "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}


def check_runtime(source: str | Path | None) -> None:
    """Raise a UserError if `source` is given and is not a folder of exactly these files."""
    if source is None:
        return
    remedy = f"give the folder dist of the npm package onnxruntime-web {VERSION}"
    for name in FILES:
        file = Path(source) / name
        if not file.is_file():
            raise UserError(f"--runtime {source} has no {name}; {remedy}")
        if not _is_unchanged(file):
            raise UserError(f"--runtime {source} has another version of {name} than {VERSION}; {remedy}")


def copy_runtime(folder: Path, source: str | Path | None = None) -> None:
    """Create `folder` and write the runtime's files into it.

    Args:
        folder: a folder that does not exist yet.
        source: folder with the files, such as `dist` of the npm package; by default they are downloaded once.
    """
    check_runtime(source)
    files = [_download_file(name) if source is None else Path(source) / name for name in FILES]
    folder.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _download_file(name: str) -> Path:
    """Return a file of the runtime from the cache, downloading it if needed."""
    try:
        file = download(f"{BASE_URL}/{name}", checked_later=True)
    except UserError as error:
        raise UserError(f"{error}; or give a folder with the files as --runtime DIR") from error
    if not _is_unchanged(file):
        file.unlink()  # so that it is downloaded again next time
        raise UserError(
            f"the checksum of {BASE_URL}/{name} is wrong; try again, or give a folder with the files as --runtime DIR"
        )
    return file


def _is_unchanged(file: Path) -> bool:
    """Return whether a file has the expected SHA-256."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == FILES[file.name]
