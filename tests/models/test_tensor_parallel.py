"""Two processes that share every layer give what one process gives: outputs, and the gradients of their shares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from models.families import FAMILIES, tensors_of, training_loss
from safetensors.torch import save_file

CASES = [
    *((name, "default") for name in FAMILIES),
    *(("plain", choice) for choice in ("relative_gap", "map", "causal", "distillation", "two_groups_of_three")),
]

# Runs in each of two processes: compares with what one process saved, and writes what it found.
WORKER = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig
import hf_vit, transformers
from models.families import FAMILIES, tensors_of, training_loss

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
for folder in sorted(path.parent for path in Path(sys.argv[1]).glob("*/config.json")):
    name = folder.name.split("-")[0]
    family, saved = FAMILIES[name], load_file(folder / "saved" / "saved.safetensors")
    model = transformers.AutoModelForImageClassification.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2)
    ).train()
    outputs = model(saved["images"])
    training_loss(family, "classification", model, saved["images"]).backward()
    worst, sharded = {}, 0
    for key, parameter in model.named_parameters():
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        wanted = saved["grad." + key]
        for dim in range(local.ndim):
            if local.shape[dim] != wanted.shape[dim]:
                wanted, sharded = wanted.chunk(2, dim)[rank], sharded + 1
        worst[key] = (local - wanted).abs().max().item()
    key = max(worst, key=worst.get)
    found[folder.name] = {
        "logits": (outputs.logits - saved["logits"]).abs().max().item(),
        "gradient": [key, worst[key]],
        "sharded": sharded,
    }
    dist.barrier()
Path(sys.argv[2], f"rank{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
"""


def save_one_process(root: Path) -> None:
    for name, choice in CASES:
        family, folder = FAMILIES[name], root / f"{name}-{choice}"
        model = family.build("classification", choice, dtype=torch.float64)
        model.save_pretrained(folder)
        model.train()
        images = family.images(model.config, dtype=torch.float64)
        tensors = {"images": images, "logits": tensors_of(model(images))[0].detach()}
        training_loss(family, "classification", model, images).backward()
        tensors |= {f"grad.{key}": parameter.grad.contiguous() for key, parameter in model.named_parameters()}
        (folder / "saved").mkdir()
        save_file(tensors, folder / "saved" / "saved.safetensors")


def test_two_processes_equal_one(tmp_path: Path):
    save_one_process(tmp_path / "models")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    (tmp_path / "out").mkdir()
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [*command, str(script), str(tmp_path / "models"), str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / "out" / f"rank{rank}.json").read_text())
        assert set(found) == {f"{name}-{choice}" for name, choice in CASES}
        for case, result in found.items():
            assert result["logits"] < 1e-12, (case, result)
            assert result["gradient"][1] < 1e-11, (case, result)
            # Six projections a block are shared out, and the biases of the four whose outputs are.
            name, choice = case.split("-")
            model = FAMILIES[name].build("classification", choice)
            blocks = sum(type(module).__name__ == "HfViTLayer" for module in model.modules())
            assert result["sharded"] == 10 * blocks, (case, result)
