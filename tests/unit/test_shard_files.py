"""Shards of each format: every sample, the index, and what is refused."""

import io
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from steadfast.config import parse_config
from steadfast.data import Extent, Loader, build_dataset, build_order, shard_formats
from steadfast.data.batches import Rows, stack, tensors_of
from steadfast.data.fingerprint import fingerprint
from steadfast.data.order import BlockOrder
from steadfast.data.shard_files import Shards
from steadfast.data.shard_formats import TUPLES
from steadfast.errors import ConfigError, DataError
from steadfast.plan import Microbatch
from tests.support.shards import FIRST, KINDS, NUM_SAMPLES, add, values, write_shards


@pytest.fixture(autouse=True)
def indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("steadfast.data.shard_files.runs_root", lambda: tmp_path)
    return tmp_path / "indices"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder for shards."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def shards(folder: Path, kind: str, *more: str) -> Shards:
    words = ", ".join([f"kind: {kind}", f"path: {folder}", *more])
    dataset = build_dataset(parse_config(f"data: {{{words}}}").data)
    assert isinstance(dataset, Shards)
    return dataset


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_read_in_any_order_and_in_another_process(data: Path, kind: str) -> None:
    write_shards(data, kind)
    dataset = shards(data, kind)
    assert len(dataset) == NUM_SAMPLES
    names = {"label": "cls", "tokens": "tokens.npy", "text": "txt"} if kind == "webdataset" else {}
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        for number in (699, 0, 599, 600, 255, 256, 100):
            sample = one[number]
            found = {name: sample[names.get(name, name)] for name in values(number)}
            found["tokens"] = list(found["tokens"])
            assert found == values(number)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_choose_the_values(data: Path, kind: str) -> None:
    write_shards(data, kind)
    column = "cls" if kind == "webdataset" else "label"
    assert shards(data, kind, f"columns: [{column}]")[5] == {column: 5}
    with pytest.raises(DataError, match="no_such"):
        shards(data, kind, "columns: [no_such]")[5]


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_is_made_once_and_anew_for_a_changed_file(data: Path, kind: str, indices: Path) -> None:
    write_shards(data, kind)
    before = shards(data, kind)
    mark = fingerprint(before)
    made = {path: path.stat().st_mtime_ns for path in indices.iterdir()}
    assert len(made) == 2
    assert shards(data, kind).digest == before.digest
    assert {path: path.stat().st_mtime_ns for path in indices.iterdir()} == made
    for starts in ((0, FIRST + 1, NUM_SAMPLES), (0, FIRST, NUM_SAMPLES - 10)):
        write_shards(data, kind, starts)
        after = shards(data, kind)
        assert len(after) == starts[-1]
        assert fingerprint(after) != mark, "so that a resume refuses the data"


