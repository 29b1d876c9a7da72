"""What imports what: arrows between rooms point one way, travelling files travel alone, imports stay light."""

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hf_vit"
MODELS = sorted(path for path in (SOURCE / "models").glob("*.py") if path.name != "__init__.py")

# A room may import from rooms of lower or equal rank, and no two rooms from each other.
RANKS = {
    "errors": 0,
    "environment": 0,
    "models": 1,
    "families": 2,
    **dict.fromkeys(("hf_vit", "variants"), 3),  # the package itself: registration
    **dict.fromkeys(("data", "results", "rewriting", "model_cards"), 4),
    "conversion": 5,
    "inference": 6,
    "subjects": 7,
    "cost": 8,
    "hub": 9,
    "evaluation": 10,
    **dict.fromkeys(("training", "analysis", "speed"), 11),
    "comparison": 12,
    "cli": 13,
    "__main__": 14,
}
HEAVY = ("datasets", "evaluate", "sklearn", "matplotlib", "skimage", "torchvision", "scipy", "PIL")


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    name = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    return "hf_vit" if name == "__init__" else name


def imported(path: Path) -> list[str]:
    """Full names of the modules that a file imports, anywhere in it; relative ones resolved."""
    package = ["hf_vit", *path.relative_to(SOURCE).parent.parts]
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


@functools.cache
def arrows() -> dict[tuple[str, str], list[str]]:
    """(room, room it imports from) -> the files that do."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "hf_vit":
                continue
            target = parts[1] if len(parts) > 1 and parts[1] in RANKS else "hf_vit"
            if target != room_of(path):
                found.setdefault((room_of(path), target), []).append(str(path.relative_to(SOURCE)))
    return found


def test_every_room_has_its_place():
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms <= set(RANKS), f"give {rooms - set(RANKS)} a rank in this test"


def test_arrows_point_one_way():
    wrong = {arrow: files for arrow, files in arrows().items() if RANKS[arrow[1]] > RANKS[arrow[0]]}
    # The package hands out names of other rooms when they are asked for, and only then (see the import test below).
    wrong = {arrow: files for arrow, files in wrong.items() if arrow[0] != "hf_vit"}
    assert wrong == {}


def test_no_two_rooms_import_each_other():
    # What the package hands out when it is asked for is no import of its own (see above).
    own = [arrow for arrow in arrows() if arrow[0] != "hf_vit"]
    reachable = {room: {target for source, target in own if source == room} for room in RANKS}
    for _ in RANKS:
        reachable = {room: to.union(*(reachable[other] for other in to)) for room, to in reachable.items()}
    cycles = {room for room, to in reachable.items() if room in to and room not in ("hf_vit", "variants")}
    assert cycles == set()


def test_travelling_files_lie_flat():
    assert len(MODELS) >= 5
    assert [path for path in (SOURCE / "models").iterdir() if path.is_dir() and path.name != "__pycache__"] == []
    assert all("_hf_" in path.stem for path in MODELS), "their names must not clash with other code's"


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_travelling_files_import_only_what_everyone_has(path: Path):
    """transformers copies a saved model's file and the siblings that its text names, and runs them anywhere."""
    allowed, siblings = {"torch", "transformers", "huggingface_hub"}, {other.stem for other in MODELS}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"line {node.lineno}: only siblings travel along"
            assert node.module in siblings, f"line {node.lineno}: write `from .sibling import name`"
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                root = name.split(".")[0]
                assert root in allowed or root in sys.stdlib_module_names, f"line {node.lineno}: {name}"
                assert root != "__future__", f"line {node.lineno}: it switches the type checks of configs off"
    # transformers finds imports by regular expressions: prose that looks like one breaks saving.
    imports = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        assert number in imports or not line.strip().startswith(("from .", "import .")), f"line {number}"


def test_sizes_stay_readable():
    """Files below 450 lines, functions of at most 60 (without their signature: a command's options are one)."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        limit = 700 if path.name == "modeling_hf_vit.py" else 450  # it is read downward, from attention to classifier
        assert len(text.splitlines()) < limit, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.body[0].lineno < 60, f"{path}: {node.name}"


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-1]


# Imports the package and one model of each head; prints which of the named modules came along.
LIGHT = """
import json, sys
import torch
from transformers import PreTrainedModel, AutoModelForImageClassification, AutoImageProcessor
{first}
before = set(sys.modules)
import hf_vit
{then}
print(json.dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - before}} & set({heavy!r}))))
"""


def test_import_loads_nothing_heavy():
    assert json.loads(run(LIGHT.format(first="", then="", heavy=HEAVY))) == []


def test_works_where_the_data_libraries_are_not():
    """`import hf_vit` and every model on a machine without what only data, evaluation and plots need."""
    first = """
absent = ("datasets", "evaluate", "sklearn", "matplotlib", "skimage", "typer", "rich", "pydantic")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for name in list(sys.modules):
    if name.split(".")[0] in absent:
        sys.modules[name] = None
"""
    then = """
tiny = dict(image_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
for family in ("HfViT", "HfHybridViT", "HfAxialViT"):
    config = getattr(hf_vit, family + "Config")(**tiny, **({"stem_width": 32} if "Hybrid" in family else {}))
    model = AutoModelForImageClassification.from_config(config)
    loss = model(torch.zeros(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss
    loss.backward()
hf_vit.variant_config("Ti/16")
"""
    assert json.loads(run(LIGHT.format(first=first, then=then, heavy=("sklearn", "datasets", "evaluate")))) == []
