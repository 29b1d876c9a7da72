"""A saved model in processes that cannot import hf_vit: from a folder and from a Hub, and from what they save again."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from loopback.client import Client, Loopback
from models.families import FAMILIES, HEADS, OTHERS, Family
from models.jobs import load, outputs_of
from safetensors.torch import save_file

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
