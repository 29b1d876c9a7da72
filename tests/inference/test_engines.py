"""A model that an engine computes answers as the plain one does, and what its graph does not give comes from torch."""

import copy
import functools
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import openvino
import pytest
import torch
from inference.conftest import PLAIN, assert_same, build, calls_of, optimize
from models.families import FAMILIES, OTHERS, Family, assert_near
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit
from hf_vit.conversion.targets.graphs import runtimes
from hf_vit.conversion.targets.graphs.tracing import export_onnx_of_batches
from hf_vit.inference import engines
from hf_vit.inference.engines import separate_projections
from hf_vit.inference.layers import ChannelwiseGroupNorm, FusedAttention
from hf_vit.inference.plan import make_plan


class _Products(TorchDispatchMode):
    """The products that torch computes while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("mm", "linear", "matmul", "conv")):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


TOLERANCE = {"hybrid": 6e-5, "bit": 6e-5}


@torch.no_grad()
@pytest.mark.parametrize(  # exporting and compiling take seconds
    "row",
    [
        pytest.param(family, id=name, marks=[] if name in ("plain", "hybrid", "axial") else pytest.mark.slow)
        for name, family in (FAMILIES | OTHERS).items()
    ],
)
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_every_family(row: Family, engine: str, monkeypatch):
    """A classifier: its own size, another batch, another size, one that is not finite.

    Without a product of torch, whose threads would wait for more of them on the cores of the engine's next pass.
    """
    model = build(family=row)
    fast = optimize(model, engine)
    assert fast.engine == engine
    seen, bound = calls_of(fast, monkeypatch), TOLERANCE.get(row.name, 1e-5)
    images = row.images(model.config, batch=3)
    with _Products() as products:
        given = fast(images)
    assert products.seen == []
    assert_same(given, model(images), bound)
    assert_same(fast(images[:1]), model(images[:1]), bound)
    other = row.images(model.config, grid=(3, 5))
    assert_same(fast(other), model(other), bound)
    images[0, 0, 0, 0] = torch.nan
    assert_same(fast(images), model(images), bound)
    assert [shape[0] for shape in seen] == ([3, 1, 2] if row.one_size else [3, 1])


@torch.no_grad()
@pytest.mark.parametrize(
    ("choice", "head", "fields"),
    [
        *[("relative", "model", {}), ("map_with_class_token", "model", {}), ("rotary", "model", {})],
        # OpenVINO is wrong if the last layer computes two tokens of two heads.
        ("distillation", "classification", {"num_hidden_layers": 2, "num_attention_heads": 2}),
    ],
)
def test_every_output(choice: str, head: str, fields: dict[str, Any], monkeypatch):
    model = build(choice, head, **{"num_hidden_layers": 1} | fields)
    fast = optimize(model, "openvino")
    seen, images = calls_of(fast, monkeypatch), PLAIN.images(model.config)
    assert_same(fast(images), model(images))
    assert len(seen) == 1


def test_a_model_in_training_mode(caplog):
    """Which a new one is; nothing is exported in that mode, and no library has anything to say."""
    model = PLAIN.build("classification", num_hidden_layers=1).train()
    assert not hf_vit.optimize_for_inference(model, engine="openvino").training
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


AS_TORCH: dict[str, tuple[dict[str, Any], Any]] = {
    "hidden states": ({"output_hidden_states": True}, None),
    "labels": ({"labels": torch.tensor([0, 1])}, 2),
    "a count of labels": ({"labels": torch.tensor([0, 1]), "num_items_in_batch": 5}, 2),
    "a tuple": ({"return_dict": False}, 2),
    "padding": ({"patch_attention_mask": torch.ones(2, 4, 4)}, None),
}


@torch.no_grad()
@pytest.mark.parametrize(("asked", "batch"), AS_TORCH.values(), ids=AS_TORCH)
def test_what_else_can_be_asked_for(pair: tuple[Any, Any], asked: dict[str, Any], batch: int | None, monkeypatch):
    """The engine's outputs or torch's: the same function."""
    model, fast = pair
    seen, images = calls_of(fast, monkeypatch), PLAIN.images(model.config)
    assert_same(fast(images, **asked), model(images, **asked))
    assert len(seen) == (1 if batch else 0)


@torch.no_grad()
def test_hooks_hear_what_they_heard(pair: tuple[Any, Any], monkeypatch):
    """In the encoder torch's numbers, around the head the engine's."""
    seen, images, heard = calls_of(pair[1], monkeypatch), PLAIN.images(pair[0].config), list[Any]()
    for path, runs in {"vit.layernorm": 0, "vit.layers.0": 0, "vit": 0, "classifier": 1}.items():
        seen.clear()
        for each in pair:
            hook = each.get_submodule(path).register_forward_hook(lambda _, *given: heard.append(given))
            each(images)
            hook.remove()
        assert_same(heard[-1][1], heard[-2][1])
        assert len(seen) == runs
    assert_near(heard[-1][0][0], heard[-2][0][0])
    pair[1](images)
    assert len(seen) == 2


@torch.no_grad()
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_channelwise_group_norm(offset: float):
    """As far from float64's as torch's own, or nearer; of a mean a thousand deviations away, too; zeros stay finite."""
    norm = ChannelwiseGroupNorm(4, 12)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    images = torch.randn(2, 12, 5, 7) + offset
    given, torchs = norm(images), torch.nn.GroupNorm.forward(norm, images)
    wanted = torch.nn.GroupNorm.forward(norm.double(), images.double())
    assert float((given - wanted).abs().max()) <= 2 * float((torchs - wanted).abs().max()) + 1e-6
    flat = norm.float()(torch.zeros(1, 12, 2, 2))
    assert torch.equal(flat, norm.bias[None, :, None, None].expand_as(flat))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What OpenVINO compiles from now on."""
    graphs, compile_graph = list[Any](), runtimes._compile_openvino
    monkeypatch.setattr(
        runtimes, "_compile_openvino", lambda *given: graphs.append(compile_graph(*given)) or graphs[-1]
    )
    return graphs


