"""How every evaluation reads: images in batches, a bar, the model in evaluation mode, logits that are numbers."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.display import progress_bar
from hf_vit.errors import UserError, enough_memory, first_line
from hf_vit.families import problem_type_of
from hf_vit.repositories.stores import is_store_url, to_path

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import nn
    from transformers import BatchFeature

    from hf_vit.loading.model import LoadedModel


PICTURED_PX = 160  # the longer side of an image in a report


@dataclass(frozen=True)
class NamedModel:
    """How any process opens a model as it is used here."""

    model: str  # see `load_model`
    max_num_patches: int | None = None  # of images in their own size and shape (`keep_image_sizes`); None for one size
    engine: str | None = None  # that computes it; None: as it is loaded

    def opened(self, device: str | None) -> "LoadedModel":
        """Return the model on a device."""
        from hf_vit.loading.model import load_model
        from hf_vit.loading.optimizing import optimize
        from hf_vit.loading.pixels import keep_image_sizes

        subject = load_model(self.model, device)
        if self.max_num_patches is not None:
            subject = keep_image_sizes(subject, self.max_num_patches)
        if self.engine is not None:
            optimize(subject, self.engine)
        return subject


def undecoded(table: Any) -> Any:
    """Return a table whose images are {"bytes", "path"}, which `decode_image` reads; a stream or list as it is."""
    import datasets

    if not isinstance(table, datasets.Dataset) or not isinstance(table.features.get("image"), datasets.Image):
        return table
    return table.cast_column("image", datasets.Image(decode=False))


class Collate:
    """Rows of a data set -> pixel values [B, C, H, W], labels [B], and the images.

    A loader's worker sends images of a whole part of their size, enough for `PICTURED_PX`: to send whole images takes
    longer than to decode them.
    """

    def __init__(
        self,
        prepare: "Callable[[Sequence[Image]], torch.Tensor]",
        mapping: Sequence[int],
        multi_label: bool = False,
        draft_side: int | None = None,
    ) -> None:
        self.prepare, self.mapping, self.multi_label, self.draft_side = prepare, mapping, multi_label, draft_side

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> "tuple[torch.Tensor, Any, list[Image]]":
        import torch
        from torch.utils.data import get_worker_info

        images = self.decode(rows)
        labels = [self._label(row["label"]) for row in rows]
        pixel_values = self.prepare(images)
        if get_worker_info() is not None:
            images = [image.reduce(max(1, max(image.size) // PICTURED_PX)) for image in images]
        return pixel_values, torch.tensor(labels), images

    def decode(self, rows: Sequence[Mapping[str, Any]]) -> "list[Image]":
        """Decode the images of rows, several at a time."""
        from hf_vit.data.images import map_in_threads

        if any(row["image"] is None for row in rows):
            raise UserError("a row has no image; remove such rows, or choose another split")
        return map_in_threads(self._decode, [row["image"] for row in rows])

    def _decode(self, image: Any) -> "Image":
        from hf_vit.data.images import ImageScan, decode_image, image_problem, raise_bad_image

        try:
            return decode_image(image, self.draft_side)
        except Exception as error:
            name = image.get("path") if isinstance(image, Mapping) else None
            raise_bad_image(ImageScan(str(name or "of the data"), ""), image_problem(error))

    def _label(self, label: object) -> "int | list[float]":
        if self.multi_label and isinstance(label, list):  # of the data's classes, each there or not
            return [float(each in label) for each in range(len(self.mapping))]
        if not isinstance(label, Integral) or not 0 <= int(label) < len(self.mapping):
            raise UserError(
                f"an image has label {label!r}, outside the {len(self.mapping)} classes of the data; choose "
                "a split with labeled images"
            )
        return self.mapping[int(label)]


def image_batches(
    dataset: Any, batch_size: int, collate: Callable[..., Any], num_workers: int = 0
) -> "Iterable[tuple[torch.Tensor, torch.Tensor, list[Image]]]":
    """Iterate over what `collate` makes of a table or stream, `batch_size` rows at a time, in their order."""
    import torch
    from torch.utils.data import DataLoader

    workers = num_workers if hasattr(dataset, "__len__") else 0
    # A generator of its own: the loader would otherwise draw from the random state of a training in progress.
    return DataLoader(dataset, batch_size, collate_fn=collate, num_workers=workers, generator=torch.Generator())


@contextmanager
def evaluating(model: "nn.Module") -> Generator[None]:
    """Put the model into evaluation mode; in training mode again if it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def shown(batches: Iterable[Any], total: int | None, what: str = "evaluating", progress: bool = True) -> Iterator[Any]:
    """Iterate over the batches, with a bar of images on standard error that disappears at the end."""
    if not progress:
        yield from batches
        return
    with progress_bar(what) as bar:
        task = bar.add_task("", total=total)
        for batch in batches:
            yield batch
            bar.advance(task, len(batch[-1]))


