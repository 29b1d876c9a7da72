"""`hf-vit submit`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_vit_cli.jobs import Job, Submission

_SLURM = "What a job asks for"
# Options of sbatch that this command writes itself.
_DECIDED = (
    *("array", "cpus-per-task", "error", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node", "open-mode"),
    *("output", "partition", "requeue", "signal", "time", "wckey"),
)


def submit(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND...", help="What to run: finetune or pretrain, with its options."),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option("--slurm/--local", help="By Slurm; or here, all at once, until they end."),
    ] = True,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION=VALUE,...", help="A job a value, below OUTPUT; of several options, all pairs."),
    ] = None,
    jobs: Annotated[
        Path | None, typer.Option(help="New or empty folder for logs, scripts and status; by default OUTPUT.jobs.")
    ] = None,
    status: Annotated[Path | None, typer.Option(help="Show how the jobs of such a folder stand.")] = None,
    gpus: Annotated[
        int, typer.Option(rich_help_panel=_SLURM, help="A machine; a process each. 0: one process without.", min=0)
    ] = 1,
    nodes: Annotated[int, typer.Option(rich_help_panel=_SLURM, help="Machines.", min=1)] = 1,
    cpus: Annotated[int | None, typer.Option(rich_help_panel=_SLURM, help="Cores a process.", min=1)] = None,
    memory: Annotated[float | None, typer.Option(rich_help_panel=_SLURM, help="GB a machine.", min=0.1)] = None,
    hours: Annotated[
        float, typer.Option(rich_help_panel=_SLURM, help="Then it is stopped and queued again.", min=0.1, max=10_000)
    ] = 4,
    requeues: Annotated[
        int, typer.Option(rich_help_panel=_SLURM, help="How often at most; preemption does not count.", min=0)
    ] = 100,
    partition: Annotated[str | None, typer.Option(rich_help_panel=_SLURM, help="Of the cluster.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=_SLURM, metavar="NAME=VALUE", help="Any other option of sbatch; repeatable."),
    ] = None,
) -> None:
    """Run trainings as jobs of a Slurm cluster that go on after preemption: hf-vit submit -- finetune ..."""
    from hf_vit.errors import UserError
    from hf_vit_cli import jobs as cluster

    if status is not None:
        submission = cluster.read_submission(status)
        if command:
            raise UserError(f"--status {status} submits nothing; leave it or the command '{command[0]}' out")
        _print(status, submission)
        return
    if not command:
        raise UserError("nothing to submit; give a command: hf-vit submit -- finetune ...")
    asked = cluster.Resources(gpus, nodes, cpus, memory, hours, requeues, partition, parse_sbatch(sbatch or ()))
    if not slurm:
        _refuse_locally(nodes=nodes if nodes > 1 else None, partition=partition, sbatch=(sbatch or [None])[0])
    trainings = _trainings(context, command, parse_sweep(sweep or ()))
    folder = jobs or Path(f"{_values(context, command)['output']}.jobs")
    if holder := next((each for each in trainings if folder.resolve().is_relative_to(each.resolve())), None):
        raise UserError(f"the folder for jobs {folder} lies in the output folder {holder}; choose one beside it")
    submission = cluster.submit(folder, trainings, "slurm" if slurm else "local", asked)
    if slurm:
        typer.echo(f"queued {len(trainings)} jobs ({', '.join(job.id for job in submission.jobs)})")
        typer.echo(f"logs in {folder}; hf-vit submit --status {shlex.quote(str(folder))} tells how they stand")
        return
    if failed := _print(folder, submission):
        raise UserError(f"{len(failed)} of {len(trainings)} jobs did not finish; look into {failed[0].log}")


def parse_sweep(texts: Sequence[str]) -> dict[str, list[str]]:
    """Read "learning-rate=0.001,0.01".

    Raises:
        UserError: that is no option with values, or comes twice.
    """
    from hf_vit.errors import UserError

    values: dict[str, list[str]] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        listed = rest.split(",")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or not all(listed):
            raise UserError(f"--sweep '{text}' is not understood; give OPTION=VALUE,VALUE: learning-rate=0.001,0.01")
        if name in values or len({*listed}) < len(listed):
            raise UserError(f"--sweep '{text}' gives a job twice; give every option, and every value, once")
        if name in ("output", "resume"):
            raise UserError(f"--sweep '{text}': every job has a folder below --output; choose another option")
        values[name] = listed
    return values


def parse_sbatch(texts: Sequence[str]) -> dict[str, str]:
    """Read "account=vision".

    Raises:
        UserError: that is no option, or one of this command's.
    """
    from hf_vit.errors import UserError

    values: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not value or not value.isprintable():
            raise UserError(f"--sbatch '{text}' is not understood; give NAME=VALUE: account=vision")
        if name in _DECIDED:
            raise UserError(f"--sbatch '{text}' is decided by hf-vit submit; use its options (--help) instead")
        values[name] = value
    return values


def _refuse_locally(**given: object) -> None:
    from hf_vit.errors import UserError

    for name, value in given.items():
        if value is not None:
            raise UserError(f"--{name} {value} would change nothing with --local; leave one of them out")


def _values(context: typer.Context, command: Sequence[str]) -> dict[str, Any]:
    """What a command to be submitted was given, read and refused as if it were typed.

    Raises:
        UserError: it is none that goes on with --resume.
        typer.TyperException: its options are not understood.
    """
    from hf_vit.errors import UserError

    name, *words = command
    program: Any = context.parent.command if context.parent else None  # click's types are not exported
    resumable = [each for each, one in program.commands.items() if "resume" in [every.name for every in one.params]]
    if name not in resumable:
        raise UserError(f"'{name}' is no command that can go on with --resume; give one of {', '.join(resumable)}")
    return program.commands[name].make_context(f"hf-vit {name}", [*words], parent=None).params


def _trainings(
    context: typer.Context, command: Sequence[str], sweep: Mapping[str, Sequence[str]]
) -> dict[Path, list[str]]:
    """Output folder -> arguments, all of which can be read, of every job.

    Raises:
        UserError: an output folder is taken; see also `_values`.
    """
    from hf_vit.errors import UserError
    from hf_vit_cli.jobs import refuse_full

    given = _values(context, command)
    if sweep and given.get("push") and "push" not in sweep:
        raise UserError(
            f"every job of the sweep would push to {given['push']}; leave --push out, and push the best one"
        )
    trainings: dict[Path, list[str]] = {}
    for values in product(*sweep.values()):
        chosen = dict(zip(sweep, values, strict=True))
        words = [*command, *(word for name, value in chosen.items() for word in (f"--{name}", value))]
        output = Path(given["output"])
        if chosen:
            output /= "_".join(f"{name}={value}" for name, value in chosen.items()).replace("/", "-")
            words += ["--output", str(output)]
        if output in trainings:
            raise UserError(f"two jobs of the sweep would write {output}; give values that differ otherwise")
        if not given["resume"]:
            refuse_full(output, "the output folder")
            words.append("--resume")
        _values(context, words)
        trainings[output] = words
    return trainings


def _print(folder: Path, submission: "Submission") -> "list[Job]":
    """Show how the jobs stand; which of them are not finished."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hf_vit_cli.jobs import last_line, states

    table = Table("job", "output", "state", "last line of its log")
    standing = list(zip(submission.jobs, states(folder, submission), strict=True))
    for job, state in standing:
        table.add_row(*(escape(text) for text in (job.id, job.output.name, state, last_line(job))))
    Console().print(table)
    typer.echo(f"logs in {folder}")
    return [job for job, state in standing if state != "finished"]
