"""List all model families and all dense prediction heads in two tables, and find entries by name or config.

A family has up to four model classes, one for each task ("door"): the bare model, a classifier, a model for masked
prediction and a backbone. They follow from the `auto_classes` of its configuration. Where a task does not apply to a
family, the table says why.
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
        name: short name, a key of `FAMILIES`.
        label: name of such a model in a sentence.
        config_class: its configuration.
        classes: task -> model class.
        not_applicable: task -> why the family has no such class; every task is here or in `classes`.
    """

    name: str
    label: str
    config_class: type[HfBaseConfig]
    classes: Mapping[Door, type[PreTrainedModel]]
    not_applicable: Mapping[Door, str]

    @property
    def model_type(self) -> str:
        """Return the family's `model_type` in config.json."""
        return self.config_class.model_type

    @property
    def is_vit(self) -> bool:
        """Return whether the family is a Vision Transformer, with attention, positions and classes for all tasks."""
        return issubclass(self.config_class, HfViTBaseConfig)

    @property
    def has_tokens(self) -> bool:
        """Return whether its `hidden_states` are tokens; those of ResNets are maps."""
        return not issubclass(self.config_class, HfResNetBaseConfig)

    @property
    def prefix(self) -> str:
        """Return the prefix that the bare model's parameters have in the other classes."""
        return self.classes["model"].base_model_prefix

    @property
    def blocks(self) -> tuple[type, ...]:
        """Return the classes of the modules whose outputs are the hidden states; BiT has two."""
        outputs: Any = self.classes["model"]._can_record_outputs
        recorders = outputs["hidden_states"]
        return tuple(recorder.target_class for recorder in recorders) if isinstance(recorders, list) else (recorders,)

    def explain_missing_class(self, door: Door) -> str:
        """Return a sentence that says why the family has no class for a task."""
        name = self.label.removeprefix("A ").removeprefix("An ")
        return f"there is no {name} for {door.replace('_', ' ')}: {self.not_applicable[door]}"

    def find_task(self, class_name: object) -> Door | None:
        """Return the task of a class that config.json's `architectures` names; None if it is not the family's."""
        return next((door for door, model in self.classes.items() if model.__name__ == class_name), None)


def get_first_class_name(names: object) -> str:
    """Return the first name of `architectures` in a config.json; "" if it has none."""
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _build_family(name: str, label: str, config_class: type[HfBaseConfig], **not_applicable: str) -> Family:
    """Build the table's entry for a family; `not_applicable` says why each missing class is missing."""
    auto_classes = config_class.auto_classes
    classes: dict[Door, Any] = {}
    for door, auto_class in AUTO_CLASSES.items():
        if auto_class in auto_classes:
            module, _, class_name = auto_classes[auto_class].partition(".")
            classes[door] = getattr(import_module(f"hf_vit.models.{module}"), class_name)
    reasons: dict[Door, str] = {door: not_applicable[door] for door in AUTO_CLASSES if door not in classes}
    return Family(name, label, config_class, classes, reasons)


_RESNET = {"masked_prediction": "a ResNet has no patches to mask"}
_MIXER = {"masked_prediction": "an MLP-Mixer has no mask token"}

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _build_family("plain", "A Vision Transformer", HfViTConfig),
        _build_family("hybrid", "A hybrid Vision Transformer (ResNet stem)", HfHybridViTConfig),
        _build_family("axial", "An Axial Vision Transformer", HfAxialViTConfig),
        _build_family("local", "A Local Vision Transformer", HfLocalViTConfig),
        _build_family("axial_resnet", "A ResNet with axial attention", HfAxialResNetConfig, **_RESNET),
        _build_family("bit", "A BiT ResNet", HfBitConfig, **_RESNET),
        _build_family("mixer", "An MLP-Mixer", HfMixerConfig, **_MIXER),
    )
}


def find_family(model_type: object) -> Family | None:
    """Return the family with this `model_type` in config.json; None if it is not the package's."""
    return next((family for family in FAMILIES.values() if family.model_type == model_type), None)


