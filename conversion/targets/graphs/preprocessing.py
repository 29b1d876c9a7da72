"""What stands first in a graph: a check of sizes, or the saved image processor, uint8 images of any size -> what the
model takes.

Legend: B images, H x W px, C channels.

Resizing is torchvision's, to the last bit: across, then down, each a product of the image and a matrix of weights that
are rounded to 16 bits as torch does (aten/src/ATen/native/cpu/UpSampleKernel.cpp), its sums rounded to 0..255. They are
exact in float32 unless a side shrinks to less than an eighth: then of thousands of values one may differ by 1. Pillow
keeps 22 bits of a weight, and ONNX's `Resize` says nothing of bits.
"""

from dataclasses import dataclass
from io import BytesIO
from typing import Any, Self, final

import torch
from PIL import Image

from hf_vit.data.transforms import pixel_scale
from hf_vit.errors import UserError

OF_NODES = "preprocessing/"  # how the names of its nodes begin
PREPROCESSED = "preprocessed"  # the output that shows what the model is given
PIXEL_VALUES, IMAGES, ENCODED, LEVELS = "pixel_values", "images", "file", "levels"  # what a graph takes
DECODING = "com.microsoft.extensions"  # onnxruntime-extensions' operators

_FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
_INT64, _DOUBLE, FLOAT = 7, 11, 1  # as ONNX numbers them
END = 2**31 - 1
# Methods that make a processor of transformers another than the usual one, were it to have its own.
_STEPS = ("preprocess", "_preprocess", "process_image", "resize", "center_crop", "rescale_and_normalize", "normalize")


@final
@dataclass(frozen=True)
class Preprocessing:
    """What an image processor does to an RGB image, in this order: resize, crop, shift and scale."""

    size: tuple[int, int] | int | None  # (height, width) px, or that of the shorter side
    resample: Image.Resampling
    crop: tuple[int, int] | None  # (height, width) px from the middle
    mean: tuple[float, ...]  # of the three channels, in 0..255: (value - mean) / std
    std: tuple[float, ...]

    @classmethod
    def of(cls, processor: Any) -> Self:
        """Read from an image processor of transformers; a UserError names all that no graph does."""
        wrong = _inexpressible(processor)
        if wrong:
            raise UserError(
                f"a graph cannot do what the image processor does: {', '.join(wrong)}; save another, or "
                "export --to onnx without it"
            )
        size, crop = dict(processor.size or {}), dict(getattr(processor, "crop_size", None) or {})
        mean, std = scale_of(processor)
        return cls(
            size=(size.get("shortest_edge") or _sides(size)) if processor.do_resize else None,
            resample=Image.Resampling(processor.resample),
            crop=_sides(crop) if getattr(processor, "do_center_crop", None) else None,
            mean=mean,
            std=std,
        )

    @property
    def output_size(self) -> tuple[int, int]:
        """Return (height, width) px of what it makes of every image."""
        assert self.crop is not None or isinstance(self.size, tuple)  # or `of` refuses it
        return self.crop or self.size  # pyright: ignore[reportReturnType]

    @property
    def step(self) -> float:
        """Return what 1 of 255 is in the values that it makes, and a little for rounding."""
        return 1.001 * max(1 / std for std in self.std)

    @property
    def kept_size(self) -> tuple[int, int]:
        """Return (height, width) px of images that are not resized."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size or self.output_size


def _inexpressible(processor: Any) -> list[str]:
    """Return what no graph here does, in words."""
    from transformers.image_processing_backends import TorchvisionBackend

    kind: Any = type(processor)
    if not issubclass(kind, TorchvisionBackend):
        return [f"a {kind.__name__} (not one of transformers' torchvision processors)"]
    other = [name for name in _STEPS if getattr(kind, name) is not getattr(TorchvisionBackend, name)]
    if other:
        return [f"a {kind.__name__} (it overrides {other[0]})"]
    wrong, crops = list[str](), getattr(processor, "do_center_crop", None)
    if processor.do_resize:
        filter_ = Image.Resampling(processor.resample)
        if filter_ not in _FILTERS:
            wrong.append(f"resample={filter_.name} (graphs have {' and '.join(known.name for known in _FILTERS)})")
        sides = set(dict(processor.size))
        if sides != {"height", "width"} and (sides != {"shortest_edge"} or not crops):
            wrong.append(
                f"size={dict(processor.size)} (graphs need a height and a width, or a shortest_edge and a crop)"
            )
    elif not crops:
        wrong.append("images of all sizes (do_resize=False, and no crop)")
    if 0.0 in scale_of(processor)[1]:
        wrong.append(f"image_std={processor.image_std} (nothing can be divided by 0)")
    return wrong + ["do_pad=True"] * bool(getattr(processor, "do_pad", None))


def _sides(size: dict[str, int]) -> tuple[int, int]:
    return int(size["height"]), int(size["width"])


def scale_of(processor: Any, channels: int = 3, unit: float = 1.0) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of every channel in `unit`s of 0..255; transformers fuses the factor into them, too.

    A UserError where a step lacks its number, or the factor is 0.
    """
    factor, *of_channels = pixel_scale(processor, channels)
    means, stds = (tuple(value / (factor * unit) for value in values) for values in of_channels)
    return means, stds


