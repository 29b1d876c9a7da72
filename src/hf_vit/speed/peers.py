"""Build hf_vit and its peers with random weights and identical shapes, and measure them.

Each contestant is a module from images to logits. A table consists of cells; within a cell all contestants take turns
in one process, and only their paired ratios count. Legend: B batch, C channels, H x W px, N tokens, D hidden size, K
labels.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any, Literal, cast, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DINOv3ViTConfig, DINOv3ViTModel, ViTConfig, ViTForImageClassification

from hf_vit.conversion.targets.graphs.runtimes import (
    ONNXRUNTIME,
    OPENVINO,
    Graph,
    Runtime,
    make_openvino_engine,
    make_openvino_graph,
)
from hf_vit.conversion.targets.graphs.tracing import export_onnx_of_batches, needs_whole_patches
from hf_vit.errors import UserError
from hf_vit.families import find_family
from hf_vit.inference.engines import ENGINES
from hf_vit.inference.layers import Dense
from hf_vit.inference.optimize import compile_frozen, optimize_for_inference
from hf_vit.inference.packing import pack
from hf_vit.inference.plan import make_plan
from hf_vit.models.configuration_hf_vit import HfBaseConfig, HfViTBaseConfig, HfViTConfig
from hf_vit.speed import measuring
from hf_vit.variants import variant_config
from hf_vit.writing import make_scratch_folder

NUM_LABELS = 1000
# Names of hybrids in timm; its R50+B/16 has a stride of 16 px too.
_TIMM_HYBRIDS = {"R26+S/32": "vit_small_r26_s32_224", "R50+B/16": "vit_base_r50_s16_384"}
_TIMM_DINOV3 = {"DINOv3-S/16": "small", "DINOv3-S+/16": "small_plus", "DINOv3-B/16": "base", "DINOv3-L/16": "large"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a variant at an image size (side in px), which all contestants of a comparison share."""

    variant: str
    image_size: int = 224

    def config(self, **fields: Any) -> HfViTBaseConfig:
        """Return the configuration; raise a UserError if the variant is not a Vision Transformer."""
        config = self.make_any_config(**fields)
        if not isinstance(config, HfViTBaseConfig):
            raise UserError(
                f"{self.variant} is not a Vision Transformer, which this library needs; use a variant such as S/16"
            )
        return config

    def make_any_config(self, **fields: Any) -> HfBaseConfig:
        """Return the configuration of a variant of any family."""
        return variant_config(self.variant, image_size=self.image_size, num_labels=NUM_LABELS, **fields)

    def images(self, batch: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return images of noise [B, 3, H, W]."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, 3, self.image_size, self.image_size, generator=generator).to(device, dtype)


@final
class Logits(nn.Module):
    """A transformers classifier as a function from images to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images).logits


@final
class WithHead(nn.Module):
    """An encoder of transformers with a linear classifier, which transformers lacks for it."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(width, NUM_LABELS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(pixel_values=images).pooler_output)


@final
class TorchViT(nn.Module):
    """A ViT built on torch.nn.TransformerEncoder, which has a fast path for inference."""

    def __init__(self, config: HfViTBaseConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + config.grid[0] * config.grid[1], width))
        layer = nn.TransformerEncoderLayer(
            width, config.num_attention_heads, config.intermediate_size, 0.0, "gelu", 1e-6, True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.num_hidden_layers, nn.LayerNorm(width, eps=1e-6), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, NUM_LABELS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.encoder(tokens)[:, 0])


