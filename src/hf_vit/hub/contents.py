"""What a model's or a page's folder shares: what this package writes, by its name, and nothing else.

Whoever wrote the folder is not trusted: no link leads out of it, no token and no image of the data goes along unasked.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import ModelCard, RepoCard
from huggingface_hub.hf_api import RepoFile

from hf_vit.errors import UserError
from hf_vit.hub.card import is_rendered, render_card
from hf_vit.hub.card_metadata import NO_LICENSE, check_license, indexed_evaluations, load_facts, metadata_errors
from hf_vit.hub.card_sections import shows_images
from hf_vit.hub.model_folder import (
    CARD_NAME,
    INDEX,
    PAGE_NAME,
    PROCESSOR,
    SINGLE,
    check_inside,
    count_parameters,
    example_images,
    read_config,
    travelling_code,
    weight_files,
)
from hf_vit.hub.published_results import RESULTS_FILE, results_file
from hf_vit.repositories.reading import check_name, refuse_pointer
from hf_vit.results.facts import FACTS_NAME, Facts
from hf_vit.results.redaction import redact_text, secret_in

# The Hub's own limits for one file, in bytes (https://huggingface.co/docs/hub/storage-limits): what git itself keeps,
# and what goes to its storage.
LARGEST_TEXT = 10 * 1024**2
LARGEST_FILE = 50 * 1000**3
PAGE_FILES = ("index.html", "style.css", "page.js", "worker.js")
# What is replaced of earlier pushes: weights in every format that from_pretrained would pick up; the parts of a page.
_WEIGHTS = re.compile(r"[^/]+\.(safetensors|bin|h5|msgpack|pt|pth|ckpt|pkl)(\.index\.json)?|training_args\.bin")
_PAGE_PARTS = re.compile(r"(models|examples|runtime)/.*")
_RUNTIME = re.compile(r"ort[\w.-]*\.(mjs|wasm)")
_Sources = dict[str, Path | bytes]


@dataclass(frozen=True)
class SharedFile:
    """One file of a push: where it will be, and its bytes or where they are."""

    path: str
    source: Path | bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @property
    def is_text(self) -> bool:
        """Kept by git itself, unless it is large; other files go to the Hub's storage."""
        return self.path.endswith((".json", ".md", ".py", ".txt", ".svg", ".yaml", ".html", ".css", ".js", ".mjs"))

    @property
    def words(self) -> str:
        """What may hold words of somebody, byte by byte: all of a file, but of weights the header alone."""
        with self.open() as file:
            size = int.from_bytes(file.read(8), "little") if self.path.endswith(".safetensors") else -1
            return file.read(size).decode("latin-1")

    @cached_property
    def sha256(self) -> str:
        """By it the Hub names what lies in its storage."""
        return self._hash(hashlib.sha256())

    @cached_property
    def git_oid(self) -> str:
        """git's blob hash, by which the Hub names small text files."""
        return self._hash(hashlib.sha1(b"blob %d\0" % self.size))

    def _hash(self, hasher: "hashlib._Hash") -> str:
        with self.open() as file:
            return hashlib.file_digest(file, lambda: hasher).hexdigest()  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Contents:
    """Everything that one push sends: path in the repository -> file, and names in the folder that are not shared.

    `replaced` is what else goes where it is left of earlier pushes.
    """

    files: dict[str, SharedFile]
    left_out: list[str]
    replaced: re.Pattern[str]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files.values())

    @property
    def card(self) -> str:
        """README.md."""
        with self.files[CARD_NAME].open() as file:
            return file.read().decode()

    def with_files(self, files: Mapping[str, bytes]) -> "Contents":
        """Return the same with others in the place of some files."""
        return replace(self, files=self.files | {path: SharedFile(path, data) for path, data in files.items()})

    def stale(self, remote: Iterable[str]) -> list[str]:
        """Return what a repository holds of earlier pushes and must lose: weights, results, code that travels no more.

        from_pretrained takes a single file before shards: left behind, it would silently load the old model.
        """
        code = {path.name for path in resources.files("hf_vit.models").iterdir() if "_hf_" in path.name}
        gone = [path for path in remote if path not in self.files]
        return sorted(path for path in gone if path in code or path == RESULTS_FILE or self.replaced.fullmatch(path))


