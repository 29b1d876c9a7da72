"""Small checkpoints in the layouts of Google's codes, and slow references of their forward passes that share nothing.

Of vit_jax the plain ViT and the MLP-Mixer; of big_vision the forms that its files have of the same arrays; of BiT the
ResNetV2, as big_vision (models/bit_paper.py) or big_transfer names it. Kernels are [h, w, in, out], maps [B, H, W, C].
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hybrid.reference import group_norm, stem_shapes, windows

Arrays = dict[str, np.ndarray]
PRE_LINEN = (
    (r"encoderblock_(\d)/LayerNorm_1", r"encoderblock_\1/LayerNorm_2"),
    (r"encoderblock_(\d)/MultiHeadDotProductAttention_0", r"encoderblock_\1/MultiHeadDotProductAttention_1"),
    (r"encoderblock_(\d)/MlpBlock_0", r"encoderblock_\1/MlpBlock_3"),
    ("MAPHead_0/LayerNorm_0", "MAPHead_0/LayerNorm_1"),
    ("MAPHead_0/MlpBlock_0", "MAPHead_0/MlpBlock_2"),
)
BLOCK, MAP = "Transformer/encoderblock_", "MAPHead_0/"


def save_npz(arrays: Arrays, path: Path, stored: bool = True) -> Path:
    """Write arrays as numpy does; `stored` without compression, as np.savez."""
    with path.open("wb") as file:
        (np.savez if stored else np.savez_compressed)(file, **arrays)
    return path


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in arrays.items()}


def make_checkpoint(
    depth: int = 2,
    heads: int = 2,
    head_size: int = 4,
    mlp: int = 12,
    patch: tuple[int, int] = (4, 4),
    grid: tuple[int, int] = (3, 3),
    channels: int = 3,
    token: bool = True,
    representation: int | None = None,
    labels: int | None = 5,
    linen: bool = False,
    prefix: str = "",
    dtype: str = "float32",
    seed: int = 0,
) -> Arrays:
    """A checkpoint of random weights as vit_jax would write it; no labels, no head."""
    rng = np.random.default_rng(seed)
    width = heads * head_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (*patch, channels, width),
        "embedding/bias": (width,),
        "Transformer/posembed_input/pos_embedding": (1, grid[0] * grid[1] + token, width),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
    }
    norms, attention, dense = ((0, 1), 0, 0) if linen else ((0, 2), 1, 3)
    for block in range(depth):
        at = f"Transformer/encoderblock_{block}"
        for number in norms:
            shapes |= {f"{at}/LayerNorm_{number}/{name}": (width,) for name in ("scale", "bias")}
        for name in ("query", "key", "value"):
            shapes[f"{at}/MultiHeadDotProductAttention_{attention}/{name}/kernel"] = (width, heads, head_size)
            shapes[f"{at}/MultiHeadDotProductAttention_{attention}/{name}/bias"] = (heads, head_size)
        shapes[f"{at}/MultiHeadDotProductAttention_{attention}/out/kernel"] = (heads, head_size, width)
        shapes[f"{at}/MultiHeadDotProductAttention_{attention}/out/bias"] = (width,)
        shapes[f"{at}/MlpBlock_{dense}/Dense_0/kernel"] = (width, mlp)
        shapes[f"{at}/MlpBlock_{dense}/Dense_0/bias"] = (mlp,)
        shapes[f"{at}/MlpBlock_{dense}/Dense_1/kernel"] = (mlp, width)
        shapes[f"{at}/MlpBlock_{dense}/Dense_1/bias"] = (width,)
    if token:
        shapes["cls"] = (1, 1, width)
    if representation is not None:
        shapes |= {"pre_logits/kernel": (width, representation), "pre_logits/bias": (representation,)}
    if labels is not None:
        shapes |= {"head/kernel": (representation or width, labels), "head/bias": (labels,)}
    return {
        prefix + key: (rng.normal(0, 0.3, shape) + key.endswith("scale")).astype(dtype) for key, shape in shapes.items()
    }


def make_hybrid(
    depths: tuple[int, ...] = (1, 2),
    side: int = 1,
    flat: bool = False,
    prefix: str = "",
    seed: int = 0,
    width: int = 32,
    **form: Any,
) -> Arrays:
    """A hybrid with random weights as vit_jax would write it; `flat` GroupNorm parameters are (C,)."""
    rng = np.random.default_rng(seed)
    last = 4 * width * 2 ** (len(depths) - 1) if depths else width
    arrays = make_checkpoint(patch=(side, side), channels=last, prefix=prefix, **form)
    for key, shape in stem_shapes(depths, width).items():
        shape = shape[-1:] if flat and "/gn" in f"/{key}" else shape
        arrays[prefix + key] = (rng.normal(0, 0.3, shape) + key.endswith("scale")).astype(np.float32)
    return arrays


def reference_forward(params: Arrays, images: np.ndarray) -> Arrays:
    """vit_jax's forward pass in numpy and float64, straight from its arrays (models_vit.py, read on its own terms)."""
    params = {key.removeprefix("opt/target/"): np.asarray(value, np.float64) for key, value in params.items()}

    def norm(x: np.ndarray, at: str) -> np.ndarray:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + 1e-6) * params[f"{at}/scale"] + params[f"{at}/bias"]

    def attend(x: np.ndarray, at: str) -> np.ndarray:
        q, k, v = (
            np.einsum("bnd,dak->bank", x, params[f"{at}/{name}/kernel"]) + params[f"{at}/{name}/bias"][:, None]
            for name in ("query", "key", "value")
        )
        scores = np.einsum("baqk,bank->baqn", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("baqn,bank->baqk", weights, v)
        return np.einsum("baqk,akd->bqd", mixed, params[f"{at}/out/kernel"]) + params[f"{at}/out/bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    kernel = params["embedding/kernel"]
    (p, q), (b, height, width, _) = kernel.shape[:2], images.shape
    h, w = height // p, width // q
    patches = images.astype(np.float64).reshape(b, h, p, w, q, -1)
    out = {"embedding": np.einsum("bhpwqc,pqcd->bhwd", patches, kernel) + params["embedding/bias"]}
    x = out["embedding"].reshape(b, h * w, -1)
    if "cls" in params:
        x = np.concatenate([np.tile(params["cls"], (b, 1, 1)), x], axis=1)
    x = out["with_posemb"] = x + params["Transformer/posembed_input/pos_embedding"]
    depth = len({key.split("/")[1] for key in params if "/encoderblock_" in key})
    for block in range(depth):
        at = f"Transformer/encoderblock_{block}"
        norms = sorted({key.split("/")[2] for key in params if key.startswith(f"{at}/LayerNorm_")})
        (attention,) = {key.split("/")[2] for key in params if key.startswith(f"{at}/MultiHead")}
        (mlp,) = {key.split("/")[2] for key in params if key.startswith(f"{at}/MlpBlock_")}
        x = x + attend(norm(x, f"{at}/{norms[0]}"), f"{at}/{attention}")
        y = norm(x, f"{at}/{norms[1]}") @ params[f"{at}/{mlp}/Dense_0/kernel"] + params[f"{at}/{mlp}/Dense_0/bias"]
        x = x + gelu(y) @ params[f"{at}/{mlp}/Dense_1/kernel"] + params[f"{at}/{mlp}/Dense_1/bias"]
        out[f"layer_{block}"] = x
    x = out["encoded"] = norm(x, "Transformer/encoder_norm")
    x = out["pooled"] = x[:, 0] if "cls" in params else x.mean(1)
    if "pre_logits/kernel" in params:
        x = np.tanh(x @ params["pre_logits/kernel"] + params["pre_logits/bias"])
    out["pre_logits"] = x
    if "head/kernel" in params:
        x = x @ params["head/kernel"] + params["head/bias"]
    out["logits"] = x
    return out


def class_token_apart(arrays: Arrays) -> Arrays:
    """The position table in its place of today, without a row for the class token."""
    arrays = dict(arrays)
    table = arrays.pop("Transformer/posembed_input/pos_embedding")
    return arrays | {"pos_embedding": table[:, "cls" in arrays :]}


def with_map_head(arrays: Arrays) -> Arrays:
    """A MAP head beside, made of the first block's arrays in reverse."""
    block = {key.removeprefix(f"{BLOCK}0/"): array for key, array in arrays.items() if key.startswith(f"{BLOCK}0/")}
    head = {f"{MAP}{key}": array[::-1] for key, array in block.items() if "LayerNorm_1" not in key}
    return arrays | head | {f"{MAP}probe": arrays["embedding/bias"][None, None]}


def stacked(arrays: Arrays) -> Arrays:
    """The arrays of the blocks as a scan has them."""
    blocks = sorted({key.split("/")[1] for key in arrays if key.startswith(BLOCK)})
    tails = [key.removeprefix(f"{BLOCK}0/") for key in arrays if key.startswith(f"{BLOCK}0/")]
    rest = {key: array for key, array in arrays.items() if not key.startswith(BLOCK)}
    whole = {tail: np.stack([arrays[f"Transformer/{block}/{tail}"] for block in blocks]) for tail in tails}
    return rest | {f"Transformer/encoderblock/{tail}": array for tail, array in whole.items()}


def as_tower(arrays: Arrays, prefix: str) -> Arrays:
    """The image tower of a contrastive model; the text tower and the loss are hinted at."""
    others = ("txt/head/bias", "txt/Encoder_0/encoderblock_0/LayerNorm_0/bias", "t", "b")
    image = {f"{prefix}img/{key}": array for key, array in arrays.items()}
    return image | {prefix + key: np.ones(3, np.float32) for key in others}


def renamed(arrays: dict, *pairs: tuple[str, str]) -> dict:
    for pattern, new in pairs:
        arrays = {re.sub(pattern, new, key): value for key, value in arrays.items()}
    return arrays


def make_resnet_v2(depths: tuple[int, ...] = (2, 1), width: int = 32, channels: int = 3, labels: int = 5) -> Arrays:
    """Random weights under big_vision's names, GroupNorm's as (1, 1, 1, C)."""
    rng, arrays, last = np.random.default_rng(0), Arrays(), width

    def kernel(name: str, *shape: int) -> None:
        arrays[name] = rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    def norm(name: str, size: int) -> None:
        arrays[f"{name}/scale"] = rng.normal(1, 0.2, (1, 1, 1, size)).astype(np.float32)
        arrays[f"{name}/bias"] = rng.normal(0, 0.2, (1, 1, 1, size)).astype(np.float32)

    kernel("root_block/conv_root/kernel", 7, 7, channels, width)
    for stage, depth in enumerate(depths):
        inner, outer = width * 2**stage, 4 * width * 2**stage
        for unit in range(1, depth + 1):
            at = f"block{stage + 1}/unit{unit:02d}"
            for number, size in enumerate((last, inner, inner), start=1):
                norm(f"{at}/gn{number}", size)
            kernel(f"{at}/conv1/kernel", 1, 1, last, inner)
            kernel(f"{at}/conv2/kernel", 3, 3, inner, inner)
            kernel(f"{at}/conv3/kernel", 1, 1, inner, outer)
            if unit == 1:
                kernel(f"{at}/conv_proj/kernel", 1, 1, last, outer)
            last = outer
    norm("norm-pre-head", last)
    kernel("head/kernel", last, labels)
    arrays["head/bias"] = rng.normal(0, 0.2, labels).astype(np.float32)
    return arrays


def as_big_transfer(arrays: Arrays, numbered: bool = False) -> Arrays:
    """The same weights as big_transfer wrote them; in some files all convolutions but the first bear numbers."""
    found, count = Arrays(), 0
    for name, array in arrays.items():
        *scope, module, kind = name.split("/")
        group = f"{'abc'[int(module[-1]) - 1]}/" if module[-1].isdigit() else ""
        if module == "head":
            end, array = f"head/conv2d/{kind}", array[None, None] if kind == "kernel" else array
        elif kind == "kernel":
            number = f"_{count}" if numbered and count else ""
            end = f"{'a/proj/' if module == 'conv_proj' else group}standardized_conv2d{number}/kernel"
            count += 1
        else:
            end, array = f"{group}group_norm/{'gamma' if kind == 'scale' else 'beta'}", array.ravel()
        found["/".join(["resnet", *scope, end])] = array
    return found


def resnet_v2_forward(arrays: Arrays, images: np.ndarray, pool_fill: float = -np.inf) -> Arrays:
    """Stages by name for [B, H, W, C] images; `pool_fill` lies around the map that the root pools."""
    arrays = {key: np.asarray(value, np.float64) for key, value in arrays.items()}

    def norm_relu(x: np.ndarray, name: str) -> np.ndarray:
        return np.maximum(group_norm(x, arrays[f"{name}/scale"], arrays[f"{name}/bias"], eps=1e-5), 0)

    def conv(x: np.ndarray, name: str, stride: int = 1) -> np.ndarray:
        kernel = arrays[f"{name}/kernel"]
        kernel = kernel - kernel.mean((0, 1, 2))
        kernel = kernel / np.sqrt((kernel**2).mean((0, 1, 2)) + 1e-10)
        return np.einsum("bhwpqc,pqco->bhwo", windows(x, len(kernel), stride, 0.0, pad=len(kernel) // 2), kernel)

    x = conv(np.asarray(images, np.float64), "root_block/conv_root", 2)
    out = {"stem": windows(x, 3, 2, pool_fill, pad=1).max((3, 4))}
    x, stage = out["stem"], 1
    while any(key.startswith(f"block{stage}/") for key in arrays):
        for unit in range(1, 1 + len({key.split("/")[1] for key in arrays if key.startswith(f"block{stage}/")})):
            at, stride = f"block{stage}/unit{unit:02d}", 2 if stage > 1 and unit == 1 else 1
            y = norm_relu(x, f"{at}/gn1")
            shortcut = conv(y, f"{at}/conv_proj", stride) if unit == 1 else x
            y = norm_relu(conv(y, f"{at}/conv1"), f"{at}/gn2")
            x = shortcut + conv(norm_relu(conv(y, f"{at}/conv2", stride), f"{at}/gn3"), f"{at}/conv3")
        out[f"block{stage}"] = x
        stage += 1
    out["pre_logits"] = norm_relu(x, "norm-pre-head").mean((1, 2))
    return out | {"logits": out["pre_logits"] @ arrays["head/kernel"] + arrays["head/bias"]}


def make_mixer(
    depth: int = 2,
    width: int = 6,
    tokens: int = 3,
    channels: int = 5,
    patch: tuple[int, int] = (4, 2),
    grid: tuple[int, int] = (2, 2),
    labels: int | None = 7,
    prefix: str = "",
) -> Arrays:
    """Random weights as vit_jax's models_mixer.py names them; `tokens` and `channels` are the widths of the MLPs."""
    rng, patches = np.random.default_rng(0), grid[0] * grid[1]
    shapes: dict[str, tuple[int, ...]] = {"stem/kernel": (*patch, 3, width), "stem/bias": (width,)}
    for block in range(depth):
        for mixing, outer, inner in (("token_mixing", patches, tokens), ("channel_mixing", width, channels)):
            at = f"MixerBlock_{block}/{mixing}"
            shapes |= {f"{at}/Dense_0/kernel": (outer, inner), f"{at}/Dense_0/bias": (inner,)}
            shapes |= {f"{at}/Dense_1/kernel": (inner, outer), f"{at}/Dense_1/bias": (outer,)}
        for norm in (0, 1):
            shapes |= {f"MixerBlock_{block}/LayerNorm_{norm}/{name}": (width,) for name in ("scale", "bias")}
    shapes |= {f"pre_head_layer_norm/{name}": (width,) for name in ("scale", "bias")}
    if labels is not None:
        shapes |= {"head/kernel": (width, labels), "head/bias": (labels,)}
    return {
        prefix + key: (rng.normal(0, 0.3, shape) + key.endswith("scale")).astype(np.float32)
        for key, shape in shapes.items()
    }
