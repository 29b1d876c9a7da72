"""Another server, which is not the Hub: it keeps every request, and answers each with the same bytes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Elsewhere:
    """`with Elsewhere(b"...") as server: ...`; `requests` holds what came: request line, headers and body."""

    def __init__(self, content: bytes = b"{}") -> None:
        self.requests: list[str] = []
        received = self.requests

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def log_message(self, *arguments: object) -> None:
                """`requests` tells more."""

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                received.append(f"{self.requestline}\n{self.headers}\n{body.decode('latin-1')}")
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", '"elsewhere"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Elsewhere":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
