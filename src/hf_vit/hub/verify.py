"""Verify a shared model as a stranger would: download it, compare every checksum, load it, run its card's examples."""

import json
import os
import re
import site
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.hf_api import RepoFile

from hf_vit.errors import UserError, one_line
from hf_vit.hub.contents import SharedFile, differences
from hf_vit.hub.example import example
from hf_vit.hub.model_folder import CARD_NAME, ModelConfig, read_config, weight_files
from hf_vit.repositories.hub import check_repo_id, try_again
from hf_vit.repositories.reading import check_folder, indexed_files, reading
from hf_vit.results.writing import scratch_folder

_BLOCK = re.compile(r"^(`{3,})python\n(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
_REPO_LINE = re.compile(r'^repo = "(.*)"$', re.MULTILINE)
_EXAMPLE_SECONDS = 600
# So that an example that says it needs no package is run where there is none.
_BARRED = "import sys\nsys.modules['hf_vit'] = None\n"
# Variables that say where Python, its packages and its libraries are, and how they compute.
_KEPT = re.compile(
    r"PATH|(DY)?LD_\w*PATH|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LANG|LC_\w+|TZ|TMPDIR|TEMP|TMP|SYSTEMROOT|WINDIR"
    r"|(OMP|MKL|OPENBLAS|KMP)_\w+|(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES"
)


@dataclass(frozen=True)
class VerifyResult:
    """What was verified.

    Attributes:
        repo_id, commit: what.
        folder: where it was downloaded to.
        files: number of files whose checksums agree.
        size: bytes of these.
        repaired: files that were damaged in the cache and were downloaded again.
        examples: which example was run -> what it printed.
        not_run: why an example was not run.
    """

    repo_id: str
    commit: str
    folder: Path
    files: int
    size: int
    repaired: list[str] = field(default_factory=list[str])
    examples: dict[str, str] = field(default_factory=dict[str, str])
    not_run: list[str] = field(default_factory=list[str])

    def describe(self) -> str:
        """Return a few lines for people."""
        lines = [f"{self.repo_id}: {self.files} files, {self.size:,} bytes, commit {self.commit}"]
        lines += [f"downloaded again: {', '.join(self.repaired)}"] if self.repaired else []
        lines += [f"{name} printed: {text}" for name, text in self.examples.items()]
        return "\n".join(lines + [f"not run: {reason}" for reason in self.not_run])


def verify_repo(
    repo_id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    report: Callable[[str], None] | None = None,
) -> VerifyResult:
    """Download a model, compare every file with the Hub's checksums, load it and ask it about an image.

    That is done by this package's own example, which needs the installed package or transformers alone. The examples
    of the card, and the model's own code that they load, are somebody else's code and need `trust_remote_code`.

    Args:
        repo_id: user/name.
        revision: branch, tag or commit.
        trust_remote_code: run that code.
        report: is told what is being done, a line at a time.

    Raises:
        UserError: it cannot be downloaded, a checksum differs, an example fails, or none could be run.
    """
    check_repo_id(repo_id)
    say, api = report or (lambda line: None), HfApi()

    def look() -> tuple[str, dict[str, RepoFile]]:
        commit = api.model_info(repo_id, revision=revision).sha
        assert commit is not None
        tree = api.list_repo_tree(repo_id, revision=commit, recursive=True)
        return commit, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def find_damaged() -> list[str]:
        local = {path: SharedFile(path, folder / path) for path in remote if (folder / path).is_file()}
        return sorted({*(remote.keys() - local.keys()), *differences(local, remote)})

    with reading(repo_id):
        commit, remote = try_again(look, "reading the repository", say=say)
        folder = try_again(lambda: Path(snapshot_download(repo_id, revision=commit)), "the download", say=say)
        repaired = find_damaged()  # the client accepts any bytes of the right number
        for path in repaired:
            say(f"{path} is missing or damaged; downloading it again")
            hf_hub_download(repo_id, path, revision=commit, force_download=True)
        if still := find_damaged() if repaired else []:
            raise UserError(
                f"{', '.join(still)} of {repo_id} still has a wrong checksum after a second download: a proxy "
                "or a disk changes the data; try another network"
            )
    say(f"{len(remote)} files of {repo_id} at {commit[:8]}: all checksums match")
    examples, not_run = run_examples(repo_id, folder, remote, trust_remote_code, say)
    size = sum(entry.size for entry in remote.values())
    return VerifyResult(repo_id, commit, folder, len(remote), size, repaired, examples, not_run)


def run_examples(
    repo_id: str, folder: Path, files: Collection[str], trust_remote_code: bool, say: Callable[[str], None]
) -> tuple[dict[str, str], list[str]]:
    """Load and ask the downloaded model by this package's own example, and run the card's if they are trusted.

    Nothing of what was downloaded is executed without trust: the package's example holds no word of it.

    Args:
        files: the paths that the repository holds; the weights must be among them.

    Returns:
        What each example that was run printed, and why others were not run.
    """
    check_folder(folder, repo_id)
    config = read_config(folder)
    if foreign := sorted({*weight_files(folder), *indexed_files(folder, repo_id)} - set(files)):
        raise UserError(f"the weight index of {repo_id} names {foreign[0]}, which is not in the repository")
    card, own, not_run = folder / CARD_NAME, _own_example(config, folder), list[str]()
    blocks = _BLOCK.findall(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else []
    if not blocks:
        raise UserError(
            f"the card of {repo_id} has no Python example; add one, or push the model again with hf-vit push"
        )
    waiting = {"this package's example": own} if own else {}
    for number, (_, block) in enumerate(blocks, start=1):
        name = f"example {number} of the card"
        code = _REPO_LINE.sub(lambda _: f"repo = {json.dumps(str(folder))}", block)
        if code.strip() == (own or "").strip():
            continue  # what it says is run as this package's example
        if trust_remote_code:
            waiting[name] = code
        else:
            not_run.append(f"{name} is code of {repo_id}; allow it with --trust-remote-code")
    if not waiting:
        reasons = [f"the architecture '{one_line(config.model_type)}' comes with code of {repo_id}", *not_run]
        raise UserError(f"all checksums match, but no example was run: {'; '.join(reasons)}")
    printed: dict[str, str] = {}
    for name, code in waiting.items():
        say(f"running {name}")
        printed[name] = _run(name, code)
    return printed, not_run


def _own_example(config: ModelConfig, folder: Path) -> str | None:
    """Return our own code for a model whose class this package or transformers has; None for others."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.model_type not in CONFIG_MAPPING or config.own_class is not None:
        return None
    return example(config, str(folder), "hf_vit" if config.is_ours else "transformers")


def _run(name: str, code: str) -> str:
    """Run an example in a process of its own, on an image of noise, and return its output."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with scratch_folder("verify") as scratch:
        Image.fromarray(pixels).save(scratch / "image.png")
        try:
            done = subprocess.run(
                [sys.executable, "-c", code if "import hf_vit" in code else _BARRED + code],
                cwd=scratch,
                env=_bare_environment(str(scratch)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_EXAMPLE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{name} did not finish within {_EXAMPLE_SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{name} fails: {one_line(lines[-1])}")
    return one_line(done.stdout)


def _bare_environment(home: str) -> dict[str, str]:
    """Return the environment of a process that runs an example: nothing secret, no network, an empty home.

    What Python and torch need is named; everything else, tokens first of all, is left out.
    """
    kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name.upper())}
    return kept | {
        "HOME": home,
        "HF_HOME": str(Path(home) / "huggingface"),
        "PYTHONUSERBASE": site.getuserbase(),  # packages that were installed below the true home
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
