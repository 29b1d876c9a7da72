"""Put nodes before a model's graph: a check of image sizes, or the image processor for uint8 images of any size.

Legend: B images, H x W px, C channels.

Images are resized like torchvision, to the last bit: across, then down, each a product of the image and a matrix of
weights that are rounded to 16 bits as in torch (aten/src/ATen/native/cpu/UpSampleKernel.cpp), with sums rounded to
0..255. float32 holds the sums exactly unless a side shrinks to less than an eighth; then one value in thousands may
differ by 1. Pillow's weights have 22 bits, and ONNX's `Resize` does not define bits.
"""

from dataclasses import dataclass
from io import BytesIO
from typing import Any, Self, final

import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend, TorchvisionBackend

from hf_vit.data.transforms import get_pixel_scale
from hf_vit.errors import UserError

NODE_PREFIX = "preprocessing/"  # prefix of the nodes' names
PREPROCESSED = "preprocessed"  # the output with the model's input
PIXEL_VALUES, IMAGES, ENCODED, LEVELS = "pixel_values", "images", "file", "levels"  # inputs that a graph may take
DECODING = "com.microsoft.extensions"  # domain of onnxruntime-extensions' operators

_FILTERS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
_INT64, _DOUBLE, FLOAT = 7, 11, 1  # ONNX's numbers of the types
END = 2**31 - 1
# Methods of transformers' processors; a class that overrides one may do something that the graph does not.
_STEPS = ("preprocess", "_preprocess", "process_image", "resize", "center_crop", "rescale_and_normalize", "normalize")


@final
@dataclass(frozen=True)
class Preprocessing:
    """The steps of an image processor for an RGB image, in this order: resize, crop, shift and scale."""

    size: tuple[int, int] | int | None  # (height, width) px, or px of the shorter side
    resample: Image.Resampling
    crop: tuple[int, int] | None  # (height, width) px of the center crop
    mean: tuple[float, ...]  # of the three channels, for levels 0..255: (level - mean) / std
    std: tuple[float, ...]

    @classmethod
    def from_processor(cls, processor: Any) -> Self:
        """Read the steps of transformers' image processor; raise a UserError that lists those that no graph does."""
        kind: Any = type(processor)
        unsupported_steps = list_unsupported_steps(processor)
        if not issubclass(kind, TorchvisionBackend):  # Pillow's rounding is another
            unsupported_steps = [f"{kind.__name__} (not one of transformers' torchvision processors)"]
        if unsupported_steps:
            raise UserError(
                f"the image processor has settings that a graph cannot compute: {', '.join(unsupported_steps)}; "
                "change them in preprocessor_config.json, or export without --preprocessing and --decoding"
            )
        size = dict(processor.size or {})
        crop = dict(getattr(processor, "crop_size", None) or {})
        mean, std = scale_of(processor)
        return cls(
            size=(size.get("shortest_edge") or _get_sides(size)) if processor.do_resize else None,
            resample=Image.Resampling(processor.resample),
            crop=_get_sides(crop) if getattr(processor, "do_center_crop", None) else None,
            mean=mean,
            std=std,
        )

    @property
    def output_size(self) -> tuple[int, int]:
        """Return the (height, width) in px of all its outputs."""
        assert self.crop is not None or isinstance(self.size, tuple)  # `from_processor` refuses others
        return self.crop or self.size  # pyright: ignore[reportReturnType]

    @property
    def step(self) -> float:
        """Return the size of one level of 255 after normalization, plus a little for rounding."""
        return 1.001 * max(1 / std for std in self.std)

    @property
    def unchanged_size(self) -> tuple[int, int]:
        """Return the (height, width) in px of images that are not resized."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size or self.output_size


def list_unsupported_steps(processor: Any) -> list[str]:
    """Return the steps of an image processor that neither graphs nor pages support, in words."""
    kind: Any = type(processor)
    backend = PilBackend if issubclass(kind, PilBackend) else TorchvisionBackend
    overridden = [name for name in _STEPS if getattr(kind, name, None) is not getattr(backend, name, None)]
    if overridden:
        return [f"{kind.__name__} (which overrides {overridden[0]})"]
    unsupported_steps = list[str]()
    crops = getattr(processor, "do_center_crop", None)
    if processor.do_resize:
        filter_ = Image.Resampling(processor.resample)
        if filter_ not in _FILTERS:
            filter_names = " and ".join(supported.name for supported in _FILTERS)
            unsupported_steps.append(f"resample={filter_.name} (a graph has {filter_names})")
        sides = set(dict(processor.size))
        if sides != {"height", "width"} and (sides != {"shortest_edge"} or not crops):
            unsupported_steps.append(
                f"size={dict(processor.size)} (a graph needs height and width, or a shortest_edge and a crop)"
            )
    elif not crops:
        unsupported_steps.append("do_resize=False without a crop (images keep their sizes)")
    if 0.0 in scale_of(processor)[1]:
        unsupported_steps.append(f"image_std={processor.image_std} (division by 0)")
    if getattr(processor, "do_pad", None):
        unsupported_steps.append("do_pad=True")
    return unsupported_steps


def _get_sides(size: dict[str, int]) -> tuple[int, int]:
    """Return the (height, width) of a processor's size."""
    return int(size["height"]), int(size["width"])


