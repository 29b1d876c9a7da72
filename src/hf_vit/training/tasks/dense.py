"""The tasks of segmentation, from masks, and detection, from boxes: a new head on a backbone's feature maps.

Legend: B images, H x W px, n objects of an image.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast, final
from unittest.mock import patch

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torchvision.ops import box_convert
from transformers import PreTrainedModel
from transformers.loss import loss_for_object_detection
from transformers.models.mask2former import modeling_mask2former
from transformers.trainer_utils import EvalLoopOutput

from hf_vit.conversion.loading import Source
from hf_vit.data import ImageData, dense_collator, dense_transforms
from hf_vit.data.annotations import IGNORED
from hf_vit.data.transforms import refuse_image_only
from hf_vit.errors import UserError, get_strict_reason
from hf_vit.evaluation.protocols.dense import DetectionMeter, SegmentationMeter, require_metrics
from hf_vit.families import DENSE_HEADS, DenseHead, DenseTask
from hf_vit.loading.outputs import compute_detections
from hf_vit.loading.start import build_model, build_processor, find_backbone, load_dense_model
from hf_vit.models.configuration_hf_hybrid_vit import HfHybridViTConfig
from hf_vit.models.configuration_hf_mixer import HfMixerConfig
from hf_vit.models.configuration_hf_resnet import HfResNetBaseConfig
from hf_vit.models.configuration_hf_vit import HfBaseConfig
from hf_vit.models.pretrained_hf_vit import HfBaseBackbone
from hf_vit.training.plan import Run, Start, configure_weights
from hf_vit.training.tasks.task import MeasuredTask, find_active_settings
from hf_vit.training.trainer.hf_vit_trainer import HfViTTrainer
from hf_vit_settings import Recipe


class _HeadInput(NamedTuple):
    """The feature maps that a head reads, and the fields of its configuration that `width` sets."""

    strides: tuple[int, ...]  # in px; empty if the head reads the last map only
    min_maps: int
    width_fields: tuple[str, ...]


_HEADS = {
    "linear": _HeadInput((), 0, ()),
    "upernet": _HeadInput((4, 8, 16, 32), 2, ("hidden_size", "auxiliary_channels")),
    "mask2former": _HeadInput((4, 8, 16, 32), 4, ("feature_size", "mask_feature_size", "hidden_dim")),
    "mask-rcnn": _HeadInput((4, 8, 16, 32), 2, ("fpn_hidden_size",)),
    "detr": _HeadInput((), 0, ("d_model",)),
    "deformable-detr": _HeadInput((8, 16, 32), 1, ("d_model",)),
}


def build_dense_model(
    source: Source,
    head: str,
    label_names: Sequence[str],
    *,
    image_size: tuple[int, int] | None = None,
    width: int | None = None,
    use_masks: bool = True,
    backbone_dropout: float | None = None,
    drop_path: float | None = None,
    **fields: Any,
) -> tuple[PreTrainedModel, Any]:
    """Build a model in float32 with a head, and its image processor.

    The head is new, unless the source is a checkpoint with this head: then its weights are used, except for those that
    depend on the classes if the classes differ. A head that reads maps of several strides gets them from a plain, axial
    or local backbone by ViTDet's pyramid (arXiv 2203.16527), from a hybrid by the stages of its stem and its last
    block, and from a ResNet by its stages.

    Args:
        source: from `find_model`; the weights of a checkpoint are used in the backbone.
        head: a key of `hf_vit.families.DENSE_HEADS`.
        label_names: the classes, in the order of their numbers.
        image_size: (height, width) px; None keeps the source's, as it does for the rates.
        width: channels of the head and of the pyramid; None is the checkpoint's or the default of the head's library.
        use_masks: for "mask-rcnn": whether it has a branch for masks.
        **fields: fields of the head's configuration.

    Raises:
        UserError: the head is unknown, lacks one of the fields, or does not work with this source.
    """
    kind = DENSE_HEADS.get(head)
    if kind is None:
        raise UserError(f"--head {head} is unknown; choose one of {', '.join(DENSE_HEADS)}")
    checkpoint = load_dense_model(source) if source.dense_head is kind else None
    backbone_fields = {} if checkpoint is not None else _make_map_fields(source, head)
    has_pyramid = hasattr(source.config, "use_feature_pyramid") and not isinstance(source.config, HfHybridViTConfig)
    if width is not None and has_pyramid:
        backbone_fields["fpn_hidden_size"] = width
    rates = {"dropout": backbone_dropout, "drop_path": drop_path}
    backbone: Any = build_model(source, "backbone", image_size=image_size, **rates, **backbone_fields)
    stored_fields = {} if checkpoint is None else checkpoint.config.to_dict()
    head_fields = _make_head_fields(head, backbone, use_masks)
    for name in head_fields.keys() & stored_fields.keys() - {"use_masks"}:  # a checkpoint keeps its other fields
        del head_fields[name]
    changes = dict.fromkeys(_HEADS[head].width_fields if width else (), width) | head_fields | fields
    unknown_fields = sorted(set(changes) - set(kind.config_class().to_dict()))
    if unknown_fields:
        raise UserError(
            f"the recipe sets {', '.join(unknown_fields)}, which the head '{head}' does not have; choose another "
            "--recipe or --head"
        )
    names = {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
    try:
        config_class: Any = kind.config_class
        config = config_class.from_dict(
            {**stored_fields, "backbone_config": backbone.config.to_dict(), **names, **changes}
        )
        model = getattr(transformers, kind.auto_class).from_config(config, dtype=torch.float32)
    except (StrictDataclassError, ValueError) as error:
        reason = get_strict_reason(error) if isinstance(error, StrictDataclassError) else error
        raise UserError(f"{source.name} cannot be the backbone of the head '{head}': {reason}") from error
    if checkpoint is not None:
        _load_head(model, checkpoint, source.name)
    _load_backbone(model, backbone)
    return model, _make_processor(kind, source, backbone.config)


def make_model_inputs(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a collator's batch to the arguments of the model's forward, with labels in the format of its loss.

    The batch has "pixel_values" [B, C, H, W] and possibly "labels": class maps [B, H, W] with 255 for ignored pixels,
    or per image a dictionary of "boxes" [n, 4] (x1, y1, x2, y2 in px), "class_labels" [n] and possibly "masks" and
    "iscrowd" [n]. DETRs do not learn crowds.
    """
    pixel_values = batch["pixel_values"]
    labels = batch.get("labels")
    if labels is None:
        return {"pixel_values": pixel_values}
    config: Any = model.config
    model_type = config.model_type
    if model_type == DENSE_HEADS["mask2former"].model_type:
        masks, classes = _list_class_masks(labels, config.ignore_value)
        return {"pixel_values": pixel_values, "mask_labels": masks, "class_labels": classes}
    if model_type in (DENSE_HEADS["detr"].model_type, DENSE_HEADS["deformable-detr"].model_type):
        height, width = pixel_values.shape[2:]
        scale = torch.tensor([width, height, width, height], device=pixel_values.device)
        return {"pixel_values": pixel_values, "labels": [_make_detr_targets(image, scale) for image in labels]}
    return {"pixel_values": pixel_values, "labels": labels}


