"""What a run of hundreds of workers costs the coordinator: CPU seconds that grow with the workers, not their square.

The bounds are several times what an idle core needs, and a fraction of what quadratic code needs here.
"""

import asyncio
from pathlib import Path

import pytest

from tests.scale.crowd import SWITCH, Crowd
from tests.scale.micro import MICRO

N = 400


@pytest.mark.parametrize("name", MICRO)
def test_what_grows_with_the_workers_grows_no_faster(name: str) -> None:
    assert min(MICRO[name](10_000) for _ in range(3)) < 1.0


def test_each_event_costs_little_and_makes_one_world(tmp_path: Path) -> None:
    async def play() -> None:
        async with Crowd.formed(tmp_path, N) as crowd:
            deaths = [await crowd.lose() for _ in range(3)]
            assert [(death.attempts, death.size) for death in deaths] == [(1, N - 1), (1, N - 2), (1, N - 3)]
            assert min(death.cpu_s for death in deaths) < 0.2
            assert deaths[0].quiet_cores < 0.1
            grown = await crowd.grow()
            assert (grown.attempts, grown.size) == (1, N - 3 + N // 10)
            assert grown.cpu_s < 0.6
            size = len(crowd.workers)
            drained = await crowd.drain()
            assert (drained.attempts, drained.size) == (1, len(crowd.workers))
            assert drained.size < size
            assert drained.cpu_s < 0.6
            restarted = await crowd.restart()
            assert (restarted.attempts, restarted.failed) == (0, 3)
            assert restarted.cpu_s < 0.8

    asyncio.run(play())


def test_a_lost_switch_is_one_failure_and_makes_one_world(tmp_path: Path) -> None:
    async def play() -> None:
        async with Crowd.formed(tmp_path, 256) as crowd:
            lost = await crowd.lose(SWITCH)
            assert (lost.attempts, lost.size, lost.failed) == (1, 256 - SWITCH, 1)
            assert lost.cpu_s < 0.3

    asyncio.run(play())
