"""Start the Hub: two listeners, until the process that started it ends."""

import argparse
import json
import os
import secrets
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import loopback.routes
import loopback.xet
from loopback.handler import Handler, Hub
from loopback.store import Store


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what many tests are about."""


def serve(root: Path) -> Hub:
    """Both origins on free ports, each in a thread."""
    hub = Hub(Store(root), secrets.token_hex(16))
    addresses = []
    for is_storage in (False, True):
        handler = type("OriginHandler", (Handler,), {"hub": hub, "is_storage": is_storage})
        server = Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        addresses.append(f"http://127.0.0.1:{server.server_address[1]}")
    hub.endpoint, hub.storage = addresses
    return hub


def main() -> None:
    parser = argparse.ArgumentParser(description=loopback.__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    hub = serve(arguments.root)
    ready = {"endpoint": hub.endpoint, "storage": hub.storage, "secret": hub.secret, "pid": os.getpid()}
    temporary = arguments.ready_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(ready))
    temporary.rename(arguments.ready_file)
    sys.stdin.read()  # ends when the parent closes the pipe, however it ends


if __name__ == "__main__":
    main()
