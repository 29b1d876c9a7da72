"""Read images in batches and run a model on them: progress bar, evaluation mode, checks of logits and features."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from hf_vit.display import format_count, make_progress_bar
from hf_vit.errors import UserError, get_first_line, report_full_memory
from hf_vit.families import get_problem_type

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import nn
    from transformers import BatchFeature

    from hf_vit.loading.model import LoadedModel
    from hf_vit.loading.outputs import FeatureChoice


THUMBNAIL_PX = 160  # the longer side of an image in a report
_PIXELS_AT_ONCE = 16_000_000  # decoded images that wait to be prepared, about 64 MB


@dataclass(frozen=True)
class NamedModel:
    """A model by name and the settings with which every process must load it.

    Attributes:
        model: see `load_model`.
        max_num_patches: keep image sizes up to this number of patches (`keep_image_sizes`); None for one size.
        engine: see `select_engine`; None to run the model as loaded.
    """

    model: str
    max_num_patches: int | None = None
    engine: str | None = None

    def load(self, device: str | None) -> "LoadedModel":
        """Load the model on a device, with images in their own size or optimized, as the fields say."""
        from hf_vit.loading.model import load_model
        from hf_vit.loading.optimizing import optimize
        from hf_vit.loading.pixels import keep_image_sizes

        loaded = load_model(self.model, device)
        if self.max_num_patches is not None:
            loaded = keep_image_sizes(loaded, self.max_num_patches)
        if self.engine is not None:
            optimize(loaded, self.engine)
        return loaded


@dataclass(frozen=True)
class Collate:
    """Collate rows of a data set to pixel values [B, C, H, W] (batch, channels, height, width), labels [B] and images.

    A loader's worker reduces the images by a whole factor to about `THUMBNAIL_PX`, because sending images of full size
    takes longer than decoding them.
    """

    prepare: "Callable[[Sequence[Image]], torch.Tensor]"
    mapping: Sequence[int]
    multi_label: bool = False
    draft_side: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> "tuple[torch.Tensor, Any, list[Image]]":
        """Return the prepared images [B, ...], their labels and the images of a batch of rows."""
        import torch
        from torch.utils.data import get_worker_info

        pixel_values, images = read_and_prepare(self._list_images(rows), self._decode, self.prepare, needs_images=True)
        labels = [self._label(row["label"]) for row in rows]
        if get_worker_info() is not None:
            images = list(map(_reduce, images))
        return pixel_values, torch.tensor(labels), images

    def decode(self, rows: Sequence[Mapping[str, Any]]) -> "list[Image]":
        """Decode the images of rows in threads."""
        from hf_vit.data.images import map_in_threads

        return map_in_threads(self._decode, self._list_images(rows))

    def _list_images(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the images of rows; raise UserError for a row without one."""
        if any(row["image"] is None for row in rows):
            raise UserError("a row of the data has no image; remove such rows, or evaluate another --split")
        return [row["image"] for row in rows]

    def _decode(self, image: Any) -> "Image":
        """Decode an image of the data; raise a `UserError` that names it if it is damaged."""
        from hf_vit.data.images import ImageScan, decode_image, describe_image_problem, raise_bad_image

        try:
            return decode_image(image, self.draft_side)
        except Exception as error:
            name = image.get("path") if isinstance(image, Mapping) else None
            raise_bad_image(ImageScan(str(name or "of the data"), ""), describe_image_problem(error))

    def _label(self, label: object) -> "int | list[float]":
        """Map a class of the data with `mapping`; a list of classes becomes 0 or 1 for every class of the data."""
        if self.multi_label and isinstance(label, list):
            return [float(number in label) for number in range(len(self.mapping))]
        if not isinstance(label, Integral) or not 0 <= int(label) < len(self.mapping):
            raise UserError(
                f"an image has the label {label!r}, which is not one of the data set's {len(self.mapping)} "
                "classes; evaluate a split with labeled images"
            )
        return self.mapping[int(label)]


