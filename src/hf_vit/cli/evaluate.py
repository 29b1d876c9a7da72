"""`hf-vit evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_vit.evaluation import ClassificationResult
    from hf_vit.facts import DataFact

_MAX_CLASS_ROWS = 20


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hub id of an image classifier.", show_default=False)],
    data: Annotated[
        str,
        typer.Option(
            help="digits, photos, a folder of class folders, parquet or webdataset files, or a Hub id.",
            show_default=False,
        ),
    ],
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 32,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; by default the model's.", file_okay=False)
    ] = None,
    skip_bad_images: Annotated[bool, typer.Option("--skip-bad-images", help="Leave out unreadable images.")] = False,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while evaluating.")] = False,
    device: Annotated[str | None, typer.Option(help="torch device; by default a GPU where there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the splits that are cut where the data has none.")] = 0,
) -> None:
    """Measure an image classifier: accuracy, calibration, every class; draw its mistakes."""
    from hf_vit.cli.command_line import command_line
    from hf_vit.data import load_data
    from hf_vit.evaluation import draw_evaluation, evaluate_classifier, load_classifier, save_evaluation
    from hf_vit.facts import DataFact, Facts
    from hf_vit.hub.card import refresh_card

    classifier = load_classifier(model, device)
    if classifier.folder is not None:
        Facts.load(classifier.folder)  # damaged facts are told before the work, not after it
    images = load_data(
        data, streaming=streaming, skip_bad_images=skip_bad_images, image_size=classifier.image_size, seed=seed
    )
    for note in images.notes:
        typer.echo(f"note: {note}", err=True)
    result = evaluate_classifier(
        classifier.model,
        classifier.processor,
        images.split(split),
        label_names=images.label_names,
        batch_size=batch_size,
        device=device,
    )
    fact = DataFact(name=images.name, fingerprint=images.fingerprint, split=split, size=result.num_images)
    _print_tables(result, fact, images.skipped)
    if classifier.folder is not None:
        save_evaluation(
            classifier.folder,
            result,
            data=fact,
            command=command_line(context),
            seed=seed,
            device=device,
            pictures=output,
        )
        refresh_card(classifier.folder)
        typer.echo(f"recorded in {classifier.folder / 'facts.json'}; pictures in {output or classifier.folder}")
    elif output is not None:
        draw_evaluation(output, result, fact)
        typer.echo(f"pictures in {output}")


def _print_tables(result: "ClassificationResult", data: "DataFact", skipped: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{data.name}, split {data.split}, {result.num_images:,} images"), show_header=False)
    rows = [("top-1 accuracy", f"{result.top1:.2%}")]
    if result.top5 is not None:
        rows.append(("top-5 accuracy", f"{result.top5:.2%}"))
    rows += [
        ("expected calibration error", f"{result.ece:.2%}"),
        ("loss (nats)", f"{result.loss:.4f}"),
        ("wrongly classified", f"{result.num_wrong:,}"),
        ("images/s", f"{result.images_per_second:,.1f}"),
    ]
    if skipped:
        rows.append(("unreadable images left out", f"{len(skipped):,}"))
    for name, value in rows:
        table.add_row(name, value)
    console = Console()
    console.print(table)
    worst = sorted(result.per_class.items(), key=lambda item: item[1])
    shown = worst if len(worst) <= _MAX_CLASS_ROWS else worst[: _MAX_CLASS_ROWS // 2]
    title = "accuracy of each class" if len(shown) == len(worst) else f"the {len(shown)} worst of {len(worst)} classes"
    classes = Table("class", "top-1 accuracy", title=title)
    for name, accuracy in shown:
        classes.add_row(escape(name), f"{accuracy:.2%}")
    console.print(classes)
