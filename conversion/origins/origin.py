"""What an origin is: a table from its key names to the model's, and the little that a table cannot say.

A module a code base (`google.py`, ...) defines its `Origin`s; `planning.py` applies them. Here are also what happens to
an array on its way to a parameter (`TRANSFORMS`, `COMPUTATIONS`), and how images are cut into patches.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_vit.conversion.readers import Companions, Shapes
from hf_vit.errors import UserError

Pair = tuple[int, int]
Fields = dict[str, Any]
BLOCK = "{i}"  # stands for the number of a block in source and target names
WITHOUT = "without "  # before a part: keys that are there where the part is not


@dataclass(frozen=True)
class Transform:
    """A move of axes from a source array to a parameter, without arithmetic.

    Attributes:
        apply: source array -> parameter.
        order: axes of the parameter in the order that the source has; joined ones are split by `revert`.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]
    order: tuple[int, ...] | None = None

    def revert(self, parameter: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the source array of this shape, contiguous, that `apply` turns into the parameter."""
        axes = parameter if self.order is None else parameter.permute(self.order)
        return axes.reshape(tuple(shape)).contiguous()


# A and K are the number of heads and their size.
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
    "as_table": Transform(lambda array: array[None]),  # [rows, channels] -> [1, rows, channels]
    "flatten": Transform(lambda array: array.flatten()),  # [1, 1, 1, channels] or [channels] -> [channels]
}


def _offset_biases(arrays: Sequence[torch.Tensor], grid: Pair) -> torch.Tensor:
    """Return the bias [(2h-1)*(2w-1), A] that an MLP gives to each head at each offset (Swin v2, arXiv 2111.09883).

    `arrays`: weight [H, 2] and bias [H] of the first layer, weight [A, H] and bias [A] of the second.
    """
    down, right = (torch.arange(1 - side, side, dtype=torch.float32) for side in grid)
    offsets = torch.cartesian_prod(down, right)
    logarithms = offsets.sign() * (1 + offsets.abs()).log()  # in float32, as timm
    weight1, bias1, weight2, bias2 = (array.double() for array in arrays)
    return torch.relu(logarithms.double() @ weight1.T + bias1) @ weight2.T + bias2


# Name -> function of the source arrays, in the order of the key table, and the model's patch grid (h, w); it returns
# the parameter in float64. There is no way back.
COMPUTATIONS = {"offset_mlp": _offset_biases}


def _reference_grid(sines: torch.Tensor, dims: Mapping[str, int]) -> int:
    """Return the patches a side that a table of sines [h*h, K] of EVA-02 spans: `pt_hw_seq_len` of its code."""
    side, count = math.isqrt(len(sines)), sines.shape[1] // 4
    slowest = 10_000 ** (-(count - 1) / count)  # the last of the row's frequencies; each stands there twice
    return round(side * math.asin(float(sines[side, 2 * count - 1])) / slowest) if side > 1 else 1


# Name -> function of an array and of the sizes of axes; it returns the value of the config's field that the rule names
# in the place of a parameter.
SETTINGS: dict[str, Callable[[torch.Tensor, Mapping[str, int]], Any]] = {
    "periods": lambda array, dims: tuple(array.tolist()),
    "reference_grid": _reference_grid,
    # From 1 down to the slowest but one step; what float32 rounded is taken off.
    "base": lambda array, dims: float(f"{float(array[-1]) ** (-len(array) / max(len(array) - 1, 1)):.5g}"),
}


@dataclass(frozen=True)
class KeyRule:
    """One line of a key table.

    Axes are letters, with a factor before them ("4W") or not; a number alone is that very size. P, Q are height and
    width of a patch, C channels, D hidden size, T rows of the position table, G register tokens, A heads, K size of a
    head, M width of the MLP, X of that of attention pooling, S of the token MLP, H of the MLP of relative positions, O
    offsets between patches, F frequencies or periods of rotary positions (K/4), V those of all heads (D/2), Y patches
    of their table, N stacked blocks, R size of the representation layer (D without one), L labels. Of a ResNet: W width
    of the root, U of a stage, I and O channels that a unit gets and gives, F channels of the last map.

    Attributes:
        key: of the file, in its normal form, `{i}` for the block's number.
        transform: name in `TRANSFORMS`, `COMPUTATIONS` or `SETTINGS`.
        parameter: of the bare model, or of its classifier. "{q,k,v}_proj" are as many parameters, which get equal parts
            of the array along its first axis, in that order; a part that is called "_" is left out.
        part: "" for keys that are always there; otherwise the optional part they belong to, present as a whole or not;
            or "without PART" for those that only a file without that part has.
        stacked: whether one array holds all blocks, along its axis "N"; `{i}` is then in the parameter only.
    """

    key: str
    axes: Sequence[str]
    transform: str
    parameter: str
    part: str = ""
    stacked: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the array fills, in the order of its parts."""
        several = re.search(r"\{(\w+(?:,\w+)+)\}", self.parameter)
        if several is None:
            return (self.parameter,)
        names = several[1].split(",")
        return tuple("" if name == "_" else self.parameter.replace(several[0], name) for name in names)

    @property
    def stack_axis(self) -> int:
        """The axis along which a stacked array holds all blocks."""
        return list(self.axes).index("N")

    @property
    def in_block(self) -> bool:
        """Whether the rule stands for one key in every block."""
        return BLOCK in self.key

    def at(self, block: int) -> "KeyRule":
        """Return the same rule for one block."""
        return self._numbered({BLOCK: block})

    def in_unit(self, stage: int, unit: int) -> "KeyRule":
        """Return the same rule for one unit of a ResNet: `{s}`, `{u}` are the numbers, `{s-1}`, `{u-1}` from 0."""
        return self._numbered({"{s}": stage, "{u}": unit, "{s-1}": stage - 1, "{u-1}": unit - 1})

    def _numbered(self, numbers: Mapping[str, int]) -> "KeyRule":
        key, parameter = self.key, self.parameter
        for name, number in numbers.items():
            key, parameter = key.replace(name, str(number)), parameter.replace(name, str(number))
        return replace(self, key=key, parameter=parameter)


@dataclass(frozen=True)
class KeyNames:
    """How the keys of one file are spelled."""

    normal: dict[str, str]  # normal form -> key of the file, for all keys that are weights or unknown
    ignored: dict[str, str]  # key of the file -> why it is no weight of this model
    spell: Callable[[str], str]  # normal form -> the key this file would use, for messages about what is missing


@dataclass(frozen=True)
class Declared:
    """What the files beside the weights, or people, say of a model, and shapes cannot."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the config; weights may not disagree
    image_size: Pair | None = None  # (height, width) in px that the weights were made for
    labels: tuple[str, ...] | None = None
    processor: Mapping[str, Any] | None = None  # fields of `ViTImageProcessor`; None: [-1, 1], resized bilinearly


@dataclass(frozen=True)
class Patches:
    """How an image becomes a grid of patches.

    Attributes:
        sides: (height, width) of a patch, in px or in places of a stem's feature map.
        stem_stride: px of the image behind one place of that map; 1 without a stem.
        is_padded: whether a part of a patch counts as a whole one (SAME), instead of being left out.
    """

    sides: Pair
    stem_stride: int = 1
    is_padded: bool = False

    @property
    def stride(self) -> Pair:
        """(height, width) in px behind one patch."""
        return self.sides[0] * self.stem_stride, self.sides[1] * self.stem_stride

    def grid_of(self, image_size: Pair) -> Pair:
        """Return (h, w) of an image as the originals cut it: a stem rounds up (SAME), patches as `is_padded` says."""
        places = [-(-side // self.stem_stride) for side in image_size]
        h, w = ((place + (side - 1) * self.is_padded) // side for place, side in zip(places, self.sides, strict=True))
        if not (h and w):
            raise UserError(
                f"{size_text(image_size)} px hold no patch of {size_text(self.stride)} px; give a larger image size"
            )
        return h, w

    def fit(self, rows: int, image_size: Pair | None) -> bool:
        """Return whether a table of `rows` patch rows is one of the declared size, or square; see `table_size`."""
        if image_size is None:
            return math.isqrt(max(rows, 0)) ** 2 == rows > 0
        return math.prod(self.grid_of(image_size)) == rows

    def table_size(self, rows: int, image_size: Pair | None, what: str = "position table") -> Pair:
        """Return (height, width) in px of the images that a table of `rows` patch rows is made for.

        Raises:
            UserError: the declared size does not fit, or none is declared and the table is not square.
        """
        if rows < 1:
            raise UserError(f"the {what} has no rows for patches; the file is damaged or of another format")
        if self.fit(rows, image_size):
            return image_size or (math.isqrt(rows) * self.stride[0], math.isqrt(rows) * self.stride[1])
        heights = sorted((h for h in range(1, rows + 1) if rows % h == 0), key=lambda h: max(h, rows // h))
        sizes = [size_text((h * self.stride[0], rows // h * self.stride[1])) for h in heights[:6]]
        sizes_that_fit = f"sizes that fit: {', '.join(sizes)}"  # most square first
        if image_size is None:
            raise UserError(
                f"the {what} has rows for {rows} patches, which is not a square number; give the image size "
                f"the checkpoint was trained at with --image-size HxW: {sizes_that_fit}"
            )
        h, w = self.grid_of(image_size)
        raise UserError(
            f"--image-size {size_text(image_size)} makes {h}x{w} = {h * w} patches of {size_text(self.stride)} px, but "
            f"the {what} has {rows}; {sizes_that_fit}"
        )


@dataclass(frozen=True)
class Network:
    """What names and shapes tell of the network in one file."""

    dims: Mapping[str, int]  # axis letter -> size
    parts: frozenset[str]  # the optional parts that are there
    shapes: Shapes  # by normal key
    image_size: Pair | None  # (height, width) in px that is declared

    @property
    def patches(self) -> Patches:
        return Patches((self.dims["P"], self.dims["Q"]))

    def vit_fields(
        self, special: int, patches: Patches | None = None, heads: Mapping[int, int] | None = None
    ) -> Fields:
        """Return what shapes tell of a ViT's config; the position table begins with rows of `special` tokens.

        `patches` are those of a stem. `heads` are exceptions from heads of 64, by the width; None: nothing is assumed.
        """
        cut, width = patches or self.patches, self.dims["D"]
        fields: Fields = {
            "image_size": square_or_pair(cut.table_size(self.dims["T"] - special, self.image_size)),
            "num_channels": self.dims["C"],
            "hidden_size": width,
            "intermediate_size": self.dims["M"],
            "position_embedding": "learned",
        }
        if patches is None:
            fields["patch_size"] = square_or_pair(cut.sides)
        return fields | ({} if heads is None else heads_of(width, heads))


@dataclass(frozen=True)
class Origin:
    """A kind of checkpoint that can be converted; README.md tells of each."""

    name: str  # as reports and facts say it
    rules: tuple[KeyRule, ...]  # the key table
    block_pattern: str  # regular expression that finds a block's number (group 1) in a normal key; "" without blocks
    recognises: Callable[[Shapes], bool]
    names: Callable[[Shapes], KeyNames]
    configure: Callable[[Network], Fields]  # fields of the config; raises UserError where they make no model
    family: str = "plain"  # key of `hf_vit.families.FAMILIES`
    # part -> axes that mean another axis when the part is absent
    without: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, dict[str, str]])
    # (rules, normal key -> shape) -> the rules of that file, where one line stands for more than all blocks
    rules_of: Callable[[tuple[KeyRule, ...], Shapes], tuple[KeyRule, ...]] | None = None
    # (what lies beside the weights, key -> shape) -> what it says; raises UserError where no model here does that
    declared: Callable[[Companions, Shapes], Declared] | None = None
    # field of the config -> what is assumed of it where neither a config.json nor the optional parts in `told` tell
    assumed: Mapping[str, str] = field(default_factory=dict[str, str])
    told: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    first_patch: bool = False  # whether a model without a class token may read its first patch in its place
    # regular expression of a normal key -> what of the source's model has no counterpart here
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    # regular expression of normal keys -> what it means where a file lacks all of them
    lacking: Mapping[str, str] = field(default_factory=dict[str, str])
    # regular expression of a normal key -> the head it is of, that no model here has; a new one may take its place
    foreign_heads: Mapping[str, str] = field(default_factory=dict[str, str])
    # optional part -> parameters that are zeros in a file that has it, as its model lacks them
    zeros: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    package: str = ""  # that runs what is refused


def heads_of(width: int, exceptions: Mapping[int, int]) -> dict[str, int]:
    """Return the field of heads that are 64 wide, but for exceptions (width -> heads); none where 64 is no divisor."""
    heads = exceptions.get(width, width // 64 if width % 64 == 0 else None)
    return {} if heads is None else {"num_attention_heads": heads}


def square_or_pair(pair: Pair) -> int | Pair:
    """Return one number for a square, as configs are usually written."""
    return pair[0] if pair[0] == pair[1] else pair


def size_text(sides: Iterable[int]) -> str:
    """(224, 224) -> "224x224"; a scalar's shape -> "scalar"."""
    return "x".join(str(side) for side in sides) or "scalar"


def axis_factor(axis: str) -> tuple[int, str]:
    """ "4W" -> (4, "W"), "D" -> (1, "D"), "3" -> (3, "")."""
    number = re.match(r"\d*", axis)[0]  # pyright: ignore[reportOptionalSubscript] (it always matches)
    return int(number or 1), axis[len(number) :]


def dense(
    source: str, axes: Sequence[str], target: str = "", part: str = "", bias_part: str | None = None
) -> tuple[KeyRule, KeyRule]:
    """Return rules of a dense layer or norm of PyTorch: `axes` of the weight, output first; no target: the source."""
    target = target or source
    bias_part = part if bias_part is None else bias_part
    return (
        KeyRule(f"{source}.weight", axes, "keep", f"{target}.weight", part),
        KeyRule(f"{source}.bias", axes[:1], "keep", f"{target}.bias", bias_part),
    )


MAX_STAGES = 16  # absurd numbers would make absurd lists of missing keys; such keys are left over instead
MAX_UNITS = 1000


def stage_depths(pattern: str, first: int, names: Iterable[str]) -> tuple[int, ...]:
    """Return the units in every stage of a ResNet: as many as the highest number says, so that a gap is noticed.

    `pattern` finds the numbers of stage and unit, which are counted from `first`.
    """
    depths: dict[int, int] = {}
    for name in names:
        if match := re.match(pattern, name):
            stage, unit = int(match[1]) - first, int(match[2]) - first
            if 0 <= stage < MAX_STAGES and 0 <= unit < MAX_UNITS:
                depths[stage] = max(depths.get(stage, 1), unit + 1)
    return tuple(depths.get(stage, 1) for stage in range(max(depths, default=-1) + 1))


def resnet_rules(
    depths_of: Callable[[Iterable[str]], tuple[int, ...]], rules: tuple[KeyRule, ...], shapes: Shapes
) -> tuple[KeyRule, ...]:
    """Return one rule a key of a ResNet, its axes in multiples of the root's width W.

    The first unit of a stage alone has a projection. Norms and heads of Google's older files have leading axes of 1.
    """
    unit_rules = [rule for rule in rules if "{u" in rule.key]
    expanded: list[KeyRule] = []
    channels = "W"
    for stage, depth in enumerate(depths_of(shapes), start=1):
        width, output = f"{2 ** (stage - 1)}W", f"{4 * 2 ** (stage - 1)}W"
        for unit in range(1, depth + 1):
            sizes = {"U": width, "O": output, "I": channels}
            there = [rule for rule in unit_rules if unit == 1 or ".projection" not in rule.parameter]
            expanded += [_sized(rule.in_unit(stage, unit), sizes, shapes) for rule in there]
            channels = output
    return (*expanded, *(_sized(rule, {"F": channels}, shapes) for rule in rules if "{u" not in rule.key))


def _sized(rule: KeyRule, sizes: Mapping[str, str], shapes: Shapes) -> KeyRule:
    axes = tuple(sizes.get(axis, axis) for axis in rule.axes)
    if rule.transform in ("flatten", "pointwise") and len(shapes.get(rule.key, ())) == 4:
        axes = ("1",) * (4 - len(axes)) + axes
    return replace(rule, axes=axes)
