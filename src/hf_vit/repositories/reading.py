"""Download a model from the Hub, and check a model folder before a library loads it.

The author of a repository is not trusted. Only config, processor and weights are downloaded, never code, and references
to files outside the folder are refused.
"""

import json
import logging
import re
import warnings
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from hf_vit.errors import UserError, get_first_line, get_strict_reason, is_out_of_memory
from hf_vit.repositories.hub import explain_hub_error, list_causes

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order of preference
POINTER = b"version https://git-lfs"  # how a file begins that git has in place of a large one
COUNTER = "num_batches_tracked"  # unused buffer of batch norms, which DETR's frozen ones lack
_LAYER = re.compile(r"(.*?\.)\d+\.")  # how the weights of a layer begin, and of the list that it is in
_OF_OTHER_TASKS = re.compile(rf"\.pooler\.|\.mask_token$|\.{COUNTER}$")
_INDEXES = tuple(f"{name}.index.json" for name in WEIGHTS)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_DESCRIPTIONS = (CONFIG, ADAPTER, *_PROCESSORS, "facts.json")  # has thresholds
_MAX_JSON_BYTES = 32 * 2**20  # bytes; an index of 1,000 layers has less than one MiB
# Fields that make libraries load weights or code from outside the checkpoint.
_REFERENCE_FIELDS = (
    "transformers_weights",
    "checkpoint_path",
    "cache_dir",
    "pretrained_cfg_overlay",
    "pretrained_model_args",
    "class_info_file",  # of OneFormer's image processor
)
# Fields that do so if their value is a path or repository instead of a plain name.
_NAME_FIELDS = ("architecture", "backbone")
# Fields with the name of a function, or an object with one for each part of a model; with a / it is code on the Hub.
_FUNCTION_FIELD = re.compile("_?(attn|experts)_implementation(_internal)?")

# Counts by which libraries build as many objects, and their maximum.
_MAX_COUNTS = {"num_labels": 250_000, **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "depth"), 1_000)}


def download_model(repo_id: str, revision: str | None = None) -> Path:
    """Download config, processor, facts.json and weights of a model, and return their folder in the Hub's cache.

    Raises:
        UserError: the model does not exist, is gated, cannot be reached and is not cached, or refers to other
            repositories.
    """
    from huggingface_hub import snapshot_download

    def download(revision_or_commit: str | None, *names: str) -> Path:
        with guard_hub_access(repo_id):
            return Path(snapshot_download(repo_id, revision=revision_or_commit, allow_patterns=list(names)))

    folder = download(revision, *_DESCRIPTIONS, *_INDEXES, WEIGHTS[0])
    commit = folder.name  # later downloads use the commit that was checked
    if not any((folder / name).is_file() for name in (WEIGHTS[0], _INDEXES[0])):
        download(commit, WEIGHTS[1])
    check_references(folder, repo_id)
    if shards := list_shards(folder, repo_id):
        download(commit, *shards)
    return folder


@contextmanager
def guard_hub_access(repo_id: str) -> Generator[None]:
    """Silence the Hub client, guard its cache against forged headers, and raise failures as UserErrors of one line."""
    from huggingface_hub.utils import get_session
    from huggingface_hub.utils import logging as client_log

    def check_headers(response: Any) -> None:  # the client uses these headers in file paths
        for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
            if re.search(r"[/\\\0]|\.\.", response.headers.get(header, "").removeprefix("W/")):
                name = response.headers[header][:80]
                raise UserError(f"the server sent the unsafe file name {name!r}; do not use this server")

    hooks: list[Any] = get_session().event_hooks["response"]
    verbosity = client_log.get_verbosity()
    client_log.set_verbosity(logging.CRITICAL)
    hooks.append(check_headers)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, disks and deprecations; real problems raise
            yield
    except Exception as error:
        raise explain_hub_error(error, repo_id, reading=True) from error
    finally:
        hooks.remove(check_headers)
        client_log.set_verbosity(verbosity)


