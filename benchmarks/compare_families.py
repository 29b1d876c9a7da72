"""Train small models of the papers' families with one recipe on digits, and compare them with `hf-vit compare`.

Data: the UCI digits (1,257 / 180 / 360 for training, validation and test) stretched from 8x8 to 32x32 px, RGB.

One recipe for all: AdamW, batch 32, weight decay 0.05, cosine after 10% warm-up, random shifts by up to 4 px. Its
learning rate is the only thing that is chosen, model by model: seed 0 trains at each of `RATES`, and the rate that is
better on the VALIDATION images (of equals the lower) is the one of all seeds. The comparison alone evaluates the test
images. ImageGPT learns the next pixel without labels, its rate is chosen by the validation loss of that, and a linear
probe answers for it. All sizes were fixed before any training: the library's smallest model of that name, or its class
made narrow and shallow.

Models are kept in `--models`; what is there and in the record is not made again.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from records import Job, PlannedJob, Records, script_options
from script import vit_sizes
from small_trainings import SIDE, Images, batches, load_images, train_steps
from tables import TABLES, group
from torch import nn
from torch.nn import functional as F

import hf_vit
from hf_vit.comparison import ComparisonSettings, compare
from hf_vit.data import make_processor

RATES, STEPS, SHIFT = (1e-3, 4e-3), 1600, 4
GRAYS, TOKENS_SIDE = 16, 8
NAMES = [str(digit) for digit in range(10)]
LABELS: dict[str, Any] = {"id2label": dict(enumerate(NAMES)), "label2id": {name: int(name) for name in NAMES}}
VIT = vit_sizes(64, 128, image_size=SIDE)

SWIN: dict[str, Any] = {"embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4], "mlp_ratio": 2.0}
# No pooling in the stem: at 32 px its last two stages would be too small for blocks.
HALO: dict[str, Any] = {"width_factor": 0.125, "stem_type": "3x3", "stem_pool": ""}
HALO["self_attn_kwargs"] = {"block_size": 2, "halo_size": 1}
COAT: dict[str, Any] = {"embed_dims": [64] * 4, "serial_depths": [1] * 4, "parallel_depth": 1}
CAIT: dict[str, Any] = {"embed_dim": 64, "depth": 2, "depth_token_only": 1, "num_heads": 4, "mlp_ratio": 2.0}


def build(package: Any, family: str, **fields: Any) -> Callable[[], nn.Module]:
    config, model = (getattr(package, f"{family}{part}") for part in ("Config", "ForImageClassification"))
    return lambda: model(config(**fields, **LABELS))


build_ours = partial(build, hf_vit)
build_transformers = partial(build, transformers)


def build_timm(name: str, **fields: Any) -> Callable[[], nn.Module]:
    import timm

    return lambda: timm.create_model(name, num_classes=len(NAMES), **fields)


def register_small_mixer() -> None:
    """Register timm's MLP-Mixer with 4x4 px patches; its own entry points fix patch size, width and depth."""
    from timm.models import mlp_mixer, register_model

    def mixer_digits(pretrained: bool = False, **fields: Any) -> nn.Module:
        sizes: dict[str, Any] = {"img_size": SIDE, "patch_size": 4, "embed_dim": 64, "num_blocks": 4}
        return mlp_mixer._create_mixer("mixer_s16_224", pretrained, mlp_ratio=(0.5, 2.0), **{**fields, **sizes})

    mixer_digits.__module__ = mlp_mixer.__name__
    register_model(mixer_digits)


