"""The kind of each exception, as a table."""

import pytest
import torch
import torch.distributed as dist

from steadfast.errors import RunConflict, UserExit
from steadfast.guards.corruption import Corrupted
from steadfast.guards.failures import failure_kind
from steadfast.guards.numerics import BadStep
from steadfast.guards.out_of_memory import OutOfMemory
from steadfast.world.groups import PeerLost

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
ECC = "uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLost("the world was aborted"), "peer"),
        (RuntimeError(GLOO), "peer"),
        (dist.DistBackendError(f"{NCCL}remote process exited or there was a network error"), "peer"),
        (dist.DistBackendError(f"{NCCL}unhandled system error, Last error: socketProgress: Connection closed"), "peer"),
        # failures of the rank's own device
        (dist.DistBackendError(f"{NCCL}unhandled cuda error\nLast error:\nCuda failure 214 '{ECC}'"), "exception"),
        (dist.DistBackendError(f"{NCCL}unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), "oom"),
        (RuntimeError(f"CUDA error: {ECC}"), "exception"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "exception"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (MemoryError(), "oom"),
        (OutOfMemory(4, "CUDA out of memory"), "smaller"),
        (BadStep((8,), "the loss of step 8 is nan"), "numeric"),
        (Corrupted(1, 0, "step 8: rank 1 computes wrongly"), "corruption"),
        (RunConflict("another command owns the run"), "ours"),
        (ValueError("a bug"), "exception"),
        (UserExit("sys.exit in your own code"), "exception"),
    ],
)
def test_an_exception_has_the_kind_that_its_cause_gives(error: BaseException, kind: str) -> None:
    assert failure_kind(error) == kind


@pytest.mark.parametrize(("has_peers", "kind"), [(False, "exception"), (True, "peer")])
def test_an_error_that_speaks_of_sockets_is_no_peers_before_there_are_any(has_peers: bool, kind: str) -> None:
    assert failure_kind(RuntimeError("the dataset's server closed the socket"), has_peers) == kind
