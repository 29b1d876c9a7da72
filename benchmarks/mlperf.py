"""Let MLPerf's LoadGen judge hf_vit and its peers on identical shapes. Needs `pip install mlcommons-loadgen`.

LoadGen asks for noise images of 224 px and times every answer. The contestants are those of `hf-vit bench`, with random
weights, in one thread; glibc keeps freed memory for all. A machine's speed changes from minute to minute, so all
contestants of a cell share a run: they answer in turns of a second, in an order that changes, each for 20 s and 200
queries or more. Results are LoadGen's times of a contestant's answers, from its trace.

SingleStream: one image a query, the next when it is answered: percentiles of the latency, the 99th of at least 1,000
queries. Offline: all images at once, which every contestant computes in batches of 8: images/s.
"""

import itertools
import multiprocessing
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlperf_loadgen as loadgen
import numpy as np
import onnxruntime  # noqa: F401 - here, as the processes of all runs are forks of this one
import openvino  # noqa: F401
import timm  # noqa: F401
import torch
from records import Job, Records, read_plan, script_options

from hf_vit.environment import keep_freed_memory
from hf_vit.speed.measuring import others_load
from hf_vit.speed.peers import DTYPES, Shape, build, find_obstacle

SECONDS, QUERIES, MANY, IMAGES, WARM_UP, TURN = 20, 200, 1000, 64, 2, 1
BATCHES = {"SingleStream": 1, "Offline": 8}
PERCENTILES = (50, 90, 99)
SAMPLE = re.compile(r'"sample_seq":(\d+),.*"complete_ns":(\d+)')


@dataclass(frozen=True)
class Plan:
    """The cells, all combinations, and those who take part."""

    variants: tuple[str, ...] = ("S/16", "B/16", "R26+S/32", "DINOv3-B/16")
    dtypes: tuple[str, ...] = tuple(DTYPES)
    scenarios: tuple[str, ...] = tuple(BATCHES)
    contestants: tuple[str, ...] = (
        "hf_vit optimized, openvino", "transformers, openvino", "timm, openvino", "hf_vit optimized", "transformers",
        "timm", "hf_vit optimized, onnxruntime",
    )  # fmt: skip


class Turns:
    """The contestants of a cell, which answer in turns.

    Attributes:
        rates: images/s of the warm-up.
        answered: the contestant of every image, in LoadGen's order.
    """

    def __init__(self, names: Iterable[str], shape: Shape, dtype: torch.dtype, batch: int) -> None:
        names = [name for name in names if find_obstacle(name, shape, False, dtype) is None]
        self.models = {name: build(name, shape, dtype).eval() for name in names}
        self.images, self.batch = shape.images(IMAGES, dtype, "cpu"), batch
        self.rates = {name: self._warm_up(name) for name in names}
        self.answered: list[str] = []
        self._random, self._waiting, self._end = random.Random(0), list[str](), 0.0

    @torch.inference_mode()
    def _warm_up(self, name: str) -> float:
        model, images, count = self.models[name], self.images[: self.batch], 0
        model(images)  # an engine may compile
        start = time.perf_counter()
        while (seconds := time.perf_counter() - start) < WARM_UP:
            model(images)
            count += len(images)
        return count / seconds

    @torch.inference_mode()
    def answer(self, samples: list[Any]) -> None:
        """Answer queries; LoadGen calls it."""
        for begin in range(0, len(samples), self.batch):
            if time.perf_counter() > self._end:
                self._waiting = self._waiting or self._random.sample(list(self.models), len(self.models))
                self._name, self._end = self._waiting.pop(), time.perf_counter() + TURN
            part = samples[begin : begin + self.batch]
            self.models[self._name](self.images[[sample.index for sample in part]])
            loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample.id, 0, 0) for sample in part])
            self.answered += [self._name] * len(part)


def run(names: Iterable[str], job: Job) -> dict[str, Any]:
    keep_freed_memory()
    turns = Turns(names, Shape(job["variant"]), DTYPES[job["dtype"]], BATCHES[job["scenario"]])
    seconds = 1.03 * len(turns.rates) * max(SECONDS, QUERIES / min(turns.rates.values()))
    settings, log, output = loadgen.TestSettings(), loadgen.LogSettings(), loadgen.LogOutputSettings()
    settings.scenario, settings.mode = getattr(loadgen.TestScenario, job["scenario"]), loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = round(1000 * seconds)
    settings.offline_expected_qps = statistics.fmean(turns.rates.values())
    system = loadgen.ConstructSUT(turns.answer, lambda: None)
    library = loadgen.ConstructQSL(IMAGES, IMAGES, lambda _: None, lambda _: None)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as background:
        output.outdir, output.copy_summary_to_stdout = folder, False
        log.log_output, log.enable_trace = output, True
        load = background.submit(others_load, 0.9 * seconds)
        loadgen.StartTestWithLogSettings(system, library, settings, log)
        is_valid = "Result is : VALID" in (Path(folder) / "mlperf_log_summary.txt").read_text()
        trace = (Path(folder) / "mlperf_log_trace.json").read_text()
    times = [int(end) / 1e6 for _, end in sorted((int(number), end) for number, end in SAMPLE.findall(trace))]
    if job["scenario"] == "Offline":  # from the beginning, not from the last answer
        times = [end - start for start, end in itertools.pairwise([0.0, *times])]
    times_by_name: dict[str, list[float]] = {name: [] for name in turns.rates}
    for name, milliseconds in zip(turns.answered, times, strict=True):
        times_by_name[name].append(milliseconds)
    return {
        "is_valid": is_valid,
        "others_load": round(load.result(), 2),
        "packages": {name: version(name) for name in ("mlcommons-loadgen", "openvino", "onnxruntime", "timm")},
        "contestants": {name: summarize(job["scenario"], times) for name, times in times_by_name.items()},
    }


def summarize(scenario: str, times: list[float]) -> dict[str, float]:
    """Return images/s and, of single images, percentiles of the latency, from the ms of every image."""
    result = {"queries": len(times), "seconds": sum(times) / 1000, "images_per_second": 1000 * len(times) / sum(times)}
    if scenario == "SingleStream":
        known = [percentile for percentile in PERCENTILES if percentile < 99 or len(times) >= MANY]
        result |= {f"p{percentile}_ms": float(np.percentile(times, percentile)) for percentile in known}
    return {name: round(value, 3) for name, value in result.items()}


def run_alone(names: Iterable[str], job: Job, _: list[dict[str, Any]]) -> dict[str, Any]:
    """Run a job in a process of its own, which returns its memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(run, names, job).result()


def main() -> None:
    arguments = script_options(__doc__, "mlperf.jsonl", Plan).parse_args()
    plan = read_plan(Plan, arguments)
    cells = itertools.product(plan.variants, plan.dtypes, plan.scenarios)
    jobs = [dict(zip(("variant", "dtype", "scenario"), cell, strict=True)) for cell in cells]
    Records(arguments.output).work([(job, ()) for job in jobs], partial(run_alone, plan.contestants))


if __name__ == "__main__":
    main()