def build_image_gpt() -> nn.Module:
    sizes: dict[str, Any] = {"n_positions": TOKENS_SIDE**2, "n_embd": 64, "n_layer": 4, "n_head": 4}
    return transformers.ImageGPTForCausalImageModeling(transformers.ImageGPTConfig(vocab_size=GRAYS + 1, **sizes))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "vit": build_ours("HfViT", patch_size=4, num_hidden_layers=3, **VIT),
    "hybrid": build_ours("HfHybridViT", stage_depths=(1,), stem_width=32, num_hidden_layers=2, **VIT),
    "axial": build_ours("HfAxialViT", patch_size=4, num_hidden_layers=2, **VIT),
    "local": build_ours("HfLocalViT", patch_size=4, num_hidden_layers=3, attention_window=3, **VIT),
    "axial_resnet": build_ours("HfAxialResNet", image_size=SIDE, stage_depths=(1, 1), stem_width=16),
    "bit": build_transformers("Bit", embedding_size=32, hidden_sizes=[64, 128], depths=[1, 1], num_groups=8),
    "swin": build_transformers("Swin", image_size=SIDE, patch_size=4, window_size=4, **SWIN),
    "regnet": build_transformers("RegNet", embedding_size=32, hidden_sizes=[48, 96], depths=[1, 2], groups_width=16),
    "resnet": build_transformers("ResNet", embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"),
    "deit": build_transformers("DeiT", patch_size=4, num_hidden_layers=3, **VIT),
    "cait": build_timm("cait_xxs24_224", img_size=SIDE, patch_size=4, **CAIT),
    "mixer": build_timm("mixer_digits"),
    "coatnet": build_timm("test_coatnet", img_size=SIDE),
    "nfnet": build_timm("test_nfnet"),
    "tresnet": build_timm("tresnet_m", width_factor=0.375, layers=(1, 1, 1, 1)),
    "efficientnet": build_timm("test_efficientnet"),
    "skresnet": build_timm("skresnet18", layers=(1, 1, 1, 1), channels=(32, 64, 64, 64), stem_width=16),
    "halonet": build_timm("halonet26t", **HALO),
    "coat": build_timm("coat_tiny", img_size=SIDE, **COAT),
    "igpt": build_image_gpt,
}
TIMM = ("cait", "mixer", "coatnet", "nfnet", "tresnet", "efficientnet", "skresnet", "halonet", "coat")


def compute_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the digit, or for an ImageGPT of every next pixel."""
    if isinstance(model, transformers.ImageGPTForCausalImageModeling):
        small = F.interpolate(images[:, :1], size=(TOKENS_SIDE, TOKENS_SIDE), mode="bilinear", antialias=True)
        tokens = ((small.flatten(1) + 1) / 2 * (GRAYS - 1)).round().long().clamp(0, GRAYS - 1)
        return model(input_ids=tokens, labels=tokens).loss
    return F.cross_entropy(compute_logits(model, images), labels)


def compute_logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    output = model(images)
    return getattr(output, "logits", output)


def shift_images(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return images shifted by up to `SHIFT` px in both directions, with background at the borders."""
    padded = F.pad(images, (SHIFT,) * 4, value=-1.0)
    offsets = torch.randint(2 * SHIFT + 1, (len(images), 2), generator=generator)
    return torch.stack([image[:, y : y + SIDE, x : x + SIDE] for image, (y, x) in zip(padded, offsets, strict=True)])