def _list_class_masks(class_maps: Any, ignored: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return for every class map [H, W] a mask of 0 and 1 per class in it, [n, H, W], and these classes, [n]."""
    masks, classes = [], []
    for class_map in class_maps:
        numbers = class_map.unique()
        present = numbers[numbers != ignored]
        classes.append(present)
        masks.append((class_map[None] == present[:, None, None]).float())
    return masks, classes


def _make_detr_targets(image: Mapping[str, torch.Tensor], scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an image's objects without crowds; their boxes are (center x, center y, width, height) / scale [4]."""
    not_crowd = image["iscrowd"] == 0 if "iscrowd" in image else slice(None)
    boxes = box_convert(image["boxes"][not_crowd], "xyxy", "cxcywh") / scale
    return {"class_labels": image["class_labels"][not_crowd], "boxes": boxes}


def _make_map_fields(source: Source, head: str) -> dict[str, Any]:
    """Return the backbone's fields for the maps that a head reads; raise `UserError` if it makes too few."""
    config: HfBaseConfig = source.config
    strides = _HEADS[head].strides
    if isinstance(config, HfResNetBaseConfig):
        stages = _find_stages(config, strides) or range(1, len(config.stage_depths) + 1)
        _require_maps(source, head, len(stages))
        reads_several = bool(strides) or head == "linear"  # the linear head, which has no strides, reads all stages
        # None stands for the last stage alone.
        return {"out_features": [f"stage{stage}" for stage in stages] if reads_several else None}
    if isinstance(config, HfMixerConfig):
        _require_maps(source, head, 1)
        return {"out_features": None}
    fields: dict[str, Any] = {"out_features": None, "reshape_hidden_states": True, "apply_layernorm": True}
    if isinstance(config, HfHybridViTConfig):
        stages = _find_stages(config, strides)
        _require_maps(source, head, len(stages) + 1)  # one more is the map of the last block
        return {**fields, "use_feature_pyramid": False, "stem_stages": tuple(stages)}
    if strides:
        return {**fields, "use_feature_pyramid": True, "pyramid_strides": strides}
    return {**fields, "use_feature_pyramid": False}


def _find_stages(config: HfResNetBaseConfig | HfHybridViTConfig, strides: Sequence[int]) -> list[int]:
    """Return the stages 1, 2, ... of a ResNet or a hybrid's stem that have one of these strides in px."""
    # The first map has a stride of 4 px, and each stage halves the map of the one before.
    return [stage for stage in range(1, len(config.stage_depths) + 1) if 4 * 2 ** (stage - 1) in strides]


def _require_maps(source: Source, head: str, maps: int) -> None:
    """Raise a `UserError` if the head needs more maps than the backbone makes."""
    min_maps = _HEADS[head].min_maps
    if maps < min_maps:
        raise UserError(
            f"the head '{head}' needs {min_maps} feature maps of different strides, but {source.name} "
            f"makes {maps}; choose another --head, such as linear or detr"
        )


def _make_head_fields(head: str, backbone: Any, use_masks: bool) -> dict[str, Any]:
    """Return the fields of the head's configuration that depend on the backbone's maps."""
    strides = backbone.strides
    # One anchor size per map, eight times its stride as in torchvision; maps of equal stride get different sizes too.
    sizes = [8 * strides[0] * 2**index for index in range(len(strides))]
    fields: dict[str, dict[str, Any]] = {
        # Without a last norm: ResNets and Mixers, whose config has no such field, and some ViTs (PE-spatial).
        "linear": {"use_norm": getattr(backbone.config, "norm_after_pooling", None) is None},
        "upernet": {"use_auxiliary_head": len(strides) > 2},
        "mask2former": {"feature_strides": strides},
        "mask-rcnn": {"use_masks": use_masks, "anchor_sizes": sizes},
        "detr": {"num_channels": backbone.config.num_channels},
    }
    return fields.get(head, {})


def _load_head(model: Any, checkpoint: Any, name: str) -> None:
    """Load the head's weights of a checkpoint, except for those that a model of other classes cannot use."""
    new_state, state = model.state_dict(), checkpoint.state_dict()
    if checkpoint.config.id2label != model.config.id2label:
        # Weights whose shape changes with one more class belong to the classes of the checkpoint.
        more_classes = {**checkpoint.config.to_dict(), "num_labels": checkpoint.config.num_labels + 1}
        larger = type(checkpoint)(type(checkpoint.config).from_dict(more_classes)).state_dict()
        state = {key: value for key, value in state.items() if larger[key].shape == value.shape}
    backbone_path = next(path for path, module in model.named_modules() if isinstance(module, HfBaseBackbone))
    head_state: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if key not in new_state or key.startswith(f"{backbone_path}."):
            continue
        if new_state[key].shape != value.shape:
            raise UserError(
                f"the head of {name} has other sizes ({key}) than the requested one; leave --head-width "
                "out, or choose another --recipe or --head"
            )
        head_state[key] = value
    model.load_state_dict(head_state, strict=False)


def _load_backbone(model: Any, backbone: Any) -> None:
    """Load the weights of a backbone into that of the model."""
    report = find_backbone(model).load_state_dict(backbone.state_dict(), strict=False)
    # DETRs replace batch norms by frozen ones, which do not count batches.
    unmatched = [*report.missing_keys, *(key for key in report.unexpected_keys if "num_batches_tracked" not in key)]
    assert not unmatched, unmatched


def _make_processor(kind: DenseHead, source: Source, config: HfBaseConfig) -> Any:
    """Make the image processor of the class that post-processes the head's outputs, with the backbone's settings."""
    settings = build_processor(source, config).to_dict()
    fields = {name: settings[name] for name in ("size", "image_mean", "image_std", "resample", "do_convert_rgb")}
    # By default DETRs' processors pad images, and Mask2Former's rounds sides up to multiples of 32 px.
    steps = {"size_divisor": 0} if kind.name == "mask2former" else {"do_pad": False} if "detr" in kind.name else {}
    return getattr(transformers, kind.processor)(**fields, **steps)


# Prediction and truth of one image, for a meter.
Pair = tuple[Any, Any]

_MEANS_OF_PIXELS = (DENSE_HEADS["linear"].model_type, DENSE_HEADS["upernet"].model_type)


class DenseTrainer(HfViTTrainer):
    """An `HfViTTrainer` that uses the loss of the model, and evaluates with the meter of a task.

    Several processes divide the batches of an evaluation and add all results, so that each of them has the metrics that
    a single process would have. Images are measured at the size of the model's input.
    """

    def __init__(self, *args: Any, task: "HeadTask", class_names: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.task, self.class_names = task, class_names

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        outputs = self._run(model, inputs)
        # Without pixels transformers' loss is NaN, so it is replaced by 0.
        loss = self._weight_loss(outputs.loss, inputs) if self._count(inputs) else 0 * outputs.logits.sum()
        return (loss, outputs) if return_outputs else loss

    def _run(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return the outputs for a batch, with losses that divide by the objects of an average process."""
        inputs = make_model_inputs(cast(Any, self.bare_model()), batch)
        with (
            patch.object(loss_for_object_detection, "reduce", _sum_objects),
            patch.object(modeling_mask2former, "reduce", _sum_objects),
        ):
            try:
                return model(**inputs)
            except ValueError:
                if all(bool(weight.isfinite().all()) for weight in model.parameters()):
                    raise
                # DETRs refuse boxes that are NaN, before there is a loss.
                step = self.state.global_step
                self._raise_diverged(step + 1, f"NaN or infinite after step {step} (in its boxes")

    def _count(self, batch: dict[str, Any]) -> torch.Tensor | int:
        """Return the number of labeled pixels if the loss is their mean, else the number of images."""
        if cast(Any, self.bare_model()).config.model_type not in _MEANS_OF_PIXELS:
            return len(batch["pixel_values"])
        return (batch["labels"] != IGNORED).sum()

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return the batches of this process; every image is in one process."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = list(BatchSampler(range(len(dataset)), self.args.eval_batch_size, drop_last=False))
        process_batches: Any = batches[self.args.process_index :: self.args.world_size]
        return DataLoader(dataset, batch_sampler=process_batches, collate_fn=self.data_collator)

    def evaluation_loop(self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate as transformers does, with the metrics of the task, and the loss if the model has one."""
        self._meter = self.task.make_meter(len(self.class_names))
        self._losses = list[tuple[float, int]]()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        images_per_round = self.args.eval_batch_size * self.args.world_size
        num_images = len(cast(Any, dataloader.dataset))
        if len(dataloader) * images_per_round < num_images:  # other processes have one more batch
            self._gather([], [])
        weight = sum(count for _, count in self._losses)
        loss = {"loss": sum(loss * count for loss, count in self._losses) / weight} if weight else {}
        prefix = kwargs.get("metric_key_prefix", "eval")
        values = self._meter.values(self.class_names)
        scores = {name: values[name] or 0.0 for name in self.task.metrics}  # None without objects
        metrics = scores | {"score": scores[self.task.metrics[0]]} | loss
        if not math.isfinite(loss.get("loss", 0.0)):
            metrics = dict.fromkeys(metrics, math.nan)  # of maps that are NaN the processors make the first class
        cast(Any, output.metrics).update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add a batch to the meter, and return nothing for transformers' loop to store."""
        network = cast(Any, self.bare_model())
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = self._run(network, batch)
            answers = self.task.pair(outputs, batch, self.processing_class)
        count = int(self._count(batch))
        self._gather([] if outputs.loss is None or not count else [(float(outputs.loss), count)], answers)
        return None, None, None

    def _gather(self, losses: list[tuple[float, int]], answers: Sequence[Pair]) -> None:
        """Add the losses (with the number of items they are means of) and predictions of all processes."""
        self._losses += gather_object(losses)
        for answer, truth in gather_object(list(answers)):
            self._meter.update(answer, truth)


def _sum_objects(count: torch.Tensor) -> torch.Tensor:
    """Return the sum of a number of objects over all processes, which transformers' losses divide by the processes.

    Their own `reduce` returns the mean, so that the losses would grow with the number of processes. In an evaluation,
    where a process may have one batch more, every process counts as much as this one.
    """
    return cast(Any, reduce(count, "sum")) if torch.is_grad_enabled() else count * PartialState().num_processes


# Settings of a recipe that apply to class labels only.
_LABEL_SETTINGS = (
    *("loss", "class_weights", "balanced_sampling", "label_smoothing", "new_head", "head_bias"),
    *("sam_rho", "repeated_augmentation"),
)
_DETECTION_KEYS = ("boxes", "scores", "labels")
# The meter's key -> the key in the labels of a batch.
_TRUTH_KEYS = {"boxes": "boxes", "labels": "class_labels", "iscrowd": "iscrowd"}


class HeadTask(MeasuredTask):
    """Abstract: trains a head of `DENSE_HEADS`, by default the task's first, with `width` channels on a backbone."""

    trainer_class = DenseTrainer
    streams = False
    # Some parameters get no gradient: those of a box head in a batch without objects, the last norm of a BiT always.
    arguments: ClassVar[dict[str, Any]] = {"ddp_find_unused_parameters": True}
    task: ClassVar[DenseTask]  # pyright: ignore[reportIncompatibleVariableOverride] - never None in subclasses

    def __init__(self, head: str | None = None, width: int | None = None) -> None:
        heads = [name for name, kind in DENSE_HEADS.items() if kind.task == self.task]
        self.head = heads[0] if head is None else head
        self.width = width
        if self.head not in heads:
            raise UserError(f"--head {head} does not work for {self.task}; choose one of {', '.join(heads)}")
        if width is not None and width < 1:
            raise UserError(f"--head-width is {width}, but it must be at least 1 channel; choose a positive number")
        self.auto_class = getattr(transformers, DENSE_HEADS[self.head].auto_class)

    @abstractmethod
    def make_meter(self, num_classes: int) -> SegmentationMeter | DetectionMeter:
        """Make the meter of an evaluation."""

    @abstractmethod
    def pair(self, outputs: Any, batch: Mapping[str, Any], processor: Any) -> list[Pair]:
        """Return prediction and truth of every image of a batch for the meter, on the CPU."""

    def protocol(self, data: ImageData) -> str:
        return self.task

    def settings(self) -> dict[str, Any]:
        return {"task": self.task, "head": self.head, "head_width": self.width}

    def check(self, recipe: Recipe) -> None:
        require_metrics()
        # Heads have queries and values of their own, which LoRA would find.
        adapter = {"tune": recipe.tune} if recipe.tune in ("lora", "auto") else {}
        for name, value in (find_active_settings(recipe, _LABEL_SETTINGS) | adapter).items():
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag} ({value}) does not work for {self.task}; leave it out, or choose a recipe for "
                f"{self.task} (hf-vit recipes)"
            )
        refuse_image_only(recipe.augmentation)

    def build(self, start: Start, recipe: Recipe) -> tuple[nn.Module, Any]:
        features = cast(Any, start.data.split("train")).features
        return build_dense_model(
            start.source,
            self.head,
            start.data.label_names,
            image_size=start.image_size,
            width=self.width,
            use_masks=start.data.target == "objects" and "segmentation" in features["objects"],
            backbone_dropout=recipe.dropout,
            drop_path=recipe.drop_path,
            **recipe.architecture,
        )

    def make_transforms(self, run: Run) -> tuple[Any, Any]:
        return dense_transforms(run.processor, self.target, run.recipe.augmentation, run.options.seed)

    def make_collator(self, run: Run) -> Callable[..., Any]:
        return dense_collator

    def describe(self, run: Run) -> str:
        return f"{run.describe()}; {self.task}, head {self.head}"

    def prepare_trainer(self, run: Run) -> dict[str, Any]:
        return {"task": self, "class_names": run.data.label_names, **configure_weights(run)}


@final
class Segmentation(HeadTask):
    """Segmentation: learns a class for every pixel from masks."""

    recipe = "segmentation-small"
    target = "mask"
    task = "segmentation"
    metrics = ("mean_iou", "pixel_accuracy")

    def make_meter(self, num_classes: int) -> SegmentationMeter:
        return SegmentationMeter(num_classes)

    def pair(self, outputs: Any, batch: Mapping[str, Any], processor: Any) -> list[Pair]:
        sizes = [tuple(image.shape[1:]) for image in batch["pixel_values"]]
        maps = processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
        return [(class_map.cpu(), truth.cpu()) for class_map, truth in zip(maps, batch["labels"], strict=True)]


@final
class Detection(HeadTask):
    """Detection: learns boxes, and outlines of the objects if the data have masks and the head a branch for them."""

    recipe = "detection-small"
    target = "objects"
    task = "detection"
    metrics = ("ap", "ap50")

    def make_meter(self, num_classes: int) -> DetectionMeter:
        return DetectionMeter()

    def pair(self, outputs: Any, batch: Mapping[str, Any], processor: Any) -> list[Pair]:
        sizes = [tuple(image.shape[1:]) for image in batch["pixel_values"]]
        predictions = compute_detections(outputs, processor, sizes)
        boxes = [{name: image[name].cpu() for name in _DETECTION_KEYS} for image in predictions]
        labels = batch["labels"]
        truths = [{name: image[key].cpu() for name, key in _TRUTH_KEYS.items() if key in image} for image in labels]
        return list(zip(boxes, truths, strict=True))
