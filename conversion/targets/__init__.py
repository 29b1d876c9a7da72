"""The libraries that models can go to, one module each."""

from hf_vit.conversion.exporting import Target
from hf_vit.conversion.targets import onnx_graph, timm_folder, transformers_folder, vit_jax_file

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (transformers_folder.TARGET, timm_folder.TARGET, vit_jax_file.TARGET, onnx_graph.TARGET)
}
