"""Verify a shared model: download it, compare all checksums, load it, and run the examples of its card."""

import json
import os
import re
import site
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.hf_api import RepoFile

from hf_vit.errors import UserError, to_one_line
from hf_vit.hub.contents import SharedFile, find_differences
from hf_vit.hub.example import Architecture, make_example
from hf_vit.hub.model_folder import CARD_NAME, keeps_shapes, list_weights, read_config
from hf_vit.repositories.hub import check_repo_id, retry
from hf_vit.repositories.reading import check_references, guard_hub_access, list_indexed_files
from hf_vit.writing import make_scratch_folder

_BLOCK = re.compile(r"^(`{3,})python\n(.*?)^\1`*\s*$", re.MULTILINE | re.DOTALL)
_REPO_LINE = re.compile(r'^repo = "(.*)"$', re.MULTILINE)
_EXAMPLE_SECONDS = 600
# Prevents examples that do not import hf_vit from using the installed package.
_BLOCK_PACKAGE = "import sys\nsys.modules['hf_vit'] = None\n"
# Environment variables that Python and torch need; all others, such as tokens, are removed.
_SAFE_VARIABLES = re.compile(
    r"PATH|(DY)?LD_\w*PATH|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LANG|LC_\w+|TZ|TMPDIR|TEMP|TMP|SYSTEMROOT|WINDIR"
    r"|(OMP|MKL|OPENBLAS|KMP)_\w+|(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES"
)


