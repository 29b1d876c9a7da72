"""What a patch of a local model sees, as the papers write it: sets of places, pair by pair."""

from typing import Any

import torch

Place = tuple[int, int]


def patches_seen(config: Any, place: Place, grid: Place) -> set[Place]:
    """The places that the patch at (row, column) attends to."""
    (row, column), (h, w) = place, grid
    if config.attention_pattern == "local":  # 1906.05909, section 3.1: N_k(i, j)
        reach = (config.attention_window - 1) // 2
        square = {
            (row + down, column + right) for down in range(-reach, reach + 1) for right in range(-reach, reach + 1)
        }
        return {(y, x) for y, x in square if 0 <= y < h and 0 <= x < w}
    if config.attention_pattern == "criss_cross":  # 1811.11721, section 3.2: H + W - 1 places
        return {(row, x) for x in range(w)} | {(y, column) for y in range(h)}
    # 1904.10509, section 4.3: A1 = {t, ..., i} with t = max(0, i - l), A2 = {j : (i - j) mod l = 0}; and after i, too.
    stride, number = config.attention_stride, row * w + column
    before = {*range(max(0, number - stride), number + 1)} | {
        j for j in range(number + 1) if (number - j) % stride == 0
    }
    after = {*range(number, min(h * w, number + stride + 1))} | {
        j for j in range(number, h * w) if (j - number) % stride == 0
    }
    return {divmod(j, w) for j in before | after}


def pairs_that_see(config: Any, grid: Place | None = None) -> torch.Tensor:
    """[N, N] bool, special tokens first: they see all and are seen by all."""
    (h, w), special = grid or config.grid, config.num_special_tokens
    pairs = torch.ones(special + h * w, special + h * w, dtype=torch.bool)
    for query in range(h * w):
        seen = patches_seen(config, divmod(query, w), (h, w))
        for key in range(h * w):
            pairs[special + query, special + key] = divmod(key, w) in seen
    return pairs
