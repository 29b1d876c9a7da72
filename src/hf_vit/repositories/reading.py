"""Getting a model from the Hub, and looking at a model's folder before a library loads it.

Whoever wrote a repository is not trusted. Config, processor and weights are fetched and nothing else, so that none of
its code is at hand; and what names another place than the folder itself is refused.
"""

import json
import logging
import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from hf_vit.errors import UserError, first_line, is_out_of_memory, strict_reason
from hf_vit.repositories.failures import explain
from hf_vit.repositories.retrying import chain

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order of preference
_DESCRIPTIONS = (CONFIG, ADAPTER, "preprocessor_config.json", "processor_config.json")
_LARGEST_JSON = 32 * 2**20  # bytes; an index of 1,000 layers has less than one MiB
# Fields by which libraries look for weights, or for code, in another place than the checkpoint's own.
_PLACES = ("transformers_weights", "checkpoint_path", "cache_dir", "pretrained_cfg_overlay", "pretrained_model_args")
# The same, where their value is no plain name.
_NAMES = ("architecture", "backbone", "attn_implementation", "_attn_implementation")
# What timm is told of a model's own parameters must not be where it comes from.
_OF_TIMM = ("pretrained", "pretrained_cfg")


def model_folder(repo_id: str, revision: str | None = None) -> Path:
    """The config, processor and weights of a model on the Hub, in the Hub's cache.

    Raises:
        UserError: there is no such model, it is gated, the Hub cannot be reached and the cache does not hold it, or
            its files name other places.
    """
    from huggingface_hub import snapshot_download

    def get(at: str | None, *names: str) -> Path:
        with reading(repo_id):
            return Path(snapshot_download(repo_id, revision=at, allow_patterns=list(names)))

    folder = get(revision, *_DESCRIPTIONS, *(f"{name}.index.json" for name in WEIGHTS), WEIGHTS[0])
    commit = folder.name  # what was checked is what is fetched
    if not any((folder / name).is_file() for name in (WEIGHTS[0], f"{WEIGHTS[0]}.index.json")):
        get(commit, WEIGHTS[1])
    check_folder(folder, repo_id)
    if shards := weight_shards(folder, repo_id):
        get(commit, *shards)
    return folder


@contextmanager
def reading(repo_id: str) -> Generator[None]:
    """Within, something is read from the Hub: its client is silent, writes into its cache, and fails in one line.

    Raises:
        UserError: why it cannot be read.
    """
    from huggingface_hub.utils import logging as client_log

    verbosity = client_log.get_verbosity()
    client_log.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _honest_names():
            warnings.simplefilter("ignore")  # of sizes, disks and deprecations: what matters raises
            yield
    except Exception as error:
        raise explain(error, repo_id, reading=True) from error
    finally:
        client_log.set_verbosity(verbosity)


