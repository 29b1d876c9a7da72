"""`hf-vit demo`."""

import shlex
import time
from pathlib import Path

import typer

from hf_vit_cli.command import format_command, print_safely, print_table
from hf_vit_cli.options import opt


def demo(
    context: typer.Context,
    output: Path = opt(Path("hf-vit-demo"), "Folder for the trained model.", file_okay=False),
    seeds: int = opt(1, "Number of trainings; they use the seeds 0, 1, ...", min=1),
    epochs: float | None = typer.Option(None, hidden=True),
) -> None:
    """Train a small ViT on handwritten digits, evaluate it, save it, and load it with plain transformers."""
    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.demonstration import demonstrate

    start = time.perf_counter()
    accuracies: list[float] = []
    folders: list[str] = []
    runs = demonstrate(output, seeds, command=format_command(context), report=print_safely, epochs=epochs)
    for seed, (folder, result, reload) in enumerate(runs):
        test = result.test
        assert isinstance(test, ClassificationResult)
        print_safely(
            f"seed {seed}: validation {result.validation['accuracy']:.2%}, test {test.top1:.2%} "
            f"({test.num_wrong} of {test.num_images} wrong), trained in {result.seconds:.0f} s"
        )
        rows = [
            ["predicted with hf_vit", *reload.predicted_here],
            ["without hf_vit", *reload.predicted_without_package],
        ]
        print_table(rows, "test image of", *reload.true_classes)
        difference = f"probabilities differ by at most {reload.largest_difference:.0e}"
        print_safely(
            f'a process without hf_vit ("import hf_vit" fails: {reload.import_error}) loaded the model; {difference}'
        )
        accuracies.append(test.top1)
        folders.append(str(folder))
    print_safely(f"model, processor, facts.json and README.md are in {', '.join(folders)}")
    print_safely(f"try next: hf-vit evaluate {shlex.quote(folders[0])} --data digits")
    mean = sum(accuracies) / len(accuracies)
    note = "" if seeds == 1 else f" (mean of {seeds} seeds)"
    print_safely(f"accuracy {mean:.2%} in {time.perf_counter() - start:.0f} s{note}")
