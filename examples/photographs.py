"""Train a small Axial-ViT on crops of eight photographs, evaluate it, and draw the first picture of the README.

    python examples/photographs.py out/photos [--epochs 100] [--picture docs/images/photographs.jpg]

The photographs come with scikit-image; nothing is downloaded. Three minutes on one CPU core.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

import hf_vit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=float, default=100)
    parser.add_argument("--picture", type=Path, help="where to copy the plot of attention and predictions")
    arguments = parser.parse_args()
    model = hf_vit.HfAxialViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=72,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        pooling="gap",
    )
    hf_vit.finetune(model, "photos", arguments.output, recipe="small-data", epochs=arguments.epochs, report=print)
    result = hf_vit.evaluate(arguments.output, "photos").result
    print(f"{result.top1:.1%} of {result.num_images} test photographs")
    if arguments.picture:
        draw(arguments.output, arguments.picture)


def draw(model: Path, picture: Path, number: int = 6) -> None:
    """Draw test images, the predicted class of each, and where the attention behind it comes from."""
    run = hf_vit.analyze(model, "photos", only=["attention_rollout"], num_images=number, num_pictures=number)
    images = [run.images.read(index) for index in range(number)]
    processor = AutoImageProcessor.from_pretrained(model)
    classifier = AutoModelForImageClassification.from_pretrained(model)
    with torch.inference_mode():
        shares = classifier(**processor(images, return_tensors="pt")).logits.softmax(-1)
    figure, axes = plt.subplots(2, number, figsize=(1.6 * number, 3.6), layout="constrained")
    for column, (share, rollout) in enumerate(zip(shares, run["attention_rollout"]["rollout"], strict=True)):
        label = classifier.config.id2label[share.argmax().item()]
        axes[0, column].set_title(f"{label} {share.max():.0%}", fontsize=11)
        width, height = images[column].size
        for row in range(2):
            axes[row, column].imshow(images[column])
            axes[row, column].set_axis_off()
        axes[1, column].imshow(
            rollout, cmap="inferno", alpha=0.6, extent=(0, width, height, 0), interpolation="bilinear"
        )
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()
