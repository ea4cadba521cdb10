"""The page of `status --live`: who is admitted, what the page is sent, and how a request to kill is answered."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from importlib.resources import files
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from steadfast.analysis.live import feed as feeds
from steadfast.analysis.live.feed import Feed
from steadfast.analysis.live.server import LiveServer
from steadfast.analysis.report.html import document
from steadfast.errors import RunConflict, UsageError
from steadfast.run import events
from steadfast.run.directory import METRICS, RunDirectory
from steadfast.run.watching import Worker, pop_mark, write_workers
from steadfast.storage.jsonl import open_stream
from tests.support.events import changed
from tests.support.run_directories import ENDED, FIRST, LOG, LOST, NOW_S, SECOND, run_at, started

WORKERS = tuple(
    Worker(
        rank=rank, name=f"m{rank}", node="a" * 56, host="vm", pid=7, step=100, phase="forward", phase_s=0.1, own_ms=20.0
    )
    for rank in (0, 1)
)


LARGEST = sys.float_info.max
# Ranges of an axis: usual ones, values that differ by a rounding, and the ends of what a double holds.
RANGES = [
    (-3.0, -1.0),
    (1.0, 1.000000001),
    (0.3, 0.1 + 0.2),
    (1.0, 1.00000000001),
    (1e16, 1e16 + 2),
    *((value, value) for value in (0.0, 1.0, -1.0, 5e-324, 1e-320, 1e308, LARGEST, -LARGEST)),
    *((0.0, high) for high in (5e-324, 1e-320, 1e308, LARGEST, inf, nan)),
    *((low, 1.0) for low in (-1e-320, -1e308, -LARGEST, -inf, nan)),
    *((-high, high) for high in (1e-320, 1e308, LARGEST, inf)),
]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run that has lost a worker and goes on with two."""
    validated = events.Validation(time_s=NOW_S, attempt=2, step=90, metrics={"loss": 1.75, "accuracy": 0.5})
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST, LOST, ENDED, SECOND, validated)
    write_workers(directory.store, 2, WORKERS)
    return directory


@pytest.fixture
def server(directory: RunDirectory) -> Iterator[LiveServer]:
    with LiveServer(Feed(directory)) as server:
        yield server


def ask(server: LiveServer, path: str, body: str | None = None, **headers: str) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET" if body is None else "POST", path, body, headers)
    return connection.getresponse()


def status_of(server: LiveServer, more: str = "") -> dict[str, Any]:
    answer = ask(server, f"/status.json?token={server.token}{more}")
    assert answer.status == 200
    found: dict[str, Any] = json.loads(answer.read())
    return found


def kill(server: LiveServer, body: str, token: str | None = None) -> tuple[int, str]:
    answer = ask(server, "/kill", body, **{"X-Steadfast-Token": server.token if token is None else token})
    return answer.status, json.loads(answer.read()).get("error", "")


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/status.json", "/status.json?token=%C3%A9", "/else"]
)
def test_a_request_without_the_token_is_refused(server: LiveServer, path: str) -> None:
    answer = ask(server, path)
    assert answer.status == 403
    assert list(json.loads(answer.read())) == ["error"]


def test_a_kill_needs_the_token_in_a_header(server: LiveServer, directory: RunDirectory) -> None:
    assert kill(server, '{"rank": 0}', "")[0] == 403
    assert kill(server, '{"rank": 0}', "wrong")[0] == 403
    assert ask(server, f"/kill?token={server.token}", '{"rank": 0}').status == 403
    assert not directory.pop_requests()


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("evil.example:80", 403), ("127.0.0.1.evil.example", 403), ("localhost:9999", 200)],
)
def test_a_site_whose_name_leads_to_this_machine_is_refused(server: LiveServer, host: str, status: int) -> None:
    assert ask(server, f"/?token={server.token}", Host=host).status == status


