"""How groups end when they cannot go on: a survivor must be able to form the next ones in the same process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from steadfast.world.groups import Groups, PeerLost, WorldRank, is_peer_loss
from steadfast.world.timeouts import Timeouts
from tests.support.gang import Gang, Member

GENERATIONS = 5


def abort_and_form_again(member: Member, size: int) -> list[int]:
    """The sum over ranks and the pid, generation after generation, each of which every rank aborts."""
    sums = []
    for generation in range(GENERATIONS):
        groups = Groups.form(member.store, WorldRank(member.number, size, generation), torch.device("cpu"), Timeouts())
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
    cpu = torch.device("cpu")
    groups = Groups.form(member.store, WorldRank(member.number, 2, 1), cpu, Timeouts())
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
    groups = Groups.form(member.store, WorldRank(member.number, 2, 2), cpu, Timeouts())
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
    cpu = torch.device("cpu")
    if member.number == 1 and half_way:
        member.store.set("attempt-1/here/1", "")
        dist.init_process_group("gloo", store=dist.PrefixStore("attempt-1", member.store), rank=1, world_size=2)
        dist.destroy_process_group()
    if member.number == 0:
        with pytest.raises(PeerLost):
            Groups.form(member.store, WorldRank(0, 2, 1), cpu, Timeouts(silence_s=0.2))
    groups = Groups.form(member.store, WorldRank(member.number, 2, 2), cpu, Timeouts())
    ones = torch.ones(1)
    dist.all_reduce(ones, group=groups.control)
    groups.destroy()
    return int(ones)


@pytest.mark.parametrize("half_way", [False, True])
def test_one_who_has_failed_to_form_a_world_forms_the_next_one_with_somebody_who_has_not(half_way: bool) -> None:
    with Gang(2) as gang:
        assert gang.run(fail_to_form_and_form, half_way) == [2, 2]
