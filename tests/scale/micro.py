"""CPU seconds of the coordinator's pure functions, by the number of workers."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from steadfast.liveness.verdicts import Costs
from steadfast.liveness.watchdog import find_straggler
from steadfast.orchestration.membership import Form, Membership
from steadfast.orchestration.messages import WorldAssignment
from steadfast.orchestration.seating import seat
from steadfast.orchestration.succession import Succession
from steadfast.plan import Amendments
from steadfast.world.report import ProgressReport
from steadfast.world.timeouts import Timeouts

PER_NODE = 8


def names_of(n: int) -> list[str]:
    return [f"{number:08x}" for number in range(n)]


def nodes_of(n: int) -> dict[str, str]:
    return {name: f"node {number // PER_NODE}" for number, name in enumerate(names_of(n))}


def _spent_s(function: Callable[..., Any], *arguments: Any) -> float:
    began_s = time.process_time()
    function(*arguments)
    return time.process_time() - began_s


def reform(n: int) -> float:
    """A world of n forms again after one death: n - 1 members join, and each time the membership decides."""
    nodes = nodes_of(n)
    membership = Membership(1, n, n, settle_s=5.0, gather_s=0.3)
    for name in nodes:
        membership.join(name, 0.0, nodes[name])
    assert isinstance(membership.decide(0.0), Form)
    lost, *members = membership.world[::-1]
    membership.lose(lost)
    random.Random(1).shuffle(members)
    # Names come from other processes, so they are equal to those of the world, and other objects.
    members = [bytes(name, "ascii").decode() for name in members]

    def join() -> None:
        for name in members:
            membership.join(name, 0.0, nodes[name])
            decision = membership.decide(1.0)
            assert membership.left_over == 0
        assert isinstance(decision, Form)

    return _spent_s(join)


def seat_anew(n: int) -> float:
    return _spent_s(seat, names_of(n), {}, nodes_of(n), 1, n)


def seat_replicas(n: int) -> float:
    return _spent_s(seat, names_of(n), {}, nodes_of(n), PER_NODE, n // PER_NODE)


def _reports(n: int, step: int) -> dict[str, ProgressReport]:
    found = {}
    for rank, name in enumerate(names_of(n)):
        forward_s = (0.3 + 0.001 * random.Random(rank).random()) * step
        spent_s = {"build": 1.2, "restore": 0.3, "loader": 0.01 * step, "forward": forward_s, "backward": 0.6 * step}
        spent_s |= {"gradients": 0.1 * step, "update": 0.02 * step, "collective": 0.01 * step}
        position = [3 * step, -1, 1, 0, 0]
        found[name] = ProgressReport(1, rank, position, step, "forward", 0.2, 5.0, spent_s, 0.9 * forward_s)
    return found


def stragglers(n: int) -> float:
    return _spent_s(find_straggler, _reports(n, 10), _reports(n, 20))


def silence(n: int) -> float:
    """All are silent, and each is priced as one that ends with all."""
    costs = Costs()
    world = tuple(names_of(n))

    def price() -> None:
        for name in world:
            costs.price(world, world)
            costs.price((name,), world)

    return _spent_s(price)


def takeover(n: int) -> float:
    """All come back to another coordinator, each with a call that waits until all are there."""
    members = tuple(names_of(n))

    async def come() -> None:
        succession = Succession(Timeouts(), expected=True, attempt=1, world=members)
        calls = [asyncio.ensure_future(succession.wait(name)) for name in members]
        for rank, name in enumerate(members):
            if rank == n - 1:
                await asyncio.sleep(0.12)  # the calls wait for the last one
            succession.came(name, WorldAssignment(rank, n, 1, ("", 0), Amendments()))
        assert sum(await asyncio.gather(*calls)) == 1

    return _spent_s(asyncio.run, come())


MICRO = {
    "reform": reform,
    "seat_anew": seat_anew,
    "seat_replicas": seat_replicas,
    "stragglers": stragglers,
    "silence": silence,
    "takeover": takeover,
}
