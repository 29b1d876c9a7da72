"""Shared behavior of all commands: parsing, interruption, and printing of tables.

Beyond what `typer` does:

- An argument can also be given by name: every command accepts `--model MODEL`, `--output OUTPUT` for its arguments.
- `--config FILE` reads options from a file, or from the `facts.json` of an earlier run.
- All missing options are reported at once.
- Values that no command can use are refused: a switch with a value (`--streaming true`), an empty value, an infinite
  number, a device or pipe, an output path that cannot be written.
- Ctrl-C ends the program with one line.
- In a terminal, a line says that libraries are being loaded, which takes seconds.
"""

import json
import math
import os
import re
import shlex
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from hf_vit_cli.options import opt
from hf_vit_settings import CROPS

if TYPE_CHECKING:
    from rich.table import Column

    from hf_vit.evaluation.protocols.frame import Table

_MAX_INTEGER = 2**32 - 1  # numpy's largest seed; no other integer option needs larger values
_OUTPUT_OPTIONS = ("output", "report")
# Of each group one option counts: a typed one replaces another in the file of --config.
_EXCLUSIVE = ({"epochs", "steps"}, {"learning_rate", "lr_sweep", "sweep_rates"}, set(CROPS))
_BOOLEAN_WORDS = ("true", "yes", "on", "1", "false", "no", "off", "0")
# Command -> its extra, and the libraries of that extra that it always needs.
_REQUIREMENTS = {
    **{f"hf-vit {name}": ("train", ("sklearn", "matplotlib")) for name in ("demo", "finetune", "pretrain", "evaluate")},
    **{f"hf-vit {name}": ("train", ("sklearn", "matplotlib")) for name in ("soup", "compare")},
    "hf-vit analyze": ("analysis", ("sklearn", "matplotlib")),
    "hf-vit scaling-law": ("train", ("scipy", "matplotlib")),
}
# Name of an option in version 0.2 -> current name.
_RENAMED_OPTIONS = {
    "--unlabelled": "--unlabeled",
    "--unlabelled-ratio": "--unlabeled-ratio",
    "--utilisation": "--utilization",
}
# Options that --config does not take from a recorded run: they concern that run's output.
_SINGLE_USE_OPTIONS = ("output", "resume", "push", "private", "share_images")


