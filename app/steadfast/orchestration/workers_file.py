"""Write the workers' progress into the run directory while a user watches."""

import time
from collections.abc import Mapping

from steadfast.liveness.watchdog import own_s
from steadfast.orchestration.messages import Member
from steadfast.run.watching import Worker, pop_mark, write_workers
from steadfast.storage import Store
from steadfast.world.report import ProgressReport

_INTERVAL_S = 1.0
_WATCHED_S = 10.0  # time for which one mark counts


class WorkersFile:
    """Writer of `workers.json`, from the newest heartbeats."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due_s = 0.0
        self._watched_until_s = 0.0
        self._before: dict[str, ProgressReport] = {}  # by worker: the report from which `own_ms` counts
        self._own_ms: dict[str, float] = {}

    def update(self, attempt: int, members: Mapping[str, Member], reports: Mapping[str, ProgressReport]) -> None:
        """Write the progress of an attempt's workers, at most once a second.

        Nothing is written unless a user watches the run.

        Args:
            members: the known workers by name.
            reports: the newest report of each worker, which may be of an earlier attempt.

        Raises:
            OSError: storage refuses a file.
        """
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        if pop_mark(self._store):
            self._watched_until_s = now_s + _WATCHED_S
        if now_s >= self._watched_until_s:
            return
        workers = []
        for name, report in reports.items():
            if report.attempt == attempt and name in members:
                workers.append(self._worker(members[name], report))
        workers.sort(key=lambda worker: worker.rank)
        write_workers(self._store, attempt, workers)

    def _worker(self, member: Member, report: ProgressReport) -> Worker:
        before = self._before.get(member.name)
        # A worker reports step 0 until it has restored a state, so steps cannot be counted from such a report.
        if before is None or before.attempt != report.attempt or not before.step:
            self._before[member.name] = report
            self._own_ms.pop(member.name, None)
        elif report.step > before.step:
            self._own_ms[member.name] = round(1e3 * own_s(before, report), 3)
            self._before[member.name] = report
        return Worker(
            rank=report.rank,
            name=member.name,
            node=member.node,
            host=member.host,
            pid=member.pid,
            step=report.step,
            phase=report.phase,
            phase_s=report.seconds,
            own_ms=self._own_ms.get(member.name),
        )
