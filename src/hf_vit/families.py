"""Every family of the package in one table, and the heads of dense prediction in another: whoever needs a list of
either reads it here. `models/` does not.

A family has up to four doors, one for each task class; what stands behind them follows from the `auto_classes` of its
configuration. Where a door makes no sense for a family, the table says why.
"""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, final

import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import PreTrainedModel

from hf_vit.errors import UserError
from hf_vit.models.configuration_hf_axial_resnet import HfAxialResNetConfig
from hf_vit.models.configuration_hf_axial_vit import HfAxialViTConfig
from hf_vit.models.configuration_hf_bit import HfBitConfig
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.configuration_hf_local_vit import HfLocalViTConfig
from hf_vit.models.configuration_hf_mixer import HfMixerConfig
from hf_vit.models.configuration_hf_resnet import HfResNetBaseConfig
from hf_vit.models.configuration_hf_vit import PROBLEM_TYPES, HfBaseConfig, HfViTBaseConfig, HfViTConfig
from hf_vit.models.dense_hf_vit import HfDenseConfig
from hf_vit.models.detection_hf_vit import (
    HfDeformableDetrForObjectDetection,
    HfDetrForObjectDetection,
    HfMaskRCNNForObjectDetection,
)
from hf_vit.models.pretrained_hf_vit import HUB_KEYS, HfPublishedMixin
from hf_vit.models.segmentation_hf_vit import (
    HfLinearForSemanticSegmentation,
    HfMask2FormerForUniversalSegmentation,
    HfUperNetForSemanticSegmentation,
)

Door = Literal["model", "classification", "masked_prediction", "backbone"]
DenseTask = Literal["segmentation", "detection"]

AUTO_CLASSES: Mapping[Door, str] = {
    "model": "AutoModel",
    "classification": "AutoModelForImageClassification",
    "masked_prediction": "AutoModelForMaskedImageModeling",
    "backbone": "AutoBackbone",
}


@final
@dataclass(frozen=True, eq=False)
class Family:
    """One architecture.

    Attributes:
        name: short, a key of `FAMILIES`.
        label: what a model of it is called in a sentence.
        config_class: its configuration.
        classes: door -> class.
        not_applicable: door -> why it makes no sense; every door is here or in `classes`.
    """

    name: str
    label: str
    config_class: type[HfBaseConfig]
    classes: Mapping[Door, type[PreTrainedModel]]
    not_applicable: Mapping[Door, str]

    @property
    def model_type(self) -> str:
        """What config.json calls it."""
        return self.config_class.model_type

    @property
    def is_vit(self) -> bool:
        """Whether it is a Vision Transformer: it has attention, positions and classes of all doors."""
        return issubclass(self.config_class, HfViTBaseConfig)

    @property
    def has_tokens(self) -> bool:
        """Whether its `hidden_states` are tokens; those of ResNets are maps."""
        return not issubclass(self.config_class, HfResNetBaseConfig)

    @property
    def prefix(self) -> str:
        """What the bare model's parameters begin with inside the other classes."""
        return self.classes["model"].base_model_prefix

    @property
    def blocks(self) -> tuple[type, ...]:
        """The modules that its depth is made of, of two kinds in BiT; every one's output is a hidden state."""
        recorded: Any = self.classes["model"]._can_record_outputs
        kinds = recorded["hidden_states"]
        return tuple(each.target_class for each in kinds) if isinstance(kinds, list) else (kinds,)

    def why_not(self, door: Door) -> str:
        """Return why there is nothing behind one of its doors, in a sentence."""
        name = self.label.removeprefix("A ").removeprefix("An ")
        return f"there is no {name} for {door.replace('_', ' ')}: {self.not_applicable[door]}"

    def door_of(self, class_name: object) -> Door | None:
        """Return which of its classes config.json's `architectures` names; None where it is none of them."""
        return next((door for door, model in self.classes.items() if model.__name__ == class_name), None)


def _class(target: str) -> Any:
    """Return the class that `auto_map` calls "module.Class"."""
    module, _, name = target.partition(".")
    return getattr(import_module(f"hf_vit.models.{module}"), name)


def _family(name: str, label: str, config_class: type[HfBaseConfig], **not_applicable: str) -> Family:
    known = config_class.auto_classes
    classes: dict[Door, Any] = {door: _class(known[name]) for door, name in AUTO_CLASSES.items() if name in known}
    absent: dict[Door, str] = {door: not_applicable[door] for door in AUTO_CLASSES if door not in classes}
    return Family(name, label, config_class, classes, absent)


