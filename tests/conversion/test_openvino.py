"""OpenVINO: graphs that may make numbers of NaN are certified without it, GELUs apart, and signals."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset2 as older_operators
import openvino.opset13 as operators
import pytest
import torch
from models.families import FAMILIES
from torch.nn import functional as F

from hf_vit.conversion.api import export
from hf_vit.conversion.targets.graphs.runtimes import OPENVINO
from hf_vit.data import make_processor


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_a_graph_whose_operators_do_not_keep_nan_is_certified_without(tmp_path: Path):
    """It was refused, model and graph being "nan apart"; with NaN tests/test_exported_graphs.py has one."""
    model = FAMILIES["hybrid"].build("classification", num_hidden_layers=1, stage_depths=(1,))
    model.save_pretrained(tmp_path / "model")
    make_processor(model.config).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", "openvino", static=True)
    checks = json.loads((tmp_path / "out/export.json").read_text())["checks"]
    assert [check["pixels"] for check in checks] == ["noise"] * 2
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, model.config.num_channels, *model.config.nominal_size, generator=generator)
    images[0, :, 3, 3] = torch.nan
    with torch.no_grad():
        wanted = model.eval()(images).logits
    given = OPENVINO.open(tmp_path / "out" / OPENVINO.file).run(images)["logits"]
    torch.testing.assert_close(given[1], wanted[1], rtol=0, atol=6e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("gelu", [partial(operators.gelu, approximation_mode="erf"), older_operators.gelu])
def test_gelus_of_other_graphs_are_computed_apart(
    gelu: Callable[..., Any], dtype: Any, tmp_path: Path, processor: Callable[..., None]
):
    """Of other dtypes than ours, and of the operator that has no approximation."""
    processor("AVX2")
    given = operators.parameter([1, 8], dtype)
    last = gelu(given)
    last.output(0).set_names({"logits"})
    openvino.save_model(openvino.Model([last], [given]), file := tmp_path / OPENVINO.file)
    values = torch.from_numpy(np.linspace(-4, 4, 8, dtype=dtype)[None])
    (answer,) = OPENVINO.open(file).run(values).values()
    torch.testing.assert_close(answer, F.gelu(values), rtol=0, atol=2e-3 if dtype == np.float16 else 1e-6)


TWO_MODELS = """
import faulthandler, signal, sys
from pathlib import Path
from hf_vit.conversion.targets.graphs.runtimes import OPENVINO
faulthandler.enable()
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
first, second = (OPENVINO.open(Path(sys.argv[1])) for _ in range(2))
del first
del second
signal.raise_signal(signal.SIGTERM)
"""


def test_signals_are_heard_after_two_models(tmp_path: Path):
    """With a core for each the stack of signals was that of the first, which is gone: a segmentation fault."""
    given = operators.parameter([1, 4], np.float32)
    openvino.save_model(openvino.Model([operators.softmax(given, 1)], [given]), file := tmp_path / OPENVINO.file)
    ended = subprocess.run([sys.executable, "-c", TWO_MODELS, file], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "heard\n"), ended.stderr