@contextmanager
def handle_interrupt(describe_resume: Callable[[], str]) -> Generator[None]:
    """Turn `KeyboardInterrupt` into one line that says how to continue, and exit code 130.

    Args:
        describe_resume: returns what was kept and how to continue; called only after an interrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        print_safely(f"hf-vit: stopped; {describe_resume()}", err=True)
        raise typer.Exit(130) from None


def describe_progress(output: str | Path) -> str:
    """Return how to continue a command that keeps finished parts in an output folder or URL."""
    folder, is_url = Path(output), "://" in str(output)
    if is_url or (folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())):
        return f"finished parts are in {output}; run the same command again to continue"
    return "nothing is finished yet; run the same command again"


class Command(TyperCommand):
    """A command of the program, with the behavior that the module describes."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._arguments: list[Any] = [param for param in self.params if param.param_type_name == "argument"]
        for argument in self._arguments:
            argument.metavar = argument.metavar or argument.name.upper()
            argument.help = f"{argument.help} Also {_get_flag(argument)}."

    @handle_interrupt(lambda: "no incomplete files remain")
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer names the class of its context nowhere
        """Parse the command line into the context.

        Raises:
            typer.TyperException: an option is unknown, missing or invalid.
        """
        context: typer.Context = ctx
        words = [_replace_old_name(word) for word in args]
        self._refuse_switch_values(context, words)
        words = self._order_arguments(context, words)
        typed_values: Mapping[str, Any] = {}
        try:
            typed_values = self.make_parser(ctx).parse_args(list(words))[0]
            remaining = super().parse_args(ctx, list(words))
        except typer.BadParameter as error:
            if error.param is not None and error.message:  # a missing value has no message
                value = typed_values.get(error.param.name)
                value = ctx.lookup_default(error.param.name) if value is None else value
                value_text = " ".join(map(str, _to_sequence(value)))
                context.fail(f"{_get_flag(error.param)} '{value_text}': {error.message[:1].lower()}{error.message[1:]}")
            missing = [_get_flag(param) for param in self.params if param.required and param.name not in ctx.params]
            context.fail(f"{' and '.join(missing)} must be given")
        defaults = {param.name: param.default for param in self.params}
        for names in _EXCLUSIVE:
            if names & typed_values.keys():
                ctx.params.update({name: defaults[name] for name in names & defaults.keys() - typed_values.keys()})
        self._refuse_bad_values(context, typed_values)
        return remaining

    @handle_interrupt(lambda: "no incomplete files remain")
    def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the command after importing its libraries, with a line in the terminal that says so."""
        is_terminal = sys.stderr.isatty()
        if is_terminal:
            print(f"{ctx.command_path}: loading libraries ...", end="\r", file=sys.stderr, flush=True)
        try:
            tempfile.gettempdir()  # torch cannot be imported without one
        except FileNotFoundError:
            problem = "no folder for temporary files can be written; free some space, or set TMPDIR to another folder"
            raise typer.TyperException(problem) from None
        from hf_vit.environment import require
        from hf_vit.families import register

        register()
        if is_terminal:
            print(end="\x1b[K", file=sys.stderr, flush=True)
        extra, modules = _REQUIREMENTS.get(ctx.command_path, (None, ()))
        require(*modules, purpose=ctx.command_path, extra=extra)
        return super().invoke(ctx)

    def _refuse_switch_values(self, ctx: typer.Context, args: list[str]) -> None:
        """Raise an error for `--streaming true` and `--streaming=true`, which typer would take for an argument."""
        switches = {name: param for param in self.params if getattr(param, "is_flag", False) for name in param.opts}
        for word, next_word in zip_longest(args, args[1:], fillvalue=""):
            name, equals, value = word.partition("=")
            if name in switches and (equals or next_word.lower() in _BOOLEAN_WORDS):
                negation = next(iter(switches[name].secondary_opts), "leave it out")
                got = value if equals else next_word
                ctx.fail(f"{name} takes no value, but got '{got}'; write {name}, or {negation}")

    def _refuse_bad_values(self, context: typer.Context, typed_values: Mapping[str, Any]) -> None:
        """Raise an error for empty values (the path "" is the working folder), devices, and numbers that would
        overflow.
        """
        given_values = {**(context.default_map or {}), **typed_values}
        for param in self.params:
            if "" in _to_sequence(given_values.get(param.name)):
                context.fail(f"{_get_flag(param)} is empty; give a value, or leave the option out")
            for value in _to_sequence(context.params.get(param.name)):
                if isinstance(value, str | Path) and is_device_or_pipe(value):
                    context.fail(f"{_get_flag(param)} {value} is a device or a pipe; give a file or a folder")
                if param.name in _OUTPUT_OPTIONS and value is not None:
                    path = context.params[param.name] = _resolve_output(value)
                    if reason := find_obstacle(path):
                        message = f"{_get_flag(param)} {value} cannot be written ({reason}); choose another path"
                        raise typer.TyperException(message)
                if isinstance(value, int) and abs(value) > _MAX_INTEGER:
                    context.fail(f"{_get_flag(param)} {value} is too large; give at most {_MAX_INTEGER}")
                if isinstance(value, float) and not math.isfinite(value):
                    context.fail(f"{_get_flag(param)} {value} is not a finite number; give a finite number")

    def _order_arguments(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Return the command line with arguments that were given by name moved to their positions."""
        values_by_flag: dict[str, list[str]] = {_get_flag(argument): [] for argument in self._arguments}
        single_flags = {_get_flag(argument) for argument in self._arguments if argument.nargs == 1}
        other_words: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":  # everything after it is positional
                other_words += [word, *words]
                break
            name, equals, value = word.partition("=")
            if name not in values_by_flag:
                other_words.append(word)
                continue
            if not equals:
                value = next(words, None)  # the loop goes on behind it
            if value is None:
                ctx.fail(f"{name} needs a value; write it after the option, as in {name} VALUE")
            if value.startswith("-"):
                ctx.fail(f"{name} is followed by '{value}', which looks like an option; for a file write ./{value}")
            if name in single_flags:  # as with any option, the last value counts
                values_by_flag[name].clear()
            values_by_flag[name].append(value)
        # typer fills the arguments in their order, so positional words belong to the first argument without a name.
        values = list(values_by_flag.values())
        first_unnamed = next((position for position, named in enumerate(values) if not named), len(values))
        return [*chain(*values[:first_unnamed]), *other_words, *chain(*values[first_unnamed:])]


