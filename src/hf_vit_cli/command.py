"""How every command reads what was typed: what `typer` does, and four things more.

- An argument can be given by its name as well: every command that needs one takes `--model MODEL`, `--output OUTPUT`.
- All that is missing is told at once.
- A switch that is given a value (`--streaming true`) is told so.
- Ctrl-C ends in one line.
"""

from itertools import chain, takewhile, zip_longest
from typing import Any

import typer
from typer.core import TyperCommand

from hf_vit_cli.stopping import stoppable

_TRUTHS = ("true", "yes", "on", "1", "false", "no", "off", "0")


class Command(TyperCommand):
    """A command of the program."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._arguments: list[Any] = [each for each in self.params if each.param_type_name == "argument"]
        for argument in self._arguments:
            argument.metavar = argument.metavar or argument.name.upper()
            argument.help = f"{argument.help} Also {_option_of(argument)}."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer names the class of its context nowhere
        """Read what was typed into the context.

        Raises:
            typer.TyperException: it cannot be understood.
        """
        context: typer.Context = ctx
        self._refuse_truths(context, args)
        args = self._in_place(context, args)
        try:
            return super().parse_args(ctx, list(args))
        except typer.BadParameter as error:
            if error.param is not None and error.message:  # of a value that is missing there is nothing to say
                given = self.make_parser(ctx).parse_args(args)[0].get(error.param.name)
                given = ctx.lookup_default(error.param.name) if given is None else given
                shown = " ".join(map(str, given)) if isinstance(given, list | tuple) else given
                context.fail(f"{_option_of(error.param)} '{shown}': {error.message[:1].lower()}{error.message[1:]}")
            missing = [_option_of(each) for each in self.params if each.required and each.name not in ctx.params]
            context.fail(f"{', '.join(missing)} must be given")

    def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the command; one that is stopped and says nothing of its own ends in a line as well."""
        with stoppable(lambda: "nothing is left half-written"):
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

    def _in_place(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """What was typed, with the arguments that were given by their names where they belong."""
        named: dict[str, list[str]] = {_option_of(each): [] for each in self._arguments}
        others: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                others += [word, *words]
                break
            name, equals, value = word.partition("=")
            if name not in named:
                others.append(word)
            elif equals:
                named[name].append(value)
            elif (following := next(words, None)) is not None:
                named[name].append(following)
            else:
                ctx.fail(f"{name} needs a value")
        # What stands before an argument that was given without its name comes first, what stands behind it last.
        first = list(takewhile(bool, named.values()))
        last = list(named.values())[len(first) :]
        return [*chain(*first), *others, *chain(*last)]


def _option_of(parameter: Any) -> str:
    """`--model` of the argument MODEL, to be repeated of MODELS; `--learning-rate` of an option."""
    if parameter.param_type_name == "option":
        return parameter.opts[0]
    name = parameter.name.removesuffix("s") if parameter.nargs < 0 else parameter.name
    return f"--{name.replace('_', '-')}"