@torch.no_grad()
def test_a_group_norm_is_computed_in_the_layout_of_the_convolutions(compiled: list[Any]):
    """Of what the engine normalises at once, which takes another one, there are the layer norms alone."""
    fast = optimize(build(family=FAMILIES["hybrid"]), "openvino")
    fast(FAMILIES["hybrid"].images(fast.config))
    operations = compiled[0].get_runtime_model().get_ops()
    kinds = [operation.get_rt_info()["layerType"] for operation in operations]
    assert kinds.count("MVN") == 2 * fast.config.num_hidden_layers + 1


@torch.no_grad()
def test_heads(pair: tuple[Any, Any], monkeypatch):
    """Given what is not finite, and exchanged, they answer as before."""
    model, fast = copy.deepcopy(pair[0]), optimize(pair[0], "openvino")
    images, features = PLAIN.images(model.config), torch.randn(2, model.config.hidden_size)
    features[0, 0] = torch.nan
    torch.testing.assert_close(fast.classifier(features), model.classifier(features), equal_nan=True)
    torch.testing.assert_close(fast.classifier(features[1]), model.classifier(features[1]))
    model.classifier = fast.classifier = torch.nn.Linear(model.config.hidden_size, 7)
    seen = calls_of(fast, monkeypatch)
    assert_near(fast(images).logits, model(images).logits)
    assert len(seen) == 1


