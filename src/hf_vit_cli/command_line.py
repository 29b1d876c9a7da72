"""The command that is running, as a line that repeats it."""

import shlex

import typer


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
