"""Bars on a terminal, nothing elsewhere."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from transformers.utils import logging as transformers_logging


@contextmanager
def progress(what: str, size: int | None = None) -> Generator[Callable[[int], None]]:
    """A bar while something lasts; the function that is given moves it on by so many bytes.

    Args:
        what: words before the bar.
        size: in bytes; None where nobody can say how far it is.
    """
    console = Console(stderr=True)
    columns = [TextColumn(what, markup=False), BarColumn()]
    if size is not None:
        columns += [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Silence transformers' bars, its advice, and its tables of weights, which an error tells in one line."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()