def scale_of(processor: Any, channels: int = 3, unit: float = 1.0) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of every channel for levels 0..255 / `unit`, with the rescale factor."""
    factor, means, stds = get_pixel_scale(processor, channels)
    return tuple(mean / (factor * unit) for mean in means), tuple(std / (factor * unit) for std in stds)


def prepend(model: Any, preprocessing: Preprocessing, takes: str = IMAGES) -> None:
    """Make a graph take images instead of pixel values.

    Args:
        model: an `onnx_ir.Model` with the input [B, 3, H, W]; it is changed in place.
        preprocessing: the steps of the image processor.
        takes: `IMAGES`, uint8 [B, H, W, 3]; `ENCODED`, the bytes of one JPEG or PNG file, uint8 [N]; or `LEVELS`,
            levels 0..255 as float32 [B, 3, H, W], with the name of the original input.
    """
    from onnxscript import ir

    graph = model.graph
    nodes = Nodes(NODE_PREFIX)
    output_size = preprocessing.output_size
    # Form of the input -> its name, shape and type.
    name, shape, data_type = {
        IMAGES: (IMAGES, ("batch", "height", "width", 3), ir.DataType.UINT8),
        ENCODED: (ENCODED, ("bytes",), ir.DataType.UINT8),
        LEVELS: (PIXEL_VALUES, ("batch", 3, "height", "width"), ir.DataType.FLOAT),
    }[takes]
    new_input = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(data_type))
    levels = new_input  # float32 [B, 3, H, W]
    if takes != LEVELS:
        images = _decode(nodes, new_input) if takes == ENCODED else new_input
        levels = nodes.Cast(nodes.Transpose(images, perm=[0, 3, 1, 2]), to=FLOAT)
    values = _resize(nodes, levels, preprocessing)
    if preprocessing.crop is not None:
        values = _crop(nodes, values, preprocessing.crop)
    values = nodes.Reshape(values, nodes.add_ints(0, 3, *output_size))  # makes the shape known for inference
    values = nodes.Sub(values, nodes.constant([[[value]] for value in preprocessing.mean], FLOAT))
    values = nodes.Div(values, nodes.constant([[[value]] for value in preprocessing.std], FLOAT))
    values.name = PREPROCESSED
    values.type = ir.TensorType(ir.DataType.FLOAT)
    values.shape = ir.Shape(["batch", 3, *output_size])
    pixel_values = graph.inputs[0]
    graph.inputs[0] = new_input
    graph.outputs.append(values)
    nodes.put_before(graph, pixel_values, values)
    if takes == ENCODED:
        model.opset_imports[DECODING] = 1


class Nodes:
    """A sequence of nodes: `nodes.Add(a, b)` adds one with the operator of this name and returns its output."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes = list[Any]()

    def __getattr__(self, operator: str) -> Any:
        """Return a function that adds a node of this operator to the graph and returns its output."""

        from onnxscript import ir

        def add(*inputs: Any, domain: str = "", name: str = "", **attributes: Any) -> Any:
            name = f"{self.prefix}{name or len(self.nodes)}"
            self.nodes.append(ir.node(operator, inputs, attributes, domain=domain, name=name))
            return self.nodes[-1].outputs[0]

        return add

    def constant(self, values: Any, data_type: int = _DOUBLE) -> Any:
        """Add a constant from nested sequences or a scalar; as an attribute it would leave shapes unknown."""
        from onnxscript import ir

        return self.Constant(value=ir.tensor(values, ir.DataType(data_type)))

    def add_ints(self, *values: int) -> Any:
        """Add a constant of integers."""
        return self.constant(values, _INT64)

    def slice(self, values: Any, start: int, end: int) -> Any:
        """Add a slice along the first axis."""
        return self.Slice(values, self.add_ints(start), self.add_ints(end))

    def count(self, number: Any) -> Any:
        """Add the numbers 0 to N - 1 as float64 [N], for N as [1]."""
        zero, one = (self.constant(value, _INT64) for value in (0, 1))
        return self.Cast(self.Range(zero, self.Squeeze(number), one), to=_DOUBLE)

    def add_polynomial(self, values: Any, *factors: float) -> Any:
        """Add a polynomial of the values; factors start with the highest power."""
        result, *lower_factors = [self.constant([factor]) for factor in factors]
        for factor in lower_factors:
            result = self.Add(self.Mul(result, values), factor)
        return result

    def put_before(self, graph: Any, value: Any, replacement: Any) -> None:
        """Insert the nodes at the beginning of a graph, and let `replacement` replace `value` wherever it is read."""
        for use in list(value.uses()):
            if use.node not in self.nodes:
                use.node.replace_input_with(use.idx, replacement)
        graph.insert_before(graph[0], self.nodes)


