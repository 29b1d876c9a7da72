"""docs/combinations.md, cell by cell."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from hf_vit import (
    HfAxialViTConfig,
    HfAxialViTForImageClassification,
    HfHybridViTConfig,
    HfHybridViTForImageClassification,
    HfLocalViTConfig,
    HfLocalViTForImageClassification,
    HfViTConfig,
    HfViTForImageClassification,
)

FAMILIES = {
    "plain": (HfViTConfig, HfViTForImageClassification, {"patch_size": 16}),
    "hybrid": (
        HfHybridViTConfig,
        HfHybridViTForImageClassification,
        {"stage_depths": (1, 1), "stem_width": 32, "stem_patch_size": 2},
    ),
    "axial": (HfAxialViTConfig, HfAxialViTForImageClassification, {"patch_size": 16}),
    "local": (HfLocalViTConfig, HfLocalViTForImageClassification, {"patch_size": 16}),
}
TINY = {
    "image_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_labels": 3,
}


def read_table() -> list[tuple[str, str, str]]:
    text = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", text, flags=re.MULTILINE)
    assert len(rows) >= 25
    return [(family, fields, cell) for fields, *cells in rows for family, cell in zip(FAMILIES, cells, strict=True)]


@pytest.mark.parametrize(("kind", "fields", "expected"), read_table())
def test_cell(kind: str, fields: str, expected: str):
    config_class, model_class, own = FAMILIES[kind]
    chosen = {**TINY, **own, **eval(f"dict({fields})")}
    if expected == "raises":
        with pytest.raises(StrictDataclassError, match=r"use|needs|no place|does not go"):
            config_class(**chosen)
        return
    assert expected == "works"
    torch.manual_seed(0)
    model = model_class(config_class(**chosen)).train()
    with torch.no_grad():
        for parameter in model.parameters():  # zero heads and zero norms would hide what lies behind them
            parameter.add_(0.02 * torch.randn_like(parameter))
    height, width = (side * stride for side, stride in zip(model.config.grid, model.config.patch_stride, strict=True))
    images = torch.randn(4, 3, height, width)
    if "drop" not in fields:
        model(images, labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        zero = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
        # A key's bias adds one number to all logits of a softmax. In the last layer only the class token's query is
        # read, and pairs with the class token have no offset.
        silent = r"k_proj\.bias|layers\.1\..*offset_embeddings"
        assert (without, [name for name in zero if not re.search(silent, name)]) == ([], [])
    # Each choice goes through a file in test_saving.py; here its settings and weights go through memory.
    again = model_class(config_class(**json.loads(model.config.to_json_string(use_diff=False))))
    again.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images).logits, again.eval()(images).logits)
