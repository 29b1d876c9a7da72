"""A folder for transformers.js: config.json and `onnx/model.onnx`, with the image processor in the graph.

transformers.js resizes otherwise than Python does: in node without smoothing, in browsers as the browser likes. So its
processor hands levels 0..255 on as they are, and the graph does the rest, to the same bits as in Python.
"""

import json
from dataclasses import replace
from typing import Any, final

from transformers import ViTImageProcessor

from hf_vit.conversion.targets.graphs.preprocessing import LEVELS
from hf_vit.conversion.targets.onnx_graph import OnnxGraph
from hf_vit.conversion.targets.target import OutgoingModel, Target

_GRAPHS = OnnxGraph()


@final
class TransformersJsFolder(Target):
    """Any family's classifier; to transformers.js a ViT is what takes images and gives logits."""

    name = "transformers.js"
    title = "transformers.js"
    libraries = OnnxGraph.libraries
    takes = LEVELS
    problem_types = ("single_label_classification",)  # its pipeline applies a softmax to all

    def write(self, outgoing: OutgoingModel) -> None:
        inside = _inside(outgoing)
        inside.folder.mkdir()
        _GRAPHS.write(inside)
        config: dict[str, Any] = {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "image_size": list(outgoing.nominal_size),
            "id2label": outgoing.config.id2label,
            "label2id": {label: index for index, label in outgoing.config.id2label.items()},
        }
        written = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (outgoing.folder / "config.json").write_text(written, encoding="utf-8")
        does_nothing: dict[str, Any] = {
            f"do_{step}": False for step in ("resize", "rescale", "normalize", "center_crop")
        }
        ViTImageProcessor(**does_nothing, do_convert_rgb=True).save_pretrained(outgoing.folder)

    def compare(self, outgoing: OutgoingModel) -> tuple[float, str]:
        return _GRAPHS.compare(_inside(outgoing))


def _inside(outgoing: OutgoingModel) -> OutgoingModel:
    """The same for the folder of the graph, which transformers.js calls so."""
    return replace(outgoing, folder=outgoing.folder / "onnx")
