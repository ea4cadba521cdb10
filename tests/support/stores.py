"""Check what every store keeps to, wherever its files lie."""

import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier

import pytest

from steadfast.errors import RunConflict
from steadfast.run.owner import Ownership
from steadfast.storage import Store


class StoreContract:
    """The tests of a store. A test class with a fixture `store`, empty at first, inherits them."""

    def test_what_is_written_reads_back_and_replaces_the_whole(self, store: Store) -> None:
        data = bytes(range(256)) * 40
        store.write("a/b/c", [data[:1000], memoryview(data)[1000:1001], b"", memoryview(data)[1001:]])
        assert store.read("a/b/c") == data
        for write in (store.commit, lambda name, data: store.write(name, [data])):
            for data in (b"long and old", b"new", b""):
                write("folder/file", data)
                assert store.read("folder/file") == data
        assert store.read("folder/file", 0, 7) == b""
        assert store.list("folder") == ["file"]

    @pytest.mark.parametrize(
        ("start", "num_bytes", "expected"),
        [
            (0, 3, b"012"),
            (4, 2, b"45"),
            (8, 5, b"89"),
            (7, None, b"789"),
            (10, 1, b""),
            (12, None, b""),
            (2, 0, b""),
            (-3, None, b"789"),
            (-3, 2, b"78"),
            (-12, 1, b"0"),
        ],
    )
    def test_a_range_ends_where_the_file_does(
        self, store: Store, start: int, num_bytes: int | None, expected: bytes
    ) -> None:
        store.commit("file", b"0123456789")
        assert store.read("file", start, num_bytes) == expected

    def test_a_list_names_what_lies_directly_in_a_folder(self, store: Store) -> None:
        for name in ("z", "a/2", "a/10", "a/deep/er", "ab/1"):
            store.commit(name, b"x")
        assert store.list("") == ["a", "ab", "z"]
        assert store.list("a") == ["10", "2", "deep"]
        assert store.list("a/deep") == ["er"]
        assert store.list("b") == store.list("b/c") == store.list("z") == []

    def test_what_is_not_there_cannot_be_read(self, store: Store) -> None:
        store.commit("a/b", b"x")
        for name in ("b", "a/c", "b/c"):
            with pytest.raises(FileNotFoundError, match=name):
                store.read(name)

    def test_a_folder_goes_with_all_that_is_in_it(self, store: Store) -> None:
        for name in ("a/1", "a/2/3", "a/2/4", "ab", "b/1"):
            store.commit(name, b"x")
        store.delete("a")
        assert store.list("") == ["ab", "b"]
        assert store.list("a") == store.list("a/2") == []
        store.commit("a/1", b"new")
        assert store.list("a") == ["1"]

    def test_a_file_goes_alone_and_twice_is_as_good_as_once(self, store: Store) -> None:
        for name in ("a/1", "a/2"):
            store.commit(name, b"x")
        for name in ("a/1", "a/1", "b", "b/c"):
            store.delete(name)
        assert store.list("a") == ["2"]
        with pytest.raises(FileNotFoundError):
            store.read("a/1")

    def test_the_size_of_a_folder_is_that_of_all_files_below(self, store: Store) -> None:
        for name in ("a/1", "a/2/3", "ab", "b"):
            store.commit(name, b"four")
        assert [store.num_bytes(folder) for folder in ("", "a", "a/2", "nowhere")] == [16, 8, 4, 0]

    def test_what_the_source_of_the_chunks_raises_is_raised_as_it_is_and_nothing_is_written(self, store: Store) -> None:
        failure = TimeoutError("the world has ended")

        def chunks() -> Iterator[bytes]:
            yield b"half of it"
            raise failure

        with pytest.raises(TimeoutError) as raised:
            store.write("file", chunks())
        assert raised.value is failure
        assert store.list("") == []

    def test_another_process_has_the_same_files(self, store: Store) -> None:
        store.commit("a", b"x")
        other = pickle.loads(pickle.dumps(store))
        assert (other.uri, other.read("a")) == (store.uri, b"x")


def claim_in_pairs(stores: Sequence[Store]) -> list[int]:
    """Let two processes claim each run at the same moment, and return for each run how many of them got it."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    with ProcessPoolExecutor(2, context, _meet_at, (barrier,)) as pool:
        both = [pool.submit(_claim_each, stores) for _ in range(2)]
        one, other = both[0].result(), both[1].result()
        return [sum(pair) for pair in zip(one, other, strict=True)]


_barrier: Barrier


def _meet_at(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _claim_each(stores: Sequence[Store]) -> list[bool]:
    got = []
    for store in stores:
        _barrier.wait(timeout=60)
        try:
            Ownership.claim(store)
            got.append(True)
        except RunConflict:
            got.append(False)
    _barrier.wait(timeout=60)  # what a process that has ended owned is free
    return got
