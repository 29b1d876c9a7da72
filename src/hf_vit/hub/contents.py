"""What a model folder shares: weights, config, code, processor, facts, card and its pictures - nothing else."""

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, cast

from hf_vit.errors import UserError
from hf_vit.hub.card import CARD_NAME, count_parameters, is_rendered, render_card
from hf_vit.hub.requirements import card_errors, missing_facts
from hf_vit.results.facts import FACTS_NAME

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PROCESSOR = "preprocessor_config.json"
# The Hub's own limits for one file, in bytes (https://huggingface.co/docs/hub/storage-limits): what git itself keeps,
# and what goes to its storage.
LARGEST_TEXT = 10 * 1024**2
LARGEST_FILE = 50 * 1000**3
# Weights of earlier pushes, in every format that from_pretrained would pick up.
_WEIGHTS = re.compile(r"[^/]+\.(safetensors|bin|h5|msgpack|pt|pth|ckpt|pkl)(\.index\.json)?|training_args\.bin")


@dataclass(frozen=True)
class SharedFile:
    """One file of a push: where it will be, and its bytes or where they are."""

    path: str
    source: Path | bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @property
    def is_text(self) -> bool:
        """Kept by git itself, unless it is large; other files go to the Hub's storage."""
        return self.path.endswith((".json", ".md", ".py", ".txt", ".svg"))

    @cached_property
    def sha256(self) -> str:
        """Of the content; by it the Hub names what lies in its storage."""
        return self._hash(hashlib.sha256())

    @cached_property
    def git_oid(self) -> str:
        """git's blob hash; by it the Hub names small text files."""
        return self._hash(hashlib.sha1(b"blob %d\0" % self.size))

    def _hash(self, hasher: Any) -> str:
        if isinstance(self.source, bytes):
            hasher.update(self.source)
        else:
            with self.source.open("rb") as file:
                while piece := file.read(1 << 20):
                    hasher.update(piece)
        return hasher.hexdigest()


@dataclass(frozen=True)
class Contents:
    """Everything that one push sends.

    Attributes:
        files: path in the repository -> file.
        left_out: names in the folder that are not shared.
    """

    files: dict[str, SharedFile] = field(default_factory=dict[str, SharedFile])
    left_out: list[str] = field(default_factory=list[str])

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files.values())

    @property
    def card(self) -> str:
        """README.md."""
        source = self.files[CARD_NAME].source
        assert isinstance(source, bytes)
        return source.decode()

    def stale(self, remote: Iterable[str]) -> list[str]:
        """What a repository holds of earlier pushes and must lose: other weights, and code that no longer travels.

        from_pretrained takes a single file before shards: left behind, it would silently load the old model.
        """
        code = {path.name for path in resources.files("hf_vit.models").iterdir() if "_hf_" in path.name}
        return sorted(path for path in remote if path not in self.files if path in code or _WEIGHTS.fullmatch(path))