@final
@dataclass(frozen=True, eq=False)
class DenseHead:
    """A head that predicts something for every position of an image, on the backbone of a family.

    Attributes:
        name: short name, a key of `DENSE_HEADS`.
        task: what it predicts.
        model_class: a head of the package, of transformers or of torchvision.
        processor: class name of the image processor of transformers that is saved with it.
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
        """Return the head's `model_type` in config.json."""
        return self.config_class.model_type

    @property
    def auto_class(self) -> str:
        """Return the name of the Auto class that loads the head."""
        return self.model_class._auto_class


# The first head of a task is its default.
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


def find_head_type(model_type: object) -> DenseHead | None:
    """Return the dense prediction head with this `model_type` in config.json; None for anything else."""
    return next((head for head in DENSE_HEADS.values() if head.model_type == model_type), None)


def get_problem_type(model: Any) -> str:
    """Return what the outputs of a classification head mean, as a `problem_type` of transformers.

    "single_label_classification": logits for a softmax; "multi_label_classification": logits for a sigmoid;
    "regression": values. One output without a `problem_type` is a value, as in the losses of transformers and of this
    package.

    Args:
        model: a model of any library, its configuration, or its config.json.
    """
    config = getattr(model, "config", model)
    problem_type = getattr(config, "problem_type", None)
    if problem_type in PROBLEM_TYPES:
        return problem_type
    names = getattr(config, "id2label", None)
    num_outputs = getattr(config, "num_classes", None) if names is None else len(names)
    return "regression" if num_outputs == 1 else "single_label_classification"


def find_regression_reason(model: Any) -> str | None:
    """Return why the outputs of a model are values; None for a classifier."""
    if get_problem_type(model) != "regression":
        return None
    if getattr(getattr(model, "config", model), "problem_type", None) == "regression":
        return 'problem_type "regression"'
    return 'one output and no problem_type; "multi_label_classification" in its config would make it a probability'


def refuse_regression(model: Any, name: str, purpose: str, remedy: str = "hf-vit predict prints its values") -> None:
    """Refuse a regression model where a classifier is needed.

    Args:
        model: see `get_problem_type`.
        name: name of the model.
        purpose: what needs the classifier.
        remedy: what the user can do instead.

    Raises:
        UserError: the model's outputs are values.
    """
    if reason := find_regression_reason(model):
        raise UserError(f"{purpose} needs a classifier, but {name} is a regression model ({reason}); {remedy}")


def refuse_other_channels(model: Any, name: str) -> None:
    """Raise a UserError if a model of timm, or the model of a configuration, does not take RGB images."""
    channels = getattr(model, "in_chans", getattr(model, "num_channels", 3))
    if channels != 3:
        raise UserError(
            f"{name} takes images with num_channels={channels}; give a model for RGB images (num_channels=3)"
        )


def refuse_diverged(model: Any, name: str, use: str) -> None:
    """Raise UserError if weights are quantized, NaN or infinite; `use` is what was to be done ("exported")."""
    if getattr(model, "is_quantized", False):  # tensors of torchao and others lack most operators
        raise UserError(f"{name} is quantized, so it cannot be {use}; give the model from before the quantization")
    if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
        raise UserError(
            f"{name} has weights that are NaN or infinite, so it cannot be {use}; use a checkpoint from before the "
            "training diverged"
        )


