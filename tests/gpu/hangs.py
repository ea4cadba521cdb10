"""Which rank is called hung, where the host runs ahead of a device that has stopped, and which is not."""

import json
import time

from steadfast.liveness.watchdog import Hang, Watchdog
from steadfast.world.report import ProgressReport
from tests.gpu.scene import Scene
from tests.gpu.subjects import COMPILES_AT, SLEEPS_AT
from tests.gpu.worlds import Company

_START_S, _LOOK_S, _PAUSE_S = 90.0, 0.2, 12.0


def truth(scene: Scene) -> None:
    """Let the device of rank 1 of 2 sleep for 12 s in a forward, where a phase has hung after 3 s at the earliest.

    Asserts that a hang is found while it lasts, and that rank 1 alone is named. In a rehearsal its host sleeps.
    Figures: the ranks that were named, their phase, and the seconds from the last step to the finding.
    """
    hang = _train_while_one(SLEEPS_AT, scene)
    if hang is None:
        scene.check(False, f"no hang was found in {_PAUSE_S:g} s")
        return
    scene.figure(named=" ".join(map(str, hang.ranks)), phase=hang.phase, found_s=hang.seconds)
    scene.check(hang.ranks == (1,), f"rank 1 hung, and {hang.ranks} were named, in {hang.phase}")


def compilation(scene: Scene) -> None:
    """Let rank 1 of 2 compile for 12 s in a forward, where a phase has hung after 3 s at the earliest.

    Asserts that no hang is found. Figures: the phase of the hang that was found, if any.
    """
    hang = _train_while_one(COMPILES_AT, scene)
    scene.figure(found=hang.phase if hang else "none")
    scene.check(hang is None, f"a compilation was called a hang: {hang}")


def _train_while_one(pauses_at: str, scene: Scene) -> Hang | None:
    """Train on two ranks, the second of which pauses once; return the hang that is found meanwhile."""
    company = Company(scene, ["run.steps=50"], "run", beats=True)
    with company.ranks as ranks:
        company.start(0)
        company.start(1, **{pauses_at: f"40:{_PAUSE_S:g}"})
        company.form([0, 1])
        if not company.wait_for_step(30, _START_S):
            raise RuntimeError(f"the world took no steps: {ranks.last_words(0)}")
        hang = _look(company)
        codes = ranks.wait(_PAUSE_S + 60)
    ranks.check_ended(codes, what="member")
    return hang


def _look(company: Company) -> Hang | None:
    """Apply the app's policy to what the members report, until it finds a hang or the run ends."""
    watchdog = Watchdog(settled_s=1.0)
    while len(company.ranks.living()) == 2:
        reports = {}
        for path in company.ranks.folder.glob("beat-*.json"):
            reports[path.stem] = ProgressReport(**json.loads(path.read_text()))
        hang = watchdog.look(reports) if len(reports) == 2 else None
        if hang is not None:
            return hang
        time.sleep(_LOOK_S)
    return None
