"""Get a model from the Hub, and check a model's folder before a library loads it.

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
from hf_vit.repositories.hub import chain, explain

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order of preference
POINTER = b"version https://git-lfs"  # how a file begins that git has in place of a large one
_INDEXES = tuple(f"{name}.index.json" for name in WEIGHTS)
_DESCRIPTIONS = (CONFIG, ADAPTER, "preprocessor_config.json", "processor_config.json")
_LARGEST_JSON = 32 * 2**20  # bytes; an index of 1,000 layers has less than one MiB
# Fields by which libraries look for weights, or for code, in another place than the checkpoint's own.
_PLACES = ("transformers_weights", "checkpoint_path", "cache_dir", "pretrained_cfg_overlay", "pretrained_model_args")
# The same, where their value is no plain name.
_NAMES = ("architecture", "backbone", "attn_implementation", "_attn_implementation")


def model_folder(repo_id: str, revision: str | None = None) -> Path:
    """Return the folder of the Hub's cache with config, processor and weights of a model.

    Raises:
        UserError: there is no such model, it is gated, the Hub cannot be reached and the cache does not hold it, or
            its files name other places.
    """
    from huggingface_hub import snapshot_download

    def get(at: str | None, *names: str) -> Path:
        with reading(repo_id):
            return Path(snapshot_download(repo_id, revision=at, allow_patterns=list(names)))

    folder = get(revision, *_DESCRIPTIONS, *_INDEXES, WEIGHTS[0])
    commit = folder.name  # what was checked is what is fetched
    if not any((folder / name).is_file() for name in (WEIGHTS[0], _INDEXES[0])):
        get(commit, WEIGHTS[1])
    check_folder(folder, repo_id)
    if shards := weight_shards(folder, repo_id):
        get(commit, *shards)
    return folder


@contextmanager
def reading(repo_id: str) -> Generator[None]:
    """Within, something is read from the Hub: its client is silent, writes into its cache, and fails in one line."""
    from huggingface_hub.utils import get_session
    from huggingface_hub.utils import logging as client_log

    def check(response: Any) -> None:  # the client makes paths of these headers unseen
        for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
            if re.search(r"[/\\\0]|\.\.", response.headers.get(header, "").removeprefix("W/")):
                raise UserError(f"the server sent the file name {response.headers[header][:80]!r}, which is not valid")

    hooks: list[Any] = get_session().event_hooks["response"]
    verbosity = client_log.get_verbosity()
    client_log.set_verbosity(logging.CRITICAL)
    hooks.append(check)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, disks and deprecations: what matters raises
            yield
    except Exception as error:
        raise explain(error, repo_id, reading=True) from error
    finally:
        hooks.remove(check)
        client_log.set_verbosity(verbosity)


@contextmanager
def loading(name: str) -> Generator[None]:
    """Within, a library makes a model or a processor of somebody's files: whatever it raises is a refusal of these."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch's, of what it then refuses
            yield
    except UserError:
        raise
    except Exception as error:  # of every kind: the files decide what a library stumbles over
        if is_out_of_memory(error):
            raise
        said = f"{first_line(error):.200}"
        if isinstance(error, SafetensorError | EOFError):
            told = f"the weights of {name} are damaged ({said}); copy or save them again"
        elif isinstance(error, StrictDataclassError):
            told = f"{CONFIG} of {name} is not valid: {strict_reason(error)}; correct it"
        elif any(isinstance(link, UnpicklingError) or "weights_only" in str(link) for link in chain(error)):
            told = (
                f"{name} holds a pickle of more than tensors, which could run code, so it was not loaded; give weights "
                "in safetensors format"
            )
        else:
            told = f"{name} cannot be loaded: {type(error).__name__}, {said}; get or save it again"
        raise UserError(told) from error


def check_folder(folder: Path, name: str) -> None:
    """Refuse a model's folder whose files name other places, before a library looks there."""
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{name} holds an adapter ({ADAPTER}), whose base model is in another repository; merge them "
            "(peft: merge_and_unload), save the result and give that"
        )
    config = read_object(folder / CONFIG, name) if (folder / CONFIG).is_file() else {}
    place, arguments = _place_in(config), config.get("model_args")
    if place is None and isinstance(arguments, dict):  # what timm is told of parameters is not where they come from
        place = next(((key, arguments[key]) for key in ("pretrained", "pretrained_cfg") if arguments.get(key)), None)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType, reportUnknownMemberType]
    if place is not None:
        raise UserError(
            f"{CONFIG} of {name} refers to another repository ({place[0]}: {str(place[1])[:80]!r}), which "
            "is not read; remove it, or give a complete model"
        )
    for weights in [*WEIGHTS, *indexed_files(folder, name)]:
        refuse_pointer(folder / weights, f"{weights} of {name}")


def refuse_pointer(path: Path, name: str) -> None:
    """Refuse a file that git has in place of a large one, before a library calls it damaged."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise UserError(f"{name} is a Git LFS pointer; fetch the file with git lfs pull")


def _place_in(value: object, depth: int = 0) -> tuple[str, object] | None:
    """Return the first field of a config, at any depth, that names another place."""
    if depth > 50 or not isinstance(value, dict | list):
        return None
    fields: Mapping[str, object] = value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    for key, item in fields.items():
        is_place = key in _PLACES and item is not None
        if is_place or (key in _NAMES and isinstance(item, str) and re.search(r"[/\\:]", item)):
            return key, item
    inside: Any = fields.values() if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]
    return next((place for item in inside if (place := _place_in(item, depth + 1))), None)


def weight_shards(folder: Path, name: str) -> list[str]:
    """Return the files that a folder's weights are in, by its index; none where they are one file."""
    for weights, index in zip(WEIGHTS, _INDEXES, strict=True):
        if (folder / weights).is_file():
            return []
        if (folder / index).is_file():
            return _shards_of(folder / index, name)
    return []


def indexed_files(folder: Path, name: str) -> set[str]:
    """Return all files that a folder's indexes name, needed or not."""
    return {file for index in _INDEXES if (folder / index).is_file() for file in _shards_of(folder / index, name)}


def _shards_of(index: Path, name: str) -> list[str]:
    weight_map: Any = read_object(index, name).get("weight_map")
    files: set[Any] = {*map(str, weight_map.values())} if isinstance(weight_map, dict) else set()
    if not files or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(
            f"{index.name} of {name} is damaged (it has no weight_map of tensors to files); save the model again"
        )
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for file in files:
        check_name(file, f"{index.name} of {name}")
        if not re.fullmatch(r"[\w-][\w.-]{0,199}", file) or not file.endswith(suffix):
            raise UserError(
                f"{index.name} of {name} names {file[:80]!r}, no {suffix} file of its folder; save the model again"
            )
    return sorted(files)


def read_object(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of reasonable size."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"more than {_LARGEST_JSON:,} bytes")
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = f"not valid JSON: {first_line(error):.120}"
        raise UserError(f"{path.name} of {name} is damaged ({reason}); get or save it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path.name} of {name} is damaged (not a JSON object); save it again")
    return content  # pyright: ignore[reportUnknownVariableType] - JSON's keys are text


def check_name(name: str, named_by: str) -> str:
    """Return a file's name that a folder's own files chose, if it stays in that folder."""
    pure = PureWindowsPath(name)  # knows both separators
    if not name or pure.drive or pure.root or ".." in pure.parts or "\\" in name or "\0" in name:
        raise UserError(f"{named_by} names {name[:80]!r}, which is not inside the model's folder; save the model again")
    return name
