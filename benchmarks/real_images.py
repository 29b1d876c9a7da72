"""Train on real images of 28 px: from scratch, with few and with many of them, and after learning without labels.

Fashion-MNIST (arXiv 1708.07747). The last 5,000 training images are the validation split everywhere; each run evaluates
the 10,000 test images once. Subsets are nested and balanced. All images are moved by up to 2 px and flipped.

1. scale: ViT, Hybrid, Axial and BiT of equal FLOPs, with equal steps on 100 to 55,000 images (figures 3 to 5 of arXiv
   2010.11929 in small). Trials of a third of the steps at two sizes choose the rate on validation images for all sizes
   that are nearer to this one (as ratios). Before a model's first run with all images, a scaling law (arXiv 2106.04560)
   that is fitted to its errors with fewer is recorded with what it predicts.
2. scratch: tries of recipes and models below a million parameters at equal FLOPs on validation images, then the best
   one long, and a ResNet for as many CPU seconds.
3. pretraining: a ViT learns from all training images without labels, and is fine-tuned on 10, 100 or 1,000 images a
   class. Trials with seed 0 and 100 images a class choose both rates. "scratch, long" has the steps of both.
4. few: a pretrained encoder (--tower, a converted folder; its image processor gives the size) on 1 to 1,000 labels a
   class; recorded with the tower of real_weights.py at 56 px, with ImageNet's mean and std (0.485, 0.456, 0.406; 0.229,
   0.224, 0.225) in its config and image processor. Trials with 10 labels a class choose the rate of each method, but of
   --tune auto. The same on hf_vit's "photos" with up to 100 labels a class.

A killed training goes on from its last checkpoint; its CPU seconds are those of all its processes.
"""

import hashlib
import itertools
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_scale import predict
from records import Job, PlannedJob, Records, read, read_plan, script_options
from script import CPU, count_parameters, move_into_place, name_own, settle, vit_sizes
from small_trainings import subset
from tables import TABLES, filter_runs, group
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import HfAxialViTConfig, HfBitConfig, HfHybridViTConfig, HfViTConfig
from hf_vit.cost.flops import forward_flops
from hf_vit.data import load_data
from hf_vit.data.idx import read_idx
from hf_vit.data.image_data import get_tables
from hf_vit.evaluation import evaluate
from hf_vit.results.figures import make_figure, save_figure
from hf_vit.training import finetune, pretrain

SIDE, CLASSES, VALIDATION = 28, 10, 5_000
ALL = 60_000 - VALIDATION
_VIT: dict[str, Any] = vit_sizes(64, 256, 2, image_size=SIDE, pooling="gap", num_labels=CLASSES)
_WIDE: dict[str, Any] = vit_sizes(128, 384, 4, num_hidden_layers=3, pooling="gap", num_labels=CLASSES)
MODELS: dict[str, Any] = {
    # 15 to 17 million FLOPs an image and 7x7 tokens, fixed before any training.
    "ViT": HfViTConfig(patch_size=4, num_hidden_layers=3, **_VIT),
    "Hybrid": HfHybridViTConfig(stage_depths=(1,), stem_width=32, num_hidden_layers=2, **_VIT),
    "Axial": HfAxialViTConfig(patch_size=4, num_hidden_layers=2, **_VIT | vit_sizes(56, 224, 2)),
    "BiT": HfBitConfig(image_size=SIDE, stage_depths=(3, 3), stem_width=32, num_labels=CLASSES),
    # Below a million parameters, for training from scratch. At 56 px the stem's stride of 8 leaves 7x7 tokens again.
    "hybrid, 28 px": HfHybridViTConfig(image_size=SIDE, stage_depths=(2,), stem_width=64, **_WIDE),
    "hybrid, 56 px": HfHybridViTConfig(image_size=2 * SIDE, stage_depths=(2, 2), stem_width=32, **_WIDE),
    "ResNet, 28 px": HfBitConfig(image_size=SIDE, stage_depths=(4, 4), stem_width=32, num_labels=CLASSES),
    "ResNet, 56 px": HfBitConfig(image_size=2 * SIDE, stage_depths=(2, 2, 2), stem_width=32, num_labels=CLASSES),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {"muon": {"momentum": 0.95}, "adamw": {}}
FAMILIES = ("ViT", "Hybrid", "Axial", "BiT")
VARIED = {"random_resized_crop": (0.0, 0.0), "shift_px": 2, "horizontal_flip": 0.5}
SETTINGS: dict[str, Any] = {"recipe": "default-small", "evaluations": 2, **VARIED, **CPU}
_LONG = {"batch_size": 128, "learning_rate": 1e-2, "average_decay": 0.99, "optimizer": "muon", **OPTIMIZERS["muon"]}
# name -> (model, settings beside those of all); those that were given up stay here, as their tries stay in the record.
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, _LONG) for name in MODELS if "px" in name} | {
    "hybrid, 28 px, rate 3e-3": ("hybrid, 28 px", _LONG | {"learning_rate": 3e-3}),
}
PRETRAINING_BATCH = 128  # a fine-tuning has that of the scale part
PARTS = ("scale", "scratch", "pretraining", "few")
FROZEN = {"k-NN": "knn", "probe": "linear-probe"}
# what is trained -> the rates that are tried
TUNED: dict[str, tuple[float, ...]] = {
    "head": (1e-3, 1e-2), "last-blocks": (3e-4, 1e-3), "lora": (1e-3, 1e-2), "all": (1e-4, 3e-4, 1e-3), "auto": (),
}  # fmt: skip
CLOTHES, PHOTOS = "clothes", 100  # photographs for training, of a class
FEW_CLASSES = {CLOTHES: CLASSES, "photos": 8}
STARTS = ("scratch", "masked-patch", "next-patch", "contrastive", "scratch, long")


