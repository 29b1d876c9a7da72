"""`load_model`: load the model that a name stands for, together with the preparation of its images.

Legend: B images, C channels, H x W px (height, width).
"""

import hashlib
import importlib.util
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
import transformers
from PIL import Image
from torch import nn

from hf_vit.conversion.fetching import TIMM, WRAPPER
from hf_vit.conversion.loading import Source, find_source
from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES
from hf_vit.conversion.targets.graphs.runtimes import Runtime
from hf_vit.data import eval_transform
from hf_vit.data.labels import normalize_name, refuse_surrogates
from hf_vit.data.transforms import get_input_size as get_processor_size
from hf_vit.data.transforms import keeps_shapes, refuse_own_shapes
from hf_vit.display import shorten_list
from hf_vit.environment import keep_freed_memory, pick_device
from hf_vit.errors import UserError
from hf_vit.families import refuse_other_channels, refuse_regression
from hf_vit.loading.folders import ImageGPTFeatures, get_timm_label_names, load_timm, load_transformers, wrap_image_gpt
from hf_vit.loading.graphs import GraphForImageClassification, find_graph, pad_to_canvas
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.repositories.reading import CONFIG, explain_load_errors

PROBE = Image.effect_mandelbrot((96, 80), (-2, -1.2, 0.6, 1.2), 60).convert("RGB")
# Fields that configs lacked in version 0.2. Fingerprints leave them out at their defaults, so that trainings,
# embeddings and analyses begun with it recognize their models; a new field belongs here, too.
_NEWER_FIELDS = re.compile(
    r"hf_bit/weight_standardization|hf_\w+/(rotary_\w+|norm_(type|on_patches|after_branches|in_\w+)|use_qk_norm"
    r"|(key|projection|mlp)_bias|pooling_(num_heads|intermediate_size)|position_interpolation_offset)"
)


def get_label_names(model: nn.Module) -> list[str]:
    """Return a classifier's class names from its config (`id2label`), in the order of its logits."""
    names: dict[int, str] = getattr(model.config, "id2label", None) or {}
    return list(refuse_surrogates([str(names[index]) for index in sorted(names)]))


def match_labels(data_names: Sequence[str], model_names: Sequence[str]) -> list[int]:
    """Return for every class of the data the index of the model's class with the same name, in any Unicode form.

    Raises:
        UserError: the model has no class, or several classes, with the name of a class of the data.
    """
    if list(data_names) == list(model_names):
        return list(range(len(model_names)))
    wanted, available = list(map(normalize_name, data_names)), list(map(normalize_name, model_names))
    index = {name: position for position, name in enumerate(available)}
    unknown_names = [repr(name) for name in wanted if name not in index]
    if unknown_names:
        shortened_names = shorten_list(list(map(repr, available)))
        raise UserError(
            f"the data has classes that the model does not have: {shorten_list(unknown_names)}; the model has "
            f"{shortened_names}: give data with these class names, or rename the data's classes"
        )
    counts = Counter(available)
    if duplicates := [repr(name) for name in wanted if counts[name] > 1]:
        raise UserError(
            f"the model has several classes named {shorten_list(duplicates)}; give them different names in "
            "id2label of its config.json"
        )
    return [index[name] for name in wanted]


def make_names_unique(names: Sequence[str]) -> list[str]:
    """Append its index to every name that occurs more than once, such as "crane" in ImageNet."""
    counts = Counter(names)
    return [f"{name} ({index})" if counts[name] > 1 else name for index, name in enumerate(names)]


