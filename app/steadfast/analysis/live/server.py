"""Serve the page of a run on this machine's loopback.

Every request needs the token of the page's address. Requests that another web site makes the browser send are refused.
"""

import json
import secrets
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from steadfast.analysis.live.feed import Feed
from steadfast.errors import RunConflict, SteadfastError, UsageError
from steadfast.storage.documents import json_line

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")  # names of this machine's loopback, also behind `ssh -L`
_TOKEN_HEADER = "X-Steadfast-Token"
_MOST_BYTES = 1000  # of a request's body
_POLL_S = 0.1  # longest wait for the thread's end


class LiveServer(ThreadingHTTPServer):
    """Server of the page, which only programs with the token can use.

    A thread serves the page while the server's context is open.

    Args:
        port: port to listen on; 0 chooses a free one.

    Raises:
        UsageError: the port is taken or not allowed.
    """

    daemon_threads = True

    def __init__(self, feed: Feed, port: int = 0) -> None:
        self.feed = feed
        self.token = secrets.token_urlsafe()
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--port {port}: {reason}; choose another port, or leave --port out") from error
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True, name="live page")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a handler, except a browser that has gone."""
        if not isinstance(sys.exception(), OSError):
            socketserver.BaseServer.handle_error(self, request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 10  # seconds that a client may take to send a request

    def do_GET(self) -> None:
        path, query = self._address()
        if not self._is_admitted(query.get("token", [""])[0]):
            return
        match path:
            case "/":
                self._send_page()
            case "/status.json":
                self._send_status(query)
            case _:
                self._send_error(HTTPStatus.NOT_FOUND, "no such page")

    def do_POST(self) -> None:
        # A form of another web site cannot set a header, and its script may not without this server's consent.
        if not self._is_admitted(self.headers.get(_TOKEN_HEADER, "")):
            return
        if self._address()[0] != "/kill":
            self._send_error(HTTPStatus.NOT_FOUND, "no such page")
            return
        try:
            self.server.feed.kill(self._read_rank())
        except RunConflict as error:
            self._send_error(HTTPStatus.CONFLICT, str(error))
        except UsageError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except SteadfastError as error:
            self._send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._send("application/json", b"{}")

    def _address(self) -> tuple[str, dict[str, list[str]]]:
        """Return the path and the query of the request; nothing of an address that is none."""
        try:
            parts = urlsplit(self.path)
            return parts.path, parse_qs(parts.query)
        except ValueError:
            return "", {}

    def _is_admitted(self, token: str) -> bool:
        """Return whether the request has the token, else refuse the request."""
        # A web site whose name leads to 127.0.0.1 sends its own name as the host.
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in _NAMES:
            self._send_error(HTTPStatus.FORBIDDEN, f"open the page at {_HOST} or localhost")
        # compare_digest raises TypeError for strings that are not ASCII, so it compares bytes.
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send_error(HTTPStatus.FORBIDDEN, "the address lacks the token that `status --live` has printed")
        else:
            return True
        return False

    def _read_rank(self) -> int:
        length = self.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) <= _MOST_BYTES:
            try:
                match json.loads(self.rfile.read(int(length))):
                    case {"rank": int(rank)} if not isinstance(rank, bool):
                        return rank
            except ValueError:
                pass
        raise UsageError('the request needs the body {"rank": N}')

    def _send_page(self) -> None:
        sources = files("steadfast.analysis")
        page = sources.joinpath("live/page.html").read_text("utf-8")
        page = page.replace("{{style}}", sources.joinpath("page.css").read_text("utf-8"))
        nonce = secrets.token_urlsafe()
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        )
        self._send("text/html; charset=utf-8", page.replace("{{nonce}}", nonce).encode(), policy=policy)

    def _send_status(self, query: dict[str, list[str]]) -> None:
        have = []
        for name in ("version", "train", "validation"):
            value = query.get(name, ["0"])[0]
            # A number of more digits would make the reader slow, and no viewer has that many points.
            have.append(int(value) if value.isdecimal() and len(value) < 10 else 0)
        try:
            document = self.server.feed.document(*have)
        except SteadfastError as error:
            self._send_error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._send("application/json", json_line(document).encode())

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self._send("application/json", json.dumps({"error": message}).encode(), status)

    def _send(self, kind: str, content: bytes, status: HTTPStatus = HTTPStatus.OK, policy: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", policy or "default-src 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")  # the address holds the token
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the terminal shows the status."""