CHANGES: dict[str, Any] = {
    "a head's weight": lambda model: model.classifier.weight.mul_(2),
    "a layer": lambda model: model.vit.layers.__setitem__(0, torch.nn.Identity()),
    "fewer layers": lambda model: model.vit.layers.__delitem__(1),
    "a norm": lambda model: setattr(model.vit, "layernorm", torch.nn.Identity()),
    "no pooler": lambda model: setattr(model.vit, "pooler", None),
    "another forward": lambda model: setattr(model.vit.layernorm, "forward", None),
    "a place": lambda model: model.vit.layernorm.to(torch.bfloat16),
    "another weight": lambda model: setattr(model.vit.layernorm, "weight", torch.nn.Parameter(torch.ones(32))),
    "no bias": lambda model: setattr(model.classifier, "bias", None),
    "a parameter": lambda model: model.classifier.register_parameter("bias", model.classifier.bias),
    "a buffer": lambda model: model.vit.register_buffer("more", torch.zeros(1)),
    "another layer": lambda model: model.vit.layers.insert(0, torch.nn.Identity()),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_that_the_graph_would_not_follow_are_refused(pair: tuple[Any, Any], change: Any):
    _, fast = pair
    images = PLAIN.images(fast.config)
    before = fast(images).logits
    with pytest.raises(hf_vit.UserError, match="a model optimized for inference cannot be") as refused:
        change(fast)
    assert "\n" not in str(refused.value)
    assert torch.equal(fast(images).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", pytest.param("hybrid", marks=pytest.mark.slow)])  # 20 s of compiling
def test_bfloat16(name: str):
    """As near to the float32 model as torch's own bfloat16 is, or nearer."""
    family = FAMILIES[name]
    model, images = build(family=family), family.images(family.config())
    wanted = model(images).logits
    half = copy.deepcopy(model).to(torch.bfloat16)
    plain_error = float((half(images.bfloat16()).logits - wanted).abs().max())
    given = optimize(half, "openvino")(images.bfloat16()).logits
    assert given.dtype == torch.bfloat16
    assert float((given - wanted).abs().max()) <= 1.5 * plain_error


def test_from_many_threads(pair: tuple[Any, Any]):
    model, fast = pair
    images = [torch.rand(1, *PLAIN.images(model.config).shape[1:]) for _ in range(32)]
    with torch.no_grad():
        wanted = [model(each).logits for each in images]
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(lambda each: fast(each).logits, images))
    for one, other in zip(given, wanted, strict=True):
        assert_near(one, other)


def test_a_pipeline(pair: tuple[Any, Any]):
    from PIL import Image
    from transformers import ViTImageProcessor, pipeline

    side = pair[0].config.image_size
    processor = ViTImageProcessor(size={"height": side, "width": side})
    image = Image.effect_noise((side, side), 90).convert("RGB")
    answers = [pipeline("image-classification", model=each, image_processor=processor)(image) for each in pair]
    assert [each["label"] for each in answers[0]] == [each["label"] for each in answers[1]]
    assert [each["score"] for each in answers[1]] == pytest.approx([each["score"] for each in answers[0]], abs=1e-5)


NOT_TAKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "backbone": (lambda: PLAIN.build("backbone"), {}, "only runs bare models and classifiers"),
    "compiled": (lambda: build(), {"compile": True}, "cannot be combined with compile=True"),
    "merged": (lambda: build(), {"merge_tokens": 2}, "cannot be combined with merge_tokens=2"),
    "int8": (lambda: build(), {"quantize": "int8"}, "cannot be combined with quantize='int8'"),
    "float64": (lambda: build().double(), {}, "needs a model in float32 or bfloat16, but it is in"),
    "bfloat16": (
        lambda: build().to(torch.bfloat16),
        {"engine": "onnxruntime"},
        "engine='onnxruntime' needs a model in float32, but it is in",
    ),
}