def test_the_server_listens_on_the_loopback_alone_and_says_which_port_it_cannot_have(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/?token={server.token}"
    with pytest.raises(UsageError, match=f"--port {server.server_port}: .*choose another port"):
        LiveServer(server.feed, server.server_port)
    with pytest.raises(UsageError, match="--port 70000"):
        LiveServer(server.feed, 70000)


def test_the_page_loads_nothing_from_elsewhere_and_allows_no_other_script(server: LiveServer) -> None:
    answer = ask(server, f"/?token={server.token}")
    page = answer.read().decode()
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", answer.headers["Content-Security-Policy"])
    assert nonce is not None
    assert page.count(f'nonce="{nonce[1]}"') == 2
    assert "{{" not in page
    # The page and the report use the colours of one file.
    palette = files("steadfast.analysis").joinpath("page.css").read_text()
    assert palette in page
    assert palette in document("report", [], {})
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, which is not loaded
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    second = ask(server, f"/?token={server.token}").headers["Content-Security-Policy"]
    assert second != answer.headers["Content-Security-Policy"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_puts_few_ticks_on_an_axis_of_any_range() -> None:
    page = files("steadfast.analysis.live").joinpath("page.html").read_text()
    function = re.search(r"^function ticks\(.*?^}$", page, re.MULTILINE | re.DOTALL)
    assert function is not None
    names = "const inf = Infinity, nan = NaN;"
    asked = ",".join(f"[{low!r},{high!r}]" for low, high in RANGES)
    script = f"{names} {function[0]} console.log(JSON.stringify([{asked}].map(range => ticks(...range, 6))))"
    found = json.loads(
        subprocess.run(
            ["node", "--max-old-space-size=256", "-e", script], capture_output=True, check=True, timeout=20
        ).stdout
    )
    for (low, high), ticks in zip(RANGES, found, strict=True):
        assert len(ticks) <= 7, (low, high)
        assert ticks == sorted(set(ticks)), (low, high)
        assert all(low <= tick <= high for tick in ticks), (low, high, ticks)
    assert found[0] == [-3, -2.5, -2, -1.5, -1]
    assert found[1] == [1, 1.0000000002, 1.0000000004, 1.0000000006, 1.0000000008, 1.000000001]


def test_the_page_gets_losses_events_failures_and_workers(server: LiveServer, directory: RunDirectory) -> None:
    found = status_of(server)
    assert (found["name"], found["state"], found["can_kill"]) == ("run", "running", True)
    assert found["curves"]["train"] == [[100, {"loss": 2.5}]]
    assert found["curves"]["validation"] == [[90, {"loss": 1.75, "accuracy": 0.5}]]
    (interruption,) = found["interruptions"]
    assert interruption["cause"] == "loss of worker m1 on node 01234567: reset"
    assert interruption["cost"] == "0 steps, 2.0 s"
    assert any(each["text"].startswith("worker m1 on node 01234567 ") for each in found["events"])
    assert [(each["rank"], each["phase"], each["own_ms"]) for each in found["workers"]] == [
        (0, "forward", 20.0),
        (1, "forward", 20.0),
    ]
    assert found["log"]["at_risk"] == {"worker": 0, "everything": 40}
    assert found["stuck"] == ""
    assert pop_mark(directory.store)  # so that the coordinator writes the progress of the workers


def test_a_viewer_gets_only_the_points_that_it_does_not_have(
    server: LiveServer, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_EVERY_S", 0.0)

    def log(step: int, loss: float, seconds: float) -> None:
        stream = open_stream(directory.store, METRICS)
        stream.write([changed(LOG, step=step, loss=loss, time_s=NOW_S + seconds).to_line()])
        stream.close()

    version = status_of(server)["curves"]["version"]
    log(110, 2.0, 1)
    curves = status_of(server, f"&version={version}&train=1&validation=1")["curves"]
    assert (curves["from"], curves["train"], curves["validation"]) == ([1, 1], [[110, {"loss": 2.0}]], [])
    log(105, 3.0, 2)  # steps from 101 on were done again
    curves = status_of(server, f"&version={version}&train=2&validation=1")["curves"]
    assert curves["version"] != version
    assert [step for step, _ in curves["train"]] == [100, 105]
    assert curves["from"] == [0, 0]


def test_the_page_gets_the_ranks_that_are_stuck(server: LiveServer, directory: RunDirectory) -> None:
    directory.record(events.Hang(attempt=2, ranks=(0, 1), phase="loader", step=100, seconds=3.0, stacks="s"))
    assert status_of(server)["stuck"] == "ranks 0-1 stuck in loader"


@pytest.mark.parametrize("body", ["", "[]", "{", '{"rank": "1"}', '{"rank": true}', '{"rank": 2}', "1" * 2000])
def test_a_kill_of_no_rank_is_a_bad_request(server: LiveServer, directory: RunDirectory, body: str) -> None:
    status, said = kill(server, body)
    assert status == 400
    assert 'the body {"rank": N}' in said or said == "rank 2 does not train now. Choose from ranks 0-1"
    assert not directory.pop_requests()


def test_a_kill_is_a_request_that_the_command_reads(server: LiveServer, directory: RunDirectory) -> None:
    read: list[Any] = []

    def coordinate() -> None:
        while not read:
            read.extend(directory.pop_requests())

    coordinator = threading.Thread(target=coordinate)
    coordinator.start()
    assert kill(server, '{"rank": 1}') == (200, "")
    coordinator.join()
    assert [request.rank for request in read] == [1]


def test_requests_at_the_same_time_are_all_read(server: LiveServer, directory: RunDirectory) -> None:
    read: list[Any] = []
    over = threading.Event()

    def coordinate() -> None:
        while not over.wait(0.05):
            read.extend(directory.pop_requests())

    with ThreadPoolExecutor(9) as threads:
        threads.submit(coordinate)
        answers = list(threads.map(lambda rank: kill(server, f'{{"rank": {rank % 2}}}'), range(8)))
        over.set()
    assert answers == [(200, "")] * 8
    assert sorted(request.rank for request in read) == [0] * 4 + [1] * 4


def test_an_address_that_is_none_prints_nothing(server: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    for verb in ("GET", "POST"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            connection.sendall(f"{verb} http://[/x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.0 403")
    assert capfd.readouterr().err == ""


def test_a_kill_that_no_coordinator_reads_is_withdrawn(
    server: LiveServer, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_ANSWER_S", 0.1)
    status, said = kill(server, '{"rank": 1}')
    assert status == 409
    assert "did not answer within 0.1 s, so no worker was killed" in said
    assert not directory.pop_requests()


@pytest.mark.parametrize(
    ("launcher", "summary", "said"),
    [
        ("torchrun", None, "Under torchrun, kill the process of a worker"),
        ("ray", {"status": "finished", "step": 100, "metrics": {}}, "is not running, so there is no worker to kill"),
    ],
)
def test_a_run_without_a_coordinator_shows_no_button_and_refuses_a_kill(
    tmp_path: Path, launcher: str, summary: dict[str, Any] | None, said: str
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), changed(started(), launcher=launcher), FIRST, SECOND)
    if summary is not None:
        directory.write_summary(summary)
    feed = Feed(directory)
    assert feed.document()["can_kill"] is False
    with pytest.raises(RunConflict, match=said):
        feed.kill(0)
    assert not pop_mark(directory.store)
