"""What imports what: arrows point one way between rooms and between files, imports stay light."""

import ast
import functools
import graphlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from imports import PACKAGE, files, graph, imports, tree_of

ROOT = Path(__file__).parents[1]

# A room imports from rooms of lower rank alone, and rooms of one rank not from each other.
RANKS = {
    "hf_vit_settings": -1,
    "errors": 0,
    **dict.fromkeys(("environment", "writing", "display"), 1),
    **dict.fromkeys(("repositories", "models"), 2),
    "families": 3,
    **dict.fromkeys((PACKAGE, "variants"), 4),  # the package itself registers the families
    **dict.fromkeys(("data", "results", "model_cards"), 5),
    "conversion": 6,
    "inference": 7,
    "loading": 8,
    "cost": 9,
    "hub": 10,
    **dict.fromkeys(("evaluation", "pages"), 11),
    **dict.fromkeys(("training", "analysis", "speed", "audit", "catalogue"), 12),
    "comparison": 13,
    "hf_vit_cli": 14,
    "__main__": 15,
}
LONGEST_FILE, LONGEST_FUNCTION = 1000, 100
# What the tests reach inside the package instead of its public names. These numbers may only fall.
MOST_INNER_MODULES, MOST_PATCHED_NAMES = 124, 73  # the goal is 40 and 60


def room_of(module: str) -> str:
    package, _, inside = module.partition(".")
    return inside.split(".")[0] if inside and package == PACKAGE else package


def test_every_room_has_its_place():
    rooms = {room_of(module) for module in files()}
    assert rooms <= set(RANKS), f"give {rooms - set(RANKS)} a rank in this test"


def test_contributing_tells_every_room():
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    assert sorted(told) == sorted(set(RANKS) - {PACKAGE, "__main__"})


def test_arrows_between_rooms_point_one_way():
    wrong = [
        f"{module} -> {target} ({', '.join(sorted(names))})"
        for module, targets in graph().items()
        for target, names in targets.items()
        if room_of(module) != room_of(target) and RANKS[room_of(module)] <= RANKS[room_of(target)]
    ]
    assert wrong == []


def test_no_circle_between_files():
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]
        ties = [
            f"{module} imports {', '.join(sorted(graph()[module][target]))} from {target}"
            for module, target in itertools.pairwise(circle)
        ]
        pytest.fail("\n".join(["files import each other in a circle:", *ties]))


def test_sizes_stay_readable():
    """Functions are measured without their signature: a command's options are one."""
    for module, path in files().items():
        length = len(path.read_text().splitlines())
        assert length <= LONGEST_FILE, f"{module} has {length} lines"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.body[0].lineno < LONGEST_FUNCTION, f"{module}: {node.name}"


@functools.cache
def public_names() -> set[tuple[str, str]]:
    """Return (package, name) of what is public; commands are started through `main`."""
    text = (ROOT / "tests" / "public_api.txt").read_text()
    return {("hf_vit_cli.main", "main"), *re.findall(r"^(hf_vit[a-z_.]*)\.(\w+)", text, flags=re.MULTILINE)}


def inner_modules(path: Path) -> set[str]:
    """Return the modules of the package that a test file imports for names that no public package lists."""
    whole = [(f"{module}.{name}", module, name) for module, name in imports(path, "")]
    found = [(place, "") if place in files() else (module, name) for place, module, name in whole]
    packages, names = ({each[part] for each in public_names()} for part in (0, 1))
    return {module for module, name in found if module in files() and module not in packages and name not in names}


def patched_names(path: Path) -> set[str]:
    """Return the names of the package that a test file replaces by `monkeypatch` or `mock.patch`."""
    origins, found = {}, set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            origins |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            origins |= {each.asname: each.name for each in node.names if each.asname}
    for node in ast.walk(tree_of(path)):
        called = getattr(node, "func", None)
        if (
            getattr(called, "attr", getattr(called, "id", "")) in ("setattr", "delattr", "patch", "object")
            and node.args
        ):
            owned = isinstance(node.args[0], ast.Name | ast.Attribute)
            place = ".".join(re.sub(r"^f?['\"]|['\"]$", "", ast.unparse(each)) for each in node.args[: 1 + owned])
            first, _, rest = place.partition(".")
            found.add(f"{origins.get(first, first)}.{rest}")
    return {name for name in found if name.split(".")[0] in (PACKAGE, "hf_vit_cli", "conversion")}


@pytest.mark.parametrize(("find", "most"), [(inner_modules, MOST_INNER_MODULES), (patched_names, MOST_PATCHED_NAMES)])
def test_tests_reach_no_deeper_into_the_package(find, most):
    """A test that goes through public names survives every change that users cannot see."""
    table = defaultdict[str, list[str]](list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in find(path):
            table[name].append(str(path.relative_to(ROOT)))
    for name, places in sorted(table.items()):
        print(name, *places)
    assert len(table) <= most, (
        f"{len(table)} {find.__name__.replace('_', ' ')}; use public names instead of one of them"
    )


# What only data, evaluation, plots and commands need is barred; hf_vit must not even look for it. What transformers'
# own classes may bring along stays reachable, and is looked for in `sys.modules`.
PROGRAM = """
import json, sys
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

barred = ("datasets", "evaluate", "sklearn", "matplotlib", "skimage", "typer", "rich", "pydantic")
asked = []

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in barred:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bar())
for name in list(sys.modules):
    if name.split(".")[0] in barred:
        sys.modules[name] = None
before = set(sys.modules)
import hf_vit
new = {name.split(".")[0] for name in set(sys.modules) - before}
came = sorted(new & {"torchvision", "scipy", "PIL"}) + asked

tiny = dict(image_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
for family in ("HfViT", "HfHybridViT", "HfAxialViT", "HfLocalViT"):
    config = getattr(hf_vit, family + "Config")(**tiny, **({"stem_width": 32} if "Hybrid" in family else {}))
    model = AutoModelForImageClassification.from_config(config)
    model(torch.zeros(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss.backward()
hf_vit.variant_config("Ti/16")
print(json.dumps(came))
"""


def test_the_package_is_light():
    """`import hf_vit` brings nothing heavy, and models work on a machine without the libraries around them."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == []
