"""Embeddings or predictions of a whole data set, as parquet files.

    OUTPUT/manifest.json                     model, data and settings; at the end also rows, versions and hardware
    OUTPUT/<split>-<number>-of-<count>.parquet

Every file is made of a fixed part of the data and appears when it is complete: whatever is killed, the same command
goes on with the files that are missing, and any number of processes writes the same ones.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from hf_vit.display import Displayed
from hf_vit.environment import hardware, versions
from hf_vit.errors import UserError
from hf_vit.evaluation.reading import NamedModel, largest, last_features, refuse_output_in, scores, undecoded
from hf_vit.evaluation.runners import running
from hf_vit.families import refuse_regression
from hf_vit.loading.optimizing import optimize as make_faster
from hf_vit.loading.optimizing import select_engine
from hf_vit.loading.outputs import refuse_dense
from hf_vit.repositories.stores import (
    explain_missing_library,
    explain_store_errors,
    is_store_url,
    to_path,
    write_object,
)
from hf_vit.results.facts import lock_folder
from hf_vit.results.redaction import redact_values
from hf_vit.results.writing import explain_write_errors, reject_url, remove_leftovers, write_atomically

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import numpy as np
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from PIL.Image import Image
    from transformers import BatchFeature

    from hf_vit.data import ImageData
    from hf_vit.loading.model import LoadedModel

    # The rows of a batch, None after the last one of a part; and the unreadable images left out since the last batch.
    Answer = tuple["pa.Table | None", list[str]]

MANIFEST_NAME = "manifest.json"
_ROW_GROUP = 4096  # rows that wait to be written; also those of a parquet row group
_worker: "tuple[Job, LoadedModel] | None" = None  # of a worker process


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


@dataclass(frozen=True)
class Settings:
    """What decides about the content of the files, see `embed`."""

    predictions: bool
    top: int
    batch_size: int
    rows_per_file: int
    max_num_patches: int | None = None
    engine: str | None = None
    draft_side: int | None = None


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
        model: see `load_model`; for predictions a classifier.
        data, streaming, skip_bad_images, image_column, label_column, seed: see `hf_vit.data.load_data`.
        output: a new or empty folder, or that of the same call before; a path, or the address of a folder in an object
            store (s3://BUCKET/..., gs://..., hf://datasets/USER/NAME/...) whose library for fsspec is installed.
        splits: of the data; by default all.
        predictions: the most likely classes instead of embeddings.
        top: classes a prediction, at most all.
        num_processes: each with the model in its memory, and a GPU of its own as long as there are; by default 1, of
            Ray one a GPU or, where it has none, a machine.
        batch_size: images a forward pass; part of what decides about the last digits, so fixed for a folder.
        max_num_patches, draft: see `evaluate_protocol`; fixed for a folder, too.
        rows_per_file: images a file. Of a stream every shard becomes a file, whatever its size.
        device: torch device; by default a GPU where there is one.
        optimize: compute by what is fastest for so many images (`select_engine`), of one size; fixed for a folder, too.
        runner, address: see `evaluate_protocol`; "local" is this process, or processes of this machine.
        report: is told (files done, files in all) after every file.

    Raises:
        UserError: bad input, an output folder that holds something else, outputs that are not finite, or a process that
            was killed. Complete files stay.
    """
    from hf_vit.data import load_data
    from hf_vit.data.fingerprints import short_digests

    if min(top, batch_size, rows_per_file, 1 if num_processes is None else num_processes) < 1:
        raise UserError("--top, --num-processes, --batch-size and --rows-per-file must be at least 1")
    if draft and (streaming or max_num_patches is not None):
        raise UserError("--draft works only on tables whose images are resized to one size; leave it out")
    refuse_output_in(data, output)
    folder = OutputFolder.at(output)
    inside = sorted(folder.names())
    if inside and MANIFEST_NAME not in inside:
        raise UserError(f"the output folder {folder} holds other files ({inside[0]}); choose a new or empty one")
    named = NamedModel(model, max_num_patches)
    settings = Settings(predictions, top, batch_size, rows_per_file, max_num_patches)
    with running(runner, address, device, num_processes) as ray:
        start = time.perf_counter()
        subject = _open(named, predictions, device if ray is None else "cpu")
        images = load_data(
            data,
            image_size=subject.image_size,
            streaming=streaming,
            skip_bad_images=skip_bad_images,
            seed=seed,
            image_column=image_column,
            label_column=label_column,
        )
        chosen = list(dict.fromkeys(splits or images.splits))
        if optimize and max_num_patches is None and not (ray is not None and ray.gpus):
            engine = _engine(subject, images, chosen, folder)
            named, settings = replace(named, engine=engine), replace(settings, engine=engine)
        if draft:
            settings = replace(settings, draft_side=subject.draft_side)
        manifest = _manifest(subject, images, chosen, settings)
        parts = [part for split in chosen for part in _parts(images, split, rows_per_file)]
        with folder.alone():  # else two calls at once could both find no manifest, and mix their files
            _enter(folder, manifest)
        there = folder.names()
        missing = [part for part in parts if part.name not in there]
        of_chosen = {split: images.splits[split] for split in chosen}
        digests = {split: short_digests(images.seen[split]) for split in chosen if split in images.seen}
        job = Job(named, of_chosen, images.readers, images.label_names, settings, digests)
        if ray is not None:
            answers = groupby(replace(ray, model=named).answers(job, missing, subject), key=itemgetter(0))
            finished = (
                job.write(missing[number], (answer for _, answer in each), subject, folder) for number, each in answers
            )
        elif (num_processes or 1) > 1:
            del subject  # each loads its own
            finished = _write_in_processes(job, missing, min(num_processes or 1, len(missing)), device, folder)
        else:
            if missing and settings.engine is not None:
                make_faster(subject, settings.engine)
            finished = (job.do(part, subject, folder) for part in missing)
        skipped, before = list[str](), len(parts) - len(missing)
        for number, left_out in enumerate(finished, start=before + 1):
            skipped += left_out
            if report is not None:
                report(number, len(parts))
        rows = _finish(folder, parts, manifest, time.perf_counter() - start, device)
    left_out, names = sorted({*images.skipped, *skipped}), [part.name for part in parts]
    return Embedded(folder.path or str(folder), names, rows, before, left_out, images.notes, settings.engine)


