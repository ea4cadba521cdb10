"""A metadata service on this machine: speaks the clouds' protocols, headers and tokens included, and can be ill."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MetadataService

    def do_PUT(self) -> None:
        if "aws" not in self.server.clouds or self.path != "/latest/api/token":
            self.answer(404)
        elif not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
            self.answer(400)
        else:
            self.server.tokens.append(f"token-{len(self.server.tokens)}")
            self.answer(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.ill and self.path in self.server.ill_at:
            self.server.ill(self)
        elif not self.allowed():
            self.answer(401 if self.path.startswith("/latest/") else 403)
        elif self.path in self.server.items:
            self.answer(200, self.server.items[self.path])
        else:
            self.answer(404, "<html>404 - Not Found</html>")

    def allowed(self) -> bool:
        if self.path.startswith("/latest/"):
            return self.headers["X-aws-ec2-metadata-token"] in self.server.tokens[-1:]
        if self.path.startswith("/computeMetadata/"):
            return self.headers["Metadata-Flavor"] == "Google"
        return self.headers["Metadata"] == "true"

    def answer(self, status: int, body: str = "", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body.encode())
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


class MetadataService(ThreadingHTTPServer):
    """Of one cloud or none; `items` is what it has to say, path -> body."""

    daemon_threads = True

    def __init__(self, *clouds: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.clouds = clouds
        self.items: dict[str, str] = {}
        if "gcp" in clouds:
            self.items[PREEMPTED] = "FALSE"
        if "azure" in clouds:
            self.items.update({EVENTS: json.dumps({"DocumentIncarnation": 1, "Events": []}), NAME: "vm_3"})
        self.tokens: list[str] = []
        self.asked: list[str] = []
        self.ill: Any = None
        self.ill_at: tuple[str, ...] = (INSTANCE_ACTION, PREEMPTED, EVENTS)
        self.released = threading.Event()  # ends answers that hang

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def metadata_service(*clouds: str) -> Iterator[MetadataService]:
    service = MetadataService(*clouds)
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.released.set()
        service.shutdown()
        thread.join()
        service.server_close()
