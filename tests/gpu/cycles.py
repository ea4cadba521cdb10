"""Many worlds in one process: 3 -> 2 by a death, 2 -> 3 by a newcomer, again and again."""

from statistics import median

from tests.gpu.scene import Scene
from tests.gpu.worlds import Company

_START_S, _STEP_S = 90.0, 45.0


def ddp(scene: Scene) -> None:
    """Kill a member and take in a newcomer, 12 times over (4 in a rehearsal), while member 0 trains on.

    Asserts that device memory, host memory, threads and descriptors of member 0 stay flat after the third cycle.
    Figures: these by cycle, and the median seconds of forming, building, restoring and the first step.
    """
    _cycles(scene, "ddp", 12 if scene.on_gpu else 4)


def fsdp(scene: Scene) -> None:
    """Do the same with sharded state, which survivors cannot bring along whole, 3 times (1 in a rehearsal).

    Asserts that every world goes on from a step that was done, and trains. Figures as for ddp.
    """
    _cycles(scene, "fsdp", 3 if scene.on_gpu else 1)


def _cycles(scene: Scene, kind: str, num_cycles: int) -> None:
    company = Company(scene, ["run.steps=1000000", f"parallel.kind={kind}", "checkpoint.every=20 steps"], kind)
    spares = 2  # newcomers that have started already, so that their imports are not waited for
    members = [0, 1, 2]
    with company.ranks as ranks:
        company.start(*range(3 + spares))
        company.form(members)
        company.train_on("the first world", _START_S)
        newest = 2 + spares
        for cycle in range(num_cycles):
            ranks.processes[members[1]].kill()
            ranks.processes[members[1]].wait()
            company.abort()
            members = [members[0], members[2]]
            company.form(members)
            company.train_on(f"cycle {cycle}, without a member", _STEP_S)
            company.resize()
            members.append(3 + cycle)
            company.form(members)
            company.train_on(f"cycle {cycle}, with a newcomer", _STEP_S)
            newest += 1
            company.start(newest)
        company.resize()
        company.end()
        ranks.wait(_STEP_S)
    _report(scene, company, num_cycles)


def _report(scene: Scene, company: Company, num_cycles: int) -> None:
    parts = ("formed_s", "built_s", "restored_s", "first_step_s")
    attempts = company.events("attempt_started")[1:]
    for part in parts:
        scene.figure(**{part: median([event[part] for event in attempts])})
    scene.figure(num_cycles=num_cycles, num_worlds=len(attempts) + 1)
    company.check_flat(6)  # two worlds a cycle
