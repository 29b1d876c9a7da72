"""What a model folder shares: weights, config, code, processor, facts, card and its pictures - nothing else."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path

from huggingface_hub import ModelCard
from huggingface_hub.hf_api import RepoFile

from hf_vit.errors import UserError
from hf_vit.hub.card import is_rendered, render_card
from hf_vit.hub.card_metadata import indexed_evaluations, load_facts, metadata_errors
from hf_vit.hub.card_sections import shows_images
from hf_vit.hub.licenses import NO_LICENSE
from hf_vit.hub.model_folder import (
    CARD_NAME,
    INDEX,
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
from hf_vit.repositories.reading import check_name
from hf_vit.results.facts import FACTS_NAME, Facts
from hf_vit.results.redaction import redact_text, secret_in

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
        return self.path.endswith((".json", ".md", ".py", ".txt", ".svg", ".yaml", ".html", ".css", ".js", ".mjs"))

    @property
    def words(self) -> str:
        """What may hold words of somebody, byte by byte: all of a file, but of weights the header alone."""
        if isinstance(self.source, bytes):
            return self.source.decode("latin-1")
        with self.source.open("rb") as file:
            size = int.from_bytes(file.read(8), "little") if self.path.endswith(".safetensors") else -1
            return file.read(size).decode("latin-1")

    @cached_property
    def sha256(self) -> str:
        """Of the content; by it the Hub names what lies in its storage."""
        return self._hash(hashlib.sha256())

    @cached_property
    def git_oid(self) -> str:
        """git's blob hash; by it the Hub names small text files."""
        return self._hash(hashlib.sha1(b"blob %d\0" % self.size))

    def _hash(self, hasher: "hashlib._Hash") -> str:
        if isinstance(self.source, bytes):
            hasher.update(self.source)
        else:
            with self.source.open("rb") as file:
                hashlib.file_digest(file, lambda: hasher)
        return hasher.hexdigest()


@dataclass(frozen=True)
class Contents:
    """Everything that one push sends.

    Attributes:
        files: path in the repository -> file.
        left_out: names in the folder that are not shared.
        replaced: what else goes where it is left of earlier pushes.
    """

    files: dict[str, SharedFile] = field(default_factory=dict[str, SharedFile])
    left_out: list[str] = field(default_factory=list[str])
    replaced: re.Pattern[str] = _WEIGHTS

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

    def with_files(self, files: Mapping[str, bytes]) -> "Contents":
        """The same with others in the place of some files."""
        return replace(self, files=self.files | {path: SharedFile(path, data) for path, data in files.items()})

    def stale(self, remote: Iterable[str]) -> list[str]:
        """What a repository holds of earlier pushes and must lose: weights, results, and code that travels no more.

        from_pretrained takes a single file before shards: left behind, it would silently load the old model.
        """
        code = {path.name for path in resources.files("hf_vit.models").iterdir() if "_hf_" in path.name}
        gone = [path for path in remote if path not in self.files]
        return sorted(path for path in gone if path in code or path == RESULTS_FILE or self.replaced.fullmatch(path))


def differences(local: Mapping[str, SharedFile], remote: Mapping[str, RepoFile]) -> list[str]:
    """Paths whose remote content is missing or not the local one, by SHA-256 (LFS and Xet) or git's hash (text)."""
    wrong: list[str] = []
    for path, file in local.items():
        entry = remote.get(path)
        same = entry is not None and (
            entry.lfs.sha256 == file.sha256 if entry.lfs is not None else entry.blob_id == file.git_oid
        )
        if not same:
            wrong.append(path)
    return wrong


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

    Raises:
        UserError: something is missing, damaged or too large; the message names it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a saved model")
    for name in ("config.json", PROCESSOR, FACTS_NAME, CARD_NAME, SINGLE, INDEX):
        check_inside(folder, folder / name)  # before anything is read
    config = read_config(folder)
    sources: dict[str, Path | bytes] = {"config.json": folder / "config.json"}
    sources |= find_weights(folder, scratch, max_shard_size)
    sources |= {name: folder / name for name in travelling_code(folder, config)}
    if not (folder / PROCESSOR).is_file():
        raise UserError(f"{folder} holds no image processor ({PROCESSOR}); save it there: processor.save_pretrained")
    sources[PROCESSOR] = folder / PROCESSOR
    if (folder / FACTS_NAME).is_file():
        sources[FACTS_NAME] = folder / FACTS_NAME
    told = tell_of(folder, repo_id, license, share_images)
    sources |= told
    sources |= {name: folder / name for name in find_pictures(folder, told[CARD_NAME].decode())}
    sources |= {name: folder / name for name in example_images(folder)}
    sources |= {path.name: path for path in folder.glob("LICENSE*") if path.is_file()}
    for name, source in sources.items():
        if isinstance(source, Path) and not source.is_relative_to(scratch):
            check_inside(folder, folder / name)
    files = {name: SharedFile(name, source) for name, source in sorted(sources.items())}
    check_sizes(files.values())
    check_secrets(files.values())
    shared = {name.partition("/")[0] for name in files}
    left_out = sorted(path.name for path in folder.iterdir() if path.name not in {*shared, SINGLE, INDEX})
    return Contents(files, left_out)