def _open(model: NamedModel, predictions: bool, device: str | None) -> "LoadedModel":
    subject = model.opened(device)
    refuse_dense(subject.model)
    if predictions and not subject.label_sets:
        raise UserError(f"{model.model} is not a classifier; leave --predictions out to write embeddings")
    if predictions:
        remedy = "hf-vit predict gives its values; leave --predictions out for embeddings"
        refuse_regression(subject.model, model.model, "--predictions", remedy)
    return subject


def _engine(subject: "LoadedModel", images: "ImageData", splits: list[str], folder: "OutputFolder") -> str | None:
    """Return what repays itself on the images of all splits; of a folder that was begun, what it was begun with."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # what is wrong with it is told by `_enter`
        return _manifest_in(folder)["settings"].get("engine")
    numbers = [images.num_examples(split) for split in splits]
    return select_engine(subject, None if None in numbers else sum(number or 0 for number in numbers))


class Part(NamedTuple):
    """One file's share of a split: `rows_per_file` rows, or a shard of a stream."""

    split: str
    number: int
    total: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.split}-{self.number:05d}-of-{self.total:05d}.parquet"


def _parts(images: "ImageData", split: str, rows_per_file: int) -> list[Part]:
    rows = images.num_examples(split)
    count = images.readers[split][0].num_shards if images.readers else max(1, -(-(rows or 0) // rows_per_file))
    return [Part(split, number, count) for number in range(count)]


class Rows(NamedTuple):
    """What is written of a batch besides the model's answer; none after the last batch of a part."""

    indices: list[int]
    images: list[str | None]
    labels: list[str | None]
    skipped: list[str]


@dataclass(frozen=True)
class Job:
    """All that a process needs to know: a `Work` whose parts are `Part`s."""

    model: NamedModel
    splits: Mapping[str, Any]
    readers: Mapping[str, tuple[Any, Any]]
    label_names: Sequence[str]
    settings: Settings
    digests: "Mapping[str, NDArray[np.uint64]]"  # of the splits' images

    def batches(self, part: Part, prepare: "Callable[[Sequence[Image]], Any]") -> Iterator[tuple[Any, Rows]]:
        reader = self.readers[part.split][1] if part.split in self.readers else None
        rows, told = self._rows(part), 0 if reader is None else len(reader.skipped)
        while True:
            batch = list(islice(rows, self.settings.batch_size))
            skipped: list[str] = [] if reader is None else reader.skipped[told:]
            told += len(skipped)
            indices, names, labels, images = (
                (list(column) for column in zip(*batch, strict=True)) if batch else [[]] * 4
            )
            yield prepare(images) if images else None, Rows(indices, names, labels, skipped)
            if not batch:
                return

    def answer(
        self, pixel_values: "torch.Tensor | BatchFeature | None", rest: Rows, subject: "LoadedModel"
    ) -> "Answer":
        """Return the rows as a table."""
        import pyarrow as pa
        import torch

        if pixel_values is None:
            return None, rest.skipped
        columns: dict[str, Any] = {"index": rest.indices, "image": rest.images, "label": rest.labels}
        with torch.inference_mode():
            pixel_values = pixel_values.to(subject.device, subject.dtype)
            if self.settings.predictions:
                names, found = subject.label_sets[0], scores(subject.model, pixel_values)
                best = largest(found, self.settings.top)
                columns["labels"] = [[names[index] for index in row] for row in best.tolist()]
                columns["probabilities"] = found.gather(1, best).tolist()
            else:
                columns["embedding"] = list(last_features(subject.model, pixel_values))
        return pa.Table.from_pydict(columns, schema=self._schema(subject)), rest.skipped

    def do(self, part: Part, subject: "LoadedModel", folder: "OutputFolder") -> list[str]:
        """Answer and write a part in this process."""
        answers = (self.answer(*batch, subject) for batch in self.batches(part, subject.prepare))
        return self.write(part, answers, subject, folder)

    def write_object(
        self, part: Part, answers: "Iterable[Answer]", subject: "LoadedModel", folder: "OutputFolder"
    ) -> list[str]:
        """Let the file of a part appear when it is complete; return the names of images left out."""
        import pyarrow as pa
        from pyarrow import parquet

        content, skipped, waiting = pa.BufferOutputStream(), list[str](), list[pa.Table]()
        with parquet.ParquetWriter(content, self._schema(subject)) as writer:
            for table, left_out in answers:
                skipped += left_out
                if table is not None:
                    waiting.append(table)
                if waiting and (table is None or sum(each.num_rows for each in waiting) >= _ROW_GROUP):
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
        folder.write(part.name, content.getvalue().to_pybytes())
        return skipped

    def _schema(self, subject: "LoadedModel") -> "pa.Schema":
        import pyarrow as pa

        fields: list[Any] = [("index", pa.int64()), ("image", pa.string()), ("label", pa.string())]
        if self.settings.predictions:
            fields += [("labels", pa.list_(pa.string())), ("probabilities", pa.list_(pa.float32()))]
        else:
            fields.append(("embedding", pa.list_(pa.float32())))
        return pa.schema(fields, metadata={"model": subject.fingerprint})

    def _rows(self, part: Part) -> "Iterator[tuple[int, str | None, str | None, Image]]":
        """Iterate over (index, image's name, class's name, RGB image) of a part."""
        if part.split in self.readers:
            stream, reader = self.readers[part.split]
            for index, row in enumerate(reader.apply(stream.shard(num_shards=part.total, index=part.number))):
                yield index, None, self._label(row["label"]), row["image"]
            return
        from hf_vit.data.fingerprints import refuse_changed
        from hf_vit.data.images import open_image, raise_bad_image, short_name

        table = undecoded(self.splits[part.split])
        first = part.number * self.settings.rows_per_file
        for index in range(first, min(len(table), first + self.settings.rows_per_file)):
            row = table[index]
            seen, image = open_image(row["image"], f"{part.split} image {index}", self.settings.draft_side)
            if image is None:
                raise_bad_image(seen, seen.problem or "is corrupt")
            path = row["image"].get("path")
            if row["image"].get("bytes") is None and part.split in self.digests:  # else it came with the table
                refuse_changed(seen.name, seen.digest, self.digests[part.split][index])
            yield index, short_name(str(path)) if path else None, self._label(row["label"]), image

    def _label(self, number: int | None) -> str | None:
        return self.label_names[number] if number is not None and 0 <= number < len(self.label_names) else None


def _write_in_processes(
    job: Job, parts: Sequence[Part], count: int, device: str | None, folder: "OutputFolder"
) -> Iterator[list[str]]:
    """Write the parts in several processes of this machine; see `Job.write`."""
    from multiprocessing import get_context

    if not parts:
        return
    context = get_context("spawn")  # a forked process cannot use CUDA
    ranks = context.Queue()
    for rank in range(count):
        ranks.put(rank)
    pool = ProcessPoolExecutor(count, context, _start_worker, (job, device, ranks, count))
    try:
        for future in as_completed([pool.submit(_do_part, part, folder) for part in parts]):
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process ended early, perhaps for lack of memory; finished files are kept: run the same "
            "command again, if needed with a smaller --num-processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(job: Job, device: str | None, ranks: "Queue[int]", count: int) -> None:
    import multiprocessing

    import torch

    global _worker
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A process whose parent was killed would wait for work for ever.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    rank: int = ranks.get()
    if device in (None, "cuda") and torch.cuda.is_available():
        device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    _worker = (job, job.model.opened(device))


def _do_part(part: Part, folder: "OutputFolder") -> list[str]:
    assert _worker is not None
    job, subject = _worker
    return job.do(part, subject, folder)


def _manifest(subject: "LoadedModel", images: "ImageData", splits: list[str], settings: Settings) -> dict[str, Any]:
    # Without an option that earlier versions did not have and nobody gave: their folders go on.
    options = {name: value for name, value in asdict(settings).items() if value is not None}
    manifest: dict[str, Any] = {
        "model": subject.describe(),
        "data": {"name": images.name, "fingerprint": images.fingerprint, "splits": splits},
        "settings": {**options, "streaming": bool(images.readers)},
    }
    return cast(dict[str, Any], redact_values(json.loads(json.dumps(manifest))))


def _manifest_in(folder: "OutputFolder") -> dict[str, Any]:
    with folder.open(MANIFEST_NAME) as file:
        manifest = json.loads(file.read())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("settings"), dict):
        raise ValueError("it names no settings")
    return manifest


def _enter(folder: "OutputFolder", manifest: dict[str, Any]) -> None:
    """Record what is computed, or make sure that the folder holds the beginning of just that."""
    try:
        before = _manifest_in(folder)
    except FileNotFoundError:
        _write_manifest(folder, manifest)
        return
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"{folder}/{MANIFEST_NAME} is damaged, or another command's ({error}); give another output "
            "folder, or delete this one to start again"
        ) from error
    for name, now in manifest.items():
        if before.get(name) != now:
            raise UserError(
                f"{folder} was begun with {name} {before.get(name)}, now it is {now}; give the same value, or another "
                "output folder"
            )


