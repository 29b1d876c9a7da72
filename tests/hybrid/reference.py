"""The ResNet stem of the original, written slowly in numpy and float64: loops over output places, nothing shared.

Arrays are named and laid out as the original's (vit_jax/models_resnet.py): [B, H, W, C] and [h, w, in, out].
"""

from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray]


def same_pads(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """(before, after), from TensorFlow's documentation of "SAME"."""
    rest = side % stride
    total = max(kernel - (stride if rest == 0 else rest), 0)
    return total // 2, total - total // 2


def windows(images: np.ndarray, kernel: int, stride: int, fill: float, pad: int | None = None) -> np.ndarray:
    """[B, H, W, C] -> [B, H', W', kernel, kernel, C], one window after another; `pad`, where it is not "SAME"."""
    rows, columns = (same_pads(side, kernel, stride) if pad is None else (pad, pad) for side in images.shape[1:3])
    padded = np.pad(images, ((0, 0), rows, columns, (0, 0)), constant_values=fill)
    height, width = (-(-side // stride) for side in images.shape[1:3])
    out = np.empty((images.shape[0], height, width, kernel, kernel, images.shape[3]))
    for i in range(height):
        for j in range(width):
            top, left = i * stride, j * stride
            out[:, i, j] = padded[:, top : top + kernel, left : left + kernel]
    return out


def std_conv(images: np.ndarray, kernel: np.ndarray, stride: int = 1) -> np.ndarray:
    mean, deviation = kernel.mean((0, 1, 2)), kernel.std((0, 1, 2))
    standardized = (kernel - mean) / (deviation + 1e-5)
    return np.einsum("bhwpqc,pqco->bhwo", windows(images, len(kernel), stride, 0.0), standardized)


def group_norm(images: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    batch, height, width, channels = images.shape
    grouped = images.reshape(batch, height, width, 32, channels // 32)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = ((grouped - mean) ** 2).mean((1, 2, 4), keepdims=True)
    return ((grouped - mean) / np.sqrt(variance + eps)).reshape(images.shape) * scale.ravel() + bias.ravel()


def max_pool(images: np.ndarray) -> np.ndarray:
    return windows(images, 3, 2, -np.inf).max((3, 4))


def stem_forward(params: Arrays, images: np.ndarray) -> Arrays:
    """Feature maps by stage name; the last one is what the patches are cut from."""
    params = {key: np.asarray(value, np.float64) for key, value in params.items()}

    def norm(x: np.ndarray, at: str) -> np.ndarray:
        return group_norm(x, params[f"{at}/scale"], params[f"{at}/bias"])

    x = std_conv(np.asarray(images, np.float64), params["conv_root/kernel"], 2)
    out = {"conv_root": x, "gn_root": norm(x, "gn_root")}
    x = max_pool(np.maximum(out["gn_root"], 0))
    stage, unit = 1, 1
    while f"block{stage}/unit1/conv1/kernel" in params:
        while f"block{stage}/unit{unit}/conv1/kernel" in params:
            at, stride = f"block{stage}/unit{unit}", 2 if stage > 1 and unit == 1 else 1
            y = np.maximum(norm(std_conv(x, params[f"{at}/conv1/kernel"]), f"{at}/gn1"), 0)
            y = np.maximum(norm(std_conv(y, params[f"{at}/conv2/kernel"], stride), f"{at}/gn2"), 0)
            y = norm(std_conv(y, params[f"{at}/conv3/kernel"]), f"{at}/gn3")
            if unit == 1:
                x = norm(std_conv(x, params[f"{at}/conv_proj/kernel"], stride), f"{at}/gn_proj")
            x = np.maximum(x + y, 0)
            unit += 1
        out[f"block{stage}"] = x
        stage, unit = stage + 1, 1
    return out | {"features": x}


def original_names(stem: torch.nn.Module) -> Arrays:
    """The parameters of a model's stem under the original's names."""
    arrays: Arrays = {}
    for name, value in stem.state_dict().items():
        *path, kind = name.split(".")
        if path[0] == "stages":
            path = [f"block{int(path[1]) + 1}", f"unit{int(path[2]) + 1}", path[3]]
        else:
            path = [{"root_conv": "conv_root", "root_norm": "gn_root"}[path[0]]]
        path[-1] = (
            path[-1].replace("projection_norm", "gn_proj").replace("projection", "conv_proj").replace("norm", "gn")
        )
        array = value.detach().double().numpy()
        if array.ndim == 4:
            arrays["/".join([*path, "kernel"])] = array.transpose(2, 3, 1, 0)
        else:
            arrays["/".join([*path, {"weight": "scale", "bias": "bias"}[kind]])] = array
    return arrays


def stem_shapes(depths: tuple[int, ...], width: int, channels: int = 3) -> dict[str, tuple[int, ...]]:
    """Key -> shape of a stem's arrays in the original's layout, GroupNorm's as (1, 1, 1, C)."""
    shapes: dict[str, tuple[int, ...]] = {"conv_root/kernel": (7, 7, channels, width)}

    def norm(at: str, size: int) -> None:
        shapes.update({f"{at}/{name}": (1, 1, 1, size) for name in ("scale", "bias")})

    norm("gn_root", width)
    last = width
    for stage, depth in enumerate(depths):
        inner, outer = width * 2**stage, 4 * width * 2**stage
        for unit in range(depth):
            at = f"block{stage + 1}/unit{unit + 1}"
            kernels = {"conv1": (1, 1, last, inner), "conv2": (3, 3, inner, inner), "conv3": (1, 1, inner, outer)}
            sizes: dict[str, Any] = {"gn1": inner, "gn2": inner, "gn3": outer}
            if unit == 0:
                kernels["conv_proj"], sizes["gn_proj"] = (1, 1, last, outer), outer
            shapes.update({f"{at}/{name}/kernel": shape for name, shape in kernels.items()})
            for name, size in sizes.items():
                norm(f"{at}/{name}", size)
            last = outer
    return shapes