@dataclass(frozen=True)
class VerifyResult:
    """The result of a verification.

    Attributes:
        repo_id, commit: the verified model and its commit.
        folder: the downloaded files.
        files: number of files whose checksums match.
        size: their size in bytes.
        repaired: files that were missing or damaged in the cache and were downloaded again.
        examples: name of each example that ran -> its output.
        not_run: reasons why other examples did not run.
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
        """Return a summary of a few lines for the terminal."""
        lines = [f"{self.repo_id}: {self.files} files, {self.size:,} bytes, commit {self.commit}"]
        lines += [f"downloaded again: {', '.join(self.repaired)}"] if self.repaired else []
        lines += [f"{name} printed: {text}" for name, text in self.examples.items()]
        return "\n".join(lines + [f"not run: {reason}" for reason in self.not_run])


def verify_repo(
    repo_id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> VerifyResult:
    """Download a model, compare every file with the Hub's checksums, load it, and predict on an image.

    The model is loaded by an example that hf_vit writes, which needs only hf_vit or transformers. The examples of the
    card, and model code in the repository, are untrusted code and run only with `trust_remote_code`.

    Args:
        repo_id: user/name.
        revision: branch, tag or commit.
        trust_remote_code: run the card's examples and the model's code.
        report: called with each line of progress.

    Raises:
        UserError: the download fails, a checksum differs, an example fails, or none could be run.
    """
    check_repo_id(repo_id)
    api = HfApi()

    def read_repository() -> tuple[str, dict[str, RepoFile]]:
        commit = api.model_info(repo_id, revision=revision).sha
        assert commit is not None
        tree = api.list_repo_tree(repo_id, revision=commit, recursive=True)
        return commit, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def find_damaged() -> list[str]:
        """Return files that are missing or whose checksum differs."""
        local = {path: SharedFile(path, folder / path) for path in remote if (folder / path).is_file()}
        return sorted({*(remote.keys() - local.keys()), *find_differences(local, remote)})

    with guard_hub_access(repo_id):
        commit, remote = retry(read_repository, "reading the repository", report=report)
        folder = retry(lambda: Path(snapshot_download(repo_id, revision=commit)), "the download", report=report)
        repaired = find_damaged()  # the client checks only the size of a cached file
        for path in repaired:
            report(f"{path} is missing or damaged; downloading it again")
            hf_hub_download(repo_id, path, revision=commit, force_download=True)
        damaged_files = find_damaged() if repaired else []
        if damaged_files:
            problem = f"{', '.join(damaged_files)} of {repo_id} still has a wrong checksum after a second download"
            raise UserError(f"{problem}: a proxy or a disk changes the data; try another network")
    report(f"{len(remote)} files of {repo_id} at {commit[:8]}: all checksums match")
    examples, not_run = run_examples(repo_id, folder, remote, trust_remote_code, report)
    size = sum(entry.size for entry in remote.values())
    return VerifyResult(repo_id, commit, folder, len(remote), size, repaired, examples, not_run)


def run_examples(
    repo_id: str, folder: Path, files: Collection[str], trust_remote_code: bool, report: Callable[[str], None]
) -> tuple[dict[str, str], list[str]]:
    """Run hf_vit's own example on the files downloaded into a folder and, if trusted, the examples of its card.

    Args:
        files: all paths in the repository; the weights must be among them.

    Returns:
        The output of each example that ran, and reasons why others did not run.

    Raises:
        UserError: an example fails, or none could be run.
    """
    import numpy as np
    from PIL import Image
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    check_references(folder, repo_id)
    config = read_config(folder)
    missing = sorted({*list_weights(folder), *list_indexed_files(folder, repo_id)} - set(files))
    if missing:
        raise UserError(
            f"the weight index of {repo_id} lists {missing[0]}, which is not in the repository; push it again"
        )
    card = folder / CARD_NAME
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    blocks = [code for _, code in _BLOCK.findall(text)]
    examples: dict[str, str] = {}
    not_run = list[str]()
    own_code = ""  # for a model whose class is in hf_vit or transformers
    if config.model_type in CONFIG_MAPPING and config.own_class is None:
        architecture: Architecture = "hf_vit" if config.is_ours else "transformers"
        own_code = make_example(config, str(folder), architecture, keeps_shapes(folder))
        examples["the example of hf_vit"] = own_code
    for number, block in enumerate(blocks, start=1):
        code = _REPO_LINE.sub(lambda _: f"repo = {json.dumps(str(folder))}", block)
        name = f"example {number} of the card"
        if code.strip() == own_code.strip():
            continue  # it runs anyway
        if trust_remote_code:
            examples[name] = code
        else:
            not_run.append(f"{name} is code from {repo_id}; add --trust-remote-code to run it")
    if not examples:
        reasons = [f"the architecture '{to_one_line(config.model_type)}' is defined by code in {repo_id}", *not_run]
        raise UserError(f"all checksums match, but no example was run: {'; '.join(reasons)}")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    outputs: dict[str, str] = {}
    for name, code in examples.items():
        report(f"running {name}")
        with make_scratch_folder("verify") as scratch:
            noise.save(scratch / "image.png")
            outputs[name] = run_program(name, code, scratch)
    return outputs, not_run


def run_program(name: str, code: str, folder: Path, seconds: float = _EXAMPLE_SECONDS) -> str:
    """Run Python code in a new process in a folder, without secrets and the Hub, and return its output.

    Code that does not import hf_vit runs where hf_vit cannot be imported.

    Raises:
        UserError: the code fails or takes too long.
    """
    environment = {name: value for name, value in os.environ.items() if _SAFE_VARIABLES.fullmatch(name.upper())}
    environment |= {
        "HOME": str(folder),
        "HF_HOME": str(folder / "huggingface"),
        "PYTHONUSERBASE": site.getuserbase(),  # packages installed in the user's real home folder
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-c", code if "import hf_vit" in code else _BLOCK_PACKAGE + code]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": seconds}
    try:
        process = subprocess.run(command, cwd=folder, env=environment, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{name} did not finish within {seconds:.0f} s; try a faster example or machine") from error
    if process.returncode:
        reason = to_one_line((process.stderr.strip().splitlines() or ["no message"])[-1])
        raise UserError(f"{name} failed: {reason}; correct the example in the card, or push the model again")
    return to_one_line(process.stdout)
