"""Models of dense prediction as ONNX graphs: what onnxruntime gives at several sizes is what torch gives."""

import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from dense_heads import build

import hf_vit
from hf_vit.conversion.targets.graphs.tracing import OTHERWISE, spaced
from hf_vit.loading.model import load_model
from hf_vit.loading.start import find_model
from hf_vit.training.dense_model import build_dense_model

CASES = [("plain", "linear")]
SLOW = [
    *(("plain", head) for head in ("upernet", "detr", "deformable-detr", "mask2former")),
    *(("hybrid", "linear"), ("axial", "upernet"), ("local", "linear"), ("bit", "linear"), ("axial_resnet", "linear")),
]


def saved(family: str, head: str, folder: Path) -> Path:
    model, processor = build(family, head)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "head"),
    [*CASES, *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for case in SLOW)],
)
@torch.no_grad()
def test_a_graph_answers_at_every_size(family: str, head: str, tmp_path: Path) -> None:
    folder = saved(family, head, tmp_path / "model")
    hf_vit.export(folder, tmp_path / "graph", "onnx")
    model = load_model(folder, "cpu").model
    session = onnxruntime.InferenceSession(tmp_path / "graph" / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    for batch, height, width in ((1, 64, 64), (3, 64, 160), (2, 128, 96), (1, 32, 64)):
        pixel_values = torch.randn(batch, 3, height, width)
        wanted = model(pixel_values=pixel_values)
        for name, given in zip(names, session.run(None, {"pixel_values": pixel_values.numpy()}), strict=True):
            scale = max(1.0, wanted[name].abs().max().item())
            torch.testing.assert_close(torch.from_numpy(given), wanted[name], rtol=0, atol=1e-4 * scale)
    with pytest.raises(Exception, match="Reshape"):
        session.run(None, {"pixel_values": torch.randn(1, 3, 70, 64).numpy()})
    told = json.loads(session.get_modelmeta().custom_metadata_map["labels"])
    assert told == {"0": "sky", "1": "cat"}
    with pytest.raises(hf_vit.UserError, match=r"the graph of a Hf\w+, which only onnxruntime runs"):
        load_model(tmp_path / "graph")


@pytest.mark.slow
def test_a_graph_of_one_size(tmp_path: Path) -> None:
    folder = saved("plain", "upernet", tmp_path / "model")
    result = hf_vit.export(folder, tmp_path / "graph", "onnx", static=True)
    assert result.difference <= 1e-4


def test_what_is_refused(tmp_path: Path) -> None:
    linear, mask_rcnn = (saved("plain", head, tmp_path / head) for head in ("linear", "mask-rcnn"))
    with pytest.raises(hf_vit.UserError, match=r"HfMaskRCNNForObjectDetection is torchvision's Mask R-CNN.*'detr'"):
        hf_vit.export(mask_rcnn, tmp_path / "graph", "onnx")
    for target in ("timm", "transformers", "vit_jax", "openvino"):
        with pytest.raises(hf_vit.UserError, match=r"HfLinearForSemanticSegmentation cannot be exported to .*to ONNX"):
            hf_vit.export(linear, tmp_path / "graph", target)
    with pytest.raises(hf_vit.UserError, match=r"a graph cannot do what .*: a SegformerImage"):
        hf_vit.export(linear, tmp_path / "graph", "onnx", preprocessing=True)
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    source = find_model(hf_vit.HfViTConfig(image_size=48, **tiny))
    odd, processor = build_dense_model(source, "upernet", ["sky", "cat"], width=16)
    odd.save_pretrained(tmp_path / "odd")
    processor.save_pretrained(tmp_path / "odd")
    with pytest.raises(hf_vit.UserError, match=r"multiples of 32x32 px, and the model's own images have 48x48"):
        hf_vit.export(tmp_path / "odd", tmp_path / "graph", "onnx")


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (7, 5), (12, 6)])
@pytest.mark.parametrize("size", [1, 2, 3, (6, 4)])
def test_pooling_in_other_operators(height: int, width: int, size: int | tuple[int, int]) -> None:
    """For every size what torch's own operator gives."""
    pool = torch.nn.functional.adaptive_avg_pool2d
    maps = torch.randn(2, 3, height, width, dtype=torch.float64)
    given = OTHERWISE[pool](maps, size)
    torch.testing.assert_close(given, pool(maps, size), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("start", "end", "steps"), [(0.5, 6.5, 7), (0.5, 0.5, 1), (-1.0, 1.0, 4)])
def test_steps_in_other_operators(start: float, end: float, steps: int) -> None:
    given = spaced(start, end, steps, dtype=torch.float32)
    torch.testing.assert_close(given, torch.linspace(start, end, steps), rtol=0, atol=1e-6)