def differences(local: Mapping[str, SharedFile], remote: Mapping[str, RepoFile]) -> list[str]:
    """Return the paths whose remote content is missing or not the local one, by SHA-256 (LFS and Xet) or git's hash."""

    def is_same(file: SharedFile) -> bool:
        entry = remote.get(file.path)
        if entry is None or entry.lfs is None:
            return entry is not None and entry.blob_id == file.git_oid
        return entry.lfs.sha256 == file.sha256

    return [path for path, file in local.items() if not is_same(file)]


def collect(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    scratch: Path,
    license: str | None = None,
    max_shard_size: int | str = "5GB",
    share_images: bool = False,
) -> Contents:
    """Find, check and list what is shared of a model folder; the folder itself is not changed.

    Args:
        folder: a saved model with its processor.
        repo_id: the name in the card's examples.
        scratch: an empty folder for weights that have to be split.
        license: Hub license id; None keeps the card's, or inherits the base model's.
        max_shard_size: larger weight files are split into shards of at most this size ("5GB", bytes).
        share_images: with the pictures that show images of the data.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a saved model")
    for name in ("config.json", PROCESSOR, FACTS_NAME, CARD_NAME, SINGLE, INDEX):
        check_inside(folder, folder / name)  # before anything is read
    config = read_config(folder)
    sources = find_weights(folder, scratch, max_shard_size)
    names = {"config.json", PROCESSOR, *travelling_code(folder, config)}
    if not (folder / PROCESSOR).is_file():
        raise UserError(f"{folder} holds no image processor ({PROCESSOR}); save it there: processor.save_pretrained")
    described = describe_model(folder, repo_id, license=license, share_images=share_images)
    names |= {*find_pictures(folder, described[CARD_NAME].decode()), *example_images(folder)}
    names |= {path.name for path in (folder / FACTS_NAME, *folder.glob("LICENSE*")) if path.is_file()}
    sources |= {name: folder / name for name in names - described.keys()} | described
    return _contents(folder, sources, _WEIGHTS, {SINGLE, INDEX})


def collect_page(folder: Path, *, license: str | None = None, share_images: bool = False) -> Contents:
    """Find, check and list what is shared of a page: what `hf-vit page` writes, by its place, and nothing else.

    Args:
        folder: of the page.
        license: Hub license id of what the page holds, its models; None keeps that of its README.md.
        share_images: the page's examples, images of somebody's data, may be seen by all.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a page")
    check_inside(folder, folder / PAGE_NAME)
    models, examples = _read_page(folder)
    if examples and not share_images:
        raise UserError(
            f"the page in {folder} shows {len(examples)} images of its data; give --share-images (share_images=True) "
            "to make them public, or make the page without --images"
        )
    names = [*PAGE_FILES, PAGE_NAME, *models, *examples]
    for name in [*names, CARD_NAME]:
        check_inside(folder, folder / name)
        if not (folder / name).is_file():
            raise UserError(f"the page in {folder} lacks {name}; make it again: hf-vit page")
    check_inside(folder, folder / "runtime")
    runtime = [f"runtime/{file.name}" for file in folder.glob("runtime/*") if _RUNTIME.fullmatch(file.name)]
    if not runtime:
        raise UserError(f"the page in {folder} lacks the files of its runtime; make it again: hf-vit page")
    sources: _Sources = {name: folder / name for name in (*names, *runtime)}
    return _contents(folder, sources | {CARD_NAME: _page_card(folder, license).encode()}, _PAGE_PARTS)


