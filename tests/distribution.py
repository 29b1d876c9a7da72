"""Try an installed hf-vit as a user meets it, in the environment that runs this file, away from the repository.

    python -m venv DIR; DIR/bin/pip install dist/*.whl; DIR/bin/python tests/distribution.py

Run by `make dist`. It needs nothing but the package and what that needs itself.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Within, the package cannot be imported: the model's own files must do.
RELOAD = """
import sys
sys.modules["hf_vit"] = None
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("demo", trust_remote_code=True).eval()
processor = AutoImageProcessor.from_pretrained("demo")
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
images = [torch.full((3, 20, 20), value, dtype=torch.uint8) for value in (0, 128, 255)]
with torch.no_grad():
    logits = model(**processor(images, return_tensors="pt")).logits
assert logits.shape == (3, 10) and logits.isfinite().all(), logits
assert model.config.id2label[3] == "3", model.config.id2label
"""


def run(*words: str) -> str:
    """A program of this environment, in the working folder; it must succeed."""
    program, *arguments = words
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])} fails: {done.stderr.strip()[-2000:]}")
    return done.stdout


def check_origin() -> None:
    """What is imported is what was installed, and is the version of this repository."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.metadata.version("hf-vit") == version, importlib.metadata.version("hf-vit")
    found = importlib.util.find_spec("hf_vit")
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).is_relative_to(sys.prefix), found.origin
    assert not Path(found.origin).is_relative_to(ROOT / "src")


def check_help() -> int:
    """Of every command; how many there are."""
    import typer.main

    from hf_vit_cli.main import build_app

    paths: list[list[str]] = [[]]
    for path in paths:  # grows while it is walked
        command = typer.main.get_command(build_app())
        for word in path:
            command = command.commands[word]
        paths += [[*path, name] for name in getattr(command, "commands", {})]
    for path in paths:
        assert "Usage: hf-vit" in run("hf-vit", *path, "--help"), path
    return len(paths)


def main() -> None:
    """All of it, in a folder that vanishes."""
    with tempfile.TemporaryDirectory(prefix="hf_vit_distribution_") as folder:
        os.chdir(folder)
        os.environ |= {"HF_HOME": f"{folder}/huggingface", "HF_HUB_OFFLINE": "1"}
        check_origin()
        print(f"--help of {check_help()} commands: as it should be")
        run("hf-vit", "demo", "--epochs", "0.2", "--output", "demo")
        print("hf-vit demo, a fifth of an epoch: a model of digits, with facts and card")
        assert {"facts.json", "README.md", "model.safetensors"} <= {path.name for path in Path("demo").iterdir()}
        run("python", "-c", RELOAD)
        print("it loads without the package, by its own files")
        told = run("hf-vit", "models", "demo", "papers", "--search", "Ti/16", "--json")
        assert '"Ti/16"' in told
        print("tried: the installed package works")


if __name__ == "__main__":
    main()
