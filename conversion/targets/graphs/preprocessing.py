"""The saved image processor as the first nodes of a graph: uint8 images of any size -> what the model takes.

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
_INT64, _DOUBLE, _FLOAT = 7, 11, 1  # as ONNX numbers them
_END = 2**31 - 1
# Methods that make a processor of transformers another than the usual one, were it to have its own.
_STEPS = ("preprocess", "_preprocess", "process_image", "resize", "center_crop", "rescale_and_normalize", "normalize")


@final
@dataclass(frozen=True)
class Preprocessing:
    """What an image processor does to an RGB image, in this order: resize, crop, shift and scale.

    Attributes:
        size: (height, width) px to resize to, the length of the shorter side, or None.
        resample: the filter.
        crop: (height, width) px from the middle, or None.
        mean, std: of the three channels, in 0..255: (value - mean) / std.
    """

    size: tuple[int, int] | int | None
    resample: Image.Resampling
    crop: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, processor: Any) -> Self:
        """Read from an image processor of transformers.

        Raises:
            UserError: it does what no graph does; all of it is named.
        """
        wrong = _inexpressible(processor)
        if wrong:
            raise UserError(
                f"no graph here does what the image processor does: {', '.join(wrong)}; save another, or export --to "
                "onnx without it"
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
        """(height, width) px of what it makes of every image."""
        assert self.crop is not None or isinstance(self.size, tuple)  # or `of` refuses it
        return self.crop or self.size  # pyright: ignore[reportReturnType]

    @property
    def step(self) -> float:
        """What 1 of 255 is in the values that it makes, and a little for rounding."""
        return 1.001 * max(1 / std for std in self.std)

    @property
    def kept_size(self) -> tuple[int, int]:
        """(height, width) px of images that are not resized."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size or self.output_size


def _inexpressible(processor: Any) -> list[str]:
    """What of a processor no graph here does, in words."""
    from transformers.image_processing_backends import TorchvisionBackend

    kind: Any = type(processor)
    if not issubclass(kind, TorchvisionBackend):
        return [f"a {kind.__name__} (it is none of transformers' on torchvision)"]
    other = [name for name in _STEPS if getattr(kind, name) is not getattr(TorchvisionBackend, name)]
    if other:
        return [f"a {kind.__name__} (it has a {other[0]} of its own)"]
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
    """Mean and standard deviation of every channel, in `unit`s of 0..255; transformers fuses the factor into them, too.

    Raises:
        UserError: a step lacks its number, or the factor is 0.
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

    graph, pixel_values, nodes, output_size = model.graph, model.graph.inputs[0], _Nodes(), preprocessing.output_size
    given = _input(takes, PIXEL_VALUES if takes == LEVELS else takes)
    values = given
    if takes != LEVELS:
        images = _decoded(nodes, given) if takes == ENCODED else given
        values = nodes.add("Cast", nodes.add("Transpose", images, perm=[0, 3, 1, 2]), to=_FLOAT)
    values = _resized(nodes, values, preprocessing)
    if preprocessing.crop is not None:
        values = _cropped(nodes, values, preprocessing.crop)
    values = nodes.add("Reshape", values, nodes.integers(0, 3, *output_size))  # or shapes are not inferred
    values = nodes.add("Sub", values, nodes.channels(preprocessing.mean))
    values = nodes.add("Div", values, nodes.channels(preprocessing.std))
    for usage in list(pixel_values.uses()):
        usage.node.replace_input_with(usage.idx, values)
    values.name, values.type = PREPROCESSED, ir.TensorType(ir.DataType.FLOAT)
    values.shape = ir.Shape(["batch", 3, *output_size])
    graph.inputs[0] = given
    graph.outputs.append(values)
    graph.insert_before(graph[0], nodes.nodes)
    if takes == ENCODED:
        model.opset_imports[DECODING] = 1


def _input(takes: str, name: str) -> Any:
    from onnxscript import ir

    sides: tuple[str, str] = ("height", "width")
    shape = {IMAGES: ("batch", *sides, 3), ENCODED: ("bytes",), LEVELS: ("batch", 3, *sides)}[takes]
    kind = ir.DataType.FLOAT if takes == LEVELS else ir.DataType.UINT8
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))


class _Nodes:
    """Nodes one after the other."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []

    def add(self, operator: str, *inputs: Any, domain: str = "", name: str = "", **attributes: Any) -> Any:
        """The output of a new node."""
        from onnxscript import ir

        name = f"{OF_NODES}{name or len(self.nodes)}"
        node = ir.node(operator, inputs, attributes, domain=domain, name=name)
        self.nodes.append(node)
        return node.outputs[0]

    def integers(self, *values: int) -> Any:
        from onnxscript import ir

        return self.add("Constant", value=ir.tensor(values, ir.DataType.INT64))  # of ints, shapes are not inferred

    def numbers(self, *values: float, kind: int = _DOUBLE) -> Any:
        from onnxscript import ir

        return self.add("Constant", value=ir.tensor(values, ir.DataType(kind)))

    def number(self, value: float) -> Any:
        """A scalar of float32."""
        from onnxscript import ir

        return self.add("Constant", value=ir.tensor(value, ir.DataType.FLOAT))

    def count(self, number: Any) -> Any:
        """[N] float64: 0 to N - 1, of N as [1]."""
        from onnxscript import ir

        zero, one = (self.add("Constant", value=ir.tensor(value, ir.DataType.INT64)) for value in (0, 1))
        return self.add("Cast", self.add("Range", zero, self.add("Squeeze", number), one), to=_DOUBLE)

    def whole(self, values: Any, half: Any) -> Any:
        """Rounded to integers, halves up."""
        return self.add("Floor", self.add("Add", values, half))

    def polynomial(self, values: Any, *factors: float) -> Any:
        """Of the values, highest power first."""
        first, *others = map(self.numbers, factors)
        for factor in others:
            first = self.add("Add", self.add("Mul", first, values), factor)
        return first

    def channels(self, values: tuple[float, ...]) -> Any:
        """[3, 1, 1] of float32."""
        from onnxscript import ir

        return self.add("Constant", value=ir.tensor([[[value]] for value in values], ir.DataType.FLOAT))

    def sides(self, values: Any) -> Any:
        """[2]: height and width of [B, C, H, W]."""
        return self.add("Shape", values, start=2)