def _contents(folder: Path, sources: _Sources, replaced: re.Pattern[str], also: Iterable[str] = ()) -> Contents:
    """Check the files that were found; `also`: names that are known, though not shared as they are."""
    for name, source in sources.items():
        if source == folder / name:
            check_inside(folder, folder / name)
    files = {name: SharedFile(name, source) for name, source in sorted(sources.items())}
    for file in files.values():
        limit = LARGEST_TEXT if file.is_text else LARGEST_FILE
        if file.size > limit:
            raise UserError(f"{file.path} has {file.size:,} bytes; the Hub takes at most {limit:,} in one such file")
        if secret_in(file.path) is not None:
            raise UserError(
                f"the name of the file {redact_text(file.path)} looks like a token; rename it, and revoke the token if "
                "others may have read it"
            )
    for file in files.values():
        if (kind := secret_in(file.words)) is not None:
            raise UserError(
                f"{file.path} holds what looks like {kind}; remove it, revoke it if others may have read "
                "it, and push again"
            )
    known = {*(name.partition("/")[0] for name in files), *also}
    return Contents(files, sorted(path.name for path in folder.iterdir() if path.name not in known), replaced)


def find_weights(folder: Path, scratch: Path, max_shard_size: int | str) -> _Sources:
    """Return the weight files, split into shards in `scratch` where one is larger than `max_shard_size`."""
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = folder / SINGLE
    if weights.is_file() and (folder / INDEX).is_file():
        raise UserError(f"{folder} holds both {SINGLE} and {INDEX}; delete the stale one")
    names = weight_files(folder)
    if not names:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        more = f" (pickles such as {pickles[0]} are not shared: loading one runs its code)" if pickles else ""
        raise UserError(f"{folder} holds no weights in safetensors format{more}; save the model: save_pretrained")
    for name in names:
        check_inside(folder, folder / name)
        refuse_pointer(folder / name, f"{name} of {folder}")
    if count_parameters(folder) is None:
        raise UserError(f"{folder} lacks some of the weight files that {INDEX} names; save the model again")
    if names != [SINGLE]:
        return {name: folder / name for name in (INDEX, *names)}
    limit = _bytes_of(max_shard_size)
    if weights.stat().st_size <= limit:
        return {SINGLE: weights}
    try:
        save_torch_state_dict(
            load_file(weights), scratch, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
        )
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{SINGLE} cannot be split into shards in {scratch.parent} ({error}); make room for "
            f"{weights.stat().st_size:,} bytes there, set TMPDIR to another folder, or give a larger "
            "max_shard_size"
        ) from error
    return {path.name: path for path in scratch.iterdir()}


def _bytes_of(size: int | str) -> int:
    from huggingface_hub.serialization._base import parse_size_to_int

    try:
        limit = size if isinstance(size, int) else parse_size_to_int(size)
    except ValueError as error:
        raise UserError(
            f"max_shard_size '{size}' is not a size; give a number with KB, MB, GB or TB, such as 5GB"
        ) from error
    if limit < 1:
        raise UserError(f"max_shard_size '{size}' is too small; give for example 5GB")
    return limit


def describe_model(
    folder: Path, repo_id: str, *, license: str | None = None, share_images: bool = False
) -> dict[str, bytes]:
    """Return what is written about the model, by its path: the card, and results in the Hub's own form."""
    described = {CARD_NAME: _find_card(folder, repo_id, license, share_images).encode()}
    results = results_file(indexed_evaluations(load_facts(folder, read_config(folder))), repo_id)
    return described if results is None else described | {RESULTS_FILE: results}