@final
@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with the preparation of its images.

    Attributes:
        model: any torch module that takes images [B, C, H, W].
        prepare: Pillow images (RGB) -> [B, C, H, W] on the CPU.
        name: for messages and records.
        folder: local folder of the model, where records are written; None for models of the Hub, of timm and of Python.
        processor: its image processor of transformers; None for models of timm.
        origin: source format of a converted checkpoint, else None.
        state: identity of the folder's files when they were loaded.
        facts_folder: folder in which its facts.json would be; unlike `folder` also of models of the Hub and of timm.
    """

    model: nn.Module
    prepare: Callable[[Sequence[Image.Image]], torch.Tensor]
    name: str
    folder: Path | None = None
    processor: Any = None
    origin: str | None = None
    state: frozenset[tuple[object, ...]] = frozenset()
    facts_folder: Path | None = None

    def check_same_folder(self) -> None:
        """Raise UserError if the files of the folder have changed since the model was loaded."""
        if self.folder is not None and self.state != _read_file_states(self.folder):
            raise UserError(
                f"the model in {self.folder} was replaced during the measurement, so nothing was recorded; run "
                "the command again"
            )

    @property
    def label_sets(self) -> list[list[str]]:
        """The class names in the order of the logits, as one or more sets of synonyms; [] without a classifier."""
        if hasattr(self.model, "pretrained_cfg"):
            return get_timm_label_names(self.model)
        return [get_label_names(self.model)] if _has_classification_head(self.model) else []

    def label_names(self, data_names: Sequence[str]) -> list[str]:
        """Return the first set of class names that contains all classes of the data, else the first set.

        Raises:
            UserError: the model is no classifier.
        """
        if not self.label_sets:
            raise UserError(f"{self.name} has no class names; give a classifier that has them")
        refuse_regression(self.model, self.name, "classification")
        wanted_names = set(map(normalize_name, data_names))
        matching_sets = [names for names in self.label_sets if wanted_names <= set(map(normalize_name, names))]
        return (matching_sets or self.label_sets)[0]

    def list_classes(self, data_names: Sequence[str]) -> list[int]:
        """Return the index of the model's class for every class of the data, matched by name."""
        return match_labels(data_names, self.label_names(data_names))

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) px of the model's images by its config, or None if that does not tell."""
        size = getattr(getattr(self.model, "config", None), "image_size", None)
        return None if size is None else as_pair(size)

    @cached_property
    def input_size(self) -> tuple[int, int]:
        """(height, width) px to which a square image is prepared."""
        if self.resizes:
            return get_processor_size(self.processor)
        height, width = self.prepare([Image.new("RGB", (64, 64))]).shape[-2:]
        return height, width

    @property
    def draft_side(self) -> int:
        """Lowest number of px of both sides of an image that its preparation does not enlarge."""
        size = getattr(self.processor, "size", None) or {}
        sides = [size.get(name) for name in ("height", "width", "shortest_edge")]
        refuse_own_shapes(self.processor, "--draft")
        if self.resizes or not any(sides) or not getattr(self.processor, "do_resize", True):
            raise UserError(f"--draft needs a fixed input size, which {self.name} does not have; leave --draft out")
        return max(int(side) for side in sides if side)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.model.parameters()).dtype

    def pixel_values(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """Prepare images: [B, C, H, W] on the model's device in its dtype."""
        return self.prepare(images).to(self.device, self.dtype)

    @property
    def is_differentiable(self) -> bool:
        """Whether outputs have a gradient with respect to pixels; those of an ImageGPT and of a graph have none."""
        return not (isinstance(self.model, ImageGPTFeatures) or self.is_graph)

    @property
    def is_graph(self) -> bool:
        """Whether it is an exported graph, which has logits and features, but no layers, gradients or weights."""
        return isinstance(self.model, GraphForImageClassification)

    @property
    def resizes(self) -> bool:
        """Whether it is a graph that contains the image processor, and so takes images of any size."""
        return isinstance(self.model, GraphForImageClassification) and self.model.takes != PIXEL_VALUES

    @property
    def configuration(self) -> dict[str, Any] | None:
        """The fields of its config without paths and library versions; None for models of timm."""
        config: Any = getattr(self.model, "config", None)
        if not hasattr(config, "to_dict"):
            return None
        return {key: value for key, value in config.to_dict().items() if not key.startswith(("_", "transformers_"))}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of config, parameters and buffers, 16 hexadecimal digits, independent of the device."""
        refuse_optimized(self.model, "no file of results can name its weights")
        digest = hashlib.sha256()
        if self.configuration is not None:
            kind: Any = type(self.model.config)
            values = {
                name: value
                for name, value in self.configuration.items()
                if not _NEWER_FIELDS.fullmatch(f"{kind.model_type}/{name}")
                or json.dumps(value) != json.dumps(getattr(kind, name))
            }
            digest.update(json.dumps(values, sort_keys=True, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\n".encode())
            digest.update(get_values(tensor).contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    @property
    def processor_fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over the fields of the image processor; for timm over prepared pixels."""
        has_fields = hasattr(self.processor, "to_json_string")
        content = self.processor.to_json_string().encode() if has_fields else self.prepare_probe()
        return hashlib.sha256(content).hexdigest()[:16]

    def prepare_probe(self) -> bytes:
        """Return a prepared picture, whose edges and colors depend on resizing, cropping and scaling, to two digits."""
        return (self.prepare([PROBE]) * 100).round().to(torch.int32).numpy().tobytes()

    def describe(self) -> dict[str, str]:
        """Return name, kind and fingerprint for records, and the source format of a converted checkpoint."""
        kind = getattr(getattr(self.model, "config", None), "model_type", None) or type(self.model).__name__
        record = {"name": self.name, "kind": str(kind), "fingerprint": self.fingerprint}
        return record | ({} if self.origin is None else {"origin": self.origin})


def _has_classification_head(model: nn.Module) -> bool:
    """Return whether a model has a classification head; its config does not tell, as bare models have "LABEL_0" too."""
    names = (base.__name__ for base in type(model).__mro__)  # a derived class may have any name
    return any("ForImageClassification" in name for name in names) and bool(getattr(model.config, "num_labels", 0))


def get_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight on the CPU; tensors of torchao, which lack most operators, are dequantized."""
    values = tensor.detach().cpu()
    return values.dequantize() if hasattr(values, "__tensor_flatten__") else values


def unwrap_model(model: Any) -> Any:
    """Return the model inside one of `torch.compile` or of peft; with peft's adapters, which are in its layers."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse_optimized(model: Any, reason: str) -> None:
    """Raise a UserError with the reason if `optimize_for_inference` has changed a model."""
    if hasattr(model, "engine"):
        raise UserError(
            f"the model is optimized for inference, so {reason}; give it as it was before optimize_for_inference"
        )


def load_model(
    source: Any, device: str | None = None, *, as_classifier: bool = False, inside: bool = False
) -> LoadedModel:
    """Load or wrap a model.

    The library that saved a checkpoint also runs it, so that measurements apply to that library. Checkpoints that no
    installed library runs (a file, an architecture that transformers no longer has, a timm model without timm) are
    converted.

    Args:
        source: a folder (also of timm), a graph of `hf-vit export` or its folder, a model of the Hub (owner/name or
            owner/name@REVISION), "timm:NAME" or "timm:NAME@FILE", any other source of `hf-vit convert`, a pair (model,
            image processor) or a `LoadedModel`. The model of a pair may have adapters of peft; one of `torch.compile`
            is run uncompiled (`model.compile()` compiles it in place).
        device: torch device, by default a GPU if there is one. Models from Python stay on their device.
        as_classifier: refuse a source that is not a trained image classifier.
        inside: convert timm models if possible, because the caller reads layers of the model.

    Raises:
        UserError: the source does not exist or cannot be loaded.
    """
    if isinstance(source, LoadedModel):
        source.model.eval()
        # The weights may have changed, so a copy computes the fingerprint anew; an optimized model keeps its own.
        return source if hasattr(source.model, "engine") else replace(source)
    if isinstance(source, tuple):
        model, processor = cast("tuple[nn.Module, Any]", source)
        model = unwrap_model(model)
        if getattr(getattr(model, "config", None), "model_type", None) == "vit_mae":
            name = type(model).__name__
            raise UserError(f"{name} shuffles and hides patches; save it and give its folder, which is converted")
        if inside:
            refuse_optimized(model, "its layers cannot be read")
        return _wrap(model, processor, type(model).__name__)
    keep_freed_memory()
    graph = find_graph(str(source)) if isinstance(source, str | PathLike) else None
    if graph is not None:
        runtime, file = graph
        return _load_graph(runtime, file, device, inside)
    checkpoint = find_source(source)
    library, takes_only_images = _find_library(checkpoint)
    if not takes_only_images or (inside and library == "timm"):
        try:
            if checkpoint.plan.has_head or not as_classifier:
                return _convert(checkpoint, device)
        except UserError as error:
            if library is None:
                raise UserError(f"{checkpoint.name} cannot be read as a model: {error}") from error
        if library is None:
            raise UserError(f"{checkpoint.name} has no classification head; fine-tune it first (hf-vit finetune)")
    if library == "timm":
        return _load_from_timm(checkpoint, device, as_classifier)
    model, processor = load_transformers(checkpoint, device, as_classifier=as_classifier)
    return _wrap(model, processor, get_source_name(checkpoint), checkpoint)


def _find_library(source: Source) -> tuple[Literal["timm", "transformers"] | None, bool]:
    """Return the library that runs a checkpoint, or None, and whether its model takes only images and sees all of each.

    That is the library that saved it, if it is installed and still has the architecture.
    """
    kind = source.stored.get("model_type")
    if source.name.startswith(TIMM) or ("architecture" in source.stored and kind in (None, WRAPPER)):
        return ("timm", True) if importlib.util.find_spec("timm") else (None, False)
    if source.path is None or source.path.is_file():
        return None, False
    if not isinstance(kind, str):
        return "transformers", True  # its error describes the problem
    if kind not in transformers.CONFIG_MAPPING:
        return None, False
    # Some dense prediction models, such as transformers' UperNet and ours, have no bare model.
    purposes = ("", "_FOR_SEMANTIC_SEGMENTATION", "_FOR_UNIVERSAL_SEGMENTATION", "_FOR_OBJECT_DETECTION")
    mappings: list[Any] = [getattr(transformers, f"MODEL{purpose}_MAPPING") for purpose in purposes]
    classes = [mapping.get(transformers.CONFIG_MAPPING[kind], None) for mapping in mappings]
    model_class: Any = next(filter(None, classes), None)
    if getattr(model_class, "main_input_name", None) != "pixel_values":
        return "transformers", False
    parameters = inspect.signature(model_class.forward).parameters.values()
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    # SigLIP 2 needs the grids too, and MAE's encoder hides patches by chance.
    return "transformers", needed <= {"self", "pixel_values", "args", "kwargs"} and kind != "vit_mae"


def get_source_name(source: Source) -> str:
    """Return the name of a source; of folders and files the base name only, so that results record no local paths."""
    prefix = TIMM if source.name.startswith(TIMM) else ""
    if source.path is not None and not source.is_on_hub:
        return prefix + source.path.resolve().name
    architecture, at, file = source.name.partition("@")
    return architecture + at + Path(file).name if prefix else source.name


def _wrap(
    model: nn.Module,
    processor: Any,
    name: str,
    source: Source | None = None,
    prepare: Callable[[Sequence[Image.Image]], torch.Tensor] | None = None,
    origin: str | None = None,
) -> LoadedModel:
    """Build a `LoadedModel` in evaluation mode."""
    if getattr(getattr(model, "config", None), "model_type", None) == "imagegpt":
        model, prepare = wrap_image_gpt(model, processor)
    folder, facts_folder = (None, None) if source is None else (source.folder, source.facts_folder)
    state = frozenset[Any]() if folder is None else _read_file_states(folder)
    if prepare is None and keeps_shapes(processor):  # unless `keep_image_sizes` replaces it
        prepare = cast(Any, partial(refuse_own_shapes, processor, f"this use of {name}"))
    prepare = prepare or eval_transform(processor).batch
    return LoadedModel(model.eval(), prepare, name, folder, processor, origin, state, facts_folder)


def _read_file_states(folder: Path) -> frozenset[tuple[object, ...]]:
    """Return the identity of a folder's config and weight files: name, device, inode, size and time of each."""
    files = [path for path in folder.glob("*") if path.name == CONFIG or path.suffix in (".safetensors", ".bin")]
    stats = [(path.name, path.stat()) for path in files]
    return frozenset((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _convert(source: Source, device: str | None) -> LoadedModel:
    """Convert a checkpoint and return the model."""
    torch_device = pick_device(device)
    refuse_other_channels(source.plan.config, source.name)
    model: Any = source.load()
    model.to(torch_device)
    name = source.checkpoint.name if source.folder is None else get_source_name(source)
    return _wrap(model, source.processor(), name, source, origin=source.plan.origin)


def _load_graph(runtime: Runtime, file: Path, device: str | None, needs_layers: bool) -> LoadedModel:
    """Open an exported graph; raise UserError if the caller needs layers or another device than the CPU."""
    if needs_layers:
        raise UserError(f"{file} is an exported graph, whose layers cannot be read; give the original model")
    if device is not None and pick_device(device).type != "cpu":
        raise UserError(f"{file} is an exported graph, which only runs on the CPU; leave --device {device} out")
    graph = GraphForImageClassification(runtime, file)
    refuse_other_channels(graph.config, str(file))
    prepare = None if graph.takes == PIXEL_VALUES else pad_to_canvas
    return _wrap(graph, graph.processor, f"{file.resolve().parent.name}/{file.name}", prepare=prepare)


def _load_from_timm(source: Source, device: str | None, as_classifier: bool) -> LoadedModel:
    """Load a model of timm with timm's preparation of images."""
    model = load_timm(source, device)
    if as_classifier and not getattr(model, "num_classes", 0):
        raise UserError(
            f"{source.name} has no classification head (num_classes=0); give a classifier, or fine-tune it "
            "first (hf-vit finetune)"
        )
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    with explain_load_errors(source.name):  # the settings are those of an untrusted pretrained_cfg
        transform: Any = create_transform(**resolve_model_data_config(model), is_training=False)
        transform(PROBE)
    name = TIMM + get_source_name(source).removeprefix(TIMM)
    return LoadedModel(model, partial(_transform_images, transform), name, facts_folder=source.facts_folder)


def _transform_images(transform: Any, images: Sequence[Image.Image]) -> torch.Tensor:
    return torch.stack(list(map(transform, images)))


def load_models(sources: Sequence[Any], device: str | None = None) -> list[LoadedModel]:
    """Load models for a comparison, each named with the shortest end of its path that is unique; see `load_model`.

    Raises:
        UserError: a model cannot be loaded or is given twice, or there are fewer than two.
    """
    if len(sources) < 2:
        raise UserError(f"a comparison needs at least two models, but {len(sources)} was given; name another model")
    models = [load_model(source, device) for source in sources]
    paths: list[tuple[str, ...]] = []
    counts = Counter[str]()
    for source, model in zip(sources, models, strict=True):
        if isinstance(source, tuple | LoadedModel):
            counts[model.name] += 1
            paths.append((model.name if counts[model.name] == 1 else f"{model.name} #{counts[model.name]}",))
        else:  # a source that is not a path counts as one part, except the file of timm:NAME@FILE
            path = model.folder or Path(str(source).removeprefix(TIMM)).expanduser()
            folders = Path(str(source).partition("@")[2]).parts[:-1]
            named = (*folders, model.name) if folders else (str(source),)
            paths.append(path.resolve().parts if path.exists() else named)
    duplicates = sorted({parts[-1] for parts in paths if paths.count(parts) > 1})
    if duplicates:
        raise UserError(f"{duplicates[0]} was given twice; give every model once")
    return [replace(model, name=name) for model, name in zip(models, _shorten_paths(paths), strict=True)]


def _shorten_paths(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return for every path, which is given as its parts, the shortest end that no other path has."""
    lengths = [1] * len(paths)
    names = [parts[-1] for parts in paths]
    while len(set(names)) < len(names):
        for position, name in enumerate(names):
            lengths[position] += names.count(name) > 1
        names = ["/".join(parts[-length:]) for parts, length in zip(paths, lengths, strict=True)]
    return names
