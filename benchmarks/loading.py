"""Measure startup: loading a B/16, converting its `.npz`, importing the package, and the program's first answers.

loading: from `from_pretrained` to the first logits, beside transformers' own ViT of the same random weights. Every load
is a process of its own that has imported everything before its clock starts.

conversion: reading a `.npz` as `hf-vit convert` does (open, plan, all checks, turned copies), beside `np.load` of every
array. The promise is a peak of at most 1.3 x the checkpoint + 300 MB.

import_time: CPU seconds of what hf_vit adds to transformers' classes; of the program all, with Python's start.

Memory is the peak of a process (VmHWM) above what the imports take; of loading in parts of the weights' bytes.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from script import Script, alternate, parser, run_program

from hf_vit import conversion

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from originals.google import make_checkpoint

from hf_vit.conversion.fill import load_weights
from hf_vit.conversion.readers import NpzReader
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio

PEAK = """
import json, re, sys, time
from pathlib import Path

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
"""
LOAD = """
import torch
from {module} import {name}

torch.set_num_threads({threads})
images = torch.zeros(1, 3, 224, 224)
before, started, cpu = peak(), time.perf_counter(), time.process_time()
model = {name}.from_pretrained(sys.argv[1])
loaded = time.perf_counter() - started
with torch.inference_mode():
    model(images).logits
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
print(json.dumps({{"loaded": loaded, "seconds": seconds, "cpu": cpu, "bytes": peak() - before}}))
"""
CONTESTANTS = {
    "hf_vit": ("hf_vit", "HfViTForImageClassification"),
    "transformers": ("transformers.models.vit.modeling_vit", "ViTForImageClassification"),
}
CONVERT = """
import transformers, hf_vit.conversion
from hf_vit.models import modeling_hf_vit
from transformers import ViTImageProcessor

before, started = peak(), time.perf_counter()
hf_vit.conversion.convert(sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - started, "bytes": peak() - before}))
"""
IMPORT = """
import json, time
start = time.process_time()
from transformers import PreTrainedModel, AutoModelForImageClassification
between = time.process_time()
import hf_vit
print(json.dumps([between - start, time.process_time() - between]))
"""
COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "hf-vit --help": (["--help"], {}),
    "hf-vit finetune --help": (["finetune", "--help"], {}),
    "hf-vit --version": (["--version"], {}),
    "completion": ([], {"_HF_VIT_COMPLETE": "complete_bash", "COMP_WORDS": "hf-vit finetune --le", "COMP_CWORD": "2"}),
}


def measure_loading(report: Script, folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    ViTForImageClassification(ViTConfig(num_labels=1000)).save_pretrained(folder / "transformers")
    conversion.convert(folder / "transformers", folder / "hf_vit")
    weights = (folder / "hf_vit" / "model.safetensors").stat().st_size
    environment, loads = {**os.environ, "HF_HUB_OFFLINE": "1"}, dict[str, Callable[[], Any]]()
    for name, (module, kind) in CONTESTANTS.items():
        code = PEAK + LOAD.format(module=module, name=kind, threads=report.options.threads)
        loads[name] = partial(run_program, code, folder / name, environment=environment)
    runs = alternate(loads, report.options.turns, warm_up=1)
    titles = {"seconds": "to first logits", "cpu": "CPU seconds of that", "loaded": "from_pretrained alone"}
    for key, title in titles.items():
        measured = {name: [result[key] for result in results] for name, results in runs.items()}
        ratio = compute_speed_ratio(measured, "transformers", "hf_vit")
        seconds = round(compute_quartiles(measured["hf_vit"]).median, 3)
        report.record(what=title, time_of_transformers=ratio, seconds=seconds)
    for name, results in runs.items():
        peak = compute_quartiles([result["bytes"] / weights for result in results])
        report.record(what=f"peak memory of {name}, in weights", peak=peak)


def make_b16(folder: Path) -> dict[str, Path]:
    """Write the arrays of ViT-B/16 with 1,000 labels under the keys of Google's files, stored and compressed."""
    arrays = make_checkpoint(depth=12, heads=12, head_size=64, mlp=3072, patch=(16, 16), grid=(14, 14), labels=1000)
    np.savez(folder / "stored.npz", **arrays)
    with zipfile.ZipFile(folder / "compressed.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for key, value in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, value)
    return {name: folder / f"{name}.npz" for name in ("stored", "compressed")}


def time_read(contestant: str, path: Path) -> float:
    started = time.perf_counter()
    if contestant == "numpy":
        with np.load(path) as file:
            _ = {key: file[key] for key in file.files}
    else:
        with NpzReader(path) as reader:
            _ = load_weights(reader, conversion.plan(reader.shapes)).state
    return time.perf_counter() - started


def measure_conversion(report: Script, folder: Path) -> None:
    for form, path in make_b16(folder).items():
        readers = {name: partial(time_read, name, path) for name in ("reading", "numpy")}
        seconds = alternate(readers, report.options.turns, warm_up=2)
        conversion_run = run_program(PEAK + CONVERT, path, folder / f"out-{form}")
        report.record(
            form=form, megabytes=round(path.stat().st_size / 1e6),
            reading_time_of_numpys=compute_speed_ratio(seconds, "numpy", "reading"),
            reading_seconds=round(compute_quartiles(seconds["reading"]).median, 2),
            conversion_seconds=round(conversion_run["seconds"], 2),
            peak_megabytes=round(conversion_run["bytes"] / 1e6),
            allowed_megabytes=round((1.3 * (folder / "stored.npz").stat().st_size + 300e6) / 1e6),
        )  # fmt: skip


def measure_program(arguments: list[str], variables: dict[str, str]) -> float:
    """Return the CPU seconds of the whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from hf_vit_cli.main import main; main()", *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **variables})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_imports(report: Script, folder: Path) -> None:
    turns = {name: partial(measure_program, *command) for name, command in COMMANDS.items()}
    seconds_by_command = alternate({"imports": partial(run_program, IMPORT), **turns}, report.options.turns, warm_up=1)
    transformers_seconds, added_seconds = zip(*seconds_by_command.pop("imports"), strict=True)
    names = {"import of transformers' classes": transformers_seconds, "import hf_vit, beyond that": added_seconds}
    for name, seconds in (names | seconds_by_command).items():
        report.record(what=name, cpu_seconds=compute_quartiles(seconds))


def main() -> None:
    kinds = {"loading": measure_loading, "conversion": measure_conversion, "import_time": measure_imports}
    options = parser(__doc__, turns=15)
    options.add_argument("kind", choices=kinds)
    report = Script(options.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        kinds[report.options.kind](report, Path(folder))
    report.finish()


if __name__ == "__main__":
    main()
