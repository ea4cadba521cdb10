"""Process of a coordinator without Ray: simulated workers call its methods over a socket.

python -m tests.scale.server FOLDER NUM_WORKERS

A second process for the same folder takes over from the first, as an actor that Ray restarts.
"""

import asyncio
import pickle
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ray

from steadfast.config import RecoveryConfig, ScalingConfig
from steadfast.orchestration import coordinator as module
from steadfast.orchestration.membership import Membership
from steadfast.run.directory import RunDirectory
from steadfast.run.events import RunStarted
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore

_HEAD = struct.Struct("<I")  # length of the pickle that follows
_PAUSE_S = 0.01
SILENCE_S = 20.0  # simulated workers of a busy machine may be late, and shall not be lost for it


async def receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return pickle.loads(await reader.readexactly(length))


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(_HEAD.pack(len(data)) + data)


class Server:
    """The coordinator, how long its event loop was blocked, and nodes that are about to go."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        directory = RunDirectory(LocalStore(folder))
        claim = folder / "claim"
        if not claim.exists():
            directory.check_writable()
            claim.write_bytes(pickle.dumps(Ownership.claim(directory.store)))
            directory.record(RunStarted(launcher="ray"))
        ownership: Ownership = pickle.loads(claim.read_bytes())  # as Ray hands it to each successor
        self._draining: dict[str, float] = {}
        self._blocked_s = 0.0
        vars(ray)["kill"] = lambda actor: None
        vars(ray.util)["get_node_ip_address"] = lambda: "127.0.0.1"
        vars(module)["draining_nodes"] = lambda: dict(self._draining)
        scaling = ScalingConfig(num_workers=(1, 2 * num_workers))
        membership = Membership.of(scaling, expected=num_workers)
        membership.settle_s = 600.0
        self._subject = module.Coordinator(RecoveryConfig(silence_s=SILENCE_S), membership, directory, ownership)

    async def run(self, folder: Path) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        await self._subject.heartbeat_port()
        (folder / "port.new").write_text(str(server.sockets[0].getsockname()[1]))
        (folder / "port.new").rename(folder / "port")
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(_PAUSE_S)
            self._blocked_s = max(self._blocked_s, time.thread_time() - began_s)

    async def drain(self, nodes: list[str]) -> None:
        self._draining.update(dict.fromkeys(nodes, time.time() + 120))

    async def figures(self) -> tuple[float, float, int]:
        """Return CPU seconds so far, those of the longest block since the last call, and the number of the attempt."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return time.process_time(), blocked_s, self._subject._ownership.attempt

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls = set()
        while True:
            call = asyncio.ensure_future(self._call(writer, *await receive(reader)))
            calls.add(call)
            call.add_done_callback(calls.discard)

    async def _call(self, writer: asyncio.StreamWriter, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = await getattr(self if hasattr(self, method) else self._subject, method)(*arguments)
        except Exception:
            traceback.print_exc()
            answer = None
        send(writer, (number, answer))


if __name__ == "__main__":
    asyncio.run(Server(Path(sys.argv[1]), int(sys.argv[2])).run(Path(sys.argv[1])))
