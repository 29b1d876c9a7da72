"""Cells of the table of speeds: all contestants take turns in one process, and only their paired ratios count."""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.nn import functional as F

from hf_vit.errors import UserError
from hf_vit.rewriting.planning import plan_for
from hf_vit.speed.measuring import (
    Quartiles,
    counted_flops,
    others_load,
    peak_memory,
    quartiles,
    speed_ratio,
    take_turns,
)
from hf_vit.speed.peers import NUM_LABELS, Shape, build, obstacle

Work = Literal["inference", "training"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cell:
    """What contestants are compared in.

    Attributes:
        work: "inference" (in the dtype), or "training": forward, backward and AdamW (bfloat16 by autocast).
        shape: what all contestants share.
        dtype: a name of `DTYPES`.
        batch: images a step.
        device: torch device.
        checkpointing: recompute activations in training; the contestants that can.
    """

    work: Work
    shape: Shape
    dtype: str = "float32"
    batch: int = 1
    device: str = "cpu"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.work not in ("inference", "training"):
            raise UserError(f"work '{self.work}' is unknown; choose inference or training")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype '{self.dtype}' is unknown; choose {' or '.join(DTYPES)}")
        if self.batch < 1:
            raise UserError(f"a batch of {self.batch} images; it must be at least 1")

    def step(self, name: str) -> Callable[[], Any]:
        """One step of a contestant, ready to be called again and again."""
        dtype = DTYPES[self.dtype]
        images = self.shape.images(self.batch, dtype if self.work == "inference" else torch.float32, self.device)
        step = self._inference(name, images, dtype) if self.work == "inference" else self._training(name, images, dtype)
        if not self.device.startswith("cuda"):
            return step

        def synchronised() -> None:
            step()
            torch.cuda.synchronize(self.device)

        return synchronised

    def _inference(self, name: str, images: torch.Tensor, dtype: torch.dtype) -> Callable[[], Any]:
        model = build(name, self.shape, dtype, self.device).eval()

        @torch.inference_mode()
        def step() -> torch.Tensor:
            return model(images)

        return step

    def _training(self, name: str, images: torch.Tensor, dtype: torch.dtype) -> Callable[[], Any]:
        model = build(name, self.shape, torch.float32, self.device).train()
        if self.checkpointing:
            model.model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        labels = torch.arange(self.batch, device=self.device) % NUM_LABELS
        place = torch.device(self.device).type

        def step() -> None:
            with torch.autocast(place, dtype, enabled=dtype != torch.float32):
                outputs = model(images)
                # Products alone have no head: the class token stands for one.
                loss = F.cross_entropy(outputs if outputs.ndim == 2 else outputs[:, 0], labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


@dataclass(frozen=True)
class Outcome:
    """What a contestant did in a cell.

    Attributes:
        images_per_second: median.
        ratios: other contestant -> how many times as fast this one is, paired by turns.
        memory: bytes held at most during a step, beyond weights and input (training: and beyond optimizer state).
        utilisation: share of the peak FLOP/s that was given; a multiply-add counts 2, training three forwards. What
            an optimized model leaves out does not count.
    """

    images_per_second: float
    ratios: dict[str, Quartiles]
    memory: int | None = None
    utilisation: float | None = None


@dataclass
class MeasuredCell:
    """A cell, its outcomes by contestant, who did not take part and why, and the load that others made (cores)."""

    cell: Cell
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    load: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Plain values, as results keep them."""
        return asdict(self)


def measure_cell(
    cell: Cell,
    contestants: Sequence[str],
    turns: int,
    *,
    builds: int = 1,
    memory: bool = False,
    peak_flops: float | None = None,
) -> MeasuredCell:
    """Let contestants take turns at a cell.

    Args:
        contestants: names as `build` takes them; who cannot take part is told in `absent`.
        turns: of every contestant in a build, after two that are not counted.
        builds: how often all are built anew, who comes first changing: where a model's weights and maps happen to lie
            in memory makes it some per cent faster or slower for as long as it lives.
        memory: measure the peak as well (one more step of each).
        peak_flops: FLOP/s of the device, for the utilisation.

    Raises:
        UserError: nobody can take part.
    """
    made = MeasuredCell(cell, absent=dict(_obstacles(cell, contestants)))
    names = [name for name in contestants if name not in made.absent]
    if not names:
        raise UserError(f"nobody can take part: {'; '.join(made.absent.values())}")
    steps: dict[str, Callable[[], Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for built in range(builds):
        steps.clear()
        gc.collect()
        first = built % len(names)
        steps.update((name, cell.step(name)) for name in names[first:] + names[:first])
        for name, of_build in take_turns(steps, turns).items():
            seconds[name] += of_build
    made.load = others_load()
    for name in names:
        rate = cell.batch / quartiles(seconds[name]).median
        share = rate * _step_flops(cell, optimized="optimized" in name) / peak_flops if peak_flops else None
        made.outcomes[name] = Outcome(
            images_per_second=rate,
            ratios={other: speed_ratio(seconds, name, other) for other in names if other != name},
            memory=peak_memory(steps[name], cell.device) if memory else None,
            utilisation=share,
        )
    steps.clear()
    gc.collect()
    torch.compiler.reset()  # its limit of recompilations would have later cells run uncompiled
    return made


def _obstacles(cell: Cell, contestants: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in contestants:
        found = obstacle(name, cell.shape, cell.work == "training", DTYPES[cell.dtype], cell.device)
        if found is None and cell.checkpointing and not name.startswith(("hf_vit", "transformers")):
            found = "it has no checkpointing of the same kind"
        if found is not None:
            yield name, found


@functools.cache
def _step_flops(cell: Cell, *, optimized: bool) -> float:
    """FLOPs of one image in the work of a cell; a training step is three forwards."""
    with torch.device("meta"):
        model = build("hf_vit", cell.shape, device="meta").eval()
        if optimized:
            plan_for(model, torch.float32).carry_out()
    images = torch.empty(1, 3, cell.shape.image_size, cell.shape.image_size, device="meta")
    return counted_flops(model, lambda: model(images)) * (3 if cell.work == "training" else 1)
