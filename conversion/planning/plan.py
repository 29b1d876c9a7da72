"""What a conversion will do, as data: one row for every parameter of the model, a reason for every key left out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from transformers.modeling_utils import PreTrainedModel

from hf_vit.conversion.readers.checkpoint import Shape
from hf_vit.conversion.sizes import Pair
from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_base import HfBaseConfig

POSITION_TABLE = "embeddings.position_embeddings"
HEADS = ("classifier.", "distillation_classifier.")
REPRESENTATION = "pooler.dense."

# Field of the config -> the option that declares it.
DECLARED = {
    "num_attention_heads": "--num-heads",
    "hidden_act": "--hidden-act",
    "pooling": "--pooling",
    "position_embedding": "--position-embedding",
}


class PlanOptions(TypedDict, total=False):
    """What people may say about a conversion; see `Wishes`."""

    image_size: Pair | None
    resize_to: Pair | None
    num_labels: int | None
    labels: Sequence[str] | None
    drop_pre_logits: bool
    num_heads: int | None
    hidden_act: str | None
    pooling: str | None
    position_embedding: str | None
    prefix: str | None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What people say about a conversion: declared of the source, or wanted of the model.

    Attributes:
        image_size: (height, width) in px the source was made for; needed if its position table is not square.
        resize_to: (height, width) in px to resample the position table to, as the original's fine-tuning does.
        num_labels: size of a new, zero head.
        labels: names of the classes of a new, zero head.
        drop_pre_logits: leave out the representation layer, as the original's fine-tuning does; the source's head was
            made for it and goes too, so that without a new one the result is the bare model.
        num_heads, hidden_act, pooling, position_embedding: of the source's network ("token", "gap", "map"; "sincos_2d",
            "none"), where neither its weights nor a file beside them say it. "token" without a class token is the first
            patch's.
        prefix: what the model's keys begin with, where something unknown is wrapped around it; others are left out.

    Raises:
        UserError: they contradict each other.
    """

    image_size: Pair | None = None
    resize_to: Pair | None = None
    num_labels: int | None = None
    labels: Sequence[str] | None = None
    drop_pre_logits: bool = False
    num_heads: int | None = None
    hidden_act: str | None = None
    pooling: str | None = None
    position_embedding: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.num_labels is not None and self.labels is not None:
            raise UserError("give either the number of labels or their names, not both")
        if (self.num_labels is not None and self.num_labels < 1) or (self.labels is not None and not self.labels):
            raise UserError(f"{self.num_labels or 0} labels make no classifier; give at least 1")

    @property
    def new_head(self) -> bool:
        return self.num_labels is not None or self.labels is not None


@dataclass(frozen=True)
class Resample:
    """A position table stretched from one (h, w) patch grid to another; `prefix` rows are copied."""

    old_grid: Pair
    new_grid: Pair
    prefix: int
    mode: str


@dataclass(frozen=True)
class Row:
    """One parameter of the model and where it comes from. A row without a key is filled with zeros (a new head).

    `parameter` is the name in the bare model, without the prefix that it has inside a classifier. `block` is the step
    of the array's first axis that is taken, where an array stacks all blocks; `piece` is (index, number) of the equal
    part along that axis, where an array fills several parameters; `shape` is the whole array's. `beside` are the keys
    of the other arrays that the parameter is computed from; other parameters may be as well.
    """

    parameter: str
    parameter_shape: Shape
    key: str | None
    shape: Shape | None
    transform: str
    resample: Resample | None = None
    block: int | None = None
    piece: tuple[int, int] | None = None
    beside: tuple[str, ...] = ()

    def taken(self, array: torch.Tensor) -> torch.Tensor:
        """The part of the whole array that this row moves."""
        block = array if self.block is None else array[self.block]
        return block if self.piece is None else block.chunk(self.piece[1])[self.piece[0]]


@dataclass(frozen=True)
class Plan:
    """What a conversion will do, decided on names and shapes alone.

    Attributes:
        origin: name of the origin.
        family: of the model, a key of `hf_vit.families.FAMILIES`.
        config: the model's configuration.
        model_class: what will be saved: the classifier, or the bare model if the source has no head.
        rows: one for every parameter of the model.
        ignored: key of the file -> why it is left out.
        has_head: whether there is a classifier.
        new_head: whether the classifier is new (zeros).
        processor: see `Declared.processor`.
        assumed: field of the config, "labels" or "processor" -> what was assumed, as the source does not tell it.
    """

    origin: str
    family: str
    config: HfBaseConfig
    model_class: type[PreTrainedModel]
    rows: tuple[Row, ...]
    ignored: Mapping[str, str]
    has_head: bool
    new_head: bool
    processor: Mapping[str, Any] | None = None
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def consumed(self) -> list[str]:
        """The keys of the file that fill a parameter."""
        return list(dict.fromkeys(key for row in self.rows if row.key is not None for key in (row.key, *row.beside)))

    @property
    def resample(self) -> Resample | None:
        """How the position table is stretched, if it is."""
        return next((row.resample for row in self.rows if row.resample), None)

    @property
    def size(self) -> int:
        """Bytes of the arrays that are used, in float32."""
        shapes = {row.key: row.shape for row in self.rows if row.shape is not None}
        return 4 * sum(map(math.prod, shapes.values()))

    def parameter_name(self, row: Row) -> str:
        """The row's parameter as `model_class` names it."""
        bare = row.parameter.startswith(HEADS) or not self.has_head
        return row.parameter if bare else f"{self.model_class.base_model_prefix}.{row.parameter}"
