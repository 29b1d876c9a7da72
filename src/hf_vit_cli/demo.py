"""`hf-vit demo`."""

import time
from pathlib import Path

import typer

from hf_vit_cli.command import command_line, print_table, tell
from hf_vit_cli.options import opt


def demo(
    context: typer.Context,
    output: Path = opt(Path("hf-vit-demo"), "Folder for the trained model.", file_okay=False),
    seeds: int = opt(1, "Number of trainings, with seeds 0, 1, ...", min=1),
    epochs: float | None = typer.Option(None, hidden=True),
) -> None:
    """Train a small ViT on handwritten digits, evaluate it, save it, and load it with plain transformers."""
    from hf_vit.evaluation.protocols.top1 import ClassificationResult
    from hf_vit.training.demonstration import demonstrate

    start = time.perf_counter()
    accuracies: list[float] = []
    folders: list[str] = []
    runs = demonstrate(output, seeds, command=command_line(context), report=tell, epochs=epochs)
    for seed, (folder, result, look) in enumerate(runs):
        test = result.test
        assert isinstance(test, ClassificationResult)
        tell(
            f"seed {seed}: validation {result.validation['accuracy']:.2%}, test {test.top1:.2%} "
            f"({test.num_wrong} of {test.num_images} wrong), trained in {result.seconds:.0f} s"
        )
        rows = [["predicted here", *look.here], ["predicted there", *look.fresh]]
        print_table(rows, "test image of", *look.truth)
        difference = f"probabilities differ by at most {look.largest_difference:.0e}"
        tell(f'there, "import hf_vit" says: {look.barred}; {difference}')
        accuracies.append(test.top1)
        folders.append(str(folder))
    tell(f"model, processor, facts.json, README.md: {', '.join(folders)}")
    tell(f"try: hf-vit evaluate {folders[0]} --data digits")
    mean = sum(accuracies) / len(accuracies)
    over = "" if seeds == 1 else f" (mean of {seeds} seeds)"
    tell(f"accuracy {mean:.2%} in {time.perf_counter() - start:.0f} s{over}")
