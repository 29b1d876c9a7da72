"""FLOPs of a configuration, counted from its fields: no weights are built.

Counted are the multiply-adds (MACs) of matrix products and convolutions, 2 FLOPs each, as torch's FlopCounterMode does;
norms, activations, softmax and the resampling of position tables are left out by both. Causal attention is counted in
full, as it is computed by most kernels.

Legend: C channels, H x W px, h x w patch grid, P patch side, N tokens, D hidden size, K labels.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_axial_resnet import HfAxialResNetConfig
from hf_vit.models.configuration_hf_axial_vit import HfAxialViTConfig
from hf_vit.models.configuration_hf_bit import HfBitConfig
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.configuration_hf_resnet import stem_stride
from hf_vit.models.configuration_hf_vit import HfViTBaseConfig, HfViTConfig, as_pair

Task = Literal["classification", "model", "masked_prediction", "backbone"]
Grid = tuple[int, int]
Macs = dict[str, int]


def forward_macs(config: Any, image_size: int | tuple[int, int] | None = None, task: Task = "classification") -> Macs:
    """Multiply-adds of one image's forward pass in evaluation, by part of the model.

    Args:
        config: of any family of the package.
        image_size: px, int or (height, width); by default the configuration's own.
        task: which class: with classifier, bare, with the head that predicts all patches, or as a backbone.

    Raises:
        UserError: a configuration of another package, a task that its family does not have, or an image that does not
            fit the patch.
    """
    family = str(getattr(config, "model_type", "unknown"))
    if family not in _FAMILIES:
        raise UserError(
            f"the FLOPs of a '{family}' model are not counted here; give a configuration of {', '.join(_FAMILIES)}"
        )
    size = as_pair(config.image_size if image_size is None else image_size)
    try:
        config.grid_of(*size)
    except ValueError as error:
        raise UserError(str(error)) from error
    parts = _FAMILIES[family](config, size, task)
    if task == "classification":
        parts["head"] = _head(config)
    return {name: macs for name, macs in parts.items() if macs}


def forward_flops(config: Any, image_size: int | tuple[int, int] | None = None, task: Task = "classification") -> int:
    """FLOPs of one image's forward pass, 2 a multiply-add; the arguments are those of `forward_macs`."""
    return 2 * sum(forward_macs(config, image_size, task).values())


def training_flops(
    config: Any, images: float, image_size: int | tuple[int, int] | None = None, task: Task = "classification"
) -> float:
    """FLOPs of a training that sees so many images, every epoch's counted: 6 a multiply-add.

    2 forward, and 4 backward: for the gradients of inputs and of weights. This reproduces the compute of
    arXiv 2010.11929, table 6.
    """
    if not images > 0:
        raise UserError(f"a training on {images:g} images has no cost; give a number of images above 0")
    return 3.0 * forward_flops(config, image_size, task) * images


def _vit(config: HfViTBaseConfig, size: Grid, task: Task) -> Macs:
    h, w = config.grid_of(*size)
    tokens, width = h * w + config.num_special_tokens, config.hidden_size
    attention = 2 * tokens**2 * width
    if config.position_embedding == "relative":
        attention += (h * w) ** 2 * width
    encoder = _encoder(config, tokens, attention, blocks=config.num_hidden_layers)
    return _patch_embeddings(config, h * w) | encoder | _task_parts(config, (h, w), tokens, task)


def _axial(config: HfAxialViTConfig, size: Grid, task: Task) -> Macs:
    h, w = config.grid_of(*size)
    # A row block attends h times over w tokens, a column block w times over h; the mean of the two.
    attention = h * w * (h + w) * config.hidden_size
    encoder = _encoder(config, h * w, attention, blocks=2 * config.num_hidden_layers)
    stem = {} if config.stage_depths is None else {"stem": sum(_axial_stem(config, size).values())}
    return stem | _patch_embeddings(config, h * w) | encoder | _task_parts(config, (h, w), h * w, task)


def _hybrid(config: HfHybridViTConfig, size: Grid, task: Task) -> Macs:
    """The ResNet stem, then the ViT on its feature map."""
    return {"stem": _residual_stem(config, size)} | _vit(config, size, task)


def _bit(config: HfBitConfig, size: Grid, task: Task) -> Macs:
    """The stem is the network; in either form of the units."""
    _refuse_other_than_classifier("BiT", task)
    return {"stem": _residual_stem(config, size)}


def _axial_resnet(config: HfAxialResNetConfig, size: Grid, task: Task) -> Macs:
    _refuse_other_than_classifier("AxialResNet", task)
    return _axial_stem(config, size)


def _refuse_other_than_classifier(name: str, task: Task) -> None:
    if task not in ("classification", "model"):
        raise UserError(f"there is no {name} for {task.replace('_', ' ')}; it classifies")


def _residual_stem(config: HfHybridViTConfig | HfBitConfig, size: Grid) -> int:
    """Root and bottlenecks 1x1, 3x3, 1x1."""
    grid = _halved(size)
    macs = _root(config, grid)
    for channels, out, before, after, projection in _units(config, _halved(grid)):
        width = out // 4
        macs += _area(before) * channels * width + _area(after) * (9 * width + out) * width + projection
    return macs


