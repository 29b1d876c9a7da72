"""Libraries and machine: versions that a measurement was made with, what is missing or imported when used, memory."""

import ast
import ctypes
import functools
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_vit.errors import UserError

if TYPE_CHECKING:
    import torch

# Module that not every installation has -> the package that holds it, and the extra of this package that brings it.
LIBRARIES = {
    "sklearn": ("scikit-learn", "train"),
    "scipy": ("scipy", "train"),
    "skimage": ("scikit-image", "train"),
    "matplotlib": ("matplotlib", "train"),
    "torchdata": ("torchdata", "train"),
    "torchmetrics": ("torchmetrics", "dense"),
    "pycocotools": ("pycocotools", "dense"),
    "timm": ("timm", "timm"),
    "peft": ("peft", "peft"),
    "onnx": ("onnx", "export"),
    "onnxscript": ("onnxscript", "export"),
    "onnxruntime": ("onnxruntime", "export"),
    "onnxruntime_extensions": ("onnxruntime-extensions", "export"),
    "openvino": ("openvino", "openvino"),
    "nncf": ("nncf", "openvino"),
    "executorch": ("executorch", "executorch"),
    "h5py": ("h5py", "vtab"),
    "ray": ("ray", "ray"),
    "upath": ("universal-pathlib", "stores"),
    "torchao": ("torchao", "quantization"),
    "vit_pytorch": ("vit-pytorch", "bench"),
}
_PACKAGES = ("hf-vit", "torch", "torchvision", "transformers", "datasets", "huggingface_hub")
# mallopt(3): what is larger is mapped by itself, and unmapped when freed (older C libraries take no more than 32 MiB);
# and as much free memory at the end of the heap is kept.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_MAPPED_FROM, _TRIMMED_FROM = (2**28, 2**25), 2**30


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose names are imported when they are used.

    Args:
        package: its `__name__`.
        file: its `__file__`; the stub beside it, __init__.pyi, imports each name from its module.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    origins = {each.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for each in node.names}
    names = sorted(origins)

    def get(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{origins[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: names, names


def require(*modules: str, what: str, extra: str | None = None) -> None:
    """Refuse to go on without libraries that an extra of this package brings.

    Args:
        modules: keys of `LIBRARIES`.
        what: needs them, at the beginning of a sentence: "training".
        extra: that brings all of them; None: that of the first.

    Raises:
        UserError: one is missing; the message has the pip command.
    """
    if missing := [name for name in modules if not _is_installed(name)]:
        raise UserError(_missing(what, missing, extra))


def missing_library(error: ImportError) -> str | None:
    """Return which library of an extra could not be imported, and the pip command; None for any other module."""
    name = (error.name or "").partition(".")[0]
    return _missing("this", [name]) if name in LIBRARIES else None


def _missing(what: str, modules: list[str], extra: str | None = None) -> str:
    names = " and ".join(LIBRARIES[name][0] for name in modules)
    return f'{what} needs {names}, not installed here: pip install "hf-vit[{extra or LIBRARIES[modules[0]][1]}]"'


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # None in sys.modules; a parent that is missing
        return False


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide about numbers; those not installed are left out."""
    return dict(_versions())


@functools.cache  # reading them takes as long as converting a small model
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def hardware(device: str | None = None) -> dict[str, Any]:
    """Return the machine without its name: CPU model, usable cores and memory in GiB; the GPU's too when work runs
    there.

    Args:
        device: a torch device string; by default CUDA where there is one, else the CPU.
    """
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, Any] = {
        "device": "cpu",
        "name": cpu_name(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    kind = torch.device(device).type if device else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device or "cuda"))
        found |= {
            "device": "cuda",
            "cpu": found["name"],
            "name": str(properties.name),
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(int(properties.total_memory) / 2**30, 1),
        }
    elif kind != "cpu":
        found["device"] = kind
    return found


def cpu_name() -> str:
    """Return the processor's model, as the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_capabilities() -> Mapping[str, Any]:
    """Return what torch knows of this CPU's instructions; empty in torch 2.11, the oldest supported."""
    import torch

    read = getattr(torch.cpu, "get_capabilities", None)
    return read() if read is not None else {}


def emulates_bfloat16() -> bool:
    """Return whether this CPU has no instructions for bfloat16: products take 3 to 4 times as long as float32's."""
    known = cpu_capabilities()
    return known.get("architecture") == "x86_64" and not (known.get("avx512_bf16") or known.get("amx_bf16"))


def has_avx2_alone() -> bool:
    """Return whether AVX2 is the most that torch, oneDNN and OpenVINO have here: there a GELU that they compute in a
    product costs more than one after it.
    """
    import torch

    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def sums_int8_in_16_bits() -> bool:
    """Return whether this CPU adds two products of bytes in 16 bits, which cuts off what does not fit: x86 without
    VNNI.
    """
    known = cpu_capabilities()
    return platform.machine() in ("x86_64", "AMD64") and not (known.get("avx512_vnni") or known.get("avx_vnni"))


def keep_freed_memory() -> bool:
    """Let this process use up to 1 GiB of freed memory again, in place of giving it back to the system every time.

    glibc maps large tensors anew at every pass, and the system clears every page of them: up to a quarter of a pass of
    large batches on a CPU. `optimize_for_inference` and everything that trains a model or opens one by its name do it;
    other programs call it before their first pass. What the environment says of it (`MALLOC_...`, `GLIBC_TUNABLES`) is
    left alone.

    Returns:
        Whether it is so now: False without glibc, or where the environment decides.
    """
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(_MMAP_THRESHOLD, size) for size in _MAPPED_FROM) and bool(
        mallopt(_TRIM_THRESHOLD, _TRIMMED_FROM)
    )


def pick_device(device: str | None = None) -> "torch.device":
    """Return the asked device if torch can use it here; by default CUDA where there is one, else the CPU."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place).item()  # which the device "meta" cannot
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device {device!r} cannot be used here ({reason}); try --device cpu") from error
    return place
