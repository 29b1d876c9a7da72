"""Write embeddings or predictions of a whole data set to parquet files.

    OUTPUT/manifest.json                     model, data and settings; at the end also rows, versions and hardware
    OUTPUT/<split>-<number>-of-<count>.parquet

Every file holds a fixed part of the data and appears when it is complete. After an interruption the same command writes
the missing files, and any number of processes writes the same files.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from hf_vit.data.fingerprints import hash_text
from hf_vit.data.sources import refuse_output_in
from hf_vit.display import Displayed
from hf_vit.environment import list_versions, read_hardware
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import (
    NamedModel,
    compute_features,
    compute_layer_features,
    compute_scores,
    find_largest,
    read_and_prepare,
)
from hf_vit.evaluation.runners import keep_sizes, open_runner
from hf_vit.families import refuse_regression
from hf_vit.loading.model import LoadedModel, load_model
from hf_vit.loading.optimizing import optimize as make_faster
from hf_vit.loading.optimizing import select_engine
from hf_vit.loading.outputs import FeatureChoice, refuse_dense, refuse_features
from hf_vit.repositories.stores import (
    explain_missing_library,
    explain_store_errors,
    is_store_url,
    to_path,
    write_object,
)
from hf_vit.results.facts import lock_folder, redact_json
from hf_vit.writing import explain_write_errors, reject_url, remove_leftovers, write_atomically

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import numpy as np
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from PIL.Image import Image
    from transformers import BatchFeature

    from hf_vit.data import ImageData
    from hf_vit.evaluation.ray_runner import RayRunner

    # The rows of a batch, None after the last one of a part; and the unreadable images left out since the last batch.
    Answer = tuple["pa.Table | None", list[str]]

MANIFEST_NAME = "manifest.json"
_ROWS_AT_ONCE = 256  # rows of a table that are listed together
_ROW_GROUP = 4096  # rows that are written together as one parquet row group
_worker: "tuple[Job, LoadedModel] | None" = None  # set in worker processes


@dataclass(frozen=True, repr=False)
class Embedded(Displayed):
    """The result of `embed`.

    Attributes:
        folder: path or URL of the folder with the files and manifest.json.
        files: names of all files, including those of earlier calls.
        rows: images in all files.
        done_before: number of files from earlier calls.
        skipped: unreadable images that this call left out.
        notes: on the data, for the user.
        engine: engine of an optimized model, else None.
    """

    folder: Path | str
    files: list[str]
    rows: int
    done_before: int
    skipped: list[str]
    notes: list[str]
    engine: str | None = None

    def overview(self) -> dict[str, object]:
        """Return the lines that `print` shows."""
        return {"folder": self.folder, "files": len(self.files), "images": f"{self.rows:,}"}


@dataclass(frozen=True)
class Settings:
    """The options that determine the content of the files, see `embed`."""

    predictions: bool
    top: int
    batch_size: int
    rows_per_file: int
    max_num_patches: int | None = None
    engine: str | None = None
    draft_side: int | None = None
    features: str | None = None
    layers: int | None = None
    norm: bool | None = None
    image_column: str | None = None  # this and the next two: of a stream
    label_column: str | None = None
    seed: int | None = None

    @property
    def choice(self) -> FeatureChoice:
        """The features that replace the head's input, if there are any."""
        return FeatureChoice(self.features or "", self.layers or 1, self.norm is not False)