def find_weights(folder: Path, scratch: Path, max_shard_size: int | str) -> dict[str, Path | bytes]:
    """The weight files, split into shards where one is larger than `max_shard_size`.

    Raises:
        UserError: there are none, only pickles, both kinds, or some are missing or damaged.
    """

    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        raise UserError(f"{folder} holds both {SINGLE} and {INDEX}; delete the stale one")
    names = weight_files(folder)
    if not names:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        more = f" (pickles such as {pickles[0]} are not shared: loading one runs its code)" if pickles else ""
        raise UserError(f"{folder} holds no weights in safetensors format{more}; save the model: save_pretrained")
    for name in names:
        check_inside(folder, folder / name)
    if count_parameters(folder) is None:
        raise UserError(f"{folder} lacks some of the weight files that {INDEX} names; save the model again")
    if names != [SINGLE]:
        return {name: folder / name for name in (INDEX, *names)}
    limit = _bytes_of(max_shard_size)
    if (folder / SINGLE).stat().st_size <= limit:
        return {SINGLE: folder / SINGLE}
    return split_weights(folder / SINGLE, scratch, limit)


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


def split_weights(weights: Path, scratch: Path, limit: int) -> dict[str, Path | bytes]:
    """Shards of at most `limit` bytes (a single larger tensor has one of its own), written into `scratch`.

    Raises:
        UserError: there is no room for them.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    pattern = "model{suffix}.safetensors"
    try:
        save_torch_state_dict(load_file(weights), scratch, filename_pattern=pattern, max_shard_size=limit)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{weights.name} cannot be split into shards in {scratch.parent} ({error}); make room for "
            f"{weights.stat().st_size:,} bytes there, set TMPDIR to another folder, or give a larger "
            "max_shard_size"
        ) from error
    return {path.name: path for path in scratch.iterdir()}


def missing_facts(folder: Path) -> list[str]:
    """The required facts that facts.json does not hold, in words."""
    origins = [record for record in Facts.load(folder).records if record.kind in ("training", "conversion")]
    if not origins:
        return [f"the origin of the weights (no record of a training or a conversion in {FACTS_NAME})"]
    missing: list[str] = []
    latest = origins[-1]
    if latest.kind == "training" and not (latest.data and latest.data.name):
        missing.append("the training data (data.name of the training record)")
    if latest.kind == "conversion" and not latest.values.get("source"):
        missing.append("the converted checkpoint (source of the conversion record)")
    if not latest.command:
        missing.append(f"the command of the {latest.kind}")
    return missing


def tell_of(folder: Path, repo_id: str, license: str | None, share_images: bool = False) -> dict[str, bytes]:
    """What is written about the model, by its path: the card, and results in the Hub's own form.

    Raises:
        UserError: see `find_card`.
    """
    told = {CARD_NAME: find_card(folder, repo_id, license, share_images).encode()}
    results = results_file(indexed_evaluations(load_facts(folder, read_config(folder))), repo_id)
    return told if results is None else told | {RESULTS_FILE: results}


def find_card(folder: Path, repo_id: str, license: str | None, share_images: bool = False) -> str:
    """The card to share: rendered from the facts, or as somebody wrote it.

    Raises:
        UserError: a required fact is missing, the metadata would be refused, or what somebody wrote shows images of the
            data, which are not to be shared.
    """
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


def find_pictures(folder: Path, card: str) -> set[str]:
    """The pictures that the card shows, by their paths in the folder.

    Raises:
        UserError: the card shows a picture that is not there.
    """
    local = _pictures_in(card)
    for name in sorted(local):
        if not (folder / check_name(name, "the card")).is_file():
            raise UserError(
                f"the card shows {name}, which is not in {folder}; copy it there, or remove it from the card"
            )
    return local


def _pictures_in(card: str) -> set[str]:
    """The files of the folder that a card shows."""
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)\s]+)", card)) | set(re.findall(r"<img[^>]*\ssrc=\"([^\"]+)", card))
    return {name.removeprefix("./") for name in shown if "://" not in name and not name.startswith("data:")}


def check_sizes(files: Iterable[SharedFile]) -> None:
    """Refuse what the Hub would refuse after the upload.

    Raises:
        UserError: names the file, its size and the limit.
    """
    for file in files:
        limit = LARGEST_TEXT if file.is_text else LARGEST_FILE
        if file.size > limit:
            raise UserError(f"{file.path} has {file.size:,} bytes; the Hub takes at most {limit:,} in one such file")


def check_secrets(files: Iterable[SharedFile]) -> None:
    """Refuse to share a token, wherever it stands.

    Raises:
        UserError: names the file and the kind of token, not the token.
    """
    shared = list(files)
    for file in shared:
        if secret_in(file.path) is not None:
            raise UserError(
                f"the name of the file {redact_text(file.path)} looks like a token; rename it, and revoke the token if "
                "others may have read it"
            )
    for file in shared:
        if (kind := secret_in(file.words)) is not None:
            raise UserError(
                f"{file.path} holds what looks like {kind}; remove it, revoke it if others may have read "
                "it, and push again"
            )
