"""A pre-training step beside the supervised step of the same model and batch: forward, backward, clipped AdamW step.

    python benchmarks/pretraining_cost.py [--turns 9] [--threads N] [--output benchmarks/results/pretraining_cost.json]

The masks are drawn within the step. "cost" is the ratio of the two steps' times, paired by turns; the aim is at most
1.15 for patch prediction. A contrastive step sees every image twice and its momentum encoder too: its batch is halved,
so that the learning encoder sees as many images as the supervised one's.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModel, AutoModelForImageClassification, AutoModelForMaskedImageModeling

from hf_vit import variant_config
from hf_vit.speed.measuring import speed_ratio, take_turns
from hf_vit.speed.script import Script, parser
from hf_vit.training.tasks.masking import NextPatch, RandomMasking
from hf_vit.training.tasks.momentum_contrast import MomentumContrast

# Variant, batch, objective, fields of the configuration.
ROWS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("Ti/16", 8, "masked", {}),
    ("S/16", 4, "masked", {}),
    ("S/16", 4, "masked", {"prediction_target": "downsampled"}),
    ("S/16", 4, "masked", {"prediction_target": "pixels"}),
    ("S/16", 4, "next", {"is_causal": True, "predict_next_patch": True}),
    ("Axial-Ti/16", 4, "masked", {}),
    ("R+Ti/16", 8, "masked", {}),
    ("Ti/16", 8, "contrast", {}),
)


def step_of(model: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()

    return step


def steps(variant: str, batch: int, objective: str, fields: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """The supervised and the pre-training step."""
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, 224, 224), torch.arange(batch)
    causal = {"is_causal": fields.get("is_causal", False)}
    supervised = AutoModelForImageClassification.from_config(variant_config(variant, num_labels=1000, **causal)).train()
    config = variant_config(variant, **fields)
    h, w = config.grid
    if objective == "contrast":
        contrast = MomentumContrast(AutoModel.from_config(config)).train()
        views = torch.randn(batch // 2, 2, 3, 224, 224)

        def moved() -> torch.Tensor:
            contrast.update_momentum(0.99)
            return contrast(views)["loss"]

        learning = step_of(contrast, moved)
    else:
        policy = NextPatch() if objective == "next" else RandomMasking()
        model = AutoModelForMaskedImageModeling.from_config(config).train()
        learning = step_of(model, lambda: model(images, *policy.draw(batch, h * w)).loss)
    return {"supervised": step_of(supervised, lambda: supervised(images, labels=labels).loss), "pre-training": learning}


def main() -> None:
    report = Script(parser(__doc__, turns=9).parse_args())
    for variant, batch, objective, fields in ROWS:
        seconds = take_turns(steps(variant, batch, objective, fields), report.options.turns)
        report.add(
            model=variant,
            batch=batch,
            objective=objective,
            target=fields.get("prediction_target", "-" if objective == "contrast" else "mean_color"),
            supervised_milliseconds=round(1e3 * sorted(seconds["supervised"])[len(seconds["supervised"]) // 2], 1),
            cost=speed_ratio(seconds, "supervised", "pre-training"),
        )
    report.finish()


if __name__ == "__main__":
    main()
