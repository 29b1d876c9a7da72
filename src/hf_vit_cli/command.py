"""What all commands share: how they read what was typed, how they end, and how they print tables.

Beside what `typer` does:

- An argument can be given by its name as well: every command that needs one takes `--model MODEL`, `--output OUTPUT`.
- `--config FILE` takes options from a file, its own or the `facts.json` of an earlier run.
- All that is missing is told at once.
- What no command can use is refused: a switch with a value (`--streaming true`), an empty value, a
  number or a file without end, a place that cannot be written.
- Ctrl-C ends in one line.
- A line on the terminal says that libraries are loaded, which takes seconds.
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
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from hf_vit_cli.options import opt

if TYPE_CHECKING:
    from rich.table import Column

    from hf_vit.evaluation.protocols.frame import Table

_LARGEST = 2**32 - 1  # a seed of numpy; nothing that is counted comes near
_WRITTEN = ("output", "report")
_TRUTHS = ("true", "yes", "on", "1", "false", "no", "off", "0")
# Command -> the extra, and its libraries that the command always needs.
_NEEDED = {
    **{f"hf-vit {name}": ("train", ("sklearn", "matplotlib")) for name in ("demo", "finetune", "pretrain", "evaluate")},
    **{f"hf-vit {name}": ("train", ("sklearn", "matplotlib")) for name in ("soup", "compare")},
    "hf-vit analyze": ("analysis", ("sklearn", "matplotlib")),
    "hf-vit scaling-law": ("train", ("scipy", "matplotlib")),
}
# Name of an option in version 0.2 -> its name.
_RENAMED = {"--unlabelled": "--unlabeled", "--unlabelled-ratio": "--unlabeled-ratio", "--utilisation": "--utilization"}
# What a run did with its result is not done again because of a file that came with a model.
_NOT_REPEATED = ("output", "resume", "push", "private", "share_images")


@contextmanager
def stoppable(way_on: Callable[[], str]) -> Generator[None]:
    """Turn `KeyboardInterrupt` into one line that says what was kept and how to go on; the exit code is 130."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"hf-vit: stopped; {way_on()}", err=True)
        raise typer.Exit(130) from None


def finished_parts(output: str | Path) -> str:
    """Return the way on of a command that keeps what is finished in a folder, or at an address."""
    if "://" in str(output):
        return f"finished parts are in {output}; run the same command again to continue"
    output = Path(output)
    if output.is_dir() and any(not path.name.startswith(".") for path in output.iterdir()):
        return f"finished parts are in {output}; run the same command again to continue"
    return "nothing is finished yet; run the same command again"