@contextmanager
def loading(name: str) -> Generator[None]:
    """Within, a library makes a model or a processor of somebody's files: whatever it raises is a refusal of these.

    Raises:
        UserError: why they cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch's, of what it then refuses
            yield
    except UserError:
        raise
    except Exception as error:  # of every kind: the files decide what a library stumbles over
        if is_out_of_memory(error):
            raise
        if isinstance(error, SafetensorError | EOFError):
            raise UserError(
                f"the weights of {name} are damaged ({first_line(error):.200}); copy or save them again"
            ) from error
        if isinstance(error, StrictDataclassError):
            raise UserError(f"{CONFIG} of {name} is not valid: {strict_reason(error)}; correct it") from error
        if any(isinstance(link, UnpicklingError) or "weights_only" in str(link) for link in chain(error)):
            raise UserError(
                f"{name} holds a pickle of more than tensors, which could run code, so it was not loaded; give weights "
                "in safetensors format"
            ) from error
        raise UserError(
            f"{name} cannot be loaded: {type(error).__name__}, {first_line(error):.200}; get or save it again"
        ) from error


@contextmanager
def _honest_names() -> Generator[None]:
    """Refuse a server whose names lead out of the cache: the client makes paths of them unseen."""
    from huggingface_hub.utils import get_session

    def check(response: Any) -> None:
        for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
            if re.search(r"[/\\\0]|\.\.", response.headers.get(header, "").removeprefix("W/")):
                raise UserError(f"the server sent the file name {response.headers[header][:80]!r}, which is not valid")

    hooks: list[Any] = get_session().event_hooks["response"]
    hooks.append(check)
    try:
        yield
    finally:
        hooks.remove(check)


def check_folder(folder: Path, name: str) -> None:
    """Refuse a model's folder whose files name other places, before a library looks there.

    Raises:
        UserError: says which file, and what it names.
    """
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{name} holds an adapter ({ADAPTER}), whose base model is in another repository; merge them "
            "(peft: merge_and_unload), save the result and give that"
        )
    config = read_object(folder / CONFIG, name) if (folder / CONFIG).is_file() else {}
    place = _place_in(config) or _place_of_timm(config.get("model_args"))
    if place is not None:
        raise UserError(
            f"{CONFIG} of {name} refers to another repository ({place[0]}: {str(place[1])[:80]!r}), which "
            "is not read; remove it, or give a complete model"
        )
    indexed_files(folder, name)


def weight_shards(folder: Path, name: str) -> list[str]:
    """The files that a folder's weights are in, by its index; none where they are one file.

    Raises:
        UserError: see `indexed_files`.
    """
    for weights in WEIGHTS:
        if (folder / weights).is_file():
            return []
        index = folder / f"{weights}.index.json"
        if index.is_file():
            return _shards_of(index, name)
    return []


def indexed_files(folder: Path, name: str) -> set[str]:
    """All files that a folder's indexes name, needed or not.

    Raises:
        UserError: an index is damaged, or names what is no file of the folder itself.
    """
    indexes = [folder / f"{weights}.index.json" for weights in WEIGHTS]
    return {file for index in indexes if index.is_file() for file in _shards_of(index, name)}


def _shards_of(index: Path, name: str) -> list[str]:
    weight_map: object = read_object(index, name).get("weight_map")
    files: set[object] = set()
    if isinstance(weight_map, dict):
        files = {file if isinstance(file, str) else None for file in weight_map.values()}  # pyright: ignore[reportUnknownVariableType]
    if not files or None in files:
        raise UserError(
            f"{index.name} of {name} is damaged (it has no weight_map of tensors to files); save the model again"
        )
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for file in map(str, files):
        check_name(file, f"{index.name} of {name}")
        if not re.fullmatch(r"[\w-][\w.-]{0,199}", file) or not file.endswith(suffix):
            raise UserError(
                f"{index.name} of {name} names {file[:80]!r}, no {suffix} file of its folder; save the model again"
            )
    return sorted(map(str, files))


def read_object(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of reasonable size.

    Raises:
        UserError: the file is none.
    """
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"more than {_LARGEST_JSON:,} bytes")
        content: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = f"not valid JSON: {first_line(error):.120}"
        raise UserError(f"{path.name} of {name} is damaged ({reason}); get or save it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} of {name} is damaged (not a JSON object); save it again")
    return content  # pyright: ignore[reportUnknownVariableType] - JSON's keys are text


def check_name(name: str, named_by: str) -> str:
    """A file's name that a folder's own files chose, if it stays in that folder.

    Raises:
        UserError: it is absolute, or leads out by "..".
    """
    pure = PureWindowsPath(name)  # knows both separators
    if not name or pure.drive or pure.root or ".." in pure.parts or "\\" in name or "\0" in name:
        raise UserError(f"{named_by} names {name[:80]!r}, which is not inside the model's folder; save the model again")
    return name


def _place_in(value: object, depth: int = 0) -> tuple[str, object] | None:
    """The first field of a config, at any depth, that names another place."""
    if depth > 50 or not isinstance(value, dict | list):
        return None
    if isinstance(value, list):
        return next((found for item in value if (found := _place_in(item, depth + 1))), None)  # pyright: ignore[reportUnknownVariableType]
    fields: Mapping[str, object] = value  # pyright: ignore[reportUnknownVariableType]
    for key, item in fields.items():
        is_place = key in _PLACES and item is not None
        if is_place or (key in _NAMES and isinstance(item, str) and re.search(r"[/\\:]", item)):
            return key, item
    return next((found for item in fields.values() if (found := _place_in(item, depth + 1))), None)


def _place_of_timm(model_args: object) -> tuple[str, object] | None:
    fields: Mapping[str, object] = model_args if isinstance(model_args, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    return next(((key, fields[key]) for key in _OF_TIMM if fields.get(key)), None)
