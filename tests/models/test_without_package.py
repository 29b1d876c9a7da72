"""A saved model in processes that cannot import hf_vit: from a folder and from a Hub, and from what they save again."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from dense_heads import CASES as DENSE_CASES
from dense_heads import batch_for
from dense_heads import build as build_dense
from loopback.client import Client, Loopback
from models.families import FAMILIES, HEADS, OTHERS, Family
from models.jobs import dense_answers, load, outputs_of
from safetensors.torch import save_file

from hf_vit.families import DENSE_HEADS

ALL_FAMILIES = FAMILIES | OTHERS
CASES = [
    *((family, head, "default") for family in ALL_FAMILIES for head in ALL_FAMILIES[family].classes),
    # Those that need code which the default does not run.
    ("plain", "backbone", "pyramid"),
    *(
        ("plain", "classification", choice)
        for choice in ("map", "relative", "relative_bias", "no_last_norm", "distillation", "causal", "layer_scale")
    ),
    *(("plain", "classification", choice) for choice in ("registers_map", "norm_after_map", "swiglu")),
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


def journey(family: Family, head: str, choice: str, source: str, saved: Path, target: Path) -> dict[str, Any]:
    """The arguments of `jobs.journey`."""
    others = [HEADS[other].auto_class for other in family.classes if other != head]
    return {
        "source": source,
        "auto_class": HEADS[head].auto_class,
        "others": others if choice == "default" else [],
        "answers": str(saved / f"{family.name}-{head}-{choice}" / "answers.safetensors"),
        "target": str(target / f"{family.name}-{head}-{choice}"),
    }


def wanted(family: Family, head: str, choice: str) -> dict[str, Any]:
    """What `jobs.journey` is to find."""
    own = ["transformers_modules", family.classes[head].__name__, True]
    found = {"config": family.config_class.__name__, HEADS[head].auto_class: own, "again": own}
    for other in family.classes if choice == "default" else ():
        found[HEADS[other].auto_class] = ["transformers_modules", family.classes[other].__name__, True]
    return found


def test_from_a_folder(saved: Path, stranger: Client, tmp_path: Path) -> None:
    """Loads by trust_remote_code alone, gives the same bits, and what it saves loads as every Auto class of the family;
    and with the package again."""
    rows = [(ALL_FAMILIES[name], head, choice) for name, head, choice in CASES]
    cases = [journey(*row, str(saved / "-".join(case)), saved, tmp_path) for row, case in zip(rows, CASES, strict=True)]
    found = stranger.run("models.jobs:journeys", cases=cases)
    assert dict(zip(CASES, found, strict=True)) == {case: wanted(*row) for row, case in zip(rows, CASES, strict=True)}
    for (family, head, _), case in zip(rows, cases, strict=True):
        assert type(family.classes[head].from_pretrained(case["target"]).config) is family.config_class
        if head != "backbone":  # transformers' AutoBackbone does not read folders
            assert type(load(case["target"], HEADS[head].auto_class)) is family.classes[head]
        files = {path.name: path.read_text() for path in Path(case["target"]).glob("*.py")}
        assert files == {path.name: path.read_text() for path in Path(case["source"]).glob("*.py")}


def test_from_a_hub(saved: Path, hub: Loopback, stranger: Client, tmp_path: Path) -> None:
    """As from a folder; the code that the loaded head does not import is fetched from the Hub when it is saved."""
    heads = dict(
        zip(
            ALL_FAMILIES,
            ("model", "classification", "backbone", "masked_prediction", "model", "classification", "model"),
            strict=True,
        )
    )
    stranger.run(
        "models.jobs:upload", folders={f"alice/{n}": str(saved / f"{n}-{h}-default") for n, h in heads.items()}
    )
    rows = [(ALL_FAMILIES[name], head, "default") for name, head in heads.items()]
    cases = [journey(*row, f"alice/{row[0].name}", saved, tmp_path) for row in rows]
    found = stranger.run("models.jobs:journeys", cases=cases, token=None)
    assert dict(zip(heads, found, strict=True)) == {row[0].name: wanted(*row) for row in rows}


# Every head, and every family with one of them; `slow` has them all.
SOME_DENSE = [
    *(("plain", head) for head in DENSE_HEADS),
    *(("hybrid", "deformable-detr"), ("axial", "mask-rcnn"), ("local", "upernet"), ("axial_resnet", "detr")),
    *(("bit", "mask2former"), ("mixer", "linear")),
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


def test_configurations_alone(stranger: Client, tmp_path: Path) -> None:
    for family in ALL_FAMILIES.values():
        family.config().save_pretrained(tmp_path / family.name)
    found = stranger.run("models.jobs:configurations", folder=str(tmp_path))
    wanted = {name: ["transformers_modules", family.config_class.__name__] for name, family in ALL_FAMILIES.items()}
    assert found == {name: [own, own] for name, own in wanted.items()}
    for name, family in ALL_FAMILIES.items():
        config = transformers.AutoConfig.from_pretrained(tmp_path / name / "again")
        assert type(config) is family.config_class
        assert {**config.to_diff_dict(), "auto_map": None} == {**family.config().to_diff_dict(), "auto_map": None}
