"""Stalls in real processes, each named by the policy over what all of them say of themselves."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import steadfast.injection.inject
import tests.support.drill
from steadfast.config import Config
from steadfast.liveness.watchdog import Hang, Watchdog
from steadfast.world.progress import Limits, Progress
from steadfast.world.report import ProgressReport
from tests.support.claims import check_run
from tests.support.drill import Drilled, DrillRuntime, drill
from tests.support.programs import run_program
from tests.support.reference import reference
from tests.support.small import small

BEAT_S = 0.1
SHORT = Limits(step_s=1.5, rare_s=1.5)


class Watched(NamedTuple):
    """stacks, phases: of all processes, by member, at each hang."""

    run: Drilled
    hangs: list[Hang]
    stacks: list[dict[str, str]]
    phases: list[dict[str, str]]
    num_looks: int  # at all members in the middle of an attempt


def watch(config: Config, worlds: list[int], limits: Limits, **options: Any) -> Watched:
    """The drill, in which a hang lasts until it has been found."""
    folder = Path(config.run.storage) / "watch"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "found")
    hangs: list[Hang] = []
    said: list[dict[str, Any]] = []
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(_look, folder, max(worlds), over, hangs, said)
        try:
            run = drill(config, worlds, patch=partial(_patch, folder, limits), **options)
        finally:
            over.set()
        stacks = [{member: each["stacks"] for member, each in all_of.items()} for all_of in said]
        phases = [{member: each["report"]["phase"] for member, each in all_of.items()} for all_of in said]
        return Watched(run, hangs, stacks, phases, looking.result())


def _look(folder: Path, size: int, over: threading.Event, hangs: list[Hang], told: list[dict[str, Any]]) -> int:
    num_looks, watchdog = 0, Watchdog(settled_s=10 * BEAT_S)
    while not over.wait(BEAT_S):
        said = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        reports = {member: ProgressReport(**each["report"]) for member, each in said.items()}
        if len(reports) < size:
            continue
        num_looks += all(each.limit_s is not None for each in reports.values())
        if (hang := watchdog.look(reports)) and (not hangs or hang.step != hangs[-1].step):
            hangs.append(hang)
            told.append(said)
            (folder / "found").write_text("go on")  # to one who hangs; waits for it if there is none
    return num_looks


def _patch(folder: Path, limits: Limits) -> None:
    class Watching(DrillRuntime):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.progress = Progress(limits)
            threading.Thread(target=_beat, args=(folder, self._member.number, self.progress), daemon=True).start()

    tests.support.drill.DrillRuntime = Watching  # type: ignore[assignment, misc]
    steadfast.injection.inject.time = _Time(folder / "found")  # type: ignore[assignment, attr-defined]


class _Time:
    """In place of the module: to sleep is to wait until the hang has been found."""

    def __init__(self, found: Path) -> None:
        self._found = found

    def sleep(self, _: float) -> None:
        self._found.read_text()


def _beat(folder: Path, number: int, progress: Progress) -> None:
    pause: Callable[[float], bool] = threading.Event().wait
    while True:
        said = {"report": asdict(progress.report()), "stacks": progress.stacks()}
        temporary = folder / f".{number}"
        temporary.write_text(json.dumps(said))
        temporary.replace(folder / f"{number}.json")
        pause(BEAT_S)


@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        (0, "fsdp"),
        (2, "ddp"),
        pytest.param(0, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_phase(tmp_path: Path, rank: int, kind: str) -> None:
    at = {"loader": 5, "forward": 7, "collective": 9, "checkpoint": 12}
    faults = ", ".join(f"{{kind: hang_at, phase: {phase}, step: {at[phase]}, rank: {rank}}}" for phase in at)
    config = small(tmp_path, f"parallel.kind={kind}", "checkpoint.every=4 steps", f"faults.inject=[{faults}]")
    watched = watch(config, [3], SHORT)
    check_run(watched.run, reference(config))  # it only delayed the run
    assert [(hang.ranks, hang.phase) for hang in watched.hangs] == [((rank,), phase) for phase in at]
    others = {str(member) for member in range(3)} - {str(rank)}
    for hang, stacks in zip(watched.hangs, watched.stacks, strict=True):
        assert set(hang.waiting) == others
        assert "in sleep" in stacks[str(rank)].split("\n\n")[0]
        assert not any("in sleep" in stacks[member] for member in others)
    if kind == "ddp":  # whose forward waits for nobody
        assert [{phases[member] for member in others} for phases in watched.phases[:2]] == [{"gradients"}] * 2


def test_a_hang_before_the_first_step_of_a_resumed_run_is_told_of_the_step_before(tmp_path: Path) -> None:
    hang = "{kind: hang_at, phase: loader, step: 6, rank: 1}"
    config = small(tmp_path, "checkpoint.every=5 steps", f"faults.inject=[{hang}]")
    watched = watch(config, [2, 2], SHORT, leave_after=[5])
    assert [(each.phase, each.step) for each in watched.hangs] == [("loader", 5)]


@pytest.mark.parametrize("steps", [90, pytest.param(300, marks=pytest.mark.slow)])
def test_a_run_in_which_nobody_hangs_raises_no_alarm(tmp_path: Path, steps: int) -> None:
    """With joiners, validations, checkpoints and loader processes."""
    overrides = [f"run.steps={steps}", "checkpoint.every=25 steps", "validation.every=10 steps", "data.num_workers=1"]
    watched = watch(small(tmp_path, *overrides), [2, 3, 2], Limits(), leave_after=[steps // 3, steps // 3])
    assert watched.run.summary["status"] == "finished"
    assert watched.hangs == []
    assert watched.num_looks


# A thread of Python, and two of a library's, which attach when they call back and are gone right after.
BUSY = """
import ctypes, threading, time
from steadfast.world.stacks import stacks

def some(n):
    yield from range(n)

def deep(n):
    return n and sum(some(5)) + deep(n - 1)

pthread = ctypes.CDLL(None)
callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: deep(3) and None)

def python():
    while True:
        deep(30)

def library():
    thread = ctypes.c_ulong()
    while True:
        pthread.pthread_create(ctypes.byref(thread), None, callback, None)
        pthread.pthread_join(thread, None)

for run in (python, library, library):
    threading.Thread(target=run, daemon=True).start()
until = time.monotonic() + 4
while time.monotonic() < until:
    stacks(0)
print("lived", stacks(0).count("most recent call first"))
"""


@pytest.mark.timeout(60)
def test_a_process_in_which_threads_come_and_go_survives_that_its_stacks_are_taken() -> None:
    assert int(run_program("-c", BUSY).split()[1]) >= 3
