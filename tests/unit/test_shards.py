"""One rank's tensors as a file: any cut of the state can be read from any other."""

import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from steadfast.checkpoint.shards import Shard, StagingBuffer, load_shards, shards_of, shards_to_write, whole_tensors
from steadfast.errors import StorageError
from steadfast.storage import Read
from steadfast.world.runtime import World
from tests.support.memory_store import MemoryStore

State = dict[str, Any]  # of tensors, and of more of the same

ROWS = Shard("w", torch.ones(2, 3), (4, 3), (0, 0))  # two of four
STATE: State = {
    "model": {
        "weight": torch.arange(35, dtype=torch.float32).view(7, 5),
        "half": torch.arange(9).bfloat16(),
        "flag": torch.tensor([True, False, True]),
    },
    "optimizer": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 5, dtype=torch.float64)}},
}


def staged(shards: list[Shard]) -> bytes:
    copy = StagingBuffer()
    copy.fill(shards)
    data = b"".join(copy.chunks())
    assert len(data) == copy.num_bytes
    return data


def cut(state: State, num_ranks: int, rank: int) -> list[Shard]:
    """As FSDP2 does: rows, of which the last ranks may have none."""
    shards = []
    for shard in shards_of(state):
        if not shard.shape:
            shards += [shard] if rank == 0 else []
            continue
        rows = -(-shard.shape[0] // num_ranks)
        first = min(rank * rows, shard.shape[0])
        box = shard.tensor[first : first + rows]
        shards.append(Shard(shard.name, box, shard.shape, (first, *shard.offset[1:]), sharded=True))
    return shards


def reads_of(store: MemoryStore, names: list[str]) -> list[Read]:
    return [partial(store.read, name) for name in names]


def empty(state: State) -> State:
    return {k: empty(v) if isinstance(v, dict) else torch.zeros_like(v) for k, v in state.items()}


def written(num_ranks: int) -> tuple[MemoryStore, list[str]]:
    store, names = MemoryStore(), []
    for rank in range(num_ranks):
        names.append(f"rank-{rank}")
        store.files[names[-1]] = staged([shard for shard in cut(STATE, num_ranks, rank) if shard.tensor.numel()])
    return store, names


@pytest.mark.parametrize(("writers", "readers"), [*itertools.product([1, 2, 3, 9], repeat=2)])
def test_any_number_of_ranks_reads_what_any_other_wrote(writers: int, readers: int) -> None:
    store, names = written(writers)
    found = empty(STATE)
    for rank in range(readers):
        shards = cut(found, readers, rank)
        if rank:  # a number is not cut: each rank has it
            shards += [shard for shard in shards_of(found) if not shard.shape]
        load_shards(reads_of(store, names), shards)
    for ours, theirs in zip(shards_of(found), shards_of(STATE), strict=True):
        assert torch.equal(ours.tensor, theirs.tensor), ours.name


def test_boxes_that_are_cut_along_columns_too() -> None:
    whole = torch.arange(24.0).view(4, 6)
    store = MemoryStore()
    for index, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        box = whole[row : row + 2, column : (2 if column == 0 else 6)]
        store.files[str(index)] = staged([Shard("m.w", box, (4, 6), (row, column))])
    target = torch.zeros(3, 3)
    load_shards(reads_of(store, list(store.files)), [Shard("m.w", target, (4, 6), (1, 1))])
    assert torch.equal(target, whole[1:4, 1:4])


def test_a_file_is_plain_safetensors() -> None:
    found = safetensors.torch.load(staged(shards_of(STATE)))
    assert torch.equal(found["model.weight"], STATE["model"]["weight"])
    assert torch.equal(found["model.half"], STATE["model"]["half"])
    assert found["optimizer.weight.step"] == 3.0


def test_a_copy_is_a_copy_and_its_memory_is_used_again() -> None:
    tensor = torch.ones(4)
    shards, copy = [Shard("w", tensor, (4,), (0,))], StagingBuffer()
    copy.reserve(shards)
    copy.fill(shards)
    tensor.zero_()
    copy.reserve(shards)  # of a survivor's next attempt, while the copy is still on its way to storage
    assert safetensors.torch.load(b"".join(copy.chunks()))["w"].tolist() == [1.0] * 4
    copy.fill([Shard("w", tensor[:2], (2,), (0,))])
    assert safetensors.torch.load(b"".join(copy.chunks()))["w"].tolist() == [0.0] * 2


def test_one_part_is_read_whole_by_its_own_names() -> None:
    store, names = written(3)
    model = whole_tensors(reads_of(store, names), "model")
    assert model.keys() == STATE["model"].keys()
    assert all(torch.equal(tensor, STATE["model"][name]) for name, tensor in model.items())
    header = json.loads(store.files[names[1]][8 : 8 + int.from_bytes(store.files[names[1]][:8], "little")])
    assert json.loads(header["__metadata__"]["boxes"])["model.weight"] == [[7, 5], [3, 0]]


@pytest.mark.parametrize(
    ("stored", "target", "said"),
    [
        (Shard("w", torch.ones(2), (2,), (0,)), Shard("model.other", torch.zeros(2), (2,), (0,)), "of another model"),
        (
            Shard("w", torch.ones(2), (2,), (0,)),
            Shard("w", torch.zeros(2), (3,), (0,)),
            r"w is \[2\] there, \[3\] here",
        ),
        (ROWS, Shard("w", torch.zeros(2, 3), (4, 3), (1, 0)), "lacks 3 of the numbers of w"),
    ],
)
def test_another_model_or_a_hole_is_told(stored: Shard, target: Shard, said: str) -> None:
    store = MemoryStore()
    store.files["f"] = staged([stored])
    with pytest.raises(StorageError, match=said):
        load_shards(reads_of(store, ["f"]), [target])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_and_tensors_that_hold_nothing_are_parts_of_the_state(dtype: torch.dtype) -> None:
    state = {"model": {"ids": torch.arange(5).to(dtype), "nothing": torch.empty(0, 3)}}
    ranks = [World(rank, 2, 1, SimpleNamespace(), replica_size=2) for rank in range(2)]  # type: ignore[arg-type]
    assert shards_to_write(state, ranks[1]) == [], "it does not write replicas"
    store = MemoryStore()
    store.files["rank-0"] = staged(shards_to_write(state, ranks[0]))
    load_shards(reads_of(store, ["rank-0"]), shards_of(empty(state)))
    model = whole_tensors(reads_of(store, ["rank-0"]), "model")
    assert torch.equal(model["ids"], state["model"]["ids"])
    assert model["nothing"].shape == (0, 3)
    assert safetensors.torch.load(store.files["rank-0"])["model.nothing"].shape == (0, 3)
