"""List the targets by name."""

from hf_vit.conversion.targets.graph_targets import ExecuTorchProgram, OnnxGraph, OpenVinoGraph, TransformersJsFolder
from hf_vit.conversion.targets.target import Target
from hf_vit.conversion.targets.timm_folder import TimmFolder
from hf_vit.conversion.targets.transformers_folder import TransformersFolder
from hf_vit.conversion.targets.vit_jax_file import VitJaxFile
from hf_vit.errors import UserError

_TARGET_CLASSES = (
    TransformersFolder,
    TimmFolder,
    VitJaxFile,
    OnnxGraph,
    OpenVinoGraph,
    ExecuTorchProgram,
    TransformersJsFolder,
)
TARGETS: dict[str, Target] = {kind.name: kind() for kind in _TARGET_CLASSES}


def find_target(name: str) -> Target:
    """Return the target of this name; raise a UserError if there is none."""
    if name not in TARGETS:
        raise UserError(f"--to {name} is not a known format; choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
