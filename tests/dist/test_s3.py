"""A bucket on a real S3 server, over a network that refuses, drags and breaks off: its store, and whole runs in it."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import steadfast.checkpoint.writer
import steadfast.storage.arrow
from steadfast.cli import main
from steadfast.config import parse_config
from steadfast.data import Extent, build_dataset, build_order
from steadfast.errors import DataError
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import Store, open_store
from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.reference import reference
from tests.support.s3 import BUCKET, FaultKind, Proxy
from tests.support.shards import KINDS, write_shards
from tests.support.small import small
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


def test_small_files_take_one_request_and_large_ones_read_back(store: Store, proxy: Proxy) -> None:
    store.commit("a/b/file", b"x" * 1000)
    assert proxy.counts == {"PUT": 1}
    store.write("file", (LARGE[start : start + 7_000_000] for start in range(0, len(LARGE), 7_000_000)))
    assert store.read("file") == LARGE
    assert store.read("file", 12_000_000, 5) == LARGE[12_000_000:12_000_005]


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
    for method in ("PUT", "POST"):  # a part; the beginning or the end
        proxy.fault(kind, 1, method)
    store.write("file", [LARGE[:13_000_000], LARGE[13_000_000:]])
    proxy.recover()
    assert store.read("file") == LARGE


def test_slow_answers_are_awaited_or_asked_again(store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.storage.arrow._IDLE_TIMEOUT_S", 1.0)
    proxy.fault("delay", 2, seconds=0.7)
    store.commit("file", b"x")
    assert store.read("file") == b"x"
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


def impatient() -> None:
    steadfast.checkpoint.writer._FIRST_DELAY_S = 0.1
    steadfast.storage.arrow._IDLE_TIMEOUT_S = 2.0


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_in_a_bucket_is_stopped_resumed_and_looked_at(
    proxy: Proxy, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = small(proxy.uri(f"runs-{kind}"), f"parallel.kind={kind}", "checkpoint.every=4 steps", "trackers=[]")
    stopped = drill(config, worlds=[2], stop_after=6)
    assert stopped.summary["last_checkpoint"].startswith(f"s3://runs/runs-{kind}/small/checkpoints/step-00000007?")
    run = drill(config, worlds=[3])
    check_run(run, reference(config))
    assert run.told("restore", "step") == [7]
    directory = RunDirectory.of(config)
    Ownership.claim(directory.store).release()  # as every command does
    assert main(0.0, ["doctor", directory.uri]) == 0
    assert main(0.0, ["export", directory.uri, "--out", str(tmp_path / "model.safetensors")]) == 0
    assert "step 14: good" in capsys.readouterr().out
    assert directory.store.list("steps.jsonl"), "a bucket cannot be appended to"


def test_a_network_that_fails_costs_no_step_and_no_checkpoint(proxy: Proxy) -> None:
    slow = "faults.inject=[{kind: slow_at, step: 1, ranks: [0], ms: 30}]"
    config = small(proxy.uri("runs-faulty"), "checkpoint.every=3 steps", "run.steps=40", slow, "trackers=[]")
    for method in ("PUT", "GET", "POST"):
        proxy.fault("refuse", 3, method)
    for method in ("PUT", "GET"):
        proxy.fault("drop", 3, method)
    proxy.fault("delay", 4, "PUT", seconds=1.0)
    run = drill(config, worlds=[2], patch=impatient)
    check_run(run, reference(config))
    assert run.told("checkpoint", "step")[-1] == 40
    assert all(fault.times == 0 for fault in proxy.faults), "not all faults have struck"


def test_what_an_attempt_did_is_in_the_bucket_before_the_next_one_begins(proxy: Proxy, tmp_path: Path) -> None:
    words = ["checkpoint.every=4 steps", "trackers=[]", "faults.inject=[{kind: nan_at, step: 7}]"]
    places = proxy.uri("runs-failed"), tmp_path
    in_bucket, on_disk = (drill(small(place, *words), worlds=[2, 2]).told("restore", "lost_steps") for place in places)
    assert in_bucket == on_disk == [2]


def write_to_bucket(uri: str, folder: Path, kind: str) -> None:
    """Write shards to a folder, and from there to a bucket."""
    write_shards(folder, kind)
    store = open_store(uri)
    for path in folder.iterdir():
        store.commit(path.name, path.read_bytes())


@pytest.mark.parametrize("kind", KINDS)
def test_shards_in_a_bucket_are_those_of_the_disk(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("steadfast.data.shard_files.runs_root", lambda: tmp_path)
    uri = proxy.uri(f"shards-{kind}")
    write_to_bucket(uri, tmp_path / "data", kind)
    on_disk, in_bucket = (
        build_dataset(parse_config(f"data: {{kind: {kind}, path: '{place}'}}").data)
        for place in (tmp_path / "data", uri)
    )
    order = build_order(parse_config("data: {kind: text, order: blocks}").data, Extent.of(in_bucket), 1)
    ids = order.train(np.arange(200)).tolist()
    before = proxy.num_requests
    proxy.fault("drop", 1, "GET")
    found = [repr(in_bucket[index]) for index in ids]
    assert found == [repr(on_disk[index]) for index in ids]
    # A block is read by one request, or a few, and not one for each sample.
    assert proxy.num_requests - before < len(ids)


def test_a_bucket_out_of_reach_is_reported(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.data.shard_files.runs_root", lambda: tmp_path)
    monkeypatch.setattr("steadfast.data.shard_files._REPETITIONS", 1)
    uri = proxy.uri("shards-away")
    write_to_bucket(uri, tmp_path / "data", "jsonl")
    config = parse_config(f"data: {{kind: jsonl, path: '{uri}'}}").data
    proxy.fault("drop", 2, "GET")
    dataset = build_dataset(config)  # the index is made at the second attempt
    proxy.fault("drop", 100, "GET")
    with pytest.raises(DataError, match=r"samples 0 to 255 of 0\.jsonl cannot be read: .* is the bucket reachable\?"):
        dataset[0]
    proxy.faults.clear()
    assert dataset[0]["label"] == 0
