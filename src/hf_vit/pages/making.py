"""Write the folder of a static page (`hf-vit page`), complete or not at all.

ONNX Runtime Web runs the graph in the browser: one version, checked by SHA-256 and cached.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hf_vit.conversion.fetching import HUB_ID, download, is_local
from hf_vit.conversion.loading import open_model
from hf_vit.conversion.progress import progress, quiet_transformers
from hf_vit.conversion.readers import hash_files
from hf_vit.conversion.targets.graph_targets import OnnxGraph
from hf_vit.conversion.targets.target import has_head
from hf_vit.data.image_data import ImageData
from hf_vit.data.images import decode_image, undecode_images
from hf_vit.data.labels import list_classes
from hf_vit.data.load import load_data
from hf_vit.data.sources import refuse_output_in
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.families import refuse_diverged, refuse_other_channels, refuse_regression
from hf_vit.hub.card_metadata import find_common_license
from hf_vit.hub.contents import PAGE_FILES
from hf_vit.hub.model_folder import CARD_NAME, PAGE_NAME
from hf_vit.pages.description import describe_model
from hf_vit.pages.graph import count_inner_values, write_graph
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.writing import explain_write_errors

# Limit for weights and maps: WebAssembly has 4 GB, and the browser holds the file and its decoded content.
MAX_BYTES = 10**9
NUM_EXAMPLES, _EXAMPLE_PX = 10, 640


@dataclass(frozen=True, repr=False)
class PageResult(Displayed):
    """A written page: its folder, the names of its models, and the folder's size without the runtime's files."""

    output: Path
    models: list[str]
    megabytes: float

    def overview(self) -> dict[str, object]:
        """Return folder, models and size."""
        size = f"{self.megabytes:.1f} MB without the runtime"
        return {"output": self.output, "models": ", ".join(self.models), "size": size}


def make_page(
    models: Sequence[str | Path], output: str | Path, *, images: str | None = None, runtime: str | Path | None = None
) -> PageResult:
    """Write a page that runs classifiers in the visitor's browser; the folder appears complete or not at all.

    Args:
        models: folders, Hub ids, or anything that `from_hub` loads; several models appear side by side.
        output: new folder.
        images: data set whose test images become examples on the page, see `load_data`.
        runtime: folder with the files of ONNX Runtime Web; by default they are downloaded once and cached.

    Raises:
        UserError: a model does not exist, is not a classifier or is too large for a browser, the page does not support
            its image processor, or the runtime cannot be downloaded.
    """
    refuse_output_in(images, output)
    target = prepare_output(output)
    check_runtime(runtime)
    OnnxGraph().require_libraries()
    examples = None if images is None else load_data(images, skip_bad_images=True, splits=["test"], multi_label=True)
    with quiet_transformers(), deliver_folder(target) as folder:
        names = shorten_names(models)
        descriptions = [
            _write_model(model, name, folder / "models" / str(number), target)
            for number, (model, name) in enumerate(zip(models, names, strict=True))
        ]
        with explain_write_errors(target):
            page = {"models": descriptions, "examples": [] if examples is None else _write_examples(examples, folder)}
            content = json.dumps(page, indent=1, ensure_ascii=False) + "\n"
            (folder / PAGE_NAME).write_text(content, encoding="utf-8")
            (folder / CARD_NAME).write_text(_make_space_card(names, models), encoding="utf-8")
            for file in PAGE_FILES:
                (folder / file).write_bytes((resources.files("hf_vit.pages") / "static" / file).read_bytes())
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            with progress("fetching the runtime"):
                copy_runtime(folder / "runtime", runtime)
    return PageResult(Path(output).expanduser(), names, size / 1e6)


def shorten_names(models: Sequence[str | Path]) -> list[str]:
    """Return the shortest ends of names and paths that differ, as a page should not publish whole local paths."""
    paths = [Path(model).resolve().parts if Path(model).is_dir() else Path(str(model)).parts for model in models]
    names: list[str] = []
    for number, path in enumerate(paths, start=1):
        others = [other for other in paths if other is not path]
        ends = (path[-length:] for length in range(1, max(len(path), 2)))
        unique_end = next((end for end in ends if all(other[-len(end) :] != end for other in others)), None)
        # Only the whole path may differ from the others.
        names.append("/".join(unique_end) if unique_end else f"{path[-1]} ({number})")
    return names


def _write_model(source: str | Path, name: str, folder: Path, output: Path) -> dict[str, Any]:
    """Export a model into a folder, and return its description for the page; errors name the page's `output`."""
    loaded, processor = open_model(source)
    refuse_diverged(loaded, str(source), "shown")
    loaded = loaded.float()  # browsers compute in float32
    if not has_head(loaded) or not type(loaded).__name__.endswith("ForImageClassification"):
        raise UserError(f"{source} is not an image classifier; give one, or fine-tune it first (hf-vit finetune)")
    refuse_regression(loaded, str(source), "a page")
    refuse_other_channels(loaded.config, str(source))
    weights, maps = 4 * loaded.num_parameters(), 4 * count_inner_values(loaded.config)
    if weights + maps > MAX_BYTES:
        sizes = f"{weights / 1e6:,.0f} MB of weights and {maps / 1e6:,.0f} MB of maps"
        remedy = f"give a smaller model or image size, for at most {MAX_BYTES / 1e6:,.0f} MB"
        raise UserError(f"{name} is too large for a browser: {sizes}; {remedy}")
    description = describe_model(loaded, processor, name, Path(source) if Path(source).is_dir() else None)
    with progress(f"exporting {name}"), explain_write_errors(output):
        folder.mkdir(parents=True)
        outputs = write_graph(loaded, folder / "model.onnx")
    size = (folder / "model.onnx").stat().st_size
    return description | {"outputs": outputs, "bytes": size, "folder": f"models/{folder.name}"}


