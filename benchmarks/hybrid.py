"""R26+S/32 beside timm's, in inference: how many times as fast, in float32 and bfloat16, one image and eight.

    python benchmarks/hybrid.py [--turns 30] [--threads N] [--output benchmarks/results/hybrid.json]

Both are built with random weights at 224 px and used as a user would (eval, inference mode). timm standardises its
kernels at every forward; ours keeps them while the weights stay the same.
"""

import timm
import torch

from hf_vit import HfHybridViTForImageClassification
from hf_vit.speed.measuring import quartiles, speed_ratio, take_turns
from hf_vit.speed.script import Script, parser
from hf_vit.variants import variant_config


def main() -> None:
    options = parser(__doc__, turns=30)
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    report = Script(options.parse_args())
    torch.manual_seed(0)
    ours = HfHybridViTForImageClassification(variant_config("R26+S/32", num_labels=1000)).eval()
    theirs = timm.create_model("vit_small_r26_s32_224", pretrained=False).eval()
    for dtype in report.options.dtypes:
        ours, theirs = ours.to(getattr(torch, dtype)), theirs.to(getattr(torch, dtype))
        for batch in report.options.batches:
            images = torch.randn(batch, 3, 224, 224, dtype=getattr(torch, dtype))
            with torch.inference_mode():
                seconds = take_turns(
                    {"hf_vit": lambda: ours(images), "timm": lambda: theirs(images)},  # noqa: B023 (called at once)
                    report.options.turns,
                )
            report.add(
                dtype=dtype,
                batch=batch,
                times_as_fast=speed_ratio(seconds, "hf_vit", "timm"),
                images_per_second=round(batch / quartiles(seconds["hf_vit"]).median, 1),
            )
    report.finish()


if __name__ == "__main__":
    main()
