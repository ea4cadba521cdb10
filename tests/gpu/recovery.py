"""Communicators that lose a peer: abort, torch's watchdog, a death while connecting, and many worlds in one process."""

from __future__ import annotations

import contextlib
import threading
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.ranks import SURVIVABLE, Rank, Ranks, die, form_plain
from tests.gpu.scene import Scene

_START_S = 60.0


def three_ranks(scene: Scene) -> None:
    """Connect three ranks on one device and add up tensors 20 times, with torch alone.

    Asserts that all ranks get the right sums. Figures: milliseconds of an all-reduce of 4 MB, seconds to connect.
    """
    with Ranks(scene, "tests.gpu.recovery:add_up", 3).start_all() as ranks:
        codes = ranks.wait(_START_S)
        for number, code in codes.items():
            scene.check(code == 0, f"rank {number} ended with {code}: {ranks.last_words(number)}")
        for note in ranks.notes(0):
            scene.figure(**note)


def add_up(rank: Rank) -> None:
    began_s = time.monotonic()
    group = form_plain(rank)
    tensor = torch.full((2**20,), float(rank.number + 1), device=rank.device)
    dist.all_reduce(tensor, group=group)
    rank.synchronize()
    connect_s = time.monotonic() - began_s
    seconds = []
    for number in range(20):
        tensor.fill_(rank.number + number)
        began_s = time.monotonic()
        dist.all_reduce(tensor, group=group)
        rank.synchronize()
        seconds.append(time.monotonic() - began_s)
        wanted = sum(range(rank.size)) + rank.size * number
        if not bool((tensor == wanted).all()):
            raise AssertionError(f"sum {number} is {tensor[0].item()}, not {wanted}")
    rank.note(connect_s=connect_s, all_reduce_ms=1000 * median(seconds))


def abort(scene: Scene) -> None:
    """Abort a world while a collective waits for a rank that never comes, ten times, as the app does it.

    Asserts for each time that the device is free within 0.5 s, that arithmetic, memory and a new world work right
    after, and that the process lives; the last five times, all-reduces are launched without a pause meanwhile.
    Figures: the slowest abort and the slowest release of the device, in seconds.
    """
    times = 10 if scene.on_gpu else 4
    args = {"times": times}
    with Ranks(scene, "tests.gpu.recovery:abort_again_and_again", 2, args).start_all(**SURVIVABLE) as ranks:
        codes = ranks.wait(_START_S + 10 * times)
        for number, code in codes.items():
            scene.check(code == 0, f"rank {number} ended with {code}: {ranks.last_words(number)}")
        notes = ranks.notes(0)
    scene.check(len(notes) == times, f"{len(notes)} of {times} aborts were survived")
    if not notes:
        return
    slowest_s = max(note["free_s"] for note in notes)
    scene.figure(abort_s=max(note["abort_s"] for note in notes), free_s=slowest_s)
    scene.check(slowest_s < 0.5, f"the device was free after {slowest_s:.2f} s")
    scene.check(all(note["right"] for note in notes), "a new world after an abort adds up wrongly")


