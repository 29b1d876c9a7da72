"""What must not be touched: a folder outside that is watched, a mark that payloads leave, secrets that must stay.

And what runs in client processes, in an environment full of these secrets.
"""

import ctypes
import os
import shutil
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# Of the environment, beside HF_TOKEN. Nobody else knows these words.
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canaryAwsSecret0123456789abcdefghijklmnop",
    "WANDB_API_KEY": "ca0a11" + "0" * 34,
    "GITHUB_TOKEN": "ghp_canaryCanaryCanaryCanaryCanaryCanary0",
}
_IN_NONBLOCK = 0o4000
# Opened, read, written, made, moved, deleted.
_IN_ANYTHING = 0x1 | 0x2 | 0x4 | 0x8 | 0x20 | 0x40 | 0x80 | 0x100 | 0x200
_HEAD = struct.Struct("iIII")


class Watch:
    """The kernel's own list of what is done to a folder (inotify), whoever does it in whatever language."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(_IN_NONBLOCK)
        watched = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_ANYTHING)
        assert watched >= 0, os.strerror(ctypes.get_errno())

    def seen(self) -> list[str]:
        """Names of what was touched since the last question; "." is the folder itself."""
        names, data = list[str](), b""
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, 1 << 16)
        while data:
            _, _, _, length = _HEAD.unpack_from(data)
            name = data[_HEAD.size : _HEAD.size + length].rstrip(b"\0").decode()
            names.append(name or ".")
            data = data[_HEAD.size + length :]
        return names


class Ground:
    """The places of a campaign.

    Attributes:
        outside: files of the user that no command was told of: weights, a picture, words, a module.
        mark: a payload that runs makes this file.
        payload: Python that does.
        elsewhere: address of a server that is not the Hub.
    """

    def __init__(self, root: Path, model: Path, picture: Path, elsewhere: str) -> None:
        self.outside, self.mark, self.elsewhere, self.picture = root / "outside", root / "mark", elsewhere, picture
        self.outside.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
            shutil.copy(model / name, self.outside / name)
        shutil.copy(picture, self.outside / "private.png")
        (self.outside / "private.txt").write_text("canary of the outside\n")
        self.payload = f"open({str(self.mark)!r}, 'w').close()\n"
        self.watch = Watch(self.outside)
        (self.outside / "private.txt").read_text()
        assert "private.txt" in self.watch.seen(), "the watch sees nothing"


def surround(secrets: dict[str, str]) -> None:
    """A home and a folder for temporary files of this process' own, and secrets."""
    here = Path.cwd()
    for name in ("home", "tmp"):
        (here / name).mkdir()
    os.environ |= {**secrets, "HOME": str(here / "home"), "TMPDIR": str(here / "tmp")}


def command(arguments: list[str], secrets: dict[str, str]) -> None:
    surround(secrets)
    sys.argv = ["hf-vit", *arguments]
    from hf_vit_cli.main import main

    if arguments[0] == "page":
        from pages.small_runtime import take_small_files

        take_small_files()
    main(arguments)


def python(name: str, source: str, secrets: dict[str, str]) -> None:
    """A function of the package that takes a repository; a UserError is told as the program tells it."""
    surround(secrets)
    import hf_vit

    call: Any = getattr(hf_vit, name)
    try:
        call(source)
    except hf_vit.UserError as error:
        print(f"hf-vit: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def upload(repo_id: str, folder: str) -> None:
    """A model folder as it is, by huggingface_hub alone."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo_id)
    HfApi().upload_folder(repo_id=repo_id, folder_path=folder)