@pytest.mark.parametrize(("make", "options", "message"), NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_what_an_engine_does_not_take(make: Any, options: dict[str, Any], message: str):
    """Asked for it is refused in one line and nothing has changed; "auto" is torch then."""
    model = make()
    with pytest.raises(hf_vit.UserError, match=message) as refused:
        hf_vit.optimize_for_inference(model, **{"engine": "openvino", **options})
    assert "\n" not in str(refused.value)
    if not {"compile", "engine"} & options.keys():
        assert hf_vit.optimize_for_inference(model, engine="auto", **options).engine == "torch"


def test_an_engine_that_is_not_installed(monkeypatch):
    """By its name it is refused with the remedy; "auto" takes what there is."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    model = build()
    with pytest.raises(hf_vit.UserError, match=r'needs openvino; install with pip install "hf-vit\[openvino,export\]"'):
        hf_vit.optimize_for_inference(model, engine="openvino")
    assert hf_vit.optimize_for_inference(model).engine == "torch"


@pytest.mark.parametrize("with_avx2_alone", [True, False])
@pytest.mark.parametrize("name", ["plain", "hybrid", "axial", "axial_resnet"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_is_openvino_where_it_is_installed_and_faster(
    name: str, dtype: torch.dtype, with_avx2_alone: bool, processor: Callable[..., None]
):
    """Torch is faster with axial models in float32, where it has more than AVX2."""
    processor("AVX2" if with_avx2_alone else "AVX512")
    engine = engines.choose_engine(
        "auto", build(family=(FAMILIES | OTHERS)[name]).to(dtype), (dtype, torch.device("cpu")), {}
    )
    is_torchs = "axial" in name and dtype == torch.float32 and not with_avx2_alone
    assert engine is (None if is_torchs else engines.ENGINES["openvino"])


@pytest.mark.parametrize(
    "choice", ["default", "relative", "relative_bias", "causal", "no_qkv_bias", "one_group", "rotary_registers"]
)
@torch.no_grad()
def test_products_of_their_own_give_the_same(choice: str):
    """q, k and v apart, with the scaling in the weights of q: to 1e-10 in float64, with a bias of positions too."""
    family = PLAIN
    model = family.build("model", choice, dtype=torch.float64)
    images = family.images(model.config, dtype=torch.float64)
    make_plan(model, torch.float64).carry_out()
    wanted = model(images).last_hidden_state
    attentions = [part for part in model.modules() if isinstance(part, FusedAttention)]
    assert attentions
    for attention in attentions:
        separate_projections(attention)
        assert len(attention.qkv) == 3
    torch.testing.assert_close(model(images).last_hidden_state, wanted, rtol=0, atol=1e-10)


@functools.cache
@torch.no_grad()
def gelu_behind_a_product(approximate: str) -> Any:
    dense = torch.nn.Linear(8, 8)
    dense.weight.copy_(torch.eye(8))
    dense.bias.fill_(0.125)
    layers = torch.nn.Sequential(dense, torch.nn.GELU(approximate)).eval()
    return export_onnx_of_batches(layers, torch.ones(500, 8), ["outputs"])


@pytest.mark.parametrize("with_avx2_alone", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@torch.no_grad()
def test_openvino_computes_gelus_apart_with_avx2_alone(
    approximate: str, with_avx2_alone: bool, tmp_path: Path, processor: Callable[..., None], compiled: list[Any]
):
    """To the same numbers, NaN among them, and in a graph that is opened from a file, too."""
    processor("AVX2" if with_avx2_alone else "AVX512")
    values, program = torch.linspace(-12, 12, 4000).reshape(-1, 8), gelu_behind_a_product(approximate)
    engine = runtimes.OPENVINO.compile(lambda: program, None, torch.float32)
    (given,) = engine.run(values, ["outputs"]).values()
    exact = F.gelu(values.double() + 0.125, approximate=approximate)
    torch.testing.assert_close(given.double(), exact, rtol=1e-6, atol=1e-6)
    values[0, 0], values[1, 0] = torch.nan, 1e10  # not the largest of float32: kernels may double it on the way
    (given,) = engine.run(values, ["outputs"]).values()
    assert given[0].isnan().all()
    assert float(given[1, 0]) == pytest.approx(1e10, rel=1e-6)
    graph, file = runtimes.make_openvino_graph(program), tmp_path / "openvino_model.xml"
    openvino.save_model(graph, file, compress_to_fp16=False)
    opened = runtimes.OPENVINO.open(file)
    torch.testing.assert_close(opened.run(values)["outputs"], given, rtol=1e-6, atol=1e-6, equal_nan=True)
    for graph in compiled:
        layers = [part.get_rt_info()["originalLayersNames"].astype(str) for part in graph.get_runtime_model().get_ops()]
        assert ("node_linear,outputs" in layers) != with_avx2_alone


def _flip_a_weight(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-3] ^= 64
    entry.write_bytes(content)


def _take_the_place_of(entry: Path) -> None:
    """Another model's graph, whole, under this one's name."""
    optimize(build(layer_norm_eps=0.1), "openvino")
    (other,) = set(entry.parent.iterdir()) - {entry}
    other.replace(entry)


def _link(entry: Path) -> None:
    entry.symlink_to(entry.rename(entry.with_suffix(".moved")))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": _flip_a_weight,
    "the end": lambda entry: os.truncate(entry, entry.stat().st_size - 1),
    "all": lambda entry: os.truncate(entry, 0),
    "another's": _take_the_place_of,
    "a link": _link,
    "readable by others": lambda entry: entry.chmod(0o640),
    "in a folder of others": lambda entry: entry.parent.chmod(0o777),
}


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each export, with graphs kept under `tmp_path`."""
    monkeypatch.setenv(runtimes.CACHE_VARIABLE, str(tmp_path / "graphs"))
    export, calls = engines.export_onnx_of_batches, list[Any]()
    monkeypatch.setattr(engines, "export_onnx_of_batches", lambda *given: (calls.append(given), export(*given))[1])
    return calls


@torch.no_grad()
def test_a_graph_is_kept_for_the_same_model_alone(exports: list[Any], tmp_path: Path, monkeypatch):
    """In the model's dtype, which autocast does not change."""
    model = build(num_hidden_layers=1, id2label={0: "a", 1: "b", 2: "c"})  # for which no test has exported a graph
    images = PLAIN.images(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimize(model, "openvino")
    wanted = fast(images).logits
    assert_near(wanted, model(images).logits, 1e-5)
    (entry,) = (tmp_path / "graphs").iterdir()
    assert (entry.stat().st_mode & 0o777, entry.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    again = optimize(model, "openvino")
    assert len(exports) == 1
    torch.testing.assert_close(again(images).logits, wanted, rtol=0, atol=0)
    other = copy.deepcopy(model)
    other.vit.layers[0].mlp.fc1.weight[0, 0] += 1
    assert_same(optimize(other, "openvino")(images), other(images))
    other.vit.layers[0].attention.scaling = 0.3
    optimize(other, "openvino")
    assert len(exports) == len(list(entry.parent.iterdir())) == 3
    old = entry.with_name("old.graph")
    with old.open("wb") as file:
        file.truncate(runtimes.CACHE_BYTES)  # without content, so that it takes no memory
    os.utime(old, (0, 0))
    monkeypatch.setattr(metadata, "version", lambda package: "0")
    optimize(model, "openvino")
    assert len(exports) == len(list(entry.parent.iterdir())) == 4
    assert not old.exists()
    monkeypatch.setattr(metadata, "version", lambda package: "1")
    monkeypatch.setattr(runtimes, "CACHE_BYTES", 1)
    optimize(model, "openvino")
    assert (len(exports), len(list(entry.parent.iterdir()))) == (5, 4), "a graph too large for the cache empties it"
    monkeypatch.setenv(runtimes.CACHE_VARIABLE, "")
    optimize(model, "openvino")
    assert len(exports) == 6


@torch.no_grad()
def test_no_graph_of_a_users_code_is_kept(exports: list[Any], tmp_path: Path):
    """A script may change it until the next start, which would read the graph of the old code."""
    original = build(num_hidden_layers=1)
    images = PLAIN.images(original.config)

    def rewrite(factor: float) -> Any:
        class Activation(torch.nn.Module):
            def forward(self, values: torch.Tensor) -> torch.Tensor:
                return factor * values.relu()

        model = copy.deepcopy(original)
        for layer in model.vit.layers:
            layer.mlp.activation_fn = Activation()
        return model

    for factor in (1.0, 3.0):
        model = rewrite(factor)
        assert_same(optimize(model, "openvino")(images), model(images))
    assert len(exports) == 2
    assert not list((tmp_path / "graphs").glob("*"))


@torch.no_grad()
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_graph_is_made_anew(damage: str, exports: list[Any], tmp_path: Path):
    model = build()
    images = PLAIN.images(model.config)
    optimize(model, "openvino")
    (entry,) = (tmp_path / "graphs").iterdir()
    DAMAGES[damage](entry)
    exports.clear()
    assert_same(optimize(model, "openvino")(images), model(images))
    assert len(exports) == 1
    optimize(model, "openvino")
    assert len(exports) == (2 if damage == "in a folder of others" else 1)