def find_own_class(config: Mapping[str, Any], model_class: type[PreTrainedModel] | None = None) -> str | None:
    """Return the class from outside this package that a config.json names; None if it names a class of the package.

    Args:
        config: fields of config.json.
        model_class: class of the package that an Auto class is about to load; default: the one that was saved.

    Returns:
        "module.Class" of `auto_map` if the checkpoint has the class's code, else the name alone.
    """
    family = find_family(config.get("model_type"))
    head = find_head_type(config.get("model_type"))
    classes: tuple[Any, ...] = (head.model_class,) if head else ()
    if family is not None:
        classes = tuple(family.classes.values())
    saved_name = get_first_class_name(config.get("architectures")) or None
    saved_class = next((each for each in classes if each.__name__ == saved_name), None)
    requested_class = model_class or saved_class
    auto_map_field = config.get("auto_map")
    auto_map: dict[Any, Any] = auto_map_field if isinstance(auto_map_field, dict) else {}
    target = auto_map.get(_AUTO_CLASS_OF.get(requested_class))
    if isinstance(target, str) and requested_class is not None:  # what the Auto class would load from the checkpoint
        module, _, class_name = target.rpartition("--")[2].rpartition(".")
        is_of_package = class_name == requested_class.__name__ and "_hf_" in module
        return None if is_of_package else target
    if not classes or saved_class is not None:  # another library's model, or one of the package's classes
        return None
    target_of_saved = next((str(entry) for entry in auto_map.values() if str(entry).endswith(f".{saved_name}")), None)
    if model_class is None:
        return target_of_saved or saved_name
    return None if target_of_saved else saved_name  # with code, the class is for another Auto class


def refuse_own_class(config: Mapping[str, Any], name: str) -> None:
    """Refuse a checkpoint of a class from outside this package, whose outputs none of the package's classes computes.

    Raises:
        UserError: config.json names such a class.
    """
    if (custom_class := find_own_class(config)) is not None:
        raise UserError(
            f"config.json of {name} names the class {custom_class}, which is not part of hf_vit, and commands do not "
            "run its code; load it in Python with trust_remote_code=True, or, if a class of hf_vit computes the same, "
            "load it with that class and save it"
        )


def _find_class(model_class: Any, source: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class that an Auto class should load, and the options with that class's config.

    This is the checkpoint's own class if its code is trusted; its code is loaded, and the class is registered to be
    saved with its code again. Otherwise a warning tells that another class is loaded. Where hf_vit is imported,
    transformers would use the package's class in place of the checkpoint's. Only Auto classes pass `trust_remote_code`,
    which tells them from other callers.
    """
    config: Any = options.get("config")
    if config is None or source is None or "trust_remote_code" not in options or model_class not in _AUTO_CLASS_OF:
        return model_class, options
    fields = {name: getattr(config, name, None) for name in ("model_type", "architectures", "auto_map")}
    custom_class = find_own_class(fields, model_class)
    if custom_class is None:
        return model_class, options
    has_code = "." in custom_class  # "module.Class" of `auto_map`
    if not options.get("trust_remote_code") or not has_code:
        remedy = "pass trust_remote_code=True to load its own class" if has_code else "it was saved without its code"
        warnings.warn(
            f"{source} was saved by {custom_class} but is loaded as {model_class.__name__}, whose outputs may differ; "
            f"{remedy}",
            UserWarning,
            stacklevel=4,  # the caller of from_pretrained
        )
        return model_class, options
    hub_options = {name: options[name] for name in HUB_KEYS if name in options}
    loaded_class = get_class_from_dynamic_module(custom_class, source, **hub_options)
    loaded_class.register_for_auto_class(_AUTO_CLASS_OF[model_class])
    if loaded_class.config_class.__name__ != type(config).__name__:  # the own class has a config of its own
        stored_config, _ = loaded_class.config_class.get_config_dict(source, **hub_options)
        config = loaded_class.config_class.from_dict({**stored_config, **config.to_dict()}, name_or_path=str(source))
    return loaded_class, {**options, "config": config}


_AUTO_CLASS_OF: Mapping[Any, str] = {
    model_class: AUTO_CLASSES[door] for family in FAMILIES.values() for door, model_class in family.classes.items()
} | {head.model_class: head.auto_class for head in DENSE_HEADS.values()}


@functools.cache
def register() -> None:
    """Register every family and every dense prediction head with transformers' Auto classes, once."""
    # Models cannot import this module, which imports them.
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
        if head.name == "mask2former":  # pipeline("image-segmentation") knows no Auto class of universal segmentation
            transformers.AutoModelForImageSegmentation.register(head.config_class, head.model_class)
