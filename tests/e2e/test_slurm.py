"""`cluster/slurm.sbatch` on hosts of the lab, with stand-ins for Slurm's two commands."""

import shlex

import pytest

from tests.e2e.lab.hosts import Lab
from tests.e2e.user import SLOW, WORDS, User
from tests.support.checks import check_ledger
from tests.support.command import Running

STEPS = 150
SCONTROL = """#!/usr/bin/env bash
echo $3 | tr , '\\n'
"""
# Like srun it hands the environment on, and what it has started ends with it (that is what -tt is for).
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do case $1 in --nodelist=*) node=${1#*=} ;; esac; shift; done
handed=$(export -p | grep -E ' (RAY|NCCL|SLURM)_')
exec ssh -tt -q -o StrictHostKeyChecking=no -i ~/.ssh/id_lab "root@$(sed -n "s/ $node$//p" ~/addresses)" \\
  "$handed; cd $(printf %q "$PWD"); exec $(printf '%q ' "$@")"
"""


@pytest.mark.timeout(300)
def test_one_allocation_is_one_cluster_and_one_run(lab: Lab) -> None:
    nodes = {"n1": 21, "n2": 22}
    for name, number in nodes.items():
        lab.add(name, number)
    lab.give_key("n1")
    User(lab, "n1").clone()
    lab.run("n1", "mv steadfast /mnt/shared/")  # as on Slurm, where all nodes see the folder
    home = lab.home("n1")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (home / name).write_text(text)
        (home / name).chmod(0o755)
    (home / "addresses").write_text("".join(f"{lab.addresses[name]} {name}\n" for name in nodes))

    settings = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_CPUS_PER_TASK": "1"}
    words = [*WORDS, f"run.steps={STEPS}", "scaling.num_workers=2", "scaling.gpus_per_worker=0", SLOW]
    given = shlex.join(["--config", "ddp.yaml", "run.name=run", *words])
    command = f"cd /mnt/shared/steadfast && PATH=~:$PATH bash cluster/slurm.sbatch {given} > ~/output.txt 2>&1"
    running = Running(lab.start("n1", command, **settings), lab.storage / "runs" / "run", home / "output.txt")
    running.wait_for_event("attempt_started", world_size=2, timeout_s=120)
    finished = running.wait(120)
    assert finished.code == 0, finished.output
    check_ledger(running.directory, STEPS)
    lab.await_end_of("[r]aylet|[g]cs_server|[m]ain.py", nodes, 60)
