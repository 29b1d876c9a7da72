"""Embeddings or predictions of a whole data set, as parquet files.

    OUTPUT/manifest.json                     model, data and settings; at the end also rows, versions and hardware
    OUTPUT/<split>-<number>-of-<count>.parquet

Every file is computed by one process from a fixed part of the data and appears when it is complete: whatever is killed,
the same command goes on with the files that are missing, and any number of processes writes the same ones.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_vit.display import Displayed
from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.evaluation.embedding.folders import Disk, OutputFolder, output_folder
from hf_vit.evaluation.embedding.processes import MANIFEST_NAME, Job, Part, Settings, run_parts
from hf_vit.evaluation.reading import refuse_output_in
from hf_vit.evaluation.remote_model import NamedModel
from hf_vit.evaluation.runners import running
from hf_vit.families import refuse_regression
from hf_vit.loading.optimizing import engine_for
from hf_vit.loading.optimizing import optimize as make_faster
from hf_vit.results.redaction import redact_values

if TYPE_CHECKING:
    from hf_vit.data import ImageData
    from hf_vit.evaluation.ray_runner import RayRunner
    from hf_vit.loading.model import LoadedModel


@dataclass(frozen=True, repr=False)
class Embedded(Displayed):
    """What `embed` left.

    Attributes:
        folder: holds the files and manifest.json; of an object store its address.
        files: by name, those of earlier sessions included.
        rows: images in all of them.
        done_before: files that were there already.
        skipped: unreadable images that this call left out.
        notes: what a user should be told about the data.
        engine: what computes an optimized model; None for one that is as it was loaded.
    """

    folder: Path | str
    files: list[str]
    rows: int
    done_before: int
    skipped: list[str]
    notes: list[str]
    engine: str | None = None

    def overview(self) -> dict[str, object]:
        return {"folder": self.folder, "files": len(self.files), "images": f"{self.rows:,}"}


def embed(
    model: str,
    data: str,
    output: str | Path,
    *,
    splits: Sequence[str] | None = None,
    predictions: bool = False,
    top: int = 5,
    num_processes: int | None = None,
    batch_size: int = 32,
    max_num_patches: int | None = None,
    draft: bool = False,
    rows_per_file: int = 4096,
    streaming: bool = False,
    skip_bad_images: bool = False,
    device: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    seed: int = 0,
    optimize: bool = False,
    runner: str = "local",
    address: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Embedded:
    """Write what a model makes of every image into parquet files; go on where an earlier call was stopped.

    Columns: `index` (int64, row of the split; of a stream, row of its shard), `image` (the file's last two names, null
    where there is none), `label` (the class's name), and `embedding` (D x float32: what the classification head sees,
    the pooled output of a model without one) or `labels` and `probabilities` (of the `top` classes, best first).

    Args:
        model: folder, Hub id or "timm:NAME", of hf_vit, transformers or timm; for predictions a classifier.
        data: see `hf_vit.data.load_data`.
        output: a new or empty folder, or that of the same call before; a path, or the address of a folder in an object
            store (s3://BUCKET/..., gs://..., hf://datasets/USER/NAME/...) whose library for fsspec is installed.
        splits: of the data; by default all.
        predictions: the most likely classes instead of embeddings.
        top: classes a prediction, at most all.
        num_processes: each with the model in its memory, and a GPU of its own as long as there are; by default 1, of
            Ray one a GPU or, where it has none, a machine.
        batch_size: images a forward pass; part of what decides about the last digits, so fixed for a folder.
        max_num_patches: images in their own size and shape, shrunk where they hold more patches (`at_own_size`).
        draft: decode JPEG files at the smallest of their own scales that covers the size that images are resized to:
            faster, and other pixels by a little. Not of streams; fixed for a folder.
        rows_per_file: images a file. Of a stream every shard becomes a file, whatever its size.
        streaming: read parquet and webdataset files while computing, without looking at every image beforehand.
        skip_bad_images: leave out unreadable images instead of stopping.
        device: torch device; by default a GPU where there is one.
        image_column, label_column: of a list or table, see `load_data`.
        seed: of the splits that are cut where the data has none.
        optimize: compute by what is fastest for so many images (`engine_for`), of one size; fixed for a folder, too.
        runner: "local": this process, or processes of this machine; "ray": Ray, whose machines share model, data and
            output under these names.
        address: HOST:PORT of a cluster of Ray; by default Ray is started on this machine.
        report: is told (files done, files in all) after every file.

    Raises:
        UserError: bad input, an output folder that holds something else, outputs that are not finite, or a process that
            was killed. Complete files stay.
    """
    if min(top, batch_size, rows_per_file, 1 if num_processes is None else num_processes) < 1:
        raise UserError("top, the numbers of processes, of images a batch and of rows a file must be at least 1")
    if draft and (streaming or max_num_patches is not None):
        raise UserError("--draft is for tables of images that are resized to one size; leave it out")
    reading = dict(streaming=streaming, skip_bad_images=skip_bad_images, seed=seed)
    reading |= dict(image_column=image_column, label_column=label_column)
    settings = Settings(predictions, top, batch_size, rows_per_file, max_num_patches)
    refuse_output_in(data, output)
    folder = output_folder(output)
    _refuse_other_folder(folder)
    with running(runner, address, device, num_processes) as ray:
        processes = _Processes(num_processes or 1, device, ray)
        return _embedded(
            NamedModel(model, max_num_patches),
            data,
            folder,
            splits,
            reading,
            settings,
            optimize,
            draft,
            processes,
            report,
        )


@dataclass(frozen=True)
class _Processes:
    """Who computes: so many processes here, each on its device, or Ray."""

    number: int
    device: str | None
    ray: "RayRunner | None"


def _embedded(
    model: NamedModel,
    data: str,
    folder: OutputFolder,
    splits: Sequence[str] | None,
    reading: Mapping[str, Any],
    settings: Settings,
    optimize: bool,
    draft: bool,
    processes: _Processes,
    report: Callable[[int, int], None] | None,
) -> Embedded:
    from hf_vit.data import load_data
    from hf_vit.data.fingerprints import short_digests

    start, ray = time.perf_counter(), processes.ray
    subject = _open(model, settings.predictions, processes.device if ray is None else "cpu")
    images = load_data(data, image_size=subject.image_size, **reading)
    chosen = list(dict.fromkeys(splits or images.splits))
    if optimize and model.max_num_patches is None and not (ray is not None and ray.gpus):
        engine = _engine(subject, images, chosen, folder)
        model, settings = replace(model, engine=engine), replace(settings, engine=engine)
    if draft:
        settings = replace(settings, draft_side=subject.draft_side)
    manifest = _manifest(subject, images, chosen, settings)
    parts = [part for split in chosen for part in _parts(images, split, settings.rows_per_file)]
    with folder.alone():  # else two calls at once could both find no manifest, and mix their files
        _enter(folder, manifest)
    there = folder.names()
    missing = [part for part in parts if part.name not in there]
    of_chosen = {split: images.splits[split] for split in chosen}
    digests = {split: short_digests(images.seen[split]) for split in chosen if split in images.seen}
    job = Job(model, folder, of_chosen, images.readers, images.label_names, settings, digests)
    own = subject if ray is not None or processes.number == 1 else None
    if ray is None and own is not None and missing:
        _faster(own, settings.engine)
    del subject  # of several processes each loads its own
    one_more = _counting(parts, missing, report)
    skipped = run_parts(job, missing, own, processes.number, processes.device, ray, one_more)
    rows = _finish(folder, parts, manifest, time.perf_counter() - start, processes.device)
    left_out, before = sorted({*images.skipped, *skipped}), len(parts) - len(missing)
    place = folder.path if isinstance(folder, Disk) else str(folder)
    return Embedded(place, [part.name for part in parts], rows, before, left_out, images.notes, settings.engine)


def _open(model: NamedModel, predictions: bool, device: str | None) -> "LoadedModel":
    subject = model.opened(device)
    if predictions and not subject.label_sets:
        raise UserError(
            f"{model.model} is no classifier, so it predicts no classes; leave --predictions out for embeddings"
        )
    if predictions:
        remedy = "hf-vit predict gives its values; leave --predictions out for embeddings"
        refuse_regression(subject.model, model.model, "--predictions", remedy)
    return subject


def _engine(subject: "LoadedModel", images: "ImageData", splits: list[str], folder: OutputFolder) -> str | None:
    """What repays itself on the images of all splits; of a folder that was begun, what it was begun with."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # what is wrong with it is told by `_enter`
        return _manifest_in(folder)["settings"].get("engine")
    numbers = [images.num_examples(split) for split in splits]
    return engine_for(subject, None if None in numbers else sum(number or 0 for number in numbers))


def _faster(subject: "LoadedModel", engine: str | None) -> "LoadedModel":
    if engine is not None:
        make_faster(subject, engine)
    return subject


def _parts(images: "ImageData", split: str, rows_per_file: int) -> list[Part]:
    if images.readers:
        count = images.readers[split][0].num_shards
    else:
        rows = images.num_examples(split)
        assert rows is not None
        count = max(1, -(-rows // rows_per_file))
    return [Part(split, number, count) for number in range(count)]


def _manifest(subject: "LoadedModel", images: "ImageData", splits: list[str], settings: Settings) -> dict[str, Any]:
    manifest: dict[str, Any] = {
        "model": subject.describe(),
        "data": {"name": images.name, "fingerprint": images.fingerprint, "splits": splits},
        "settings": {**_given(settings), "streaming": bool(images.readers)},
    }
    return cast(dict[str, Any], redact_values(json.loads(json.dumps(manifest))))


def _given(settings: Settings) -> dict[str, object]:
    """Without an option that earlier versions did not have and nobody gave: their folders go on."""
    return {name: value for name, value in asdict(settings).items() if value is not None}


def _refuse_other_folder(folder: OutputFolder) -> None:
    inside = sorted(folder.names())
    if inside and MANIFEST_NAME not in inside:
        raise UserError(f"the output folder {folder} holds something else ({inside[0]}); choose a new or empty one")


def _manifest_in(folder: OutputFolder) -> dict[str, Any]:
    with folder.open(MANIFEST_NAME) as file:
        manifest = json.loads(file.read())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("settings"), dict):
        raise ValueError("it names no settings")
    return manifest


def _enter(folder: OutputFolder, manifest: dict[str, Any]) -> None:
    """Record what is computed, or make sure that the folder holds the beginning of just that."""
    try:
        before = _manifest_in(folder)
    except FileNotFoundError:
        _write_manifest(folder, manifest)
        return
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder}/{MANIFEST_NAME} is damaged, or another command's ({error}); give another output folder, or "
            "delete this one to start anew"
        ) from error
    for name, now in manifest.items():
        if before.get(name) != now:
            raise UserError(
                f"{folder} was begun with {name} {before.get(name)}, now it is {now}; give the same again, or another "
                "output folder"
            )


def _write_manifest(folder: OutputFolder, manifest: dict[str, Any]) -> None:
    folder.write(MANIFEST_NAME, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())


def _counting(
    parts: Sequence[Part], missing: Sequence[Part], report: Callable[[int, int], None] | None
) -> Callable[[], None]:
    done = len(parts) - len(missing)

    def one_more() -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, len(parts))

    return one_more


def _finish(
    folder: OutputFolder, parts: Sequence[Part], manifest: dict[str, Any], seconds: float, device: str | None
) -> int:
    """Complete the manifest; returns the number of rows in all files."""
    from pyarrow import parquet

    rows = 0
    for part in parts:
        try:
            with folder.open(part.name) as file:
                rows += parquet.read_metadata(file).num_rows
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise UserError(
                f"{folder}/{part.name} is damaged ({error}); delete it and run the command again"
            ) from error
    finished = {"rows": rows, "seconds": round(seconds, 3), "versions": versions(), "hardware": hardware(device)}
    _write_manifest(folder, manifest | finished)
    return rows
