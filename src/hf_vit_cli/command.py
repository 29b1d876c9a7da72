"""How every command reads what was typed: what `typer` does, and four things more.

- An argument can be given by its name as well: every command that needs one takes `--model MODEL`, `--output OUTPUT`.
- All that is missing is told at once.
- What no command can use is refused: a switch with a value (`--streaming true`), an empty value, a
  number or a file without end, a place that cannot be written.
- Ctrl-C ends in one line.
"""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from hf_vit_cli.places import is_endless, obstacle
from hf_vit_cli.stopping import stoppable

_LARGEST = 2**32 - 1  # a seed of numpy; nothing that is counted comes near
_WRITTEN = ("output", "report")
_STOPPED = stoppable(lambda: "nothing is left half-written")  # where a command says nothing of its own
_TRUTHS = ("true", "yes", "on", "1", "false", "no", "off", "0")


class Command(TyperCommand):
    """A command of the program."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._arguments: list[Any] = [each for each in self.params if each.param_type_name == "argument"]
        for argument in self._arguments:
            argument.metavar = argument.metavar or argument.name.upper()
            argument.help = f"{argument.help} Also {_option_of(argument)}."

    @_STOPPED
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer names the class of its context nowhere
        """Read what was typed into the context.

        Raises:
            typer.TyperException: it cannot be understood.
        """
        context: typer.Context = ctx
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

    @_STOPPED
    def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the command."""
        return super().invoke(ctx)

    def _refuse_truths(self, ctx: typer.Context, args: list[str]) -> None:
        """Tell of `--streaming true` and `--streaming=true`, which would be taken for an argument."""
        switches = {name: each for each in self.params if getattr(each, "is_flag", False) for name in each.opts}
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            name, equals, value = word.partition("=")
            value = value if equals else following
            if name in switches and (equals or value.lower() in _TRUTHS):
                negation = next(iter(switches[name].secondary_opts), f"no {name}")
                ctx.fail(f"{name} is a switch without a value, but got '{value}': write {name}, or {negation}")

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
                        said = f"{_option_of(each)} {value} cannot be written ({reason}); choose another place"
                        raise typer.TyperException(said)
                if isinstance(value, int) and abs(value) > _LARGEST:
                    context.fail(f"{_option_of(each)} {value} is too large; give at most {_LARGEST}")
                if isinstance(value, float) and not math.isfinite(value):
                    context.fail(f"{_option_of(each)} {value} is no finite number; give one")

    def _in_place(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """What was typed, with the arguments that were given by their names where they belong."""
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
                ctx.fail(f"{name} '{value}' begins as an option does; of a file write ./{value}")
            if name in single:  # as of any option, the last one counts
                named[name].clear()
            named[name].append(value)
        # What stands before an argument that was given without its name comes first, what stands behind it last.
        first = list(takewhile(bool, named.values()))
        last = list(named.values())[len(first) :]
        return [*chain(*first), *others, *chain(*last)]


def _followed(value: str | Path) -> str | Path:
    """What a link to a file leads to: it is that which is to be written."""
    is_link = os.path.islink(value) and os.path.isfile(value)
    return type(value)(os.path.realpath(value)) if is_link else value


def _obstacle(value: str | Path) -> str | None:
    """Nothing is known here of a place that may be elsewhere: a text, in which a command takes addresses, too."""
    if any("\ud800" <= letter <= "\udfff" for letter in str(value)):  # the libraries that write files want UTF-8
        return "its name is not UTF-8"
    return None if isinstance(value, str) and "://" in value else obstacle(Path(value))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _option_of(parameter: Any) -> str:
    """`--model` of the argument MODEL, to be repeated of MODELS; `--learning-rate` of an option."""
    if parameter.param_type_name == "option":
        return parameter.opts[0]
    name = parameter.name.removesuffix("s") if parameter.nargs < 0 else parameter.name
    return f"--{name.replace('_', '-')}"
