"""Run the steps of the Dockerfile where there is no docker: in an environment and a folder of their own.

    python tests/dockerfile.py FOLDER        # an empty one; takes some GB unless PYTHONPATH holds what pip needs

The image's base is the Python that runs this file, `/` is FOLDER. What ENTRYPOINT and CMD print is printed.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_steps(root: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(root / "venv")], check=True)
    environment = os.environ | {"PATH": f"{root / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    place, start = root, {"ENTRYPOINT": list[str](), "CMD": list[str]()}
    for line in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        step, _, rest = line.partition(" ")
        match step:
            case "" | "#" | "FROM":
                continue
            case "WORKDIR":
                place = root / rest.lstrip("/")
                place.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    if (ROOT / source).is_dir():
                        shutil.copytree(ROOT / source, place / target, symlinks=True, dirs_exist_ok=True)
                    else:
                        shutil.copy(ROOT / source, place / target)
            case "ENV":
                name, _, value = rest.partition("=")
                environment[name] = value
            case "RUN":
                subprocess.run(["sh", "-c", rest], cwd=place, env=environment, check=True)
            case "ENTRYPOINT" | "CMD":
                start[step] = json.loads(rest)
            case _:
                raise SystemExit(f"the Dockerfile has a step that is unknown here: {line}")
    words = start["ENTRYPOINT"] + start["CMD"]
    print("$", shlex.join(words), flush=True)
    subprocess.run(words, cwd=place, env=environment, check=True)


if __name__ == "__main__":
    run_steps(Path(sys.argv[1]).resolve())