def _resolve_output(value: str | Path) -> str | Path:
    """Return the path to write: in the home folder for ~, which shells keep in --output=~/x, and a link's target."""
    path = os.path.expanduser(value)
    return type(value)(os.path.realpath(path) if os.path.islink(path) and os.path.isfile(path) else path)


def _replace_old_name(word: str) -> str:
    """Replace the old name of an option, given as "--name" or "--name=value"."""
    name, equals, value = word.partition("=")
    if name not in _RENAMED_OPTIONS:
        return word
    warnings.warn(
        f"the option {name} is now {_RENAMED_OPTIONS[name]}; use the new name, as the old one "
        "will be removed in version 0.4",
        FutureWarning,
        stacklevel=2,
    )
    return _RENAMED_OPTIONS[name] + equals + value


def _to_sequence(value: Any) -> Sequence[Any]:
    """Return a value as a sequence; lists and tuples are returned unchanged."""
    return value if isinstance(value, list | tuple) else (value,)


def _get_flag(parameter: Any) -> str:
    """Return the flag of a parameter: `--learning-rate` for an option, `--model` for the argument MODEL or MODELS."""
    if parameter.param_type_name == "option":
        return parameter.opts[0]
    name = parameter.name.removesuffix("s") if parameter.nargs < 0 else parameter.name
    return f"--{name.replace('_', '-')}"


def load_config(context: typer.Context, file: Path | None) -> None:
    """Use the options in a file as defaults of this call.

    A mapping uses the command's option names (`learning_rate: 0.01`); from a `facts.json`, the last run of this command
    is used.
    """
    if file is None or context.resilient_parsing:
        return
    if is_device_or_pipe(file):
        context.fail(f"--config {file} is a device or a pipe; give a YAML or JSON file")
    content = _read_config(context, file)
    options = _read_last_run_options(context, file, content) if isinstance(content, list) else content
    if not isinstance(options, Mapping):
        context.fail(
            f"--config {file} holds no options; write one 'name: value' per line, or give the facts.json of a run"
        )
    params = context.command.params
    is_switch = {param.name: getattr(param, "is_flag", False) for param in params if param.name != "config"}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        flag = _replace_old_name(f"--{key}".replace("_", "-"))
        name = flag.removeprefix("--").replace("-", "_")
        if name not in is_switch:
            close_names = get_close_matches(name, is_switch, 1)
            hint = f"did you mean {close_names[0]}?" if close_names else f"{context.command_path} --help lists all"
            hint = "write all options into one file" if name == "config" else hint
            context.fail(f"--config {file}: '{key}' is not an option; {hint}")
        if value is not None:
            defaults[name] = value if isinstance(value, bool) and is_switch[name] else _to_text(value)
    context.default_map = defaults


CONFIG = opt(
    None,
    "Read options from a YAML or JSON file, or from the facts.json of an earlier run. Typed options take precedence.",
    "--config",
    metavar="FILE",
    callback=load_config,
    is_eager=True,
    expose_value=False,
    exists=True,
    dir_okay=False,
)