def train(model: nn.Module, digits: Images, rate: float, seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = batches(torch.arange(len(digits.labels["train"])), steps, generator)

    def compute_batch_loss(batch: torch.Tensor) -> torch.Tensor:
        images = shift_images(digits.images["train"][batch], generator)
        return compute_loss(model, images, digits.labels["train"][batch])

    train_steps(model, compute_batch_loss, order, steps, rate)


@torch.no_grad()
def evaluate(model: nn.Module, digits: Images) -> float:
    """Return the score that selects the learning rate: validation accuracy, or minus the loss of the next pixel."""
    images, labels = digits.images["validation"], digits.labels["validation"]
    if isinstance(model, transformers.ImageGPTForCausalImageModeling):
        return -float(compute_loss(model.eval(), images, labels))
    return float((compute_logits(model.eval(), images).argmax(-1) == labels).float().mean())


def save(model: Any, folder: Path, family: str) -> None:
    """Save a model as its library does, with the image processor of its training."""
    if family in TIMM:
        from timm.models._hub import save_for_hf

        config = {"input_size": (3, SIDE, SIDE), "crop_pct": 1.0, "mean": (0.5,) * 3, "std": (0.5,) * 3}
        architecture: dict[str, Any] = {"architecture": "mixer_digits"} if family == "mixer" else {}
        # CoaT's blocks share what tells positions apart; safetensors wants a copy for each.
        model.register_state_dict_post_hook(
            lambda _, state, *__: state.update({name: value.clone() for name, value in state.items()})
        )
        names = {"label_names": NAMES, "pretrained_cfg": {"interpolation": "bilinear", **architecture}}
        save_for_hf(model, str(folder), model_config=names, safe_serialization=True, data_config=config)
        return
    model.save_pretrained(folder)
    if family == "igpt":
        grays = torch.linspace(-1, 1, GRAYS)[:, None].repeat(1, 3)
        size = {"height": TOKENS_SIDE, "width": TOKENS_SIDE}
        transformers.ImageGPTImageProcessor(clusters=grays.tolist(), size=size).save_pretrained(folder)
    else:
        size = type("Size", (), {"image_size": SIDE, "num_channels": 3})
        make_processor(size).save_pretrained(folder)


def list_jobs(seeds: int, steps: int) -> Iterator[PlannedJob]:
    """Iterate over the trials of rates, the other seeds' trainings at the better rate, and every seed's comparison."""

    def runs(family: str, seed: int) -> list[Job]:
        same = {"family": family, "seed": seed, "steps": steps}
        return [{"kind": "run", **same}] if seed else [{"kind": "trial", **same, "rate": rate} for rate in RATES]

    for seed in range(seeds):
        for family in FAMILIES:
            yield from ((run, runs(family, 0) if seed else ()) for run in runs(family, seed))
    for seed in range(seeds):
        prerequisites = [run for family in FAMILIES for run in runs(family, seed)]
        yield {"kind": "comparison", "seed": seed, "steps": steps}, prerequisites


def find_best_runs(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return family -> the first of its runs that is best on the validation images."""
    return {family: max(own, key=lambda run: run["validation"]) for family, own in group(runs, "family").items()}


def model_folder(root: Path, run: dict[str, Any]) -> Path:
    return root / f"seed-{run['seed']}" / f"rate-{run['rate']:g}" / run["family"]


def carry_out(options: argparse.Namespace, job: Job, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Train one model and keep it, or compare all of a seed."""
    if job["kind"] == "comparison":
        folders = {family: model_folder(options.models, run) for family, run in find_best_runs(runs).items()}
        return compare_models(options, job["seed"], folders)
    run = job if "rate" in job else job | {"rate": find_best_runs(runs)[job["family"]]["rate"]}
    torch.manual_seed(run["seed"])
    digits, model = load_images("digits"), FAMILIES[run["family"]]()
    train(model.train(), digits, run["rate"], run["seed"], run["steps"])
    save(model, model_folder(options.models, run), run["family"])
    return {"rate": run["rate"], "validation": round(evaluate(model, digits), 4)}


def compare_models(options: argparse.Namespace, seed: int, folders: dict[str, Path]) -> dict[str, Any]:
    """Return the comparison of a seed's models, of the first seed with speed."""
    output = options.models / f"comparison-{seed}"
    sources = [f"timm:{folder}" if family in TIMM else str(folder) for family, folder in folders.items()]
    settings = ComparisonSettings(robustness_images=None, speed_turns=0 if seed else options.turns)
    arguments: dict[str, Any] = {"probe": True, "image_size": (SIDE, SIDE), "progress": False, "report": print}
    compare(sources, "digits", output, settings=settings, **arguments)
    if seed == 0:
        shutil.copyfile(output / "comparison.png", options.output.with_suffix(".png"))
    return json.loads((output / "comparison.json").read_text())


def main() -> None:
    parser = script_options(__doc__, "compare_families.jsonl")
    parser.add_argument("--models", type=Path, default=Path("out/families"), help="where the trained models are kept")
    parser.add_argument("--seeds", type=int, default=2, help="of weights and order")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every training")
    parser.add_argument("--turns", type=int, default=0, help="in which every model's speed is measured")
    options = parser.parse_args()
    register_small_mixer()

    def has_files(job: Job) -> bool:
        folders = options.models.glob(f"seed-{job['seed']}/rate-{job.get('rate', '*')}/{job.get('family')}")
        return job["kind"] == "comparison" or any(folders)

    planned_jobs = list(list_jobs(options.seeds, options.steps))
    Records(options.output).work(planned_jobs, partial(carry_out, options), has_files=has_files)
    print(TABLES["compare_families"](options.output))


if __name__ == "__main__":
    main()