def prepend(model: Any, preprocessing: Preprocessing, takes: str = IMAGES) -> None:
    """Let a graph take images instead of pixel values.

    Args:
        model: an `onnx_ir.Model` whose input is [B, 3, H, W]; it is changed.
        preprocessing: what is done to the images.
        takes: `IMAGES`, uint8 [B, H, W, 3]; `ENCODED`, the bytes of one JPEG or PNG file, uint8 [N]; or `LEVELS`, the
            same levels 0..255 as float32 [B, 3, H, W], under the name that the input has.
    """
    from onnxscript import ir

    graph, nodes, output_size = model.graph, Nodes(OF_NODES), preprocessing.output_size
    # What a graph takes -> name, shape and kind of its input.
    name, shape, kind = {
        IMAGES: (IMAGES, ("batch", "height", "width", 3), ir.DataType.UINT8),
        ENCODED: (ENCODED, ("bytes",), ir.DataType.UINT8),
        LEVELS: (PIXEL_VALUES, ("batch", 3, "height", "width"), ir.DataType.FLOAT),
    }[takes]
    given = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))
    values = given
    if takes != LEVELS:
        images = _decoded(nodes, given) if takes == ENCODED else given
        values = nodes.Cast(nodes.Transpose(images, perm=[0, 3, 1, 2]), to=FLOAT)
    values = _resized(nodes, values, preprocessing)
    if preprocessing.crop is not None:
        values = _cropped(nodes, values, preprocessing.crop)
    values = nodes.Reshape(values, nodes.ints(0, 3, *output_size))  # or shapes are not inferred
    values = nodes.Sub(values, nodes.constant([[[each]] for each in preprocessing.mean], FLOAT))
    values = nodes.Div(values, nodes.constant([[[each]] for each in preprocessing.std], FLOAT))
    values.name, values.type = PREPROCESSED, ir.TensorType(ir.DataType.FLOAT)
    values.shape = ir.Shape(["batch", 3, *output_size])
    pixel_values, graph.inputs[0] = graph.inputs[0], given
    graph.outputs.append(values)
    nodes.put_before(graph, pixel_values, values)
    if takes == ENCODED:
        model.opset_imports[DECODING] = 1


