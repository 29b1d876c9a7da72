"""Measure the effect of keeping freed memory (`hf_vit.keep_freed_memory`) in paired processes.

Every measurement is a process of its own, that of "without" with a setting of glibc's which changes nothing else and
has the function leave the process alone. Memory is the most the process ever held.
"""

import os
import statistics
from functools import partial

from script import Script, alternate, parser, run_program

from hf_vit.speed.measuring import compute_speed_ratio

PROGRAM = """
import json, resource, statistics, time
import torch
import hf_vit
from hf_vit.environment import keep_freed_memory
from hf_vit.families import find_family

torch.set_num_threads({threads})
keep_freed_memory()
config = hf_vit.variant_config({variant!r}, num_labels=1000)
model = find_family(config.model_type).classes["classification"](config)
images, labels = torch.randn({batch}, 3, 224, 224), torch.randint(1000, ({batch},))
if {work!r} == "optimized":
    hf_vit.optimize_for_inference(model, engine="torch")

def work():
    if {work!r} == "training":
        model.train()(pixel_values=images, labels=labels).loss.backward()
        model.zero_grad()
    else:
        with torch.inference_mode():
            model.eval()(images)

seconds = []
for turn in range(-1, 4):
    started = time.perf_counter()
    work()
    if turn >= 0:
        seconds.append(time.perf_counter() - started)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"seconds": statistics.median(seconds), "bytes": used.ru_maxrss * 1024}}))
"""
WITHOUT = {"MALLOC_ARENA_MAX": str(8 * (os.cpu_count() or 1))}  # glibc's own limit
CELLS = [
    *(("S/16", work, 32) for work in ("as loaded", "optimized", "training")),
    *(("B/16", work, 32) for work in ("as loaded", "optimized")),
    *(("AxialResNet-L", work, 8) for work in ("as loaded", "optimized", "training")),
]


def main() -> None:
    report = Script(parser(__doc__, turns=5).parse_args())
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environments = {"kept": inherited, "without": inherited | WITHOUT}
    for variant, work, batch in CELLS:
        code = PROGRAM.format(variant=variant, work=work, batch=batch, threads=report.options.threads)
        turns = {name: partial(run_program, code, environment=each) for name, each in environments.items()}
        runs = alternate(turns, report.options.turns)
        seconds = {name: [result["seconds"] for result in results] for name, results in runs.items()}
        ratio = compute_speed_ratio(seconds, "kept", "without")
        kept, without = (statistics.median(result["bytes"] for result in runs[name]) for name in ("kept", "without"))
        report.record(variant=variant, work=work, batch=batch, times_as_fast=ratio, memory=round(kept / without, 2))
    report.finish()


if __name__ == "__main__":
    main()