def test_blocks_are_row_groups_or_runs_of_samples(tmp_path: Path) -> None:
    write_shards(tmp_path / "rows", "parquet")
    assert shards(tmp_path / "rows", "parquet").blocks.tolist() == [*range(0, 700, 100)]
    write_shards(tmp_path / "lines", "jsonl")
    assert shards(tmp_path / "lines", "jsonl").blocks.tolist() == [0, 256, 512, 600]
    with pytest.raises(DataError, match="the dataset has no blocks"):
        build_order(parse_config("data: {kind: text, order: blocks}").data, Extent(10), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_opens_only_shards_of_its_samples(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever step a run resumes, it opens no more shards than its samples lie in, and reads each block once."""
    write_shards(tmp_path / "data", kind, tuple(range(0, 701, 50)))
    data = parse_config(f"data: {{kind: {kind}, path: {tmp_path}/data}}").data
    shards(tmp_path / "data", kind)  # makes the index
    opened: list[str] = []
    read: list[Any] = []
    open_one, read_one = Shards._file, Shards._read_piece

    def file(self: Shards, name: str) -> Any:
        opened.append(name)
        return open_one(self, name)

    def block(self: Shards, piece: Any, thread: int) -> Any:
        read.append(piece)
        return read_one(self, piece, thread)

    monkeypatch.setattr(Shards, "_file", file)
    monkeypatch.setattr(Shards, "_read_piece", block)
    for first in range(0, 1400, 130):
        dataset = build_dataset(data)
        order = build_order(data, Extent.of(dataset), seed=4)
        ids = order.train(np.arange(first, first + 48)).tolist()
        assert not opened, "the index is enough to resume"
        for index in ids:
            dataset[index]
        assert len(opened) == len({index // 50 for index in ids})
        assert len(read) == len(set(read))
        opened.clear()
        read.clear()


@pytest.mark.parametrize(("num_readers", "request_bytes", "most"), [(2, 64, 2.1), (8, 64, 2.5), (8, 2**18, 8.1)])
def test_readers_of_a_bucket_share_its_samples(
    data: Path, num_readers: int, request_bytes: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads whole blocks only if it uses enough of them, or if blocks are small."""
    monkeypatch.setattr("steadfast.data.shard_files._REQUEST_BYTES", request_bytes)
    write_shards(data, "jsonl", tuple(range(0, 20_001, 2000)))
    monkeypatch.setattr("steadfast.data.shard_formats._BLOCK_SAMPLES", 64)
    dataset = shards(data, "jsonl")
    order = build_order(parse_config("data: {kind: text, order: blocks}").data, Extent.of(dataset), seed=4)
    cut = mock.Mock(wraps=shard_formats._cut)
    monkeypatch.setattr("steadfast.data.shard_formats._cut", cut)
    ids = order.train(np.arange(order.num_train)).reshape(-1, 8)[::num_readers]
    for batch in ids:
        assert [sample["label"] for sample in dataset.__getitems__(batch.tolist())] == batch.tolist()
    num_read = sum(call.args[3] - call.args[2] for call in cut.call_args_list)
    assert num_read < most * ids.size
    # Large blocks would cost more than requests, and small blocks less.
    assert cut.call_count < 1.1 * ids.size
    if request_bytes > 64:
        assert cut.call_count < 1.1 * len(dataset.blocks)


def test_samples_share_nothing_with_each_other_or_a_later_epoch(data: Path) -> None:
    rows = [{"words": ["a", "b"], "tokens": [1, 2], "some": [1, None], "number": n, "maybe": None} for n in range(40)]
    parquet.write_table(pa.Table.from_pylist(rows), data / "0.parquet", row_group_size=10)
    dataset = shards(data, "parquet")
    wanted = [3, 39, 3, 12, 25]
    for _ in range(2):
        samples = dataset.__getitems__(wanted)
        assert [sample["number"] for sample in samples] == wanted
        for sample in samples:
            assert (sample["words"], list(sample["tokens"]), sample["some"]) == (["a", "b"], [1, 2], [1, None])
            sample["words"].reverse()
            sample["some"].clear()
            sample["tokens"][:] = 0


def test_memory_holds_the_blocks_of_a_window_and_a_few_more(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(data, "jsonl")
    monkeypatch.setattr("steadfast.data.shard_formats._BLOCK_SAMPLES", 1)
    dataset = shards(data, "jsonl")
    held: list[int] = []
    read = Shards._read

    def counted(self: Shards, pieces: Any) -> Any:
        held.append(len(self._blocks) + len(pieces))
        return read(self, pieces)

    monkeypatch.setattr(Shards, "_read", counted)
    assert [sample["label"] for sample in dataset.__getitems__(range(0, 700, 7))] == list(range(0, 700, 7))
    assert max(held) <= 16 + 4
    assert len(dataset._taken) == len(dataset._blocks) == 16


def test_few_files_are_open_at_a_time(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.data.shard_files._OPEN_FILES", 3)
    write_shards(data, "jsonl", tuple(range(0, 701, 100)))
    dataset = shards(data, "jsonl", "order: shuffled")
    for index in (0, 160, 220, 380, 440, 0, 699):
        assert dataset[index]["label"] == index
        assert len(dataset._open) <= 3


def test_numbers_of_parquet_keep_their_types(data: Path) -> None:
    writer = parquet.ParquetWriter(data / "1.parquet", pa.schema({"a": pa.int64()}))
    for rows in ([], [1, 2], [], [3]):  # some row groups are empty
        writer.write_table(pa.table({"a": pa.array(rows, pa.int64())}))
    writer.close()
    assert [int(shards(data, "parquet")[index]["a"]) for index in range(3)] == [1, 2, 3]
    (data / "1.parquet").unlink()
    columns = {
        "fixed": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "half": pa.array([1.5, 2.5], pa.float32()),
        "tokens": pa.array([[1, 2], [3]], pa.list_(pa.int16())),
        "missing": pa.array([None, 4]),
        "holes": pa.array([[1, None], [2, 3]]),
        "text": pa.array(["a", "b"]),
    }
    parquet.write_table(pa.table(columns), data / "0.parquet")
    dataset = shards(data, "parquet")
    first, second = dataset[0], dataset[1]
    assert (first["half"].dtype, first["tokens"].dtype) == (np.float32, np.int16)
    assert second["tokens"].tolist() == [3]
    assert first["tokens"].flags.writeable
    assert second["fixed"].tolist() == [3.0, 4.0]
    assert type(second["missing"]) is np.int64
    assert [first[name] for name in ("missing", "holes", "text")] == [None, [1, None], "a"]


@pytest.mark.parametrize("are_tuples", [False, True])
def test_columns_of_parquet_make_the_batch_that_their_samples_make(data: Path, are_tuples: bool) -> None:
    columns = {
        "tokens": pa.array([[row, -row] for row in range(300)], pa.list_(pa.int16())),
        "half": pa.array(np.arange(300) / 2, pa.float32()),
        "seen": pa.array([row % 3 == 0 for row in range(300)]),
    }
    table = pa.table(columns).replace_schema_metadata({TUPLES: b"1"} if are_tuples else None)
    parquet.write_table(table, data / "0.parquet", row_group_size=100)
    samples = shards(data, "parquet").__getitems__([250, 7, 130, 8, 251])
    assert isinstance(samples, Rows)  # else nothing is compared below
    found, expected = (list(tensors_of(stack(each))) for each in (samples, list(samples)))
    assert type(stack(samples)) is (tuple if are_tuples else dict)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert found[0].tolist() == [[250, -250], [7, -7], [130, -130], [8, -8], [251, -251]]


def test_lists_of_other_lengths_in_another_row_group_are_told(data: Path) -> None:
    table = pa.table({"tokens": [[1, 2]] * 10 + [[1, 2, 3]] * 10})
    parquet.write_table(table, data / "0.parquet", row_group_size=10)
    words = f"{{kind: parquet, path: {data}, validation_fraction: 0, order: sequential}}"
    config = parse_config(f"data: {words}").data
    dataset = build_dataset(config)
    loader = Loader(dataset, build_order(config, Extent.of(dataset), 1), config, torch.device("cpu"))
    loader.fetch(Microbatch(1, 0, 0, 4, 1))
    for start in (8, 10):  # within a batch, and a batch of its own
        with pytest.raises(DataError, match=r"sample 10 is \(tokens: int64 \(3,\)\), expected .*int64 \(2,\)"):
            loader.fetch(Microbatch(1, 0, start, start + 4, 1))


def test_images_of_a_tar_are_tensors_and_a_missing_package_is_no_damaged_file(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = io.BytesIO()
    Image.new("RGB", (4, 3), (255, 0, 0)).save(image, "png")
    with tarfile.open(data / "0.tar", "w") as tar:
        add(tar, "a/0.png", image.getvalue())
        add(tar, "a/0.json", b'{"class": 3}')
    sample = shards(data, "webdataset")[0]
    assert sample["png"].shape == (3, 3, 4)
    assert sample["json"] == {"class": 3}
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"data\.kind: needs PIL: pip install 'steadfast\[vision\]'"):
        shards(data, "webdataset")[0]


def test_empty_lines_and_a_missing_last_end_are_no_samples(data: Path) -> None:
    (data / "0.jsonl").write_text('\n{"a": 1}\n\n\n{"a": 2}\n{"a": 3}')
    dataset = shards(data, "jsonl")
    assert [dataset[index]["a"] for index in range(len(dataset))] == [1, 2, 3]


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 100])


@pytest.mark.parametrize(
    ("kind", "damage", "sentence"),
    [
        ("parquet", cut, "no whole Parquet file"),
        ("webdataset", cut, "no whole tar"),
        ("parquet", Path.unlink, r"no folder with \*\.parquet"),
        ("jsonl", lambda path: path.write_text(""), "has no samples"),
        ("jsonl", lambda path: path.write_text("[1]\n"), "no JSON object"),
        ("jsonl", lambda path: path.write_text('{"a":\n'), "no JSON"),
        ("webdataset", lambda path: path.write_bytes(bytes(1024)), "has no samples"),
        (
            "parquet",
            lambda path: parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), path),
            "has no samples",
        ),
    ],
)
def test_a_damaged_shard_is_named(data: Path, kind: str, damage: Any, sentence: str) -> None:
    write_shards(data, kind, (0, 100))
    (path,) = data.iterdir()
    damage(path)
    with pytest.raises(DataError, match=sentence):
        shards(data, kind)[0]


