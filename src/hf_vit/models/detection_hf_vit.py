"""Define object detection: torchvision's Mask R-CNN, and transformers' DETR and Deformable DETR, on the package's
backbones.

Legend: B batch, C channels, H x W px, n objects.
Sources: Mask R-CNN: arXiv 1703.06870, on a plain backbone as in ViTDet (2203.16527); feature pyramid: 1612.03144;
DETR: 2005.12872; Deformable DETR: 2010.04159.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoBackbone,
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    DetrConfig,
    DetrForObjectDetection,
)
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput, can_return_tuple

from .dense_hf_vit import HfDenseConfig, HfDenseMixin


@strict
class HfMaskRCNNConfig(HfDenseConfig):
    """Configuration of `HfMaskRCNNForObjectDetection`; the defaults are torchvision's.

    Args:
        backbone_config: configuration of one of the package's backbones, which must return several maps.
        use_masks: whether the model predicts masks; without them it is Faster R-CNN.
        fpn_hidden_size: channels of the feature pyramid on maps with different channels (ResNets', the hybrid's stem);
            maps with equal channels, as those of `use_feature_pyramid`, are used as they are.
        anchor_sizes: side of the anchors in px, one for each map.
        anchor_ratios: height over width of the anchors.
        representation_size: width of the two dense layers of the box head.
        mask_channels: channels of each convolution of the mask head.
        rpn_pre_nms_top_n, rpn_post_nms_top_n: proposals per image before and after suppression, (training, testing).
        rpn_batch_size, box_batch_size: anchors and proposals per image that the losses use.
        box_score_threshold, box_nms_threshold, detections_per_image: filters of the detected boxes.
    """

    model_type = "hf_mask_rcnn"

    backbone_config: Any = None
    use_masks: bool = True
    fpn_hidden_size: int = 256
    anchor_sizes: tuple[int, ...] | list[int] = (32, 64, 128, 256)
    anchor_ratios: tuple[float, ...] | list[float] = (0.5, 1.0, 2.0)
    representation_size: int = 1024
    mask_channels: tuple[int, ...] | list[int] = (256, 256, 256, 256)
    rpn_pre_nms_top_n: tuple[int, int] | list[int] = (2000, 1000)
    rpn_post_nms_top_n: tuple[int, int] | list[int] = (2000, 1000)
    rpn_batch_size: int = 256
    box_batch_size: int = 512
    box_score_threshold: float = 0.05
    box_nms_threshold: float = 0.5
    detections_per_image: int = 100


@dataclass
class HfMaskRCNNOutput(ModelOutput):
    """Output of Mask R-CNN.

    Attributes:
        loss: in training, the sum of `loss_dict`.
        loss_dict: in training, torchvision's losses by name.
        detections: otherwise, for every image: boxes [n, 4] (x1, y1, x2, y2 in px), labels [n], scores [n], the best
            first, and with `use_masks` masks [n, 1, H, W] between 0 and 1.
    """

    loss: torch.Tensor | None = None
    loss_dict: dict[str, torch.Tensor] | None = None
    detections: list[dict[str, torch.Tensor]] | None = None


class HfMaskRCNNForObjectDetection(HfDenseMixin, PreTrainedModel):
    """torchvision's Mask R-CNN on one of the package's backbones; images must be resized and normalized already."""

    config: Any
    config_class = HfMaskRCNNConfig
    _auto_class = "AutoModelForObjectDetection"
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["rpn", "roi_heads"]  # torchvision has no bfloat16 for boxes

    def __init__(self, config: HfMaskRCNNConfig) -> None:
        super().__init__(config)
        from torchvision.ops import FeaturePyramidNetwork

        self.backbone: Any = AutoBackbone.from_config(config.backbone_config)
        channels = self.backbone.channels
        if len(config.anchor_sizes) != len(channels):
            raise ValueError(
                f"anchor_sizes={tuple(config.anchor_sizes)} has {len(config.anchor_sizes)} sizes, but the backbone "
                f"returns {len(channels)} maps; give one size for each map"
            )
        height, width = self.backbone.config.patch_stride
        if height != width or height & (height - 1):  # torchvision would round it, and cut boxes in wrong places
            raise ValueError(
                f"Mask R-CNN needs square patches whose side is a power of two; got {height}x{width} px. Load the "
                "backbone with patch_size=16, which resamples its patch kernel, and save it first"
            )
        has_equal_channels = len(set(channels)) == 1
        self.fpn = None if has_equal_channels else FeaturePyramidNetwork(channels, config.fpn_hidden_size)
        detector = build_detector(config, channels[0] if has_equal_channels else config.fpn_hidden_size)
        self.rpn, self.roi_heads = detector.rpn, detector.roi_heads
        self.rpn.anchor_generator = MapAnchors(self.rpn.anchor_generator, self.backbone.strides)
        self.in_image = detector.transform
        for head in (self.rpn.head, self.roi_heads.box_predictor):
            head.register_forward_hook(_use_dtype_of_weights)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as Detectron2: small weights for all predictions, He's by fan-out for masks, zero biases."""
        if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            module_name = next(name for name, child in self.named_modules() if child is module)
            if module_name.startswith(("rpn.", "roi_heads.box_predictor.cls_score")):
                init.normal_(module.weight, std=0.01)
            elif module_name.endswith(("bbox_pred", "mask_fcn_logits")):
                init.normal_(module.weight, std=0.001)
            elif module_name.startswith("roi_heads.mask"):
                init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            else:
                init.kaiming_uniform_(module.weight, a=1)
            if module.bias is not None:
                init.zeros_(module.bias)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: list[dict[str, torch.Tensor]] | None = None,
        target_sizes: torch.Tensor | list[tuple[int, int]] | None = None,
        **kwargs: Any,
    ) -> HfMaskRCNNOutput:
        """Detect objects; in training, return the losses.

        Args:
            pixel_values: [B, C, H, W].
            labels: for training, for every image: "boxes" [n, 4] (x1, y1, x2, y2 in px of `pixel_values`),
                "class_labels" [n] and, with `use_masks`, "masks" [n, H, W] of 0 and 1. Otherwise ignored.
            target_sizes: (height, width) of every image in px to scale boxes and masks to; default: those of
                `pixel_values`.

        Raises:
            ValueError: training without labels, without masks although `use_masks` is set, or with an empty box; or
                `target_sizes` of another number of images.
        """
        from torchvision.models.detection.image_list import ImageList

        sizes = [(pixel_values.shape[2], pixel_values.shape[3])] * len(pixel_values)
        final_sizes = sizes if target_sizes is None else [(int(height), int(width)) for height, width in target_sizes]
        if len(final_sizes) != len(sizes):
            raise ValueError(f"target_sizes are {len(final_sizes)} for {len(sizes)} images; give one for each image")
        images = ImageList(pixel_values, sizes)
        targets = self.targets(labels) if self.training else None
        maps = self.backbone(pixel_values, return_dict=True, **kwargs).feature_maps
        named_maps = OrderedDict((str(index), feature_map) for index, feature_map in enumerate(maps))
        if self.fpn is not None:
            named_maps = self.fpn(named_maps)
        # Anchors have the dtype of the maps, and the bfloat16 of autocast would round them; see also the hooks.
        dtype = next(self.rpn.parameters()).dtype
        named_maps = OrderedDict((name, values.to(dtype)) for name, values in named_maps.items())
        proposals, losses = self.rpn(images, named_maps, targets)
        detections, box_losses = self.roi_heads(named_maps, proposals, sizes, targets)
        if self.training:
            loss_dict = losses | box_losses
            return HfMaskRCNNOutput(loss=sum(loss_dict.values()), loss_dict=loss_dict)  # pyright: ignore[reportArgumentType]
        detections = self.in_image.postprocess(detections, sizes, final_sizes)
        return HfMaskRCNNOutput(detections=[{**image, "labels": image["labels"] - 1} for image in detections])

    def targets(self, labels: list[dict[str, torch.Tensor]] | None) -> list[dict[str, torch.Tensor]]:
        """Convert labels to torchvision's form, in which class 0 is the background."""
        if labels is None:
            raise ValueError("training needs labels; give the boxes and classes of every image")
        if self.config.use_masks and not all("masks" in image for image in labels):
            raise ValueError("use_masks=True needs labels with masks; give masks, or set use_masks=False")
        boxes = torch.cat([image["boxes"] for image in labels])
        if bool((boxes[:, 2:] <= boxes[:, :2]).any()):
            raise ValueError("labels have a box without width or height, whose loss is infinite; leave such boxes out")
        names = ("boxes", "masks") if self.config.use_masks else ("boxes",)
        return [{"labels": image["class_labels"] + 1, **{name: image[name] for name in names}} for image in labels]