def read_and_prepare(
    items: "Sequence[Any]",
    read: "Callable[[Any], Image | str]",
    prepare: "Callable[[Sequence[Image]], Any]",
    in_threads: bool = True,
    needs_images: bool = False,
) -> "tuple[Any, list[Any]]":
    """Read images in threads, and prepare them for a model.

    Photographs are prepared a few at a time and then reduced or dropped, so that their memory does not grow with the
    batch.

    Returns:
        The pixel values of all images, None without any; and what `read` returned for every item, which may be the
        problem of an image in place of the image. Without `needs_images` photographs that were prepared are None.
    """
    import torch

    from hf_vit.data.images import map_in_threads
    from hf_vit.data.transforms import EvalTransform

    def shrink(image: "Image | str") -> "Image | str | None":
        return image if isinstance(image, str) else _reduce(image) if needs_images else None

    def finish(image: "Image | str") -> "tuple[torch.Tensor | None, Image | str | None]":
        return None if isinstance(image, str) else prepare([image]), shrink(image)

    step = max(4, 2 * torch.get_num_threads())
    results: list[Any] = []
    first = 0  # of the results that are not prepared
    waiting: list[Any] = []  # the images among these
    parts: list[Any] = []  # prepared images
    can_join = isinstance(getattr(prepare, "__self__", None), EvalTransform)  # others pad the images of a batch
    while len(results) < len(items):
        chunk = items[len(results) : len(results) + step]
        results += map_in_threads(read, chunk) if in_threads else map(read, chunk)
        waiting = [image for image in results[first:] if not isinstance(image, str)]
        largest = max((image.width * image.height for image in waiting), default=0)
        if largest * len(items) <= _PIXELS_AT_ONCE:
            step = len(items)  # threads take long to start for a few small images
        elif can_join and largest * len(waiting) > _PIXELS_AT_ONCE:
            parts.append(prepare(waiting))
            results[first:] = map_in_threads(shrink, results[first:])
            first, waiting = len(results), []
            if in_threads:  # each reads and prepares the next image without waiting for the others
                pairs = map_in_threads(lambda item: finish(read(item)), items[first:])
                parts += [part for part, _ in pairs if part is not None]
                results += [image for _, image in pairs]
    if waiting:
        parts.append(prepare(waiting))
    if not parts:
        return None, results
    return torch.cat(parts) if len(parts) > 1 else parts[0], results


def _reduce(image: "Image") -> "Image":
    """Return an image that is reduced by a whole factor to about `THUMBNAIL_PX`, if it is larger."""
    factor = max(image.size) // THUMBNAIL_PX
    return image.reduce(factor) if factor > 1 else image


def iterate_batches(
    dataset: Any, batch_size: int, collate: Callable[..., Any], num_workers: int = 0
) -> "Iterable[tuple[torch.Tensor, torch.Tensor, list[Image]]]":
    """Iterate over the batches of a table or stream in order, collated with `collate`."""
    import torch
    from torch.utils.data import DataLoader

    workers = num_workers if hasattr(dataset, "__len__") else 0
    # Without a separate generator the loader would change the random state of a running training.
    return DataLoader(dataset, int(batch_size), collate_fn=collate, num_workers=workers, generator=torch.Generator())


@contextmanager
def evaluation_mode(model: "nn.Module") -> Generator[None]:
    """Put the model into evaluation mode, and restore the mode of every module afterwards."""
    training_modules = _list_training_modules(model)
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


def _list_training_modules(model: "nn.Module") -> "list[nn.Module]":
    return [module for module in model.modules() if module.training]


_lock = threading.Lock()
_in_use: "dict[int, tuple[list[nn.Module], int]]" = {}  # id of a model -> modules to be restored, number of calls


@contextmanager
def restored_modes(*sources: Any) -> Generator[None]:
    """Restore the modes of models that are given as objects, which `load_model` puts into evaluation mode.

    Where several threads use a model, the last one restores it.
    """
    objects: Any = (source[0] if isinstance(source, tuple) else getattr(source, "model", None) for source in sources)
    models: list[nn.Module] = [model for model in objects if hasattr(model, "modules")]  # load_model refuses others
    with _lock:
        for model in models:
            modules, calls = _in_use.get(id(model)) or (_list_training_modules(model), 0)
            _in_use[id(model)] = modules, calls + 1
    try:
        yield
    finally:
        with _lock:
            for model in models:
                modules, calls = _in_use.pop(id(model))
                if calls > 1:
                    _in_use[id(model)] = modules, calls - 1
                    continue
                for module in modules:
                    module.training = True