def abort_again_and_again(rank: Rank) -> None:
    from steadfast.world.runtime import form_world

    times = rank.args["times"]
    for number in range(times):
        world = form_world(rank.store, rank.number, 2, 2 * number + 1, rank.device)
        group = device_group(world)
        _sum_of_ones(rank, group)
        if rank.number == 0:
            abort_s, free_s = _abort_in_flight(rank, world, group, steady=number >= times // 2)
        else:
            time.sleep(0.4)  # launches nothing, while rank 0 waits
            world.groups.abort()
        world.groups.destroy()
        world = form_world(rank.store, rank.number, 2, 2 * number + 2, rank.device)
        right = _sum_of_ones(rank, device_group(world)) == 2
        if rank.number == 0:
            rank.note(abort_s=abort_s, free_s=free_s, right=right)
        dist.barrier(world.groups.control)
        world.groups.destroy()


def _abort_in_flight(rank: Rank, world: Any, group: dist.ProcessGroup | None, steady: bool) -> tuple[float, float]:
    """Abort from another thread 0.2 s after launching. Return the seconds it took, and until the device was free."""
    aborted: list[float] = []

    def abort_later() -> None:
        time.sleep(0.2)
        aborted.append(time.monotonic())
        world.groups.abort()
        aborted.append(time.monotonic())

    thread = threading.Thread(target=abort_later)
    thread.start()
    with contextlib.suppress(Exception):  # on the host, gloo raises where NCCL only frees the device
        for _ in range(50 if steady else 1):
            dist.all_reduce(torch.ones(2**16, device=rank.device), group=group)
            time.sleep(0.02 if steady else 0)
    thread.join()
    rank.synchronize()
    free_s = time.monotonic() - aborted[0]
    matrix = torch.eye(512, device=rank.device)
    if not torch.equal(matrix @ matrix, matrix):
        raise AssertionError("the device computes wrongly after an abort")
    return aborted[1] - aborted[0], 0.0 if steady else free_s


def _sum_of_ones(rank: Rank, group: dist.ProcessGroup | None) -> float:
    ones = torch.ones(1024, device=rank.device)
    dist.all_reduce(ones, group=group)
    return ones[0].item()


def device_group(world: Any) -> dist.ProcessGroup:
    """Return the app's group for tensors on the device."""
    group: dist.ProcessGroup = world.groups.communicator.group
    return group


def watchdog(scene: Scene) -> None:
    """Let a survivor abort, destroy its groups and live on for 70 s, in which torch's own watchdog may end it.

    Asserts, with the variables by which torch leaves a failed group to its owner: that destroying takes less than
    1 s, a new world of the survivors works, and nobody is ended. Whether torch's defaults allow it is a figure.
    Figures: for each delay of the abort the seconds of destroying, and the exit codes of both kinds.
    """
    delays_ms = (0, 50, 150, 300) if scene.on_gpu else (0, 50)
    live_on_s = 70.0 if scene.on_gpu else 2.0
    kinds: tuple[tuple[str, dict[str, str]], ...] = (("survivable", SURVIVABLE), ("defaults", {}))
    gangs: dict[tuple[str, int], Ranks] = {}
    with contextlib.ExitStack() as stack:
        for kind, environment in kinds:
            for delay_ms in delays_ms:
                args = {"delay_ms": delay_ms, "live_on_s": live_on_s}
                gang = Ranks(scene, "tests.gpu.recovery:lose_a_peer", 3, args, f"{kind}-{delay_ms}ms")
                gangs[kind, delay_ms] = stack.enter_context(gang).start_all(**environment)
        for (kind, delay_ms), gang in gangs.items():
            codes = gang.wait(live_on_s + _START_S)
            asserted = scene.check if kind == "survivable" else _never
            for survivor in (0, 2):
                name = f"{kind}, abort after {delay_ms} ms, rank {survivor}"
                asserted(codes[survivor] == 0, f"{name}: ended with {codes[survivor]}: {gang.last_words(survivor)}")
                for note in gang.notes(survivor):
                    asserted(note["destroy_s"] < 1, f"{name}: destroying took {note['destroy_s']:.1f} s")
                    asserted(note["sum"] == 2, f"{name}: the new world adds up to {note['sum']}")
                    scene.figure(**{f"{kind}_{delay_ms}ms_destroy_s": note["destroy_s"]})
            scene.figure(**{f"{kind}_{delay_ms}ms_codes": f"{codes[0]} {codes[2]}"})


def _never(holds: bool, claim: str) -> None:
    """Assert nothing: what torch's defaults do is torch's."""


def lose_a_peer(rank: Rank) -> None:
    group = form_plain(rank)
    tensor = torch.ones(2**20, device=rank.device)
    dist.all_reduce(tensor, group=group)
    rank.synchronize()
    if rank.number == 1:
        die()
    with contextlib.suppress(RuntimeError):  # which gloo raises
        dist.all_reduce(tensor, group=group)
    time.sleep(rank.args["delay_ms"] / 1000)
    backend = group._get_backend(rank.device)
    with contextlib.suppress(RuntimeError, AttributeError):
        backend.abort()
    rank.synchronize()
    began_s = time.monotonic()
    dist.destroy_process_group()
    destroy_s = time.monotonic() - began_s
    rank.number //= 2  # of 0 and 2, in a world of two
    group = form_plain(rank, size=2, generation=1)
    ones = torch.ones(8, device=rank.device)
    dist.all_reduce(ones, group=group)
    total = ones[0].item()
    rank.number *= 2
    rank.note(destroy_s=destroy_s, sum=total)
    time.sleep(rank.args["live_on_s"])


def death_in_init(scene: Scene) -> None:
    """Kill rank 1 of 3 after the members have met and before the first collective, where NCCL connects.

    The others are told to abort one second after the death, as the coordinator would.
    Asserts that both survivors are free within 10 s, and that what they get says that a peer is lost.
    Figures: their seconds, and what they got.
    """
    with Ranks(scene, "tests.gpu.recovery:connect_without_one", 3).start_all(**SURVIVABLE) as ranks:
        if not ranks.wait_for_death(1, _START_S):
            scene.check(False, f"rank 1 has not died: {ranks.last_words(1)}")
        died_s = time.time()
        time.sleep(1)
        ranks.store.set("abort", "")
        codes = ranks.wait(60)
        for survivor in (0, 2):
            notes = ranks.notes(survivor)
            if not notes:
                scene.check(False, f"rank {survivor} is not free after 60 s (exit code {codes[survivor]})")
                continue
            free_s = notes[-1]["time_s"] - died_s
            scene.figure(**{f"rank_{survivor}_free_s": free_s, f"rank_{survivor}_got": notes[-1]["error"]})
            scene.check(free_s < 10, f"rank {survivor} was free after {free_s:.1f} s")
            scene.check(notes[-1]["peer"], f"rank {survivor} got no loss of a peer: {notes[-1]['error']}")


def connect_without_one(rank: Rank) -> None:
    from steadfast.world.groups import is_peer_loss
    from steadfast.world.runtime import form_world

    if rank.number == 1:
        honest = dist.init_process_group

        def meet_and_die(*args: Any, **options: Any) -> None:
            honest(*args, **options)
            die()

        dist.init_process_group = meet_and_die
    try:
        world = form_world(rank.store, rank.number, 3, 1, rank.device)
        threading.Thread(target=_abort_when_told, args=(rank, world), daemon=True).start()
        _sum_of_ones(rank, device_group(world))
        rank.note(error="nothing: the sum came", peer=False, time_s=time.time())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:120]
        rank.note(error=said, peer=is_peer_loss(error), time_s=time.time())


def _abort_when_told(rank: Rank, world: Any) -> None:
    rank.another_store().wait(["abort"])
    world.groups.abort()
