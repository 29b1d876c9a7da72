"""Every code block of the README runs as it stands, in order, in a folder that starts like a fresh clone."""

import contextlib
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import sklearn.datasets
import sklearn.utils
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_vit.results.facts import Facts
from hf_vit_cli.main import main

ROOT = Path(__file__).parents[1]
FEWER = {"--epochs": "1", "--steps": "3"}
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def run_program(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0


def run_briefly(words: list[str]) -> None:
    """A command of `hf-vit`, which trains for less than it says."""
    run_program([FEWER.get(before, word) for before, word in pairwise(words)])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory):
    """A folder with the repository's files, and the demo's model after one epoch, with 100 digits for training."""
    folder, digits = tmp_path_factory.mktemp("clone"), sklearn.datasets.load_digits()
    for name in ("docs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    few = sklearn.utils.Bunch(images=digits.images[:640], target=digits.target[:640])
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", lambda: few)
        run_program(["demo", "--output", "out/demo", "--epochs", "1"])
        yield folder


def test_the_first_commands_are_those_of_getting_started():
    """They need the Hub, so that they are run there, on what needs none."""
    assert [language for language, _ in BLOCKS] == ["sh", "python", "text", "sh", "bash", "bash"]
    install, commands = [code for language, code in BLOCKS if language == "sh"]
    assert install.startswith("pip install '.[train,timm]' ")
    page = (ROOT / "docs/getting_started.md").read_text().splitlines()
    assert [line for line in commands.strip().splitlines() if line not in page] == []


def test_the_first_python_prints_a_score(clone: Path):
    """In three steps; `examples/photographs.py` trains the same model for as long as the page says."""
    (code,) = [code for language, code in BLOCKS if language == "python"]
    (output,) = [code for language, code in BLOCKS if language == "text"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code.replace("epochs=100", "steps=3"), "README.md", "exec"), {})
    form = r"\d+\.\d% of 320 test photographs\n"
    assert re.fullmatch(form, printed.getvalue())
    assert re.fullmatch(form, output)


@pytest.mark.parametrize("block", [code for language, code in BLOCKS if language == "bash"])
def test_commands_run(block: str, clone: Path):
    for line in block.strip().splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "make":
            assert shutil.which("make"), "the README's commands need make"
            plan = subprocess.run(["make", "-n", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
            assert {"demo": "hf-vit demo --output out/demo", "test": "python -m pytest"}[arguments[0]] in plan.stdout
        else:
            assert program == "hf-vit"
            run_program(arguments)


@pytest.mark.slow  # 25 s; the commands themselves have tests of their own
def test_the_tasks_of_the_skill_run(clone: Path):
    """Five, which agents read; the lines that need the Hub are checked by tests/test_docs.py alone."""
    text = (ROOT / "skills/hf-vit/SKILL.md").read_text()
    tasks = re.findall(r"^\d\. [^\n]*\n\n```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(tasks) == 5
    for line in "".join(tasks).splitlines():
        run_briefly(shlex.split(line))
    for made in ("model.safetensors", "facts.json", "../skill-onnx/export.json", "../skill-features/manifest.json"):
        assert (clone / "out/skill" / made).is_file()


def test_a_data_set_is_searched_by_image(clone: Path, monkeypatch: pytest.MonkeyPatch):
    """`examples/search.py`, where faiss is installed; an image of the data finds itself first."""
    pytest.importorskip("faiss")
    image = Image.fromarray((sklearn.datasets.load_digits().images[3] * 17).clip(0, 255).astype("uint8"))
    image.save(clone / "query.png")
    monkeypatch.setattr(sys, "argv", ["search.py", "out/demo", "digits", "query.png"])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "examples/search.py"))
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("Flat: 300 images")
    assert float(re.fullmatch(r"recall of the 10 nearest: ([\d.]+)% of 300 queries", lines[2])[1]) > 95
    assert len(lines) == 13


@pytest.mark.slow  # the commands of the README once more, on photographs
def test_the_first_page_after_it_runs_too(clone: Path):
    """Getting started, from a checkpoint and a folder of photographs; in one epoch, and without what needs the Hub."""
    page = (ROOT / "docs/getting_started.md").read_text().split("\n## ")
    (section,) = [part for part in page if part.startswith("A checkpoint and a folder of photographs\n")]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    (code,) = [code for language, code in blocks if language == "python"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "getting_started.md", "exec"), {})
    assert " ".join(printed.getvalue().split()) in " ".join(section.split())
    lines = [line for language, code in blocks if language == "bash" for line in code.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if "google/" not in line]
    ran = [list(words) for words in dict.fromkeys(map(tuple, commands)) if words[1] != "push"]
    assert [words[1] for words in ran] == ["evaluate", "predict", "finetune"]
    for words in (ran[2], *ran[:2]):
        run_briefly(words)
    (steps,) = [each.values["steps"] for each in Facts.load(clone / "out/pictures").records if each.kind == "training"]
    assert steps == 13, "one epoch of 800 images, 64 a step"
    assert len((clone / "predictions.csv").read_text().splitlines()) == 1 + 320


@pytest.mark.slow  # trainings of a small model, each of which has tests of its own
def test_the_commands_about_dinov3_run(clone: Path):
    """In an epoch each; a page needs a download, tests/pages makes it."""
    (section,) = re.findall(r"^## DINOv3 by commands\n(.*)", (ROOT / "docs/training.md").read_text(), re.M | re.DOTALL)
    *trainings, page = map(shlex.split, re.findall(r"^hf-vit .*", section, flags=re.MULTILINE))
    for words in trainings:
        run_briefly(words)
    assert page[:4] == ["hf-vit", "page", "out/dinov3", "out/lora"]
    configs = [json.loads((clone / f"out/{name}/config.json").read_text()) for name in ("dinov3", "lora", "masks")]
    assert [config.get("backbone_config", config)["rotary_embedding"] for config in configs] == ["axial"] * 3
    card = re.findall(r"^```text\n(A Vision .*?)^```", section, flags=re.M | re.DOTALL)[0]
    assert " ".join(card.split()) in (clone / "out/dinov3/README.md").read_text()


@pytest.mark.slow  # six exports, each of which has tests of its own in tests/conversion
def test_the_page_about_production_runs(clone: Path):
    """All its blocks in their order, in few steps; what is of node, tests/conversion/test_runtimes.py runs."""
    page = (ROOT / "docs/production.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    for language, code in blocks:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, "production.md", "exec"), {})
            assert re.fullmatch(r"[a-z]+ [\d.]+%\n", printed.getvalue())
        elif language == "bash":
            for line in code.strip().splitlines():
                if "--quantize" in line:
                    make_sure(clone / "out/photos")
                run_briefly(shlex.split(line))
    assert (clone / "out/js/onnx/model.onnx").is_file()
    assert json.loads((clone / "out/int8/export.json").read_text())["quantization"]["agreement"] == 1


def make_sure(model: Path) -> None:
    """One class is always the answer, which rounding does not change; after three steps it hangs on that."""
    weights = load_file(model / "model.safetensors")
    weights["classifier.bias"][0] += 100
    save_file(weights, model / "model.safetensors", {"format": "pt"})
