"""Pre-training as carefully tuned as what it is compared with: rates of its own for each objective and label budget.

    python benchmarks/pretraining_rates.py [--scale 1.0]    # goes on from the records that are there
    python benchmarks/pretraining_rates.py --summary        # the tables of these, no runs

Model, data, steps and variation are those of pretraining.py; masked patches come with each of the paper's targets
(arXiv 2010.11929, B.1.2). For each objective, data set and number of labels every pair of a pre-training and a
fine-tuning rate is tried with seed 0; the best on VALIDATION images is run with five seeds, and each of those looks
once at the test images. Those from scratch have fine-tuning's rates to choose from, the others these times
pre-training's; "scratch, long" is fine-tuned for the steps of both. --scale 4 trains for 800 steps and 800.

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
load = functools.cache(base.load)


def trials(data: str, start: str, labels: int, scale: float) -> list[Job]:
    """Every pair of rates, with seed 0."""
    rates = RATES if not start.startswith("scratch") else (0.0,)
    same = {"kind": "trial", "data": data, "start": start, "labels": labels, "seed": 0, "scale": scale}
    return [same | {"rate": rate, "tuning_rate": tuning} for rate, tuning in itertools.product(rates, TUNING_RATES)]


def jobs(scale: float) -> Iterator[tuple[Job, list[Job]]]:
    """Each with the trials that choose its rates; side by side what begins with the same encoder."""
    for data, start in itertools.product(DATA, STARTS):
        of_labels = {labels: trials(data, start, labels, scale) for labels in LABELS}
        every = itertools.chain.from_iterable(of_labels.values())
        yield from ((trial, []) for trial in sorted(every, key=lambda trial: trial["rate"]))
        for seed, labels in itertools.product(SEEDS, LABELS):
            same = {"data": data, "start": start, "labels": labels, "seed": seed, "scale": scale}
            yield {"kind": "run", **same}, of_labels[labels]


def work(records: Records, scale: float, runner: str = "local", address: str | None = None) -> None:
    """Do what is left and nobody else does, until nothing is left."""
    records.work(list(jobs(scale)), do, runner, address)


def do(job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """A trial at its own rates; a run at those that are best on validation images, of equally good ones the first."""
    return carry_out(job, max(trials, key=lambda trial: trial["accuracy"], default=job))


def carry_out(job: Job, rates: dict[str, Any]) -> dict[str, Any]:
    """Pre-train and fine-tune at these rates; a trial is judged on validation images, a run on test images."""
    data, scale = load(job["data"]), job["scale"]
    steps, tuning = (max(1, int(count * scale)) for count in (base.STEPS, base.TUNING_STEPS))
    run = base.Run("main", job["data"], STARTS[job["start"]], job["seed"])
    tuning += steps if job["start"] == "scratch, long" else 0
    model = base.fine_tune(run, encoder(run, steps, rates["rate"]), data, job["labels"], rates["tuning_rate"], tuning)
    split = "validation" if job["kind"] == "trial" else "test"
    return {"rate": rates["rate"], "tuning_rate": rates["tuning_rate"], "accuracy": base.accuracy(model, data, split)}


@functools.lru_cache(maxsize=1)
def encoder(run: base.Run, steps: int, rate: float) -> Any:
    """Pre-trained once for all that a process begins with it, one after the other; fine-tuning copies it."""
    return base.pretrain(run, load(run.data), steps, rate)


def summary(records: Records, scale: float) -> str:
    """A table a data set: test accuracy in %, mean and standard deviation of the seeds, and the rates chosen."""
    lines: list[str] = []
    for data in DATA:
        head = " | ".join(f"{labels or 'all'}{' a class' if labels else ''} | rates" for labels in LABELS)
        lines += [f"\n{data}\n", f"| | {head} |", "|---" * (1 + 2 * len(LABELS)) + "|"]
        for start in STARTS:
            cells: list[str] = []
            for labels in LABELS:
                wanted = {"kind": "run", "data": data, "start": start, "labels": labels, "scale": scale}
                runs = [run for seed in SEEDS if (run := records.find(wanted | {"seed": seed}))]
                scores = [100 * run["accuracy"] for run in runs]
                spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
                cells.append(f"{statistics.fmean(scores):.1f}{spread}" if scores else "")
                cells.append(f"{runs[0]['rate']:g}, {runs[0]['tuning_rate']:g}" if runs else "")
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
