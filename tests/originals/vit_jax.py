"""Small checkpoints in vit_jax's layout, and an independent reference of its forward pass."""

from typing import Any

import numpy as np
from hybrid.reference import stem_shapes

Arrays = dict[str, np.ndarray]


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
