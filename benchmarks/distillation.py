"""How sure are students? Accuracy and calibration with and without label smoothing and a teacher, on the digits.

    python benchmarks/distillation.py [--output benchmarks/results/distillation.jsonl] [--teacher FOLDER] [--limit N]
    python benchmarks/distillation.py --summary        # the table of what is there, no runs

Data: the UCI digits (1,257 / 180 / 360 for training, validation and test) at 16x16 px. The teacher is a ViT that is
trained once with the recipe "digits" but for the label smoothing. The student has a seventh of its parameters and is
trained for 40 epochs with that recipe, but without any variation of the images; 3 seeds a way:

    plain      labels alone, no smoothing
    smoothing  labels smoothed by 0.1 (arXiv 1512.00567)
    logit      plain, and 0.1 * KL * T^2 with the teacher at T = 3 (arXiv 1503.02531, weights of arXiv 2012.12877)
    soft       the same on a distillation token with a head of its own
    hard       the teacher's first guess, weight 0.5, on such a token (arXiv 2012.12877)

The best of 10 checkpoints by validation accuracy is judged once on the test images: accuracy, mean negative
log-likelihood, expected calibration error (15 bins, arXiv 1706.04599). One JSON line is written for each finished run,
and what is in the file is not run again.
"""

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_vit import HfViTConfig
from hf_vit.environment import hardware, versions
from hf_vit.training import FinetuneOptions, finetune
from hf_vit.training.tasks.distillation import DistillationOptions

SEEDS = (0, 1, 2)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "logit": {"kind": "logit"},
    "soft": {"kind": "soft"},
    "hard": {"kind": "hard"},
}
TEACHER: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "pooling": "gap",
    "position_embedding": "sincos_2d",
}
STUDENT: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TRAINING: dict[str, Any] = {
    "epochs": 40,
    "evaluations": 10,
    "label_smoothing": 0.0,
    "shift_px": 0.0,
    "rotation_degrees": 0.0,
    "shear_degrees": 0.0,
    "zoom": 0.0,
}
DEFAULT = Path(__file__).parent / "results" / "distillation.jsonl"


def train(
    config: HfViTConfig, folder: Path, way: str, seed: int, teacher: Path | None = None, **values: Any
) -> dict[str, Any]:
    """Train one model on the digits; what its test says."""
    learning = None if teacher is None else DistillationOptions(str(teacher), WAYS[way]["kind"])
    start = time.perf_counter()
    result = finetune(
        config,
        "digits",
        folder,
        recipe="digits",
        distillation=learning,
        options=FinetuneOptions(seed=seed, device="cpu", precision="fp32"),
        **values,
    )
    test = result.test
    return {
        "way": way,
        "seed": seed,
        "accuracy": test.top1,
        "loss": test.loss,
        "ece": test.ece,
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "settings": {} if learning is None else learning.settings(),
        "seconds": round(time.perf_counter() - start, 1),
    }


def measure(output: Path, kept: Path | None, limit: int | None) -> None:
    """Make at most `limit` of the runs that the file does not hold yet; `kept` is the teacher of an earlier run."""
    torch.set_num_threads(1)
    machine = {"date": f"{datetime.date.today()}", "hardware": hardware("cpu"), "versions": versions()}
    done = {(line["way"], line["seed"]) for line in read(output)}
    with tempfile.TemporaryDirectory() as work, output.open("a", encoding="utf-8") as file:
        todo = [(way, seed) for seed in SEEDS for way in WAYS if (way, seed) not in done]
        teacher = kept or Path(work) / "teacher"
        if todo and not teacher.exists():
            found = train(HfViTConfig(**TEACHER), teacher, "teacher", 0, label_smoothing=0.0)
            if ("teacher", 0) not in done:
                file.write(json.dumps(found | machine) + "\n")
                file.flush()
        for way, seed in todo[:limit]:
            taught = teacher if "kind" in WAYS[way] else None
            values = TRAINING | {name: value for name, value in WAYS[way].items() if name != "kind"}
            found = train(HfViTConfig(**STUDENT), Path(work) / f"{way}-{seed}", way, seed, taught, **values)
            file.write(json.dumps(found | machine) + "\n")
            file.flush()
            print(f"{way} {seed}: {found['accuracy']:.2%}, ECE {found['ece']:.2%}, {found['seconds']} s", flush=True)


def read(output: Path) -> list[dict[str, Any]]:
    """The finished runs."""
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else []


def summary(output: Path) -> str:
    """A Markdown table: mean and standard deviation over the seeds."""
    lines = ["| | runs | test accuracy, % | test loss, nats | calibration error, % |", "|---|---|---|---|---|"]
    for way in ("teacher", *WAYS):
        runs = [line for line in read(output) if line["way"] == way]
        if runs:
            cells = [spread([100 * run["accuracy"] for run in runs], 1), spread([run["loss"] for run in runs], 3)]
            lines.append(f"| {way} | {len(runs)} | {' | '.join(cells)} | {spread([100 * r['ece'] for r in runs], 1)} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int) -> str:
    """Mean, and deviation where there are several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT)
    parser.add_argument("--teacher", type=Path, help="folder of the teacher; made where it is not there")
    parser.add_argument("--limit", type=int, help="make at most so many runs now")
    parser.add_argument("--summary", action="store_true")
    arguments = parser.parse_args()
    if not arguments.summary:
        measure(arguments.output, arguments.teacher, arguments.limit)
    print(summary(arguments.output))
