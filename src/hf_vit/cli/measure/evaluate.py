"""`hf-vit evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_vit.evaluation import ClassificationResult
    from hf_vit.evaluation.protocols.registry import ProtocolRun
    from hf_vit.results.facts import DataFact

_MAX_CLASS_ROWS = 20


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Folder or Hub id of an image classifier; protocols take timm:NAME too.", show_default=False
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="digits, photos, a folder of class folders, parquet or webdataset files, or a Hub id.",
            show_default=False,
        ),
    ],
    protocol: Annotated[
        str,
        typer.Option(
            help="top1, few-shot, linear-probe, knn, calibration, robustness (FGSM, PGD), corruptions or patch-drop."
        ),
    ] = "top1",
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 32,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for pictures, and numbers of a protocol; by default the model's.", file_okay=False),
    ] = None,
    skip_bad_images: Annotated[bool, typer.Option("--skip-bad-images", help="Leave out unreadable images.")] = False,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while evaluating.")] = False,
    device: Annotated[str | None, typer.Option(help="torch device; by default a GPU where there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Of splits that are cut where the data has none, and of draws.", min=0)] = 0,
    num_images: Annotated[int | None, typer.Option(help="Protocols: judge by so many images.", min=1)] = None,
    shots: Annotated[list[int] | None, typer.Option(help="few-shot: images a class; repeat for more.")] = None,
    trials: Annotated[int | None, typer.Option(help="few-shot: draws of the images.")] = None,
    neighbors: Annotated[list[int] | None, typer.Option(help="knn: how many vote; repeat for more.")] = None,
    temperature: Annotated[
        bool | None, typer.Option("--temperature/--no-temperature", help="calibration: fit one on validation images.")
    ] = None,
    epsilons: Annotated[list[float] | None, typer.Option(help="robustness: size (1/255); repeat for more.")] = None,
    steps: Annotated[int | None, typer.Option(help="robustness: steps of PGD.")] = None,
    kinds: Annotated[list[str] | None, typer.Option(help="corruptions: one kind; repeat for more.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="patch-drop: px; by default the model's.")] = None,
    fill: Annotated[str | None, typer.Option(help="patch-drop: mean (of the image) or black.")] = None,
) -> None:
    """Measure an image classifier: accuracy, calibration, every class; or by another protocol."""
    options = {
        "shots": shots,
        "trials": trials,
        "neighbors": neighbors,
        "temperature": temperature,
        "epsilons": epsilons,
        "steps": steps,
        "kinds": kinds,
        "patch_size": patch_size,
        "fill": fill,
    }
    given = {name: value for name, value in options.items() if value is not None}
    reading: dict[str, Any] = {"streaming": streaming, "skip_bad_images": skip_bad_images, "seed": seed}
    shared: dict[str, Any] = {"split": split, "batch_size": batch_size, "device": device}
    if protocol != "top1":
        asked = shared | {"protocol": protocol, "num_images": num_images} | reading | given
        _evaluate_protocol(context, model, data, output, **asked)
    elif given or num_images is not None:
        _refuse_for_top1([*given, *([] if num_images is None else ["num_images"])])
    else:
        _evaluate_top1(context, model, data, output, reading, **shared)


def _refuse_for_top1(names: list[str]) -> None:
    from hf_vit.errors import UserError

    shown = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    raise UserError(f"{shown} is for other protocols than top1; choose one with --protocol")


def _evaluate_protocol(context: typer.Context, model: str, data: str, output: Path | None, **asked: Any) -> None:
    from hf_vit.cli.command_line import command_line
    from hf_vit.evaluation import evaluate_protocol, save_protocol
    from hf_vit.hub.card import refresh_card

    run = evaluate_protocol(model=model, data=data, **asked)
    for note in run.examination.data.notes:
        typer.echo(f"note: {note}", err=True)
    _print_protocol(run)
    save_protocol(run, output, command=command_line(context), device=asked["device"])
    folder = run.examination.subject.folder
    if folder is not None:
        refresh_card(folder)
        typer.echo(f"recorded in {folder / 'facts.json'}; picture in {output or folder}")
    elif output is not None:
        typer.echo(f"numbers and picture in {output}")


def _print_protocol(run: "ProtocolRun") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found, data = run.result.table(), run.examination.fact(run.result.num_images)
    typer.echo(f"{run.result.title}: {data.name}, split {data.split}, {run.result.num_images:,} images")
    table = Table(*map(escape, found.header))
    for row in found.rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def _evaluate_top1(
    context: typer.Context,
    model: str,
    data: str,
    output: Path | None,
    reading: dict[str, Any],
    *,
    split: str,
    batch_size: int,
    device: str | None,
) -> None:
    from hf_vit.cli.command_line import command_line
    from hf_vit.data import load_data
    from hf_vit.evaluation import draw_evaluation, evaluate_classifier, save_evaluation
    from hf_vit.hub.card import refresh_card
    from hf_vit.results.facts import DataFact, Facts
    from hf_vit.subjects.subject import open_subject

    classifier = open_subject(model, device, as_classifier=True)
    if classifier.folder is not None:
        Facts.load(classifier.folder)  # damaged facts are told before the work, not after it
    images = load_data(data, image_size=classifier.image_size, **reading)
    for note in images.notes:
        typer.echo(f"note: {note}", err=True)
    result = evaluate_classifier(
        classifier.model,  # pyright: ignore
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
            seed=reading["seed"],
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
