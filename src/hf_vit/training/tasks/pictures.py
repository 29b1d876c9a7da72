"""Pictures of a pre-training: what was predicted of the patches that were hidden, and where the encoder puts images."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from hf_vit.models.pretraining_hf_vit import image_patches, join_patches
from hf_vit.results.figures import new_figure, save_figure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_NAMED_CLASSES = 20


def draw_predictions(
    images: torch.Tensor, predictions: torch.Tensor, masked: torch.Tensor | None, config: PreTrainedConfig, path: Path
) -> None:
    """One column an image: itself, without the corrupted patches (grey), and with what was predicted in their place.

    Args:
        images, predictions: [B, C, H, W] pixel values.
        masked: [B, h*w]; None (next patch prediction) shows image and prediction alone.
        config: of the model, which has mean and standard deviation.
        path: the PNG file.
    """
    colours = [_colours(values, config) for values in (images, predictions)]
    rows = {"image": colours[0], "prediction": colours[1]}
    if masked is not None:
        grid = config.grid_of(*images.shape[2:])
        given, predicted = (image_patches(values, config.patch_stride) for values in colours)
        hidden = masked[:, :, None, None, None]
        rows = {
            "image": colours[0],
            "not corrupted": join_patches(torch.where(hidden, 0.5, given), grid),
            "predicted": join_patches(torch.where(hidden, predicted, given), grid),
        }
    figure = new_figure(1.4 * len(images) + 0.6, 1.5 * len(rows))
    for row, (name, values) in enumerate(rows.items()):
        for column, image in enumerate(values):
            axes = figure.add_subplot(len(rows), len(images), row * len(images) + column + 1)
            axes.imshow(
                image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest"
            )
            axes.set(xticks=[], yticks=[])
            if column == 0:
                axes.set_ylabel(name)
    save_figure(figure, path)


def draw_embeddings(
    embeddings: "NDArray[np.float32]", labels: Sequence[int], label_names: Sequence[str], path: Path
) -> None:
    """The first two principal components of embeddings [n, D]; colours are the classes, which training did not see."""
    import numpy as np

    centred = embeddings.astype(np.float64) - embeddings.mean(axis=0)
    _, values, axes_of = np.linalg.svd(centred, full_matrices=False)
    places, shares = centred @ axes_of[:2].T, values**2 / max(float((values**2).sum()), 1e-30)
    figure = new_figure(6, 5)
    axes = figure.add_subplot()
    numbers = np.asarray(labels)
    for label, name in enumerate(label_names):
        own = places[numbers == label]
        axes.scatter(own[:, 0], own[:, 1], s=12, label=name, color=f"C{label}" if label < 10 else None)
    axes.set_xlabel(f"first principal component ({shares[0]:.0%} of the variance)")
    axes.set_ylabel(f"second ({shares[1]:.0%})")
    if len(label_names) <= _MAX_NAMED_CLASSES:
        axes.legend(fontsize=7)
    save_figure(figure, path)


def _colours(pixel_values: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """[B, C, H, W] in [0, 1]; of other than 1 or 3 channels the first."""
    mean, std = (pixel_values.new_tensor(given).reshape(-1, 1, 1) for given in (config.image_mean, config.image_std))
    colours = (pixel_values * std + mean).clamp(0, 1)
    return colours if colours.shape[1] in (1, 3) else colours[:, :1]
