"""Slots without Ray: how many are open at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from app.orchestration.internals.slots import _MOST_PENDING, SlotWorkerGroup


class Group(SlotWorkerGroup):
    """Slots whose keepers do nothing."""

    def __init__(self) -> None:
        self._slots = []

    def _keep(self, slot: Any) -> None:
        slot.closed.wait(20)


@pytest.mark.parametrize("count", [3, 10**26])
def test_only_some_slots_wait_for_room_at_a_time_whatever_is_asked_for(count: int) -> None:
    group = Group()
    threads = threading.active_count()
    for expected in (_MOST_PENDING, 2 * _MOST_PENDING, 4 * _MOST_PENDING):
        group._open(count)
        group._open(count)
        assert len(group._slots) == min(count, expected)
        for slot in group._slots:
            slot.worker = object()
    assert threading.active_count() - threads == min(count, 4 * _MOST_PENDING)
    for slot in group._slots:
        slot.closed.set()