@pytest.mark.parametrize("other", [{"label": ["a"]}, {"label": [1], "more": [2]}])
def test_files_with_different_columns_are_named(data: Path, other: dict[str, Any]) -> None:
    parquet.write_table(pa.table({"label": [0]}), data / "0.parquet")
    parquet.write_table(pa.table(other), data / "1.parquet")
    for _ in range(2):  # the second time from the index
        with pytest.raises(DataError, match=r"1\.parquet and 0\.parquet have different columns: .*data\.columns"):
            shards(data, "parquet")
    if "more" in other:
        assert len(shards(data, "parquet", "columns: [label]")) == 2


def test_a_file_that_changes_under_its_index_is_told_with_the_remedy(data: Path) -> None:
    write_shards(data, "webdataset")
    dataset = shards(data, "webdataset")
    cut(data / "0.tar")
    with pytest.raises(DataError, match=r"0\.tar cannot be read .* delete .*indices"):
        dataset[599]


@pytest.mark.parametrize("spoiled", [b"", b"PK", bytes(2000)])
def test_an_index_that_cannot_be_read_is_made_anew(data: Path, indices: Path, spoiled: bytes) -> None:
    write_shards(data, "jsonl")
    size = len(shards(data, "jsonl"))
    for path in indices.iterdir():
        path.write_bytes(spoiled)
    assert len(shards(data, "jsonl")) == size
    assert all(path.read_bytes() != spoiled for path in indices.iterdir())


