"""Collectives that last: one that waits for a late peer, and very many of them."""

import random
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.ranks import Rank, Ranks, form, form_plain, sum_of_ones
from tests.gpu.scene import Scene

_START_S = 60.0
# Of torchrun's agent, for the processes that it starts.
_OF_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
_PER_ROUND, _LARGEST = 50, 22  # collectives, and the binary logarithm of the numbers in the largest


def late_peer(scene: Scene) -> None:
    """Let one of two ranks be late in a collective, with the variables that torchrun sets.

    The rank is later than a silent worker may be; torch's watchdog ends a process whose collective outlasts its limit.
    Asserts that both ranks get the sum, and live for 75 s after it. Figures: seconds that the punctual rank waited, and
    the exit codes.
    """
    late_s, live_on_s, silence_s = (8.0, 75.0, 5.0) if scene.on_gpu else (3.0, 4.0, 2.0)
    args = {"late_s": late_s, "live_on_s": live_on_s, "silence_s": silence_s}
    ranks = Ranks(scene, "tests.gpu.collectives:wait_for_a_late_peer", 2, args)
    codes = ranks.run(_START_S + late_s + live_on_s, **_OF_TORCHRUN)
    scene.figure(codes=f"{codes[0]} {codes[1]}")
    ranks.check_ended(codes)
    for number in codes:
        sums = [note["sum"] for note in ranks.notes(number)]
        scene.check(sums == [2, 2], f"the sums of rank {number} are {sums}")
    for note in ranks.notes(0)[:1]:
        scene.figure(waited_s=note["seconds"])


def wait_for_a_late_peer(rank: Rank) -> None:
    world = form(rank, rank.number, 2, 1, rank.args["silence_s"])
    for pause_s in (rank.args["late_s"] if rank.number == 1 else 0.0, rank.args["live_on_s"]):
        time.sleep(pause_s)
        began_s = time.monotonic()
        total = sum_of_ones(rank, world)
        rank.note(sum=total, seconds=time.monotonic() - began_s)
    world.groups.destroy()


def soak(scene: Scene) -> None:
    """Sum tensors of 4 B to 16 MB over two ranks without a pause, by the app's communicator and by torch's own group.

    The app's is in NCCL's non-blocking mode, torch's in the blocking one.
    Asserts that no collective hangs and that every sum is right. Figures: for both modes how many collectives there
    were, and milliseconds for each.
    """
    lasts_s = {"app": 25.0, "torch": 5.0} if scene.on_gpu else {"app": 3.0, "torch": 1.0}
    ranks = Ranks(scene, "tests.gpu.collectives:add_in_mixed_sizes", 2, {"lasts_s": lasts_s})
    codes = ranks.run(_START_S + 2 * sum(lasts_s.values()))
    ranks.check_ended(codes)
    for number in codes:
        wrong = [note for note in ranks.notes(number) if not note["right"]]
        scene.check(not wrong, f"rank {number} got wrong sums: {wrong[:1]}")
    for note in ranks.notes(0):  # the last of each kind stays
        scene.figure(**{f"{note['kind']}_collectives": note["number"]})
        scene.figure(**{f"{note['kind']}_ms": 1000 * note["seconds"] / note["number"]})


def add_in_mixed_sizes(rank: Rank) -> None:
    lasts_s = rank.args["lasts_s"]
    world = form(rank, rank.number, 2, 1)
    _add_for(rank, "app", lasts_s["app"], world.groups.communicator.sum, world.groups.gate)
    world.groups.destroy()
    group = form_plain(rank)
    _add_for(rank, "torch", lasts_s["torch"], partial(dist.all_reduce, group=group), rank.synchronize)


def _add_for(
    rank: Rank, kind: str, lasts_s: float, launch: Callable[[Tensor], object], wait: Callable[[], object]
) -> None:
    """Add up tensors of sizes that all ranks draw alike, until rank 0 says that the time is over."""
    sizes = random.Random(7)
    began_s = time.monotonic()
    number = 0
    over = torch.zeros(1)
    while not over:
        tensors = []
        for _ in range(_PER_ROUND):
            tensors.append(torch.full((2 ** sizes.randint(0, _LARGEST),), rank.number + 1.0, device=rank.device))
        for tensor in tensors:
            launch(tensor)
        wait()
        number += _PER_ROUND
        right = all(bool((tensor == 3).all()) for tensor in tensors)
        seconds = time.monotonic() - began_s
        rank.note(kind=kind, number=number, seconds=seconds, right=right)
        over.fill_(rank.number == 0 and seconds >= lasts_s)
        dist.all_reduce(over)  # by the default group, which is gloo's