def refuse_other_sizes(model: Any, stride: tuple[int, int], only_multiples: bool) -> None:
    """Make a graph refuse images smaller than a patch and, if `only_multiples`, sides that are not multiples of it.

    ONNX has no operator that raises an error, but every runtime refuses to reshape to more values. `model`, an
    `onnx_ir.Model` with images [B, C, H, W] as its first input, is changed in place; `stride` is a patch in px.
    """
    images = model.graph.inputs[0]
    rule = "must_be_multiples_of" if only_multiples else "are_smaller_than"
    nodes = Nodes(f"image_sides_{rule}_{stride[0]}x{stride[1]}_px/")  # runtimes name the node in their error
    sides = nodes.Shape(images, start=2)
    patch = nodes.Constant(value_ints=list(stride))
    is_wrong = nodes.Less(sides, patch)
    if only_multiples:
        zeros = nodes.Constant(value_ints=[0, 0])
        is_wrong = nodes.Or(is_wrong, nodes.Less(zeros, nodes.Mod(sides, patch)))
    wrong_sides = nodes.Add(sides, nodes.Cast(is_wrong, to=_INT64))
    checked = nodes.Reshape(images, nodes.Concat(nodes.Shape(images, start=0, end=2), wrong_sides, axis=0))
    checked.dtype, checked.shape = images.dtype, images.shape
    nodes.put_before(model.graph, images, checked)


def convert_images(takes: str, images: torch.Tensor) -> torch.Tensor:
    """Convert images uint8 [B, H, W, 3] to a graph's input; a file is a PNG of the first image only."""
    if takes == ENCODED:
        file = BytesIO()
        Image.fromarray(images[0].numpy()).save(file, "PNG")
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return images.permute(0, 3, 1, 2).float().contiguous() if takes == LEVELS else images


def _resize(nodes: Nodes, values: Any, preprocessing: Preprocessing) -> Any:
    """Add nodes that resize levels [B, 3, H, W] to the processor's size."""
    size, resample = preprocessing.size, preprocessing.resample
    if size is None:
        return values
    sides = nodes.Shape(values, start=2)
    not_empty = nodes.Concat(nodes.add_ints(0, 0), nodes.Max(sides, nodes.add_ints(1)), axis=0)
    values = nodes.Reshape(values, not_empty, name="images_are_empty")
    if isinstance(size, int):  # the longer side is rounded down
        new_sides = nodes.Div(nodes.Mul(sides, nodes.add_ints(size)), nodes.ReduceMin(sides, keepdims=1))
    else:
        new_sides = nodes.add_ints(*size)
    for axis in (1, 0):  # first across, then down
        old, new = (nodes.slice(pair, axis, axis + 1) for pair in (sides, new_sides))
        weights, unit = _compute_weights(nodes, old, new, resample)
        factors = (values, nodes.Transpose(weights, perm=[1, 0])) if axis else (weights, values)
        levels = nodes.Floor(nodes.Add(nodes.Div(nodes.MatMul(*factors), unit), nodes.constant([0.5], FLOAT)))
        values = nodes.Clip(levels, nodes.constant(0.0, FLOAT), nodes.constant(255.0, FLOAT))
    return values