_RESNET = {
    "masked_prediction": "a ResNet has no patches to mask",
}
_MIXER = {
    "masked_prediction": "an MLP-Mixer has no mask token",
}

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _family("plain", "A Vision Transformer", HfViTConfig),
        _family("hybrid", "A hybrid Vision Transformer (ResNet stem)", HfHybridViTConfig),
        _family("axial", "An Axial Vision Transformer", HfAxialViTConfig),
        _family("local", "A Local Vision Transformer", HfLocalViTConfig),
        _family("axial_resnet", "A ResNet with axial attention", HfAxialResNetConfig, **_RESNET),
        _family("bit", "A BiT ResNet", HfBitConfig, **_RESNET),
        _family("mixer", "An MLP-Mixer", HfMixerConfig, **_MIXER),
    )
}


def family_of(model_type: object) -> Family | None:
    """Return the family that config.json calls so; None for another package's."""
    return next((family for family in FAMILIES.values() if family.model_type == model_type), None)


@final
@dataclass(frozen=True, eq=False)
class DenseHead:
    """What predicts something for every place of an image, on the backbone of a family.

    Attributes:
        name: short, a key of `DENSE_HEADS`.
        task: what it predicts.
        model_class: a head of the package, of transformers or of torchvision.
        processor: the class of transformers' image processor that is saved beside it.
    """

    name: str
    task: DenseTask
    model_class: Any
    processor: str

    @property
    def config_class(self) -> type[HfDenseConfig]:
        return self.model_class.config_class

    @property
    def model_type(self) -> str:
        """What config.json calls it."""
        return self.config_class.model_type

    @property
    def auto_class(self) -> str:
        """The Auto class that loads it."""
        return self.model_class._auto_class


# The first one of a task is what it takes by default.
DENSE_HEADS: Mapping[str, DenseHead] = {
    head.name: head
    for head in (
        DenseHead("linear", "segmentation", HfLinearForSemanticSegmentation, "SegformerImageProcessor"),
        DenseHead("upernet", "segmentation", HfUperNetForSemanticSegmentation, "SegformerImageProcessor"),
        DenseHead("mask2former", "segmentation", HfMask2FormerForUniversalSegmentation, "Mask2FormerImageProcessor"),
        DenseHead("mask-rcnn", "detection", HfMaskRCNNForObjectDetection, "ViTImageProcessor"),
        DenseHead("detr", "detection", HfDetrForObjectDetection, "DetrImageProcessor"),
        DenseHead("deformable-detr", "detection", HfDeformableDetrForObjectDetection, "DeformableDetrImageProcessor"),
    )
}


def dense_head_of(model_type: object) -> DenseHead | None:
    """Return the head of dense prediction that config.json calls so; None for anything else."""
    return next((head for head in DENSE_HEADS.values() if head.model_type == model_type), None)


def problem_type_of(model: Any) -> str:
    """Return what the outputs of a classification head are, in transformers' words.

    "single_label_classification": logits of which a softmax makes probabilities; "multi_label_classification": of which
    a sigmoid does; "regression": values. One output without a `problem_type` is a value, as it is in the losses of
    transformers and of this package.

    Args:
        model: a model of any library, its configuration, or its config.json.
    """
    config = getattr(model, "config", model)
    stated = getattr(config, "problem_type", None)
    if stated in PROBLEM_TYPES:
        return stated
    names = getattr(config, "id2label", None)
    outputs = getattr(config, "num_classes", None) if names is None else len(names)
    return "regression" if outputs == 1 else "single_label_classification"


def regression_reason(model: Any) -> str | None:
    """Return what says that the outputs of a model are values; None for a classifier."""
    if problem_type_of(model) != "regression":
        return None
    if getattr(getattr(model, "config", model), "problem_type", None) == "regression":
        return 'problem_type "regression"'
    return 'one output and no problem_type; "multi_label_classification" in its config would make it a probability'


def refuse_regression(model: Any, name: str, what: str, remedy: str = "hf-vit predict gives its values") -> None:
    """Refuse a model without classes.

    Args:
        model: see `problem_type_of`.
        name: of the model.
        what: needs classes.
        remedy: what to do instead.

    Raises:
        UserError: its outputs are values.
    """
    if (reason := regression_reason(model)) is not None:
        raise UserError(f"{what} needs a classifier, and {name} is a regression model ({reason}); {remedy}")


