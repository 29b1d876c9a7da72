"""The classification loss of all families: hard, soft and multi-label targets, exact under gradient accumulation."""

import torch
from torch.nn import functional as F
from transformers.configuration_utils import PreTrainedConfig


def classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Mean loss over the batch, or over `num_items_in_batch` of all accumulated batches.

    Args:
        logits: [B, K].
        labels: [B] or [B, 1] int: cross-entropy (-100 is ignored); [B, K]: soft cross-entropy of probabilities, or
            binary cross-entropy if `problem_type` is "multi_label_classification", summed over classes as in the
            original code (transformers' models take their mean); K = 1 or "regression": squared error.
        num_items_in_batch: label elements of the accumulated batches, as transformers' Trainer counts them.

    Raises:
        ValueError: labels and logits do not fit each other, or soft labels are no probabilities.
    """
    if not isinstance(labels, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"labels are {type(labels).__name__}; give a tensor: class indices [B], or targets [B, K]")
    labels = labels.to(logits.device)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if problem_type is None and logits.shape[1] == 1:
        problem_type = "regression"
    one_an_image, one_a_logit = labels.shape == logits.shape[:1], labels.shape == logits.shape
    indices = labels.shape in (logits.shape[:1], (len(logits), 1)) and not labels.is_floating_point()
    if problem_type == "regression" and (one_a_logit or (one_an_image and logits.shape[1] == 1)):
        each = ((wide - labels.to(wide.dtype).view_as(wide)) ** 2).mean(dim=1)
    elif problem_type == "multi_label_classification" and one_a_logit:
        each = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none").sum(dim=1)
    elif problem_type in (None, "single_label_classification") and one_a_logit:
        _check_probabilities(labels)
        each = F.cross_entropy(wide, labels.to(wide.dtype), reduction="none")
    elif problem_type in (None, "single_label_classification") and indices:
        labels = labels.flatten().long()
        _check_indices(labels, logits.shape[1])
        each = F.cross_entropy(wide, labels, reduction="none")
        if num_items_in_batch is None:
            return each.sum() / (labels != -100).sum().clamp(min=1)
    else:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and {labels.dtype} for logits {tuple(logits.shape)} and "
            f"problem_type={problem_type}; give class indices [B], or probabilities or targets [B, K]"
        )
    if num_items_in_batch is None:
        return each.mean()
    return each.sum() * labels[0].numel() / num_items_in_batch


def _are_seen(labels: torch.Tensor) -> bool:
    """Whether Python can look at values: a graph cannot, nor one image of those that `torch.func` maps over."""
    return not torch.compiler.is_compiling() and torch.func.debug_unwrap(labels) is labels


def _check_probabilities(labels: torch.Tensor) -> None:
    if not _are_seen(labels):
        return
    sums = labels.sum(dim=1, dtype=torch.float32)
    if bool(((sums - 1).abs() > 1e-2).any()):
        raise ValueError(
            f"labels [B, K] have rows that sum to {sums.min():.3g} ... {sums.max():.3g}, so they are not "
            "probabilities; set problem_type='multi_label_classification' in the config for multi-label "
            "images"
        )


def _check_indices(labels: torch.Tensor, num_labels: int) -> None:
    if labels.device.type != "cpu" or not _are_seen(labels):  # GPUs tell it themselves
        return
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_labels))]
    if len(wrong):
        raise ValueError(f"labels hold {int(wrong[0])}; with {num_labels} classes they run from 0 to {num_labels - 1}")


def classifier_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    config: PreTrainedConfig,
    num_items_in_batch: torch.Tensor | int | None,
) -> torch.Tensor | None:
    """`classification_loss` of a classifier with this configuration; None without labels.

    Raises:
        ValueError: there is no head; see also `classification_loss`.
    """
    if labels is None:
        return None
    if not config.num_labels:
        raise ValueError("labels were given to a model with num_labels=0, which has no head; set num_labels")
    return classification_loss(logits, labels, config.problem_type, num_items_in_batch)
