"""Each cloud's notice of preemption, by its own protocol, and everything that a metadata service may answer instead."""

import contextlib
import functools
import json
import logging
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from unittest.mock import Mock

import pytest

from cluster import spot_watcher
from cluster.spot_watcher import Ask, Aws, FirstToAnswer, Notice, Watcher, azure, gcp
from tests.support.metadata import (
    EVENTS,
    INSTANCE_ACTION,
    NAME,
    PREEMPTED,
    REBALANCE,
    Handler,
    MetadataService,
    metadata_service,
)

NOW_S = 1_800_000_000.0
DEADLINE_S = NOW_S + 100
DEADLINE = datetime.fromtimestamp(DEADLINE_S, UTC)
CLOUDS = ["aws", "gcp", "azure"]


def zulu(moment: datetime = DEADLINE) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def event(kind: str = "Preempt", resources: tuple[str, ...] = ("vm_3",), **fields: str) -> dict[str, object]:
    described = {"EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(resources)}
    return {**described, "EventStatus": "Scheduled", "NotBefore": format_datetime(DEADLINE, usegmt=True), **fields}


def events(*listed: dict[str, object]) -> str:
    return json.dumps({"DocumentIncarnation": 2, "Events": list(listed)})


NOTICES = {
    "aws": {INSTANCE_ACTION: json.dumps({"action": "terminate", "time": zulu()})},
    "gcp": {PREEMPTED: "TRUE"},
    "azure": {EVENTS: events(event())},
}
REAL_DEADLINE_S = {"aws": DEADLINE_S, "gcp": NOW_S + 30, "azure": DEADLINE_S}


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[MetadataService]:
    with metadata_service(*getattr(request, "param", CLOUDS)) as started:
        yield started


def cloud(name: str, host: str) -> Ask:
    clock = functools.partial(float, NOW_S)
    clouds: dict[str, Ask] = {
        "aws": Aws(host, False),
        "gcp": functools.partial(gcp, host, clock),
        "azure": functools.partial(azure, host, clock),
    }
    return clouds[name]


@pytest.mark.parametrize("name", CLOUDS)
def test_no_notice_then_a_notice_with_its_deadline(
    service: MetadataService, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not asked
    ask = cloud(name, service.host)
    assert ask() is None
    service.items.update(NOTICES[name])
    assert ask().deadline_s == REAL_DEADLINE_S[name]


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_every_action_of_aws_is_a_notice(service: MetadataService, action: str) -> None:
    service.items[INSTANCE_ACTION] = json.dumps({"action": action, "time": zulu()})
    assert Aws(service.host, False)() == Notice(DEADLINE_S, f"AWS spot: {action}")


def test_a_token_is_kept_until_it_expires_and_then_renewed(service: MetadataService) -> None:
    ask = Aws(service.host, False)
    for _ in range(3):
        assert ask() is None
    assert len(service.tokens) == 1
    service.tokens.append("of somebody else")  # ours is valid no more
    service.items.update(NOTICES["aws"])
    assert ask() == Notice(DEADLINE_S, "AWS spot: terminate")
    assert len(service.tokens) == 3


def test_a_rebalance_recommendation_counts_only_where_asked_for_and_after_the_action(service: MetadataService) -> None:
    service.items[REBALANCE] = json.dumps({"noticeTime": zulu()})
    assert Aws(service.host, False)() is None
    ask = Aws(service.host, True)
    assert ask() == Notice(DEADLINE_S + 120, "AWS spot: rebalance recommended")
    service.items.update(NOTICES["aws"])
    assert ask() == Notice(DEADLINE_S, "AWS spot: terminate")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([event(resources=("vm_1", "vm_3"))], Notice(DEADLINE_S, "Azure: Preempt")),
        ([event("Terminate")], Notice(DEADLINE_S, "Azure: Terminate")),
        ([event(EventStatus="Started", NotBefore="")], Notice(NOW_S, "Azure: Preempt")),
        ([event("Terminate"), event(EventStatus="Started", NotBefore="")], Notice(NOW_S, "Azure: Preempt")),
        ([event(resources=("vm_1", "vm_33"))], None),
        ([event("Freeze"), event("Reboot"), event("Redeploy")], None),
    ],
)
def test_events_of_azure_that_end_this_machine_are_notices(
    service: MetadataService, listed: list[dict[str, object]], expected: Notice | None
) -> None:
    service.items[EVENTS] = events(*listed)
    assert cloud("azure", service.host)() == expected


