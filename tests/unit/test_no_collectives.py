"""A collective of the default group in the user's loss is refused before anything is sent."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn

from steadfast.data.batches import Batch
from steadfast.errors import ConfigError, UsageError
from steadfast.tasks import Sums
from steadfast.tasks.own import GlobalTask, own_task
from steadfast.world.no_collectives import COLLECTIVES, RefusedCollective, no_collectives


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ones() -> Tensor:
    return torch.ones(2)


CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(ones()),
    "all_reduce of WORLD": lambda: dist.all_reduce(ones(), group=dist.group.WORLD),
    "async": lambda: dist.all_reduce(ones(), async_op=True),
    "all_gather": lambda: dist.all_gather([ones()], ones()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(), ones()),
    "reduce_scatter": lambda: dist.reduce_scatter(ones(), [ones()]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(), ones()),
    "broadcast": lambda: dist.broadcast(ones(), 0),
    "reduce": lambda: dist.reduce(ones(), 0),
    "gather": lambda: dist.gather(ones(), [ones()], 0),
    "scatter": lambda: dist.scatter(ones(), [ones()], 0),
    "all_to_all": lambda: dist.all_to_all([ones()], [ones()]),
    "all_to_all_single": lambda: dist.all_to_all_single(ones(), ones()),
    "barrier": lambda: dist.barrier(),
    "send": lambda: dist.send(ones(), 1),
    "isend": lambda: dist.isend(ones(), 1),
    "recv": lambda: dist.recv(ones(), 1),
    "recv of any": lambda: dist.recv(ones()),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 1)]),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "gather_object": lambda: dist.gather_object(1, [None], 0),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "nn.all_gather": lambda: differentiable.all_gather(ones()),
    "nn.all_reduce": lambda: differentiable.all_reduce(ones()),
    "functional all_gather": lambda: functional.all_gather_tensor(ones(), 0, dist.group.WORLD),  # type: ignore[arg-type]
    "functional all_reduce": lambda: functional.all_reduce(ones(), "sum", dist.group.WORLD),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_no_collectives_refuses_each_function_of_torch(name: str) -> None:
    with no_collectives(), pytest.raises(RefusedCollective):
        CALLS[name]()


def test_collectives_run_again_afterwards_and_in_groups_that_are_given_and_ranks_are_known() -> None:
    given = dist.group.WORLD
    with no_collectives():
        assert (dist.is_initialized(), dist.get_rank(), dist.get_world_size()) == (True, 0, 1)
        assert (dist.get_backend(), dist.get_process_group_ranks(None)) == ("gloo", [0])
        dist.all_reduce(ones(), group=given)
    dist.all_reduce(ones())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        differentiable.all_gather(ones())


def test_every_collective_of_a_process_group_is_known() -> None:
    """Of a newer torch another one may have to be added."""
    others = {"abort", "boxed", "merge_remote_group", "name", "rank", "set_timeout", "shutdown", "size", "split_group"}
    others |= {"get_group_store", "unbox", "use_pg_for_symm_mem_rendezvous"}
    others |= {"get_backend", "get_reconfigure_handle", "reconfigure"}
    others |= {f"{verb}_{kind}_hook" for verb in ("register", "unregister") for kind in ("abort", "post", "pre")}
    methods = {name for name in dir(dist.ProcessGroup) if callable(getattr(dist.ProcessGroup, name))}
    public = {name for name in methods if not name.startswith("_") and name != "BackendType"}
    assert public - others <= set(COLLECTIVES)


class Gathering:
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        parts = [torch.zeros(2)]
        dist.all_gather(parts, batch)
        return Sums(parts[0].sum(), 2)


class Mean:
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return batch.mean()


class Embedding:
    def embed(self, model: nn.Module, batch: Tensor) -> Tensor:
        return batch

    def loss(self, embeddings: Tensor) -> Sums:
        return Sums(embeddings.sum(), len(embeddings))


class WithAMethodCalledEmbed(Embedding):
    def loss(self, model: nn.Module, batch: Tensor) -> Sums:  # type: ignore[override]
        return Sums(self.embed(model, batch).sum(), len(batch))


def test_a_task_that_gathers_or_returns_its_loss_is_named() -> None:
    with pytest.raises(UsageError, match=r"^Gathering\.loss calls a collective over all workers \(allgather of torch"):
        own_task(Gathering(), "mine:Gathering").loss(nn.Identity(), ones())
    with pytest.raises(UsageError, match=r"^Mean\.loss returned a Tensor, not Sums: return steadfast\.Sums\(loss_sum"):
        own_task(Mean(), "mine:Mean").loss(nn.Identity(), ones())


def test_the_kind_of_a_task_follows_from_what_its_loss_takes() -> None:
    assert isinstance(own_task(Embedding(), "mine:Embedding"), GlobalTask)
    assert not isinstance(own_task(WithAMethodCalledEmbed(), "mine:It"), GlobalTask)
    with pytest.raises(ConfigError, match=r"task\.target: .*returned a dict without loss\(model, batch\)"):
        own_task({}, "builtins:dict")
