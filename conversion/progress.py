"""Show progress bars on a terminal, and silence those of transformers."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from transformers.utils import logging as transformers_logging


@contextmanager
def progress(title: str, size: int | None = None) -> Generator[Callable[[int], None]]:
    """Show a bar on a terminal during a block; yield a function that advances it by a number of bytes.

    `size` is the total in bytes; None if the progress is unknown.
    """
    console = Console(stderr=True)
    columns = [TextColumn(title, markup=False), BarColumn()]
    if size is not None:
        columns += [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=size)
        yield lambda count: bar.advance(task, count)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Silence transformers' progress bars, advice and tables of weights, which an error reports in one line."""
    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()
