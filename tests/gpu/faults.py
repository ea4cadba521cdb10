"""Faults of one process that the run outlives: steps that are rolled back, and a device that fails."""

from tests.gpu.scene import Scene
from tests.gpu.subjects import FAULTS_AT
from tests.gpu.worlds import Company

_START_S, _END_S = 90.0, 60.0
_ROLLBACKS, _SETTLING = 10, 3


def rollback(scene: Scene) -> None:
    """Train with one process through 10 steps of NaN, each of which is rolled back and left out.

    Asserts that each is, and that device memory, host memory, threads and descriptors are flat after the third.
    Figures: these after the first world and after the last.
    """
    bad = [5 + 3 * number for number in range(_ROLLBACKS)]
    faults = ", ".join(f"{{kind: nan_at, step: {step}, times: null}}" for step in bad)
    overrides = [
        f"run.steps={bad[-1] + 5}",
        f"faults.inject=[{faults}]",
        "checkpoint.every=2 steps",
        f"recovery.max_skipped_steps={_ROLLBACKS}",
    ]
    company = Company(scene, overrides, "run")
    with company.ranks as ranks:
        company.start(0)
        for _ in range(_ROLLBACKS + 1):
            company.form([0])
        codes = ranks.wait(_START_S + _END_S)
    ranks.check_ended(codes, what="member")
    left_out: list[int] = []
    for event in company.events("rollback"):
        left_out += event["steps"]
    scene.check(left_out == bad, f"steps {left_out} were left out, not {bad}")
    company.check_flat(_SETTLING)


def faulty_device(scene: Scene) -> None:
    """Have a kernel of rank 1 of 2 trap, which ends the use of a device for that process; another takes its place.

    Asserts that rank 1 calls it a fault of its own and ends, that its peer calls it the loss of a peer, and that the
    peer trains to the end with the newcomer. In a rehearsal the host raises. Figures: the errors of both.
    """
    company = Company(scene, ["run.steps=40"], "run")
    with company.ranks as ranks:
        company.start(0, 2)
        company.start(1, **{FAULTS_AT: "20"})
        company.form([0, 1])
        if not ranks.wait_for_death(1, _START_S):
            scene.check(False, f"rank 1 lives on: {ranks.last_words(1)}")
        company.abort()
        company.form([0, 2])
        codes = ranks.wait(_END_S)
    ranks.check_ended(codes, (0, 2), "member")
    scene.check(codes[1] > 0, f"the rank of the failed device ended with {codes[1]}")
    for member, is_peer in ((0, True), (1, False)):
        failures = [note for note in ranks.notes(member) if note["kind"] == "failed"]
        scene.figure(**{f"rank_{member}_got": failures[0]["error"][:120] if failures else "nothing"})
        claim = f"rank {member} failed with {failures}"
        scene.check([note["peer"] for note in failures] == [is_peer], claim)
