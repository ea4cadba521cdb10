"""Refuse collectives of the user's code where they would make the result follow from the number of workers.

The private names of torch.distributed that this needs are checked by tests/unit/test_torch_internals.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

# Methods of a process group by which torch's collectives and point-to-point functions run.
COLLECTIVES = (
    "_allgather_base",
    "_get_backend",  # from torch 2.14 on, batch_isend_irecv asks the backend first
    "_reduce_scatter_base",
    "_start_coalescing",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "new_window",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class RefusedCollective(Exception):
    """Code within `no_collectives` called a collective of the default process group."""


class _StandIn(dist.ProcessGroup):
    """Process group that knows rank and size, and raises RefusedCollective instead of communicating."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the store is optional
        self.stands_for = group

    @property
    def _device_types(self) -> list[torch.device]:
        return self.stands_for._device_types  # monitored_barrier asks for them first

    @property
    def group_name(self) -> str:  # type: ignore[override]  # functional collectives look a group up by its name
        raise RefusedCollective("a functional collective")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RefusedCollective(name.strip("_"))

    return refuse


for _name in COLLECTIVES:
    setattr(_StandIn, _name, _refusing(_name))

_stand_in: _StandIn | None = None  # for the default group that was seen last


@contextmanager
def no_collectives() -> Iterator[None]:
    """Raise RefusedCollective for each collective of the default group within, before anything is sent.

    Rank and size stay available. Groups that torch or this program pass explicitly, such as those of fully_shard,
    communicate as before. Costs about a microsecond.
    """
    group = _world.default_pg
    if group is None:
        yield
        return
    _world.default_pg = _stand_in_for(group)
    try:
        yield
    finally:
        _world.default_pg = group


def _stand_in_for(group: dist.ProcessGroup) -> _StandIn:
    global _stand_in
    if _stand_in is None or _stand_in.stands_for is not group:
        _stand_in = _StandIn(group)
        # For get_backend and get_process_group_ranks. The end of the default group clears both tables.
        _world.pg_map[_stand_in] = _world.pg_map[group]
        _world.pg_group_ranks[_stand_in] = _world.pg_group_ranks[group]
    return _stand_in
