"""Regression models answer with values in every command; where classes are needed they are refused in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.tiny import make_classifier, make_processor
from models.families import FAMILIES
from PIL import Image
from pyarrow import csv, parquet
from training.conftest import make_colour_folder, save_model
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification, pipeline

import hf_vit
from hf_vit import conversion
from hf_vit.data import make_processor as processor_of
from hf_vit.loading.start import build_classifier, find_model
from hf_vit.results.facts import append_record, make_record

pytestmark = pytest.mark.filterwarnings("ignore")
ARCHITECTURE = {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 16}
NAMES = ("blue", "green", "red")
MULTI_LABEL = "multi_label_classification"


class Derived(hf_vit.HfViTForImageClassification):
    """A user's own class."""


def build(kind: str, outputs: int, problem_type: str | None) -> tuple[Any, Any]:
    """A classification head with its processor, whose outputs are far from probabilities."""
    names = {n: f"y{n}" for n in range(outputs)}
    fields: dict[str, Any] = {"id2label": names, "num_labels": outputs, "problem_type": problem_type}
    if kind == "vit":
        model, processor = make_classifier([f"y{n}" for n in range(outputs)], **fields), make_processor()
    elif kind == "timm":
        pretrained = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
        config = TimmWrapperConfig(
            architecture="vit_tiny_patch16_224", pretrained_cfg=pretrained, model_args=ARCHITECTURE, **fields
        )
        model, processor = TimmWrapperForImageClassification(config), processor_of(FAMILIES["plain"].config())
        processor.size = {"height": 32, "width": 32}
    else:
        model = FAMILIES.get(kind, FAMILIES["plain"]).build("classification", **fields)
        processor = processor_of(model.config)
        if kind == "derived":
            plain, model = model, Derived(model.config)
            model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("classifier.bias", "head.bias")):
                parameter += torch.linspace(12.5, -3, outputs)
    return model.eval(), processor


def values_of(model: Any, processor: Any, image: Path) -> list[float]:
    """By a plain pass."""
    with torch.no_grad():
        return model(**processor(images=Image.open(image), return_tensors="pt")).logits[0].tolist()


def copy_of(saved: Path, folder: Path, **fields: Any) -> Any:
    model = hf_vit.HfViTForImageClassification.from_pretrained(saved, **fields).eval()
    save_model(model, folder)
    return model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colour_folder(tmp_path_factory.mktemp("images") / "colours", count=10)


