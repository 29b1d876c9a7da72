"""From the arrays of a vit_jax file (linen names) to forms that big_vision's files have."""

import re

import numpy as np

Arrays = dict[str, np.ndarray]
PRE_LINEN = (
    (r"encoderblock_(\d)/LayerNorm_1", r"encoderblock_\1/LayerNorm_2"),
    (r"encoderblock_(\d)/MultiHeadDotProductAttention_0", r"encoderblock_\1/MultiHeadDotProductAttention_1"),
    (r"encoderblock_(\d)/MlpBlock_0", r"encoderblock_\1/MlpBlock_3"),
    ("MAPHead_0/LayerNorm_0", "MAPHead_0/LayerNorm_1"),
    ("MAPHead_0/MlpBlock_0", "MAPHead_0/MlpBlock_2"),
)
BLOCK, MAP = "Transformer/encoderblock_", "MAPHead_0/"


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
    """Replace every pattern in the names."""
    for pattern, new in pairs:
        arrays = {re.sub(pattern, new, key): value for key, value in arrays.items()}
    return arrays
