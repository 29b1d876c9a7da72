"""What processes of their own do for test_dense.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

SIDE = 32
DATA = f"scenes:images=16,size={SIDE}"
TINY: dict[str, Any] = dict(
    image_size=SIDE, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)
TINY_BIT: dict[str, Any] = dict(image_size=SIDE, stage_depths=(1, 1, 1, 1), stem_width=32)
NARROW = {"representation_size": 32, "mask_channels": [16]}  # of Mask R-CNN, whose branches take the time


def learn(output: Path, task: str, head: str, family: str = "plain", **settings: Any) -> Any:
    """A tiny training on few scenes."""
    import torch

    from hf_vit import HfBitConfig, HfViTConfig
    from hf_vit.data import scenes
    from hf_vit.training import finetune
    from hf_vit.training.recipes.registry import find_recipe

    torch.set_num_threads(1)
    scenes.HELD_OUT = 6
    quick = dict(steps=4, evaluations=2, batch_size=8, device="cpu", precision="fp32", head_width=16)
    if head == "mask-rcnn":
        quick["recipe"] = replace(find_recipe("detection-small"), architecture=NARROW)
    config = HfViTConfig(**TINY) if family == "plain" else HfBitConfig(**TINY_BIT)
    return finetune(config, DATA, output, task=task, head=head, **(quick | settings))


def learn_alone(output: str, task: str, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """It, in a process of its own or of several; what that says of it."""
    result = learn(Path(output), task, head, **settings)
    losses = [entry["loss"] for entry in result.history if "loss" in entry]
    return {"validation": result.validation, "test": result.test.values(), "losses": losses}