def as_given(takes: str, images: torch.Tensor) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> what a graph takes; of a file, which is a PNG, only the first."""
    if takes == ENCODED:
        file = BytesIO()
        Image.fromarray(images[0].numpy()).save(file, "PNG")
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return images.permute(0, 3, 1, 2).float().contiguous() if takes == LEVELS else images


def _resized(nodes: _Nodes, values: Any, preprocessing: Preprocessing) -> Any:
    """Levels [B, 3, H, W] -> of the processor's size."""
    size, resample = preprocessing.size, preprocessing.resample
    if size is None:
        return values
    sides = nodes.sides(values)
    there = nodes.add("Concat", nodes.integers(0, 0), nodes.add("Max", sides, nodes.integers(1)), axis=0)
    values = nodes.add("Reshape", values, there, name="images_are_empty")
    if isinstance(size, int):  # the longer side, rounded down
        wanted = nodes.add(
            "Div", nodes.add("Mul", sides, nodes.integers(size)), nodes.add("ReduceMin", sides, keepdims=1)
        )
    else:
        wanted = nodes.integers(*size)
    for axis in (1, 0):  # across, then down
        old, new = (_piece(nodes, pair, axis, axis + 1) for pair in (sides, wanted))
        weights, unit = _weights(nodes, old, new, resample)
        factors = (values, nodes.add("Transpose", weights, perm=[1, 0])) if axis else (weights, values)
        levels = nodes.whole(nodes.add("Div", nodes.add("MatMul", *factors), unit), nodes.numbers(0.5, kind=_FLOAT))
        values = nodes.add("Clip", levels, nodes.number(0.0), nodes.number(255.0))
    return values


