"""Define what an origin is: a table from its key names to the model's, and functions for what a table cannot express.

A module per code base (`google.py`, ...) defines its `Origin`s, which `planning.py` applies. This module also defines
how arrays become parameters (`TRANSFORMS`, `COMPUTATIONS`), and how images are cut into patches.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

Pair = tuple[int, int]
Fields = dict[str, Any]
BLOCK = "{i}"  # placeholder for a block's number in names of keys and parameters
WITHOUT = "without "  # prefix of names of parts, for keys that exist only if none of these parts does
HEADS_OF_WIDTH = {1152: 16, 1280: 16, 1408: 16, 1664: 16, 1792: 16}  # in released models; other heads are 64 wide
ASSUMED_HEADS = "heads of 64 (16 heads at widths of 1152, 1280, 1408, 1664 and 1792)"


@dataclass(frozen=True)
class Transform:
    """A rearrangement of a source array into a parameter, without arithmetic.

    Attributes:
        apply: source array -> parameter.
        order: order of the parameter's axes in the source; `revert` splits axes that `apply` joined. None: unchanged.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    order: tuple[int, ...] | None = None

    def revert(self, parameter: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the source array of this shape, contiguous, that `apply` turns into the parameter."""
        axes = parameter if self.order is None else parameter.permute(self.order)
        return axes.reshape(tuple(shape)).contiguous()


def find_linear_patch(count: int) -> Pair:
    """Return side and channels (3, or else 1) of the square patches whose `count` values a linear layer reads."""
    channels = 3 if count % 3 == 0 and math.isqrt(count // 3) ** 2 == count // 3 else 1
    return math.isqrt(count // channels), channels


def _split_patches(array: torch.Tensor) -> torch.Tensor:
    """Return the kernel [D, C, P, P] of a linear layer [D, P*P*C] on patches, row by row with channels last."""
    side, channels = find_linear_patch(array.shape[1])
    return array.unflatten(1, (side, side, channels)).permute(0, 3, 1, 2)


# A is the number of heads, K their size.
TRANSFORMS = {
    "keep": Transform(lambda array: array),
    "transpose": Transform(lambda array: array.T, (1, 0)),  # [in, out] -> [out, in]
    "pointwise": Transform(lambda array: array.flatten(0, -2).T, (1, 0)),  # [in, out] or [1, 1, in, out] -> [out, in]
    "dense": Transform(lambda array: array.flatten(1)),  # [out, in, 1, 1] -> [out, in]
    "conv": Transform(lambda array: array.permute(3, 2, 0, 1), (2, 3, 1, 0)),  # [h, w, in, out] -> [out, in, h, w]
    "split_heads": Transform(lambda array: array.flatten(1).T, (1, 0)),  # [in, A, K] -> [A*K, in]
    "join_heads": Transform(lambda array: array.flatten(0, 1).T, (1, 0)),  # [A, K, out] -> [out, A*K]
    "flatten_heads": Transform(lambda array: array.flatten()),  # [A, K] -> [A*K]
    "as_token": Transform(lambda array: array[None, None]),  # [channels] -> [1, 1, channels]
    "as_table": Transform(lambda array: array.reshape(1, -1, array.shape[-1])),  # [.., channels] -> [1, rows, channels]
    "linear_patches": Transform(_split_patches, (0, 2, 3, 1)),  # [out, h*w*in] -> [out, in, h, w]
    "linear_patches_last": Transform(lambda array: _split_patches(array.T), (2, 3, 1, 0)),  # [h*w*in, out]
    "flatten": Transform(lambda array: array.flatten()),  # [1, 1, 1, channels] or [channels] -> [channels]
}


def _compute_offset_biases(arrays: Sequence[torch.Tensor], grid: Pair) -> torch.Tensor:
    """Compute the bias [(2h-1)*(2w-1), A] that an MLP gives each head at each offset (Swin v2, arXiv 2111.09883).

    `arrays`: weight [H, 2] and bias [H] of the first layer, weight [A, H] and bias [A] of the second.
    """
    row_offsets, column_offsets = (torch.arange(1 - side, side, dtype=torch.float32) for side in grid)
    offsets = torch.cartesian_prod(row_offsets, column_offsets)
    logarithms = offsets.sign() * (1 + offsets.abs()).log()  # in float32, as timm
    weight1, bias1, weight2, bias2 = (array.double() for array in arrays)
    return torch.relu(logarithms.double() @ weight1.T + bias1) @ weight2.T + bias2


def _sum_axes(arrays: Sequence[torch.Tensor], grid: Pair) -> torch.Tensor:
    """Compute the position table [1, h*w, D] from one of rows [1, h, D] and one of columns [1, w, D]."""
    rows, columns = (array.double() for array in arrays)
    return (rows[:, :, None] + columns[:, None]).flatten(1, 2)


# Name -> function that computes a parameter in float64 from source arrays, in the order of the key table, and the
# model's patch grid (h, w). Computations cannot be reverted.
COMPUTATIONS = {"offset_mlp": _compute_offset_biases, "sum_axes": _sum_axes}


def _find_reference_grid(sines: torch.Tensor, dims: Mapping[str, int]) -> int:
    """Return the side in patches that a table of sines [h*h, K] of EVA-02 spans: `pt_hw_seq_len` of its code."""
    side = math.isqrt(len(sines))
    count = sines.shape[1] // 4
    slowest = 10_000 ** (-(count - 1) / count)  # the last frequency of the rows; the table has each twice
    return round(side * math.asin(float(sines[side, 2 * count - 1])) / slowest) if side > 1 else 1


# Name -> function of an array and the sizes of axes that returns a value of the config. Rules with such a transform
# name the config's field in place of a parameter.
SETTINGS: dict[str, Callable[[torch.Tensor, Mapping[str, int]], Any]] = {
    "periods": lambda array, dims: tuple(array.tolist()),
    "reference_grid": _find_reference_grid,
    # The frequencies are powers of the base from 1 down; rounding to 5 digits removes float32's errors.
    "base": lambda array, dims: float(f"{float(array[-1]) ** (-len(array) / max(len(array) - 1, 1)):.5g}"),
}


def spread_braces(name: str) -> tuple[str, ...]:
    """Return a name for each alternative, "" for "_": "{q,k}_proj" -> ("q_proj", "k_proj")."""
    match = re.search(r"\{(\w+(?:,\w+)+)\}", name)
    if match is None:
        return (name,)
    alternatives = match[1].split(",")
    return tuple("" if each == "_" else name.replace(match[0], each) for each in alternatives)


@dataclass(frozen=True)
class KeyRule:
    """One line of a key table.

    Axes are letters, with a factor before them ("4W") or without; a number alone is a size. P, Q are height and width
    of a patch, C channels, D hidden size, T rows of the position table, G register tokens, A heads, K size of a head, M
    width of the MLP, S of the token MLP, H of the MLP of relative positions, O offsets between patches, N stacked
    blocks, R size of the representation layer (D without one), L labels, Z values of a patch in all channels, Y x V
    rows and columns (Y without V: both) of a table that keeps its grid. For a ResNet: W width of the root, U width of
    a stage, I and O input and output channels of a unit, F channels of the last map.

    Attributes:
        key: key in the file, in its normal form, with `{i}` for the block's number.
        axes: the axes of the array.
        transform: name in `TRANSFORMS` or `COMPUTATIONS`.
        parameter: name in the bare model, or in its classifier. "{q,k,v}_proj" means three parameters, which get equal
            parts of the array along its first axis, in that order.
        part: "" for keys that always exist; otherwise the optional part they belong to, which exists completely or not
            at all; or "without PART" for keys that exist only without that part, or "without PART, PART".
        stacked: whether one array holds all blocks, along its first axis "N"; `{i}` is then only in the parameter.
    """

    key: str
    axes: Sequence[str]
    transform: str
    parameter: str
    part: str = ""
    stacked: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the parameters that the array fills, in the order of its parts; "" for a part that is left out."""
        return spread_braces(self.parameter)

    @property
    def stack_axis(self) -> int:
        """Return the axis along which a stacked array holds all blocks."""
        return list(self.axes).index("N")

    @property
    def in_block(self) -> bool:
        """Return whether the rule has one key in every block."""
        return BLOCK in self.key

    @property
    def in_unit(self) -> bool:
        """Return whether the rule has one key in every unit of a ResNet, see `for_unit`."""
        return "{u" in self.key

    def for_block(self, block: int) -> "KeyRule":
        return self._insert_numbers({BLOCK: block})

    def for_unit(self, stage: int, unit: int) -> "KeyRule":
        """Return the rule for one unit of a ResNet: `{s}`, `{u}` are the numbers, `{s-1}`, `{u-1}` count from 0."""
        return self._insert_numbers({"{s}": stage, "{u}": unit, "{s-1}": stage - 1, "{u-1}": unit - 1})

    def _insert_numbers(self, numbers: Mapping[str, int]) -> "KeyRule":
        """Return the rule with numbers in place of placeholders."""
        key, parameter = self.key, self.parameter
        for placeholder, number in numbers.items():
            key, parameter = key.replace(placeholder, str(number)), parameter.replace(placeholder, str(number))
        return replace(self, key=key, parameter=parameter)


@dataclass(frozen=True)
class KeyNames:
    """The spelling of the keys of one file."""

    normal: dict[str, str]  # normal form -> key in the file, for all keys that are weights or unknown
    ignored: dict[str, str]  # key in the file -> why it is not a weight of this model
    spell: Callable[[str], str]  # normal form -> key in this file's spelling, for messages about missing keys


@dataclass(frozen=True)
class Declared:
    """Facts about a model that files beside the weights record and shapes do not show."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of the config; weights must agree
    image_size: Pair | None = None  # (height, width) in px that the model was trained at
    labels: tuple[str, ...] | None = None
    processor: Mapping[str, Any] | None = None  # fields of `ViTImageProcessor`; None: [-1, 1], resized bilinearly


@dataclass(frozen=True)
class Patches:
    """How an image is cut into a grid of patches.

    Attributes:
        sides: (height, width) of a patch, in px or in cells of a stem's feature map.
        stem_stride: px of the image behind one cell of that map; 1 without a stem.
        is_padded: whether incomplete patches count (SAME padding) instead of being ignored.
    """

    sides: Pair
    stem_stride: int = 1
    is_padded: bool = False

    @property
    def stride(self) -> Pair:
        """Return the (height, width) in px behind one patch."""
        return self.sides[0] * self.stem_stride, self.sides[1] * self.stem_stride

    def grid_of(self, image_size: Pair) -> Pair:
        """Return the (h, w) of an image in px: a stem rounds up (SAME), incomplete patches count if `is_padded`."""
        pairs = zip(image_size, self.sides, strict=True)
        num_patches = [math.ceil(side / self.stem_stride) / patch_side for side, patch_side in pairs]  # with fractions
        h, w = map(math.ceil if self.is_padded else math.floor, num_patches)
        if not (h and w):
            raise UserError(
                f"the image size {format_size(image_size)} px is smaller than one patch, {format_size(self.stride)} "
                "px; give a larger image size"
            )
        return h, w

    def fits(self, rows: int, image_size: Pair | None) -> bool:
        """Return whether a table with `rows` patch rows fits the image size or, without one, is square."""
        if image_size is None:
            return math.isqrt(max(rows, 0)) ** 2 == rows > 0
        return math.prod(self.grid_of(image_size)) == rows

    def find_table_size(self, rows: int, image_size: Pair | None, table_name: str = "position table") -> Pair:
        """Return the (height, width) in px of the images that a table with `rows` patch rows was made for.

        Raises:
            UserError: the given size does not fit, or no size is given and the table is not square.
        """
        if rows < 1:
            raise UserError(f"the {table_name} has no rows for patches, so the file is damaged; download it again")
        if self.fits(rows, image_size):
            return image_size or (math.isqrt(rows) * self.stride[0], math.isqrt(rows) * self.stride[1])
        heights = sorted((h for h in range(1, rows + 1) if rows % h == 0), key=lambda h: max(h, rows // h))
        sizes = [format_size((h * self.stride[0], rows // h * self.stride[1])) for h in heights[:6]]
        sizes_that_fit = f"sizes that fit: {', '.join(sizes)}"  # most square first
        if image_size is None:
            raise UserError(
                f"the {table_name} has {rows} patches, which do not form a square; give the image size that the "
                f"model was trained with, --image-size HxW ({sizes_that_fit})"
            )
        h, w = self.grid_of(image_size)
        raise UserError(
            f"--image-size {format_size(image_size)} has {h}x{w} = {h * w} patches of {format_size(self.stride)} "
            f"px, but the {table_name} has {rows}; give one of the {sizes_that_fit}"
        )


@dataclass(frozen=True)
class Network:
    """Facts about the network in one file that names and shapes show."""

    dims: Mapping[str, int]  # axis letter -> size
    parts: frozenset[str]  # the optional parts that exist
    shapes: Shapes  # normal key -> shape
    image_size: Pair | None  # (height, width) in px, if given
    stage_depths: tuple[int, ...]  # number of units in every stage of a ResNet; () without one

    @property
    def patches(self) -> Patches:
        """Return the patches of a network without a stem."""
        return Patches((self.dims["P"], self.dims["Q"]))

    def with_linear_patches(self) -> "Network":
        """Return the network with the sizes that a linear patch embedding and a table with its own grid show."""
        dims = dict(self.dims)
        if "Z" in dims:
            side, channels = find_linear_patch(dims["Z"])
            if side * side * channels != dims["Z"]:
                raise UserError(
                    f"the patch embedding reads {dims['Z']} values, which are no square patch of 3 channels or 1; "
                    "use the checkpoint with its own code"
                )
            dims |= {"P": side, "Q": side, "C": channels}
        if "Y" not in dims:
            return replace(self, dims=dims)
        h, w = dims["Y"], dims.get("V", dims["Y"])
        size = h * dims["P"], w * dims["Q"]
        if self.image_size not in (None, size):
            raise UserError(
                f"the position table is for images of {format_size(size)} px, not {format_size(self.image_size or ())}"
                "; leave --image-size out (the model takes other sizes too)"
            )
        return replace(self, dims=dims | {"T": h * w}, image_size=size)

    def sizes(self, image_size: Pair | None = None) -> Fields:
        """Return the fields for sizes of a network without a stem.

        `image_size` is by default the given one, or 14 patches on each side if none is given.
        """
        patch_h, patch_w = self.patches.sides
        return {
            "image_size": shorten_pair(image_size or self.image_size or (14 * patch_h, 14 * patch_w)),
            "patch_size": shorten_pair((patch_h, patch_w)),
            "num_channels": self.dims["C"],
            "hidden_size": self.dims["D"],
            "intermediate_size": self.dims["M"],
        }

    def read_vit_fields(
        self, special: int, patches: Patches | None = None, heads: Mapping[int, int] = HEADS_OF_WIDTH
    ) -> Fields:
        """Return the fields of a ViT's config that shapes show.

        Args:
            special: rows of special tokens at the beginning of the position table.
            patches: the patches of a stem; None without a stem.
            heads: width -> number of heads, where heads are not 64 wide.
        """
        all_patches = patches or self.patches
        width = self.dims["D"]
        fields: Fields = {
            "image_size": shorten_pair(all_patches.find_table_size(self.dims["T"] - special, self.image_size)),
            "num_channels": self.dims["C"],
            "hidden_size": width,
            "intermediate_size": self.dims["M"],
            "position_embedding": "learned",
        }
        if patches is None:
            fields["patch_size"] = shorten_pair(all_patches.sides)
        return fields | find_heads(width, heads)


@dataclass(frozen=True)
class Origin:
    """A kind of checkpoint that can be converted; README.md describes each."""

    name: str  # name in reports and records
    rules: tuple[KeyRule, ...]  # the key table
    recognizes: Callable[[Shapes], bool]
    names: Callable[[Shapes], KeyNames]
    configure: Callable[[Network], Fields]  # returns fields of the config; raises UserError if no model fits
    family: str = "plain"  # key of `hf_vit.families.FAMILIES`
    # part -> letters of axes that mean another letter if the part does not exist
    without: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, dict[str, str]])
    # (rules, normal key -> shape) -> the rules for that file, if they are not the same for all
    rules_of: Callable[[tuple[KeyRule, ...], Shapes], tuple[KeyRule, ...]] | None = None
    # (files beside the weights, key -> shape) -> their facts; raises UserError for features that no model here has
    declared: Callable[[Companions, Shapes], Declared] | None = None
    # field of the config -> text of the assumption made if no config.json and no part in `parts_that_tell` shows it
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])
    parts_that_tell: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    first_patch: bool = False  # whether a model without a class token may pool its first patch
    # regular expression of a normal key -> the feature it belongs to, which no model here has
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    # regular expression of normal keys -> the feature of a file that has none of them, which no model here has
    lacking: Mapping[str, str] = field(default_factory=dict[str, str])
    # regular expression of a normal key -> its head, which no model here has and a new head may replace
    foreign_heads: Mapping[str, str] = field(default_factory=dict[str, str])
    # optional part -> parameters to fill with zeros if the file has the part, as the source's model lacks them
    zeros: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    package: str = ""  # library to recommend for a refused feature

    @cached_property
    def has_units(self) -> bool:
        """Return whether the network has a ResNet."""
        return any(rule.in_unit for rule in self.rules)

    @cached_property
    def block_pattern(self) -> str:
        """Return the regular expression that finds a block's number (group 1) in a normal key; "" without blocks."""
        key = next((rule.key for rule in self.rules if rule.in_block), "")
        beginning, _, rest = key.partition(BLOCK)
        return rf"{re.escape(beginning)}(0|[1-9]\d*){re.escape(rest[0])}" if key else ""


def find_heads(width: int, exceptions: Mapping[int, int] = HEADS_OF_WIDTH) -> dict[str, int]:
    """Return the field for the number of heads, which are 64 wide unless `exceptions` has the width; {} if unknown."""
    heads = exceptions.get(width, width // 64 if width % 64 == 0 else None)
    return {} if heads is None else {"num_attention_heads": heads}


def shorten_pair(pair: Pair) -> int | Pair:
    """Return one number for a square, as configs usually have it, else the pair."""
    return pair[0] if pair[0] == pair[1] else pair


def format_size(sides: Iterable[int]) -> str:
    """Return sides as text: (224, 224) -> "224x224"; the shape of a scalar -> "scalar"."""
    return "x".join(str(side) for side in sides) or "scalar"


def split_axis(axis: str) -> tuple[int, str]:
    """Split an axis into factor and letter: "4W" -> (4, "W"), "D" -> (1, "D"), "3" -> (3, "")."""
    number = re.match(r"\d*", axis)[0]  # pyright: ignore[reportOptionalSubscript] (it always matches)
    return int(number or 1), axis[len(number) :]


def dense(
    source: str, axes: Sequence[str], target: str = "", part: str = "", bias_part: str | None = None
) -> tuple[KeyRule, ...]:
    """Return the rules for weight and bias of a dense layer or norm of PyTorch.

    Args:
        source: key without ".weight" and ".bias"; "{q,k,v}_proj" means three layers.
        axes: axes of the weight, output first.
        target: parameter without ".weight" and ".bias", for several layers with braces too; default: `source`.
        part: the optional part of the weight.
        bias_part: the optional part of the bias; default: `part`.
    """
    rules: list[KeyRule] = []
    for rule in weights(source, axes, target, part):
        key, parameter = (name.removesuffix("weight") + "bias" for name in (rule.key, rule.parameter))
        rules += [rule, KeyRule(key, axes[:1], "keep", parameter, part if bias_part is None else bias_part)]
    return tuple(rules)


def weights(source: str, axes: Sequence[str], target: str = "", part: str = "") -> tuple[KeyRule, ...]:
    """Return the rules for layers or norms without bias; see `dense`."""
    sources = spread_braces(source)
    targets = spread_braces(target or source) if len(sources) > 1 else (target or source,)
    pairs = zip(sources, targets, strict=True)
    return tuple(KeyRule(f"{key}.weight", axes, "keep", f"{name}.weight", part) for key, name in pairs)


MAX_STAGES = 16  # keys with larger numbers of stages or units are reported as left over
MAX_UNITS = 1000


def count_units(rules: Iterable[KeyRule], names: Iterable[str]) -> tuple[int, ...]:
    """Return the number of units in every stage of a ResNet: the highest number in a name, so that gaps are noticed."""
    key = next((rule.key for rule in rules if rule.in_unit), "")
    first = 0 if "{s-1}" in key else 1
    number = r"(\d{1,3})" if first == 0 else r"([1-9]\d{0,3})"
    beginning, between, end = re.split(r"\{[su](?:-1)?\}", key)
    pattern = re.compile(rf"{re.escape(beginning)}{number}{re.escape(between)}{number}{re.escape(end[0])}")
    depths: dict[int, int] = {}
    for match in filter(None, map(pattern.match, names)):
        stage, unit = int(match[1]) - first, int(match[2]) - first
        if 0 <= stage < MAX_STAGES and 0 <= unit < MAX_UNITS:
            depths[stage] = max(depths.get(stage, 1), unit + 1)
    return tuple(depths.get(stage, 1) for stage in range(max(depths, default=-1) + 1))


def make_resnet_rules(rules: tuple[KeyRule, ...], depths: Iterable[int], shapes: Shapes) -> tuple[KeyRule, ...]:
    """Return one rule per key of a ResNet with so many units, and with axes as multiples of the root's width W.

    Only the first unit of a stage has a projection. Norms and heads of Google's older files have leading axes of size
    1.
    """
    unit_rules = [rule for rule in rules if rule.in_unit]
    other_rules = [rule for rule in rules if not rule.in_unit]
    expanded: list[KeyRule] = []
    channels = "W"  # what the next unit reads, and in the end the last map's
    for stage, depth in enumerate(depths, start=1):
        output_channels = f"{4 * 2 ** (stage - 1)}W"
        for unit in range(1, depth + 1):
            sizes = {"U": f"{2 ** (stage - 1)}W", "O": output_channels, "I": channels}
            rules_of_unit = [rule for rule in unit_rules if unit == 1 or ".projection" not in rule.parameter]
            expanded += [_resolve_axes(rule.for_unit(stage, unit), sizes, shapes) for rule in rules_of_unit]
            channels = output_channels
    return (*expanded, *(_resolve_axes(rule, {"F": channels}, shapes) for rule in other_rules))


def _resolve_axes(rule: KeyRule, sizes: Mapping[str, str], shapes: Shapes) -> KeyRule:
    """Return the rule with sizes in place of letters, and with leading axes of 1 if the file's array has them."""
    axes = tuple(sizes.get(axis, axis) for axis in rule.axes)
    if rule.transform in ("flatten", "pointwise") and len(shapes.get(rule.key, ())) == 4:
        axes = ("1",) * (4 - len(axes)) + axes
    return replace(rule, axes=axes)