def embed(
    model: str,
    data: "str | Path | ImageData",
    output: str | Path,
    *,
    splits: Sequence[str] | None = None,
    predictions: bool = False,
    top: int = 5,
    features: str | None = None,
    layers: int = 1,
    norm: bool = True,
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
    """Write embeddings or predictions of every image to parquet files, and resume an interrupted call.

    The columns are `index` (int64, row of the split, or of the shard of a stream; skipped images do not count), `image`
    (last two parts of the file's path, or null), `label` (name of the class), and `embedding` (D x float32, the input
    of the classification head, or the pooled output without a head) or `labels` and `probabilities` (of the `top`
    classes, best first).

    Args:
        model: see `load_model`; for predictions a classifier.
        data, streaming, skip_bad_images, image_column, label_column, seed: see `hf_vit.data.load_data`.
        output: a new or empty folder, or the folder of an interrupted call: a path or a URL in an object store
            (s3://BUCKET/..., gs://..., hf://datasets/USER/NAME/...) whose fsspec library is installed.
        splits: splits of the data; by default all.
        predictions: write the most likely classes instead of embeddings.
        top: number of classes per image.
        features, layers, norm: other features than the head's input, see `hf_vit.loading.outputs.read_layer_features`;
            of "patches" an embedding is a list of vectors, row by row. May not change when a call is resumed.
        num_processes: number of processes with a model, and a GPU if there are enough; by default 1, or with Ray one
            for every GPU or, without GPUs, every machine.
        batch_size: images per forward pass; affects the last digits, so it may not change when a call is resumed.
        max_num_patches, draft: see `evaluate_protocol`; may not change either.
        rows_per_file: images per file; every shard of a stream is one file.
        device: torch device, by default a GPU if there is one.
        optimize: run the engine that pays for so many images of one size (`select_engine`); may not change either.
        runner, address: see `evaluate_protocol`.
        report: called with (finished files, all files) after every file.

    Raises:
        UserError: the input is wrong, the output folder has other content, outputs are NaN or infinite, or a process
            was killed. Complete files are kept.
    """
    from hf_vit.data import load_data

    numbers = {"top": top, "batch-size": batch_size, "rows-per-file": rows_per_file, "num-processes": num_processes}
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise UserError(f"--{option} {number} is too small; give at least 1")
    if draft and (streaming or max_num_patches is not None):
        raise UserError("--draft cannot be combined with --streaming or --max-num-patches; leave --draft out")
    folder = _open_output(data, output)
    choice = FeatureChoice.parse(features, layers, norm)
    if choice is not None and predictions:
        raise UserError("--features are embeddings, not classes; leave --predictions out, or leave --features out")
    settings = Settings(predictions, top, batch_size, rows_per_file)
    if choice is not None:
        settings = replace(settings, features=choice.kind, layers=choice.layers, norm=choice.norm)
    if streaming:  # the manifest's hashes of a stream cover neither the columns nor the cut of missing splits
        settings = replace(settings, image_column=image_column, label_column=label_column, seed=seed or None)
    with open_runner(runner, address, device, num_processes) as ray:
        start = time.perf_counter()
        loaded = load_model(model, device if ray is None else "cpu")
        loaded, max_num_patches = keep_sizes(loaded, max_num_patches, needs_one_size=draft)
        _check_model(loaded, model, settings)
        images = load_data(
            data,
            image_size=loaded.image_size,
            streaming=streaming,
            skip_bad_images=skip_bad_images,
            seed=seed,
            image_column=image_column,
            label_column=label_column,
            check=False,
            splits=splits,
        )
        selected = list(dict.fromkeys(splits or images.splits))
        engine = None
        if optimize and features is None and max_num_patches is None and not (ray and ray.gpus):
            engine = _select_engine(loaded, images, selected, folder)
        draft_side = loaded.draft_side if draft else None
        settings = replace(settings, max_num_patches=max_num_patches, engine=engine, draft_side=draft_side)
        manifest = _make_manifest(loaded, images, selected, settings)
        parts = [part for split in selected for part in _make_parts(images, split, rows_per_file)]
        with folder.lock():  # otherwise two calls at once could both find no manifest, and mix their files
            _write_or_check_manifest(folder, manifest)
        finished_files = folder.names()
        missing = [part for part in parts if part.name not in finished_files]
        job = Job.from_data(NamedModel(model, max_num_patches, engine), images, selected, settings)
        if ray is not None:
            finished_parts = _write_on_ray(job, missing, ray, loaded, folder)
        elif missing and num_processes is not None and num_processes > 1:
            del loaded  # every process loads the model
            finished_parts = _write_in_processes(job, missing, min(num_processes, len(missing)), device, folder)
        else:
            if missing and engine is not None:
                make_faster(loaded, engine)
            finished_parts = (job.process(part, loaded, folder) for part in missing)
        done_before = len(parts) - len(missing)
        skipped = set(images.skipped)
        for number, skipped_in_part in enumerate(finished_parts, start=done_before + 1):
            skipped.update(skipped_in_part)
            if report is not None:
                report(number, len(parts))
        rows = _finish(folder, parts, manifest, time.perf_counter() - start, device, has_new=bool(missing))
    names = [part.name for part in parts]
    return Embedded(folder.path or str(folder), names, rows, done_before, sorted(skipped), images.notes, engine)


def _open_output(data: object, output: str | Path) -> "OutputFolder":
    """Open the output folder; raise UserError if it holds anything but results of `embed`, or is among the data."""
    refuse_output_in(data, output)
    folder = OutputFolder.from_address(output)
    names = sorted(folder.names())
    if names and MANIFEST_NAME not in names:
        raise UserError(f"the output folder {folder} holds other files ({names[0]}); choose a new or empty folder")
    return folder


def _check_model(loaded: LoadedModel, model: str, settings: Settings) -> None:
    """Raise UserError if the model cannot make what is asked for."""
    refuse_dense(loaded.model)
    if settings.features is not None:
        refuse_features(loaded.model, settings.choice)
    if settings.predictions and not loaded.label_sets:
        raise UserError(
            f"{model} is not a classifier, so it has no predictions; leave --predictions out to write embeddings"
        )
    if settings.predictions:
        remedy = "get its values with hf-vit predict, or leave --predictions out to write embeddings"
        refuse_regression(loaded.model, model, "--predictions", remedy)


def _select_engine(loaded: LoadedModel, images: "ImageData", splits: list[str], folder: "OutputFolder") -> str | None:
    """Return the engine in the manifest of an interrupted call, else the one that pays for the images of all splits."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # `_write_or_check_manifest` reports problems
        return _read_manifest(folder)["settings"].get("engine")
    counts = [images.num_examples(split) for split in splits]
    return select_engine(loaded, None if None in counts else sum(count or 0 for count in counts))


class Part(NamedTuple):
    """The part of a split in one file: `rows_per_file` rows, or a shard of a stream."""

    split: str
    number: int
    total: int

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.split}-{self.number:05d}-of-{self.total:05d}.parquet"


def _make_parts(images: "ImageData", split: str, rows_per_file: int) -> list[Part]:
    """Return all parts of a split."""
    if images.readers:
        from hf_vit.data.image_data import find_stream

        count = find_stream(images, split)[0].num_shards
    else:
        count = max(1, math.ceil((images.num_examples(split) or 0) / rows_per_file))
    return [Part(split, number, count) for number in range(count)]


class Rows(NamedTuple):
    """The columns of a batch besides the model's outputs; empty after the last batch of a part."""

    indices: list[int]
    images: list[str | None]
    labels: list[str | None]
    skipped: list[str]


@dataclass(frozen=True)
class Job:
    """Everything that a process needs, as a `Work` whose parts are `Part`s."""

    model: NamedModel
    splits: Mapping[str, Any]
    readers: Mapping[str, tuple[Any, Any]]
    label_names: Sequence[str]
    settings: Settings
    digests: "Mapping[str, NDArray[np.uint64]]"  # split -> short digests of its images

    @classmethod
    def from_data(cls, model: NamedModel, images: "ImageData", splits: list[str], settings: Settings) -> "Job":
        """Return the job of a model and the images of some splits."""
        from hf_vit.data.fingerprints import shorten_digests
        from hf_vit.data.image_data import find_stream

        selected = {split: images.splits[split] for split in splits}
        digests = {split: shorten_digests(images.seen[split]) for split in splits if split in images.seen}
        readers = {split: find_stream(images, split) for split in splits if images.readers}
        return cls(model, selected, readers, images.label_names, settings, digests)

    def batches(self, part: Part, prepare: "Callable[[Sequence[Image]], Any]") -> Iterator[tuple[Any, Rows]]:
        """Yield prepared batches of a part with their rows; the last one only names the images skipped at the end."""
        reader = self.readers[part.split][1] if part.split in self.readers else None
        rows = self._read_rows(part)
        num_reported = 0 if reader is None else len(reader.skipped)
        while True:
            batch = list(islice(rows, self.settings.batch_size))
            skipped: list[str] = [] if reader is None else reader.skipped[num_reported:]
            num_reported += len(skipped)
            if not batch:
                yield None, Rows([], [], [], skipped)
                return
            indices, names, labels, images = map(list, zip(*batch, strict=True))
            pixel_values, _ = read_and_prepare(images, partial(self._read, part.split), prepare)
            yield pixel_values, Rows(indices, names, labels, skipped)

    def answer(self, pixel_values: "torch.Tensor | BatchFeature | None", rest: Rows, loaded: LoadedModel) -> "Answer":
        """Run the model on a batch, and return its rows as a table (None after the last batch) and skipped images."""
        import pyarrow as pa
        import torch

        if pixel_values is None:
            return None, rest.skipped
        columns: dict[str, Any] = {"index": rest.indices, "image": rest.images, "label": rest.labels}
        with torch.inference_mode():
            pixel_values = pixel_values.to(loaded.device, loaded.dtype)
            if self.settings.predictions:
                names = loaded.label_names(self.label_names)
                scores = compute_scores(loaded.model, pixel_values)
                best = find_largest(scores, self.settings.top)
                columns["labels"] = [[names[index] for index in row] for row in best.tolist()]
                columns["probabilities"] = scores.gather(1, best).tolist()
            elif self.settings.features is not None:
                images = compute_layer_features(loaded.model, pixel_values, self.settings.choice)
                columns["embedding"] = [list(image) if image.ndim > 1 else image for image in images]
            else:
                columns["embedding"] = list(compute_features(loaded.model, pixel_values))
        return pa.Table.from_pydict(columns, schema=self._make_schema(loaded)), rest.skipped

    def process(self, part: Part, loaded: LoadedModel, folder: "OutputFolder") -> list[str]:
        """Run the model on a part in this process and write its file; return the names of skipped images."""
        answers = (self.answer(*batch, loaded) for batch in self.batches(part, loaded.prepare))
        return self.write(part, answers, loaded, folder)

    def write(self, part: Part, answers: "Iterable[Answer]", loaded: LoadedModel, folder: "OutputFolder") -> list[str]:
        """Write the file of a part, which appears when it is complete; return the names of skipped images."""
        import pyarrow as pa
        from pyarrow import parquet

        content = pa.BufferOutputStream()
        skipped: list[str] = []
        waiting: list[pa.Table] = []  # rows of a few batches, until they fill a row group
        with parquet.ParquetWriter(content, self._make_schema(loaded)) as writer:
            for table, left_out in answers:
                skipped += left_out
                if table is not None:
                    waiting.append(table)
                if waiting and (table is None or sum(rows.num_rows for rows in waiting) >= _ROW_GROUP):
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
        folder.write(part.name, content.getvalue().to_pybytes())
        return skipped

    def _make_schema(self, loaded: LoadedModel) -> "pa.Schema":
        """Return the columns of the files, with the model's fingerprint as metadata."""
        import pyarrow as pa

        fields: list[Any] = [("index", pa.int64()), ("image", pa.string()), ("label", pa.string())]
        if self.settings.predictions:
            fields += [("labels", pa.list_(pa.string())), ("probabilities", pa.list_(pa.float32()))]
        else:
            vector = pa.list_(pa.float32())
            fields.append(("embedding", pa.list_(vector) if self.settings.features == "patches" else vector))
        return pa.schema(fields, metadata={"model": loaded.fingerprint})

    def _read_rows(self, part: Part) -> "Iterator[tuple[int, str | None, str | None, Any]]":
        """Iterate over (index, name of the image, name of the class, image) of a part, see `_read`."""
        if part.split in self.readers:
            stream, reader = self.readers[part.split]
            shard = stream.shard(num_shards=part.total, index=part.number)
            for index, row in enumerate(shard if reader is None else reader.apply(shard)):
                yield index, None, self._label(row["label"]), row["image"]
            return
        from hf_vit.data.images import shorten_path, undecode_images

        table = undecode_images(self.splits[part.split])
        first = part.number * self.settings.rows_per_file
        last = min(len(table), first + self.settings.rows_per_file)
        for start in range(first, last, _ROWS_AT_ONCE):
            rows = table[start : min(last, start + _ROWS_AT_ONCE)]
            for index, (stored_image, label) in enumerate(zip(rows["image"], rows["label"], strict=True), start=start):
                path = stored_image.get("path")
                name = shorten_path(str(path)) if path else None
                yield index, name, self._label(label), (index, stored_image)

    def _read(self, split: str, image: "Image | tuple[int, dict[str, Any]]") -> "Image":
        """Decode an image of a table, which is given with its row; images of streams are decoded."""
        from hf_vit.data.fingerprints import refuse_changed
        from hf_vit.data.images import open_image, raise_bad_image

        if not isinstance(image, tuple):
            return image
        index, stored_image = image
        scan, decoded = open_image(stored_image, f"{split} image {index}", self.settings.draft_side)
        if decoded is None:
            raise_bad_image(scan, scan.problem or "is corrupt")
        if stored_image.get("bytes") is None and split in self.digests:  # the file may have changed
            refuse_changed(scan.name, scan.digest, self.digests[split][index])
        return decoded

    def _label(self, number: int | None) -> str | None:
        """Return the name of a class, or None for a missing label."""
        return self.label_names[number] if number is not None and 0 <= number < len(self.label_names) else None


def _write_on_ray(
    job: Job, parts: Sequence[Part], ray: "RayRunner", loaded: LoadedModel, folder: "OutputFolder"
) -> Iterator[list[str]]:
    """Process the parts on Ray, see `Job.process`."""
    answers = replace(ray, model=job.model).run(job, parts, loaded)
    for number, numbered_answers in groupby(answers, key=itemgetter(0)):
        yield job.write(parts[number], (answer for _, answer in numbered_answers), loaded, folder)


def _write_in_processes(
    job: Job, parts: Sequence[Part], count: int, device: str | None, folder: "OutputFolder"
) -> Iterator[list[str]]:
    """Process the parts in several processes of this machine, see `Job.process`."""
    from multiprocessing import get_context

    context = get_context("spawn")  # forked processes cannot use CUDA
    ranks = context.Queue()
    for rank in range(count):
        ranks.put(rank)
    pool = ProcessPoolExecutor(count, context, _start_worker, (job, device, ranks, count))
    try:
        for future in as_completed([pool.submit(_process_part, part, folder) for part in parts]):
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process was killed, perhaps because memory ran out; run the same command again, with a "
            "smaller --num-processes if it happens again (finished files are kept)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(job: Job, device: str | None, ranks: "Queue[int]", count: int) -> None:
    """Load the model in a worker process on its GPU, or with its share of the cores."""
    import multiprocessing

    import torch

    global _worker
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Without this thread a process whose parent was killed would wait for work forever.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["LOCAL_RANK"] = str(ranks.get())
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    _worker = (job, job.model.load(device))


def _process_part(part: Part, folder: "OutputFolder") -> list[str]:
    """Process a part in a worker process."""
    assert _worker is not None
    job, loaded = _worker
    return job.process(part, loaded, folder)


def _make_manifest(loaded: LoadedModel, images: "ImageData", splits: list[str], settings: Settings) -> dict[str, Any]:
    """Return the part of the manifest that may not change when a call is resumed."""
    # Options that were not given are left out, so that folders of earlier versions can be resumed.
    options = {name: value for name, value in asdict(settings).items() if value is not None}
    order = [scan.digest for split in splits for scan in images.seen.get(split, ())]
    manifest: dict[str, Any] = {
        "model": loaded.describe(),
        "processor": loaded.processor_fingerprint,
        "data": {"name": images.name, "fingerprint": images.fingerprint, "splits": splits},
        "settings": {**options, "streaming": bool(images.readers)},
        # The fingerprint of a table does not cover the order, by which rows are divided among the files.
        "order": hash_text("\n".join(order)),
    }
    return cast(dict[str, Any], redact_json(manifest))


def _read_manifest(folder: "OutputFolder") -> dict[str, Any]:
    """Read the manifest of a folder; raise ValueError if it has no settings."""
    with folder.open(MANIFEST_NAME) as file:
        manifest = json.loads(file.read())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("settings"), dict):
        raise ValueError("it has no settings")
    return manifest


