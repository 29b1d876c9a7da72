"""The warm process from which a `Client` forks its jobs.

    python -m loopback.processes with|without        # hf_vit importable, or not

Importing transformers takes seconds, and huggingface_hub reads its environment at import.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import zygote


class Bar:
    """Makes hf_vit unimportable, as on a machine where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("hf_vit", "hf_vit_cli"):
            raise ModuleNotFoundError("No module named 'hf_vit'", name=name)


def prepare() -> None:
    profile = sys.argv[1]
    names = ["transformers", "huggingface_hub", "torch", "PIL.Image", "torchvision"]
    if profile == "with":
        names += ["hf_vit", "hf_vit.results.facts", "hf_vit.hub.push", "hf_vit.hub.verify", "hf_vit_cli.main"]
        names += ["hf_vit.training.trainer.hf_vit_trainer"]
    else:
        sys.meta_path.insert(0, Bar())
    for name in names:
        importlib.import_module(name)
    import transformers

    for name in ("AutoImageProcessor", "AutoModelForImageClassification", "ViTImageProcessor", "pipeline"):
        getattr(transformers, name)
    rehearse(profile)
    zygote.freeze()


def rehearse(profile: str) -> None:
    """Save, load and describe a model once: what libraries prepare when they are first used, all jobs then share."""
    import tempfile

    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTImageProcessor

    Image.init()
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
            from hf_vit.hub.model_folder import list_code, read_config
            from hf_vit_cli.main import build_app

            build_app()
            render_card(folder)
            list_code(Path(folder), read_config(Path(folder)))


def start(name: str, folder: str, environment: dict[str, str], transport: str, arguments: dict[str, Any]) -> int:
    """`zygote.start`, by this transport and with waits of a hundredth between attempts; their number stays."""
    sleep = time.sleep

    def before() -> None:
        if transport == "lfs":  # what the variable does when huggingface_hub is imported
            from huggingface_hub import constants

            os.environ["HF_HUB_DISABLE_XET"] = "1"
            constants.HF_HUB_DISABLE_XET = True
        time.sleep = lambda seconds: sleep(seconds / 100)

    return zygote.start(name, folder, environment, arguments, before)


if __name__ == "__main__":
    zygote.answer(prepare, warm_up=zygote.warm_up, start=start, wait=zygote.wait)
