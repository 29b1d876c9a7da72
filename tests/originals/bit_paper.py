"""BiT's ResNetV2, written slowly in numpy and float64 from the paper's code: loops over output places, nothing shared.

Arrays are named as big_vision's (models/bit_paper.py) or big_transfer's: [B, H, W, C] and [h, w, in, out].
"""

import numpy as np

Arrays = dict[str, np.ndarray]


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
        groups = x.reshape(*x.shape[:3], 32, -1)
        centred = groups - groups.mean((1, 2, 4), keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
        normed = scaled.reshape(x.shape) * arrays[f"{name}/scale"].ravel() + arrays[f"{name}/bias"].ravel()
        return np.maximum(normed, 0)

    def conv(x: np.ndarray, name: str, stride: int = 1) -> np.ndarray:
        kernel = arrays[f"{name}/kernel"]
        kernel = kernel - kernel.mean((0, 1, 2))
        kernel = kernel / np.sqrt((kernel**2).mean((0, 1, 2)) + 1e-10)
        return np.einsum("bhwpqc,pqco->bhwo", windows(x, kernel.shape[0], stride, 0.0), kernel)

    x = conv(np.asarray(images, np.float64), "root_block/conv_root", 2)
    out = {"stem": windows(x, 3, 2, pool_fill).max((3, 4))}
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


def windows(x: np.ndarray, kernel: int, stride: int, fill: float) -> np.ndarray:
    """[B, H, W, C] -> [B, H', W', kernel, kernel, C] with `kernel // 2` places of `fill` on every side."""
    half = kernel // 2
    padded = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)), constant_values=fill)
    rows, columns = (range(0, side + 2 * half - kernel + 1, stride) for side in x.shape[1:3])
    return np.stack([np.stack([padded[:, i : i + kernel, j : j + kernel] for j in columns], 1) for i in rows], 1)
