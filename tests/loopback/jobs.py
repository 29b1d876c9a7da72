"""What the server's own tests run in client processes: plain huggingface_hub."""

import hashlib
import random
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_download
from huggingface_hub.utils import get_token

REPO = "alice/plain"


def upload(files: dict[str, int], delete: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Commit files of so many bytes."""
    HfApi().create_repo(REPO, exist_ok=True)
    added = [CommitOperationAdd(path, content(size)) for path, size in files.items()]
    operations = [*added, *(CommitOperationDelete(path) for path in delete)]
    done = HfApi().create_commit(REPO, operations, commit_message="upload", **options)
    return {"commit": done.oid, "pull_request": done.pr_revision}


def content(size: int) -> bytes:
    """Random text that Xet compresses: binary files would all be stored as LFS."""
    return "".join(random.Random(0).choices("abcd", k=size)).encode()


def download(files: list[str]) -> dict[str, str]:
    """SHA-256 of the files as they arrive."""
    return {name: hashlib.sha256(Path(hf_hub_download(REPO, name)).read_bytes()).hexdigest() for name in files}


def look_around() -> list[Any]:
    """What a client process sees of its surroundings: files of its home, token, use of Xet, hf_vit."""
    try:
        import hf_vit  # noqa: F401
    except ModuleNotFoundError as error:
        found = str(error)
    else:
        found = "hf_vit"
    return [[path.name for path in Path(constants.HF_HOME).iterdir()], get_token(),
            not constants.HF_HUB_DISABLE_XET, found]  # fmt: skip