def _write_or_check_manifest(folder: "OutputFolder", manifest: dict[str, Any]) -> None:
    """Write the manifest, or raise UserError if the folder has another one."""
    try:
        old_manifest = _read_manifest(folder)
    except FileNotFoundError:
        _write_manifest(folder, manifest)
        return
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{folder}/{MANIFEST_NAME} is damaged or was not written by hf-vit embed ({error}); choose "
            "another output folder, or delete this one to start again"
        ) from error
    old_manifest.setdefault("processor", manifest["processor"])  # that of 0.2 has none
    for name, value in manifest.items():
        old = old_manifest.get(name)
        if name != "order" and old != value:
            if isinstance(old, dict) and isinstance(value, dict):
                keys = [key for key in {**old, **value} if old.get(key) != value.get(key)]
                old, value = ({key: entries.get(key) for key in keys} for entries in (old, value))
            raise UserError(
                f"{folder} was started with {name}={old}, but now {name} is {value}; give the same value, or choose "
                "another output folder"
            )
    if old_manifest.get("order", manifest["order"]) != manifest["order"]:
        raise UserError(
            f"the images have another order than when {folder} was started, so rows would be missing or repeated; "
            "restore the names of the files or the order of the list, or choose another output folder"
        )


def _write_manifest(folder: "OutputFolder", manifest: dict[str, Any]) -> None:
    folder.write(MANIFEST_NAME, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())