def reset(handler: Handler) -> None:
    """Ends the connection as a machine does that knows nothing of it."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True


def hang(handler: Handler) -> None:
    handler.server.released.wait(10)
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """Never a whole answer, never a pause as long as the time-out."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.released.wait(0.02):
        handler.wfile.write(b"X")


def body(text: str, **options: object) -> Callable[[Handler], object]:
    return lambda handler: handler.answer(200, text, **options)  # type: ignore[arg-type]


def notice_of(handler: Handler) -> str:
    return next(answers[handler.path] for answers in NOTICES.values() if handler.path in answers)


WRONG: dict[str, Callable[[Handler], object]] = {
    "internal error": lambda handler: handler.answer(500, notice_of(handler)),
    "unavailable": lambda handler: handler.answer(503, notice_of(handler)),
    "redirect to a notice": lambda handler: handler.answer(302, Location=f"http://{handler.server.host}/elsewhere"),
    "empty": body(""),
    "garbage": body("{]"),
    "not UTF-8": lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe"),
    "no HTTP": lambda handler: handler.wfile.write(b"\0\1\2 what\r\n\r\n"),
    "a login page": body("<html><body>TRUE terminate Preempt vm_3</body></html>"),
    "another type": body('["terminate"]'),
    "missing fields": body('{"action": "terminate", "Events": [{"EventType": "Preempt"}]}'),
    "no moment": body(
        '{"action": "terminate", "time": "soon", "Events": '
        '[{"EventType": "Preempt", "EventStatus": "Scheduled", "Resources": ["vm_3"], "NotBefore": "soon"}]}'
    ),
    "no zone": body(
        '{"action": "terminate", "time": "2027-01-15T08:01:40", "Events": [{"EventType": "Preempt", "EventStatus": '
        '"Scheduled", "Resources": ["vm_3"], "NotBefore": "Fri, 15 Jan 2027 08:01:40 -0000"}]}'
    ),
    "unknown action": body(f'{{"action": "dance", "time": "{zulu()}"}}'),
    "deep": body("[" * 100_000),
    "cut": lambda handler: handler.answer(200, notice_of(handler)[:-1], length=len(notice_of(handler))),
    "whole but for its length": lambda handler: handler.answer(200, notice_of(handler), length=500),
    "no answer": reset,
    "hangs": hang,
    "drips": drip,
}


@contextlib.contextmanager
def answering(service: MetadataService, wrong: Callable[[Handler], object]) -> Iterator[None]:
    """With a short time-out only here: a right answer may take its time on a busy machine."""
    service.ill = wrong
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spot_watcher, "REQUEST_TIMEOUT_S", 0.1)
        yield
    service.ill = None


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_neither_drains_nor_ends_the_watcher_and_is_told_once(
    service: MetadataService, name: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    drained: list[Notice] = []
    watcher = Watcher(cloud(name, service.host), drained.append)
    service.items["/elsewhere"] = next(iter(NOTICES[name].values()))
    watcher.poll()
    with answering(service, WRONG[wrong]):
        watcher.poll()
        watcher.poll()
    assert drained == []
    assert "/elsewhere" not in service.asked
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no notice of preemption",
        "no sensible answer from the metadata service",
    ]
    service.items.update(NOTICES[name])
    watcher.poll()
    assert [notice.deadline_s for notice in drained] == [REAL_DEADLINE_S[name]]


@pytest.mark.parametrize("name", CLOUDS)
def test_a_refused_connection_is_a_wrong_answer(name: str) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            cloud(name, f"127.0.0.1:{unheard.getsockname()[1]}")()