@pytest.fixture(scope="module")
def image(data: Path) -> Path:
    return min(data.rglob("*.png"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regression of ours, with outputs by the names of the data's classes, and an accuracy that 0.2 measured."""
    names = {"id2label": dict(enumerate(NAMES)), "problem_type": "regression"}
    model = FAMILIES["plain"].build("classification", **names)
    folder = save_model(model, tmp_path_factory.mktemp("saved") / "heights")
    append_record(folder, make_record("evaluation", values={"top1": 0.4375, "loss": 1.0}, command="hf-vit evaluate"))
    return folder


CASES = [
    *((kind, outputs, of) for kind in ("plain", "vit", "timm") for outputs in (1, 7) for of in ("regression", None)),
    *((kind, 7, "regression") for kind in ("hybrid", "axial", "local", "derived")),
    ("plain", 1, MULTI_LABEL),
]


@pytest.mark.parametrize(("kind", "outputs", "problem_type"), CASES)
def test_values(kind: str, outputs: int, problem_type: str | None, image: Path):
    """One output without a problem type is a value, several are classes, and one of several labels a probability."""
    model, processor = build(kind, outputs, problem_type)
    (found,) = hf_vit.predict((model, processor), image)
    values = values_of(model, processor, image)
    if problem_type == MULTI_LABEL:
        assert found.scores == [("y0", pytest.approx(torch.tensor(values[0]).sigmoid().item()))]
    if problem_type == MULTI_LABEL or (problem_type is None and outputs > 1):
        assert sum(score for _, score in found.scores) <= 1
        assert not found.are_values
        return
    assert [name for name, _ in found.scores] == [f"y{n}" for n in range(outputs)]
    assert [score for _, score in found.scores] == pytest.approx(values, abs=1e-5)
    assert max(map(abs, values)) > 1, "a model whose values could be probabilities would prove little"
    if kind == "vit" and problem_type == "regression":
        piped = pipeline("image-classification", model=model, image_processor=processor)(str(image), top_k=outputs)
        assert {each["label"]: each["score"] for each in piped} == pytest.approx(dict(found.scores), abs=1e-4)


@pytest.mark.parametrize("form", ["table", "json", "csv", "parquet"])
def test_the_command(form: str, tmp_path: Path, image: Path, saved: Path, command: Any):
    place = tmp_path / f"rows.{form}"
    options = {"table": (), "json": ("--json",)}.get(form, ("--output", place))
    code, out, err = command("predict", saved, image, "--top", 1, *options)
    assert (code, 'regression model (problem_type "regression")' in err) == (0, True), err
    if form == "table":
        assert all(word in out for word in ("value", *NAMES))
        assert "%" not in out
        return
    if form == "json":
        found = [(each["label"], each["score"]) for each in json.loads(out)[0]["predictions"]]
    else:
        (row,) = (csv.read_csv if form == "csv" else parquet.read_table)(place).to_pylist()
        found = [(row[f"label{end}"], row[f"score{end}"]) for end in ("", "_2", "_3")]
    model = hf_vit.HfViTForImageClassification.from_pretrained(saved).eval()
    values = values_of(model, processor_of(model.config), image)
    assert found == [(name, pytest.approx(value, abs=1e-5)) for name, value in zip(NAMES, values, strict=True)]


@pytest.mark.parametrize(
    ("target", "problem_type"),
    [
        ("onnx", "regression"),
        *((target, kind) for target in ("transformers", "timm") for kind in ("regression", MULTI_LABEL)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("onnx", MULTI_LABEL), ("openvino", MULTI_LABEL), ("openvino", "regression"))
        ),
    ],  # slow: torch's exporter takes 5 s a model
)
def test_what_was_exported_answers_alike(target: str, problem_type: str, tmp_path: Path, image: Path, saved: Path):
    model = copy_of(saved, tmp_path / "model", problem_type=problem_type)
    conversion.export(tmp_path / "model", tmp_path / "out", target)
    values = torch.tensor(values_of(model, processor_of(model.config), image))
    values = values if problem_type == "regression" else values.sigmoid()
    (found,) = hf_vit.predict(tmp_path / "out", image)
    assert dict(found.scores) == pytest.approx(dict(zip(NAMES, values.tolist(), strict=True)), abs=1e-4)
    if target in ("timm", "transformers"):  # and back again
        assert hf_vit.from_hub(tmp_path / "out").config.problem_type == problem_type


PROTOCOLS = ("top1", "calibration", "robustness", "corruptions", "patch-drop", "multi-label", "real", "objectnet")
LEARN = ("finetune", "--model", "Ti/16", "--data", "DATA", "--output", "OUT")
REFUSED = {
    **{protocol: ("evaluate", "MODEL", "--data", "DATA", "--protocol", protocol) for protocol in PROTOCOLS},
    "compare": ("compare", "MODEL", "OTHER", "--data", "DATA", "--output", "OUT"),
    "diff": ("diff", "MODEL", "OTHER", "--data", "DATA"),
    "embed": ("embed", "MODEL", "--data", "DATA", "--output", "OUT", "--predictions"),
    "page": ("page", "MODEL", "--output", "OUT"),
    "quantize": ("export", "MODEL", "--to", "onnx", "--quantize", "dynamic", "--calibrate", "DATA", "--output", "OUT"),
    "vit_jax": ("export", "MODEL", "--to", "vit_jax", "--output", "OUT"),
    "transformers.js": ("export", "MODEL", "--to", "transformers.js", "--output", "OUT"),
    "soup": ("soup", "MODEL", "OTHER", "--data", "DATA", "--output", "OUT"),
    "teacher": (*LEARN, "--teacher", "MODEL"),
    "self-training": (*LEARN, "--teacher", "MODEL", "--unlabeled", "DATA"),
}


@pytest.mark.parametrize(
    ("case", "problem_type"),
    [*((case, "regression") for case in REFUSED), ("teacher", MULTI_LABEL), ("transformers.js", MULTI_LABEL)],
)
def test_refused_where_classes_are_needed(
    case: str, problem_type: str, saved: Path, data: Path, tmp_path: Path, command: Any
):
    """And where one class an image is, models of several labels."""
    places = {name: tmp_path / name for name in ("MODEL", "OTHER", "OUT")} | {"DATA": data}
    for name in {"MODEL", "OTHER"} & set(REFUSED[case]):
        copy_of(saved, places[name], problem_type=problem_type)
    code, _, err = command(*(places.get(word, word) for word in REFUSED[case]))
    assert code != 0
    assert re.search("multi.label" if problem_type == MULTI_LABEL else "regression", err.strip().splitlines()[-1])
    assert not (tmp_path / "OUT" / "config.json").exists()


def test_the_card_and_a_classifier_that_starts_from_it(saved: Path, succeeds: Any):
    succeeds("card", saved)
    card = (saved / "README.md").read_text(encoding="utf-8")
    for word in ("3 values per image (regression)", "- image-regression"):
        assert word in card
    for word in ("accuracy", "43.75", "pipeline_tag", "argmax", "classifies images", "model-index"):
        assert word not in card, word
    model = build_classifier(find_model(str(saved)), NAMES)
    assert model.config.problem_type is None
    assert not model.classifier.weight.any(), "a new head"
