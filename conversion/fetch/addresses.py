"""Where a checkpoint comes from: a local path, an https:// or gs:// address, or a file or model of the Hub."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hf_vit.conversion.fetch.download import download
from hf_vit.conversion.readers.checkpoint import CheckpointReader, Companions, one_line
from hf_vit.conversion.readers.opening import open_checkpoint
from hf_vit.errors import UserError
from hf_vit.repositories.reading import model_folder, reading
from hf_vit.results.redaction import redact_text

TIMM, WRAPPER = "timm:", "timm_wrapper"  # the second is the model_type of transformers' classes around timm's
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB = re.compile(
    rf"hf://(?:models/)?(?P<repo>{HUB_ID.pattern})(?:@(?P<revision>refs/pr/\d+|[^/@]+))?(?:/(?P<path>.+?))?/?"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint at hand.

    Attributes:
        path: local file or folder.
        name: what messages and facts call it: the name of a local file, the address of another without its query.
        companions: what is known of it beside what lies with it.
    """

    path: Path
    name: str
    companions: Companions | None = None

    def open(self) -> CheckpointReader:
        """See `open_checkpoint`."""
        reader = open_checkpoint(self.path)
        if self.companions is not None:
            reader.companions = self.companions
        elif (config := reader.companions.config or {}).get("model_type") == WRAPPER:
            reader.companions = replace(reader.companions, config=config_of_wrapper(config))
        return reader


def fetch(source: str | Path, sha256: str | None = None) -> LocalCheckpoint:
    """Bring a checkpoint to this machine, and hold it against its SHA-256.

    Args:
        source: path; https:// or gs:// address; `hf://owner/name[@revision]/file`, or without a file for a model that
            transformers or timm saved; timm:NAME (released weights), timm:NAME@FILE or timm:FOLDER.
        sha256: 64 hexadecimal digits that the file must have.

    Raises:
        UserError: there is no such source, it cannot be had, or it is another file than `sha256` says.
    """
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise UserError(f"--sha256 {sha256[:80]!r} is no SHA-256; give 64 hexadecimal digits")
    checkpoint = _fetch(str(source), sha256 is not None)
    if sha256 is not None:
        _check(checkpoint, sha256.lower(), is_download=checkpoint.name != checkpoint.path.name)
    return checkpoint


def _fetch(source: str, has_hash: bool) -> LocalCheckpoint:
    if is_local(source):  # a path wins, whatever it looks like
        return LocalCheckpoint(Path(source), Path(source).name)
    if source.startswith(TIMM):
        return _from_timm(source)
    scheme = _SCHEME.match(source)
    if scheme is None:
        return LocalCheckpoint(Path(source), Path(source).name)  # opening it says what is wrong
    kind = scheme[1].lower()
    if kind == "hf":
        return _from_hub(source)
    if kind == "http" and not has_hash and urlsplit(source).hostname not in _THIS_MACHINE:
        raise UserError(f"{redact_text(source)} could be altered on its way; use https://, or give the file's --sha256")
    if kind not in ("https", "http", "gs"):
        raise UserError(
            f"{redact_text(source)} cannot be fetched: give a path, or an address with https://, gs:// or hf://"
        )
    return LocalCheckpoint(download(source, checked_later=has_hash), redact_text(source))


def is_local(source: str | Path) -> bool:
    """Whether there is such a file or folder."""
    try:
        return Path(source).exists()
    except OSError:  # a name that is too long, for one
        return False


def _check(checkpoint: LocalCheckpoint, sha256: str, is_download: bool) -> None:
    if checkpoint.path.is_dir():
        raise UserError(
            f"{checkpoint.name} is a folder, which has no SHA-256; give the file of its weights, or no --sha256"
        )
    if not checkpoint.path.is_file():
        return
    with checkpoint.path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        if is_download:
            checkpoint.path.unlink()  # get it anew next time
        raise UserError(
            f"{checkpoint.name} is another file than --sha256 says: its SHA-256 is {actual}; nothing is written"
        )


def _from_timm(source: str) -> LocalCheckpoint:
    """A folder or file of timm's, or the weights that it has released under a name, which are on the Hub."""
    name = source.removeprefix(TIMM)
    if not name:
        raise UserError(f"{source} names no model; give {TIMM}NAME, as timm.list_models() tells")
    if Path(name).expanduser().is_dir():
        return LocalCheckpoint(Path(name).expanduser(), TIMM + Path(name).expanduser().resolve().name)
    architecture, _, file = name.partition("@")
    released = _released(architecture)
    if file:
        beside = Companions({"architecture": architecture, "pretrained_cfg": released})
        return LocalCheckpoint(Path(file).expanduser(), f"{TIMM}{architecture}@{Path(file).name}", beside)
    if not (repo := released.get("hf_hub_id")):
        raise UserError(f"timm has no weights for {architecture}; timm.list_models(pretrained=True) names what it has")
    return LocalCheckpoint(_from_hub(f"hf://{repo}").path, source)


def config_of_wrapper(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of transformers' class around a model of timm as timm writes it.

    One that was made without a `pretrained_cfg` has that of its architecture, at the size of its arguments.

    Raises:
        UserError: there is none, and timm is not installed or does not know the architecture.
    """
    timm_config = {name: value for name, value in config.items() if name != "model_type"}
    if not timm_config.get("pretrained_cfg"):
        released, size = _released(str(config.get("architecture"))), (config.get("model_args") or {}).get("img_size")
        if size is not None:
            released["input_size"] = [3, *(size if isinstance(size, list) else [size, size])]
        timm_config["pretrained_cfg"] = released
    return timm_config


def _released(architecture: str) -> dict[str, Any]:
    """What timm says of the weights of a name, with their tag or timm's choice of it.

    Raises:
        UserError: timm is not installed, or does not know the name.
    """
    try:
        from timm.models import get_pretrained_cfg
    except ImportError as error:
        raise UserError(f"{TIMM}{architecture} needs timm: pip install timm") from error
    try:
        released = get_pretrained_cfg(architecture)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{TIMM}{architecture}: {one_line(error)}; timm.list_models() names what there is") from error
    if released is None:
        raise UserError(f"timm knows no model {architecture}; timm.list_models() names what there is")
    return released.to_dict()


def _from_hub(source: str) -> LocalCheckpoint:
    named = _HUB.fullmatch(source)
    if named is None:
        raise UserError(
            f"{source!r} names no file of the Hub; give hf://owner/name/file or hf://owner/name@revision/file"
        )
    repo, revision, path = named["repo"], named["revision"], named["path"]
    from huggingface_hub import hf_hub_download

    try:
        if path is None:
            return LocalCheckpoint(model_folder(repo, revision), source)
        with reading(repo):
            return LocalCheckpoint(Path(hf_hub_download(repo, path, revision=revision)), source)
    except UserError as error:
        raise UserError(f"{source} cannot be had from the Hub: {error}") from error
