"""The demonstration: train a small hybrid ViT on handwritten digits, and load it with plain transformers code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_vit.data import load_data
from hf_vit.errors import UserError
from hf_vit.loading.model import get_label_names
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.results.delivery import deliver_folder, prepare_output
from hf_vit.results.facts import Facts
from hf_vit.training.api import finetune
from hf_vit.training.tasks.task import FinetuneResult
from hf_vit.writing import explain_write_errors, make_scratch_folder, remove_leftovers
from hf_vit_settings import FinetuneOptions

# Program of the new process, which uses only transformers; importing hf_vit raises an error.
FRESH_PROGRAM = """\
import json, sys

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_vit":
            raise ModuleNotFoundError("No module named 'hf_vit'", name=name)

sys.meta_path.insert(0, Bar())
try:
    import hf_vit
    sys.exit("hf_vit could be imported")
except ModuleNotFoundError as error:
    import_error = str(error)

from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

folder, *files = sys.argv[1:]
processor = AutoImageProcessor.from_pretrained(folder)
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
images = [Image.open(file).convert("RGB") for file in files]
probabilities = model(**processor(images=images, return_tensors="pt")).logits.softmax(-1)
best = probabilities.max(-1)
print(json.dumps({
    "import_error": import_error,
    "labels": [model.config.id2label[index] for index in best.indices.tolist()],
    "probabilities": best.values.tolist(),
}))
"""


@dataclass(frozen=True)
class FreshComparison:
    """Predictions of this process and of a new one without hf_vit, on the same images.

    Attributes:
        import_error: the error of importing hf_vit in the new process.
        true_classes: true class of each image.
        predicted_here, predicted_without_package: predicted classes of this and of the new process.
        largest_difference: largest difference of the probabilities.
    """

    import_error: str
    true_classes: list[str]
    predicted_here: list[str]
    predicted_without_package: list[str]
    largest_difference: float


def make_digits_config() -> HfHybridViTConfig:
    """Return the config of the demonstration; like its recipe "digits-hybrid" it was selected without test images."""
    return HfHybridViTConfig(
        image_size=32,
        stage_depths=(2,),
        stem_width=32,
        stem_patch_size=2,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        pooling="gap",
        position_embedding="sincos_2d",
    )


def demonstrate(
    output: Path, seeds: int, *, command: str, report: Callable[[str], None], **overrides: Any
) -> Iterator[tuple[Path, FinetuneResult, FreshComparison]]:
    """Train with seeds 0, 1, ..., and yield folder, result and the comparison with a new process for every seed."""
    folders = [output] if seeds == 1 else [output / f"seed-{seed}" for seed in range(seeds)]
    for folder in folders:
        claim_output(folder)
    for seed, folder in enumerate(folders):
        result = train_digits(folder, seed=seed, command=command, report=report, **overrides)
        report("loading the model in a new Python process without hf_vit (trust_remote_code=True)")
        comparison = compare_fresh(folder, result)
        yield folder, result, comparison
        if comparison.predicted_here != comparison.predicted_without_package or comparison.largest_difference > 1e-4:
            raise UserError(
                "a new process without hf_vit computes probabilities that differ by up to "
                f"{comparison.largest_difference:.2g}; please report this with the output of hf-vit --version"
            )


def claim_output(output: Path) -> None:
    """Raise UserError if the output holds anything but an earlier demonstration, which will be replaced."""
    remove_leftovers(output)
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    training = Facts.load(output).filter_kind("training") if output.is_dir() else []
    if not training or not training[-1].command.startswith("hf-vit demo"):
        raise UserError(
            f"the output folder {output} holds files that are not from hf-vit demo; choose a new or empty --output"
        )


def train_digits(
    output: Path, *, seed: int, command: str, report: Callable[[str], None], **overrides: Any
) -> FinetuneResult:
    """Train and evaluate in a temporary folder, then move it to the output."""
    # One thread gives the same results everywhere, and is not slower for so small a model.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    claim_output(output)
    try:
        with deliver_folder(prepare_output(output, force=True), force=True) as folder:
            return finetune(
                make_digits_config(),
                "digits",
                folder,
                recipe="digits-hybrid",
                options=FinetuneOptions(seed=seed, device="cpu", precision="fp32"),
                command=command,
                report=report,
                **overrides,
            )
    finally:
        torch.set_num_threads(threads)


def compare_fresh(folder: Path, result: FinetuneResult) -> FreshComparison:
    """Predict one test image of every class here and in a new Python process that cannot import hf_vit."""
    data: Any = load_data("digits")
    test = data.splits["test"]
    rows = [test["label"].index(label) for label in range(len(data.label_names))]
    images = [test[row]["image"].convert("RGB") for row in rows]
    with torch.inference_mode():
        inputs = result.processor(images=images, return_tensors="pt")
        best = result.model(**inputs).logits.softmax(-1).max(-1)
    names = get_label_names(result.model)
    with make_scratch_folder("demo") as scratch:
        files = [str(scratch / f"{index}.png") for index in range(len(images))]
        for image, file in zip(images, files, strict=True):
            image.save(file)
        # Remote code is copied to HF_MODULES_CACHE, which should not be the user's cache.
        settings = {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
        env = os.environ | settings | {"TRANSFORMERS_VERBOSITY": "error"}
        program = [sys.executable, "-c", FRESH_PROGRAM, str(folder.absolute()), *files]
        process = subprocess.run(program, capture_output=True, text=True, cwd=scratch, env=env, check=False)
    if process.returncode:
        problem = process.stderr.strip()
        if number := re.match(r"\w+Error: \[Errno (\d+)\]", problem.rpartition("\n")[2]):
            with explain_write_errors(scratch.parent):
                raise OSError(int(number[1]), os.strerror(int(number[1])))
        raise RuntimeError(f"loading the model in a new process failed:\n{problem}")
    answer = json.loads(process.stdout.strip().splitlines()[-1])
    pairs = zip(best.values.tolist(), answer["probabilities"], strict=True)
    return FreshComparison(
        import_error=answer["import_error"],
        true_classes=data.label_names,
        predicted_here=[names[index] for index in best.indices.tolist()],
        predicted_without_package=answer["labels"],
        largest_difference=max(abs(probability - fresh_probability) for probability, fresh_probability in pairs),
    )
