"""Masks and boxes from scratch: what every head and family reaches on generated scenes, held out, in equal CPU time.

    goals      the two pairs that are to reach mIoU 90 and AP50 80 on the test scenes within 10 CPU minutes each
    clutter    Mask R-CNN on scenes with clutter, as long
    families   UperNet and Mask R-CNN on each family's backbone, about equally large, 3 CPU minutes a run
    hours      DETR and Deformable DETR, an hour each

Data: `scenes`, 10,000 to train on, 200 to validate on, 200 to test on, whose photographs are others. One thread.
A run's steps are as many as fit its CPU time, by the CPU seconds of a few steps and of an evaluation that are measured
before it. Where a pair names several learning rates, they are tried first, with seed 0 and a quarter of the time, and
the one with the best score on the VALIDATION scenes is kept. The test scenes are evaluated once a final run.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from records import Job, PlannedJob, Records, script_options
from script import CPU, count_parameters, vit_sizes
from tables import TABLES

import hf_vit
from hf_vit.data import dense_collator, dense_transforms, load_data, transform_split
from hf_vit.evaluation.examination import Examination
from hf_vit.evaluation.protocols.registry import PROTOCOLS, TARGETS
from hf_vit.loading.model import load_model
from hf_vit.loading.start import find_model
from hf_vit.training import finetune
from hf_vit.training.recipes.registry import Recipe, find_recipe
from hf_vit.training.tasks.dense import build_dense_model, make_model_inputs
from hf_vit.training.trainer.optimizers import choose_optimizer

BATCH, EVALUATIONS, HELD_OUT = 16, 3, 200

_VIT = vit_sizes(96, 192, heads=3)
# Backbones of about the same size, whose maps are as fine as their architecture allows.
BACKBONES: dict[str, Any] = {
    "plain": lambda size: hf_vit.HfViTConfig(image_size=size, patch_size=8, num_hidden_layers=6, **_VIT),
    "hybrid": lambda size: hf_vit.HfHybridViTConfig(
        image_size=size, num_hidden_layers=3, stage_depths=(1, 1), stem_width=32, **_VIT
    ),
    "axial": lambda size: hf_vit.HfAxialViTConfig(image_size=size, patch_size=8, num_hidden_layers=4, **_VIT),
    "axial_resnet": lambda size: hf_vit.HfAxialResNetConfig(image_size=size, stem_width=16, stage_depths=(1, 1, 1, 1)),
    "bit": lambda size: hf_vit.HfBitConfig(image_size=size, stem_width=32, stage_depths=(1, 1, 1)),
}
# Fields of the heads, whose libraries' own are made for images of 1,000 px.
# As many as four objects of 20 to 50 px an image need.
_FEW_BOXES: dict[str, Any] = {
    "representation_size": 128, "mask_channels": [32], "anchor_sizes": [20, 32, 48], "rpn_batch_size": 64,
    "box_batch_size": 24, "rpn_pre_nms_top_n": [100, 60], "rpn_post_nms_top_n": [40, 20], "box_score_threshold": 0.01,
    "detections_per_image": 15,
}  # fmt: skip
# As many as three objects, of 20 to 38 px and about as wide as high.
_LARGE_BOXES = _FEW_BOXES | {"anchor_sizes": [16, 24, 36], "anchor_ratios": [1.0]}
_FOUR_MAPS = {"anchor_sizes": [16, 24, 36, 48]}
_DETR: dict[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 20, "dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A head on a backbone, for scenes of one size and a number of CPU minutes."""

    part: str
    task: str
    head: str
    backbone: str
    size: int
    minutes: float
    width: int
    fields: dict[str, Any]
    rates: tuple[float, ...]
    images: int = 10000
    clutter: int = 0
    optimizer: str = "muon"

    @property
    def name(self) -> str:
        return f"{self.part} {self.task} {self.head} {self.backbone}"

    @property
    def data(self) -> str:
        return f"scenes:images={self.images},size={self.size},clutter={self.clutter}"


# Rates chosen on validation scenes, in trials of a CPU minute.
_NO_AUXILIARY = {"use_auxiliary_head": False}
_MAPS = zip(BACKBONES, (_FOUR_MAPS, {}, _FOUR_MAPS, _FOUR_MAPS, {}), strict=True)
PAIRS = [
    Pair("goals", "segmentation", "upernet", "bit", 96, 4, 32, _NO_AUXILIARY, (2e-2,)),
    Pair("goals", "detection", "mask-rcnn", "bit", 64, 4, 32, _LARGE_BOXES, (3e-3,)),
    Pair("clutter", "detection", "mask-rcnn", "bit", 96, 10, 32, _FEW_BOXES, (2e-3,), clutter=1, optimizer="adamw"),
    *(Pair("families", "segmentation", "upernet", each, 64, 3, 32, _NO_AUXILIARY, (5e-3, 2e-2)) for each in BACKBONES),
    *(Pair("families", "detection", "mask-rcnn", each, 64, 3, 32, _LARGE_BOXES | maps, (3e-3, 1e-2))
      for each, maps in _MAPS),
    *(Pair("hours", "detection", head, "hybrid", 96, 60, 64, _DETR, (3e-3,)) for head in ("detr", "deformable-detr")),
]  # fmt: skip


