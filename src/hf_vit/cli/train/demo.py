"""`hf-vit demo`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_vit.training.demonstration import FreshLook


def demo(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Folder for the trained model.", file_okay=False)] = Path("hf-vit-demo"),
    seeds: Annotated[int, typer.Option(help="Train so many times, with seeds 0, 1, ...", min=1)] = 1,
    epochs: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a small ViT on handwritten digits, evaluate it, save it, and load it with plain transformers."""
    from rich.console import Console

    from hf_vit.cli.command_line import command_line
    from hf_vit.errors import UserError
    from hf_vit.training.demonstration import claim_output, look_afresh, train_digits

    start = time.perf_counter()
    console = Console()
    folders = [output] if seeds == 1 else [output / f"seed-{seed}" for seed in range(seeds)]
    for folder in folders:
        claim_output(folder)
    accuracies: list[float] = []
    for seed, folder in enumerate(folders):
        result = train_digits(
            folder, seed=seed, command=command_line(context), report=lambda line: console.print(line), epochs=epochs
        )
        accuracies.append(result.test.top1)
        console.print(
            f"seed {seed}: validation {result.validation['accuracy']:.2%}, test {result.test.top1:.2%} "
            f"({result.test.num_wrong} of {result.test.num_images} wrong), trained in {result.seconds:.0f} s"
        )
        console.print("loading it in a fresh Python process without hf_vit (trust_remote_code=True) ...")
        look = look_afresh(folder, result)
        _print_look(console, look)
        if look.here != look.fresh or look.largest_difference > 1e-4:
            raise UserError(f"the fresh process answered differently (by up to {look.largest_difference:.2g})")
    console.print(f"model, processor, facts.json, README.md: {', '.join(map(str, folders))}", soft_wrap=True)
    console.print(f"try: hf-vit evaluate {folders[0]} --data digits", soft_wrap=True)
    mean = sum(accuracies) / len(accuracies)
    over = "" if seeds == 1 else f" (mean of {seeds} seeds)"
    console.print(f"accuracy {mean:.2%} in {time.perf_counter() - start:.0f} s{over}", highlight=False)


def _print_look(console: "object", look: "FreshLook") -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table("test image of", *look.truth)
    table.add_row("predicted here", *look.here)
    table.add_row("predicted there", *look.fresh)
    console.print(table)
    console.print(
        f'there, "import hf_vit" says: {look.barred}; probabilities differ by at most {look.largest_difference:.0e}',
        soft_wrap=True,
        highlight=False,
    )
