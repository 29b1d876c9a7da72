"""Pre-training as carefully tuned as what it is compared with: rates of its own for each objective and label budget.

    python benchmarks/pretraining_rates.py [--scale 1.0]    # goes on from the records that are there
    python benchmarks/pretraining_rates.py --summary        # the tables of these, no runs

Model, data, steps and variation are those of pretraining.py; masked patches come with each of the paper's targets
(arXiv 2010.11929, B.1.2). For each objective, data set and number of labels every pair of a pre-training and a
fine-tuning rate is tried with seed 0; the best on VALIDATION images is run with five seeds, and each of those looks
once at the test images. Those from scratch have fine-tuning's rates to choose from, the others these times
pre-training's; "scratch, long" is fine-tuned for the steps of both. --scale 4 trains for 800 steps and 800. A linear
probe of each encoder (see pretraining.py) has the pre-training rate at which it is best on validation images.

Each finished trial or run is a line of the output and is not repeated. Start it in as many processes of one thread as
you like.
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretraining as base
import torch
from records import Job, Records, runner_options

STARTS = {
    "scratch": "scratch",
    "scratch, long": "scratch, long",
    "masked, mean colour": "masked",
    "masked, downsampled": "masked, downsampled",
    "masked, pixels": "masked, pixels",
    "next patch": "next patch",
    "contrast": "contrast",
}
for target in ("downsampled", "pixels"):
    base.STARTS[f"masked, {target}"] = ("masked", {"prediction_target": target}, False)
RATES, TUNING_RATES = (2.5e-4, 1e-3, 4e-3), (5e-4, 1e-3, 2e-3, 4e-3)
DATA, LABELS, SEEDS = ("digits", "photos"), (20, 0), (0, 1, 2, 3, 4)
OUTPUT = Path(__file__).parent / "results" / "pretraining_rates.jsonl"
READINGS = {"run": "fine-tuned", "probe": "linear probe"}
TRIALS = {"run": "trial", "probe": "probe trial"}
load = functools.cache(base.load)


def trials(kind: str, data: str, start: str, labels: int, scale: float) -> list[Job]:
    """Every pair of rates, with seed 0; a probe has none of its own."""
    rates = RATES if not start.startswith("scratch") else (0.0,)
    tunings = [{"tuning_rate": rate} for rate in TUNING_RATES] if kind == "run" else [{}]
    same = {"kind": TRIALS[kind], "data": data, "start": start, "labels": labels, "seed": 0, "scale": scale}
    return [same | {"rate": rate} | tuning for rate, tuning in itertools.product(rates, tunings)]


def read_as(kind: str) -> list[str]:
    """The ways to start that are read so; "scratch, long" leaves no encoder before its fine-tuning."""
    return [start for start in STARTS if kind == "run" or start != "scratch, long"]


def jobs(scale: float) -> Iterator[tuple[Job, list[Job]]]:
    """Each with the trials that choose its rates; side by side what begins with the same encoder."""
    for data, start in itertools.product(DATA, STARTS):
        kinds = [kind for kind in READINGS if start in read_as(kind)]
        of = {(kind, labels): trials(kind, data, start, labels, scale) for kind in kinds for labels in LABELS}
        every = itertools.chain.from_iterable(of.values())
        yield from ((trial, []) for trial in sorted(every, key=lambda trial: trial["rate"]))
        for seed, (kind, labels) in itertools.product(SEEDS, of):
            same = {"data": data, "start": start, "labels": labels, "seed": seed, "scale": scale}
            yield {"kind": kind, **same}, of[kind, labels]


def work(records: Records, scale: float, runner: str = "local", address: str | None = None) -> None:
    """Do what is left and nobody else does, until nothing is left."""
    records.work(list(jobs(scale)), do, runner, address)


def do(job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """A trial at its own rates; a run at those that are best on validation images, of equally good ones the first."""
    return carry_out(job, max(trials, key=lambda trial: trial["accuracy"], default=job))


def carry_out(job: Job, rates: dict[str, Any]) -> dict[str, Any]:
    """Pre-train and fine-tune, or probe, at these rates: a trial is judged on validation, all others on test images."""
    data, scale = load(job["data"]), job["scale"]
    steps, tuning = (max(1, int(count * scale)) for count in (base.STEPS, base.TUNING_STEPS))
    run = base.Run("main", job["data"], STARTS[job["start"]], job["seed"])
    start, is_trial = encoder(run, steps, rates["rate"]), job["kind"] in TRIALS.values()
    if "tuning_rate" not in rates:
        validation, test, reads = base.probe(start, data, job["labels"], job["seed"])
        return {"rate": rates["rate"], "reads": reads, "accuracy": validation if is_trial else test}
    tuning += steps if job["start"] == "scratch, long" else 0
    model = base.fine_tune(run, start, data, job["labels"], rates["tuning_rate"], tuning)
    reached = base.accuracy(model, data, "validation" if is_trial else "test")
    return {"rate": rates["rate"], "tuning_rate": rates["tuning_rate"], "accuracy": reached}


@functools.lru_cache(maxsize=1)
def encoder(run: base.Run, steps: int, rate: float) -> Any:
    """Pre-trained once for all that a process begins with it, one after the other; fine-tuning copies it."""
    return base.pretrain(run, load(run.data), steps, rate)


def summary(records: Records, scale: float) -> str:
    """Two tables a data set: test accuracy in %, mean and standard deviation of the seeds, and the rates chosen."""
    lines: list[str] = []
    for data, kind in itertools.product(DATA, READINGS):
        head = " | ".join(f"{labels or 'all'}{' a class' if labels else ''} | rates" for labels in LABELS)
        lines += [f"\n{data}, {READINGS[kind]}\n", f"| | {head} |", "|---" * (1 + 2 * len(LABELS)) + "|"]
        for start in read_as(kind):
            cells: list[str] = []
            for labels in LABELS:
                wanted = {"kind": kind, "data": data, "start": start, "labels": labels, "scale": scale}
                runs = [run for seed in SEEDS if (run := records.find(wanted | {"seed": seed}))]
                scores = [100 * run["accuracy"] for run in runs]
                spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
                cells.append(f"{statistics.fmean(scores):.1f}{spread}" if scores else "")
                rates = [runs[0][name] for name in ("rate", "tuning_rate") if name in runs[0]] if runs else []
                cells.append(", ".join(f"{rate:g}" for rate in rates))
            lines.append(f"| {start} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scale", type=float, default=1.0, help="of all numbers of steps (a smoke test)")
    runner_options(options)
    options.add_argument("--summary", action="store_true")
    options.add_argument("--output", type=Path, default=OUTPUT)
    asked = options.parse_args()
    torch.set_num_threads(1)
    records = Records(asked.output)
    if not asked.summary:
        work(records, asked.scale, asked.runner, asked.address)
    print(summary(records, asked.scale))


if __name__ == "__main__":
    main()