def measure_seconds(pair: Pair) -> tuple[float, float]:
    """Return the CPU seconds of a training step and of one evaluation, each the minimum of three."""
    data = load_data(replace(pair, images=BATCH).data, target=TARGETS[pair.task])
    model, processor = build_dense_model(
        find_model(BACKBONES[pair.backbone](pair.size)), pair.head, data.label_names, width=pair.width, **pair.fields
    )
    training, _ = dense_transforms(processor, TARGETS[pair.task], build_recipe(pair, 1e-3, 1).augmentation, 0)
    images = transform_split(data, "train", training)
    optimizer_class, settings = choose_optimizer(build_recipe(pair, 1e-4, 1))
    optimizer, seconds = optimizer_class(model.parameters(), **settings), list[float]()
    for _ in range(4):
        start = time.process_time()
        batch = dense_collator(images.__getitems__(range(BATCH)))
        model.train()(**make_model_inputs(model, batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    start, num_images = time.process_time(), 40
    PROTOCOLS[pair.task](Examination(load_model((model, processor)), data, num_images=num_images, progress=False))
    return min(seconds[1:]), (time.process_time() - start) * HELD_OUT / num_images


def build_recipe(pair: Pair, rate: float, steps: int) -> Recipe:
    """Return the task's small recipe with this rate and length, and the head's fields."""
    small = find_recipe(f"{pair.task}-small")
    settings: dict[str, Any] = {"learning_rate": rate, "batch_size": BATCH, "steps": steps, "evaluations": EVALUATIONS}
    if pair.optimizer == "muon":
        settings |= {"optimizer": "muon", "momentum": 0.95}
    settings["random_resized_crop"] = (0, 0)  # it would change the shapes' proportions
    return replace(small.override(**settings), architecture=pair.fields)


def train(work: Path, job: Job, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Carry out one training: a trial at its rate for a quarter of the time, others at the best validation rate."""
    pair = next(pair for pair in PAIRS if pair.name == job["pair"])
    best = max(trials, key=lambda run: next(iter(run["validation"].values())), default={"rate": pair.rates[0]})
    rate, minutes = job.get("rate", best["rate"]), pair.minutes / (1 if job["final"] else 4)
    step, judging = measure_seconds(pair)
    steps = max(EVALUATIONS, int((60 * minutes * 0.95 - (EVALUATIONS + 1) * judging) / step))
    folder = work / pair.task
    shutil.rmtree(folder, ignore_errors=True)
    result = finetune(
        BACKBONES[pair.backbone](pair.size), pair.data, folder, task=pair.task, head=pair.head, head_width=pair.width,
        recipe=build_recipe(pair, rate, steps), seed=job["seed"], **CPU,
    )  # fmt: skip
    results = {
        "rate": rate, "minutes": minutes, "steps": steps, "parameters": count_parameters(result.model),
        "best_step": result.best_step, "validation": result.validation,
    }  # fmt: skip
    # By the test scenes nothing is to be chosen.
    return results | ({"test": result.test.values(), "headline": result.test.headline()} if job["final"] else {})


def jobs(only: str, seeds: list[int]) -> Iterator[PlannedJob]:
    """Return the runs pair by pair, each with the trials that select its rate."""
    for pair in PAIRS:
        if only in pair.name:
            rates = pair.rates if len(pair.rates) > 1 else ()
            trials = [{"pair": pair.name, "seed": 0, "final": False, "rate": rate} for rate in rates]
            yield from ((job, []) for job in trials)
            yield from (({"pair": pair.name, "seed": seed, "final": True}, trials) for seed in seeds)


if __name__ == "__main__":
    parser = script_options(__doc__, "dense.jsonl")
    parser.add_argument("--work", type=Path, default=Path("out/dense"), help="folder for the runs")
    parser.add_argument("--only", default="", help="pairs whose name has these words, such as a part")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    Records(arguments.output).work([*jobs(arguments.only, arguments.seeds)], partial(train, arguments.work))
    print(TABLES["dense"](arguments.output))
