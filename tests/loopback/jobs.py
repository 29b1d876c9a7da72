"""What the server's own tests run in client processes: plain huggingface_hub."""

from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, hf_hub_download
from huggingface_hub.utils import get_token

REPO = "alice/plain"


def upload(files: dict[str, int], delete: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Commit files of so many bytes (reproducible, hard to compress)."""
    api = HfApi()
    api.create_repo(REPO, exist_ok=True)
    added = [CommitOperationAdd(path, content(size)) for path, size in files.items()]
    operations = [*added, *(CommitOperationDelete(path) for path in delete)]
    done = api.create_commit(REPO, operations, commit_message="upload", **options)
    return {"commit": done.oid, "pull_request": done.pr_revision}


def content(size: int) -> bytes:
    state, result = 12345, bytearray()
    while len(result) < size:
        state = (1103515245 * state + 12345) % (1 << 31)
        result += (state >> 8).to_bytes(3, "big")
    return bytes(32 + value % 90 for value in result[:size])  # text: binary files would all be stored as LFS


def download(files: list[str], revision: str | None = None) -> dict[str, str]:
    """SHA-256 of the files as they arrive."""
    import hashlib
    from pathlib import Path

    paths = {name: hf_hub_download(REPO, name, revision=revision) for name in files}
    return {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in paths.items()}


def look_around() -> dict[str, Any]:
    """What a client process sees of its surroundings."""
    import os
    from pathlib import Path

    inherited = sorted(name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy"))
    home = Path(constants.HF_HOME)
    return {"home": sorted(path.name for path in home.iterdir()), "environment": inherited, "token": get_token(),
            "xet": not constants.HF_HUB_DISABLE_XET}  # fmt: skip


def without_package() -> str:
    try:
        import hf_vit  # noqa: F401
    except ModuleNotFoundError as error:
        return str(error)
    return "it is there"
