"""A saved model in processes that cannot import hf_vit: from a folder, a Hub, what they save, and in two shares."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dense_heads import CASES as DENSE_CASES
from dense_heads import batch_for
from dense_heads import build as build_dense
from loopback.client import Client, Loopback
from models.families import FAMILIES, HEADS, OTHERS
from models.jobs import dense_answers, load, outputs_of
from safetensors.torch import save_file

from hf_vit.families import DENSE_HEADS

ALL_FAMILIES = FAMILIES | OTHERS
# Whichever head a folder holds, every Auto class of the family is loaded from it: all of the plain one, one of others.
HEAD_OF = dict(
    zip(
        ALL_FAMILIES,
        ("model", "classification", "backbone", "masked_prediction", "model", "classification", "model"),
        strict=True,
    )
)
CASES = [
    *(("plain", head, "default") for head in FAMILIES["plain"].classes),
    *((family, head, "default") for family, head in HEAD_OF.items() if family != "plain"),
    # Those that need code which the default does not run.
    ("plain", "backbone", "pyramid"),
    *(
        ("plain", "classification", choice)
        for choice in ("map", "relative", "relative_bias", "no_last_norm", "distillation", "causal", "layer_scale")
    ),
    *(("plain", "classification", choice) for choice in ("registers_map", "norm_after_map", "swiglu", "rotary_mixed")),
    *(("plain", "model", "rectangular_patch"), ("axial", "model", "resnet_stem"), ("bit", "model", "post_activation")),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case, FAMILY-HEAD-CHOICE, with the answers of the model in it."""
    root = tmp_path_factory.mktemp("saved")
    for name, head, choice in CASES:
        family, folder = ALL_FAMILIES[name], root / f"{name}-{head}-{choice}"
        model = family.build(head, use_feature_pyramid=True) if choice == "pyramid" else family.build(head, choice)
        model.save_pretrained(folder)
        images = family.images(model.config)
        answers = {str(index): value.clone() for index, value in enumerate(outputs_of(model, images))}
        save_file({"images": images, **answers}, folder / "answers.safetensors")
    return root


