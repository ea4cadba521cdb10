"""Deaths of a peer: what the survivors hold afterwards must be the state of a step, to the bit."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.gpu.scene import Scene
from tests.gpu.subjects import DIES_AT
from tests.gpu.worlds import Company

STEPS, DEATH = 12, 6
SURVIVORS = (0, 2)
_START_S, _END_S = 90.0, 60.0
# Equal bits need equal kernels and one order of summation.
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def ddp(scene: Scene) -> None:
    """Kill rank 1 of 3 before its first gradient, between two buckets and in its update; the others go on.

    Asserts that both survivors go on from equal weights, which are bit for bit those that an undisturbed run has after
    the step that they say they hold; that they stay equal to the end; and that they need no more than 10 s.
    Figures: cases, survivors with wrong weights, the steps that were held, seconds from the death to the new world.
    """
    honest = _undisturbed(scene)
    points = ("first", "between", "update")
    with ThreadPoolExecutor(len(points) if scene.on_gpu else 1) as pool:
        held = list(pool.map(lambda point: _one_death(scene, honest, point), points))
    scene.figure(num_deaths=len(points), held_steps=" ".join(map(str, held)))


def _undisturbed(scene: Scene) -> list[int]:
    """Return the digest of the weights after each step of a run without a fault; at 0 that of the initial weights."""
    company = Company(scene, [f"run.steps={STEPS}"], "undisturbed")
    with company.ranks as ranks:
        company.start(0, 1, 2, **EXACT)
        company.form([0, 1, 2])
        codes = ranks.wait(_START_S + _END_S)
        if any(codes.values()):
            raise RuntimeError(f"the undisturbed run ended with {codes}: {ranks.last_words(0)}")
    runs = [company.updates(member, 1) for member in range(3)]
    scene.check(runs[0] == runs[1] == runs[2], "an undisturbed run's replicas differ")
    scene.check(len(runs[0]) == STEPS, f"an undisturbed run made {len(runs[0])} updates, not {STEPS}")
    return [runs[0][0]["before"], *(update["after"] for update in runs[0])]


def _one_death(scene: Scene, honest: list[int], name: str) -> int:
    """Do one death, and return the step that the survivors went on from."""
    company = Company(scene, [f"run.steps={STEPS}"], name)
    with company.ranks as ranks:
        company.start(*SURVIVORS, **EXACT)
        company.start(1, **EXACT, **{DIES_AT: f"{name}:{DEATH}"})
        company.form([0, 1, 2])
        if not ranks.wait_for_death(1, _START_S):
            scene.check(False, f"{name}: rank 1 has not died: {ranks.last_words(1)}")
            return -1
        company.abort()
        company.form(list(SURVIVORS))
        codes = ranks.wait(_END_S)
    ranks.check_ended(codes, SURVIVORS, f"{name}: survivor")
    step = _held(company)
    _compare(scene, name, company, honest, step)
    return step


def _held(company: Company) -> int:
    """Return the step that the second attempt went on from, by its own word."""
    restored = [event["step"] for event in company.events("restore") if event["attempt"] == 2]
    return int(restored[0]) if restored else 0


def _compare(scene: Scene, name: str, company: Company, honest: list[int], step: int) -> None:
    second: dict[int, list[dict[str, Any]]] = {member: company.updates(member, 2) for member in SURVIVORS}
    for member, updates in second.items():
        began_from = updates[0]["before"] if updates else None
        claim = f"{name}: survivor {member} went on from weights that are not those of step {step}"
        scene.check(began_from == honest[step], claim)
        claim = f"{name}: survivor {member} made {len(updates)} updates from step {step} to {STEPS}"
        scene.check(len(updates) == STEPS - step, claim)
    scene.check(second[0] == second[2], f"{name}: the survivors' weights drift apart")
    slowest_s = max(_stalls(company))
    scene.figure(**{f"{name}_reform_s": slowest_s})
    scene.check(slowest_s <= 10, f"{name}: a survivor needed {slowest_s:.1f} s to be in a world again")


def _stalls(company: Company) -> list[float]:
    """Return the seconds of each survivor's abort and forming together."""
    stalls = [0.0]
    for member in SURVIVORS:
        notes = company.ranks.notes(member)
        aborts = [note["seconds"] for note in notes if note["kind"] == "aborted"]
        forms = [note["seconds"] for note in notes if note["kind"] == "formed" and note["attempt"] == 2]
        stalls.append(sum(aborts) + sum(forms))
    return stalls
