"""Communicators that lose a peer: abort, torch's watchdog, a death while connecting, and many worlds in one process."""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.ranks import SURVIVABLE, Rank, Ranks, die, form, form_plain, sum_of_ones
from tests.gpu.scene import Scene

_START_S = 60.0
_POINTS = ("before", "within", "behind", "summing")
_SILENCE_S = 2.0
_DEATH_S = 7.5 * _SILENCE_S + 5  # gloo, the slower one, waits five times as long as it is told to
_WITHIN_S, _LAUNCH_S = 0.05, 1.0  # from the begin of connecting to a death within, and until all others have launched


def three_ranks(scene: Scene) -> None:
    """Connect three ranks on one device and add up tensors 20 times, with torch alone.

    Asserts that all ranks get the right sums. Figures: milliseconds of an all-reduce of 4 MB, seconds to connect.
    """
    ranks = Ranks(scene, "tests.gpu.recovery:add_up", 3)
    ranks.check_ended(ranks.run(_START_S))
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
    """Abort a world while a sum of the app's waits for a rank that never comes, four times.

    Asserts for each time that the device is free within 0.5 s, that arithmetic, memory and a new world work right
    after, and that the process lives; the last two times, sums are launched without a pause meanwhile. The same with
    collectives that are launched beside the app's communicator, as FSDP does, is a figure.
    Figures: the slowest abort and the slowest release of the device, in seconds; the exit codes of the other way.
    """
    times = 4
    gangs = {}
    for way, often in (("app", times), ("bare", 2)):
        args = {"times": often, "way": way}
        gang = Ranks(scene, "tests.gpu.recovery:abort_again_and_again", 2, args, way)
        gangs[way] = gang, gang.run(_START_S + 4 * often, **SURVIVABLE)
    scene.figure(bare_codes=" ".join(map(str, gangs["bare"][1].values())), bare_aborts=len(gangs["bare"][0].notes(0)))
    ranks, codes = gangs["app"]
    ranks.check_ended(codes)
    notes = ranks.notes(0)
    scene.check(len(notes) == times, f"{len(notes)} of {times} aborts were survived")
    if not notes:
        return
    slowest_s = max(note["free_s"] for note in notes)
    scene.figure(abort_s=max(note["abort_s"] for note in notes), free_s=slowest_s)
    scene.check(slowest_s < 0.5, f"the device was free after {slowest_s:.2f} s")
    scene.check(all(note["right"] for note in notes), "a new world after an abort adds up wrongly")


