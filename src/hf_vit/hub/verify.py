"""Verify a shared model as a stranger would: download it, compare every checksum, run the examples of its card."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.hf_api import RepoFile

from hf_vit.errors import UserError
from hf_vit.hub.card import CARD_NAME, render_card
from hf_vit.hub.contents import SharedFile
from hf_vit.hub.failures import explain, try_again
from hf_vit.hub.preflight import check_repo_id
from hf_vit.hub.push import differences

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_REPO_LINE = re.compile(r'^repo = "(.*)"$', re.MULTILINE)
_EXAMPLE_SECONDS = 600
# So that an example that says it needs no package is run where there is none.
_BARRED = "import sys\nsys.modules['hf_vit'] = None\n"


@dataclass(frozen=True)
class VerifyResult:
    """What was verified.

    Attributes:
        repo_id, commit: what.
        folder: where it was downloaded to.
        files: number of files whose checksums agree.
        size: bytes of these.
        repaired: files that were damaged in the cache and were downloaded again.
        examples: what each example that was run printed.
        not_run: why an example was not run.
    """

    repo_id: str
    commit: str
    folder: Path
    files: int
    size: int
    repaired: list[str] = field(default_factory=list[str])
    examples: list[str] = field(default_factory=list[str])
    not_run: list[str] = field(default_factory=list[str])


def verify_repo(
    repo_id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    token: str | None = None,
    report: Callable[[str], None] | None = None,
) -> VerifyResult:
    """Download a model, compare every file with the Hub's checksums, and run its card's examples on an image.

    An example that is what this package writes into its cards, and uses the installed package alone, is always run.
    Any other runs code of somebody else, the model's own or the card's, and needs `trust_remote_code`.

    Args:
        repo_id: user/name.
        revision: branch, tag or commit.
        trust_remote_code: run that code.
        token: by default the one you are logged in with, if any.
        report: is told what is being done, a line at a time.

    Raises:
        UserError: it cannot be downloaded, a checksum differs, or an example fails.
    """
    check_repo_id(repo_id)
    say = report or (lambda line: None)
    api = HfApi(token=token)
    try:
        commit, remote = try_again(lambda: _look(api, repo_id, revision), "looking at the repository", say=say)
        folder = try_again(
            lambda: Path(snapshot_download(repo_id, revision=commit, token=token)), "the download", say=say
        )
        repaired = _repair(repo_id, commit, folder, remote, token, say)
    except Exception as error:
        raise explain(error, repo_id, explicit_token=token is not None) from error
    say(f"{len(remote)} files of {repo_id} at {commit[:8]}: every checksum agrees")
    examples, not_run = run_examples(repo_id, folder, trust_remote_code, say)
    size = sum(entry.size for entry in remote.values())
    return VerifyResult(repo_id, commit, folder, len(remote), size, repaired, examples, not_run)


def _look(api: HfApi, repo_id: str, revision: str | None) -> tuple[str, dict[str, RepoFile]]:
    commit = api.model_info(repo_id, revision=revision).sha
    assert commit is not None
    tree = api.list_repo_tree(repo_id, revision=commit, recursive=True)
    return commit, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _repair(
    repo_id: str, commit: str, folder: Path, remote: dict[str, RepoFile], token: str | None, say: Callable[[str], None]
) -> list[str]:
    """Compare; what is damaged (the client accepts any bytes of the right number) is downloaded once more."""
    damaged = _damaged(folder, remote)
    for path in damaged:
        say(f"{path} is damaged; downloading it again")
        hf_hub_download(repo_id, path, revision=commit, token=token, force_download=True)
    if still := _damaged(folder, remote):
        raise UserError(
            f"{', '.join(still)} of {repo_id} does not have the Hub's checksum, also when downloaded again: something "
            "on the way changes the data (a proxy, a disk); try another network"
        )
    return damaged


def _damaged(folder: Path, remote: dict[str, RepoFile]) -> list[str]:
    local = {path: SharedFile(path, folder / path) for path in remote if (folder / path).is_file()}
    return sorted({path for path in remote if path not in local} | set(differences(local, remote)))


def run_examples(
    repo_id: str, folder: Path, trust_remote_code: bool, say: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """Run the examples of a downloaded model's card on exactly these files.

    Returns:
        What each one printed, and why others were not run.

    Raises:
        UserError: an example fails, or the card has none.
    """
    card = folder / CARD_NAME
    blocks = _BLOCK.findall(card.read_text(encoding="utf-8")) if card.is_file() else []
    if not blocks:
        raise UserError(f"the card of {repo_id} has no example in Python; add one, or push it again with hf-vit push")
    named = _REPO_LINE.search("".join(blocks))
    ours = _BLOCK.findall(render_card(folder, repo_id=named[1] if named else repo_id))
    printed: list[str] = []
    not_run: list[str] = []
    for number, block in enumerate(blocks, start=1):
        foreign = block not in ours or "trust_remote_code" in block
        if foreign and not trust_remote_code:
            not_run.append(f"example {number} runs code that comes with the model; allow it with --trust-remote-code")
            continue
        say(f"running example {number} of the card")
        printed.append(_run(block, folder, number))
    return printed, not_run


def _run(block: str, folder: Path, number: int) -> str:
    """Run a block in a process of its own, on an image of noise; its output."""
    code = _REPO_LINE.sub(lambda match: f"repo = {str(folder)!r}", block)
    if "import hf_vit" not in block:
        code = _BARRED + code
    with tempfile.TemporaryDirectory(prefix="hf_vit_verify_") as scratch:
        _draw_noise(Path(scratch) / "image.png")
        environment = os.environ | {
            "HF_MODULES_CACHE": str(Path(scratch) / "modules"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=scratch,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_EXAMPLE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"example {number} of the card did not end within {_EXAMPLE_SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"example {number} of the card fails: {lines[-1]}")
    return done.stdout.strip()


def _draw_noise(path: Path) -> None:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def describe(result: VerifyResult) -> str:
    """A few lines for people."""
    lines = [f"{result.repo_id}: {result.files} files, {result.size:,} bytes, commit {result.commit}"]
    if result.repaired:
        lines.append(f"downloaded again: {', '.join(result.repaired)}")
    lines += [f"an example printed: {text}" for text in result.examples]
    return "\n".join(lines + result.not_run)
