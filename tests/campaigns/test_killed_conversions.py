"""Conversions killed at random moments leave nothing, the earlier model or the new one whole; and the next run works.

python -m pytest tests/campaigns/test_killed_conversions.py -m slow -s
"""

import contextlib
import functools
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns.ledger import Campaign, failures
from originals.cases import FORMATS
from originals.pytorch import of_transformers
from originals.vit_jax import make_checkpoint

import hf_vit.conversion as conversion
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification

SEED = 0
KILLS = 12  # of each format and signal
SIGNALS = ("SIGTERM", "SIGKILL")
COMMAND = "python -m pytest tests/campaigns/test_killed_conversions.py -m slow"
LARGE = {"depth": 6, "heads": 8, "head_size": 64, "mlp": 2048, "patch": (16, 16), "grid": (14, 14), "labels": 1000}
# Imported once; a fork for every run then begins with the conversion itself.
PRELOADED = ["hf_vit.conversion", "hf_vit.models.modeling_hf_vit", "transformers.models.vit.image_processing_vit"]


def sources(folder: Path, large: bool) -> dict[str, Path]:
    """A checkpoint in every format: name -> file or folder."""
    sizes: dict[str, Any] = LARGE if large else {}
    arrays = make_checkpoint(**sizes)
    small = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    model = of_transformers("ViTForImageClassification", **(small if large else {}))
    found: dict[str, Path] = {}
    for name in ("stored", "deflated"):
        found[name] = folder / f"{name}.npz"
        found[name].write_bytes(FORMATS[name].dump(arrays))
    for name, shard in (("safetensors", "1GB"), ("shards", "5MB" if large else "10KB")):
        found[name] = folder / name
        model.save_pretrained(found[name], max_shard_size=shard)
    found["pth"] = folder / "pth"
    shutil.copytree(found["safetensors"], found["pth"], ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(model.state_dict(), found["pth"] / "pytorch_model.bin")
    return found


class Killer:
    """Runs conversions in processes of their own and ends them at random moments."""

    def __init__(self, folder: Path, large: bool) -> None:
        (folder / "sources").mkdir()
        (folder / "outputs").mkdir()
        self.outputs, self.sources = folder / "outputs", sources(folder / "sources", large)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)

    def start(self, form: str, output: Path) -> Any:
        process = self.context.Process(
            target=conversion.convert, args=(self.sources[form], output), kwargs={"force": True}
        )
        process.start()
        return process

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Format -> how long a run takes that is not killed."""
        return {form: self._timed(form) for form in self.sources}

    def _timed(self, form: str) -> float:
        process, started = self.start(form, self.outputs / f"whole {form}"), time.perf_counter()
        process.join()
        assert process.exitcode == 0
        return time.perf_counter() - started

    def attempt(self, case: str) -> str:
        """Where a run was killed into an empty place, or over the model of an earlier run."""
        form, signal_name, number = case.split("/")
        rng, output = random.Random(f"{SEED}/{case}"), self.outputs / f"{form} {int(number) % 4}"
        earlier = output.exists()
        process = self.start(form, output)
        time.sleep(rng.uniform(0, 1.1) * self.seconds[form])
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(process.pid, getattr(signal, signal_name))
        process.join()
        there = self.is_whole(form, output)
        if there or rng.random() < 0.3:
            if rng.random() < 0.5:
                shutil.rmtree(output, ignore_errors=True)
            else:  # the next run goes on, over whatever remains lie there
                conversion.convert(self.sources[form], output, force=True)
                assert self.is_whole(form, output)
                assert not list(self.outputs.glob(f".{output.name}.*")), "remains"
        return f"{'over an earlier model' if earlier else 'new'}: {'a whole model' if there else 'nothing'}"

    def is_whole(self, form: str, output: Path) -> bool:
        """False for an output that is absent; anything in between fails."""
        if not output.exists():
            return False
        whole = self.outputs / f"whole {form}"
        names = sorted(path.name for path in whole.iterdir())
        assert sorted(path.name for path in output.iterdir()) == names, "half a folder"
        for name in {*names} - {"facts.json"}:  # which has a date
            assert (output / name).read_bytes() == (whole / name).read_bytes(), f"another {name}"
        return True


@pytest.fixture
def killer(tmp_path: Path, request) -> Killer:
    return Killer(tmp_path, large=request.param)


def cases(killer: Killer, number: int) -> list[str]:
    return [f"{form}/{name}/{index}" for form in killer.sources for name in SIGNALS for index in range(number)]


@pytest.mark.parametrize("killer", [False], indirect=True)
def test_some_kills(killer: Killer):
    killer.__dict__["seconds"] = {"shards": killer._timed("shards")}
    for name in SIGNALS:
        killer.attempt(f"shards/{name}/0")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("killer", [True], indirect=True)
def test_campaign(killer: Killer):
    assert HfViTForImageClassification.from_pretrained(
        conversion.convert(killer.sources["stored"], killer.outputs / "loads").output
    ).classifier.bias.shape == (1000,)
    counts = Campaign("killed_conversions", COMMAND, seed=SEED, kills=KILLS).run(cases(killer, KILLS), killer.attempt)
    assert failures(counts) == []
    nothing = sum(count for (_, outcome), count in counts.items() if outcome == "new: nothing")
    assert nothing >= counts.total() // 4, "the kills came too late to say anything"
