"""torch's inductor with the weights frozen into the graph."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_vit.environment import cpu_capabilities
from hf_vit.inference.freezing import refuse_gradients


def compile_frozen(model: nn.Module) -> None:
    """`model.compile()`, frozen; on CPUs operators are called from C++, which saves as many calls of Python.

    All has to be set while dynamo traces too, and as options it comes too late.
    """
    from torch._inductor import config  # not before it is needed: it takes a second

    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    by_onednn = _products_by_onednn if on_cpu and _has_slow_mkl() else nullcontext
    model.compile(dynamic=False)
    compiled: Any = model._compiled_call_impl

    def frozen(*args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor):
                refuse_gradients(given)
        with torch.no_grad(), config.patch(freezing=True, cpp_wrapper=on_cpu), by_onednn():
            return compiled(*args, **kwargs)

    model._compiled_call_impl = frozen


def _has_slow_mkl() -> bool:
    """Whether products of float32 are slower by Intel's MKL, which inductor takes, than by oneDNN: on AMD's CPUs.

    Not one with AMX, should it come: there oneDNN could take the lower precision that it is allowed below.
    """
    known = cpu_capabilities()
    return str(known.get("cpu_name")).startswith("AMD") and not known.get("amx_tile")


_lock = threading.Lock()
_passes_by_onednn: list[str] = []  # of each that is on its way, what was set before the first


@contextmanager
def _products_by_onednn() -> Generator[None]:
    """Inductor takes oneDNN where lower precision is allowed; without instructions for one, none is lost."""
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    with _lock:
        _passes_by_onednn.append(_passes_by_onednn[0] if _passes_by_onednn else products.fp32_precision)
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        with _lock:
            before = _passes_by_onednn.pop()
            if not _passes_by_onednn:
                products.fp32_precision = before