def test_empty_lines_of_any_system_are_no_samples(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['{"x": 0}', "", '{"x": 1}', "", "", '{"x": 2}']
    for end in ("\n", "\r\n"):
        for last in (end, ""):
            (data / "0.jsonl").write_bytes((end.join(lines) + last).encode())
            dataset = shards(data, "jsonl")
            assert [dataset[number]["x"] for number in range(len(dataset))] == [0, 1, 2]
    (data / "0.jsonl").write_bytes(b'{"x": 0}\n' + bytes(3000))
    monkeypatch.setattr(shard_formats, "_LONGEST_LINE", 2999)
    with pytest.raises(DataError, match=r"line 2 of 0\.jsonl has 3000 bytes, more than a sample may have"):
        shards(data, "jsonl")


def test_an_empty_line_of_windows_may_lie_between_two_reads(data: Path) -> None:
    (data / "0.jsonl").write_bytes(b'{"x": 0}'.ljust(2**22 - 3) + b'\r\n\r\n{"x": 1}\r\n')
    dataset = shards(data, "jsonl")
    assert [dataset[number]["x"] for number in range(len(dataset))] == [0, 1]


def test_what_is_no_file_and_columns_of_one_name_are_refused(data: Path) -> None:
    table = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["x", "x", "y"])
    parquet.write_table(table, data / "0.parquet")
    with pytest.raises(DataError, match=r"0\.parquet has several columns with the name x"):
        shards(data, "parquet")
    assert len(shards(data, "parquet", "columns: [y]")) == 1
    path = data / "0.jsonl"
    for is_device in (False, True):
        path.symlink_to("/dev/zero") if is_device else os.mkfifo(path)
        with pytest.raises(DataError, match=r"0\.jsonl is no file"):
            shards(data, "jsonl")
        path.unlink()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=50), st.sampled_from([0.0, 0.3]), st.integers(0, 5))
def test_an_epoch_in_blocks_has_each_sample_once(sizes: list[int], fraction: float, seed: int) -> None:
    total = sum(sizes)
    order = BlockOrder(np.cumsum([0, *sizes])[:-1], total, fraction, seed)
    positions = np.arange(2 * order.num_train)
    ids = order.train(positions)
    for epoch in ids.reshape(2, -1):
        assert sorted(epoch) == list(range(order.num_train))
    assert [int(order.train(positions[place : place + 1])[0]) for place in range(0, len(ids), 7)] == ids[::7].tolist()
    if order.num_validation:
        assert order.validation(np.arange(order.num_validation)).tolist() == list(range(order.num_train, total))


def test_an_epoch_in_blocks_reads_few_blocks_at_a_time_and_is_another_each_time() -> None:
    order = BlockOrder(np.arange(0, 100_000, 100), 100_000, 0.0, 1)
    ids = order.train(np.arange(200_000))
    assert len(np.unique(ids[:1600] // 100)) == 16
    assert not np.array_equal(ids[:100_000], ids[100_000:])
    assert np.abs(np.diff(ids[:1600])).mean() > 1000
