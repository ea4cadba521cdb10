"""What workers, slots and the coordinator say to each other by way of Ray."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Member:
    """A worker process. Its actor is known so that it can be killed if it falls silent."""

    name: str
    actor: Any
    node: str


@dataclass(frozen=True)
class Failure:
    """Why an attempt broke, told by the worker that saw it.

    kind: "peer" when another worker is gone, "numeric" for a step to be left out, "ours" for an error with a message of
    its own, "oom" for device or host memory, "exception" for any other.
    """

    kind: str
    attempt: int
    step: int
    message: str
    traceback: str


@dataclass(frozen=True)
class Seat:
    """A place in a world that has formed, over a store of its own; `skip` are the steps that it leaves out."""

    rank: int
    size: int
    attempt: int
    store_port: int
    skip: frozenset[int]


class Dismissal(StrEnum):
    """Why there is no seat: the run needs no workers any more, or not this one."""

    DONE = "done"
    LEFT = "left"


@dataclass(frozen=True)
class SlotOrders:
    """How many slots there are to be, and whether any is still needed."""

    count: int
    over: bool
