"""A bucket on a real S3 server, over a network that refuses, drags and breaks off."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from steadfast.storage import Store, open_store
from tests.support.s3 import BUCKET, FaultKind, Proxy
from tests.support.stores import StoreContract, claim_in_pairs

LARGE = os.urandom(1 << 20) * 21  # three parts of an upload


@pytest.fixture
def store(proxy: Proxy, request: pytest.FixtureRequest) -> Store:
    return open_store(proxy.uri(f"tests/{abs(hash(request.node.nodeid)):x}"))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.storage.arrow._IDLE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("steadfast.storage.arrow._RETRY_BUDGET_S", 1.0)
    monkeypatch.setattr("steadfast.storage.arrow._ATTEMPTS_WITHIN_A_WRITE", 2)


def bounded(verb: Callable[[], object], limit_s: float) -> None:
    started = time.monotonic()
    verb()
    assert time.monotonic() - started < limit_s


class TestContract(StoreContract):
    pass


def test_large_files_read_back(store: Store) -> None:
    store.write("file", (LARGE[start : start + 7_000_000] for start in range(0, len(LARGE), 7_000_000)))
    assert store.read("file") == LARGE
    assert store.read("file", 12_000_000, 5) == LARGE[12_000_000:12_000_005]


def test_what_is_small_takes_one_request(store: Store, proxy: Proxy) -> None:
    store.commit("a/b/file", b"x" * 1000)
    assert proxy.counts == {"PUT": 1}


@pytest.mark.parametrize("kind", ["refuse", "drop"])
def test_what_fails_now_and_then_is_tried_again(store: Store, proxy: Proxy, kind: FaultKind) -> None:
    data = LARGE[:2_000_000]
    proxy.fault(kind, 2, "PUT")
    store.commit("folder/file", data)
    for method in ("HEAD", "GET"):
        proxy.fault(kind, 1, method)
    assert store.read("folder/file") == data
    proxy.fault(kind, 2, "GET")
    assert store.list("folder") == ["file"]
    for method in ("HEAD", "DELETE"):
        proxy.fault(kind, 1, method)
    store.delete("folder/file")
    assert store.list("folder") == []
    for each in ("1", "2"):
        store.commit(f"folder/{each}", b"x")
    proxy.fault(kind, 1, "POST")
    store.delete("folder")
    assert store.list("folder") == []


@pytest.mark.parametrize("kind", ["refuse", "drop"])
def test_a_part_of_a_file_that_is_lost_on_its_way_is_sent_again(store: Store, proxy: Proxy, kind: FaultKind) -> None:
    for method in ("PUT", "POST"):  # a part; the beginning or the end
        proxy.fault(kind, 1, method)
    store.write("file", [LARGE[:13_000_000], LARGE[13_000_000:]])
    proxy.recover()
    assert store.read("file") == LARGE


def test_slow_answers_are_waited_for(store: Store, proxy: Proxy) -> None:
    proxy.fault("delay", 2, seconds=0.7)
    store.commit("file", b"x")
    assert store.read("file") == b"x"


def test_an_answer_that_never_comes_is_asked_for_again(
    store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadfast.storage.arrow._IDLE_TIMEOUT_S", 1.0)
    store.commit("file", b"x")
    for method in ("HEAD", "GET"):
        proxy.fault("delay", 1, method, seconds=60)
    bounded(lambda: store.read("file"), 20)
    assert store.read("file") == b"x"


VERBS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: store.list("file"),
    "read": lambda store: store.read("file"),
    "write": lambda store: store.write("file", [LARGE]),
    "commit": lambda store: store.commit("file", b"new"),
    "delete": lambda store: store.delete("file"),
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_is_gone_is_an_error_that_says_so(store: Store, proxy: Proxy, verb: str) -> None:
    store.commit("file", b"old")
    proxy.go_down()

    def fail() -> None:
        with pytest.raises(OSError, match=rf"HTTP status 503.*'s3://{BUCKET}/tests/\w+/file'") as raised:
            VERBS[verb](store)
        assert raised.value.strerror
        assert raised.value.__suppress_context__

    bounded(fail, 15)
    proxy.recover()
    gc.collect()
    assert store.read("file") == b"old"


@pytest.mark.usefixtures("hasty")
def test_a_server_that_is_silent_is_an_error_in_bounded_time(store: Store, proxy: Proxy) -> None:
    proxy.fault("delay", 1000, seconds=60)

    def fail() -> None:
        for verb in (VERBS["read"], VERBS["write"]):
            with pytest.raises(OSError, match="NETWORK_CONNECTION"):
                verb(store)

    bounded(fail, 40)


@pytest.mark.parametrize("num_bytes", [100, len(LARGE)])
def test_a_write_that_fails_half_way_leaves_what_was_there(store: Store, num_bytes: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield LARGE[:num_bytes]
        raise RuntimeError("half-way")

    for old in (None, b"old"):
        if old is not None:
            store.commit("file", old)
        with pytest.raises(RuntimeError, match="half-way"):
            store.write("file", chunks())
        gc.collect()
        assert store.list("") == ([] if old is None else ["file"])
    assert store.read("file") == b"old"


def test_a_process_that_ends_after_a_failed_write_does_not_complete_it(store: Store) -> None:
    program = f"""
from steadfast.storage import open_store
def chunks():
    for _ in range(3): yield bytes(7_000_000)
    raise RuntimeError
try: open_store({store.uri!r}).write("file", chunks())
except RuntimeError: print("failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("failed\n", "")
    assert store.list("") == []


@pytest.mark.parametrize("verb", ["read", "write", "commit", "delete"])
def test_who_may_not_is_told_at_once(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionError, match=f"s3://{BUCKET}/denied/file"):
        VERBS[verb](open_store(proxy.uri("denied")))
    assert proxy.num_requests <= 3


def test_a_bucket_that_does_not_exist_is_an_error_at_once(proxy: Proxy) -> None:
    store = open_store(proxy.uri().replace(BUCKET, "nowhere"))
    with pytest.raises(OSError, match=r"NO_SUCH_BUCKET.*s3://nowhere/file"):
        store.commit("file", b"x")
    with pytest.raises(FileNotFoundError):
        store.read("file")
    assert proxy.num_requests <= 3


@pytest.mark.parametrize("num_pairs", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_of_two_commands_that_start_together_one_gets_the_run(proxy: Proxy, num_pairs: int) -> None:
    stores = [open_store(proxy.uri(f"claimed-{num_pairs}/run-{number}")) for number in range(num_pairs)]
    assert claim_in_pairs(stores) == [1] * num_pairs
    assert [store.list("") for store in stores] == [["owner.json", "owner.key"]] * num_pairs
