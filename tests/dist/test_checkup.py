"""Links and collectives as `doctor` measures them, in real processes, on networks that are good, slow and wrong."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from steadfast.doctor.findings import Link, judge_collectives, judge_links
from steadfast.doctor.network import (
    COLLECTIVES,
    CollectiveFigures,
    LinkFigures,
    RankHost,
    measure_collectives,
    measure_link,
)
from tests.support.gang import Gang, Member

CPU = torch.device("cpu")
SIZES = (2**10, 2**16)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(3) as gang:
        yield gang


def collectives(member: Member, port: int, number: int, broken: str, where: int) -> list[CollectiveFigures]:
    """Run all collectives; process `where` finds another value at one place of what `broken` gives it."""
    stock: Any = getattr(dist, broken, None)

    def corrupt(tensor: torch.Tensor, *others: Any, **named: Any) -> None:
        stock(tensor, *others, **named)
        target = others[0][1] if broken == "gather" else tensor
        target[100] += 1

    with pytest.MonkeyPatch.context() as patch:
        if stock and member.number == where:
            patch.setattr(dist, broken, corrupt)
        return measure_collectives(RankHost("127.0.0.1", port, number, member.number, 3), CPU, SIZES)


def measured(gang: Gang, number: int, broken: str = "", where: int = 0) -> dict[str, list[CollectiveFigures]]:
    answers = gang.run(collectives, gang._store.port, number, broken, where)
    return {f"w{rank}": answer for rank, answer in enumerate(answers)}


def test_collectives_that_work_are_right(gang: Gang) -> None:
    findings = judge_collectives(measured(gang, 1), "gloo")
    assert [finding.level for finding in findings] == ["ok"] * 4
    assert [finding.what.split()[0] for finding in findings] == list(COLLECTIVES)
    assert all(finding.figures.keys() == {"1024", "65536"} for finding in findings)


@pytest.mark.parametrize(("broken", "where"), [("all_reduce", 2), ("broadcast", 1), ("gather", 0), ("scatter", 2)])
def test_a_collective_that_corrupts_is_named_with_the_node(gang: Gang, broken: str, where: int) -> None:
    number = 2 + list(COLLECTIVES).index(broken)
    findings = judge_collectives(measured(gang, number, broken, where), "gloo")
    errors = [each for each in findings if each.level == "error"]
    assert len(errors) == 1
    index = 356 if broken == "gather" else 100  # the second of three messages of 256 elements
    assert errors[0].what.startswith(f"{broken} gives w{where} a wrong result: element {index} of ")


def narrow(num_bytes: int) -> float:
    """Return the seconds that a message takes over a link of 5 Mbit/s."""
    return num_bytes / 625e3


def bursting(num_bytes: int) -> float:
    """Return the seconds that a message takes over a link of 80 Mbit/s that lets small messages through at once."""
    return num_bytes / 1e7 if num_bytes > 2**16 else 0.0


def over(member: Member, port: int, number: int, takes_s: Callable[[int], float]) -> tuple[LinkFigures | None, int]:
    """Measure a link on which messages take these times. Return what came of it, and the bytes of the largest one."""
    largest = 0

    def send(tensor: torch.Tensor, *others: Any) -> None:
        nonlocal largest
        largest = max(largest, tensor.nbytes)
        time.sleep(takes_s(tensor.nbytes))
        stock(tensor, *others)

    stock = dist.send
    if member.number == 2:
        return None, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", send)
        return measure_link(RankHost("127.0.0.1", port, number, member.number, 2), CPU), largest


def test_a_slow_link_is_sent_no_large_message_and_one_that_is_fast_for_small_ones_only_is_slow(gang: Gang) -> None:
    (figures, largest), *_ = gang.run(over, gang._store.port, 40, narrow)
    assert largest == 2**19  # the next size would take 14 seconds
    assert 4e5 < figures.bytes_per_s <= 625e3
    (figures, _), *_ = gang.run(over, gang._store.port, 41, bursting)
    assert 5e6 < figures.bytes_per_s <= 1e7


def links(member: Member, port: int, number: int, fault: str) -> dict[str, LinkFigures | None]:
    """Measure all pairs of three processes; process 2 is behind a link with a fault."""

    def send(tensor: torch.Tensor, *others: Any) -> None:
        time.sleep(0.02)
        stock(tensor, *others)

    def recv(tensor: torch.Tensor, *others: Any) -> None:
        receive(tensor, *others)
        if tensor.dtype == torch.float32:
            tensor[-1] += 1

    stock, receive = dist.send, dist.recv
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        if member.number == 2 and fault == "slow":
            patch.setattr(dist, "send", send)
        if member.number == 2 and fault == "corrupt":
            patch.setattr(dist, "recv", recv)
        for count, pair in enumerate(((0, 1), (0, 2), (1, 2))):
            if member.number in pair:
                place = RankHost("127.0.0.1", port, number + count, pair.index(member.number), 2)
                found[f"{pair[0]}{pair[1]}"] = measure_link(place, CPU)
    return found


@pytest.mark.parametrize(("number", "fault"), [(10, "none"), (20, "slow"), (30, "corrupt")])
def test_pairs_are_measured_and_those_with_a_fault_are_named(gang: Gang, number: int, fault: str) -> None:
    answers = gang.run(links, gang._store.port, number, fault)
    of_first = {"01": answers[0]["01"], "02": answers[0]["02"], "12": answers[1]["12"]}
    findings = judge_links([Link(pair[0], pair[1], figures) for pair, figures in of_first.items()])
    if fault == "none":
        assert [finding.level for finding in findings] == ["ok"]
    else:
        assert [finding.what[:5] for finding in findings] == ["0 - 2", "1 - 2"]
        assert {finding.level for finding in findings} == {"warning" if fault == "slow" else "error"}