def _write_manifest(folder: "OutputFolder", manifest: dict[str, Any]) -> None:
    folder.write(MANIFEST_NAME, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode())


def _finish(
    folder: "OutputFolder", parts: Sequence[Part], manifest: dict[str, Any], seconds: float, device: str | None
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


@dataclass(frozen=True)
class OutputFolder:
    """A folder on a disk or in an object store, whose files appear when complete; it travels to other processes."""

    address: str

    @classmethod
    def at(cls, place: str | Path) -> "OutputFolder":
        """Return the folder of this name, which need not be there."""
        if is_store_url(place):
            folder = cls(str(place).rstrip("/"))
            if not cls(str(place))._open_store()[1].strip("/"):
                example = f"{place}NAME/embeddings"
                raise UserError(f"the output {place} is a bucket without a folder; give one, such as {example}")
            return folder
        path = to_path(place)
        reject_url(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"the output {path} is a file; choose a new or empty folder")
        return cls(str(path))

    def __str__(self) -> str:
        return self.address

    @property
    def path(self) -> Path | None:
        """Of a folder on a disk."""
        return None if is_store_url(self.address) else Path(self.address)

    def names(self) -> set[str]:
        """Return what is in it, folders with a / at their end; nothing where it is not there."""
        if self.path is not None:
            remove_leftovers(self.path)
            return {each.name + "/" * each.is_dir() for each in self.path.iterdir()} if self.path.exists() else set()
        store, place = self._open_store()
        with explain_store_errors(self, "listed"):
            store.invalidate_cache()  # it remembers what was there
            try:
                inside: list[dict[str, str]] = store.ls(place, detail=True)
            except FileNotFoundError:
                return set()
        below = f"{place.strip('/')}/"
        paths = (each["name"].strip("/") + "/" * (each["type"] == "directory") for each in inside)
        return {path.removeprefix(below) for path in paths if path.startswith(below) and path != below}

    def open(self, name: str) -> IO[bytes]:
        if self.path is not None:
            return (self.path / name).open("rb")
        store, place = self._open_store()
        with explain_store_errors(self, "read"):
            store.invalidate_cache(place)  # others wrote there
            return store.open(f"{place}/{name}", "rb")

    def write_object(self, name: str, content: bytes) -> None:
        if self.path is None:
            write_object(f"{self}/{name}", content)
            return
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, content)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Keep other processes of this machine out that ask for it."""
        if self.path is None:
            yield
            return
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path):
            yield

    def _open_store(self) -> tuple[Any, str]:
        """Return the store, which fsspec keeps, and the folder's place in it."""
        from fsspec.core import url_to_fs

        with explain_missing_library(self.address), explain_store_errors(self, "opened"):
            return url_to_fs(self.address)
