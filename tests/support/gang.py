"""Real processes that share a store: what workers are to a cluster."""

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

# Imported once, by a server that each process is then forked from: fresh processes for the price of kept ones. The
# server computes nothing, so it has no threads that a fork could lose.
PRELOADED = [
    "steadfast.worker",
    "steadfast.parallel.fsdp",
    "steadfast.parallel.deferred",
    "steadfast.parallel.pipeline",
    "steadfast.parallel.tensor",
    "tests.support.drill",
    "tests.support.stepping",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "numpy.ma",
    "pytest",  # which a test's module imports wherever a target of its is built
    "sklearn.datasets",
    "sklearn.metrics",
    "tests.examples.operators",  # before torchvision, which torchmetrics imports
    "torchmetrics",
    "tests.support.frozen",  # last
]
_servers: set[int | None] = {None}  # process ids of those that gangs have started
_GONE = "gone"
LAST_WORDS_S = 5.0  # for the others to say what they saw of a failure, and for all to leave, before they are killed
_STUCK_S = 150.0  # after which a process prints its stacks; most tests have a limit of 180 s


class Member(NamedTuple):
    """What a process knows of itself: its number, and a store that all of them reach."""

    number: int
    store: dist.Store


class Said(NamedTuple):
    answer: Any
    failure: str = ""  # a traceback


class MemberFailed(Exception):
    """A process raised, or is gone. The message is every traceback."""


class Gang:
    """`size` processes that live until the gang is closed or one of them fails; the next `run` then starts others.

    As a context it starts them at once: a fixture's gang is there before the test that is the first to use it.
    """

    def __init__(self, size: int, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` is called once in each process before anything else."""
        self._size, self._prepare = size, prepare
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._lines: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        server: Any = forkserver._forkserver
        if server._forkserver_pid not in _servers:  # that of a loader, which has imported torch alone
            server._stop()
        for number in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (number, self._store.port, theirs, dict(os.environ), self._prepare)
            process = context.Process(target=_live, args=arguments)
            process.start()
            theirs.close()  # so that the line ends with the process
            self._lines.append(ours)
            self._processes.append(process)
        _servers.add(server._forkserver_pid)

    def run(self, task: Callable[..., Any], *args: Any, mortal: Collection[int] = ()) -> list[Any]:
        """Run `task(member, *args)` in every process at once, and return the answers by number.

        Args:
            mortal: processes that may end on the way; their answer is None then.

        Raises:
            MemberFailed: one of them raised, or another is gone, and all have been ended.
        """
        if not self._processes:
            self._start()
        for line in self._lines:
            line.send((task, args))
        said: dict[Any, Said] = {}
        may_end = [self._lines[number] for number in mortal]
        while silent := [line for line in self._lines if line not in said]:
            failed = any(each.failure and line not in may_end for line, each in said.items())
            ready = wait(silent, LAST_WORDS_S if failed else None)
            if not ready:
                break
            said |= {line: _listen(line) for line in ready}  # type: ignore[arg-type]
        failures = []
        for line in self._lines:
            answer = said.get(line, Said(None, "silent"))
            failures.append("fine" if line in may_end and answer.failure == _GONE else answer.failure or "fine")
        if set(failures) != {"fine"}:
            self.close()
            raise MemberFailed("\n".join(f"process {number}: {each}" for number, each in enumerate(failures)))
        return [said[line].answer for line in self._lines]

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(LAST_WORDS_S)
            process.kill()
            process.join()
        self._lines, self._processes = [], []

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(line: Connection) -> Said:
    try:
        said: Said = line.recv()
    except (EOFError, ConnectionError):
        return Said(None, _GONE)
    return said


def _live(
    number: int, port: int, line: Connection, environment: dict[str, str], prepare: Callable[[], None] | None
) -> None:
    os.environ.update(environment)  # the server that it is forked from has that of its own start
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    member = Member(number, dist.TCPStore("127.0.0.1", port, None, False))
    while True:
        try:
            task, args = line.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(_STUCK_S)
        try:
            line.send(Said(task(member, *args)))
        except Exception:
            line.send(Said(None, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
