"""From `from_pretrained` of a B/16 to its first logits, beside transformers' own ViT: seconds and peak memory.

    python benchmarks/loading.py [--turns 15] [--threads N] [--output benchmarks/results/loading.json]

Both folders hold the same random weights. Every load is a process of its own that has imported everything before its
clock starts; the two take turns. Memory is the peak above what the imports take, in parts of the weights' bytes.
"""

import os
import tempfile
from pathlib import Path

from hf_vit.speed.measuring import Script, parser, quartiles, run_program, speed_ratio

PROGRAM = """
import json, re, sys, time
from pathlib import Path
import torch
from {module} import {name}

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

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


def make_folders(folder: Path) -> int:
    """The same B/16 with 1,000 labels as either library saves it; returns the bytes of its weights."""
    from transformers import ViTConfig, ViTForImageClassification

    import hf_vit.conversion as conversion

    ViTForImageClassification(ViTConfig(num_labels=1000)).save_pretrained(folder / "transformers")
    conversion.convert(folder / "transformers", folder / "hf_vit")
    return (folder / "hf_vit" / "model.safetensors").stat().st_size


def run(name: str, folder: Path, threads: int) -> dict[str, float]:
    module, class_name = CONTESTANTS[name]
    code = PROGRAM.format(module=module, name=class_name, threads=threads)
    return run_program(code, folder / name, environment={**os.environ, "HF_HUB_OFFLINE": "1"})


def main() -> None:
    report = Script(parser(__doc__, turns=15).parse_args())
    names = list(CONTESTANTS)
    with tempfile.TemporaryDirectory() as temporary:
        weights = make_folders(Path(temporary))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for turn in range(-1, report.options.turns):
            for name in names if turn % 2 else reversed(names):
                found = run(name, Path(temporary), report.options.threads)
                if turn >= 0:
                    runs[name].append(found)
    for what in ("seconds", "cpu", "loaded"):
        measured = {name: [one[what] for one in found] for name, found in runs.items()}
        report.record(
            what={"seconds": "to first logits", "cpu": "CPU seconds of that", "loaded": "from_pretrained alone"}[what],
            time_of_transformers=speed_ratio(measured, "transformers", "hf_vit"),
            seconds=round(quartiles(measured["hf_vit"]).median, 3),
        )
    for name in names:
        report.record(
            what=f"peak memory of {name}, in weights", peak=quartiles([one["bytes"] / weights for one in runs[name]])
        )
    report.finish()


if __name__ == "__main__":
    main()
