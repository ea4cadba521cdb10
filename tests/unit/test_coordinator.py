"""The coordinator without Ray: who was cut off and comes back finds that the others have gone on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.config import RecoveryConfig
from app.orchestration.coordinator import Coordinator
from app.orchestration.messages import FailureReport, Leave, Member
from app.run.directory import RunDirectory
from app.run.events import Finished
from app.run.owner import Ownership
from app.storage import LocalStore
from tests.events import event_lines


def failure(kind: str, attempt: int = 1) -> FailureReport:
    return FailureReport(kind, attempt, step=7, message="another attempt has taken over", traceback="")


async def partition(folder: Path, come_back: Any) -> tuple[Coordinator, Any]:
    """Two workers make a world; one is cut off, and the other goes on alone. Then `come_back(coordinator, member)`."""
    directory = RunDirectory(LocalStore(folder))
    directory.check_writable()
    ownership = Ownership.claim(directory.store)
    subject = Coordinator(RecoveryConfig(), (1, 2), directory, ownership, expected=2)
    here, cut_off = (Member(name, actor=None, node=name) for name in ("here", "cut_off"))
    assignments = await asyncio.gather(subject.join(here), subject.join(cut_off))
    assert [each.attempt for each in assignments] == [1, 1]
    subject.lose("cut_off", "not heard of for 5 s")
    await subject.failed("here", failure("peer"))
    assert (await subject.join(here)).attempt == 2
    answer = await come_back(subject, cut_off)
    await subject.close()
    return subject, answer


def told(subject: Coordinator, name: str) -> list[int | None]:
    """The attempts of the events so called."""
    return [event.get("attempt") for event in event_lines(subject._directory) if event["event"] == name]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda actor: None)


@pytest.mark.parametrize("kind", ["peer", "ours", "numeric", "exception"])
def test_its_failure_ends_neither_the_attempt_under_way_nor_the_run(tmp_path: Path, kind: str) -> None:
    subject, over = asyncio.run(partition(tmp_path, lambda it, member: it.failed(member.name, failure(kind))))
    assert not over
    assert told(subject, "attempt_ended") == [1]


def test_what_it_finished_without_the_others_does_not_count(tmp_path: Path) -> None:
    subject, _ = asyncio.run(partition(tmp_path, lambda it, _: it.publish(Finished(attempt=1, summary={"step": 9}))))
    assert told(subject, "finished") == []
    assert not subject.over


def test_it_gets_no_assignment_without_heartbeats(tmp_path: Path) -> None:
    _, answer = asyncio.run(partition(tmp_path, lambda it, member: it.join(member)))
    assert answer is Leave.RELEASED


def test_a_newcomer_that_fails_before_it_is_in_a_world_ends_no_attempt(tmp_path: Path) -> None:
    subject, over = asyncio.run(partition(tmp_path, lambda it, _: it.failed("new", failure("exception", attempt=0))))
    assert not over
    assert told(subject, "attempt_ended") == [1]


def test_a_newcomer_that_fell_silent_before_it_came_is_sent_away_and_told_of_once(tmp_path: Path) -> None:
    async def come(it: Coordinator, _: Member) -> list[Any]:
        it.lose("new", "not heard of for 5 s")
        return [await it.join(Member("new", actor=None, node="new")) for _ in range(2)]

    subject, answers = asyncio.run(partition(tmp_path, come))
    assert answers == [Leave.RELEASED] * 2
    assert len(told(subject, "failure")) == 2  # with that of the one that was cut off
