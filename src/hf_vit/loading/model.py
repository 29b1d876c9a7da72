"""The one way to a model: `load_model` finds out what a name stands for, and returns the model with what feeds it.

Legend: B images, C channels, H x W px.
"""

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, final

import torch
from torch import nn

from hf_vit.conversion.fetching import TIMM, WRAPPER
from hf_vit.conversion.loading import Source, find_source
from hf_vit.conversion.targets.graphs.preprocessing import PIXEL_VALUES
from hf_vit.conversion.targets.graphs.runtimes import Runtime
from hf_vit.data import eval_transform
from hf_vit.data.labels import normalize_name
from hf_vit.data.transforms import input_size as size_of
from hf_vit.display import shortened
from hf_vit.environment import keep_freed_memory, pick_device
from hf_vit.errors import UserError
from hf_vit.families import refuse_regression
from hf_vit.loading.folders import (
    ImageGPTFeatures,
    image_gpt_features,
    load_timm,
    load_transformers,
    timm_label_names,
)
from hf_vit.loading.graphs import GraphForImageClassification, canvas, graph_file
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.repositories.reading import CONFIG

if TYPE_CHECKING:
    from PIL.Image import Image


def label_names_of(model: "nn.Module") -> list[str]:
    """Return the names of a classifier's classes as its config tells them (`id2label`), in the order of its logits."""
    names: dict[int, str] = getattr(model.config, "id2label", None) or {}
    return [str(names[index]) for index in sorted(names)]


