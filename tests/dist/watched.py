"""A drill that is watched: every process says how far it is, and another applies the policy to all of them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import steadfast.injection.inject
import tests.support.drill
from steadfast.config import Config
from steadfast.liveness.watchdog import Hang, Watchdog
from steadfast.world.progress import Limits, Progress
from steadfast.world.report import ProgressReport
from tests.support.drill import Drilled, DrillRuntime, drill

BEAT_S = 0.1


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
