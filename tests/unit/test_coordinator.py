"""The coordinator without Ray: who was cut off and comes back finds that the others have gone on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.config import parse_config
from app.orchestration import coordinator
from app.orchestration.coordinator import Coordinator
from app.orchestration.messages import Dismissal, Failure, Member
from app.owner import Ownership
from app.rundir import RunDirectory
from app.storage import LocalStore

CONFIG = "{scaling: {num_workers: [1, 2]}}"


def failure(kind: str, attempt: int = 1) -> Failure:
    return Failure(kind, attempt, step=7, message="another attempt has taken over", traceback="")


async def partition(folder: Path, come_back: Any) -> tuple[Coordinator, Any]:
    """Two workers make a world; one is cut off, and the other goes on alone. Then `come_back(coordinator, member)`."""
    directory = RunDirectory(LocalStore(folder))
    directory.create()
    subject = Coordinator(parse_config(CONFIG), directory, Ownership.claim(directory.store), expected=2, slots=True)
    here, cut_off = (Member(name, actor=None, node=name) for name in ("here", "cut_off"))
    seats = await asyncio.gather(subject.join(here, None), subject.join(cut_off, None))
    assert [seat.attempt for seat in seats] == [1, 1]
    subject._lost("cut_off", "not heard of for 5 s")
    await subject.failed("here", failure("peer"))
    assert (await subject.join(here, None)).attempt == 2
    return subject, await come_back(subject, cut_off)


def told(subject: Coordinator, name: str) -> list[int | None]:
    """The attempts of the events so called."""
    return [event.get("attempt") for event in subject._directory.read_events() if event["event"] == name]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.ray, "kill", lambda actor: None)


@pytest.mark.parametrize("kind", ["peer", "ours", "numeric", "exception"])
def test_its_failure_ends_neither_the_attempt_under_way_nor_the_run(tmp_path: Path, kind: str) -> None:
    subject, over = asyncio.run(partition(tmp_path, lambda it, member: it.failed(member.name, failure(kind))))
    assert not over
    assert told(subject, "attempt_ended") == [1]


def test_what_it_finished_without_the_others_does_not_count(tmp_path: Path) -> None:
    subject, _ = asyncio.run(
        partition(tmp_path, lambda it, _: it.publish({"event": "finished", "attempt": 1, "step": 9}))
    )
    assert told(subject, "finished") == []
    assert not subject._over


def test_it_gets_no_seat_without_a_lifeline(tmp_path: Path) -> None:
    _, answer = asyncio.run(partition(tmp_path, lambda it, member: it.join(member, None)))
    assert answer is Dismissal.LEFT


def test_a_newcomer_that_fails_before_it_has_a_seat_ends_no_attempt(tmp_path: Path) -> None:
    subject, over = asyncio.run(partition(tmp_path, lambda it, _: it.failed("new", failure("exception", attempt=0))))
    assert not over
    assert told(subject, "attempt_ended") == [1]


def test_a_newcomer_that_fell_silent_before_it_came_is_sent_away_and_told_of_once(tmp_path: Path) -> None:
    async def come(it: Coordinator, _: Member) -> list[Any]:
        it._lost("new", "not heard of for 5 s")
        return [await it.join(Member("new", actor=None, node="new"), None) for _ in range(2)]

    subject, answers = asyncio.run(partition(tmp_path, come))
    assert answers == [Dismissal.LEFT] * 2
    assert len(told(subject, "failure")) == 2  # with that of the one that was cut off