def _compute_weights(nodes: Nodes, old: Any, new: Any, resample: Image.Resampling) -> tuple[Any, Any]:
    """Return each pixel's weight in each resized pixel of a line, integers [new, old], and the integer for weight 1."""
    half, one, zero = (nodes.constant([value]) for value in (0.5, 1.0, 0.0))
    scale = nodes.Div(nodes.Cast(old, to=_DOUBLE), nodes.Cast(new, to=_DOUBLE))
    centers = nodes.Mul(nodes.Add(nodes.count(new), half), scale)
    distances = nodes.Sub(nodes.Add(nodes.count(old), half), nodes.Unsqueeze(centers, nodes.add_ints(1)))
    distances = nodes.Abs(nodes.Div(distances, nodes.Max(scale, one)))  # wider filters for smaller outputs
    if resample is Image.Resampling.BILINEAR:
        shares = nodes.Max(nodes.Sub(one, distances), zero)
    else:  # Keys' cubic filter with a = -0.5
        shares_near = nodes.add_polynomial(distances, 1.5, -2.5, 0.0, 1.0)  # at distances below 1
        shares_far = nodes.add_polynomial(distances, -0.5, 2.5, -4.0, 2.0)  # at distances below 2
        shares_far = nodes.Where(nodes.Less(distances, nodes.constant([2.0])), shares_far, zero)
        shares = nodes.Where(nodes.Less(distances, one), shares_near, shares_far)
    shares = nodes.Div(shares, nodes.ReduceSum(shares, nodes.add_ints(1)))
    units = nodes.constant([2.0**bits for bits in range(23)])  # take the largest for which all weights fit in 16 bits
    largest = nodes.Floor(nodes.Add(nodes.Mul(nodes.ReduceMax(shares, keepdims=0), units), half))
    unit = nodes.ReduceMax(nodes.Where(nodes.Less(largest, nodes.constant([2.0**15])), units, one))
    magnitudes = nodes.Floor(nodes.Add(nodes.Mul(nodes.Abs(shares), unit), half))
    weights = nodes.Mul(magnitudes, nodes.Sign(shares))
    return nodes.Cast(weights, to=FLOAT), nodes.Cast(unit, to=FLOAT)


def _crop(nodes: Nodes, values: Any, crop: tuple[int, int]) -> Any:
    """Add nodes that cut out the center, and pad smaller images with zeros."""
    two, target_sides = nodes.add_ints(2), nodes.add_ints(*crop)
    missing = nodes.Max(nodes.Sub(target_sides, nodes.Shape(values, start=2)), nodes.add_ints(0))
    missing_before = nodes.Div(missing, two)
    other_axes = nodes.add_ints(0, 0)
    missing_after = nodes.Sub(missing, missing_before)
    values = nodes.Pad(values, nodes.Concat(other_axes, missing_before, other_axes, missing_after, axis=0))
    start = nodes.Div(nodes.Sub(nodes.Shape(values, start=2), target_sides), two)
    return nodes.Slice(values, start, nodes.Add(start, target_sides), nodes.add_ints(2, 3))


def _decode(nodes: Nodes, file: Any) -> Any:
    """Add nodes that decode the bytes of a file to uint8 [1, H, W, 3]. Gray is repeated three times; CMYK is refused.

    Files without the marks of a PNG or of a complete JPEG are refused too, as the decoder would crash or never end.
    """
    begin_and_end = nodes.Concat(nodes.slice(file, 0, 2), nodes.slice(file, -2, END), nodes.slice(file, 0, 4), axis=0)
    marks = nodes.add_ints(0xFF, 0xD8, 0xFF, 0xD9, 0x89, 0x50, 0x4E, 0x47)
    equal_bytes = nodes.Cast(nodes.Equal(nodes.Cast(begin_and_end, to=_INT64), marks), to=_INT64)
    has_marks = nodes.ReduceMax(nodes.ReduceMin(nodes.Reshape(equal_bytes, nodes.add_ints(2, 4)), nodes.add_ints(1)))
    length = nodes.Add(nodes.Shape(file), nodes.Sub(nodes.add_ints(1), nodes.Reshape(has_marks, nodes.add_ints(1))))
    checked_bytes = nodes.Reshape(file, length, name="the_file_must_be_a_png_or_a_whole_jpeg")
    image = nodes.DecodeImage(checked_bytes, domain=DECODING, color_space="rgb")  # [H, W, 1, 3 or 4]
    channels = nodes.Shape(image, start=2)
    step = nodes.Div(nodes.Sub(channels, nodes.add_ints(1)), nodes.add_ints(2))
    out_of_range = nodes.Mul(nodes.Div(channels, nodes.add_ints(4)), channels)
    channel_indices = nodes.Add(nodes.Mul(nodes.add_ints(0, 1, 2), step), out_of_range)
    rgb = nodes.Gather(image, channel_indices, axis=2, name="images_of_four_channels_are_refused")
    return nodes.Unsqueeze(rgb, nodes.add_ints(0))
