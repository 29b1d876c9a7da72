"""The files that travel with every checkpoint use nothing that the next release of a library may take away.

A model that was shared today is run by the torch and transformers of next year, from copies of these files. So they
import from documented modules only, name what is there, and leave underscored names alone but for those that
transformers documents for authors of models.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from imports import SOURCE
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin

MODELS = SOURCE / "hf_vit" / "models"
FILES = sorted(path for path in MODELS.glob("*.py") if path.name != "__init__.py")

# Modules of the libraries' documentation; of torchvision those of its reference and of its tutorial on detection.
DOCUMENTED = {
    *("torch", "torch.nn", "huggingface_hub", "huggingface_hub.dataclasses", "torchvision.ops", "transformers"),
    *(f"torchvision.models.detection{part}" for part in ("", ".anchor_utils", ".faster_rcnn", ".image_list")),
    "torchvision.models.detection.mask_rcnn",
    *(
        f"transformers.{name}"
        for name in (
            *("activations", "backbone_utils", "configuration_utils", "masking_utils", "modeling_layers"),
            *("modeling_outputs", "modeling_utils", "utils.generic", "utils.output_capturing"),
        )
    ),
}

SUBMODULES = ("torch.nn", "torch.nn.functional", "transformers.initialization")  # imported under a name of their own

# Underscored names that transformers documents for authors of models: Model structure rules, Attention Interface,
# Tensor parallelism, Tracing model intermediate outputs, Backbones.
HOOKS = {
    *("_auto_class", "_attn_implementation", "_can_compile_fullgraph", "_can_record_outputs", "_init_weights"),
    *("_input_embed_layer", "_keys_to_ignore_on_load_unexpected", "_no_split_modules", "_out_features"),
    *("_out_indices", "_supports_attention_backend", "_supports_flash_attn", "_supports_flex_attn"),
    *("_supports_sdpa", "_tp_plan"),
}

# What a name in a travelling file could reach of the libraries' own.
BASES = (PreTrainedModel, PreTrainedConfig(), BackboneMixin, BackboneConfigMixin, nn.Linear(1, 1), torch.ones(1))
PRIVATE = {name for base in BASES for name in dir(base) if name.startswith("_") and not name.endswith("__")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def import_faults(tree: ast.Module) -> Iterator[str]:
    siblings = {path.stem for path in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > 1 or node.module not in siblings:
                yield f"line {node.lineno}: only siblings travel along; write `from .sibling import name`"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            for module in names if isinstance(node, ast.Import) else [node.module or ""]:
                if module not in DOCUMENTED and module.split(".")[0] not in sys.stdlib_module_names:
                    yield f"line {node.lineno}: {module} is not among the documented modules of this test"
                elif module == "__future__":
                    yield f"line {node.lineno}: it switches the type checks of configs off"
            if isinstance(node, ast.ImportFrom) and (missing := [name for name in names if not has(node.module, name)]):
                yield f"line {node.lineno}: {node.module} has no documented {', '.join(missing)}"


def has(module: str | None, name: str) -> bool:
    """Whether `from module import name` works with the installed version, and is no private name."""
    if module not in DOCUMENTED:
        return True
    if is_private(name):
        return False
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False


def private_faults(tree: ast.Module) -> Iterator[str]:
    """Underscored names of a library that are read, set, defined, imported, or spelt out in a string."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                pass
            case ast.Constant(value=str() as name):
                pass
            case _:
                continue
        if is_private(name) and name in PRIVATE - HOOKS:
            yield f"line {node.lineno}: {name} is private"


def library_faults(tree: ast.Module) -> Iterator[str]:
    """Of every `torch.x.y`, `nn.X`, `F.y`, `init.z`: what is private, an operator's inside, or not there."""
    modules: dict[str, str] = {}  # local name -> module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).split(".")[0]: alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name: path for name, path in full.items() if path in SUBMODULES}
    for node in ast.walk(tree):
        names = chain(node) if isinstance(node, ast.Attribute) else []
        if not names or modules.get(names[0], "").split(".")[0] not in ("torch", "transformers"):
            continue
        thing, spelt = importlib.import_module(modules[names[0]]), ".".join(names)
        for name in names[1:]:
            if is_private(name) or spelt.startswith("torch.ops."):
                yield f"line {node.lineno}: {spelt} is not documented"
                break
            if not hasattr(thing, name):
                yield f"line {node.lineno}: {spelt} is not there"
                break
            thing = getattr(thing, name)


def chain(node: ast.Attribute) -> list[str]:
    """["torch", "cpu", "f"] of torch.cpu.f; empty where it does not begin with a name."""
    names = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return [value.id, *reversed(names)] if isinstance(value, ast.Name) else []


def faults(text: str) -> list[str]:
    tree = ast.parse(text)
    return [*import_faults(tree), *private_faults(tree), *library_faults(tree)]


def test_they_lie_flat():
    assert len(FILES) >= 5
    assert [path for path in MODELS.iterdir() if path.is_dir() and path.name != "__pycache__"] == []
    assert all("_hf_" in path.stem for path in FILES), "their names must not clash with other code's"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_use_what_the_libraries_document(path: Path):
    """transformers finds imports by regular expressions: a line of a docstring that looks like one breaks saving."""
    text = path.read_text()
    assert faults(text) == []
    imports = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    for number, line in enumerate(text.splitlines(), start=1):
        assert number in imports or not line.strip().startswith(("from .", "import .")), f"line {number}"


SEEN = """from transformers.models.vit.modeling_vit import ViTModel
import numpy
import hf_vit
from ..families import FAMILIES
from . import modeling_hf_vit
from .elsewhere import name
from __future__ import annotations
from torch import nn, not_there
from torch import _C
import torch; torch._C._get_tracing_state()
import torch; torch.cpu._is_avx512_bf16_supported()
import torch; torch.ops.mkldnn._linear_pointwise
import torch; torch.gone_next_year()
from torch import nn; nn.Gone
model._version
getattr(model, '_parameters')
def _apply(self): ..."""


def test_what_is_not_documented_is_seen_and_the_rest_passes():
    for text in SEEN.splitlines():
        assert faults(text), text
    assert faults("import torch\nfrom torch.nn import functional as F\nF.linear(torch.ones(2), self._own)") == []
    assert faults("class Model:\n    _no_split_modules = ['Layer']\n    def _init_weights(self, module): ...") == []