def journey(
    case: tuple[str, str, str], source: str, saved: Path, target: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `jobs.journey`, and what it is to find."""
    family, head, choice = ALL_FAMILIES[case[0]], *case[1:]
    # What a choice needs lies in the same files, which its family's default saves again.
    classes = family.classes if choice == "default" else {head: family.classes[head]}
    found: dict[str, Any] = {
        HEADS[name].auto_class: ["transformers_modules", own.__name__, True] for name, own in classes.items()
    }
    arguments = {
        "source": source,
        "auto_class": HEADS[head].auto_class,
        "others": [name for name in found if name != HEADS[head].auto_class],
        "answers": str(saved / "-".join(case) / "answers.safetensors"),
        "target": str(target / "-".join(case)) if choice == "default" else None,
    }
    again = {"again": found[HEADS[head].auto_class]} if choice == "default" else {}
    return arguments, {"config": family.config_class.__name__, **found, **again}


def test_from_a_folder(saved: Path, stranger: Client, tmp_path: Path) -> None:
    """The same bits by trust_remote_code alone; what it saves loads as every Auto class, with the package, too."""
    rows = [journey(case, str(saved / "-".join(case)), saved, tmp_path) for case in CASES]
    found = stranger.run("models.jobs:journeys", cases=[arguments for arguments, _ in rows])
    assert dict(zip(CASES, found, strict=True)) == {case: wanted for case, (_, wanted) in zip(CASES, rows, strict=True)}
    for (name, head, choice), (row, _) in zip(CASES, rows, strict=True):
        if choice != "default":
            continue
        family, source, target = ALL_FAMILIES[name], Path(row["source"]), Path(row["target"])
        assert type(family.classes[head].from_pretrained(target).config) is family.config_class
        if head != "backbone":  # transformers' AutoBackbone does not read folders
            assert type(load(str(target), HEADS[head].auto_class)) is family.classes[head]
        files = ({path.name: path.read_text() for path in folder.glob("*.py")} for folder in (source, target))
        assert next(files) == next(files)


def test_from_a_hub(saved: Path, hub: Loopback, stranger: Client, tmp_path: Path) -> None:
    """As from a folder; the code that the loaded head does not import is fetched from the Hub when it is saved."""
    cases = [(name, HEAD_OF[name], "default") for name in ("plain", "axial_resnet")]
    stranger.run("models.jobs:upload", folders={f"alice/{case[0]}": str(saved / "-".join(case)) for case in cases})
    rows = [journey(case, f"alice/{case[0]}", saved, tmp_path) for case in cases]
    found = stranger.run("models.jobs:journeys", cases=[arguments for arguments, _ in rows], token=None)
    assert dict(zip(cases, found, strict=True)) == {case: wanted for case, (_, wanted) in zip(cases, rows, strict=True)}


# Every head and every family; `slow` has every pair of them.
SOME_DENSE = [
    *(("plain", "mask-rcnn"), ("hybrid", "deformable-detr"), ("axial", "mask-rcnn"), ("local", "upernet")),
    *(("axial_resnet", "detr"), ("bit", "mask2former"), ("mixer", "linear")),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME_DENSE, id="some"),
        pytest.param(DENSE_CASES, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="all"),
    ],
)
def test_heads_of_dense_prediction(cases: list[tuple[str, str]], stranger: Client, tmp_path: Path) -> None:
    """Each has the same weights, bit for bit, and answers, and again from what is saved without the package."""
    folders = []
    for family, head in cases:
        model, processor = build_dense(family, head)
        folders.append(tmp_path / f"{family}-{head}")
        model.save_pretrained(folders[-1])
        processor.save_pretrained(folders[-1])
        images = batch_for(head)["pixel_values"]
        save_file({"images": images, **dense_answers(model, images)}, folders[-1] / "answers.safetensors")
    found = stranger.run("models.jobs:dense_journeys", folders=[str(folder) for folder in folders])
    for (family, head), folder, (home, name, same, far) in zip(cases, folders, found, strict=True):
        kind = DENSE_HEADS[head]
        assert (home, name, same) == ("transformers_modules", kind.model_class.__name__, True), (family, head)
        assert far < 1e-4, (family, head)  # the last bit of a convolution depends on where its kernel lies in memory
        assert type(getattr(transformers, kind.auto_class).from_pretrained(folder / "again")) is kind.model_class


# Two processes that share every layer: outputs, and the gradients of their shares.
SHARED_OUT = [
    *((name, "default") for name in FAMILIES),
    *(("plain", choice) for choice in ("relative_gap", "map", "two_groups_of_three", "swiglu", "rotary_registers")),
    *(("plain", "norm_after_branches"), ("axial", "rotary_gap")),
]


def save_one_process(folder: Path, name: str, choice: str) -> None:
    model = FAMILIES[name].build("classification", choice, dtype=torch.float64)
    model.save_pretrained(folder)
    images, labels = FAMILIES[name].images(model.config, dtype=torch.float64), torch.tensor([0, 1])
    outputs = model.train()(images, labels=labels)
    outputs.loss.backward()
    answers = {"images": images, "labels": labels, "logits": outputs.logits.detach()}
    answers |= {f"grad.{key}": parameter.grad.contiguous() for key, parameter in model.named_parameters()}
    save_file(answers, folder / "answers.safetensors")


def test_two_processes_equal_one(stranger: Client, tmp_path: Path):
    """By the code that travels with a checkpoint, as a user's processes load it."""
    folders = {(name, choice): tmp_path / f"{name}-{choice}" for name, choice in SHARED_OUT}
    for case, folder in folders.items():
        save_one_process(folder, *case)
    shared = {"meeting": str(tmp_path / "meeting"), "folders": list(map(str, folders.values()))}
    ranks = [stranger.start("models.jobs:tensor_parallel", rank=rank, **shared) for rank in (0, 1)]
    for outcome in [rank.wait() for rank in ranks]:
        assert outcome.code == 0, outcome.err
        for (name, choice), folder in folders.items():
            found = outcome.answer[folder.name]
            assert found["logits"] < 1e-12, (name, choice, found)
            assert found["gradient"][1] < 1e-11, (name, choice, found)
            # Six projections a block are shared out (a SwiGLU has one more), and the biases of those whose outputs are;
            # none before a norm over all channels.
            model = FAMILIES[name].shared("classification", choice)
            blocks = sum(type(module).__name__ == "HfViTLayer" for module in model.modules())
            of_mlp = 0 if model.config.norm_in_mlp else 5 if model.config.mlp_type == "swiglu" else 3
            assert found["sharded"] == ((0 if model.config.norm_in_attention else 7) + of_mlp) * blocks