def show_progress(
    batches: Iterable[Any], total: int | None, title: str = "evaluating", progress: bool = True
) -> Iterator[Any]:
    """Iterate over the batches with a progress bar of images on standard error, which disappears at the end."""
    if not progress:
        yield from batches
        return
    with make_progress_bar(title) as bar:
        task = bar.add_task("", total=total)
        for batch in batches:
            yield batch
            bar.advance(task, len(batch[-1]))


def explain_memory_errors(pixel_values: "torch.Tensor | BatchFeature") -> AbstractContextManager[None]:
    """Turn errors of too little memory into a UserError that names the batch [B, C, H, W] and the remedy."""
    batch = f"a batch of {format_count(len(_get_pixels(pixel_values)), 'image')} of {_format_size(pixel_values)}"
    return report_full_memory(batch, "choose a smaller batch size")


@contextmanager
def explain_model_errors(pixel_values: "torch.Tensor | BatchFeature") -> Generator[None]:
    """Turn errors of a forward pass (too little memory, unsupported image size) into a UserError."""
    try:
        with explain_memory_errors(pixel_values):
            yield
    except UserError:
        raise
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"the model does not take images of {_format_size(pixel_values)}, but its image processor resizes to that "
            f"size ({get_first_line(error)}); restore the preprocessor_config.json that was saved with the model"
        ) from error


def _get_pixels(pixel_values: Any) -> "torch.Tensor":
    return pixel_values if hasattr(pixel_values, "shape") else pixel_values["pixel_values"]


def _format_size(pixel_values: Any) -> str:
    height, width = _get_pixels(pixel_values).shape[2:]
    return f"{height}x{width} px"


def compute_logits(model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature", **options: Any) -> "torch.Tensor":
    """Compute the logits [B, K] (K classes) of pixel values [B, C, H, W], or of images of mixed sizes.

    The model runs in the dtype of its weights, as the classifiers of hf_vit, transformers and timm do; logits are
    converted to at least float32. `options` are arguments of its forward pass.
    """
    import torch

    from hf_vit.loading.outputs import call_model, check_finite

    dtype = next(model.parameters()).dtype
    with explain_model_errors(pixel_values):
        output = call_model(model, pixel_values.to(dtype), **options)
    logits: torch.Tensor = getattr(output, "logits", output)
    return check_finite(logits.to(torch.promote_types(dtype, torch.float32)), "outputs")


def find_largest(values: "torch.Tensor", count: int) -> "torch.Tensor":
    """Return the indices of the largest values of every row, [B, count]; ties are in order, unlike in topk."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]


def convert_to_scores(model: "nn.Module", logits: "torch.Tensor") -> "torch.Tensor":
    """Convert logits [B, K] to probabilities of classes, or to values of a regression, in float64 on the CPU."""
    kind = get_problem_type(model)
    values = logits.cpu().double()  # Apple's GPUs have no float64
    if kind == "regression":
        return values
    return values.sigmoid() if kind == "multi_label_classification" else values.softmax(-1)


def compute_scores(model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature") -> "torch.Tensor":
    """Return the scores of images, see `convert_to_scores`, [B, K]."""
    return convert_to_scores(model, compute_logits(model, pixel_values))


def compute_features(model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature") -> "NDArray[np.float32]":
    """Compute the pre-logits of images, [B, D] (hidden size D)."""
    from hf_vit.loading.outputs import compute_pre_logits

    with explain_model_errors(pixel_values):
        return check_features(compute_pre_logits(model, pixel_values.to(next(model.parameters()).dtype)))


def compute_layer_features(
    model: "nn.Module", pixel_values: "torch.Tensor | BatchFeature", choice: "FeatureChoice"
) -> "list[NDArray[np.float32]]":
    """Compute the `read_layer_features` of every image, one vector or, of patches, a row for each."""
    from hf_vit.loading.outputs import read_layer_features

    with explain_model_errors(pixel_values):
        features = read_layer_features(model, pixel_values.to(next(model.parameters()).dtype), choice)
    return [check_features(image) for image in features]


def check_features(features: "torch.Tensor") -> "NDArray[np.float32]":
    """Return features [B, D] on the CPU; raise UserError if they are NaN or infinite."""
    from hf_vit.loading.outputs import check_finite

    return check_finite(features.float(), "features").cpu().numpy()
