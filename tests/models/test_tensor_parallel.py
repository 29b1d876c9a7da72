"""Two processes that share every layer give what one process gives: outputs, and the gradients of their shares."""

from pathlib import Path

import torch
from loopback.client import Client
from models.families import FAMILIES
from safetensors.torch import save_file

CASES = [
    *((name, "default") for name in FAMILIES),
    *(
        ("plain", choice)
        for choice in ("relative_gap", "map", "causal", "distillation", "two_groups_of_three", "swiglu")
    ),
]


def save_one_process(folder: Path, name: str, choice: str) -> None:
    """A model, and what one process makes of it: logits and every gradient."""
    model = FAMILIES[name].build("classification", choice, dtype=torch.float64)
    model.save_pretrained(folder)
    images, labels = FAMILIES[name].images(model.config, dtype=torch.float64), torch.tensor([0, 1])
    outputs = model.train()(images, labels=labels)
    outputs.loss.backward()
    answers = {"images": images, "labels": labels, "logits": outputs.logits.detach()}
    answers |= {f"grad.{key}": parameter.grad.contiguous() for key, parameter in model.named_parameters()}
    save_file(answers, folder / "answers.safetensors")


def test_two_processes_equal_one(stranger: Client, tmp_path: Path):
    """By the code that travels with a checkpoint, as a user's processes load it."""
    folders = {(name, choice): tmp_path / f"{name}-{choice}" for name, choice in CASES}
    for case, folder in folders.items():
        save_one_process(folder, *case)
    shared = {"meeting": str(tmp_path / "meeting"), "folders": list(map(str, folders.values()))}
    ranks = [stranger.start("models.jobs:tensor_parallel", rank=rank, **shared) for rank in (0, 1)]
    for outcome in [rank.wait() for rank in ranks]:
        assert outcome.code == 0, outcome.err
        for (name, choice), folder in folders.items():
            found = outcome.answer[folder.name]
            assert found["logits"] < 1e-12, (name, choice, found)
            assert found["gradient"][1] < 1e-11, (name, choice, found)
            # Six projections a block are shared out (a SwiGLU has one more), and the biases of those whose outputs are.
            model = FAMILIES[name].shared("classification", choice)
            blocks = sum(type(module).__name__ == "HfViTLayer" for module in model.modules())
            assert found["sharded"] == (12 if model.config.mlp_type == "swiglu" else 10) * blocks
