"""What the tests of saving run in client processes, where hf_vit cannot be imported: plain transformers."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from safetensors.torch import load_file
from torch import distributed
from transformers.distributed import DistributedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def load(source: str, auto_class: str) -> Any:
    """By the code that travels with the weights."""
    if auto_class == "AutoBackbone" and Path(source).is_dir():  # transformers' own does not read folders
        names = json.loads(Path(source, "config.json").read_text())["auto_map"]
        model_class = get_class_from_dynamic_module(names[auto_class], source)
        model_class.register_for_auto_class(auto_class)  # as Auto classes do
        return model_class.from_pretrained(source)
    return getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=True)


@torch.no_grad()
def outputs_of(model: Any, images: torch.Tensor) -> list[torch.Tensor]:
    values = [value if isinstance(value, torch.Tensor) else value[0] for value in model(images).to_tuple()]
    return [*values, model.base_model(images).last_hidden_state]


def journey(source: str, auto_class: str, others: list[str], answers: str, target: str | None) -> dict[str, Any]:
    """Load a model, save it, load every Auto class of its family from there: what each is, and if it answers right."""
    saved = load_file(answers)
    images = saved.pop("images")
    wanted = [saved[str(index)] for index in range(len(saved))]
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=True)
    model = load(source, auto_class)
    found = {"config": type(config).__name__, auto_class: told(model, outputs_of(model, images), wanted)}
    if target is None:
        return found
    model.save_pretrained(target)
    again = load(target, auto_class)
    found["again"] = told(again, outputs_of(again, images), wanted)
    for other in others:
        loaded = load(target, other)
        found[other] = told(loaded, outputs_of(loaded, images)[-1:], wanted[-1:])
    return found


@torch.no_grad()
def dense_answers(model: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, boxes, masks: all tensors that a dense predictor returns; of Mask R-CNN the first image's."""
    outputs = model.eval()(pixel_values=images)
    outputs = outputs.detections[0] if "detections" in outputs else outputs
    return {name: value.contiguous() for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def differences(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest one, infinite where a name or a shape differs."""
    if {name: value.shape for name, value in given.items()} != {name: value.shape for name, value in wanted.items()}:
        return float("inf")
    return max((given[name] - wanted[name]).abs().max().item() for name in given)


def dense_journeys(folders: list[str]) -> list[Any]:
    """Load each folder, save it, load that: the class, whether its weights are the same, and how far both answer."""
    found = []
    for folder in folders:
        names = json.loads(Path(folder, "config.json").read_text())["auto_map"]
        (auto_class,) = set(names) - {"AutoConfig"}
        wanted, stored = load_file(Path(folder, "answers.safetensors")), load_file(Path(folder, "model.safetensors"))
        images = wanted.pop("images")
        first = load(folder, auto_class)
        first.save_pretrained(f"{folder}/again")
        far, same = [], []
        for model in (first, load(f"{folder}/again", auto_class)):
            state = model.state_dict()
            far.append(differences(dense_answers(model, images), wanted))
            same.append(all(torch.equal(state[name], value) for name, value in stored.items()))
        found.append([type(first).__module__.partition(".")[0], type(first).__name__, all(same), max(far)])
    return found


def told(model: Any, given: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[Any]:
    same = len(given) == len(wanted) and all(map(torch.equal, given, wanted))
    return [type(model).__module__.partition(".")[0], type(model).__name__, same]


def journeys(cases: list[dict[str, Any]]) -> list[Any]:
    """Many in one process; of one that fails, its error."""
    found = []
    for case in cases:
        try:
            found.append(journey(**case))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}"[:300])
    return found


def upload(folders: dict[str, str]) -> None:
    for repo_id, folder in folders.items():
        HfApi().create_repo(repo_id)
        HfApi().upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns="answers*")


def tensor_parallel(rank: int, meeting: str, folders: list[str]) -> dict[str, Any]:
    """One of two processes that share every layer: how far its logits and gradients are from one process's."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found = {}
    for folder in folders:
        saved = load_file(Path(folder, "answers.safetensors"))
        model = transformers.AutoModelForImageClassification.from_pretrained(
            folder, trust_remote_code=True, distributed_config=DistributedConfig(tp_size=2)
        ).train()
        outputs = model(saved["images"], labels=saved["labels"])
        outputs.loss.backward()
        differences, sharded = {}, 0
        for name, parameter in model.named_parameters():
            local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            wanted = saved[f"grad.{name}"]
            for dim in range(local.ndim):
                if local.shape[dim] != wanted.shape[dim]:
                    wanted, sharded = wanted.chunk(2, dim)[rank], sharded + 1
            differences[name] = (local - wanted).abs().max().item()
        worst = max(differences, key=lambda name: differences[name])
        logits = (outputs.logits - saved["logits"]).abs().max().item()
        found[Path(folder).name] = {"logits": logits, "gradient": [worst, differences[worst]], "sharded": sharded}
        distributed.barrier()
    distributed.destroy_process_group()
    return found
