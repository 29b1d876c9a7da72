"""Streams: every image is decoded, checked and dealt to its split while it flows past."""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_vit.data.checks import Seen, open_image, raise_bad, short_name
from hf_vit.data.labels import LabelMap
from hf_vit.data.sources.data_source import DataSource
from hf_vit.data.sources.hub_data import is_foreign, refuse_image
from hf_vit.data.sources.reading import Columns, image_places
from hf_vit.data.splits import part_of

if TYPE_CHECKING:
    from datasets import IterableDataset

logger = logging.getLogger(__name__)
# Decoded images waiting inside a stream; small, so that a stream of large photographs stays small in memory.
_BATCH = 16


@dataclass(frozen=True)
class StreamCut:
    """Which part of a training stream is wanted, when validation or test are cut from it."""

    missing: tuple[str, ...]
    wanted: str
    seed: int


@dataclass(frozen=True)
class StreamReader:
    """Batched map function of a stream: undecoded rows in, RGB images and class numbers out.

    A bad image raises UserError, or with skip_bad_images is left out, named in a warning and in `skipped` (of this
    process: in a loader's worker the list is the worker's own). It is named by its file and row, see `places`.
    """

    columns: Columns
    labels: LabelMap
    split: str
    min_size: tuple[int, int] = (1, 1)
    skip_bad_images: bool = False
    cut: StreamCut | None = None
    skipped: list[str] = field(default_factory=list[str])
    source: DataSource | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        images: list[Any] = []
        labels: list[int] = []
        for stored, raw in zip(batch[self.columns.image], self.columns.labels(batch), strict=True):
            if self.cut is not None and not self._wanted(stored):
                continue
            path = stored.get("path")
            if stored.get("bytes") is None and self.source is not None and is_foreign(self.source, path):
                refuse_image(self.source.name, path)
            seen, image = open_image(stored, "")
            problem = seen.problem_below(self.min_size)
            if image is not None and problem is None:
                if raw not in self.labels.numbers:
                    self.labels.number(raw, f"image '{self.places(seen)[0]}'")
                labels.append(self.labels.numbers[raw])
                images.append(image)
            elif self.skip_bad_images:
                self._skip(map(short_name, self.places(seen)))
            else:
                raise_bad(replace(seen, name=self.places(seen)[0]), problem or "is corrupt")
        return {"image": images, "label": labels}

    def places(self, seen: Seen) -> list[str]:
        """Where an image stands, for people: file and row, of several equal ones all; else what is known of it."""
        known = image_places(self.source, self.columns.image).get(seen.digest) if self.source else None
        return known or [seen.name or f"of split {self.split} with SHA-256 {seen.digest[:12]}"]

    def _skip(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.skipped:  # a stream passes once an epoch
                self.skipped.append(name)
                logger.warning("left out the unreadable image %s", name)

    def _wanted(self, stored: Mapping[str, Any]) -> bool:
        assert self.cut is not None
        content: bytes | None = stored.get("bytes")
        if content is None:  # of a file that cannot be read its name must do: whose part it is will tell of it
            content = str(stored.get("path")).encode()
        digest = hashlib.sha256(content).hexdigest()
        return part_of(digest, self.cut.missing, seed=self.cut.seed) == self.cut.wanted

    def over(self, stream: "IterableDataset") -> "IterableDataset":
        """The stream of {"image": RGB image, "label": class number} that this reader makes of an undecoded one."""
        columns: Sequence[str] = [self.columns.image, self.columns.label[0]]
        return stream.map(self, batched=True, batch_size=_BATCH, remove_columns=list(columns))
