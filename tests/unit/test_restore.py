"""Which states still count when a restore is interrupted."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch

from steadfast.checkpoint import restore as module
from steadfast.checkpoint.restore import restore
from steadfast.checkpoint.state import HeldState
from steadfast.world.groups import Groups, PeerLost


# Each rank holds one of `steps`, the copy in memory is of step `copy`, and the checkpoint of step 3.
@pytest.mark.parametrize(
    ("rank", "steps", "garbage", "copy", "error", "kept"),
    [
        (0, [5, 5, 4], True, 4, "aborted", 5),  # is the source
        (1, [5, 5, 4], False, 4, "aborted", 5),  # receives equal bytes
        (1, [5, 5, 4], True, 4, "aborted", None),  # an abort leaves garbage in place of them
        (2, [5, 5, 4], False, 4, "aborted", None),
        (0, [0, 0], False, 3, "copy", None),  # which is as new as the checkpoint, and nearer
        (0, [0, 0], False, 2, "checkpoint", None),
        (1, [0, 0], False, 2, "aborted", None),  # receives what the other rank reads
    ],
)
def test_restore_keeps_only_a_state_that_nothing_has_overwritten_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, rank: int, steps: list[int], garbage: bool, copy: int, error: str, kept: int | None
) -> None:
    monkeypatch.setattr(module, "gather_numbers", lambda number, group: torch.tensor(steps))
    aborted = threading.Event()
    communicator = Mock(abort_leaves_garbage=garbage, **{"group.rank.return_value": rank})
    communicator.broadcast.side_effect = lambda tensor, source: aborted.set()
    groups = Groups(Mock(), communicator, Mock(), {}, aborted)
    stored = Mock(step=3)
    world = Mock(groups=groups, replica_size=1, part=0, leader=rank == 0)
    read = {"newest.return_value": stored, "find.return_value": stored, "load.side_effect": OSError("checkpoint")}
    checkpoints = Mock(world=world, replicated=True, **read)
    snapshots = Mock(**{"find.return_value": Mock(step=copy), "load.side_effect": OSError("copy")})
    held = HeldState()
    held.complete(steps[rank])
    with pytest.raises((OSError, PeerLost), match=error):
        restore({"model": {"w": torch.zeros(4)}}, held, Mock(), checkpoints, snapshots)
    assert held.step == kept
