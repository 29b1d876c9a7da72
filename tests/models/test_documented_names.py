"""The files that travel with every checkpoint use nothing that the next release of a library may take away."""

import ast
import pkgutil
import sys
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

# Underscored names that transformers documents for authors of models: Model structure rules, Attention Interface,
# Tensor parallelism, Tracing model intermediate outputs, Backbones; the fields that PreTrainedModel explains to them.
HOOKS = {
    *("_auto_class", "_attn_implementation", "_can_compile_fullgraph", "_can_record_outputs", "_init_weights"),
    *("_input_embed_layer", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected"),
    *("_no_split_modules", "_out_features"),
    *("_out_indices", "_supports_attention_backend", "_supports_flash_attn", "_supports_flex_attn"),
    *("_supports_sdpa", "_tp_plan"),
}

# What a name in a travelling file could reach of the libraries' own.
BASES = (PreTrainedModel, PreTrainedConfig(), BackboneMixin, BackboneConfigMixin, nn.Linear(1, 1), torch.ones(1))
PRIVATE = {name for base in BASES for name in dir(base) if name.startswith("_") and not name.endswith("__")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_missing(name: str) -> bool:
    """Return whether the installed libraries lack a dotted name."""
    try:
        return pkgutil.resolve_name(name) is None
    except (ImportError, AttributeError):
        return True


def faults(text: str) -> list[str]:
    """Imports of undocumented modules, and names of a library that are underscored or not there."""
    known, standard = DOCUMENTED | {f".{path.stem}" for path in FILES}, sys.stdlib_module_names - {"__future__"}
    found: list[str] = []
    places = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "init": "transformers.initialization"}
    for node in ast.walk(ast.parse(text)):
        modules: list[str] = []
        names: list[str] = []
        gone: list[str] = []
        match node:
            case ast.ImportFrom():
                modules = [f"{'.' * node.level}{node.module or ''}"]
                names = [alias.name for alias in node.names if is_private(alias.name)]
                if modules[0] in DOCUMENTED:
                    gone += [alias.name for alias in node.names if is_missing(f"{modules[0]}.{alias.name}")]
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case ast.Attribute(attr=name):
                whole = ast.unparse(node)
                is_inside = is_private(name) and whole.startswith(("torch.", "nn.", "F.", "init."))
                names = [whole] if is_inside or whole == "torch.ops" or name in PRIVATE - HOOKS else []
                if (root := whole.partition(".")[0]) in places and whole.replace(".", "").isidentifier():
                    gone += [whole] if is_missing(places[root] + whole.removeprefix(root)) else []
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.Constant(value=str() as name):
                names = [name] if name in PRIVATE - HOOKS else []
        strange = [name for name in modules if name not in known and name.split(".")[0] not in standard]
        found += [f"line {node.lineno}: {name} is neither a sibling nor a documented module" for name in strange]
        found += [f"line {node.lineno}: {name} is private" for name in names]
        found += [f"line {node.lineno}: {name} is not there" for name in gone]
    return found


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
from torch import _C
from torch import nn, not_there
import torch; torch.gone_next_year()
from torch import nn; nn.Gone
import torch; torch._C._get_tracing_state()
import torch; torch.cpu._is_avx512_bf16_supported()
import torch; torch.ops.mkldnn._linear_pointwise
model._version
getattr(model, '_parameters')
def _apply(self): ..."""


def test_what_is_not_documented_is_seen_and_the_rest_passes():
    for text in SEEN.splitlines():
        assert faults(text), text
    assert faults("import torch\nfrom torch.nn import functional as F\nF.linear(torch.ones(2), self._own)") == []
    assert faults("class Model:\n    _no_split_modules = ['Layer']\n    def _init_weights(self, module): ...") == []