def own_class(config: Mapping[str, Any], model_class: type[PreTrainedModel] | None = None) -> str | None:
    """Return the class outside this package that a config.json names; None where it names the package's.

    Args:
        config: its fields.
        model_class: of the package, which an Auto class is to load; by default the one that was saved.
    """
    family, head = family_of(config.get("model_type")), dense_head_of(config.get("model_type"))
    classes = tuple(family.classes.values()) if family else (head.model_class,) if head else ()
    names, given = config.get("architectures"), config.get("auto_map")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    saved = next((each for each in classes if each.__name__ == name), None)
    wanted, auto_map = model_class or saved, given if isinstance(given, dict) else {}
    target = auto_map.get(_AUTO_CLASS_OF.get(wanted))
    if isinstance(target, str) and wanted is not None:
        module, _, named = target.rpartition("--")[2].rpartition(".")
        return None if named == wanted.__name__ and "_hf_" in module else target
    if not classes or saved is not None:
        return None
    with_code = next((str(each) for each in auto_map.values() if str(each).endswith(f".{name}")), None)
    return with_code or name if model_class is None else None if with_code else name


def refuse_own_class(config: Mapping[str, Any], name: str) -> None:
    """Refuse a checkpoint of a class outside this package, whose numbers none of the package's gives.

    Raises:
        UserError: names it.
    """
    own = own_class(config)
    if own is not None:
        raise UserError(
            f"config.json of {name} names no class of hf_vit but {own}, whose code the commands do not run; "
            "load it in Python (trust_remote_code=True), or, where hf_vit's class gives the same numbers, "
            "load and save it with that"
        )


def _find_class(model_class: Any, source: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what an Auto class is to load, and with which options: a checkpoint's own class, where it is trusted.

    With the package imported, transformers takes its classes for what the checkpoint's code defines. Auto classes
    always pass `trust_remote_code`, and nobody else does.
    """
    config: Any = options.get("config")
    if config is None or source is None or "trust_remote_code" not in options or model_class not in _AUTO_CLASS_OF:
        return model_class, options
    fields = {name: getattr(config, name, None) for name in ("model_type", "architectures", "auto_map")}
    own = own_class(fields, model_class)
    if own is None:
        return model_class, options
    if not options.get("trust_remote_code") or "." not in own:
        remedy = "pass trust_remote_code=True for its code" if "." in own else "it came without code"
        warnings.warn(
            f"{source} was saved by {own} and is loaded as {model_class.__name__}, whose numbers may differ; {remedy}",
            UserWarning,
            stacklevel=4,
        )
        return model_class, options
    place = {name: options[name] for name in HUB_KEYS if name in options}
    loaded = get_class_from_dynamic_module(own, source, **place)
    loaded.register_for_auto_class(_AUTO_CLASS_OF[model_class])
    if loaded.config_class.__name__ != type(config).__name__:
        stored, _ = loaded.config_class.get_config_dict(source, **place)
        config = loaded.config_class.from_dict({**stored, **config.to_dict()}, name_or_path=str(source))
    return loaded, {**options, "config": config}


_AUTO_CLASS_OF: Mapping[Any, str] = {
    model_class: AUTO_CLASSES[door] for family in FAMILIES.values() for door, model_class in family.classes.items()
} | {head.model_class: head.auto_class for head in DENSE_HEADS.values()}


@functools.cache
def register() -> None:
    """Make every family and every head of dense prediction known to transformers' Auto classes, once."""
    HfPublishedMixin._find_class = staticmethod(_find_class)  # pyright: ignore[reportPrivateUsage]
    processors = {"torchvision": transformers.ViTImageProcessor, "pil": transformers.ViTImageProcessorPil}
    for family in FAMILIES.values():
        transformers.AutoConfig.register(family.model_type, family.config_class)
        transformers.AutoImageProcessor.register(family.config_class, image_processor_classes=processors)
        for door, model_class in family.classes.items():
            getattr(transformers, AUTO_CLASSES[door]).register(family.config_class, model_class)
    for head in DENSE_HEADS.values():
        transformers.AutoConfig.register(head.model_type, head.config_class)
        getattr(transformers, head.auto_class).register(head.config_class, head.model_class)