def match_labels(data_names: Sequence[str], model_names: Sequence[str]) -> list[int]:
    """Return for every class of the data the index of the model's class of that name, in any Unicode form."""
    if list(data_names) == list(model_names):
        return list(range(len(model_names)))
    data_names, model_names = list(map(normalize_name, data_names)), list(map(normalize_name, model_names))
    index = {name: position for position, name in enumerate(model_names)}
    if unknown := [repr(name) for name in data_names if name not in index]:
        known = shortened(list(map(repr, model_names)))
        raise UserError(
            f"the data has classes that the model does not have: {shortened(unknown)}; the model's are {known}; "
            "use data with these class names, or rename the classes"
        )
    counts = Counter(model_names)
    if twice := [repr(name) for name in data_names if counts[name] > 1]:
        raise UserError(f"the model has several classes named {shortened(twice)}; rename them in its config (id2label)")
    return [index[name] for name in data_names]


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names, those that occur twice followed by their index: ImageNet has two classes "crane"."""
    counts = Counter(names)
    return [f"{name} ({index})" if counts[name] > 1 else name for index, name in enumerate(names)]


@final
@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode and how it is fed.

    Attributes:
        model: any torch module that takes images [B, C, H, W].
        prepare: Pillow images (RGB) -> [B, C, H, W] on the CPU.
        name: for people and facts.
        folder: where its facts are kept; None for a model of the Hub or of timm, or one made in Python.
        processor: its image processor of transformers; None for a model of timm.
        origin: the code whose checkpoint was converted on the way; None where none was.
        state: of the folder's files, when they were loaded.
    """

    model: nn.Module
    prepare: "Callable[[Sequence[Image]], torch.Tensor]"
    name: str
    folder: Path | None = None
    processor: Any = None
    origin: str | None = None
    state: frozenset[tuple[object, ...]] = frozenset()

    def need_same_folder(self) -> None:
        """Refuse to record a result if the folder holds another model by now.

        Raises:
            UserError: another model was put there meanwhile.
        """
        if self.folder is not None and self.state != _state_of(self.folder):
            raise UserError(
                f"{self.folder} holds another model than the one that was measured, so nothing was "
                "recorded; run the command again"
            )

    @property
    def label_sets(self) -> list[list[str]]:
        """The names of a classifier's classes, in the order of its logits; several sets where there are synonyms."""
        if hasattr(self.model, "pretrained_cfg"):
            return timm_label_names(self.model)
        return [label_names_of(self.model)] if _classifies(self.model) else []

    def label_names(self, data_names: Sequence[str]) -> list[str]:
        """Of the sets of names the one that knows these classes of the data, else the first."""
        if not self.label_sets:
            raise UserError("it has no head with named classes")
        refuse_regression(self.model, self.name, "classification")
        wanted = set(map(normalize_name, data_names))
        fitting = [names for names in self.label_sets if wanted <= set(map(normalize_name, names))]
        return (fitting or self.label_sets)[0]

    def classes_of(self, data_names: Sequence[str]) -> list[int]:
        """Return the index of the model's class for every class of the data, matched by name."""
        return match_labels(data_names, self.label_names(data_names))

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) px of the images the model was made for, where its config tells."""
        size = getattr(getattr(self.model, "config", None), "image_size", None)
        return None if size is None else as_pair(size)

    @cached_property
    def input_size(self) -> tuple[int, int]:
        """(height, width) px that the model is fed with, for a square image."""
        from PIL import Image

        if self.resizes:
            return size_of(self.processor)
        height, width = self.prepare([Image.new("RGB", (64, 64))]).shape[-2:]
        return height, width

    @property
    def draft_side(self) -> int:
        """px that both sides of an image need for its preparation not to enlarge it."""
        size = getattr(self.processor, "size", None) or {}
        sides = [size.get(name) for name in ("height", "width", "shortest_edge")]
        if self.resizes or not any(sides) or not getattr(self.processor, "do_resize", True):
            raise UserError(f"{self.name} has no fixed input size; leave --draft out")
        return max(int(side) for side in sides if side)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.model.parameters()).dtype

    def pixel_values(self, images: "Sequence[Image]") -> torch.Tensor:
        """Return [B, C, H, W] on the model's device, in the dtype of its weights."""
        return self.prepare(images).to(self.device, self.dtype)

    @property
    def is_differentiable(self) -> bool:
        """Whether its answers have a gradient with respect to the pixels; an ImageGPT's and a graph's have none."""
        return not (isinstance(self.model, ImageGPTFeatures) or self.is_graph)

    @property
    def is_graph(self) -> bool:
        """Whether it answers and shows nothing else but features: no layers, no gradients, no weights."""
        return isinstance(self.model, GraphForImageClassification)

    @property
    def resizes(self) -> bool:
        """Whether it takes images as they are, its image processor being a part of it."""
        return isinstance(self.model, GraphForImageClassification) and self.model.takes != PIXEL_VALUES

    @property
    def configuration(self) -> dict[str, Any] | None:
        """The fields of its config, but for those that tell where and by what it was saved; None of a model of timm."""
        config: Any = getattr(self.model, "config", None)
        if not hasattr(config, "to_dict"):
            return None
        return {key: value for key, value in config.to_dict().items() if not key.startswith(("_", "transformers_"))}

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over config, parameters and buffers; the same on every device."""
        digest = hashlib.sha256()
        if self.configuration is not None:
            digest.update(json.dumps(self.configuration, sort_keys=True, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name}\t{tensor.dtype}\t{tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, str]:
        """Name, kind and fingerprint, as results keep them, and where it was converted from, if it was."""
        kind = getattr(getattr(self.model, "config", None), "model_type", None) or type(self.model).__name__
        known = {"name": self.name, "kind": str(kind), "fingerprint": self.fingerprint}
        return known | ({} if self.origin is None else {"origin": self.origin})


def _classifies(model: nn.Module) -> bool:
    """Return a bare model's config names classes too ("LABEL_0"); what counts is its class, and that there is a
    head.
    """
    names = (each.__name__ for each in type(model).__mro__)  # a derived class may have any name
    return any("ForImageClassification" in name for name in names) and bool(getattr(model.config, "num_labels", 0))


def load_model(
    source: Any, device: str | None = None, *, as_classifier: bool = False, inside: bool = False
) -> LoadedModel:
    """Load or wrap a model.

    The library that saved a checkpoint runs it, so that what is measured is what it does there. What no library here
    runs (a file, an architecture that transformers has given up, a model of timm without timm) is converted on the way.

    Args:
        source: a folder (timm's too), a graph of `hf-vit export` or its folder, a model of the Hub (owner/name or
            owner/name@REVISION), "timm:NAME" or "timm:NAME@FILE", whatever else `hf-vit convert` reads, a pair (model,
            image processor) or a `LoadedModel`.
        device: torch device; by default a GPU where there is one. Models made in Python stay where they are.
        as_classifier: refuse a folder or name that stands for no trained image classifier.
        inside: its layers will be read; those of timm's models are known once they are converted, where they can be.

    Raises:
        UserError: there is no such model, or it does not load.
    """
    if isinstance(source, LoadedModel):
        return source
    if isinstance(source, tuple):
        model, processor = cast("tuple[nn.Module, Any]", source)
        return _wrap(model, processor, type(model).__name__)
    keep_freed_memory()
    if (graph := graph_file(str(source))) is not None:
        return _load_graph(*graph, device, inside)
    found = find_source(source)
    library, takes_pixels = _library_of(found)
    if not takes_pixels or (inside and library == "timm"):
        try:
            return _convert(found, device, as_classifier)
        except UserError as error:
            if library is None:
                raise UserError(f"{found.name} cannot be read as a model: {error}") from error
    if library == "timm":
        return _load_from_timm(found, device, as_classifier)
    model, processor = load_transformers(found, device, as_classifier=as_classifier)
    return _wrap(model, processor, _name_of(found), found.folder)


def _library_of(source: Source) -> tuple[Literal["timm", "transformers"] | None, bool]:
    """Return which library runs a checkpoint: the one that saved it, where it is installed and still knows the
    architecture.

    The second value tells whether what it makes is a model of images alone; a CLIP of transformers is not.
    """
    kind = source.stored.get("model_type")
    if source.name.startswith(TIMM) or ("architecture" in source.stored and kind in (None, WRAPPER)):
        return ("timm", True) if importlib.util.find_spec("timm") else (None, False)
    if source.path is None or source.path.is_file():
        return None, False
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    if not isinstance(kind, str):
        return "transformers", True  # it says what is wrong
    if kind not in CONFIG_MAPPING:
        return None, False
    # Heads of dense prediction may have no bare model: transformers' UperNet, and this package's.
    endings = ("SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "OBJECT_DETECTION")
    mappings: list[Any] = [MODEL_MAPPING, *(getattr(transformers, f"MODEL_FOR_{each}_MAPPING") for each in endings)]
    classes = (mapping.get(CONFIG_MAPPING[kind], None) for mapping in mappings)
    first = next((each for each in classes if each is not None), None)
    return "transformers", getattr(first, "main_input_name", None) == "pixel_values"


def _name_of(source: Source) -> str:
    """Return the base name of a folder or file, so that results do not record local paths; other sources as given."""
    prefix = TIMM if source.name.startswith(TIMM) else ""
    if source.path is not None and not source.is_on_hub:
        return prefix + source.path.resolve().name
    architecture, at, file = source.name.partition("@")
    return architecture + at + Path(file).name if prefix else source.name


def _wrap(
    model: nn.Module,
    processor: Any,
    name: str,
    folder: Path | None = None,
    prepare: "Callable[[Sequence[Image]], torch.Tensor] | None" = None,
    origin: str | None = None,
) -> LoadedModel:
    if getattr(getattr(model, "config", None), "model_type", None) == "imagegpt":
        model, prepare = image_gpt_features(model, processor)
    state = frozenset[Any]() if folder is None else _state_of(folder)
    return LoadedModel(model.eval(), prepare or eval_transform(processor).batch, name, folder, processor, origin, state)


def _state_of(folder: Path) -> frozenset[tuple[object, ...]]:
    """Return which files a model's configuration and weights are; none where there is no such folder."""
    files = [path for path in folder.glob("*") if path.name == CONFIG or path.suffix in (".safetensors", ".bin")]
    stats = [(path.name, path.stat()) for path in files]
    return frozenset((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _convert(source: Source, device: str | None, as_classifier: bool) -> LoadedModel:
    place, plan = pick_device(device), source.plan
    if as_classifier and not plan.has_head:
        raise UserError("it is not an image classifier, as it has no head; fine-tune it first (hf-vit finetune)")
    model: Any = source.load()
    model.to(place)
    name = source.checkpoint.name if source.folder is None else _name_of(source)
    return _wrap(model, source.processor(), name, source.folder, origin=plan.origin)


def _load_graph(runtime: Runtime, file: Path, device: str | None, inside: bool) -> LoadedModel:
    if inside:
        raise UserError(f"{file} is an exported graph, whose layers cannot be read; give the model that was exported")
    if device is not None and pick_device(device).type != "cpu":
        raise UserError(f"{file} is an exported graph, which runs on the CPU; leave --device {device} out")
    graph = GraphForImageClassification(runtime, file)
    prepare = None if graph.takes == PIXEL_VALUES else canvas
    return _wrap(graph, graph.processor, f"{file.resolve().parent.name}/{file.name}", prepare=prepare)


def _load_from_timm(source: Source, device: str | None, as_classifier: bool) -> LoadedModel:
    model = load_timm(source, device)
    if as_classifier and not getattr(model, "num_classes", 0):
        raise UserError(f"{source.name} is not a classifier: it has no head (num_classes 0)")
    from timm.data.config import resolve_model_data_config
    from timm.data.transforms_factory import create_transform

    transform: Any = create_transform(**resolve_model_data_config(model), is_training=False)
    name = TIMM + _name_of(source).removeprefix(TIMM)
    return LoadedModel(model, lambda images: torch.stack([transform(image) for image in images]), name)


def load_models(sources: Sequence[Any], device: str | None = None) -> list[LoadedModel]:
    """Load models to be compared, called by as little of their paths as tells them apart; see `load_model`.

    Raises:
        UserError: a model does not load or is given twice, or there are fewer than two.
    """
    if len(sources) < 2:
        raise UserError("a comparison needs at least two models; name more")
    models, places = [load_model(source, device) for source in sources], list[tuple[str, ...]]()
    for source, model in zip(sources, models, strict=True):
        if isinstance(source, tuple | LoadedModel):
            places.append((model.name,))
        else:  # the parts of a path; other sources as they were given
            path = model.folder or Path(str(source).removeprefix(TIMM)).expanduser()
            places.append(path.resolve().parts if path.exists() else (str(source),))
    if twice := sorted({place[-1] for place in places if places.count(place) > 1}):
        raise UserError(f"{', '.join(twice)} is given twice; give every model once")
    lengths, names = [1] * len(places), [place[-1] for place in places]
    while len(set(names)) < len(names):
        lengths = [length + (names.count(name) > 1) for name, length in zip(names, lengths, strict=True)]
        names = ["/".join(place[-length:]) for place, length in zip(places, lengths, strict=True)]
    return [replace(model, name=name) for model, name in zip(models, names, strict=True)]
