"""Kinds of failures, and the kind of an exception."""

from enum import StrEnum

from steadfast.errors import GpuUnusable, SteadfastError


class FailureKind(StrEnum):
    """Kind of a failure, in reports, budgets and `Failure` events."""

    # Kinds of lost workers.
    WORKER = "worker"  # its process has ended, or is silent
    HANG = "hang"  # it makes no progress
    PREEMPTION = "preemption"  # its node is about to go
    CORRUPTION = "corruption"  # it computed wrongly, which all workers of its world raise
    DEVICE = "device"  # torch cannot use its GPU
    # Kinds of exceptions.
    PEER = "peer"  # another worker seems to be lost
    COMMUNICATION = "communication"  # "peer", although no worker was lost
    NUMERIC = "numeric"  # a step has bad numbers and must be left out
    SMALLER = "smaller"  # a forward has run out of memory, and can be repeated with fewer samples
    OUT_OF_MEMORY = "oom"  # the device or the host has run out of memory elsewhere
    OURS = "ours"  # a SteadfastError, whose message says what to do
    EXCEPTION = "exception"  # any other exception


def failure_kind(error: BaseException, has_peers: bool = True) -> FailureKind:
    """Return the kind of an exception that has ended an attempt.

    Args:
        has_peers: False before the first attempt. A dataset that is built then may raise errors of sockets too.
    """
    # The coordinator needs the kinds alone, and the import of torch takes seconds.
    from steadfast.guards.corruption import Corrupted
    from steadfast.guards.numerics import BadStep
    from steadfast.guards.out_of_memory import OutOfMemory
    from steadfast.world.groups import is_out_of_memory, is_peer_loss

    if isinstance(error, OutOfMemory):
        return FailureKind.SMALLER
    if has_peers and is_peer_loss(error):
        return FailureKind.PEER
    if isinstance(error, GpuUnusable):
        return FailureKind.DEVICE
    if isinstance(error, SteadfastError):
        return FailureKind.OURS
    if isinstance(error, BadStep):
        return FailureKind.NUMERIC
    if isinstance(error, Corrupted):
        return FailureKind.CORRUPTION
    if is_out_of_memory(error):
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.EXCEPTION
