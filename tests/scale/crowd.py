"""Simulated workers, and what befalls them: a death, growth, a drain, a new coordinator, a lost switch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from steadfast.guards.failures import FailureKind
from steadfast.orchestration.heartbeat import Commands, _proof
from steadfast.orchestration.messages import FailureReport, Member, WorldAssignment
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import Failure
from steadfast.storage import LocalStore
from steadfast.world.timeouts import Timeouts
from tests.scale.server import receive, send

PER_NODE = 8
SWITCH = 64  # workers behind one switch
_ROOT = Path(__file__).parents[2]
_SLICES = 25  # parts of the workers whose heartbeats are sent together
_QUIET_S = 2.0  # time in which nothing happens, to learn what a heartbeat costs
_START_S = 60.0
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Figures:
    """What one event has cost, with times since the event."""

    cpu_s: float  # of the coordinator, without what it spends on heartbeats
    blocked_s: float  # CPU seconds of its event loop between two of 100 looks a second, at most
    told_s: float  # until 99 of 100 workers had their command to end the attempt
    placed_s: float  # until the last worker had its place in the next world
    attempts: int  # worlds that have formed meanwhile
    size: int  # of the last of them
    failed: int  # attempts that have failures so far
    quiet_cores: float  # cores that the coordinator takes while nothing happens, mostly for heartbeats


class Spent(NamedTuple):
    """What `Server.figures` returns, and the heartbeats so far."""

    cpu_s: float
    blocked_s: float
    attempt: int
    num_beats: int


@dataclass(eq=False)
class Worker:
    name: str
    node: str
    alive: bool = True
    place: WorldAssignment | None = None
    commands: Commands = field(default_factory=Commands)
    writer: asyncio.StreamWriter | None = None
    told_s: float = 0.0
    placed_s: float = 0.0

    @property
    def attempt(self) -> int:
        return self.place.attempt if self.place else 0

    @property
    def member(self) -> Member:
        return Member(self.name, None, self.node, ("127.0.0.1", 20000))


class Crowd:
    """A coordinator in a process of its own, and `n` workers in this one."""

    def __init__(self, folder: Path, n: int) -> None:
        self._folder = folder
        self._n = n
        self._directory = RunDirectory(LocalStore(folder))
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._connecting = asyncio.Semaphore(100)
        self._step = 0
        self._num_beats = 0
        self._beat_s = 0.0  # CPU seconds of the coordinator for one heartbeat
        self._interval_s = Timeouts().heartbeat_of(n)
        self._names = itertools.count()
        self.workers = self._new(n)

    @classmethod
    @contextlib.asynccontextmanager
    async def formed(cls, folder: Path, n: int) -> AsyncIterator[Crowd]:
        """Enter with all workers in one world."""
        crowd = cls(folder, n)
        await crowd._start()
        beats = asyncio.ensure_future(crowd._beat())
        try:
            crowd._spawn(crowd.workers)
            await crowd._until(lambda: all(worker.place for worker in crowd.workers))
            before = await crowd._spent()
            await asyncio.sleep(_QUIET_S)
            after = await crowd._spent()
            crowd._beat_s = (after.cpu_s - before.cpu_s) / max(1, after.num_beats - before.num_beats)
            yield crowd
        finally:
            beats.cancel()
            crowd._process.kill()
            crowd._process.wait()
            crowd._caller.close()
            for task in list(crowd._tasks):
                task.cancel()
            await asyncio.gather(beats, *crowd._tasks, return_exceptions=True)

    # Events.

    async def lose(self, count: int = 1) -> Figures:
        """Lose neighbouring workers at one moment; the first of them is not the leader."""
        lost = [worker for worker in self.workers if worker.attempt][1 : 1 + count]

        async def happen() -> None:
            for worker in lost:
                worker.alive = False
                assert worker.writer is not None
                worker.writer.transport.abort()
            self.workers = [worker for worker in self.workers if worker.alive]

        return await self._measured(happen)

    async def grow(self, share: float = 0.1) -> Figures:
        async def happen() -> None:
            more = self._new(max(1, int(share * self._n)))
            self.workers += more
            self._spawn(more)

        return await self._measured(happen)

    async def drain(self, share: float = 0.1) -> Figures:
        nodes = sorted({worker.node for worker in self.workers})
        going = set(nodes[: max(1, int(share * len(nodes)))])

        async def happen() -> None:
            self.workers = [worker for worker in self.workers if worker.node not in going]
            await self._call("drain", going)

        return await self._measured(happen)

    async def restart(self) -> Figures:
        """Kill the coordinator. The figures are those of its successor, until all workers are back."""
        self._process.kill()
        self._process.wait()
        self._caller.close()
        await asyncio.wait(self._tasks, timeout=_LIMIT_S)
        await self._start()
        began = await self._spent()
        began_s = time.monotonic()
        self._spawn(self.workers)
        await self._until(lambda: all(worker.writer for worker in self.workers))
        await self._call("num_slots")  # answered once the successor has taken over
        return await self._figures(began, began_s)

    # What workers do.

    async def _live(self, worker: Worker) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with self._connecting:
                port = await self._call("heartbeat_port")
                secret = await self._call("admit", worker.name)
                if worker.place and not await self._call("rejoin", worker.member, worker.place, worker.commands):
                    return
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
                challenge = (await reader.readuntil()).decode().strip()
                writer.write(f"{worker.name} {_proof(secret, challenge, worker.name)}\n".encode())
            worker.writer = writer
            if not worker.place:
                self._join(worker)
            with contextlib.closing(writer):
                while line := await reader.readline():
                    if line.strip():
                        self._obey(worker, json.loads(line))
        worker.writer = None

    def _obey(self, worker: Worker, message: dict[str, Any]) -> None:
        if "answer" in message:
            self._hear_answer(worker, message["answer"])
            return
        before, worker.commands = worker.commands, Commands(**message)
        if worker.commands.aborted == worker.attempt != before.aborted:
            worker.told_s = time.monotonic()
            self._do(self._fail(worker))
        elif worker.commands.leave == worker.attempt != before.leave:
            worker.told_s = time.monotonic()
            self._join(worker)

    async def _fail(self, worker: Worker) -> None:
        report = FailureReport(FailureKind.PEER, worker.attempt, self._step, "PeerLost: ...", "Traceback: ...\n" * 20)
        if await self._call("failed", worker.name, report) is False:
            self._join(worker)

    def _join(self, worker: Worker) -> None:
        self._do(self._call("ask", worker.member, worker.attempt))

    def _hear_answer(self, worker: Worker, answer: Any) -> None:
        if isinstance(answer, str):
            self._do(self._leave(worker))
            return
        worker.place, worker.placed_s = WorldAssignment.of_line(answer), time.monotonic()

    async def _leave(self, worker: Worker) -> None:
        await self._call("leave", worker.name)
        if worker.writer:
            worker.writer.close()

    async def _beat(self) -> None:
        due_s = time.monotonic()
        for part in itertools.cycle(range(_SLICES)):
            spent = {"loader": 0.1 * self._step, "forward": 0.3 * self._step, "backward": 0.6 * self._step}
            for worker in self.workers[part::_SLICES]:
                if worker.writer is None:
                    continue
                rank = worker.place.rank if worker.place else 0
                progress = {"attempt": worker.attempt, "rank": rank, "position": [3 * self._step, -1, 1, 0, 0]}
                progress |= {"step": self._step, "phase": "forward", "seconds": 0.1, "limit_s": 60.0, "spent_s": spent}
                worker.writer.write(json.dumps({"progress": progress, "stretch": 1.0}).encode() + b"\n")
                self._num_beats += 1
            due_s = max(due_s + self._interval_s / _SLICES, time.monotonic() - self._interval_s)
            await asyncio.sleep(due_s - time.monotonic())

    # Measurement and calls.

    async def _measured(self, happen: Callable[[], Any]) -> Figures:
        self._step += 1
        self._directory.store.commit(STEPS, json.dumps({"step": self._step}).encode() + b"\n")
        began = await self._spent()
        began_s = time.monotonic()
        await happen()
        await self._until(lambda: min(worker.placed_s for worker in self.workers) > began_s)
        await self._until(lambda: len({worker.attempt for worker in self.workers}) == 1)
        return await self._figures(began, began_s)

    async def _spent(self) -> Spent:
        cpu_s, blocked_s, attempt = await self._call("figures")
        return Spent(cpu_s, blocked_s, attempt, self._num_beats)

    async def _figures(self, began: Spent, began_s: float) -> Figures:
        spent = await self._spent()
        cpu_s = spent.cpu_s - began.cpu_s - self._beat_s * (spent.num_beats - began.num_beats)
        told_s = sorted(worker.told_s - began_s for worker in self.workers if worker.told_s > began_s)
        failures = self._directory.events(Failure)
        return Figures(
            cpu_s=round(cpu_s, 3),
            blocked_s=round(spent.blocked_s, 3),
            told_s=round(told_s[int(0.99 * len(told_s))], 4) if told_s else 0.0,
            placed_s=round(max(0.0, max(worker.placed_s for worker in self.workers) - began_s), 3),
            attempts=spent.attempt - began.attempt,
            size=self.workers[0].place.size if self.workers[0].place else 0,
            failed=len({failure.attempt for failure in failures}),
            quiet_cores=round(self._beat_s * self._n / self._interval_s, 4),
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + _LIMIT_S
        while not condition():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise TimeoutError((self._folder / "log").read_text()[-4000:])
            await asyncio.sleep(0.005)

    def _new(self, count: int) -> list[Worker]:
        numbers = list(itertools.islice(self._names, count))
        return [Worker(f"{number:08x}", f"node {number // PER_NODE}") for number in numbers]

    def _spawn(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._do(self._live(worker))

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        port = self._folder / "port"
        port.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.scale.server", str(self._folder), str(self._n)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT)
        until_s = time.monotonic() + _START_S
        while not port.exists():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError((self._folder / "log").read_text()[-4000:])
            await asyncio.sleep(0.05)
        reader, self._caller = await asyncio.open_connection("127.0.0.1", int(port.read_text()))
        self._do(self._receive(reader))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                number, answer = await receive(reader)
                self._answers.pop(number).set_result(answer)
        for waiting in self._answers.values():
            waiting.cancel()
        self._answers.clear()

    async def _call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        send(self._caller, (number, method, arguments))
        return await self._answers[number]
