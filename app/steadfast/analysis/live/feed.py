"""Newest status and curves of a run, for all viewers of its page."""

import threading
import time
from typing import Any

from steadfast.analysis.report.course import Curve
from steadfast.analysis.status import Status, StatusReader
from steadfast.errors import RunConflict, UsageError
from steadfast.run.directory import METRICS, RunDirectory, reading
from steadfast.run.events import AtRisk, Finished, Log, RankTimes, Snapshot, Validation, parse_event
from steadfast.storage.jsonl import Line, last_lines, read_lines
from steadfast.telemetry.interruptions import Interruption
from steadfast.units import in_ranges, plural

_EVERY_S = 0.9  # the least time between two readings of the run directory
_NUM_EVENTS = 60
_SHOWN_ABOVE = (AtRisk, Finished, RankTimes, Snapshot, Validation)  # events that other parts of the page show
_NUM_INTERRUPTIONS = 100
_MOST_POINTS = 1000  # of one curve; a screen shows no more
_ANSWER_S = 5.0
_POLL_S = 0.05


class Curves:
    """Curves of training and validation, which a viewer fetches piece by piece."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._train = Curve(_MOST_POINTS)
        self._validation = Curve(_MOST_POINTS)
        self._last_line: Line | None = None  # newest line that was read
        # The version changes when a point is dropped: a step was done again, or the curve was thinned out.
        self._version = 0

    def read(self, validations: list[Validation]) -> None:
        """Read the lines that are new since the last reading.

        Args:
            validations: all validations of the run, oldest first.
        """
        before = (list(self._train.steps), list(self._validation.steps))
        for line in self._new_lines():
            self._last_line = line
            event = parse_event(line)
            if isinstance(event, Log):
                self._train.add(event.step, {**event.metrics, "loss": event.loss})
        self._validation = Curve(_MOST_POINTS)
        for validation in validations:
            self._validation.add(validation.step, dict(validation.metrics))
        for steps, curve in zip(before, (self._train, self._validation), strict=True):
            if curve.steps[: len(steps)] != steps:
                self._version += 1

    def _new_lines(self) -> list[Line]:
        lines = last_lines(self._directory.store, METRICS)
        if self._last_line in lines:
            return lines[lines.index(self._last_line) + 1 :]
        # Nothing was read yet, or more lines than this end of the file were written since the last reading.
        self._train = Curve(_MOST_POINTS)
        return list(read_lines(self._directory.store, METRICS))

    def since(self, version: int, num_train: int, num_validation: int) -> dict[str, Any]:
        """Return the points that a viewer does not have yet.

        Args:
            version: version of the viewer's points. The viewer gets all points if they have another version.
            num_train: number of the viewer's points of training.
            num_validation: number of the viewer's points of validation.
        """
        if version != self._version:
            num_train = num_validation = 0
        train = zip(self._train.steps[num_train:], self._train.rows[num_train:], strict=True)
        validation = zip(self._validation.steps[num_validation:], self._validation.rows[num_validation:], strict=True)
        return {
            "version": self._version,
            "from": [num_train, num_validation],
            "train": list(train),
            "validation": list(validation),
        }


class Feed:
    """Reader of a run that serves any number of viewers at a time."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._reader = StatusReader(directory, watching=True)
        self._curves = Curves(directory)
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._read_again_s = 0.0

    def status(self) -> Status:
        """Return the status, which is read at most once a second.

        Raises StorageError.
        """
        with self._lock:
            return self._read()

    def document(self, version: int = 0, num_train: int = 0, num_validation: int = 0) -> dict[str, Any]:
        """Return everything that the page shows, as a document for JSON.

        The arguments are those of `Curves.since`. Raises StorageError.
        """
        with self._lock:
            status = self._read()
            curves = self._curves.since(version, num_train, num_validation)
            events = [event for event in self._reader.events if not isinstance(event, _SHOWN_ABOVE)]
        shown = status.to_json()
        shown["events"] = [{"time_s": event.time_s, "text": event.line()} for event in events[-_NUM_EVENTS:]]
        interruptions = []
        for each in status.interruptions[-_NUM_INTERRUPTIONS:]:
            interruptions.append({**vars(each), "cause": each.cause or each.kind, "cost": _cost(each)})
        shown["interruptions"] = interruptions
        shown |= {"name": self.directory.name, "stuck": status.stuck}
        return {**shown, "curves": curves, "can_kill": _can_kill(status)}

    def kill(self, rank: int) -> None:
        """Request the death of a worker, and wait until the command has read the request.

        Raises:
            UsageError: there is no such rank.
            RunConflict: the run is over, or no coordinator answers.
        """
        status = self.status()
        if not _can_kill(status):
            raise RunConflict(_refusal(status))
        ranks = [worker.rank for worker in status.workers]
        if rank not in ranks:
            raise UsageError(f"rank {rank} does not train now. Choose from {in_ranges('rank', ranks)}")
        with reading(self.directory):
            request = self.directory.request_kill(rank)
            until_s = time.monotonic() + _ANSWER_S
            while time.monotonic() < until_s:
                if not self.directory.waits(request):
                    return
                time.sleep(_POLL_S)
            self.directory.withdraw(request)  # because the user is about to see an error
        raise RunConflict(f"{status.uri} did not answer within {_ANSWER_S:g} s, so no worker was killed")

    def _read(self) -> Status:
        if self._status is None or time.monotonic() >= self._read_again_s:
            with reading(self.directory):
                self._status = self._reader.read()
                self._curves.read([event for event in self._reader.events if isinstance(event, Validation)])
            self._read_again_s = time.monotonic() + _EVERY_S
        return self._status


def _can_kill(status: Status) -> bool:
    # Only a coordinator that also reads requests writes the progress of its workers.
    return status.takes_requests and bool(status.workers)


def _refusal(status: Status) -> str:
    if not status.takes_requests and status.launcher == "ray":
        return f"{status.uri} is not running, so there is no worker to kill"
    return (
        f"no worker of {status.uri} can be killed from here now. Under torchrun, kill the process of a worker on "
        "its machine"
    )


def _cost(interruption: Interruption) -> str:
    if interruption.back_s is None:
        return ""
    seconds = (interruption.detected_s or 0.0) + interruption.back_s
    return f"{plural(interruption.lost_steps, 'step')}, {seconds:.1f} s"