class Command(TyperCommand):
    """A command of the program."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._arguments: list[Any] = [each for each in self.params if each.param_type_name == "argument"]
        for argument in self._arguments:
            argument.metavar = argument.metavar or argument.name.upper()
            argument.help = f"{argument.help} Also {_option_of(argument)}."

    @stoppable(lambda: "no incomplete files remain")
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer names the class of its context nowhere
        """Read what was typed into the context.

        Raises:
            typer.TyperException: it cannot be understood.
        """
        context: typer.Context = ctx
        args = [_current_name(word) for word in args]
        self._refuse_truths(context, args)
        args = self._in_place(context, args)
        try:
            rest = super().parse_args(ctx, list(args))
        except typer.BadParameter as error:
            if error.param is not None and error.message:  # of a value that is missing there is nothing to say
                given = self.make_parser(ctx).parse_args(list(args))[0].get(error.param.name)
                given = ctx.lookup_default(error.param.name) if given is None else given
                shown = " ".join(map(str, _listed(given)))
                context.fail(f"{_option_of(error.param)} '{shown}': {error.message[:1].lower()}{error.message[1:]}")
            missing = [_option_of(each) for each in self.params if each.required and each.name not in ctx.params]
            context.fail(f"{', '.join(missing)} must be given")
        self._refuse_senseless(context, self.make_parser(ctx).parse_args(list(args))[0])
        return rest

    @stoppable(lambda: "no incomplete files remain")
    def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the command; its libraries are imported before, in sight of who waits for them."""
        is_seen = sys.stderr.isatty()
        if is_seen:
            print(f"{ctx.command_path}: loading libraries ...", end="\r", file=sys.stderr, flush=True)
        from hf_vit.environment import require
        from hf_vit.families import register

        register()
        if is_seen:
            print(end="\x1b[K", file=sys.stderr, flush=True)
        extra, modules = _NEEDED.get(ctx.command_path, (None, ()))
        require(*modules, purpose=ctx.command_path, extra=extra)
        return super().invoke(ctx)

    def _refuse_truths(self, ctx: typer.Context, args: list[str]) -> None:
        """Tell of `--streaming true` and `--streaming=true`, which would be taken for an argument."""
        switches = {name: each for each in self.params if getattr(each, "is_flag", False) for name in each.opts}
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            name, equals, value = word.partition("=")
            value = value if equals else following
            if name in switches and (equals or value.lower() in _TRUTHS):
                negation = next(iter(switches[name].secondary_opts), f"no {name}")
                ctx.fail(f"{name} is a switch without a value, but got '{value}'; write {name}, or {negation}")

    def _refuse_senseless(self, context: typer.Context, given: Mapping[str, Any]) -> None:
        """Tell of empty values (a path "" is the working folder), and of numbers that overflow somewhere below."""
        for each in self.params:
            if "" in _listed(given.get(each.name)):
                context.fail(f"{_option_of(each)} is empty; give a value, or leave it out")
            for value in _listed(context.params.get(each.name)):
                if isinstance(value, str | Path) and is_endless(value):
                    context.fail(f"{_option_of(each)} {value} is a device or a pipe; give a file or a folder")
                if each.name in _WRITTEN and value is not None:
                    context.params[each.name] = place = _followed(value)
                    if (reason := _obstacle(place)) is not None:
                        said = f"{_option_of(each)} {value} cannot be written ({reason}); choose another path"
                        raise typer.TyperException(said)
                if isinstance(value, int) and abs(value) > _LARGEST:
                    context.fail(f"{_option_of(each)} {value} is too large; give at most {_LARGEST}")
                if isinstance(value, float) and not math.isfinite(value):
                    context.fail(f"{_option_of(each)} {value} is not a finite number; give one")

    def _in_place(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Return what was typed, with the arguments that were given by their names where they belong."""
        named: dict[str, list[str]] = {_option_of(each): [] for each in self._arguments}
        single = {_option_of(each) for each in self._arguments if each.nargs == 1}
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                others += [word, *words]
                break
            name, equals, value = word.partition("=")
            if name not in named:
                others.append(word)
                continue
            if not equals and (value := next(words, None)) is None:
                ctx.fail(f"{name} needs a value")
            if value.startswith("-"):
                ctx.fail(f"{name} '{value}' begins like an option; for a file write ./{value}")
            if name in single:  # as of any option, the last one counts
                named[name].clear()
            named[name].append(value)
        # What stands before an argument that was given without its name comes first, what stands behind it last.
        first = list(takewhile(bool, named.values()))
        last = list(named.values())[len(first) :]
        return [*chain(*first), *others, *chain(*last)]


def _followed(value: str | Path) -> str | Path:
    """Return what a link to a file leads to: it is that which is to be written."""
    is_link = os.path.islink(value) and os.path.isfile(value)
    return type(value)(os.path.realpath(value)) if is_link else value


def _obstacle(value: str | Path) -> str | None:
    """Return why a path cannot be written; None for URLs, which are not checked here."""
    if any("\ud800" <= letter <= "\udfff" for letter in str(value)):  # the libraries that write files want UTF-8
        return "its name is not UTF-8"
    return None if isinstance(value, str) and "://" in value else obstacle(Path(value))


def _current_name(word: str) -> str:
    """Replace the former name of an option, as "--name" or "--name=value"."""
    name, equals, value = word.partition("=")
    if name not in _RENAMED:
        return word
    warnings.warn(
        f"{name} is now {_RENAMED[name]}; the old name will be removed in version 0.4", FutureWarning, stacklevel=2
    )
    return _RENAMED[name] + equals + value


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _option_of(parameter: Any) -> str:
    """`--model` of the argument MODEL, to be repeated of MODELS; `--learning-rate` of an option."""
    if parameter.param_type_name == "option":
        return parameter.opts[0]
    name = parameter.name.removesuffix("s") if parameter.nargs < 0 else parameter.name
    return f"--{name.replace('_', '-')}"


def take_config(context: typer.Context, file: Path | None) -> None:
    """Let the options that a file names be the defaults of this call.

    A mapping names them as the command does (`learning_rate: 0.01`); of a `facts.json` the last run of this command is
    taken.
    """
    if file is None or context.resilient_parsing:
        return
    if is_endless(file):
        context.fail(f"--config {file} is a device or a pipe; give a file")
    content = _read(context, file)
    options = _recorded(context, file, content) if isinstance(content, list) else content
    if not isinstance(options, Mapping):
        context.fail(f"--config {file} holds no options; give 'name: value' lines, or the facts.json of a run")
    is_switch = {each.name: getattr(each, "is_flag", False) for each in context.command.params}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        name = _current_name(f"--{key}".replace("_", "-"))[2:].replace("-", "_")
        if name not in is_switch:
            near = get_close_matches(name, is_switch, 1)
            context.fail(f"--config {file}: '{key}' is not an option{f'; did you mean {near[0]}?' if near else ''}")
        if value is not None:
            defaults[name] = value if isinstance(value, bool) and is_switch[name] else _typed(value)
    context.default_map = defaults


CONFIG = opt(
    None,
    "Read options from a YAML or JSON file, or from the facts.json of an earlier run. Typed options take precedence.",
    "--config",
    metavar="FILE",
    callback=take_config,
    is_eager=True,
    expose_value=False,
    exists=True,
    dir_okay=False,
)


def _read(context: typer.Context, file: Path) -> Any:
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        context.fail(f"--config {file} cannot be read ({error}); give a YAML or JSON file")


def _recorded(context: typer.Context, file: Path, records: list[Any]) -> dict[str, Any]:
    """Return the options of the last run of this command that a facts.json knows."""
    commands = [str(record.get("command", "")) for record in records if isinstance(record, dict)]
    runs = [command for command in commands if command.startswith(f"{context.command_path} ")]
    if not runs:
        context.fail(f"--config {file} records no run of {context.command_path}")
    try:
        words = shlex.split(runs[-1].removeprefix(context.command_path))
        typed = context.command.make_context(context.info_name, words)
    except (ValueError, typer.TyperException) as error:
        context.fail(f"--config {file} records a command that cannot be read ({error}); type its options")
    sources = {name: typed.get_parameter_source(name) for name in typed.params if name not in _NOT_REPEATED}
    return {name: typed.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _typed(value: Any) -> Any:
    """Return a value as it would be typed, so that it is read and refused in the same way."""
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return str(value)


def command_line(context: typer.Context) -> str:
    """`hf-vit evaluate out/model --data digits`: the arguments, and the options that differ from their defaults."""
    words = context.command_path.split()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        options = [name for name in parameter.opts if name.startswith("--")]
        if value is None or (options and value == parameter.default):
            continue
        if isinstance(value, bool):
            words.append(options[0] if value else parameter.secondary_opts[0])
            continue
        values = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
        if parameter.nargs > 1:  # one option with several values
            words += [*options[:1], *values]
        else:
            for item in values:
                words += [*options[:1], item]
    return shlex.join(words)


def pass_on(values: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Return the options of a command by their names, of its `locals()`."""
    own = {name: value for name, value in values.items() if name not in ("context", "shared", *without)}
    return own | values.get("shared", {})


def tell(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text for people, without secrets, as it may be kept in a log; it may hold words of strangers: names of
    classes and files, records of a model.
    """
    from hf_vit.results.redaction import redact_message

    typer.echo(plain_text(redact_message(text)), err=err, nl=nl)


def plain_text(text: str) -> str:
    """Return a text without what controls a terminal or turns the direction of writing; lines and columns stay."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(sign if sign in "\n\t" or unicodedata.category(sign) not in kinds else " " for sign in text)


def print_table(rows: "Iterable[Sequence[str] | None]", *header: "str | Column", title: str | None = None) -> None:
    """Print rows of text; None draws a line between two of them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns = [escape(plain_text(each)) if isinstance(each, str) else each for each in header]
    table = Table(*columns, title=title and escape(plain_text(title)), title_justify="left", show_header=bool(header))
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(escape(plain_text(cell)) for cell in row))
    Console().print(table)


def print_tables(tables: "Iterable[Table]") -> None:
    """Print tables, each below its title."""
    for table in tables:
        tell(table.title)
        print_table(table.rows, *table.header)


def is_endless(path: str | Path) -> bool:
    """Return whether a device or a pipe has this name, which may never end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def obstacle(place: Path) -> str | None:
    """Return why nothing can be written to a file or folder of this name; None where it can. Nothing is written."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(place)):  # as s3:// does, of which a `Path` has lost a slash
        return "it is a URL, not a local path"
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(place)  # which a name that is too long does not survive
        nearest = next(each for each in (place.absolute(), *place.absolute().parents) if os.path.lexists(each))
        if not nearest.exists():
            return f"{nearest.name} is a broken link"
        if nearest == place.absolute() and nearest.is_file():
            nearest = nearest.parent
        if not nearest.is_dir():
            return f"{nearest} is not a folder"
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return error.strerror