def refuse_output_in(data: object, output: "str | os.PathLike[str] | None") -> None:
    """Refuse to write among the images, where it would be taken for some of them the next time."""
    if output is None or not isinstance(data, str | os.PathLike) or not Path(data).expanduser().is_dir():
        return
    if not is_store_url(output) and to_path(output).resolve().is_relative_to(Path(data).expanduser().resolve()):
        raise UserError(f"the output {output} is in the folder of the data, {data}; choose one elsewhere")


def enough_for(pixel_values: "torch.Tensor | BatchFeature") -> AbstractContextManager[None]:
    """Name the batch and the remedy where memory runs out for images [B, C, H, W]."""
    batch = f"a batch of {len(_tensor(pixel_values))} images of {_px(pixel_values)}"
    return enough_memory(batch, "choose a smaller batch size")


@contextmanager
def answering(pixel_values: "torch.Tensor | BatchFeature") -> Generator[None]:
    """Turn errors of a forward pass into one line: too little memory, or an unsupported image size."""
    try:
        with enough_for(pixel_values):
            yield
    except UserError:
        raise
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"the model takes no images of {_px(pixel_values)}, which its image processor makes ({first_line(error)}); "
            "give it the preprocessor_config.json that it was saved with"
        ) from error


def _tensor(pixel_values: Any) -> "torch.Tensor":
    return pixel_values if hasattr(pixel_values, "shape") else pixel_values["pixel_values"]


def _px(pixel_values: Any) -> str:
    height, width = _tensor(pixel_values).shape[2:]
    return f"{height}x{width} px"


def finite_logits(model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature") -> "torch.Tensor":
    """Return logits [B, K] in float32 (of a float64 model in float64) of pixel values [B, C, H, W] or of mixed sizes.

    They are computed in the dtype of the weights; hf_vit's, transformers' and timm's classifiers all do.
    """
    import torch

    from hf_vit.loading.outputs import call_model

    dtype = next(model.parameters()).dtype
    with answering(pixel_values):
        output = call_model(model, pixel_values.to(dtype))
    logits: torch.Tensor = getattr(output, "logits", output)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if not bool(logits.isfinite().all()):
        raise UserError("the model's outputs are not finite (NaN or infinity); its weights are damaged or diverged")
    return logits


def largest(values: "torch.Tensor", count: int) -> "torch.Tensor":
    """Return places [B, count] of the largest of each row; of equals the first, as argmax has it, unlike topk."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]


def scores_of(model: "nn.Module", logits: "torch.Tensor") -> "torch.Tensor":
    """Return what logits [B, K] of a model mean, in float64: probabilities of classes, or values of a regression."""
    kind = problem_type_of(model)
    if kind == "regression":
        return logits.double()
    return logits.double().sigmoid() if kind == "multi_label_classification" else logits.double().softmax(-1)


def scores(model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature") -> "torch.Tensor":
    """Return `scores_of` images, [B, K] on the CPU."""
    return scores_of(model, finite_logits(model, pixel_values)).cpu()


def last_features(model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature") -> "NDArray[np.float32]":
    """Return the pre-logits [B, D] of images."""
    from hf_vit.loading.outputs import pre_logits

    with answering(pixel_values):
        return finite_features(pre_logits(model, pixel_values.to(next(model.parameters()).dtype)))


def finite_features(features: "torch.Tensor") -> "NDArray[np.float32]":
    """Return features [B, D] on the CPU, if they are numbers."""
    import numpy as np

    values = features.float().cpu().numpy()
    if not np.isfinite(values).all():
        raise UserError("the model's features are not finite (NaN or infinity); its weights are damaged or diverged")
    return values