def _read_config(context: typer.Context, file: Path) -> Any:
    """Return the content of a YAML or JSON file."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        context.fail(f"--config {file} cannot be read ({error}); give a YAML or JSON file")


def _read_last_run_options(context: typer.Context, file: Path, records: list[Any]) -> dict[str, Any]:
    """Return the options of the last run of this command that a facts.json records."""
    commands = [str(record.get("command", "")) for record in records if isinstance(record, dict)]
    runs = [command for command in commands if command.startswith(f"{context.command_path} ")]
    if not runs:
        context.fail(
            f"--config {file} records no run of {context.command_path}; give the facts.json of one, or a YAML or "
            "JSON file"
        )
    try:
        arguments = shlex.split(runs[-1].removeprefix(context.command_path))
        run_context = context.command.make_context(context.info_name, arguments)
    except (ValueError, typer.TyperException) as error:
        context.fail(f"--config {file} records a command that cannot be parsed ({error}); type its options instead")
    sources = {name: run_context.get_parameter_source(name) for name in run_context.params}
    typed_names = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return {name: run_context.params[name] for name in typed_names if name not in _SINGLE_USE_OPTIONS}


def _to_text(value: Any) -> Any:
    """Return a value as the user would type it, so that it is parsed and checked in the same way."""
    return list(map(_to_text, value)) if isinstance(value, list | tuple) else str(value)


def format_command(context: typer.Context) -> str:
    """Return the command as it could be typed: arguments, and options that differ from their defaults.

    The result looks like "hf-vit evaluate out/model --data digits".
    """
    words = context.command_path.split()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        flag = [name for name in parameter.opts if name.startswith("--")][:1]  # empty for an argument
        if value is None or (flag and value == parameter.default):
            continue
        if isinstance(value, bool):
            words.append(flag[0] if value else parameter.secondary_opts[0])
        elif parameter.nargs > 1:  # an option with several values
            words += [*flag, *map(str, value)]
        else:
            for item in _to_sequence(value):
                words += [*flag, str(item)]
    return shlex.join(words)


def collect_options(values: Mapping[str, Any], *excluded: str) -> dict[str, Any]:
    """Return a command's options by name, given its `locals()`.

    Args:
        values: the command's `locals()`; entries of `shared` are included.
        excluded: names to leave out.
    """
    options = {name: value for name, value in values.items() if name not in ("context", "shared", *excluded)}
    return options | values.get("shared", {})


def print_safely(text: str = "", *, err: bool = False) -> None:
    """Print text without secrets and control characters: it may be logged, and may contain names from elsewhere."""
    from hf_vit.results.redaction import redact_message

    typer.echo(strip_control_characters(redact_message(text)), err=err)


def print_notes(notes: Iterable[str], skipped: list[str] | None = None) -> None:
    """Print notes on data, and the number and first names of unreadable images that were skipped, as messages."""
    from hf_vit.display import format_count, shorten_list

    for note in notes:
        print_safely(f"note: {note}", err=True)
    if skipped:
        print_safely(f"skipped {format_count(len(skipped), 'unreadable image')}: {shorten_list(skipped)}", err=True)


def strip_control_characters(text: str) -> str:
    """Return a text with spaces instead of characters that control a terminal or the writing direction."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(letter if letter in "\n\t" or unicodedata.category(letter) not in kinds else " " for letter in text)


def print_table(rows: "Iterable[Sequence[str] | None]", *header: "str | Column", title: str | None = None) -> None:
    """Print rows of text as a table; None draws a line between two rows."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns = [escape(strip_control_characters(column)) if isinstance(column, str) else column for column in header]
    safe_title = None if title is None else escape(strip_control_characters(title))
    table = Table(*columns, title=safe_title, title_justify="left", show_header=bool(header))
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(escape(strip_control_characters(cell)) for cell in row))
    for each in table.columns:  # a name that is cut off could be another's
        each.overflow = "fold"
    Console(emoji=False).print(table)


def print_tables(tables: "Iterable[Table]") -> None:
    """Print tables, each below its title."""
    for table in tables:
        print_safely(table.title)
        print_table(table.rows, *table.header)


def is_device_or_pipe(path: str | Path) -> bool:
    """Return whether a path is a device or a pipe, which may never end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def find_obstacle(value: str | Path) -> str | None:
    """Return why a file or folder cannot be written at a path, or None if it can; nothing is left behind.

    Only options that accept URLs give text, and URLs are not checked here.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in str(value)):  # libraries that write files need UTF-8
        return "the name is not valid UTF-8"
    if isinstance(value, str) and "://" in value:
        return None
    path = Path(value)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):  # a URL such as s3://, of which `Path` removes one slash
        return "it is a URL, not a local path"
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)  # raises if the name is too long
        nearest = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
        if not nearest.exists():
            return f"{nearest.name} is a broken link"
        if nearest == path.absolute() and nearest.is_file():
            nearest = nearest.parent
        if not nearest.is_dir():
            return f"{nearest} is not a folder"
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror
