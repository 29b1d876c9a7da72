"""Shape or texture? A synthetic set where both tell the class, and what models follow where the two disagree.

It is a toy, and shows nothing about photographs. Four classes of images: a shape at a random place and size, filled
with the texture of its class (which is whose turns with the seed), brighter or darker than a plain gray ground.
Training images always agree in shape and texture. Afterwards each model is shown cue conflicts (arXiv 1811.12231: the
shape of one class with the texture of another), shapes filled with plain gray, and textures that fill the whole image.

A ViT, a Hybrid and an Axial, and three ways to vary the training images: not at all; crops of 20 to 100% of the area
(which hide the outline); blur and noise (which hide the texture). The learning rate and the strengths of texture, blur
and noise were set in a few trials with one ViT.
"""

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import Job, Records, read, script_options
from script import count_parameters, save_with_processor, vit_sizes
from small_trainings import SIDE, train_steps
from tables import TABLES, group
from torch.nn import functional as F
from torchvision.transforms.v2 import RandomResizedCrop

import hf_vit
from hf_vit.analysis.shape_bias import compute_shape_share, count_decisions
from hf_vit.results.figures import make_figure, save_figure

CLASSES = ("disc", "square", "triangle", "cross")
SEEDS = (0, 1, 2)
STEPS, EXAMPLE_STEPS, BATCH, RATE = 3200, 400, 32, 1e-3
EXAMPLES = 500  # training images a class
LEVEL, CONTRAST = 0.3, 0.35  # a shape against the ground, and its texture's amplitude; an image runs from 0 to 1
SIZES: dict[str, Any] = vit_sizes(
    64, 128, image_size=SIDE, num_labels=len(CLASSES), pooling="gap", position_embedding="learned"
)
# About equal in size, with 4x4 tokens each, which makes a run a matter of seconds. An axial block holds two halves,
# each the size of a ViT's block; the hybrid's stem is about one.
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "vit": (hf_vit.HfViTConfig, hf_vit.HfViTForImageClassification, {"patch_size": 8, "num_hidden_layers": 4}),
    "hybrid": (hf_vit.HfHybridViTConfig, hf_vit.HfHybridViTForImageClassification,
               {"stage_depths": (1,), "stem_width": 32, "stem_patch_size": 2, "num_hidden_layers": 3}),
    "axial": (hf_vit.HfAxialViTConfig, hf_vit.HfAxialViTForImageClassification,
              {"patch_size": 8, "num_hidden_layers": 2}),
}  # fmt: skip


