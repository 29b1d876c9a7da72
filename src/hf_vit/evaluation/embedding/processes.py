"""The processes behind `embed`: each takes parts of the data, one after the other, and writes a file a part."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_vit.errors import UserError
from hf_vit.evaluation.embedding.folders import OutputFolder
from hf_vit.evaluation.remote_model import NamedModel

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import numpy as np
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from PIL.Image import Image
    from transformers import BatchFeature

    from hf_vit.evaluation.ray_runner import RayRunner
    from hf_vit.loading.model import LoadedModel

    Row = tuple[int, str | None, str | None, Image]

MANIFEST_NAME = "manifest.json"
# Rows that wait to be written; also those of a parquet row group.
_ROW_GROUP = 4096
# Of a worker process: its job and model.
_worker: "tuple[Job, LoadedModel] | None" = None


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


@dataclass(frozen=True)
class Part:
    """One file's share of a split: `rows_per_file` rows, or a shard of a stream."""

    split: str
    number: int
    count: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.split}-{self.number:05d}-of-{self.count:05d}.parquet"


class Batch(NamedTuple):
    """Rows as the model takes them: pixel values on the CPU, and the names of images left out since the last batch."""

    indices: list[int]
    images: list[str | None]
    labels: list[str | None]
    pixel_values: "torch.Tensor | BatchFeature | None"
    skipped: list[str]


@dataclass(frozen=True)
class Job:
    """All that a process needs to know: a `Work`."""

    model: NamedModel
    folder: OutputFolder
    splits: Mapping[str, Any]
    readers: Mapping[str, tuple[Any, Any]]
    label_names: Sequence[str]
    settings: Settings
    digests: "Mapping[str, NDArray[np.uint64]]"  # of the splits' images

    def opened(self, device: str | None) -> "LoadedModel":
        """The model, where the output folder is."""
        try:
            self.folder.open(MANIFEST_NAME).close()
        except FileNotFoundError as error:
            raise UserError(f"the output folder {self.folder} is not there; give one that all share") from error
        return self.model.opened(device)

    def batches(self, part: Part, prepare: "Callable[[Sequence[Image]], Any]") -> Iterator[Batch]:
        """The rows of a part; the last batch may have none, only names of images left out."""
        rows, told = self.rows(part), 0
        reader = self.readers[part.split][1] if part.split in self.readers else None
        if reader is not None:
            told = len(reader.skipped)
        while True:
            rows_of_batch = list(islice(rows, self.settings.batch_size))
            skipped = [] if reader is None else reader.skipped[told:]
            told += len(skipped)
            if not rows_of_batch:
                if skipped:
                    yield Batch([], [], [], None, skipped)
                return
            indices, names, labels, images = (list(column) for column in zip(*rows_of_batch, strict=True))
            yield Batch(indices, names, labels, prepare(images), skipped)

    def done(self, part: Part, batches: Iterator[Batch], subject: "LoadedModel") -> list[str]:
        """Compute a part and let its file appear when it is complete; returns the names of images left out."""
        import pyarrow as pa
        from pyarrow import parquet

        content, skipped = pa.BufferOutputStream(), list[str]()
        schema = _schema(self.settings, subject)
        with parquet.ParquetWriter(content, schema) as writer:
            waiting: list[pa.Table] = []
            for batch in batches:
                skipped += batch.skipped
                if batch.pixel_values is None:
                    continue
                waiting.append(_table(batch, self.settings, subject, schema))
                if sum(table.num_rows for table in waiting) >= _ROW_GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting.clear()
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
        self.folder.write(part.name, content.getvalue().to_pybytes())
        return skipped

    def rows(self, part: Part) -> "Iterator[Row]":
        """(index, image's name, class's name, RGB image) of every row of a part."""
        if part.split in self.readers:
            stream, reader = self.readers[part.split]
            for index, row in enumerate(reader.over(stream.shard(num_shards=part.count, index=part.number))):
                yield index, None, self._label(row["label"]), row["image"]
            return
        import datasets

        from hf_vit.data.fingerprints import refuse_changed
        from hf_vit.data.images import open_image, raise_bad, short_name

        table = self.splits[part.split].cast_column("image", datasets.Image(decode=False))
        first = part.number * self.settings.rows_per_file
        for index in range(first, min(len(table), first + self.settings.rows_per_file)):
            row = table[index]
            seen, image = open_image(row["image"], f"{part.split} image {index}", self.settings.draft_side)
            if image is None:
                raise_bad(seen, seen.problem or "is corrupt")
            path = row["image"].get("path")
            if row["image"].get("bytes") is None and part.split in self.digests:  # else it came with the table
                refuse_changed(seen.name, seen.digest, self.digests[part.split][index])
            yield index, short_name(str(path)) if path else None, self._label(row["label"]), image

    def _label(self, number: int | None) -> str | None:
        return self.label_names[number] if number is not None and 0 <= number < len(self.label_names) else None


