"""Data of the Hub: what files say of other places is refused before any of these is looked at."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.data.sources.data_source import DataSource
from hf_vit.errors import UserError
from hf_vit.repositories.reading import reading

if TYPE_CHECKING:
    from datasets import Dataset

# Where a card, or the file in its stead, tells `datasets` which files are read.
_DECLARING = ("README.md", ".huggingface.yaml")
_PATTERNS = ("data_files", "data_dir")


def load_hub(repo: str, commit: str | None, configuration: str | None, *, streaming: bool) -> Any:
    """What `datasets` makes of a data set, split by split, from its own files alone.

    Args:
        repo: user/name.
        commit: to be read; None where the Hub cannot be asked, for what was read before.
        configuration: None for the only one.

    Raises:
        UserError: it names files of another place.
        Exception: whatever `datasets` raises.
    """
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, load_dataset

    if commit is not None:
        for pattern in _declared(repo, commit):
            _refuse_pattern(repo, pattern)
    is_quiet = are_progress_bars_disabled() or sys.stderr.isatty()
    if not is_quiet:  # bars are for terminals
        disable_progress_bars()
    try:
        return load_dataset(repo, configuration, revision=commit, streaming=streaming)
    finally:
        if not is_quiet:
            enable_progress_bars()


def _declared(repo: str, commit: str) -> Iterator[str]:
    """Every pattern of files in the data set's own description."""
    import yaml
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in _DECLARING:
        with reading(repo):
            try:
                text = Path(hf_hub_download(repo, name, repo_type="dataset", revision=commit)).read_text("utf-8")
            except EntryNotFoundError:
                continue
        front = text.split("\n---", 1)[0].removeprefix("---") if name.endswith(".md") else text
        try:
            described: object = yaml.safe_load(front)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise UserError(f"{name} of {repo} cannot be read as YAML; its author has to mend it") from error
        yield from _patterns_in(described)


def _patterns_in(value: object, within: bool = False, depth: int = 0) -> Iterator[str]:
    """Texts under a key that names files, at any depth."""
    if within and isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and depth < 20:
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _patterns_in(item, (within and key != "split") or key in _PATTERNS, depth + 1)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list) and depth < 20:
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _patterns_in(item, within, depth + 1)  # pyright: ignore[reportUnknownArgumentType]


def _refuse_pattern(repo: str, pattern: str) -> None:
    """Relative ones stay inside the repository."""
    if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~", "\\")) or ".." in pattern.split("/"):
        raise UserError(f"{repo} names files of another place ({pattern[:80]!r}), which are not read; give other data")


def refuse_places(table: "Dataset", column: str, source: DataSource) -> None:
    """Refuse a table whose images, instead of being in it, are to be read from somewhere else.

    A stranger's may only name what lies in the Hub's caches, one of this machine no addresses.

    Raises:
        UserError: names the first.
    """
    import pyarrow.compute
    from datasets import config
    from huggingface_hub import constants

    pc: Any = pyarrow.compute  # whose functions are made when it is imported
    images: Any = table.data.column(column)
    outside = pc.filter(pc.struct_field(images, "path"), pc.is_null(pc.struct_field(images, "bytes")))
    caches = [os.path.realpath(place) for place in (constants.HF_HUB_CACHE, config.HF_DATASETS_CACHE)]
    for path in pc.unique(outside).to_pylist():
        if path is None:
            continue
        if is_foreign(source, path) and not any(os.path.realpath(path).startswith(place + os.sep) for place in caches):
            refuse_image(source.name, path)


def is_foreign(source: DataSource, path: object) -> bool:
    """Whether a table of this source has no business there."""
    return not source.may_name_files or "://" in str(path)


def refuse_image(repo: str, path: object) -> None:
    """The error of an image that a table wants to be read from somewhere."""
    raise UserError(
        f"{repo} names a file in place of an image ({str(path)[:80]!r}), which is not read; give data that hold their "
        "images"
    )