def _axial_stem(config: HfAxialResNetConfig | HfAxialViTConfig, size: Grid) -> Macs:
    """A ResNet with column and row attention for its 3x3 convolutions (arXiv 2003.07853)."""
    grid, dense, attention = _halved(size), 0, 0
    for channels, out, before, after, projection in _units(config, _halved(grid)):
        width = out // 2
        # The first 1x1 convolution; q, k and v of both axes: half, half and one times the width; the last one.
        dense += _area(before) * (channels * width + 2 * width * 2 * width) + _area(after) * width * out + projection
        # Along columns and rows: q.k, q.r and k.r in half the width, values and their offsets in all of it.
        attention += _area(before) * sum(before) * (3 * width // 2 + 2 * width)
    return {"root": _root(config, grid), "dense layers": dense, "attention": attention}


def _root(config: Any, grid: Grid) -> int:
    """The 7x7 convolution of a ResNet, whose output has this grid."""
    return _area(grid) * config.num_channels * 7 * 7 * config.stem_width


def _units(config: Any, grid: Grid) -> Iterator[tuple[int, int, Grid, Grid, int]]:
    """The residual units of a ResNet: channels in and out, grid before and after, MACs of the shortcut.

    Every stage but the first halves the grid in its first unit, rounding up, and every first unit has a projection.
    """
    channels = config.stem_width
    for index, depth in enumerate(config.stage_depths):
        out = 4 * config.stem_width * 2**index
        for unit in range(depth):
            after = _halved(grid) if unit == 0 and index > 0 else grid
            yield channels, out, grid, after, _area(after) * channels * out * (unit == 0)
            grid, channels = after, out


_FAMILIES: dict[str, Callable[[Any, Grid, Task], Macs]] = {
    HfViTConfig.model_type: _vit,
    HfHybridViTConfig.model_type: _hybrid,
    HfAxialViTConfig.model_type: _axial,
    HfAxialResNetConfig.model_type: _axial_resnet,
    HfBitConfig.model_type: _bit,
}


def _patch_embeddings(config: Any, patches: int) -> Macs:
    """The projection of patches of the image, or of a stem's map."""
    inputs = config.num_channels * _area(config.patch_stride)
    depths = getattr(config, "stage_depths", None)
    if depths is not None:
        channels = config.stem_width * (4 * 2 ** (len(depths) - 1) if depths else 1)
        inputs = channels * _area(config.patch_stride) // stem_stride(depths) ** 2
    return {"patch embeddings": patches * inputs * config.hidden_size}


def _encoder(config: HfViTBaseConfig, tokens: int, attention: int, blocks: int) -> Macs:
    """All blocks; `attention` is that of one: q.k and the sum over values."""
    width = config.hidden_size
    return {
        "attention projections": blocks * 4 * tokens * width**2,
        "attention": blocks * attention,
        "MLPs": blocks * 2 * tokens * width * config.intermediate_size,
    }


def _task_parts(config: HfViTBaseConfig, grid: Grid, tokens: int, task: Task) -> Macs:
    """What follows the encoder, but for the classifier."""
    if task == "masked_prediction":
        from hf_vit.models.pretraining_hf_vit import build_target

        return {"head": _area(grid) * config.hidden_size * build_target(config).num_outputs}
    if task == "backbone":
        return {"feature pyramid": _pyramid(config, grid) if config.use_feature_pyramid else 0}
    return {"pooling": _pooling(config, tokens)}


def _pooling(config: HfViTBaseConfig, tokens: int) -> int:
    width = config.hidden_size
    macs = width * (config.representation_size or 0)
    if config.pooling == "map":
        # Keys and values of every token, query and output of one; its attention; its MLP.
        macs += (2 * tokens + 2) * width**2 + 2 * tokens * width + 2 * width * config.intermediate_size
    return macs


def _pyramid(config: HfViTBaseConfig, grid: Grid) -> int:
    """Maps of strides 4, 8, 16 and 32 px: 2x2 deconvolutions, a 1x1 and a 3x3 convolution (arXiv 2203.16527)."""
    from hf_vit.models.backbone_hf_vit import PYRAMID_STRIDES

    macs, size = 0, config.fpn_hidden_size
    for stride in PYRAMID_STRIDES:
        (h, w), width, side = grid, config.hidden_size, config.patch_stride[0]
        while side > stride:
            half = max(width // 2, 1)
            macs += h * w * 4 * width * half
            h, w, width, side = 2 * h, 2 * w, half, side // 2
        shrink = max(stride // side, 1)
        places = -(-h // shrink) * -(-w // shrink)
        macs += places * (width * size + 9 * size**2)
    return macs


def _head(config: Any) -> int:
    width = config.representation_size or config.hidden_size
    return config.num_labels * (width + config.hidden_size * config.has_distillation_head)


def _halved(grid: Grid) -> Grid:
    return -(-grid[0] // 2), -(-grid[1] // 2)


def _area(grid: Grid) -> int:
    return grid[0] * grid[1]
