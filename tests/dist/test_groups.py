"""How groups end when they cannot go on: a survivor must be able to form the next ones in the same process."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from steadfast.world.groups import Groups, PeerLost, WorldRank, is_peer_loss
from steadfast.world.timeouts import Timeouts
from tests.support.gang import Gang, Member
from tests.support.reference import CPU

GENERATIONS = 5
FORM_S = 30.0  # less than the time limit of the store


def abort_and_form_again(member: Member, size: int) -> list[int]:
    """The sum over ranks and the pid, generation after generation, each of which every rank aborts."""
    sums = []
    for generation in range(GENERATIONS):
        groups = Groups.form(member.store, WorldRank(member.number, size, generation), CPU, Timeouts())
        ones = torch.ones(1)
        dist.all_reduce(ones)
        sums.append(int(ones))
        dist.barrier(groups.control)
        groups.abort()
        with pytest.raises(RuntimeError) as raised:
            dist.all_reduce(ones)
        assert is_peer_loss(raised.value)
        groups.destroy()
    return [*sums, os.getpid()]


def test_aborted_groups_are_formed_again_in_the_same_process() -> None:
    with Gang(3) as gang:
        first = gang.run(abort_and_form_again, 3)
    assert [answer[:-1] for answer in first] == [[3] * GENERATIONS] * 3
    assert len({answer[-1] for answer in first}) == 3


def stop_half_way(member: Member) -> tuple[bool, int]:
    """Rank 0 sends to a process that stops when the message has begun to arrive; then both abort.

    Returns:
        Whether it was told of the loss, and a sum over the ranks of the next world.
    """
    groups = Groups.form(member.store, WorldRank(member.number, 2, 1), CPU, Timeouts())
    message = torch.full((2**26,), 1.0 - member.number)
    work = dist.broadcast(message, 0, async_op=True)
    if member.number == 1:
        member.store.set("pid", str(os.getpid()))
        while not message[0]:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        pid = int(member.store.get("pid"))
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass
    groups.abort()
    try:
        groups.wait([work])
        lost = False
    except (PeerLost, RuntimeError):
        lost = True
    if member.number == 0:
        os.kill(pid, signal.SIGCONT)
    groups.destroy()
    groups = Groups.form(member.store, WorldRank(member.number, 2, 2), CPU, Timeouts())
    ones = torch.ones(1)
    dist.all_reduce(ones, group=groups.control)
    groups.destroy()
    return lost, int(ones)


@pytest.mark.timeout(60)
def test_an_abort_frees_who_has_sent_half_a_message() -> None:
    with Gang(2) as gang:
        assert gang.run(stop_half_way) == [(True, 2), (True, 2)]


def fail_to_form_and_form(member: Member, half_way: bool) -> int:
    """One of two waits for the other in vain, which may have come to the first of the groups; then both come."""
    if member.number == 1 and half_way:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", Mock(side_effect=RuntimeError("Connection reset by peer")))
            with pytest.raises(PeerLost):
                Groups.form(member.store, WorldRank(1, 2, 1), CPU, Timeouts())
    if member.number == 0:
        began_s = time.monotonic()
        with pytest.raises(PeerLost, match="timeout after 300ms" if half_way else "timeout after 800ms"):
            Groups.form(member.store, WorldRank(0, 2, 1), CPU, Timeouts(silence_s=0.2))
        assert time.monotonic() - began_s < FORM_S
        limit: timedelta = member.store.timeout  # type: ignore[attr-defined]  # the stub lacks it
        assert limit.total_seconds() > FORM_S  # as before, for other uses of the store
    groups = Groups.form(member.store, WorldRank(member.number, 2, 2), CPU, Timeouts())
    ones = torch.ones(1)
    dist.all_reduce(ones, group=groups.control)
    groups.destroy()
    return int(ones)


@pytest.mark.parametrize("half_way", [False, True])
def test_one_who_has_failed_to_form_a_world_forms_the_next_one_with_somebody_who_has_not(half_way: bool) -> None:
    with Gang(2) as gang:
        assert gang.run(fail_to_form_and_form, half_way) == [2, 2]


class CountingStore(dist.Store):
    """Counts the operations on a store, and the bytes that it answers."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.num_operations = self.num_bytes = 0
        self._store = store

    def _count(self, name: str, *args: Any) -> Any:
        self.num_operations += 1
        answer = getattr(self._store, name)(*args)
        self.num_bytes += sum(map(len, [answer] if isinstance(answer, bytes) else answer or []))
        return answer

    def set(self, key: str, value: str) -> None:
        self._count("set", key, value)

    def get(self, key: str) -> Any:
        return self._count("get", key)

    def multi_get(self, keys: list[str]) -> Any:
        return self._count("multi_get", keys)

    def wait(self, keys: list[str], limit: object = None) -> None:
        self._count("wait", keys)

    def add(self, key: str, number: int) -> int:
        self.num_operations += 1
        return self._store.add(key, number)

    def has_extended_api(self) -> bool:
        return True


def count_operations(member: Member, size: int) -> list[tuple[int, int]]:
    """Operations and bytes of this rank while a world forms, and after an abort another one without the last rank."""
    counts = []
    for attempt, num_ranks in ((1, size), (2, size - 1)):
        if member.number < num_ranks:
            store = CountingStore(dist.PrefixStore(str(size), member.store))
            rank = WorldRank(member.number, num_ranks, attempt)
            groups = Groups.form(store, rank, CPU, Timeouts(FORM_S))
            counts.append((store.num_operations, store.num_bytes))
            dist.barrier(groups.control)
            groups.abort()
            groups.destroy()
    return counts


@pytest.mark.timeout(60)
def test_operations_on_the_store_of_a_world_grow_linearly_with_its_ranks() -> None:
    with Gang(8) as gang:
        for size in (4, 8):
            answers = gang.run(count_operations, size)
            for attempt, num_ranks in ((0, size), (1, size - 1)):
                operations, num_bytes = zip(*(answer[attempt] for answer in answers[:num_ranks]), strict=True)
                assert sum(operations) <= 10 * num_ranks  # plus two for the connection of each rank
                assert sum(num_bytes) <= 350 * num_ranks**2