def abort_again_and_again(rank: Rank) -> None:
    times = rank.args["times"]
    for number in range(times):
        world = form(rank, rank.number, 2, 2 * number + 1)
        sum_of_ones(rank, world)
        if rank.number == 0:
            abort_s, free_s = _abort_in_flight(rank, world, steady=number >= times // 2)
        else:
            time.sleep(0.4)  # launches nothing, while rank 0 waits
            world.groups.abort()
        world.groups.destroy()
        world = form(rank, rank.number, 2, 2 * number + 2)
        right = sum_of_ones(rank, world) == 2
        if rank.number == 0:
            rank.note(abort_s=abort_s, free_s=free_s, right=right)
        dist.barrier(world.groups.control)
        world.groups.destroy()


def _abort_in_flight(rank: Rank, world: Any, steady: bool) -> tuple[float, float]:
    """Abort from another thread 0.2 s after launching. Return the seconds it took, and until the device was free."""
    aborted: list[float] = []

    def abort_later() -> None:
        time.sleep(0.2)
        aborted.append(time.monotonic())
        world.groups.abort()
        aborted.append(time.monotonic())

    launch: Callable[[Tensor], object] = world.groups.communicator.sum
    if rank.args["way"] == "bare":
        launch = partial(dist.all_reduce, group=world.groups.communicator.group)
    thread = threading.Thread(target=abort_later)
    thread.start()
    with contextlib.suppress(Exception):  # on the host, gloo raises where NCCL only frees the device
        for _ in range(50 if steady else 1):
            launch(torch.ones(2**16, device=rank.device))
            time.sleep(0.02 if steady else 0)
        world.groups.gate()
    thread.join()
    rank.synchronize()
    free_s = time.monotonic() - aborted[0]
    matrix = torch.eye(512, device=rank.device)
    if not torch.equal(matrix @ matrix, matrix):
        raise AssertionError("the device computes wrongly after an abort")
    return aborted[1] - aborted[0], 0.0 if steady else free_s


def watchdog(scene: Scene) -> None:
    """Let a survivor abort, destroy its groups and live on for 70 s, in which torch's own watchdog may end it.

    Asserts, with the variables by which torch leaves a failed group to its owner: that destroying takes less than
    1 s, a new world of the survivors works, and nobody is ended. Whether torch's defaults allow it is a figure.
    Figures: for each delay of the abort the seconds of destroying, and the exit codes of both kinds.
    """
    delays_ms = (0, 150) if scene.on_gpu else (0, 50)
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
            codes = gang.wait(live_on_s + 2 * _START_S)  # all gangs start at once
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
    """Kill rank 1 of 3 at four points of forming a world, each time another one; the others form a world without it.

    The points: before it connects by NCCL, within its connecting, behind it, and in the first sum, which the others
    have launched. In a rehearsal they are those of gloo's control group.
    Asserts for each point that both survivors are free 5 s after the limit of forming at the latest, that what they get
    says that a peer is lost, and that their own world adds up. Figures: for each point the seconds of the slower
    survivor, and what rank 0 got.
    """
    ranks = Ranks(scene, "tests.gpu.recovery:survive_deaths_in_init", 2 + len(_POINTS))
    codes = ranks.run(_START_S + _DEATH_S * len(_POINTS), **SURVIVABLE)
    ranks.check_ended(codes, (0, 1), "survivor")
    for number, point in enumerate(_POINTS):
        died = ranks.notes(2 + number)
        found = [note for survivor in (0, 1) for note in ranks.notes(survivor) if note["point"] == point]
        if not died or len(found) != 2:
            scene.check(False, f"{point}: {len(found)} of 2 survivors are free, {len(died)} of 1 died")
            continue
        free_s = max(note["time_s"] for note in found) - died[0]["time_s"]
        scene.figure(**{f"{point}_free_s": free_s, f"{point}_got": found[0]["error"]})
        scene.check(free_s < _DEATH_S, f"{point}: free after {free_s:.1f} s")
        for note in found:
            scene.check(note["peer"], f"{point}: a survivor got no loss of a peer: {note['error']}")
            scene.check(note["sum"] == 2, f"{point}: the world of the survivors adds up to {note['sum']}")


def survive_deaths_in_init(rank: Rank) -> None:
    from steadfast.world.groups import is_peer_loss

    if rank.number > 1:
        number = rank.number - 2
        _die_in_init(rank, _POINTS[number])
        _add_up_in_world(rank, 1, 3, 2 * number + 1)
        return
    for number, point in enumerate(_POINTS):
        error, peer = "nothing: the sum came", False
        try:
            _add_up_in_world(rank, 2 * rank.number, 3, 2 * number + 1)
        except Exception as raised:
            error, peer = f"{type(raised).__name__}: {raised}"[:120], is_peer_loss(raised)
        free_at_s = time.time()
        total = _add_up_in_world(rank, rank.number, 2, 2 * number + 2)
        rank.note(point=point, error=error, peer=peer, time_s=free_at_s, sum=total)


def _add_up_in_world(rank: Rank, place: int, size: int, attempt: int) -> float:
    world = form(rank, place, size, attempt, _SILENCE_S)
    try:
        total = sum_of_ones(rank, world)
        dist.barrier(world.groups.control)
        return total
    except BaseException:
        world.groups.abort()
        raise
    finally:
        world.groups.destroy()


def _die_in_init(rank: Rank, point: str) -> None:
    """Have this process die where it connects to the others, or where it first adds up with them."""
    backend = "nccl" if rank.device.type == "cuda" else "gloo"
    honest = dist.new_group

    def note_and_die() -> None:
        rank.note(time_s=time.time())
        die()

    def new_group(*args: Any, **options: Any) -> Any:
        if backend not in args and options.get("backend") != backend:
            return honest(*args, **options)
        if point == "before":
            note_and_die()
        if point == "within":
            threading.Timer(_WITHIN_S, note_and_die).start()
        group = honest(*args, **options)
        if point == "within":
            time.sleep(2 * _WITHIN_S)  # it was quicker
        if point == "behind":
            note_and_die()
        return group

    def sum_late(*_: Any) -> None:
        time.sleep(_LAUNCH_S)
        note_and_die()

    dist.new_group = new_group
    if point == "summing":
        dist.ProcessGroup.allreduce = sum_late  # type: ignore[assignment]
