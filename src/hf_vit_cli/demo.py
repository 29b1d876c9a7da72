"""`hf-vit demo`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_vit_cli.options import opt

if TYPE_CHECKING:
    from rich.console import Console

    from hf_vit.training.demonstration import FreshLook


def demo(
    context: typer.Context,
    output: Annotated[Path, opt("Folder for the trained model.", file_okay=False)] = Path("hf-vit-demo"),
    seeds: Annotated[int, opt("Number of trainings, with seeds 0, 1, ...", min=1)] = 1,
    epochs: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a small ViT on handwritten digits, evaluate it, save it, and load it with plain transformers."""
    from rich.console import Console

    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.demonstration import demonstrate
    from hf_vit_cli.command import command_line

    start, console = time.perf_counter(), Console()
    accuracies: list[float] = []
    folders: list[str] = []
    for done in demonstrate(output, seeds, command=command_line(context), report=console.print, epochs=epochs):
        test = done.result.test
        assert isinstance(test, ClassificationResult)
        console.print(
            f"seed {done.seed}: validation {done.result.validation['accuracy']:.2%}, test {test.top1:.2%} "
            f"({test.num_wrong} of {test.num_images} wrong), trained in {done.result.seconds:.0f} s"
        )
        _print_look(console, done.look)
        accuracies.append(test.top1)
        folders.append(str(done.folder))
    console.print(f"model, processor, facts.json, README.md: {', '.join(folders)}", soft_wrap=True)
    console.print(f"try: hf-vit evaluate {folders[0]} --data digits", soft_wrap=True)
    mean = sum(accuracies) / len(accuracies)
    over = "" if seeds == 1 else f" (mean of {seeds} seeds)"
    console.print(f"accuracy {mean:.2%} in {time.perf_counter() - start:.0f} s{over}", highlight=False)


def _print_look(console: "Console", look: "FreshLook") -> None:
    from rich.table import Table

    table = Table("test image of", *look.truth)
    table.add_row("predicted here", *look.here)
    table.add_row("predicted there", *look.fresh)
    console.print(table)
    console.print(
        f'there, "import hf_vit" says: {look.barred}; probabilities differ by at most {look.largest_difference:.0e}',
        soft_wrap=True,
        highlight=False,
    )