class Nodes:
    """Nodes one after the other: `nodes.Add(a, b)` adds one by the name of its operator and returns its output."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.nodes = prefix, list[Any]()

    def __getattr__(self, operator: str) -> Any:
        from onnxscript import ir

        def add(*inputs: Any, domain: str = "", name: str = "", **attributes: Any) -> Any:
            name = f"{self.prefix}{name or len(self.nodes)}"
            self.nodes.append(ir.node(operator, inputs, attributes, domain=domain, name=name))
            return self.nodes[-1].outputs[0]

        return add

    def constant(self, values: Any, kind: int = _DOUBLE) -> Any:
        """Add numbers in nested sequences, or a scalar; attributes of ints in their place leave shapes unknown."""
        from onnxscript import ir

        return self.Constant(value=ir.tensor(values, ir.DataType(kind)))

    def ints(self, *values: int) -> Any:
        return self.constant(values, _INT64)

    def slice(self, values: Any, start: int, end: int) -> Any:
        return self.Slice(values, self.ints(start), self.ints(end))

    def count(self, number: Any) -> Any:
        """Add 0 to N - 1 as float64 [N], of N as [1]."""
        zero, one = (self.constant(value, _INT64) for value in (0, 1))
        return self.Cast(self.Range(zero, self.Squeeze(number), one), to=_DOUBLE)

    def polynomial(self, values: Any, *factors: float) -> Any:
        """Evaluate at the values, highest power first."""
        first, *others = [self.constant([factor]) for factor in factors]
        for factor in others:
            first = self.Add(self.Mul(first, values), factor)
        return first

    def put_before(self, graph: Any, value: Any, checked: Any) -> None:
        """Put the nodes first in a graph, where `checked` takes the place of `value` in all that reads it."""
        for usage in list(value.uses()):
            if usage.node not in self.nodes:
                usage.node.replace_input_with(usage.idx, checked)
        graph.insert_before(graph[0], self.nodes)


def refuse_other_sizes(model: Any, stride: tuple[int, int], whole: bool) -> None:
    """Let a graph refuse images smaller than a patch and, where `whole`, of sides that are no multiples of it.

    ONNX has no operator that raises, but every runtime refuses to reshape to more values.

    Args:
        model: an `onnx_ir.Model` whose first input is [B, C, H, W]; it is changed.
        stride: (height, width) of a patch in px.
    """
    images = model.graph.inputs[0]
    nodes = Nodes(f"image_sides_{'must_be_multiples_of' if whole else 'are_smaller_than'}_{stride[0]}x{stride[1]}_px/")
    sides, patch = nodes.Shape(images, start=2), nodes.Constant(value_ints=list(stride))
    wrong = nodes.Less(sides, patch)
    if whole:
        nothing = nodes.Constant(value_ints=[0, 0])
        wrong = nodes.Or(wrong, nodes.Less(nothing, nodes.Mod(sides, patch)))
    longer = nodes.Add(sides, nodes.Cast(wrong, to=_INT64))
    checked = nodes.Reshape(images, nodes.Concat(nodes.Shape(images, start=0, end=2), longer, axis=0))
    checked.dtype, checked.shape = images.dtype, images.shape
    nodes.put_before(model.graph, images, checked)


def as_given(takes: str, images: torch.Tensor) -> torch.Tensor:
    """Return images uint8 [B, H, W, 3] as a graph takes them; of a file, which is a PNG, only the first."""
    if takes == ENCODED:
        file = BytesIO()
        Image.fromarray(images[0].numpy()).save(file, "PNG")
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return images.permute(0, 3, 1, 2).float().contiguous() if takes == LEVELS else images


def _resized(nodes: Nodes, values: Any, preprocessing: Preprocessing) -> Any:
    """Resize levels [B, 3, H, W] to the processor's size."""
    size, resample = preprocessing.size, preprocessing.resample
    if size is None:
        return values
    sides = nodes.Shape(values, start=2)
    there = nodes.Concat(nodes.ints(0, 0), nodes.Max(sides, nodes.ints(1)), axis=0)
    values = nodes.Reshape(values, there, name="images_are_empty")
    if isinstance(size, int):  # the longer side, rounded down
        wanted = nodes.Div(nodes.Mul(sides, nodes.ints(size)), nodes.ReduceMin(sides, keepdims=1))
    else:
        wanted = nodes.ints(*size)
    for axis in (1, 0):  # across, then down
        old, new = (nodes.slice(pair, axis, axis + 1) for pair in (sides, wanted))
        weights, unit = _weights(nodes, old, new, resample)
        factors = (values, nodes.Transpose(weights, perm=[1, 0])) if axis else (weights, values)
        levels = nodes.Floor(nodes.Add(nodes.Div(nodes.MatMul(*factors), unit), nodes.constant([0.5], FLOAT)))
        values = nodes.Clip(levels, nodes.constant(0.0, FLOAT), nodes.constant(255.0, FLOAT))
    return values


