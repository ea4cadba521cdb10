"""A whole run in a bucket on a real S3 server, over a network that fails now and then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steadfast.cli import main
from steadfast.config import parse_config
from steadfast.data import Extent, build_dataset, build_order
from steadfast.errors import DataError
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import open_store
from tests.support.claims import check_run
from tests.support.drill import drill
from tests.support.reference import reference
from tests.support.s3 import FaultKind, Proxy
from tests.support.shards import KINDS, write_shards
from tests.support.small import small


def impatient() -> None:
    import steadfast.checkpoint.writer
    import steadfast.storage.arrow

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
    faults: list[tuple[FaultKind, str]] = [
        ("refuse", "PUT"),
        ("drop", "PUT"),
        ("refuse", "GET"),
        ("drop", "GET"),
        ("refuse", "POST"),
    ]
    for kind, method in faults:
        proxy.fault(kind, 3, method)
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


def test_a_damaged_object_is_not_resumed_from(proxy: Proxy) -> None:
    config = small(proxy.uri("runs-damaged"), "checkpoint.every=4 steps", "trackers=[]")
    drill(config, worlds=[2], stop_after=6)
    store = RunDirectory.of(config).store
    folder = "checkpoints/step-00000007"
    name = next(f"{folder}/{name}" for name in store.list(folder) if name.endswith("safetensors"))
    data = bytearray(store.read(name))
    data[-1] ^= 1
    store.commit(name, bytes(data))
    run = drill(config, worlds=[2])
    assert run.told("restore", "step") == [4]
    assert [name in error for error in run.told("checkpoint_quarantined", "error")] == [True]
    assert store.list("checkpoints")


@pytest.mark.parametrize("kind", KINDS)
def test_shards_in_a_bucket_are_those_of_the_disk(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("steadfast.data.shard_files.runs_root", lambda: tmp_path)
    write_shards(tmp_path / "data", kind)
    uri = proxy.uri(f"shards-{kind}")
    store = open_store(uri)
    for path in (tmp_path / "data").iterdir():
        store.commit(path.name, path.read_bytes())
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
    write_shards(tmp_path / "data", "jsonl")
    uri = proxy.uri("shards-away")
    store = open_store(uri)
    for path in (tmp_path / "data").iterdir():
        store.commit(path.name, path.read_bytes())
    config = parse_config(f"data: {{kind: jsonl, path: '{uri}'}}").data
    proxy.fault("drop", 2, "GET")
    dataset = build_dataset(config)  # the index is made at the second attempt
    proxy.fault("drop", 100, "GET")
    with pytest.raises(DataError, match=r"samples 0 to 255 of 0\.jsonl cannot be read: .* is the bucket reachable\?"):
        dataset[0]
    proxy.faults.clear()
    assert dataset[0]["label"] == 0