@final
class MatrixProducts(nn.Module):
    """Only the matrix products of a plain ViT without its head: a lower bound for its time with the same library.

    Every layer has its own weights, so that they are read from memory as in a real model.
    """

    def __init__(self, config: HfViTBaseConfig, packed: bool) -> None:
        super().__init__()
        width, mlp_width = config.hidden_size, config.intermediate_size
        self.heads = config.num_attention_heads
        self.patch = config.patch_size

        def build_dense(inputs: int, outputs: int) -> nn.Module:
            linear = nn.Linear(inputs, outputs)
            return Dense(linear.weight, linear.bias) if packed else linear

        self.patches = build_dense(3 * self.patch**2, width)
        self.layers = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            products = {"qkv": build_dense(width, 3 * width), "output": build_dense(width, width)}
            products |= {"fc1": build_dense(width, mlp_width), "fc2": build_dense(mlp_width, width)}
            self.layers.append(nn.ModuleDict(products))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Run all products on images [B, 3, H, W]; return tokens [B, N, D]."""
        tokens = self.patches(images.reshape(len(images), -1, 3 * self.patch**2))
        tokens = F.pad(tokens, (0, 0, 1, 0))
        for layer in cast(Any, self.layers):
            query, key, value = layer["qkv"](tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            values = torch.matmul(torch.matmul(query, key.transpose(2, 3)), value)
            tokens = layer["fc2"](layer["fc1"](layer["output"](values.transpose(1, 2).flatten(2))))
        return tokens


def _build_hf_vit(shape: Shape, attention: str = "sdpa", **fields: Any) -> nn.Module:
    """Build hf_vit's classifier; fields that the family's configuration lacks are dropped."""
    family: Any = find_family(shape.make_any_config().model_type)
    config = shape.make_any_config(
        **{name: value for name, value in fields.items() if hasattr(family.config_class, name)}
    )
    options = {"attn_implementation": attention} if family.is_vit else {}
    return Logits(family.classes["classification"]._from_config(config, **options))


def _build_transformers(shape: Shape, attention: str) -> nn.Module:
    """Build transformers' ViT or DINOv3."""
    hf_vit_config = shape.config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size", "image_size")
    sizes = {name: getattr(hf_vit_config, name) for name in names}
    if shape.variant in _TIMM_DINOV3:
        options: dict[str, Any] = {"num_register_tokens": 4, "use_gated_mlp": hf_vit_config.mlp_type == "swiglu"}
        encoder = DINOv3ViTModel._from_config(DINOv3ViTConfig(**sizes, **options), attn_implementation=attention)
        return WithHead(encoder, hf_vit_config.hidden_size)
    config = ViTConfig(**sizes, num_labels=NUM_LABELS)  # pyright: ignore[reportCallIssue]
    return Logits(ViTForImageClassification._from_config(config, attn_implementation=attention))


def _build_timm(shape: Shape) -> nn.Module:
    """Build timm's model of the same architecture."""
    import timm

    variant = shape.variant
    options = dict[str, Any](num_classes=NUM_LABELS)
    if variant in _TIMM_HYBRIDS:
        return timm.create_model(_TIMM_HYBRIDS[variant], img_size=shape.image_size)
    if variant.startswith("BiT-"):  # BiT-R50x1
        return timm.create_model(f"resnetv2_{variant.removeprefix('BiT-R')}_bit", **options)
    options["img_size"] = shape.image_size
    if variant in _TIMM_DINOV3:
        return timm.create_model(f"vit_{_TIMM_DINOV3[variant]}_patch16_dinov3", **options)
    if variant.startswith("Mixer-"):  # Mixer-B/16
        return timm.create_model(f"{variant.replace('Mixer-', 'mixer_').replace('/', '').lower()}_224", **options)
    config = shape.config()
    options |= {"patch_size": config.patch_size, "embed_dim": config.hidden_size, "depth": config.num_hidden_layers}
    options |= {"num_heads": config.num_attention_heads, "mlp_ratio": config.intermediate_size / config.hidden_size}
    return timm.models.VisionTransformer(**options)  # pyright: ignore - timm has no names for some sizes


def _build_vit_pytorch(shape: Shape) -> nn.Module:
    """Build vit-pytorch's ViT of the same sizes."""
    from vit_pytorch import ViT

    config = shape.config()
    return ViT(
        image_size=shape.image_size,
        patch_size=config.patch_size,
        num_classes=NUM_LABELS,
        dim=config.hidden_size,
        depth=config.num_hidden_layers,
        heads=config.num_attention_heads,
        dim_head=config.hidden_size // config.num_attention_heads,
        mlp_dim=config.intermediate_size,
    )