def _finish(
    folder: "OutputFolder",
    parts: Sequence[Part],
    manifest: dict[str, Any],
    seconds: float,
    device: str | None,
    has_new: bool,
) -> int:
    """Complete the manifest unless it is complete and no file is new, and return the number of rows in all files."""
    from pyarrow import parquet

    rows = 0
    for part in parts:
        try:
            with folder.open(part.name) as file:
                rows += parquet.read_metadata(file).num_rows
        except (OSError, ValueError) as error:  # errors of pyarrow are ValueErrors
            raise UserError(
                f"{folder}/{part.name} is damaged ({error}); delete it and run the command again"
            ) from error
    if has_new or "rows" not in _read_manifest(folder):
        results = {"rows": rows, "seconds": round(seconds, 3)}
        _write_manifest(folder, manifest | results | {"versions": list_versions(), "hardware": read_hardware(device)})
    return rows


@dataclass(frozen=True)
class OutputFolder:
    """A folder on a disk or in an object store, whose files appear when they are complete."""

    address: str

    @classmethod
    def from_address(cls, address: str | Path) -> "OutputFolder":
        """Return the folder with this path or URL, which need not exist."""
        if is_store_url(address):
            folder = cls(str(address).rstrip("/"))
            if not cls(str(address))._open_store()[1].strip("/"):
                example = f"{address}NAME/embeddings"
                raise UserError(f"the output {address} is a whole bucket; give a folder in it, such as {example}")
            return folder
        path = to_path(address)
        reject_url(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"the output {path} is a file; choose a folder")
        return cls(str(path))

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> Path | None:
        """The path of a folder on a disk; None in an object store."""
        return None if is_store_url(self.address) else Path(self.address)

    def names(self) -> set[str]:
        """Return the names in the folder, with a / after those of folders; none if the folder does not exist."""
        if self.path is not None:
            remove_leftovers(self.path)
            files = self.path.iterdir() if self.path.exists() else ()
            return {file.name + ("/" if file.is_dir() else "") for file in files}
        store, folder = self._open_store()
        with explain_store_errors(self, "listed"):
            store.invalidate_cache()  # other processes may have written
            try:
                entries: list[dict[str, str]] = store.ls(folder, detail=True)
            except FileNotFoundError:
                return set()
        prefix = f"{folder.strip('/')}/"
        names: set[str] = set()
        for entry in entries:  # some stores list the folder itself as well
            path = entry["name"].strip("/") + ("/" if entry["type"] == "directory" else "")
            if path.startswith(prefix) and path != prefix:
                names.add(path.removeprefix(prefix))
        return names

    def open(self, name: str) -> IO[bytes]:
        """Open a file of the folder for reading."""
        if self.path is not None:
            return (self.path / name).open("rb")
        store, folder = self._open_store()
        with explain_store_errors(self, "read"):
            store.invalidate_cache(folder)  # other processes may have written
            return store.open(f"{folder}/{name}", "rb")

    def write(self, name: str, content: bytes) -> None:
        """Write a file in one move."""
        if self.path is None:
            write_object(f"{self}/{name}", content)
        else:
            write_atomically(self.path / name, content)

    @contextmanager
    def lock(self) -> Generator[None]:
        """Create the folder, and lock it against other processes of this machine; without effect in an object store."""
        if self.path is None:
            yield
            return
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path):
            yield

    def _open_store(self) -> tuple[Any, str]:
        """Return the fsspec file system and the path of the folder in it."""
        from fsspec.core import url_to_fs

        with explain_missing_library(self.address), explain_store_errors(self, "opened"):
            return url_to_fs(self.address)
