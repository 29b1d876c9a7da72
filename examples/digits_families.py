"""A ViT, a Hybrid, an Axial and a Local-ViT of about equal size, trained on the digits: the cards in model_cards/.

    python examples/digits_families.py out/digits [--seed 0] [--epochs N] [--only local-digits]

Writes out/digits/vit-digits, hybrid-digits, axial-digits and local-digits: weights, code, processor, facts.json,
pictures, card. One thread; a few minutes each.
"""

import argparse
from pathlib import Path

import torch

from hf_vit import HfAxialViTConfig, HfHybridViTConfig, HfLocalViTConfig, HfViTConfig
from hf_vit.training import FinetuneOptions, finetune

WIDTHS = {
    "image_size": 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "pooling": "gap",
    "position_embedding": "sincos_2d",
}
# 4x4 tokens each. An axial block holds two halves, each the size of a ViT's block; the hybrid's stem is about one.
CONFIGS = {
    "vit-digits": HfViTConfig(**WIDTHS, patch_size=4, num_hidden_layers=6),
    "hybrid-digits": HfHybridViTConfig(**WIDTHS, stage_depths=(1,), stem_width=32, num_hidden_layers=4),
    "axial-digits": HfAxialViTConfig(**WIDTHS, patch_size=4, num_hidden_layers=3),
    "local-digits": HfLocalViTConfig(**WIDTHS, patch_size=4, num_hidden_layers=6, attention_window=3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--only", choices=CONFIGS, help="this one alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more, and one gives the same digits everywhere
    for name in [arguments.only] if arguments.only else CONFIGS:
        result = finetune(
            CONFIGS[name],
            "digits",
            arguments.output / name,
            recipe="digits",
            options=FinetuneOptions(seed=arguments.seed, device="cpu", precision="fp32"),
            report=print,
            epochs=arguments.epochs,
        )
        print(f"{name}: test accuracy {result.test.top1:.2%} of {result.test.num_images} images")


if __name__ == "__main__":
    main()