class MapAnchors(nn.Module):
    """Place the anchors of torchvision's generator by the strides (px) of the maps.

    It divides the image's side by the map's, which is too little where the map's last cell reaches beyond the image.
    """

    def __init__(self, generator: Any, strides: list[int]) -> None:
        super().__init__()
        self.generator, self.strides = generator, [(stride, stride) for stride in strides]

    def forward(self, images: Any, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the anchors [n, 4] of every image, those of the first map first."""
        self.generator.set_cell_anchors(maps[0].dtype, maps[0].device)
        anchors = self.generator.grid_anchors([each.shape[2:] for each in maps], self.strides)
        return [torch.cat(anchors)] * len(images.image_sizes)


def _use_dtype_of_weights(head: nn.Module, inputs: Any, outputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return scores and box deltas in the dtype of the weights, as torchvision rounds boxes to that of the deltas."""
    dtype = next(head.parameters()).dtype
    scores, deltas = ([v.to(dtype) for v in value] if isinstance(value, list) else value.to(dtype) for value in outputs)
    return scores, deltas


def build_detector(config: Any, channels: int) -> Any:
    """Build torchvision's Mask R-CNN or Faster R-CNN for maps with `channels` channels; the model
    here uses its parts.
    """
    from torchvision.models.detection import FasterRCNN, MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
    from torchvision.ops import MultiScaleRoIAlign

    backbone: Any = nn.Identity()
    backbone.out_channels = channels
    map_names = [str(index) for index in range(len(config.anchor_sizes))]
    classes = config.num_labels + 1  # class 0 is the background
    ratios = (tuple(config.anchor_ratios),) * len(map_names)
    width = config.representation_size
    options: dict[str, Any] = {
        "rpn_anchor_generator": AnchorGenerator(tuple((size,) for size in config.anchor_sizes), ratios),
        "box_roi_pool": MultiScaleRoIAlign(map_names, output_size=7, sampling_ratio=2),
        "box_head": nn.Sequential(
            nn.Flatten(), nn.Linear(channels * 7 * 7, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        ),
        "box_predictor": FastRCNNPredictor(width, classes),
        "rpn_batch_size_per_image": config.rpn_batch_size,
        "box_batch_size_per_image": config.box_batch_size,
        "box_score_thresh": config.box_score_threshold,
        "box_nms_thresh": config.box_nms_threshold,
        "box_detections_per_img": config.detections_per_image,
    }
    for name in ("rpn_pre_nms_top_n", "rpn_post_nms_top_n"):
        options[f"{name}_train"], options[f"{name}_test"] = getattr(config, name)
    if not config.use_masks:
        return FasterRCNN(backbone, **options)
    mask_head = nn.Sequential()
    mask_width = channels
    for next_width in config.mask_channels:
        mask_head.extend([nn.Conv2d(mask_width, next_width, 3, padding=1), nn.ReLU()])
        mask_width = next_width
    return MaskRCNN(
        backbone,
        **options,
        mask_roi_pool=MultiScaleRoIAlign(map_names, output_size=14, sampling_ratio=2),
        mask_head=mask_head,
        mask_predictor=MaskRCNNPredictor(mask_width, mask_width, classes),
    )


class HfDetrMixin(HfDenseMixin):
    """Abstract: a DETR whose backbone trains.

    transformers freezes backbones whose stages lack the names of its own ResNet; this undoes it. Under autocast boxes
    are computed in the dtype of the weights.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        self.model.backbone.model.requires_grad_(True)  # pyright: ignore[reportAttributeAccessIssue]
        for name, module in self.named_modules():  # pyright: ignore[reportAttributeAccessIssue]
            if re.search(r"(bbox_predictor|bbox_embed\.\d+|reference_points)$", name):
                module.register_forward_hook(_compute_in_dtype_of_weights)


def _compute_in_dtype_of_weights(head: nn.Module, inputs: Any, boxes: torch.Tensor) -> torch.Tensor:
    """Compute boxes again where autocast rounded them; bfloat16 has steps of 1/256 of the image."""
    dtype = next(layer for layer in head.modules() if isinstance(layer, nn.Linear)).weight.dtype
    if boxes.dtype == dtype:
        return boxes
    with torch.autocast(boxes.device.type, enabled=False):
        return head.forward(inputs[0].to(dtype))


@strict
class HfDetrConfig(HfDenseConfig, DetrConfig):
    """transformers' configuration of DETR with one of the package's backbones."""

    model_type = "hf_detr"


class HfDetrForObjectDetection(HfDetrMixin, DetrForObjectDetection):
    """transformers' DETR on the last map of one of the package's backbones."""

    config: HfDetrConfig
    config_class = HfDetrConfig
    _auto_class = "AutoModelForObjectDetection"


@strict
class HfDeformableDetrConfig(HfDenseConfig, DeformableDetrConfig):
    """transformers' configuration of Deformable DETR with one of the package's backbones."""

    model_type = "hf_deformable_detr"


class HfDeformableDetrForObjectDetection(HfDetrMixin, DeformableDetrForObjectDetection):
    """transformers' Deformable DETR on the maps of one of the package's backbones."""

    config: HfDeformableDetrConfig
    config_class = HfDeformableDetrConfig
    _auto_class = "AutoModelForObjectDetection"
