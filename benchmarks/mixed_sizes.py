"""Compare images of mixed sizes in one sequence (`without_padding`) with the padded batch.

Heights and widths are drawn evenly between the two sides (px, whole patches), random weights. Both get the same padded
pixels and mask, so that the ratio is that of the model alone, as loaded and optimized. The third contestant runs every
image by itself. The largest difference of its logits to the others is printed, in parts of the largest logit.
"""

from functools import partial
from typing import Any

import torch
from script import Script, parser

from hf_vit import optimize_for_inference
from hf_vit.inference.mixed_sizes import without_padding
from hf_vit.speed.measuring import compute_quartiles, compute_speed_ratio, take_turns
from hf_vit.speed.peers import Shape, build

VARIANT, SIDES, BATCH = "B/16", (128, 384), 8  # px; images of a forward pass


def pad_batch(grids: list[tuple[int, int]], patch: int) -> dict[str, torch.Tensor]:
    height, width = (max(grid[axis] for grid in grids) for axis in (0, 1))
    mask = torch.zeros(len(grids), height, width, dtype=torch.int64)
    for number, (h, w) in enumerate(grids):
        mask[number, :h, :w] = 1
    pixels = torch.randn(len(grids), 3, height * patch, width * patch, generator=torch.Generator().manual_seed(1))
    pixel_mask = mask.repeat_interleave(patch, 1).repeat_interleave(patch, 2)[:, None]
    return {"pixel_values": pixels * pixel_mask, "patch_attention_mask": mask}


@torch.inference_mode()
def compute_logits(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([model(**batch).logits for batch in batches])


def main() -> None:
    options = parser(__doc__, turns=9)
    options.add_argument("--images", type=int, default=64)
    report = Script(options.parse_args())
    settings = report.options
    built: Any = build("hf_vit", Shape(VARIANT))
    model: Any = getattr(built, "model", built).eval()
    torch.nn.init.normal_(model.classifier.weight)
    patch = model.config.patch_stride[0]
    low, high = (side // patch for side in SIDES)
    generator = torch.Generator().manual_seed(0)
    grids = torch.randint(low, high + 1, (settings.images, 2), generator=generator).tolist()
    batches = [pad_batch(grids[start : start + BATCH], patch) for start in range(0, len(grids), BATCH)]
    alone = [pad_batch([grid], patch) for grid in grids]
    for number, image_batch in enumerate(alone):
        h, w = grids[number]
        pixels = batches[number // BATCH]["pixel_values"][number % BATCH]
        image_batch["pixel_values"] = pixels[None, :, : h * patch, : w * patch]
    places = torch.cat([batch["patch_attention_mask"].flatten().double() for batch in batches])  # 1 where a patch is
    for form in ("as loaded", "optimized"):
        model = model if form == "as loaded" else optimize_for_inference(model, engine="torch")
        unpadded = without_padding(model)
        contestants = {
            "without padding": partial(compute_logits, unpadded, batches),
            "padded": partial(compute_logits, model, batches),
            "one by one": partial(compute_logits, model, alone),
        }
        expected = compute_logits(model, alone)
        difference = float((compute_logits(unpadded, batches) - expected).abs().max() / expected.abs().max())
        seconds = take_turns(contestants, settings.turns, warm_up=1)
        report.record(
            model=f"{VARIANT}, {form}",
            times_as_fast_as_padded=compute_speed_ratio(seconds, "without padding", "padded"),
            times_as_fast_as_one_by_one=compute_speed_ratio(seconds, "without padding", "one by one"),
            images_per_second=round(settings.images / compute_quartiles(seconds["without padding"]).median, 2),
            patches_of_padded_batch=round(float(places.mean()), 3),
            largest_difference=difference,
        )
    report.finish(sides_px=list(SIDES), images=settings.images, batch=BATCH)


if __name__ == "__main__":
    main()