def _weights(nodes: Nodes, old: Any, new: Any, resample: Image.Resampling) -> tuple[Any, Any]:
    """Return each pixel's share in each resized pixel of a line, [new, old] integers, and the integer that is 1."""
    half, one, zero = (nodes.constant([value]) for value in (0.5, 1.0, 0.0))
    scale = nodes.Div(nodes.Cast(old, to=_DOUBLE), nodes.Cast(new, to=_DOUBLE))
    centres = nodes.Mul(nodes.Add(nodes.count(new), half), scale)
    apart = nodes.Sub(nodes.Add(nodes.count(old), half), nodes.Unsqueeze(centres, nodes.ints(1)))
    apart = nodes.Abs(nodes.Div(apart, nodes.Max(scale, one)))  # smaller images take more pixels
    if resample is Image.Resampling.BILINEAR:
        shares = nodes.Max(nodes.Sub(one, apart), zero)
    else:  # Keys' cubic with a = -0.5
        near, far = nodes.polynomial(apart, 1.5, -2.5, 0.0, 1.0), nodes.polynomial(apart, -0.5, 2.5, -4.0, 2.0)
        far = nodes.Where(nodes.Less(apart, nodes.constant([2.0])), far, zero)
        shares = nodes.Where(nodes.Less(apart, one), near, far)
    shares = nodes.Div(shares, nodes.ReduceSum(shares, nodes.ints(1)))
    units = nodes.constant([2.0**bits for bits in range(23)])  # the largest with which all weights have 16 bits
    largest = nodes.Floor(nodes.Add(nodes.Mul(nodes.ReduceMax(shares, keepdims=0), units), half))
    unit = nodes.ReduceMax(nodes.Where(nodes.Less(largest, nodes.constant([2.0**15])), units, one))
    size = nodes.Floor(nodes.Add(nodes.Mul(nodes.Abs(shares), unit), half))
    weights = nodes.Mul(size, nodes.Sign(shares))
    return nodes.Cast(weights, to=FLOAT), nodes.Cast(unit, to=FLOAT)


def _cropped(nodes: Nodes, values: Any, crop: tuple[int, int]) -> Any:
    """Cut out the middle; put zeros around a smaller image."""
    two, wanted = nodes.ints(2), nodes.ints(*crop)
    lacking = nodes.Max(nodes.Sub(wanted, nodes.Shape(values, start=2)), nodes.ints(0))
    before, others = nodes.Div(lacking, two), nodes.ints(0, 0)
    values = nodes.Pad(values, nodes.Concat(others, before, others, nodes.Sub(lacking, before), axis=0))
    start = nodes.Div(nodes.Sub(nodes.Shape(values, start=2), wanted), two)
    return nodes.Slice(values, start, nodes.Add(start, wanted), nodes.ints(2, 3))


def _decoded(nodes: Nodes, file: Any) -> Any:
    """Decode the bytes of a file to uint8 [1, H, W, 3]. Gray is repeated three times; CMYK is refused.

    So is a file without the marks of a PNG or a whole JPEG: of others the decoder ends the process, or never ends.
    """
    ends = nodes.Concat(nodes.slice(file, 0, 2), nodes.slice(file, -2, END), nodes.slice(file, 0, 4), axis=0)
    marks = nodes.ints(0xFF, 0xD8, 0xFF, 0xD9, 0x89, 0x50, 0x4E, 0x47)
    right = nodes.Cast(nodes.Equal(nodes.Cast(ends, to=_INT64), marks), to=_INT64)
    known = nodes.ReduceMax(nodes.ReduceMin(nodes.Reshape(right, nodes.ints(2, 4)), nodes.ints(1)))
    length = nodes.Add(nodes.Shape(file), nodes.Sub(nodes.ints(1), nodes.Reshape(known, nodes.ints(1))))
    checked = nodes.Reshape(file, length, name="the_file_must_be_a_png_or_a_whole_jpeg")
    image = nodes.DecodeImage(checked, domain=DECODING, color_space="rgb")  # [H, W, 1, 3 or 4]
    channels = nodes.Shape(image, start=2)
    step = nodes.Div(nodes.Sub(channels, nodes.ints(1)), nodes.ints(2))
    beyond = nodes.Mul(nodes.Div(channels, nodes.ints(4)), channels)
    chosen = nodes.Add(nodes.Mul(nodes.ints(0, 1, 2), step), beyond)
    rgb = nodes.Gather(image, chosen, axis=2, name="images_of_four_channels_are_refused")
    return nodes.Unsqueeze(rgb, nodes.ints(0))