def is_inside(name: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return where a shape of radius 1 is, for coordinates y, x relative to its center."""
    if name == "disc":
        return y**2 + x**2 < 1
    if name == "square":
        return np.maximum(abs(y), abs(x)) < 0.86
    if name == "triangle":
        return (y < 0.8) & (abs(x) < (y + 1) * 0.58)
    return ((abs(y) < 0.35) | (abs(x) < 0.35)) & (np.maximum(abs(y), abs(x)) < 1)


def texture(kind: int, rows: np.ndarray, columns: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return one of four textures with mean about 0 and values in [-1, 1], at a random phase."""
    y, x = rows + generator.integers(8), columns + generator.integers(8)
    if kind == 0:
        return np.where((y + x) % 6 < 3, 1.0, -1.0)
    if kind == 1:
        return np.where((y // 3 + x // 3) % 2 == 0, 1.0, -1.0)
    if kind == 2:
        return np.where((y % 4 < 2) & (x % 4 < 2), 1.0, -0.33)
    return generator.uniform(-1, 1, y.shape)


def draw(shape: int | None, filling: int | None, seed: int, generator: np.random.Generator) -> np.ndarray:
    """Return an image [32, 32] in [0, 1] with a class's shape (None: whole image) and texture (None: plain)."""
    rows, columns = np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")
    radius = generator.uniform(9, 13)
    centre = generator.uniform(radius, SIDE - radius, 2)
    inside = np.ones((SIDE, SIDE), dtype=bool)
    if shape is not None:
        inside = is_inside(CLASSES[shape], (rows - centre[0]) / radius, (columns - centre[1]) / radius)
    ground = generator.uniform(0.35, 0.65)
    pattern = 0.0 if filling is None else texture((filling + seed) % len(CLASSES), rows, columns, generator)
    level = ground + generator.choice([-LEVEL, LEVEL])  # so that the outline is seen without the texture too
    return np.where(inside, level + CONTRAST * pattern, ground).clip(0, 1)


def draw_images(pairs: list[tuple[int | None, int | None]], seed: int, stream: int) -> torch.Tensor:
    generator = np.random.default_rng([seed, stream])
    pixels = np.stack([draw(shape, filling, seed, generator) for shape, filling in pairs])
    return torch.from_numpy(pixels * 2 - 1).float()[:, None].expand(-1, 3, -1, -1).contiguous()


crop = RandomResizedCrop(SIDE, scale=(0.2, 1.0), antialias=True)


def blur_and_add_noise(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return images blended by up to 70% with their 5x5 means, with noise of random strength."""
    share, strength = torch.rand(2, len(batch), 1, 1, 1, generator=generator)
    means = F.avg_pool2d(F.pad(batch, (2,) * 4, mode="reflect"), 5, 1)
    noise = torch.randn(len(batch), 1, SIDE, SIDE, generator=generator)
    return batch + 0.7 * share * (means - batch) + 0.2 * strength * noise


VARIATIONS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "none": lambda batch, generator: batch,
    "crops": lambda batch, generator: torch.stack([crop(image) for image in batch]),
    "blur and noise": blur_and_add_noise,
}


def train(family: str, variation: str, seed: int, steps: int) -> torch.nn.Module:
    config_class, model_class, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **fields}))
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(len(CLASSES)).repeat_interleave(EXAMPLES)
    examples = draw_images([(label, label) for label in classes.tolist()], seed, 10)

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        return model(VARIATIONS[variation](examples[batch], generator), labels=classes[batch]).loss

    order = (torch.randint(len(classes), (BATCH,), generator=generator) for _ in range(steps))
    train_steps(model, compute_loss, order, steps, RATE)
    return model.eval()


def list_conflicts(each: int) -> list[tuple[int, int]]:
    """Return (shape, texture) class pairs that differ, every pair `each` times."""
    count = len(CLASSES)
    return [pair for pair in itertools.permutations(range(count), 2) for _ in range(each)]


@torch.no_grad()
def evaluate(model: torch.nn.Module, seed: int) -> dict[str, Any]:
    def predict_classes(pairs: Any, stream: int) -> np.ndarray:
        return model(draw_images(pairs, seed, stream)).logits.argmax(-1).numpy()

    labels = [label for label in range(len(CLASSES)) for _ in range(50)]
    cues = {
        "accuracy": [(value, value) for value in labels],
        "shape_alone": [(value, None) for value in labels],
        "texture_alone": [(None, value) for value in labels],
    }
    pairs = list_conflicts(20)
    counts = count_decisions(predict_classes(pairs, 3), *map(list, zip(*pairs, strict=True)), len(CLASSES))
    totals, results = counts.sum(axis=0), dict[str, Any]()
    for stream, (name, cue) in enumerate(cues.items()):
        results[name] = round(float(np.mean(predict_classes(cue, stream) == labels)), 4)
    by_class = [None if np.isnan(value) else round(float(value), 4) for value in compute_shape_share(counts)]
    return results | {
        "shape_bias": round(float(compute_shape_share(totals)), 4) if totals[:2].any() else None,
        "shape_bias_by_class": by_class,
        "decisions": {"shape": int(totals[0]), "texture": int(totals[1]), "other": int(totals[2])},
    }


def carry_out(job: Job, _: Any) -> dict[str, Any]:
    model = train(**job)
    return evaluate(model, job["seed"]) | {"parameters": count_parameters(model)}


def write_example(folder: Path) -> None:
    """Save a ViT trained without augmentation, and its cue conflicts as files."""
    from torchvision.transforms.v2.functional import to_pil_image

    model: Any = train("vit", "none", 0, EXAMPLE_STEPS)
    model.config.id2label = dict(enumerate(CLASSES))
    model.config.label2id = {name: label for label, name in enumerate(CLASSES)}
    save_with_processor(model, folder / "model")
    pairs = list_conflicts(5)
    for number, (image, (shape, filling)) in enumerate(zip(draw_images(pairs, 0, 3), pairs, strict=True)):
        path = folder / "conflicts" / CLASSES[shape] / f"{CLASSES[shape]}{number}-{CLASSES[filling]}{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        to_pil_image((image + 1) / 2).save(path)
    print(f"hf-vit analyze {folder}/model --cue-conflict {folder}/conflicts --only shape_bias --output {folder}/out")


def draw_biases(path: Path) -> None:
    figure = make_figure(9, 5.4)
    grid = figure.add_gridspec(2, 8, height_ratios=(1, 3))
    examples = [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1), (2, 3), (1, None), (None, 2)]
    for column, (image, pair) in enumerate(zip(draw_images(examples, 0, 9), examples, strict=True)):
        axes = figure.add_subplot(grid[0, column])
        axes.imshow(image[0], cmap="gray", vmin=-1, vmax=1)
        cues = zip(("shape", "texture"), pair, strict=True)
        axes.set_title("\n".join(f"{cue} of {CLASSES[n]}" for cue, n in cues if n is not None), fontsize=6)
        axes.set_axis_off()
    axes = figure.add_subplot(grid[1, :])
    for (family, variation), runs in group(read(path), "family", "variation").items():
        column, offset = list(FAMILIES).index(family), list(VARIATIONS).index(variation)
        x, shares = column + 0.25 * (offset - 1), [line["shape_bias"] for line in runs]
        deviation = statistics.stdev(shares) if len(shares) > 1 else 0
        label = variation if column == 0 else None
        axes.bar(x, statistics.mean(shares), 0.22, yerr=deviation, capsize=3, color=f"C{offset}", label=label)
        axes.scatter([x] * len(runs), shares, s=8, color="black", zorder=3)
    axes.set_xticks(range(len(FAMILIES)), list(FAMILIES))
    axes.set(ylabel="share of shape decisions", ylim=(0, 1), title="cue conflicts of the synthetic set")
    axes.legend(title="training images varied by")
    save_figure(figure, path.with_suffix(".png"))


def main() -> None:
    options = script_options(__doc__, "shape_texture.jsonl")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--example", type=Path, metavar="DIR", help="write a trained model and cue conflicts instead")
    arguments = options.parse_args()
    if arguments.example:
        write_example(arguments.example)
        return
    cells = itertools.product(SEEDS, FAMILIES, VARIATIONS)
    jobs = [{"family": f, "variation": v, "seed": seed, "steps": arguments.steps} for seed, f, v in cells]
    Records(arguments.output).work([(job, []) for job in jobs], carry_out)
    print(TABLES["shape_texture"](arguments.output))
    draw_biases(arguments.output)


if __name__ == "__main__":
    main()