# The fields of a model without its rotation.
_UNROTATED: dict[str, Any] = {
    config_field.name: config_field.default
    for config_field in fields(HfViTConfig)
    if config_field.name.startswith("rotary_")
}
# hf_vit's contestants. All but those named "tanh", which have the original code's GELU, have the peers' exact GELU.
OURS: dict[str, Callable[[Shape], nn.Module]] = {
    "hf_vit": functools.partial(_build_hf_vit, hidden_act="gelu"),
    "hf_vit eager": functools.partial(_build_hf_vit, attention="eager", hidden_act="gelu"),
    "hf_vit flash": functools.partial(_build_hf_vit, attention="flash_attention_2", hidden_act="gelu"),
    **dict.fromkeys(("hf_vit tanh", "hf_vit optimized tanh"), _build_hf_vit),
    **dict.fromkeys(
        ("hf_vit optimized", "hf_vit optimized, compiled", "hf_vit optimized, int8"),
        functools.partial(_build_hf_vit, hidden_act="gelu"),
    ),
    **dict.fromkeys(
        ("hf_vit unrotated", "hf_vit optimized unrotated"),
        functools.partial(_build_hf_vit, hidden_act="gelu", **_UNROTATED),
    ),
}
PEERS: dict[str, Callable[[Shape], nn.Module]] = {
    "transformers eager": functools.partial(_build_transformers, attention="eager"),
    "transformers": functools.partial(_build_transformers, attention="sdpa"),
    "timm": _build_timm,
    "vit-pytorch": _build_vit_pytorch,
    "torch encoder": lambda shape: TorchViT(shape.config()),
}
PRODUCTS = "products alone"
# Suffixes of contestants' names: compiled by torch, compiled with frozen weights, packed for oneDNN.
COMPILED, FROZEN, PACKED = ", compiled", ", compiled and frozen", ", packed by oneDNN"
# Further suffixes, each with its engine and whether it computes in int8.
FORMS: dict[str, tuple[Runtime, bool]] = {
    f"{name}{form}": (engine, bool(form)) for name, engine in ENGINES.items() for form in ("", " int8")
}
_PACKAGES = {"timm": "timm", "vit-pytorch": "vit_pytorch", "hf_vit flash": "flash_attn"}


