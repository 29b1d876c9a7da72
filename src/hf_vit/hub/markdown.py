"""What is recorded, written into a card so that it stays where it stands: text, a span of code, a block of code."""

import re

from hf_vit.errors import one_line

# Markdown's and GitHub's own markup, HTML, entities, formulas ($) and mentions (@); addresses are no links either.
_MARKUP = re.compile(r"[\\`*_<>|\[\]#~$@&]|:(?=//)|(?<=www)\.", re.IGNORECASE)


class Markdown(str):
    """Markdown as it is meant; of everything else that a template prints the markup is escaped, see `text`."""

    __slots__ = ()


def text(value: object) -> Markdown:
    """Words that stay inside their line or table cell and are not taken for markup."""
    return value if isinstance(value, Markdown) else Markdown(_MARKUP.sub(r"\\\g<0>", one_line(value)))


def code_span(value: object) -> Markdown:
    """A span of code that ends where it should."""
    line = one_line(value)
    ticks = _more_ticks(line, 1)
    padding = " " if "`" in line else ""
    return Markdown(f"{ticks}{padding}{line}{padding}{ticks}")


def code_block(code: str, language: str) -> Markdown:
    """A block of code, which no line of it can close."""
    ticks = _more_ticks(code, 3)
    return Markdown(f"{ticks}{language}\n{code}\n{ticks}")


def _more_ticks(code: str, least: int) -> str:
    longest = max(map(len, re.findall("`+", code)), default=0)
    return "`" * max(least, longest + 1)
