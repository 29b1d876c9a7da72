"""Load on the handler of a saved classifier: memory, statuses and requests of eight clients behind a server.

The servers are those of docs/sharing.md, and Python's own http.server. One request in five is bad and must be answered
by 400. Memory is that of the server with all its processes, without pages of files. A row is added to the record of
`hf-vit verify --doors`.
"""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from script import describe

from hf_vit.environment import read_hardware
from hf_vit.hub.contents import make_serving_files
from hf_vit.hub.model_folder import read_config

ROOT, CLIENTS = Path(__file__).parents[1], 8
IMAGE = base64.b64encode((ROOT / "docs/images/digit.png").read_bytes()).decode()
PLAIN = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from handler import EndpointHandler

handler = EndpointHandler(".")

class API(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            status, answer = 200, handler(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        except ValueError as error:
            status, answer = 400, {"error": str(error)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", 8000), API).serve_forever()
"""
# Name -> code (as docs/sharing.md shows it), path of requests, package.
BLOCKS = [PLAIN, *re.findall(r"```py\n(.*?)```", (ROOT / "docs/sharing.md").read_text(), re.DOTALL)]
SERVERS = {"http.server": ("from http.server", "/", ""), "litserve": ("import litserve", "/predict", "litserve"),
           "ray": ("from ray import serve", "/", "ray")}  # fmt: skip


def ask(port: int, path: str, inputs: str) -> int:
    body = json.dumps({"inputs": inputs, "parameters": {"top_k": 2}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert len(json.load(answer)) == 2
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def count_bytes(process: psutil.Process) -> int:
    """Return the memory of a process and its descendants, without pages of files, which other programs map too."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return total


def measure(folder: Path, name: str, seconds: float, port: int) -> dict[str, Any]:
    text, path, package = SERVERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        model = shutil.copytree(folder, Path(scratch) / "model")
        for file, content in make_serving_files(read_config(model)).items():
            (model / file).write_bytes(content)
        code = next(block for block in BLOCKS if text in block)
        (model / "server.py").write_text(code.replace("8000", str(port)))
        server = subprocess.Popen([sys.executable, "server.py"], cwd=model)
        try:
            wait(port, path, server)
            return load(port, path, psutil.Process(server.pid), seconds) | {
                "server": f"{name} {version(package)}" if package else name, "hf_vit": True, **read_hardware("cpu")
            }  # fmt: skip
        finally:
            children = psutil.Process().children(recursive=True)  # of this process: the server may have ended
            for each in children:
                each.terminate()
            psutil.wait_procs(children, timeout=30)


def wait(port: int, path: str, server: Any) -> None:
    while server.poll() is None:
        try:
            if ask(port, path, IMAGE) == 200:
                return
        except OSError:
            pass
        time.sleep(1)
    raise SystemExit("the server ended")


def load(port: int, path: str, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Ask from all clients; return what they got and the memory over time."""
    passed, curve = 0.0, list[tuple[float, int]]()

    def work(client: int) -> Counter[str]:
        statuses = Counter[str]()
        for number in count(client):
            if passed >= seconds:
                return statuses
            status = ask(port, path, IMAGE if number % 5 else "bad")
            statuses[f"{status}" if status == (200 if number % 5 else 400) else f"wrong {status}"] += 1
        raise AssertionError

    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(work, client) for client in range(CLIENTS)]
        while not all(each.done() for each in running):
            start = time.monotonic()
            curve.append((passed, count_bytes(process)))
            time.sleep(seconds / 120)
            passed += min(time.monotonic() - start, seconds / 60)  # not the time for which all may have been stopped
        statuses = sum((each.result() for each in running), Counter[str]())
    middle, last = ([size for at, size in curve if int(3 * at / seconds) == third] for third in (1, 2))
    growth = (sum(last) / len(last) - sum(middle) / len(middle)) / 2**20
    return {
        "seconds": seconds, "clients": CLIENTS, "statuses": statuses, "growth_mib": round(growth, 1),
        "mib": [[round(at), size >> 20] for at, size in curve[:: len(curve) // 20]],
    }  # fmt: skip


def main() -> None:
    parser = describe(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--port", type=int, default=8000, help="not for ray")
    parser.add_argument("--output", type=Path, help="doors.json of the folder's model")
    options = parser.parse_args()
    row = measure(options.folder, options.server, options.seconds, options.port)
    print(json.dumps(row))
    if options.output is not None:
        record = json.loads(options.output.read_text())
        others = [each for each in record.get("load", []) if each["server"] != row["server"]]
        options.output.write_text(json.dumps(record | {"load": [*others, row]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