def collect(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    scratch: Path,
    license: str | None = None,
    max_shard_size: int | str = "5GB",
) -> Contents:
    """Find, check and list what is shared of a model folder; the folder itself is not changed.

    Args:
        folder: a saved model with its processor.
        repo_id: the name in the card's examples.
        scratch: an empty folder for weights that have to be split.
        license: Hub license id; None keeps the card's.
        max_shard_size: larger weight files are split into shards of at most this size ("5GB", bytes).

    Raises:
        UserError: something is missing, damaged or too large; the message names it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a saved model")
    config = read_config(folder)
    sources: dict[str, Path | bytes] = {"config.json": folder / "config.json"}
    sources |= find_weights(folder, scratch, max_shard_size)
    sources |= {name: folder / name for name in find_code(folder, config)}
    if not (folder / PROCESSOR).is_file():
        raise UserError(f"{folder} holds no image processor ({PROCESSOR}); save it there: processor.save_pretrained")
    sources[PROCESSOR] = folder / PROCESSOR
    if (folder / FACTS_NAME).is_file():
        sources[FACTS_NAME] = folder / FACTS_NAME
    card = find_card(folder, repo_id, license)
    sources[CARD_NAME] = card.encode()
    sources |= {name: folder / name for name in find_pictures(folder, card)}
    sources |= {path.name: path for path in folder.glob("LICENSE*") if path.is_file()}
    files = {name: SharedFile(name, source) for name, source in sorted(sources.items())}
    check_sizes(files.values())
    shared = {name.partition("/")[0] for name in files}
    left_out = sorted(path.name for path in folder.iterdir() if path.name not in {*shared, SINGLE, INDEX})
    return Contents(files, left_out)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        return cast(dict[str, Any], json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no model: there is no config.json in it") from error
    except ValueError as error:
        raise UserError(f"the config.json of {folder} is damaged ({error}); save the model again") from error


def find_weights(folder: Path, scratch: Path, max_shard_size: int | str) -> dict[str, Path | bytes]:
    """The weight files, split into shards where one is larger than `max_shard_size`.

    Raises:
        UserError: there are none, only pickles, both kinds, or some are missing or damaged.
    """
    from huggingface_hub import save_torch_state_dict
    from huggingface_hub.serialization._base import parse_size_to_int
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise UserError(f"{folder} holds both {SINGLE} and {INDEX}; only one is the model: delete the stale one")
    if not single.is_file() and not index.is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        more = f" (pickles such as {pickles[0]} are not shared: loading one runs its code)" if pickles else ""
        raise UserError(f"{folder} holds no weights in safetensors format{more}; save the model: save_pretrained")
    try:
        whole = count_parameters(folder) is not None
    except SafetensorError as error:
        raise UserError(f"the weights in {folder} are damaged ({error}); save the model again") from error
    if not whole:
        raise UserError(f"{folder} lacks some of the weight files that {INDEX} names; save the model again")
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return {INDEX: index} | {name: folder / name for name in shards}
    limit = max_shard_size if isinstance(max_shard_size, int) else parse_size_to_int(max_shard_size)
    if single.stat().st_size <= limit:
        return {SINGLE: single}
    save_torch_state_dict(
        load_file(single), scratch, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    return {path.name: path for path in scratch.iterdir()}


def find_code(folder: Path, config: dict[str, Any]) -> set[str]:
    """The files that `auto_map` names, and the siblings these import.

    Raises:
        UserError: `auto_map` or the code is incomplete, so that the model would not load without this package.
    """
    auto_map: dict[str, Any] = config.get("auto_map") or {}
    named = {str(target).split(".")[-1] for target in auto_map.values()}
    if str(config.get("model_type", "")).startswith("hf_"):
        architecture = (config.get("architectures") or [""])[0]
        lacking = [name for name in ("AutoConfig", "AutoModel") if name not in auto_map]
        lacking += [architecture] if architecture not in named else []
        if lacking:
            raise UserError(f"auto_map in the config.json of {folder} lacks {', '.join(lacking)}; save the model again")
    waiting = [str(target).split("--")[-1].split(".")[0] for target in auto_map.values()]
    found: set[str] = set()
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in found:
            continue
        if not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, code that its model needs to load anywhere; save the model again")
        found.add(name)
        for node in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                waiting.append(node.module)
    return found


def find_card(folder: Path, repo_id: str, license: str | None) -> str:
    """The card to share: rendered from the facts, or as somebody wrote it.

    Raises:
        UserError: a required fact is missing, or the metadata would be refused.
    """
    path = folder / CARD_NAME
    if path.is_file() and not is_rendered(folder):
        card = path.read_text(encoding="utf-8")
    else:
        if missing := missing_facts(folder):
            raise UserError(
                f"the card of {folder} lacks {'; '.join(missing)}. Facts are recorded by hf-vit finetune, pretrain and "
                f"convert; or write {CARD_NAME} yourself"
            )
        card = render_card(folder, repo_id=repo_id, license=license)
    if errors := card_errors(card):
        raise UserError(f"the card's metadata would be refused by the Hub: {'; '.join(errors)}")
    return card


def find_pictures(folder: Path, card: str) -> set[str]:
    """The pictures that the card shows, by their paths in the folder.

    Raises:
        UserError: the card shows a picture that is not there.
    """
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)\s]+)", card)) | set(re.findall(r"<img[^>]*\ssrc=\"([^\"]+)", card))
    local = {name.removeprefix("./") for name in shown if "://" not in name and not name.startswith("data:")}
    for name in sorted(local):
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not (folder / name).is_file():
            raise UserError(
                f"the card shows {name}, which is not in {folder}; put it there, or take it out of the card"
            )
    return local


def check_sizes(files: Iterable[SharedFile]) -> None:
    """Refuse what the Hub would refuse after the upload.

    Raises:
        UserError: names the file, its size and the limit.
    """
    for file in files:
        limit = LARGEST_TEXT if file.is_text else LARGEST_FILE
        if file.size > limit:
            raise UserError(f"{file.path} has {file.size:,} bytes; the Hub takes at most {limit:,} in one such file")