def run_parts(
    job: Job,
    parts: Sequence[Part],
    subject: "LoadedModel | None",
    num_processes: int,
    device: str | None,
    runner: "RayRunner | None",
    one_more: Callable[[], None],
) -> list[str]:
    """Write the files of all parts: by `subject` in this process, by Ray, or without one in `num_processes` others.

    Returns:
        The names of unreadable images that were left out.

    Raises:
        UserError: see `embed`.
    """
    if not parts:
        return []
    if subject is None:
        results = _run_in_processes(job, parts, min(num_processes, len(parts)), device)
    elif runner is not None:
        results = (left_out for _, left_out in runner.each(job, parts, subject))
    else:
        results = (job.done(part, job.batches(part, subject.prepare), subject) for part in parts)
    skipped: list[str] = []
    for left_out in results:
        skipped += left_out
        one_more()
    return skipped


def _run_in_processes(job: Job, parts: Sequence[Part], count: int, device: str | None) -> Iterator[list[str]]:
    from multiprocessing import get_context

    context = get_context("spawn")  # a forked process cannot use CUDA
    ranks = context.Queue()
    for rank in range(count):
        ranks.put(rank)
    pool = ProcessPoolExecutor(count, context, _start_worker, (job, device, ranks, count))
    try:
        for future in as_completed([pool.submit(_do_part, part) for part in parts]):
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process ended before its work was done (too little memory for so many?); the files that are complete "
            "stay, the same command goes on, with a smaller --num-processes if need be"
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
    _worker = (job, job.opened(device))


def _do_part(part: Part) -> list[str]:
    assert _worker is not None
    job, subject = _worker
    return job.done(part, job.batches(part, subject.prepare), subject)


def _schema(settings: Settings, subject: "LoadedModel") -> "pa.Schema":
    import pyarrow as pa

    fields: list[Any] = [("index", pa.int64()), ("image", pa.string()), ("label", pa.string())]
    if settings.predictions:
        fields += [("labels", pa.list_(pa.string())), ("probabilities", pa.list_(pa.float32()))]
    else:
        fields.append(("embedding", pa.list_(pa.float32())))
    return pa.schema(fields, metadata={"model": subject.fingerprint})


def _table(batch: Batch, settings: Settings, subject: "LoadedModel", schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa
    import torch

    assert batch.pixel_values is not None
    columns: dict[str, Any] = {"index": batch.indices, "image": batch.images, "label": batch.labels}
    with torch.inference_mode():
        pixel_values = batch.pixel_values.to(subject.device, subject.dtype)
        if settings.predictions:
            columns |= _predictions(subject, pixel_values, settings.top)
        else:
            columns["embedding"] = _embeddings(subject, pixel_values)
    return pa.Table.from_pydict(columns, schema=schema)


def _embeddings(subject: "LoadedModel", pixel_values: "torch.Tensor | BatchFeature") -> list[Any]:
    from hf_vit.evaluation.reading import answering
    from hf_vit.loading.outputs import pre_logits

    with answering(pixel_values):
        features = pre_logits(subject.model, pixel_values).float().cpu()
    if not bool(features.isfinite().all()):
        raise UserError("the model's outputs are not finite (NaN or infinity); its weights are damaged or diverged")
    return list(features.numpy())


def _predictions(subject: "LoadedModel", pixel_values: "torch.Tensor | BatchFeature", top: int) -> dict[str, list[Any]]:
    from hf_vit.evaluation.reading import largest, scores

    names, found = subject.label_sets[0], scores(subject.model, pixel_values)
    best = largest(found, top)
    labels = [[names[index] for index in row] for row in best.tolist()]
    return {"labels": labels, "probabilities": found.gather(1, best).tolist()}
