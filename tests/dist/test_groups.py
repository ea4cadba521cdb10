"""How groups end when they cannot go on: a survivor must be able to form the next ones in the same process."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from app.groups import Groups, is_peer_loss
from app.timeouts import Timeouts
from tests.dist.gang import Gang, Member

GENERATIONS = 5


def abort_and_form_again(member: Member, size: int) -> list[int]:
    """The sum over ranks and the pid, generation after generation, each of which every rank aborts."""
    sums = []
    for generation in range(GENERATIONS):
        groups = Groups.form(member.store, member.number, size, generation, torch.device("cpu"), Timeouts())
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