def _write_examples(data: ImageData, folder: Path) -> list[dict[str, str]]:
    """Write test images as examples, one for each label (or set of labels), at most `NUM_EXAMPLES`."""
    split = undecode_images(data.split("test" if "test" in data.splits else next(iter(data.splits))))
    first_images: dict[str, int] = {}  # label -> index of its first image; reading labels decodes no image
    for index, label in enumerate(split["label"]):
        names = [data.label_names[number] for number in list_classes(label)]
        first_images.setdefault(", ".join(names), index)
    (folder / "examples").mkdir()
    examples: list[dict[str, str]] = []
    for number, (label, index) in enumerate(sorted(list(first_images.items())[:NUM_EXAMPLES])):
        picture = decode_image(split[index]["image"])
        file = f"examples/{number}.png"
        picture.thumbnail((_EXAMPLE_PX, _EXAMPLE_PX))
        picture.save(folder / file)
        examples.append({"file": file, "label": label})
    return examples


def _make_space_card(names: Sequence[str], models: Sequence[str | Path]) -> str:
    """Return README.md of a static Space; the Hub pages of the models in its metadata link to the Space."""
    import yaml

    metadata: dict[str, Any] = {
        "title": ", ".join(names),
        "sdk": "static",
        "app_file": "index.html",
        "models": [str(model) for model in models if HUB_ID.fullmatch(str(model)) and not is_local(model)],
        **find_common_license([str(model) for model in models]),
    }
    known = {name: value for name, value in metadata.items() if value}
    text = "A page that runs these models in the visitor's browser, written by `hf-vit page`."
    return f"---\n{yaml.safe_dump(known, allow_unicode=True, sort_keys=False)}---\n\n{text}\n"


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
    """Raise a UserError unless `source` is None or holds all files of the right version of ONNX Runtime Web."""
    if source is None:
        return
    remedy = f"give the folder dist of the npm package onnxruntime-web {VERSION}"
    for name in FILES:
        file = Path(source) / name
        if not file.is_file():
            raise UserError(f"--runtime {source} has no {name}; {remedy}")
        if hash_files([file]) != FILES[name]:
            raise UserError(f"--runtime {source} has another version of {name} than {VERSION}; {remedy}")


def copy_runtime(folder: Path, source: str | Path | None = None) -> None:
    """Create `folder` and write the runtime's files into it; `source` is as in `make_page`, which has checked it."""
    files = [_download_file(name) if source is None else Path(source) / name for name in FILES]
    folder.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _download_file(name: str) -> Path:
    """Return a file of the runtime from the cache, downloading it if needed."""
    remedy = "give a folder with the files as --runtime DIR"
    try:
        file = download(f"{BASE_URL}/{name}", checked_later=True, sha256=FILES[name])
    except UserError as error:
        raise UserError(f"{error}; or {remedy}") from error
    if hash_files([file]) != FILES[name]:
        file.unlink()  # so that it is downloaded again next time
        raise UserError(f"the checksum of {BASE_URL}/{name} is wrong; try again, or {remedy}")
    return file
