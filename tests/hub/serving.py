"""A server by the contract of Inference Endpoints: `handler.py` of a folder, called from threads over HTTP."""

import importlib.util
import io
import json
import resource
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit


def load_handler(folder: str) -> Any:
    spec = importlib.util.spec_from_file_location("handler", Path(folder) / "handler.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    sys.modules["handler"] = module
    spec.loader.exec_module(module)
    return module.EndpointHandler(folder)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve(repo_ids: list[str], port_file: str) -> None:
    """Serve models of the Hub, each under its name, until the process is killed."""
    from huggingface_hub import snapshot_download
    from PIL import Image

    handlers = {repo_id.partition("/")[2]: load_handler(snapshot_download(repo_id)) for repo_id in repo_ids}

    class Requests(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            engines = [str(getattr(handler.model, "engine", None)) for handler in handlers.values()]
            self.answer(200, {"bytes": resident_bytes(), "hf_vit": bool(sys.modules.get("hf_vit")), "engines": engines})

        def do_POST(self) -> None:
            body, kind = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Content-Type"]
            parts = urlsplit(self.path)
            try:
                if kind.startswith("image/"):
                    data = {"inputs": Image.open(io.BytesIO(body)).convert("RGB")}
                else:
                    data = json.loads(body) if kind == "application/json" else {"inputs": body}
                if parts.query:
                    data["parameters"] = dict(parse_qsl(parts.query))
                self.answer(200, handlers[parts.path[1:]](data))
            except Exception as error:
                self.answer(400, {"error": str(error), "kind": type(error).__name__})

        def answer(self, status: int, content: Any) -> None:
            body = json.dumps(content, allow_nan=False).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        Path(port_file).write_text(str(server.server_port))
        server.serve_forever()
