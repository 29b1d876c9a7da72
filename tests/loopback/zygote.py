"""Fresh client processes in milliseconds: imports the libraries once, then forks a process for every job.

    python -m loopback.zygote with|without        # hf_vit importable, or not

Importing transformers takes seconds, and huggingface_hub reads its environment at import. A fork is a process in which
everything is imported and nothing has been used. Jobs come as JSON lines on standard input ({"do": "import" |
"start" | "wait", ...}), answers leave on standard output.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Bar:
    """Makes hf_vit unimportable, as on a machine where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("hf_vit", "hf_vit_cli"):
            raise ModuleNotFoundError("No module named 'hf_vit'", name=name)


def warm_up(profile: str) -> None:
    if profile == "without":
        sys.meta_path.insert(0, Bar())
    for name in ("transformers", "huggingface_hub", "torch", "PIL.Image", "torchvision"):
        importlib.import_module(name)
    import transformers

    for name in ("AutoImageProcessor", "AutoModelForImageClassification", "ViTImageProcessor", "pipeline"):
        getattr(transformers, name)
    if profile == "with":
        for name in (
            "hf_vit",
            "hf_vit.results.facts",
            "hf_vit.hub.push",
            "hf_vit.hub.verify",
            "hf_vit.training.trainer.hf_vit_trainer",
            "hf_vit_cli.main",
        ):
            importlib.import_module(name)


def rehearse(profile: str) -> None:
    """Save, load and describe a model once: what libraries prepare when they are first used, all jobs then share."""
    import tempfile

    from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTImageProcessor

    tiny = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        config: Any = ViTConfig(**tiny, intermediate_size=16)
        if profile == "with":
            from hf_vit import HfViTConfig

            config = HfViTConfig(**tiny, intermediate_size=16)
        AutoModelForImageClassification.from_config(config).save_pretrained(folder)
        ViTImageProcessor().save_pretrained(folder)
        AutoImageProcessor.from_pretrained(folder)
        AutoModelForImageClassification.from_pretrained(folder)
        if profile == "with":
            from hf_vit.hub.card import render_card
            from hf_vit.hub.model_folder import read_config, travelling_code
            from hf_vit_cli.main import build_app

            build_app()
            render_card(folder)
            travelling_code(Path(folder), read_config(Path(folder)))
    gc.collect()
    gc.freeze()  # what all jobs share is not looked through, and so not copied, by each of them


def start(job: dict[str, Any]) -> int:
    """Fork a process that does the job in its folder; its outputs go to files there."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    folder = Path(job["folder"])
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.update(job["environment"])
    if job["transport"] == "lfs":
        disable_xet()
    code = 1
    try:
        shorten_waits(job["wait_factor"])
        module, _, function = job["name"].partition(":")
        answer = getattr(importlib.import_module(module), function)(**job["arguments"])
        (folder / "answer.json").write_text(json.dumps(answer))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def disable_xet() -> None:
    """What HF_HUB_DISABLE_XET=1 does when huggingface_hub is imported."""
    from huggingface_hub import constants

    os.environ["HF_HUB_DISABLE_XET"] = "1"
    constants.HF_HUB_DISABLE_XET = True


def shorten_waits(factor: float) -> None:
    """Waits between attempts become shorter; their number stays."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds * factor)


def wait(pid: int, seconds: float) -> int | None:
    """Exit code of a process (negative: the signal that killed it), None if it still runs after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def main() -> None:
    warm_up(sys.argv[1])
    rehearse(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=channel, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "import":
            answer = {"imported": [importlib.import_module(name).__name__ for name in job["names"]]}
        else:
            answer = {"pid": start(job)} if job["do"] == "start" else {"code": wait(job["pid"], job["seconds"])}
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