@dataclass(frozen=True)
class Plan:
    """The plan of the experiment; its fields are the script's options."""

    parts: tuple[str, ...] = PARTS
    models: tuple[str, ...] = FAMILIES
    sizes: tuple[int, ...] = (100, 300, 1_000, 3_000, 10_000, ALL)
    chosen_at: tuple[int, ...] = (1_000, 10_000)
    seeds: tuple[int, ...] = (0, 1, 2)
    optimizer: str = "muon"  # AdamW was tried first; the trials say why it was given up
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    steps: int = 3_000
    batch_size: int = 32
    tries: tuple[str, ...] = tuple(CANDIDATES)
    try_teraflops: float = 12.0  # of forward passes
    best: str = ""  # of the tries, for the long runs; none yet
    beside: str = "ResNet, 28 px"
    long_epochs: int = 60
    tuned_on: tuple[int, ...] = (100, 1_000, 10_000)  # images with labels
    pretraining_steps: int = 2_000
    tuning_steps: int = 2_000
    pretraining_rates: tuple[float, ...] = (1e-3, 3e-3)
    tuning_rates: tuple[float, ...] = (3e-3, 1e-2)
    tuning_chosen_at: int = 1_000  # images with labels
    few_labels: tuple[int, ...] = (1, 10, 100, 1_000)  # of a class
    few_steps: int = 300

    def jobs(self) -> list[PlannedJob]:
        """Return all jobs with those they depend on, the most telling first."""
        jobs = (self.scale_jobs, self.scratch_jobs, self.pretraining_jobs, self.few_jobs)
        jobs_of = dict(zip(PARTS, jobs, strict=True))
        return [job for part in self.parts for job in jobs_of[part]()]

    def scale_job(self, kind: str, model: str, images: int, seed: int, **more: Any) -> Job:
        steps = max(1, self.steps // 3) if kind == "trial" else self.steps
        same = {"part": "scale", "kind": kind, "model": model, "images": images, "seed": seed}
        return same | {"steps": steps, "batch_size": self.batch_size, "optimizer": self.optimizer} | more

    def trials(self, model: str, images: int) -> list[Job]:
        """Return the trials that choose the rate for this number of images."""
        near = min(self.chosen_at, key=lambda size: abs(math.log(size / images)))
        return [self.scale_job("trial", model, near, 0, learning_rate=rate) for rate in self.rates]

    def scale_jobs(self) -> Iterator[PlannedJob]:
        fewer = sorted(size for size in self.sizes if size < ALL)
        runs = {cell: self.scale_job("run", *cell) for cell in itertools.product(self.models, fewer, self.seeds)}
        for near in self.chosen_at:
            sizes = [size for size in fewer if self.trials("ViT", size)[0]["images"] == near]
            yield from ((trial, []) for model in self.models for trial in self.trials(model, near) if sizes)
            for seed, size, model in itertools.product(self.seeds, sizes, self.models):
                yield runs[model, size, seed], self.trials(model, size)
        if ALL not in self.sizes:
            return
        for model in self.models:
            own = [run for (name, _, _), run in runs.items() if name == model]
            yield self.scale_job("prediction", model, ALL, 0), own
        for seed, model in itertools.product((0, 1), self.models):
            if seed == 0 or model in ("ViT", "BiT"):
                needed = [*self.trials(model, ALL), self.scale_job("prediction", model, ALL, 0)]
                yield self.scale_job("run", model, ALL, seed), needed

    def scratch_jobs(self) -> Iterator[PlannedJob]:
        def job(kind: str, candidate: str, seed: int, **more: Any) -> Job:
            return {"part": "scratch", "kind": kind, "candidate": candidate, "seed": seed} | more

        tries = {name: job("trial", name, 0, teraflops=self.try_teraflops) for name in self.tries}
        yield from ((each, []) for each in tries.values())
        for seed in self.seeds if self.best else ():
            long = job("run", self.best, seed, epochs=self.long_epochs)
            yield long, [tries[self.best]]
            yield (
                job("run", self.beside, seed, seconds_of=self.best, epochs=self.long_epochs),
                [tries[self.beside], long],
            )

    def pretraining_jobs(self) -> Iterator[PlannedJob]:
        def job(kind: str, seed: int, start: str, **more: Any) -> Job:
            same = {"part": "pretraining", "kind": kind, "start": start, "seed": seed}
            return same | {"pretraining_steps": self.pretraining_steps, "tuning_steps": self.tuning_steps} | more

        for seed, start in itertools.product(self.seeds, STARTS):
            rates = () if start.startswith("scratch") else self.pretraining_rates
            tried = [(job("encoder", 0, start, learning_rate=rate), {"learning_rate": rate}) for rate in rates]
            yield from ((encoder, []) for encoder, _ in tried)
            trials = [
                (job("trial", 0, start, images=self.tuning_chosen_at, tuning_rate=tuning_rate, **values), needed)
                for tuning_rate in self.tuning_rates
                for needed, values in [([encoder], values) for encoder, values in tried] or [([], {})]
            ]
            yield from trials
            chosen = [trial for trial, _ in trials]
            encoders = [job("encoder", seed, start)] if rates and seed else []  # at the rate that was chosen
            yield from ((encoder, chosen) for encoder in encoders)
            for images in self.tuned_on:
                yield job("run", seed, start, images=images), [*chosen, *encoders]

    def few_job(self, data: str, kind: str, method: str, labels: int, seed: int, **more: Any) -> Job:
        same = {"part": "few", "kind": kind, "method": method, "images": labels * FEW_CLASSES[data], "seed": seed}
        steps = {} if method in FROZEN else {"steps": self.few_steps}
        return same | ({} if data == CLOTHES else {"data": data}) | steps | more

    def few_jobs(self) -> Iterator[PlannedJob]:
        for data in FEW_CLASSES:
            trials = {
                method: [self.few_job(data, "trial", method, 10, 0, learning_rate=rate) for rate in rates]
                for method, rates in TUNED.items()
            }
            yield from ((trial, []) for own in trials.values() for trial in own)
            counts = [labels for labels in self.few_labels if data == CLOTHES or labels <= PHOTOS]
            for seed, labels, method in itertools.product(self.seeds, counts, (*FROZEN, *TUNED)):
                yield self.few_job(data, "run", method, labels, seed), trials.get(method, [])


@dataclass(frozen=True)
class Trainings:
    """Carries out jobs, with the images of a folder of IDX files, and keeps unfinished trainings in another."""

    plan: Plan
    data: Path
    kept: Path
    tower: Path

    def run(self, job: Job, needed: list[dict[str, Any]]) -> dict[str, Any]:
        if job["kind"] == "prediction":
            return predict(job, needed)
        parts = {"scale": self.scale, "scratch": self.scratch, "pretraining": self.pretraining, "few": self.few}
        return parts[job["part"]](job, needed)

    def scale(self, job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
        rate = choose_trial(job, trials)["learning_rate"]
        settings = {name: job[name] for name in ("steps", "batch_size", "optimizer")} | OPTIMIZERS[job["optimizer"]]
        settings["learning_rate"] = rate
        return {"learning_rate": rate} | self.train(
            job, MODELS[job["model"]], self.images(job["images"], job["seed"]), settings
        )

    def scratch(self, job: Job, needed: list[dict[str, Any]]) -> dict[str, Any]:
        model, settings = CANDIDATES[job["candidate"]]
        if job["kind"] == "trial":
            steps = job["teraflops"] * 1e12 / forward_flops(MODELS[model]) / settings["batch_size"]
        elif "seconds_of" in job:
            trial, long = needed
            steps = long["cpu_seconds"] / trial["cpu_seconds"] * trial["steps"]
        else:
            steps = job["epochs"] * ALL / settings["batch_size"]
            settings = settings | {"average_decay": 0.999, "evaluations": 20}
        settings = settings | {"steps": max(1, round(steps))}
        return {"model": model, "steps": settings["steps"]} | self.train(
            job, MODELS[model], self.images(ALL, job["seed"]), settings
        )

    def pretraining(self, job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
        if job["kind"] == "encoder":
            return self.learn_encoder(job, choose_trial(job, trials)["learning_rate"])
        start: Any = MODELS["ViT"]
        steps = job["tuning_steps"] + ("long" in job["start"]) * job["pretraining_steps"]
        best = choose_trial(job, trials)
        rates = {name: best[name] for name in ("learning_rate", "tuning_rate") if name in best}
        if "learning_rate" in rates:
            start = str(self.encoder_folder(job | (rates if job["seed"] == 0 else {})))
        settings: dict[str, Any] = {"optimizer": self.plan.optimizer} | OPTIMIZERS[self.plan.optimizer]
        settings |= {"learning_rate": best["tuning_rate"], "steps": steps, "batch_size": self.plan.batch_size}
        return rates | self.train(job, start, self.images(job["images"], job["seed"]), settings)

    def few(self, job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
        size = AutoImageProcessor.from_pretrained(self.tower).size["height"]
        subject = job.get("data", CLOTHES)
        data = self.images(job["images"], job["seed"]) if subject == CLOTHES else self.photos(job, size)
        if job["method"] in FROZEN:
            protocol = FROZEN[job["method"]]
            options = {"neighbors": [1 if job["images"] == FEW_CLASSES[subject] else 5]} if protocol == "knn" else {}
            with tempfile.TemporaryDirectory() as output:
                run = evaluate(
                    str(self.tower), data, protocol=protocol, output=output, device="cpu", progress=False, **options
                )
            return {"image_size": size, "test_accuracy": run.result.values()["accuracy"][-1]}  # of the last layer
        settings: dict[str, Any] = {"tune": job["method"], "steps": job["steps"], "batch_size": self.plan.batch_size}
        if job["method"] != "auto":
            settings["learning_rate"] = choose_trial(job, trials)["learning_rate"]
        settings |= {"image_size": size, "evaluations": 1}
        result = self.train(job, str(self.tower), data, settings)
        return {"image_size": size, "learning_rate": settings.get("learning_rate")} | result

    def learn_encoder(self, job: Job, rate: float) -> dict[str, Any]:
        place = self.encoder_folder(job)

        def learn(output: Path, report: Callable[[str], None]) -> None:
            pretrain(
                MODELS["ViT"], self.images(ALL, 0), output, objective=job["start"], resume=True, report=report,
                learning_rate=rate, steps=job["pretraining_steps"], seed=job["seed"],
                batch_size=PRETRAINING_BATCH, evaluations=2, **CPU,
            )  # fmt: skip
            move_into_place(output, place)

        return {"learning_rate": rate} | self.resumable(job, learn)[1]

    def encoder_folder(self, job: Job) -> Path:
        values = (job["start"], job.get("learning_rate", "chosen"), job["seed"], job["pretraining_steps"])
        return self.kept / "encoders" / "-".join(map(str, values))

    def has_encoder(self, job: Job) -> bool:
        return job["kind"] != "encoder" or self.encoder_folder(job).exists()

    def train(self, job: Job, model: Any, data: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Train a classifier; return its validation accuracy, and of a run, not of a trial, its test accuracy."""
        learn = partial(finetune, model, data, resume=True, seed=job["seed"], **SETTINGS | settings)
        result, seconds = self.resumable(job, lambda output, report: learn(output, report=report))
        accuracies = {"validation_accuracy": result.validation["accuracy"]}
        if job["kind"] != "trial":
            accuracies["test_accuracy"] = result.test.top1
        if not isinstance(model, str):
            parameters = count_parameters(AutoModelForImageClassification.from_config(model))
            accuracies |= {"parameters": parameters, "forward_flops": forward_flops(model)}
        return accuracies | seconds

    def resumable(self, job: Job, learn: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
        """Run a training in the folder of its job; return its result and the CPU seconds of earlier processes."""
        name = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:16]
        output, clock = self.kept / name, self.kept / f"{name}.seconds"
        earlier, start = float(clock.read_text()) if clock.exists() else 0.0, time.process_time()

        def report(line: str) -> None:
            clock.write_text(str(earlier + time.process_time() - start))
            print(line, flush=True)

        result = learn(output, report)
        shutil.rmtree(output)
        clock.unlink(missing_ok=True)
        return result, {"earlier_cpu_seconds": earlier}

    def images(self, count: int, seed: int) -> str:
        """Return a folder of IDX files with this many training images."""
        folder = self.kept / "images" / (f"{count}-{seed}" if count < ALL else "all")
        if not folder.exists():
            names = {"images": "images-idx3-ubyte", "labels": "labels-idx1-ubyte"}
            arriving = name_own(folder)
            arriving.mkdir(parents=True)
            for name in names.values():
                train, test = (read_idx(next(self.data.glob(f"{split}-{name}*"))) for split in ("train", "t10k"))
                labels = read_idx(next(self.data.glob(f"train-{names['labels']}*")))[:ALL]
                chosen = subset(torch.tensor(labels), count, seed).numpy() if count < ALL else slice(ALL)
                for split, values in (("train", train[chosen]), ("validation", train[ALL:]), ("test", test)):
                    write_idx(arriving / f"{split}-{name}", values)
            settle(arriving, folder)
        return str(folder)

    def photos(self, job: Job, size: int) -> str:
        """Return class folders of crops of photographs, of which the job's number are for training."""
        folder = self.kept / "images" / f"photos-{job['images']}-{job['seed']}"
        if not folder.exists():
            data = load_data("photos", image_size=(size, size))
            arriving = name_own(folder)
            for split, table in get_tables(data).items():
                labels = torch.tensor(list(table["label"]))
                rows = subset(labels, job["images"], job["seed"]) if split == "train" else torch.arange(len(labels))
                for row in rows.tolist():
                    path = arriving / split / data.label_names[labels[row]] / f"{row}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    table[row]["image"].save(path)
            settle(arriving, folder)
        return str(folder)


def choose_trial(job: Job, needed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trial that is best on validation images, or the job itself if it needed none."""
    trials = [record for record in needed if record["kind"] == "trial"]
    return max(trials, key=lambda trial: trial["validation_accuracy"], default=job)


def draw(path: Path) -> None:
    """Draw accuracy against training images beside the record."""
    runs = sorted(filter_runs(read(path), part="scale", kind="run", optimizer="muon"), key=lambda run: run["images"])
    figure = make_figure(6, 4)
    axes = figure.add_subplot()
    for model, own in group(runs, "model").items():
        cells = [[100 * run["test_accuracy"] for run in cell] for cell in group(own, "images").values()]
        means = [statistics.fmean(cell) for cell in cells]
        spread = [[mean - min(cell), max(cell) - mean] for mean, cell in zip(means, cells, strict=True)]
        errors = list(zip(*spread, strict=True))
        axes.errorbar(list(group(own, "images")), means, errors, marker="o", capsize=3, label=model)
    axes.set(xscale="log", xlabel="training images", ylabel="test accuracy (%): mean, lowest and highest seed")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    save_figure(figure, path.with_suffix(".png"))


def write_idx(path: Path, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(header + np.ascontiguousarray(values).tobytes())


def main() -> None:
    options = script_options(
        __doc__, "real_images.jsonl", Plan, models=FAMILIES, optimizer=OPTIMIZERS, tries=CANDIDATES, parts=PARTS
    )
    options.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"), help="IDX files")
    options.add_argument("--kept", type=Path, default=Path("build/real_images"), help="unfinished trainings, encoders")
    options.add_argument("--tower", type=Path, default=Path("build/real_weights/tower"), help="encoder of the part few")
    options.add_argument("--figure", action="store_true", help="draw what is in the record; train nothing")
    arguments = options.parse_args()
    plan = read_plan(Plan, arguments)
    trainings = Trainings(plan, arguments.data, arguments.kept, arguments.tower)
    if not arguments.figure:
        Records(arguments.output).work(plan.jobs(), trainings.run, has_files=trainings.has_encoder)
    for name, table in TABLES.items():
        if name.startswith("real_images"):
            print(table(arguments.output))
    draw(arguments.output)


if __name__ == "__main__":
    main()