def _weights(nodes: _Nodes, old: Any, new: Any, resample: Image.Resampling) -> tuple[Any, Any]:
    """The share of every pixel of a line in every one of the resized, [new, old] integers, and what stands for 1."""
    half, one, zero = (nodes.numbers(value) for value in (0.5, 1.0, 0.0))
    scale = nodes.add("Div", nodes.add("Cast", old, to=_DOUBLE), nodes.add("Cast", new, to=_DOUBLE))
    centres = nodes.add("Mul", nodes.add("Add", nodes.count(new), half), scale)
    apart = nodes.add(
        "Sub", nodes.add("Add", nodes.count(old), half), nodes.add("Unsqueeze", centres, nodes.integers(1))
    )
    apart = nodes.add("Abs", nodes.add("Div", apart, nodes.add("Max", scale, one)))  # smaller images take more pixels
    if resample is Image.Resampling.BILINEAR:
        shares = nodes.add("Max", nodes.add("Sub", one, apart), zero)
    else:  # Keys' cubic with a = -0.5
        near, far = nodes.polynomial(apart, 1.5, -2.5, 0.0, 1.0), nodes.polynomial(apart, -0.5, 2.5, -4.0, 2.0)
        far = nodes.add("Where", nodes.add("Less", apart, nodes.numbers(2.0)), far, zero)
        shares = nodes.add("Where", nodes.add("Less", apart, one), near, far)
    shares = nodes.add("Div", shares, nodes.add("ReduceSum", shares, nodes.integers(1)))
    units = nodes.numbers(*(2.0**bits for bits in range(23)))  # the largest with which all weights have 16 bits
    largest = nodes.add(
        "Floor", nodes.add("Add", nodes.add("Mul", nodes.add("ReduceMax", shares, keepdims=0), units), half)
    )
    unit = nodes.add("ReduceMax", nodes.add("Where", nodes.add("Less", largest, nodes.numbers(2.0**15)), units, one))
    size = nodes.add("Floor", nodes.add("Add", nodes.add("Mul", nodes.add("Abs", shares), unit), half))
    weights = nodes.add("Mul", size, nodes.add("Sign", shares))
    return nodes.add("Cast", weights, to=_FLOAT), nodes.add("Cast", unit, to=_FLOAT)


def _cropped(nodes: _Nodes, values: Any, crop: tuple[int, int]) -> Any:
    """The middle; where the image is smaller, zeros around it."""
    two, wanted = nodes.integers(2), nodes.integers(*crop)
    lacking = nodes.add("Max", nodes.add("Sub", wanted, nodes.sides(values)), nodes.integers(0))
    before = nodes.add("Div", lacking, two)
    values = nodes.add(
        "Pad",
        values,
        nodes.add("Concat", before, nodes.add("Sub", lacking, before), axis=0),
        None,
        nodes.integers(2, 3),
    )
    start = nodes.add("Div", nodes.add("Sub", nodes.sides(values), wanted), two)
    return nodes.add("Slice", values, start, nodes.add("Add", start, wanted), nodes.integers(2, 3))


def _decoded(nodes: _Nodes, file: Any) -> Any:
    """Bytes of a file -> uint8 [1, H, W, 3]. Of gray, all three channels are the one there is; CMYK is refused.

    So is a file without the marks of a PNG or a whole JPEG: of others the decoder ends the process, or never ends.
    """
    ends = nodes.add(
        "Concat", _piece(nodes, file, 0, 2), _piece(nodes, file, -2, _END), _piece(nodes, file, 0, 4), axis=0
    )
    marks = nodes.integers(0xFF, 0xD8, 0xFF, 0xD9, 0x89, 0x50, 0x4E, 0x47)
    right = nodes.add("Cast", nodes.add("Equal", nodes.add("Cast", ends, to=_INT64), marks), to=_INT64)
    known = nodes.add(
        "ReduceMax", nodes.add("ReduceMin", nodes.add("Reshape", right, nodes.integers(2, 4)), nodes.integers(1))
    )
    length = nodes.add(
        "Add",
        nodes.add("Shape", file),
        nodes.add("Sub", nodes.integers(1), nodes.add("Reshape", known, nodes.integers(1))),
    )
    checked = nodes.add("Reshape", file, length, name="the_file_must_be_a_png_or_a_whole_jpeg")
    image = nodes.add("DecodeImage", checked, domain=DECODING, color_space="rgb")  # [H, W, 1, 3 or 4]
    channels = nodes.add("Shape", image, start=2)
    step = nodes.add("Div", nodes.add("Sub", channels, nodes.integers(1)), nodes.integers(2))
    beyond = nodes.add("Mul", nodes.add("Div", channels, nodes.integers(4)), channels)
    chosen = nodes.add("Add", nodes.add("Mul", nodes.integers(0, 1, 2), step), beyond)
    rgb = nodes.add("Gather", image, chosen, axis=2, name="images_of_four_channels_are_refused")
    return nodes.add("Unsqueeze", rgb, nodes.integers(0))


def _piece(nodes: _Nodes, values: Any, start: int, end: int) -> Any:
    return nodes.add("Slice", values, nodes.integers(start), nodes.integers(end))