@contextmanager
def explain_load_errors(name: str) -> Generator[None]:
    """Raise every failure of a library that loads untrusted files as a UserError about these files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # torch refuses such files anyway
            yield
    except UserError:
        raise
    except Exception as error:  # untrusted files can make libraries raise any class
        if is_out_of_memory(error):
            raise
        details = f"{get_first_line(error):.200}"
        remedy = "download it again, or save it again with save_pretrained"
        if isinstance(error, SafetensorError) and "is not valid UTF-8" in details:
            problem, remedy = f"{name} has a path that is not valid UTF-8", "rename its folder"
        elif isinstance(error, SafetensorError | EOFError):
            problem = f"the weights of {name} are damaged ({details})"
        elif isinstance(error, StrictDataclassError):
            problem, remedy = f"{CONFIG} of {name} is not valid: {get_strict_reason(error)}", "correct this field"
        elif any(isinstance(link, UnpicklingError) or "weights_only" in str(link) for link in list_causes(error)):
            problem = f"{name} is a pickle that holds more than tensors and could run code, so it was not loaded"
            remedy = "save the weights as safetensors: model.save_pretrained(folder)"
        else:
            problem = f"{name} cannot be loaded ({type(error).__name__}: {details})"
        raise UserError(f"{problem}; {remedy}") from error


def refuse_unread_weights(model: Any, unexpected_keys: Collection[str], name: str) -> None:
    """Raise UserError if a checkpoint holds weights of the model's body that its config.json leaves out.

    transformers ignores them. In models of other libraries they are layers beyond the last one, as layers that the
    model has may store buffers too; in this package's models all weights of the body but those of another task.
    """
    is_ours = str(model.config.model_type).startswith("hf_")
    layers = {match[0]: match[1] for key in model.state_dict() if (match := _LAYER.match(key))}
    for key in sorted(unexpected_keys):
        match = _LAYER.match(key)
        is_in_layers = bool(match) and match[1] in layers.values() and (is_ours or match[0] not in layers)
        is_in_body = is_ours and key.startswith(f"{model.base_model_prefix}.")
        if (is_in_layers or is_in_body) and not _OF_OTHER_TASKS.search(key):
            problem = f"the weights of {name} do not fit its config.json, whose model has no {key}"
            raise UserError(f"{problem}; give the config.json that belongs to them, or save the model again")


def check_references(folder: Path, name: str) -> None:
    """Raise a UserError if files of a model folder make libraries load from elsewhere."""
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{name} holds an adapter ({ADAPTER}); merge it by peft's merge_and_unload, and save the result"
        )
    config = read_json_object(folder / CONFIG, name) if (folder / CONFIG).is_file() else {}
    refuse_huge(config, name)
    contents = [config]
    contents += [read_json_object(folder / file, name) for file in _PROCESSORS if (folder / file).is_file()]
    references = [
        (key, value)
        for key, value in _iterate_fields(contents)
        if (key in _REFERENCE_FIELDS and value is not None)
        or (key in _NAME_FIELDS and isinstance(value, str) and re.search(r"[/\\:]", value))
        or (_FUNCTION_FIELD.fullmatch(key) and "/" in str(value))
    ]
    arguments: Any = config.get("model_args")
    if isinstance(arguments, dict):  # timm's, which may contain these two
        references += [(key, arguments[key]) for key in ("pretrained", "pretrained_cfg") if arguments.get(key)]
    if references:
        key, value = references[0]
        problem = f"the configuration of {name} refers to another repository ({key}: {str(value)[:80]!r})"
        raise UserError(f"{problem}, which is not read for safety; remove that field, or give a complete model")
    for weights in [*WEIGHTS, *list_indexed_files(folder, name)]:
        refuse_pointer(folder / weights, f"{weights} of {name}")


def refuse_pointer(path: Path, name: str) -> None:
    """Refuse a file that git has in place of a large one, before a library calls it damaged."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise UserError(f"{name} is a Git LFS pointer instead of the file; download it with git lfs pull")


def refuse_huge(config: object, name: str) -> None:
    """Refuse a config that makes a library fill the memory before it reads any weight."""
    for key, value in _iterate_fields(config):
        if key in _MAX_COUNTS and isinstance(value, int) and value > _MAX_COUNTS[key]:
            limit = f"hf_vit loads models with at most {_MAX_COUNTS[key]:,}"
            raise UserError(f"{CONFIG} of {name} has {key}={value!s:.20}, but {limit}; correct this field")


def _iterate_fields(value: Any, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the fields of a config at any depth."""
    if depth > 50 or not isinstance(value, dict | list):
        return
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    yield from fields.items()
    for item in fields.values() if isinstance(value, dict) else value:
        yield from _iterate_fields(item, depth + 1)


def list_shards(folder: Path, name: str) -> list[str]:
    """Return the weight files that a folder's index names; empty if the weights are in one file."""
    for weights, index in zip(WEIGHTS, _INDEXES, strict=True):
        if (folder / weights).is_file():
            return []
        if (folder / index).is_file():
            return _read_index(folder / index, name)
    return []


def list_indexed_files(folder: Path, name: str) -> set[str]:
    """Return all files that the indexes of a folder name, including those that are not needed."""
    return {file for index in _INDEXES if (folder / index).is_file() for file in _read_index(folder / index, name)}


def _read_index(index: Path, name: str) -> list[str]:
    """Return the weight files that an index names, after checking that they are in its folder."""
    weight_map: Any = read_json_object(index, name).get("weight_map")
    files: set[Any] = {*map(str, weight_map.values())} if isinstance(weight_map, dict) else set()
    if not files or not all(isinstance(file, str) for file in weight_map.values()):
        problem = f"{index.name} of {name} has a weight_map that does not map tensors to files"
        raise UserError(f"{problem}; save the model again with save_pretrained")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for file in files:
        if not re.fullmatch(r"[\w-][\w.-]{0,199}", file) or not file.endswith(suffix):
            problem = f"{index.name} of {name} lists {file[:80]!r}, which is not a {suffix} file in its folder"
            raise UserError(f"{problem}; save the model again with save_pretrained")
    return sorted(files)


def read_json_object(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of limited size; raise a UserError if the file is damaged or too large."""
    try:
        size = path.stat().st_size
        content: Any = json.loads(path.read_bytes()) if size <= _MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = f"it is not valid JSON: {get_first_line(error):.120}"
        remedy = "download it again, or save it again with save_pretrained"
        raise UserError(f"{path.name} of {name} cannot be read: {reason}; {remedy}") from error
    if size > _MAX_JSON_BYTES:
        limit = f"{_MAX_JSON_BYTES:,}; give the model's own file"
        raise UserError(f"{path.name} of {name} has {size:,} bytes, but hf_vit reads at most {limit}")
    if not isinstance(content, dict):
        raise UserError(
            f"{path.name} of {name} holds JSON, but not an object ({{...}}); save the model again with save_pretrained"
        )
    return content  # pyright: ignore[reportUnknownVariableType] - JSON's keys are text


def check_file_name(name: str, named_by: str) -> str:
    """Return a file name that an untrusted file contains, if it stays inside the folder.

    Raises:
        UserError: the name leads out of the folder.
    """
    path = PureWindowsPath(name)  # splits on both separators
    if not name or path.anchor or ".." in path.parts or {"\\", "\0"} & set(name):
        problem = f"{named_by} names {name[:80]!r}, which is not inside the model's folder"
        raise UserError(f"{problem}; save the model again with save_pretrained")
    return name
