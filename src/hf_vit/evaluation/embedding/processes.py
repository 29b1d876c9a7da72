"""The processes behind `embed`: each takes parts of the data, one after the other, and writes a file a part."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.errors import UserError
from hf_vit.results.writing import write_atomically

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import pyarrow as pa
    import torch
    from PIL.Image import Image

    from hf_vit.subjects.subject import Subject

    Row = tuple[int, str | None, str | None, Image]

# Rows that wait to be written; also those of a parquet row group.
_ROW_GROUP = 4096
# Of a worker process: its job, model and output folder.
_worker: "tuple[Job, Subject, Path] | None" = None


@dataclass(frozen=True)
class Settings:
    """What decides about the content of the files, see `embed`."""

    predictions: bool
    top: int
    batch_size: int
    rows_per_file: int
    max_num_patches: int | None = None
    engine: str | None = None


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


@dataclass(frozen=True)
class Job:
    """All that a process needs to know."""

    model: str
    splits: Mapping[str, Any]
    readers: Mapping[str, tuple[Any, Any]]
    label_names: Sequence[str]
    settings: Settings

    def rows(self, part: Part) -> "Iterator[Row]":
        """(index, image's name, class's name, RGB image) of every row of a part."""
        if part.split in self.readers:
            stream, reader = self.readers[part.split]
            for index, row in enumerate(reader.over(stream.shard(num_shards=part.count, index=part.number))):
                yield index, None, self._label(row["label"]), row["image"]
            return
        import datasets

        from hf_vit.data.checks import open_image, raise_bad, short_name

        table = self.splits[part.split].cast_column("image", datasets.Image(decode=False))
        first = part.number * self.settings.rows_per_file
        for index in range(first, min(len(table), first + self.settings.rows_per_file)):
            row = table[index]
            seen, image = open_image(row["image"], f"{part.split} image {index}")
            if image is None:
                raise_bad(seen, seen.problem or "is corrupt")
            path = row["image"].get("path")
            yield index, short_name(str(path)) if path else None, self._label(row["label"]), image

    def _label(self, number: int | None) -> str | None:
        return self.label_names[number] if number is not None and 0 <= number < len(self.label_names) else None


def opened(model: str, device: str | None, max_num_patches: int | None) -> "Subject":
    """The model, fed with images of one size or, with `max_num_patches`, of their own."""
    from hf_vit.subjects.own_size import at_own_size
    from hf_vit.subjects.subject import open_subject

    subject = open_subject(model, device)
    return subject if max_num_patches is None else at_own_size(subject, max_num_patches)


def run_parts(
    job: Job,
    parts: Sequence[Part],
    folder: Path,
    num_processes: int,
    device: str | None,
    subject: "Subject | None",
    one_more: Callable[[], None],
) -> list[str]:
    """Write the files of all parts: with `subject` in this process, without one in `num_processes` others.

    Returns:
        The names of unreadable images that were left out.

    Raises:
        UserError: see `embed`.
    """
    if subject is None:
        return _run_in_processes(job, parts, folder, min(num_processes, len(parts)), device, one_more)
    skipped: list[str] = []
    for part in parts:
        skipped += _write_part(part, job, subject, folder)
        one_more()
    return skipped


def _run_in_processes(
    job: Job, parts: Sequence[Part], folder: Path, count: int, device: str | None, one_more: Callable[[], None]
) -> list[str]:
    from multiprocessing import get_context

    if not parts:
        return []
    context = get_context("spawn")  # a forked process cannot use CUDA
    ranks = context.Queue()
    for rank in range(count):
        ranks.put(rank)
    pool = ProcessPoolExecutor(count, context, _start_worker, (job, folder, device, ranks, count))
    skipped: list[str] = []
    try:
        for future in as_completed([pool.submit(_do_part, part) for part in parts]):
            skipped += future.result()
            one_more()
    except BrokenProcessPool as error:
        raise UserError(
            "a process ended before its work was done (too little memory for so many?); the files that are complete "
            "stay, the same command goes on, with a smaller --num-processes if need be"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return skipped


def _start_worker(job: Job, folder: Path, device: str | None, ranks: "Queue[int]", count: int) -> None:
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
    subject = opened(job.model, device, job.settings.max_num_patches)
    if job.settings.engine is not None:
        from hf_vit.subjects.optimizing import optimize

        optimize(subject, job.settings.engine)
    _worker = (job, subject, folder)


def _do_part(part: Part) -> list[str]:
    assert _worker is not None
    return _write_part(part, *_worker)


def _write_part(part: Part, job: Job, subject: "Subject", folder: Path) -> list[str]:
    """Compute a part and let its file appear when it is complete; returns the names of images left out."""
    import pyarrow as pa
    from pyarrow import parquet

    reader = job.readers[part.split][1] if part.split in job.readers else None
    before = len(reader.skipped) if reader is not None else 0
    content = pa.BufferOutputStream()
    schema = _schema(job.settings, subject)
    rows = job.rows(part)
    with parquet.ParquetWriter(content, schema) as writer:
        waiting: list[pa.Table] = []
        while batch := list(islice(rows, job.settings.batch_size)):
            waiting.append(_table(batch, job.settings, subject, schema))
            if sum(table.num_rows for table in waiting) >= _ROW_GROUP:
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
    write_atomically(folder / part.name, content.getvalue().to_pybytes())
    return [] if reader is None else reader.skipped[before:]


def _schema(settings: Settings, subject: "Subject") -> "pa.Schema":
    import pyarrow as pa

    fields: list[Any] = [("index", pa.int64()), ("image", pa.string()), ("label", pa.string())]
    if settings.predictions:
        fields += [("labels", pa.list_(pa.string())), ("probabilities", pa.list_(pa.float32()))]
    else:
        fields.append(("embedding", pa.list_(pa.float32())))
    return pa.schema(fields, metadata={"model": subject.fingerprint})


def _table(batch: "Sequence[Row]", settings: Settings, subject: "Subject", schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa
    import torch

    indices, names, labels, images = (list(column) for column in zip(*batch, strict=True))
    columns: dict[str, Any] = {"index": indices, "image": names, "label": labels}
    with torch.inference_mode():
        pixel_values = subject.pixel_values(images)
        if settings.predictions:
            columns |= _predictions(subject, pixel_values, settings.top)
        else:
            columns["embedding"] = _embeddings(subject, pixel_values)
    return pa.Table.from_pydict(columns, schema=schema)


def _embeddings(subject: "Subject", pixel_values: "torch.Tensor") -> list[Any]:
    from hf_vit.evaluation.reading import enough_for
    from hf_vit.subjects.features import pre_logits

    with enough_for(pixel_values):
        features = pre_logits(subject.model, pixel_values).float().cpu()
    if not bool(features.isfinite().all()):
        raise UserError("the model's outputs are not finite (NaN or infinity); its weights are damaged or diverged")
    return list(features.numpy())


def _predictions(subject: "Subject", pixel_values: "torch.Tensor", top: int) -> dict[str, list[Any]]:
    from hf_vit.evaluation.reading import finite_logits

    names = subject.label_sets[0]
    best = finite_logits(subject.model, pixel_values).double().softmax(-1).topk(min(top, len(names)), dim=-1)
    labels = [[names[index] for index in row] for row in best.indices.tolist()]
    return {"labels": labels, "probabilities": best.values.tolist()}
