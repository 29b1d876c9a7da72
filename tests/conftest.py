"""What every test shares: offline and quiet Hugging Face libraries with a cache of their own, one thread, one seed."""

import functools
import gc
import io
import os
import random
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from zygote import SEARCH_PATH, Zygote

# Read when the libraries are imported, so set before anything else.
_CACHE = tempfile.TemporaryDirectory(prefix="hf_vit_tests_", ignore_cleanup_errors=True)
os.environ.update(
    HF_HOME=_CACHE.name,
    HF_VIT_GRAPH_CACHE=f"{_CACHE.name}/graphs",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    CI="true",  # else OpenVINO reports every graph to Intel, in threads of its own that fork this process
)

pytest_plugins = ["loopback.fixtures"]


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Starts functions in processes of their own, without the seconds in which libraries are imported.

    What forks this process instead may hang: other tests may have left threads in it.
    """
    alone = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    environment = {**os.environ, **alone, "PYTHONPATH": SEARCH_PATH}
    modules = ("hf_vit.training.api", "hf_vit.training.tasks.dense")
    folder = tmp_path_factory.mktemp("warm")
    zygote = Zygote("-W", "ignore", "-m", "zygote", *modules, folder=folder, environment=environment)
    yield zygote
    zygote.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole files to processes, and all that need the loopback Hub, or `warm`, to one: it starts these once."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def find_group(file: str) -> str:
        words = set(re.findall(r"\w+", (config.rootpath / file).read_text()))
        return "hub" if {"loopback", "xet_client"} & words else "warm" if {"warm", "Zygote"} & words else file

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_group(super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files, and the functions of each file, in the random order of a seed: `ORDER=1 make test`."""
    if seed := os.environ.get("ORDER"):
        names = {item: (str(item.path), item.nodeid.partition("[")[0]) for item in items}
        items.sort(key=lambda item: [random.Random(f"{seed} {name}").random() for name in names[item]])


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What is imported by now stays: the full collections at the end of every training need not walk through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Also for the fixtures of modules, which come before those of a test."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_reports() -> Iterator[None]:
    """Draw figures of one kind once, except in their own tests: drawing takes most of a short training."""
    from matplotlib.figure import Figure

    savefig, pictures = Figure.savefig, dict[str, bytes]()

    def save(figure: Figure, file: Any, **options: Any) -> None:
        of_figures = re.search(
            r"tests/(analysis|cost|evaluation/test_(top1|protocols))", os.environ.get("PYTEST_CURRENT_TEST", "")
        )
        if of_figures or not isinstance(file, io.BytesIO):
            return savefig(figure, file, **options)
        marks = [sorted({type(artist).__name__ for artist in axes.get_children()}) for axes in figure.axes]
        kind = f"{options} {figure.get_size_inches()} {marks}"
        if kind not in pictures:
            savefig(figure, file, **options)
            pictures[kind] = file.getvalue()
        else:
            file.write(pictures[kind])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", save)
        yield


@pytest.fixture(autouse=True, scope="session")
def _quick_exports() -> Iterator[None]:
    """Read torch's translations of operators to ONNX once, not anew for every graph."""
    import torch

    export = torch.onnx.export

    def export_quickly(*arguments: Any, **options: Any) -> Any:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        if not isinstance(ONNXRegistry.__dict__["from_torchlib"], staticmethod):
            patched.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        return export(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.onnx, "export", export_quickly)
        yield


GRAPHS = dict[Any, bytes]()


@pytest.fixture(scope="module")
def exported_once() -> Iterator[None]:
    """Export the same model once in a process's tests: each gets a graph of its own to write into.

    What torch has traced already is told by its code, and not by the model's configuration.
    """
    import onnx
    import torch
    from onnxscript import ir

    export = torch.onnx.export

    def export_once(model: Any, arguments: Any = (), **options: Any) -> Any:
        if isinstance(model, torch.export.ExportedProgram):
            told, kinds = model.graph_module.code, ()
            tensors = [*model.state_dict.values(), *model.constants.values()]
        else:
            told, kinds = str(model), tuple(map(type, model.modules()))
            if hasattr(model, "model"):
                told += f"{model.model.config.to_dict() | {'_name_or_path': ''}} {getattr(model, 'options', '')}"
            tensors = [*model.parameters(), *model.buffers()]
        weights = [zlib.crc32(tensor.detach().float().numpy().tobytes()) for tensor in tensors]
        key = f"{told} {weights} {[each.shape for each in arguments]} {options}", kinds
        if key not in GRAPHS:
            program: Any = export(model, arguments, **options)
            GRAPHS[key] = ir.to_proto(program.model).SerializeToString()
            return program
        return torch.onnx.ONNXProgram(ir.from_proto(onnx.load_model_from_string(GRAPHS[key])), None)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.onnx, "export", export_once)
        yield


@pytest.fixture(autouse=True)
def _seeded():
    import numpy as np
    import torch

    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what torch reports of the processor; choices by its kind are tested both ways."""
    import platform

    import torch

    def report(level: str = "AVX512", machine: str = "x86_64", **capabilities: object) -> None:
        known = {"architecture": machine, **capabilities}
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
        monkeypatch.setattr(platform, "machine", lambda: machine)

    return report


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty object store in this process's memory."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    # For `datasets`, which downloads tables, a store is the Hub.
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `hf-vit` in this process: exit code, what it printed, what it complained about."""
    from hf_vit_cli.main import main

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return (int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def succeeds(command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run `hf-vit` with what it can do: what it printed."""

    def run(*words: object) -> str:
        code, out, err = command(*words)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def fails(command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run `hf-vit` with what it refuses before any work: in one line, which is returned and holds these words."""

    def run(words: Iterable[object], *needed: str) -> str:
        code, out, err = command(*words)
        assert (code, out, err.count("\n"), err[:8]) == (1, "", 1, "hf-vit: "), err
        assert [word for word in needed if word not in err] == [], err
        return err

    return run