def find_obstacle(
    name: str, shape: Shape, training: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> str | None:
    """Return why a contestant cannot take part; None if it can."""
    base_name, separator, form = name.partition(", ")
    if training and ("optimized" in base_name or separator + form not in ("", COMPILED)):
        return f"{name} is for inference only"
    if form in FORMS:
        engine, in_int8 = FORMS[form]
        missing = engine.list_missing()
        if missing:
            return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        if torch.device(device).type != "cpu":
            return f"{engine.package} is only measured on CPUs"
        if (in_int8 and dtype != torch.float32) or dtype not in engine.dtypes:
            return f"{form} does not support {str(dtype).removeprefix('torch.')}"
    package = _PACKAGES.get(base_name)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed"
    return _find_missing_part(base_name, shape.variant, shape.make_any_config())


def _find_missing_part(base_name: str, variant: str, config: HfBaseConfig) -> str | None:
    """Return what the variant lacks for a contestant without its form, or that its library lacks the variant."""
    is_rotary = isinstance(config, HfViTBaseConfig) and config.rotary_embedding is not None
    if base_name in ("hf_vit eager", "hf_vit flash") and not isinstance(config, HfViTBaseConfig):
        return f"{variant} has no attention"
    if base_name.endswith(" tanh") and not hasattr(config, "hidden_act"):
        return f"{variant} has no GELU"
    if base_name.endswith("unrotated") and not is_rotary:
        return f"{variant} has no rotary positions"
    if base_name not in (PRODUCTS, *PEERS) or (type(config) is HfViTConfig and not is_rotary):
        return None  # all libraries have the plain ViT
    is_mixer_of_timm = variant.startswith("Mixer-") and variant != "Mixer-H/14"
    is_in_timm = variant in _TIMM_HYBRIDS or variant.startswith("BiT-") or is_mixer_of_timm
    is_dinov3 = variant in _TIMM_DINOV3 and base_name.split()[0] in ("timm", "transformers")
    return None if is_dinov3 or (base_name == "timm" and is_in_timm) else f"{base_name} has no {variant}"


def make_compiled_forms(names: Sequence[str]) -> list[str]:
    """Return the compiled contestants for these names, with frozen weights and without; optimized models are frozen."""
    compiled_names: list[str] = []
    for name in names:
        if ", " not in name and name != PRODUCTS:
            forms = (COMPILED,) if "optimized" in name else (COMPILED, FROZEN)
            compiled_names += [name + form for form in forms]
    return compiled_names


def build(name: str, shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """Build a contestant with random weights, [B, 3, H, W] -> [B, K] ("products alone": to tokens).

    Args:
        name: a key of `OURS` or `PEERS`, or `PRODUCTS`, optionally followed by `COMPILED`, `FROZEN`, `PACKED` or a key
            of `FORMS` (optimized models of hf_vit are compiled and put on engines by `optimize_for_inference`).

    Raises:
        UserError: there is no such contestant.
    """
    base_name, separator, form = name.partition(", ")
    suffix = separator + form
    is_optimized = base_name.startswith("hf_vit optimized")
    engine, in_int8 = FORMS.get(form, (None, is_optimized and form == "int8"))
    builders = OURS | PEERS | {PRODUCTS: lambda shape: MatrixProducts(shape.config(), packed=suffix == PACKED)}
    if base_name not in builders or not (engine or in_int8 or suffix in ("", COMPILED, FROZEN, PACKED)):
        raise UserError(
            f"the implementation '{name}' is unknown; choose from {', '.join(builders)} (for saved models use "
            "hf-vit bench saved)"
        )
    if engine is not None and (in_int8 or not is_optimized):  # else `optimize_for_inference` puts it on the engine
        model = build(base_name.replace(" optimized", ""), shape).eval()
        if is_optimized:  # a model that is packed for torch could not be exported
            make_plan(model, torch.float32).carry_out()
        # OpenVINO 2026.4 crashes on kernels that its own converter standardizes in the graph.
        through_onnx = needs_whole_patches(shape.make_any_config())
        return OnEngine(model, shape.images(8, torch.float32, "cpu"), engine, in_int8, dtype, through_onnx)
    torch.manual_seed(0)
    model = builders[base_name](shape).to(device, dtype)
    if is_optimized:
        engine_name = form if engine else "torch"
        quantize = "int8" if in_int8 else None
        return optimize_for_inference(model, engine=engine_name, compile=form.startswith("compiled"), quantize=quantize)
    if suffix == PACKED:
        return pack(model)
    if suffix == FROZEN:
        compile_frozen(model.eval().requires_grad_(False))
    elif suffix == COMPILED:
        model.compile()
    return model


@final
class OnEngine(nn.Module):
    """A float32 model on an engine, converted by OpenVINO's own converter or torch's exporter: images -> outputs.

    Args:
        images: [B, 3, H, W] in the size that the graph is for; in int8 they also set the ranges.
        through_onnx: whether torch's exporter is used for OpenVINO too.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        images: torch.Tensor,
        engine: Runtime,
        in_int8: bool,
        dtype: torch.dtype,
        through_onnx: bool,
    ) -> None:
        super().__init__()
        if engine is not OPENVINO:
            program: Any = export_onnx_of_batches(model, images, ["outputs"])
            self.graph = _quantize_onnx(program) if in_int8 else engine.compile(lambda: program, None, dtype)
            return
        if through_onnx:
            graph = make_openvino_graph(export_onnx_of_batches(model, images, ["outputs"]))
        else:
            import openvino

            graph = openvino.convert_model(model, example_input=images, input=[-1, *images.shape[1:]])
            graph.outputs[0].get_tensor().set_names({"outputs"})
        if in_int8:
            import nncf  # pyright: ignore[reportMissingImports]

            data = nncf.Dataset([images.numpy()])
            graph = nncf.quantize(graph, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=1)
        self.graph = make_openvino_engine(graph, dtype)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.graph.run(images.contiguous(), ("outputs",))["outputs"]


def _quantize_onnx(program: Any) -> Graph:
    """Return a graph for ONNX Runtime with dense layers in int8, and their inputs by the range of every batch."""
    from onnxruntime.quantization import quantize_dynamic

    graph = program.model.graph
    intermediate_values = [value for node in graph.all_nodes() for value in node.outputs if not value.is_graph_output()]
    # Quantizing changes shapes and types; tools that need them infer them.
    for value in (*intermediate_values, *graph.initializers.values()):
        value.shape = value.type = None
    with make_scratch_folder("engine") as folder:
        program.save(str(folder / "float.onnx"))
        quantize_dynamic(folder / "float.onnx", folder / "int8.onnx", per_channel=True)
        return ONNXRUNTIME.open(folder / "int8.onnx")


Work = Literal["inference", "training"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cell:
    """One comparison: inference in a dtype, or training (forward, backward, AdamW; bfloat16 by autocast).

    With `checkpointing`, contestants that can recompute activations in training.
    """

    work: Work
    shape: Shape
    dtype: str = "float32"
    batch: int = 1
    device: str = "cpu"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        """Raise a UserError for an unknown workload or dtype, or an empty batch."""
        if self.work not in ("inference", "training"):
            raise UserError(f"--work {self.work} is unknown; use inference or training")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype} is unknown; use {' or '.join(DTYPES)}")
        if self.batch < 1:
            raise UserError(f"the batch size is {self.batch}, but it must be at least 1; choose a larger number")

    def step(self, name: str) -> Callable[[], Any]:
        """Build a contestant; return a function that runs one step of it and waits until it is done."""
        dtype = DTYPES[self.dtype]
        is_training = self.work == "training"
        model = build(name, self.shape, torch.float32 if is_training else dtype, self.device).train(is_training)
        images = self.shape.images(self.batch, torch.float32 if is_training else dtype, self.device)
        if is_training and self.checkpointing:
            model.model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if is_training else None
        labels = torch.arange(self.batch, device=self.device) % NUM_LABELS
        device_type = torch.device(self.device).type

        @torch.inference_mode()
        def infer() -> None:
            model(images)

        def train() -> None:
            """Run forward and backward pass and one step of AdamW."""
            with torch.autocast(device_type, dtype, enabled=dtype != torch.float32):
                outputs = model(images)
                # Products alone have no head, so the first token serves as logits.
                loss = F.cross_entropy(outputs if outputs.ndim == 2 else outputs[:, 0], labels)
            loss.backward()
            assert optimizer is not None
            optimizer.step()
            optimizer.zero_grad()

        def step() -> None:
            train() if is_training else infer()
            if device_type != "cpu":
                torch.accelerator.synchronize(self.device)

        return step


@dataclass(frozen=True)
class Outcome:
    """Median throughput of a contestant in a cell, and how many times as fast it is as each other one, paired by turns.

    Attributes:
        memory: peak memory of a step in bytes, without weights and input (in training also without optimizer state).
        utilisation: share of the device's peak FLOP/s; a multiply-add counts 2, training three forward passes, and what
            an optimized model leaves out does not count.
    """

    images_per_second: float
    ratios: dict[str, measuring.Quartiles]
    memory: int | None = None
    utilisation: float | None = None


@dataclass
class MeasuredCell:
    """A cell with its outcomes, the contestants that could not take part and why, and the load of other processes."""

    cell: Cell
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    load: float = 0.0


def measure_cell(
    cell: Cell,
    contestants: Sequence[str],
    turns: int,
    *,
    builds: int = 1,
    memory: bool = False,
    peak_flops: float | None = None,
) -> MeasuredCell:
    """Let contestants take turns at a cell.

    Args:
        cell: the comparison.
        contestants: names that `build` takes; those that cannot take part are listed in `absent`.
        turns: steps of every contestant per build, after two that do not count.
        builds: how often to build all contestants anew, in rotating order: the position of weights in memory makes a
            model some per cent faster or slower for as long as it lives.
        memory: whether to measure peak memory too, with one more step.
        peak_flops: FLOP/s of the device, for the utilization.

    Raises:
        UserError: no contestant can take part.
    """
    measured = MeasuredCell(cell, load=measuring.others_load())
    names = list[str]()
    for name in contestants:
        reason = find_obstacle(name, cell.shape, cell.work == "training", DTYPES[cell.dtype], cell.device)
        if reason is None and cell.checkpointing and not name.startswith(("hf_vit", "transformers")):
            reason = "it has no comparable activation checkpointing"
        if reason is None:
            names.append(name)
        else:
            measured.absent[name] = reason
    if not names:
        raise UserError(f"no implementation can be measured: {'; '.join(measured.absent.values())}")
    steps: dict[str, Callable[[], Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for build_index in range(builds):
        steps.clear()
        gc.collect()
        first = build_index % len(names)
        steps.update((name, cell.step(name)) for name in names[first:] + names[:first])
        for name, build_seconds in measuring.take_turns(steps, turns).items():
            seconds[name] += build_seconds
    measured.load = max(measured.load, measuring.others_load())
    for name in names:
        rate = cell.batch / measuring.compute_quartiles(seconds[name]).median
        utilization = None
        if peak_flops:
            utilization = rate * _count_step_flops(cell, optimized="optimized" in name) / peak_flops
        ratios = {other: measuring.compute_speed_ratio(seconds, name, other) for other in names if other != name}
        peak_memory = measuring.measure_peak_memory(steps[name], cell.device) if memory else None
        measured.outcomes[name] = Outcome(rate, ratios, peak_memory, utilization)
    steps.clear()
    gc.collect()
    torch.compiler.reset()  # otherwise later cells reach its limit of recompilations and run uncompiled
    return measured


@functools.cache
def _count_step_flops(cell: Cell, *, optimized: bool) -> float:
    """Return the FLOPs per image of a cell's step; a training step counts as three forward passes."""
    with torch.device("meta"):
        model = build("hf_vit", cell.shape, device="meta").eval()
        if optimized:
            make_plan(model, torch.float32).carry_out()
    images = torch.empty(1, 3, cell.shape.image_size, cell.shape.image_size, device="meta")
    return measuring.count_flops(model, lambda: model(images)) * (3 if cell.work == "training" else 1)
