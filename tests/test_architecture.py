"""What imports what: arrows point one way between rooms and between files, imports stay light."""

import ast
import graphlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from imports import PACKAGE, files, graph, tree_of

ROOT = Path(__file__).parents[1]

# A room imports from rooms of lower rank alone, and rooms of one rank not from each other.
RANKS = {
    "errors": 0,
    **dict.fromkeys(("environment", "display"), 1),
    **dict.fromkeys(("repositories", "models"), 2),
    "families": 3,
    **dict.fromkeys((PACKAGE, "variants"), 4),  # the package itself registers the families
    **dict.fromkeys(("data", "results", "rewriting", "model_cards"), 5),
    "conversion": 6,
    "inference": 7,
    "subjects": 8,
    "cost": 9,
    "hub": 10,
    **dict.fromkeys(("evaluation", "pages"), 11),
    **dict.fromkeys(("training", "analysis", "speed", "audit", "catalogue"), 12),
    "comparison": 13,
    "hf_vit_cli": 14,
    "__main__": 15,
}
LONGEST_FILE, LONGEST_FUNCTION = 1000, 100


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