@pytest.mark.parametrize("wrong", ["empty", "hangs", "no answer"])
def test_the_name_of_an_azure_machine_may_fail_too(service: MetadataService, wrong: str) -> None:
    service.items.update(NOTICES["azure"])
    service.ill_at = (NAME,)
    drained: list[Notice] = []
    watcher = Watcher(cloud("azure", service.host), drained.append)
    with answering(service, WRONG[wrong]):
        watcher.poll()
    assert drained == []
    watcher.poll()
    assert len(drained) == 1


@pytest.mark.parametrize(("service", "name"), [([each], each) for each in CLOUDS], indirect=["service"])
def test_the_cloud_that_answers_is_the_one_that_is_asked_from_then_on(service: MetadataService, name: str) -> None:
    ask = FirstToAnswer({each: cloud(each, service.host) for each in CLOUDS})
    assert ask() is None
    service.asked.clear()
    service.items.update(NOTICES[name])
    assert ask().deadline_s == REAL_DEADLINE_S[name]
    assert {path for path in service.asked if path != NAME} == set(NOTICES[name])


@pytest.mark.parametrize("service", [()], indirect=True)
def test_a_metadata_service_may_come_up_after_the_watcher(service: MetadataService) -> None:
    drained: list[Notice] = []
    watcher = Watcher(FirstToAnswer({each: cloud(each, service.host) for each in CLOUDS}), drained.append)
    for clouds in ((), (), ("aws",)):
        assert drained == []
        service.clouds = clouds
        service.items.update(NOTICES["aws"])
        watcher.poll()
    assert drained == [Notice(DEADLINE_S, "AWS spot: terminate")]


def polled(*said: Notice | Exception | None, refusals: int = 0, polls: int = 8) -> list[float]:
    """Deadlines that Ray was asked for; at each poll the cloud says the next of these, the last for ever."""
    asked: list[float] = []
    cloud = Mock(side_effect=[*said, *said[-1:] * polls])

    def drain(notice: Notice) -> None:
        asked.append(notice.deadline_s)
        if len(asked) <= refusals:
            raise RuntimeError("the head does not answer")

    watcher = Watcher(cloud, drain)
    for _ in range(polls):
        watcher.poll()
    return asked


def at(deadline_s: float) -> Notice:
    return Notice(deadline_s, "going")


@pytest.mark.parametrize(
    ("said", "refusals", "asked"),
    [
        pytest.param([None, at(30)], 0, [30], id="a notice drains once"),
        pytest.param([None, at(30)], 3, [30] * 4, id="until Ray accepts"),
        pytest.param([at(30), OSError()], 3, [30] * 4, id="also while the cloud gives wrong answers"),
        pytest.param([at(30), at(30), None], 9, [30, 30], id="withdrawn before Ray has accepted"),
        pytest.param([at(30 + second) for second in range(8)], 3, [30] * 4, id="moves with the clock"),
        pytest.param([at(120), at(150), at(119.5), at(30), at(120)], 0, [120, 30], id="only a sooner deadline"),
        pytest.param([at(30), None, at(200)], 0, [30, 200], id="anew after one that was withdrawn"),
    ],
)
def test_a_watcher_drains_once_for_each_notice_and_tries_again_where_ray_refuses(
    said: list[Notice | Exception | None], refusals: int, asked: list[float]
) -> None:
    assert polled(*said, refusals=refusals) == asked


def test_refusals_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    polled(at(30), OSError(), at(30), refusals=5)
    told = [record.message for record in caplog.records]
    assert sum("could not be drained" in message for message in told) == 1
    assert sum("Ray drains the node until 30.0" in message for message in told) == 1


def test_a_drain_without_ray_names_its_reason_and_lasts_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="not-a-host"):
        spot_watcher.drain_in_child(at(NOW_S), address="not-a-host", node_ip="")
    monkeypatch.setattr(spot_watcher, "DRAIN_TIMEOUT_S", 0.3)  # Ray's client takes 40 s
    with pytest.raises(subprocess.TimeoutExpired):
        spot_watcher.drain_in_child(at(NOW_S), address="127.0.0.1:1", node_ip="")


def test_watching_needs_only_the_standard_library() -> None:
    names = ("ray", "torch", "steadfast", "grpc")
    code = f"import sys, cluster.spot_watcher; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