def _find_card(folder: Path, repo_id: str, license: str | None, share_images: bool) -> str:
    """Return the card to share: rendered from the facts, or as somebody wrote it."""
    path = folder / CARD_NAME
    check_inside(folder, path)
    if path.is_file() and not is_rendered(folder):
        card = path.read_text(encoding="utf-8")
        if not share_images and (private := sorted(filter(shows_images, _pictures_in(card)))):
            raise UserError(
                f"the card shows {', '.join(private)}, which show images of the data; give --share-images "
                "(share_images=True) to make them public, or remove it from the card"
            )
    else:
        if missing := missing_facts(folder):
            raise UserError(
                f"the card of {folder} lacks {'; '.join(missing)}. hf-vit finetune, pretrain and convert "
                f"record them; or write {CARD_NAME} yourself"
            )
        card = render_card(folder, repo_id=repo_id, license=license, share_images=share_images)
        if ModelCard(card).data.get("license") is None:
            raise UserError(NO_LICENSE)
    if errors := metadata_errors(card):
        raise UserError(f"the card's metadata would be refused by the Hub: {'; '.join(errors)}")
    return card


def missing_facts(folder: Path) -> list[str]:
    """Return the required facts that facts.json does not hold, in words."""
    origins = Facts.load(folder).origins()
    if not origins:
        return [f"the origin of the weights (no record of a training or a conversion in {FACTS_NAME})"]
    latest = origins[-1]
    needed = {
        "the training data (data.name of the training record)": latest.kind != "training"
        or (latest.data and latest.data.name),
        "the converted checkpoint (source of the conversion record)": latest.kind != "conversion"
        or latest.values.get("source"),
        f"the command of the {latest.kind}": latest.command,
    }
    return [name for name, is_there in needed.items() if not is_there]


def find_pictures(folder: Path, card: str) -> set[str]:
    """Return the pictures that the card shows, by their paths in the folder."""
    local = _pictures_in(card)
    for name in sorted(local):
        if not (folder / check_name(name, "the card")).is_file():
            raise UserError(
                f"the card shows {name}, which is not in {folder}; copy it there, or remove it from the card"
            )
    return local


def _pictures_in(card: str) -> set[str]:
    shown = {*re.findall(r"!\[[^\]]*\]\(([^)\s]+)", card), *re.findall(r"<img[^>]*\ssrc=\"([^\"]+)", card)}
    return {name.removeprefix("./") for name in shown if "://" not in name and not name.startswith("data:")}


def _read_page(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of its models and its examples, which page.json must name as `hf-vit page` does."""
    try:
        page: Any = json.loads((folder / PAGE_NAME).read_text(encoding="utf-8"))
        models = [f"{model['folder']}/model.onnx" for model in page["models"]]
        examples = [example["file"] for example in page["examples"]]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no page: there is no {PAGE_NAME} in it; make one (hf-vit page MODEL --output DIR), or "
            "leave --space out to share a model"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{PAGE_NAME} of {folder} is not a page of hf-vit; make the page again: hf-vit page") from error
    numbered = [f"models/{number}/model.onnx" for number in range(len(models))]
    if not models or models != numbered or examples != [f"examples/{number}.png" for number in range(len(examples))]:
        raise UserError(f"{PAGE_NAME} of {folder} names unexpected files; make the page again: hf-vit page")
    return models, examples


def _page_card(folder: Path, license: str | None) -> str:
    """Return README.md, whose metadata make the repository a Space."""
    if license is not None:
        check_license(license)
    try:
        card = RepoCard((folder / CARD_NAME).read_text(encoding="utf-8"))
    except Exception as error:  # whatever a parser of YAML meets
        raise UserError(
            f"{CARD_NAME} of {folder} has no readable metadata; make the page again: hf-vit page"
        ) from error
    if card.data.get("sdk") != "static":
        raise UserError(
            f"{CARD_NAME} of {folder} is not a static Space's (sdk: static); make the page again: hf-vit page"
        )
    if license is not None:
        card.data.license = license  # pyright: ignore[reportAttributeAccessIssue]
    if card.data.get("license") is None:
        raise UserError(NO_LICENSE)
    if errors := metadata_errors(str(card)):
        raise UserError(f"the page's metadata would be refused by the Hub: {'; '.join(errors)}")
    return str(card)
