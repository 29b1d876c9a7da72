"""`hf-vit page`: the folder of a static page, complete or not at all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hf_vit.conversion.fetching import HUB_ID, is_local
from hf_vit.conversion.loading import open_model
from hf_vit.conversion.progress import progress, quiet_transformers
from hf_vit.conversion.targets.graph_targets import OnnxGraph
from hf_vit.conversion.targets.target import has_head
from hf_vit.data.image_data import ImageData
from hf_vit.data.images import to_rgb
from hf_vit.data.labels import classes_of
from hf_vit.data.load import load_data
from hf_vit.display import Displayed
from hf_vit.errors import UserError
from hf_vit.families import refuse_regression
from hf_vit.hub.card_metadata import common_license
from hf_vit.hub.contents import PAGE_FILES
from hf_vit.hub.model_folder import CARD_NAME, PAGE_NAME
from hf_vit.pages.description import description
from hf_vit.pages.graph import numbers_inside, write_graph
from hf_vit.pages.runtime import check_runtime, copy_runtime
from hf_vit.results.delivery import free_folder, new_folder
from hf_vit.results.writing import saying_why

# Of weights and maps: a browser's WebAssembly has 4 GB, and holds the file beside what it reads of it.
LARGEST_BYTES = 10**9
NUM_EXAMPLES, _EXAMPLE_PX = 10, 640


@dataclass(frozen=True, repr=False)
class PageResult(Displayed):
    """What was written.

    Attributes:
        output: the folder.
        models: their names.
        megabytes: of the folder, without the runtime's files.
    """

    output: Path
    models: list[str]
    megabytes: float

    def overview(self) -> dict[str, object]:
        size = f"{self.megabytes:.1f} MB, and the runtime"
        return {"output": self.output, "models": ", ".join(self.models), "size": size}


def make_page(
    models: Sequence[str | Path],
    output: str | Path,
    *,
    images: str | None = None,
    runtime: str | Path | None = None,
) -> PageResult:
    """Write a page that runs classifiers in the visitor's browser; the folder appears complete or not at all.

    Args:
        models: folders, Hub ids, or anything that `from_hub` loads; several are shown beside each other.
        output: new folder.
        images: data whose test images become examples on the page, as `load_data` takes it.
        runtime: folder with the files of ONNX Runtime Web; by default they are fetched once and kept.

    Raises:
        UserError: there is no such model, it is no classifier or too large for a browser, the page cannot prepare
            images as its processor does, or the runtime cannot be had.
    """
    place = free_folder(output)
    check_runtime(runtime)
    OnnxGraph().require_libraries()
    examples = None if images is None else load_data(images, skip_bad_images=True)
    with quiet_transformers(), new_folder(place) as folder:
        names = distinct_names(models)
        described = [
            _write_model(model, name, folder / "models" / str(number), place)
            for number, (model, name) in enumerate(zip(models, names, strict=True))
        ]
        with saying_why(place):
            page = {"models": described, "examples": _write_examples(examples, folder)}
            content = json.dumps(page, indent=1, ensure_ascii=False) + "\n"
            (folder / PAGE_NAME).write_text(content, encoding="utf-8")
            (folder / CARD_NAME).write_text(_space_card(names, models), encoding="utf-8")
            for file in PAGE_FILES:
                (folder / file).write_bytes((resources.files("hf_vit.pages") / "static" / file).read_bytes())
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            with progress("fetching the runtime"):
                copy_runtime(folder / "runtime", runtime)
    return PageResult(Path(output), names, size / 1e6)


def distinct_names(models: Sequence[str | Path]) -> list[str]:
    """Return the last parts of names and paths that tell the models apart; a page shows everybody no more of them."""
    parts = [Path(model).resolve().parts if Path(model).is_dir() else Path(str(model)).parts for model in models]
    names: list[str] = []
    for number, own in enumerate(parts):
        others = [each for each in parts if each is not own]
        depth = next((end for end in range(1, len(own)) if all(each[-end:] != own[-end:] for each in others)), None)
        names.append("/".join(own[-depth:]) if depth else f"{own[-1]} ({number + 1})")
    return names


def _write_model(source: str | Path, name: str, folder: Path, place: Path) -> dict[str, Any]:
    loaded, processor = open_model(source)
    loaded = loaded.float()  # what a browser computes in, however the weights are stored
    if not has_head(loaded) or not type(loaded).__name__.endswith("ForImageClassification"):
        raise UserError(f"{source} is not an image classifier; give one, or fine-tune it (hf-vit finetune)")
    refuse_regression(loaded, str(source), "a page")
    if loaded.config.num_channels != 3:
        raise UserError(
            f"{source} takes images of {loaded.config.num_channels} channels; the page shows RGB, which has 3"
        )
    weights, inside = 4 * loaded.num_parameters(), 4 * numbers_inside(loaded.config)
    if weights + inside > LARGEST_BYTES:
        raise UserError(
            f"{name} is too large for a browser: {weights / 1e6:,.0f} MB of weights and {inside / 1e6:,.0f} MB of "
            f"maps, of which {LARGEST_BYTES / 1e6:,.0f} MB fit; give a smaller model or a smaller image size"
        )
    about = description(loaded, processor, name, Path(source) if Path(source).is_dir() else None)
    with progress(f"exporting {name}"), saying_why(place):
        folder.mkdir(parents=True)
        about["outputs"] = write_graph(loaded, folder / "model.onnx")
        about["bytes"] = (folder / "model.onnx").stat().st_size
    about["folder"] = f"models/{folder.name}"
    return about


def _write_examples(data: ImageData | None, folder: Path) -> list[dict[str, str]]:
    """Write the first images of the test split that show other classes than those before."""
    if data is None:
        return []
    split: Any = data.split("test" if "test" in data.splits else next(iter(data.splits)))
    first: dict[str, int] = {}  # what an image shows -> its place; no image is decoded for that
    for index, label in enumerate(split["label"]):
        names = [data.label_names[each] for each in classes_of(label)]
        first.setdefault(", ".join(names), index)
    (folder / "examples").mkdir()
    written: list[dict[str, str]] = []
    for number, (label, index) in enumerate(sorted(list(first.items())[:NUM_EXAMPLES])):
        picture, file = to_rgb(split[index]["image"]), f"examples/{number}.png"
        picture.thumbnail((_EXAMPLE_PX, _EXAMPLE_PX))
        picture.save(folder / file)
        written.append({"file": file, "label": label})
    return written


def _space_card(names: Sequence[str], models: Sequence[str | Path]) -> str:
    """Return README.md of a static Space: its metadata name the models of the Hub, whose own pages then link to it."""
    import yaml

    metadata: dict[str, Any] = {"title": ", ".join(names), "sdk": "static", "app_file": "index.html"}
    if on_hub := [str(model) for model in models if HUB_ID.fullmatch(str(model)) and not is_local(model)]:
        metadata["models"] = on_hub
    if (license := common_license([str(model) for model in models])) is not None:
        metadata["license"] = license
    about = "A page that runs these models in the visitor's browser, written by `hf-vit page`."
    return f"---\n{yaml.safe_dump(metadata, allow_unicode=True, sort_keys=False)}---\n\n{about}\n"
