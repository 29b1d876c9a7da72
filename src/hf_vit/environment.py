"""Inspect libraries and machine: versions, optional libraries, CPU instructions, memory, devices."""

import ast
import ctypes
import functools
import os
import platform
import re
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

# Module of an optional library -> its package, and the extra of hf-vit that installs it.
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
# Parameters of mallopt(3): larger blocks are mapped separately and unmapped when freed (older C libraries accept up to
# 32 MiB); free memory at the end of the heap is kept up to the trim threshold.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_MAPPED_FROM = (2**28, 2**25)
_TRIMMED_FROM = 2**30


def make_lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that imports its names on first use.

    Args:
        package: its `__name__`.
        file: its `__file__`; the stub beside it, __init__.pyi, imports each name from its module.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names = sorted(modules)

    def import_name(name: str) -> Any:
        """Import a name from its module, and store it in the package."""
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
        except ImportError as error:
            error.msg = describe_missing_library(error) or error.msg
            raise
        setattr(sys.modules[package], name, value)
        return value

    return import_name, lambda: names, names


def require(*modules: str, purpose: str, extra: str | None = None) -> None:
    """Refuse to continue without libraries that an extra of this package installs.

    Args:
        modules: keys of `LIBRARIES`.
        purpose: what needs them, as the beginning of a sentence: "training".
        extra: the extra that installs all of them; None: that of the first missing one.

    Raises:
        UserError: a library is missing; the message has the pip command.
    """
    if missing := [name for name in modules if not _is_installed(name)]:
        raise UserError(_describe_missing(purpose, missing, extra))


def describe_missing_library(error: ImportError) -> str | None:
    """Return a message with the pip command if an optional library could not be imported; None for other modules."""
    name = (error.name or "").partition(".")[0]
    return _describe_missing("this", [name]) if name in LIBRARIES else None


def _describe_missing(purpose: str, modules: list[str], extra: str | None = None) -> str:
    """Return a message that names missing libraries and the pip command that installs them."""
    names = " and ".join(LIBRARIES[name][0] for name in modules)
    extra = extra or LIBRARIES[modules[0]][1]
    return f'{purpose} needs {names}; install with pip install "hf-vit[{extra}]"'


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # sys.modules holds None for it; its parent package is missing
        return False


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that affect numerical results."""
    return dict(_read_versions())


@functools.cache  # reading versions takes as long as converting a small model
def _read_versions() -> Mapping[str, str]:
    """Read the versions that `versions` returns."""
    library_versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            library_versions[package] = metadata.version(package)
    return library_versions


def read_hardware(device: str | None = None) -> dict[str, Any]:
    """Return facts about the machine: CPU or GPU model, usable cores, memory in GiB; never its host name.

    Args:
        device: the torch device that is used; default: CUDA if available, else the CPU.
    """
    import psutil
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts: dict[str, Any] = {
        "device": "cpu",
        "name": read_cpu_name(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    device_type = torch.device(device).type if device else "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device or "cuda"))
        facts |= {
            "device": "cuda",
            "cpu": facts["name"],
            "name": str(properties.name),
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(int(properties.total_memory) / 2**30, 1),
        }
    elif device_type != "cpu":
        facts["device"] = device_type
    return facts


def measure_free_memory(root: str | Path = "/") -> int:
    """Return the bytes of memory that this process can still take: the machine's, or those of its control groups.

    Args:
        root: folder with proc and sys, in which Linux describes them.
    """
    import psutil

    free = psutil.virtual_memory().available
    with suppress(OSError):
        for line in Path(root, "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in ("", "memory"):
                folder = Path(root, "sys/fs/cgroup", controllers, group.strip("/"))
                for parent in (folder, *folder.parents):  # a job's limit may be that of a group around it
                    with suppress(OSError, ValueError):  # without a limit it is "max"
                        free = min(free, _measure_free_in_group(parent, "total_" if controllers else ""))
    return max(0, free)


def _measure_free_in_group(folder: Path, prefix: str) -> int:
    """Return the free bytes of a control group; files that the system can drop from memory are free."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if prefix else ("memory.max", "memory.current")
    limit, used = (int((folder / name).read_text()) for name in names)
    values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return limit - used + int(values.get(f"{prefix}inactive_file", 0))


def read_cpu_name() -> str:
    """Return the processor's model name as the system reports it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def get_cpu_capabilities() -> Mapping[str, Any]:
    """Return what torch knows about this CPU's instructions; empty in torch 2.11, the oldest supported version."""
    import torch

    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    capabilities: Mapping[str, Any] = get_capabilities() if get_capabilities is not None else {}
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in ("SSE41", "AVX", "AVX2", "AVX512_CORE"):
        # Limited so, oneDNN and OpenVINO do not use what this CPU has beyond.
        return {name: value for name, value in capabilities.items() if not re.search("vnni|bf16|amx", name)}
    return capabilities


def emulates_bfloat16() -> bool:
    """Return whether this CPU lacks bfloat16 instructions, so that products take 3 to 4 times as long as in float32."""
    capabilities = get_cpu_capabilities()
    return capabilities.get("architecture") == "x86_64" and not (
        capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    )


def has_avx2_alone() -> bool:
    """Return whether AVX2 is the best instruction set that torch, oneDNN and OpenVINO can use here.

    There a GELU fused into a product is slower than one computed afterwards.
    """
    import torch

    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def sums_int8_in_16_bits() -> bool:
    """Return whether this CPU adds two int8 products in 16 bits, which may saturate: x86 without VNNI."""
    capabilities = get_cpu_capabilities()
    return platform.machine() in ("x86_64", "AMD64") and not (
        capabilities.get("avx512_vnni") or capabilities.get("avx_vnni")
    )


def keep_freed_memory() -> bool:
    """Let this process reuse up to 1 GiB of freed memory instead of returning it to the system.

    By default glibc maps large tensors anew in every pass, and the system clears every page, which takes up to a
    quarter of the time of large batches on a CPU. `optimize_for_inference`, training, and opening a model by name call
    this function; other programs may call it before their first pass. Settings in the environment (`MALLOC_...`,
    `GLIBC_TUNABLES`) take precedence.

    Returns:
        Whether memory is kept: False without glibc, or if the environment sets this.
    """
    is_configured = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_configured or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return any(mallopt(_MMAP_THRESHOLD, size) for size in _MAPPED_FROM) and bool(
        mallopt(_TRIM_THRESHOLD, _TRIMMED_FROM)
    )


def pick_device(device: str | None = None) -> "torch.device":
    """Return the requested device if torch can use it here; default: this process's GPU if there is one, else the CPU.

    Raises:
        UserError: torch cannot use the device on this machine.
    """
    import torch

    if device in (None, "cuda") and torch.cuda.is_available():
        rank = os.environ.get("LOCAL_RANK")  # of processes that share a machine, each with a GPU of its own
        return torch.device("cuda" if rank is None else f"cuda:{int(rank) % torch.cuda.device_count()}")
    try:
        torch_device = torch.device(device or "cpu")
        torch.empty(1, device=torch_device).item()  # fails on the device "meta", which has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the device {device!r} cannot be used here ({reason}); use --device cpu") from error
    return torch_device
