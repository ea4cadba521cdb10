"""`doctor` on three hosts: healthy ones, and such that have a fault each time in what `doctor` looks at."""

import json
from typing import Any

import pytest

from tests.e2e.lab.hosts import Lab
from tests.e2e.user import User

HOSTS = {"head": 10, "w1": 11, "w2": 12}
DOCTOR = "cd ~/steadfast && python main.py doctor --config ddp.yaml --json"
RAY = "RAY_USAGE_STATS_ENABLED=0 ray start --object-store-memory=100000000 --num-cpus=1"

# As a container has it; plasma then lies in /tmp.
SMALL_SHARED_MEMORY = "mount -t tmpfs -o size=64m shm /dev/shm"
READ_ONLY = "mkdir ~/runs && mount -t tmpfs -o ro,size=100g runs ~/runs"
FULL_DISK = "mkdir ~/runs && mount -t tmpfs -o size=64m runs ~/runs && head -c 63M /dev/zero > ~/runs/full"
# Changes are this host's alone: all hosts have one virtual environment.
OTHER_TORCH = r"""
python=$(head -n 1 "$(command -v ray)" | cut -c 3-)
torch=$($python -c "import importlib.util as of; print(of.find_spec('torch').submodule_search_locations[0])")
mkdir -p /run/torch/upper /run/torch/work
mount -t overlay torch -o "lowerdir=$torch,upperdir=/run/torch/upper,workdir=/run/torch/work" "$torch"
sed -i "s/^__version__ = .*/__version__ = '1.99.0'/" "$torch/version.py"
cat >> "$torch/distributed/distributed_c10d.py" << END

_right_all_reduce = all_reduce


def all_reduce(tensor, *args, **kwargs):
    work = _right_all_reduce(tensor, *args, **kwargs)
    if tensor.numel() > 100:
        tensor[100] += 1
    return work
END
"""
# The clock of a host cannot be set by itself, so its Python is told another time. libfaketime would shift the clock of
# all of Ray, but has Python's `sleep` fail now and then.
FAST_CLOCK = r"""
mkdir ~/clock && cat > ~/clock/sitecustomize.py << END
import time

right = time.time
time.time = lambda: right() + 90
END
export PYTHONPATH=~/clock
"""

# Check, level, what it says, what it says to do.
PLANTED = [
    ("versions", "error", "torch differs between nodes: {torch} on head, w2; 1.99.0 on w1", "Install one torch"),
    ("shared memory", "error", "w1: 64.0 MiB of 64.0 MiB is free in /dev/shm", "--shm-size"),
    ("open files", "error", "w1: a process may have 256 files", "ulimit -n 65536"),
    ("disk", "error", "w2: 1.0 MiB of 64.0 MiB is free at /root/runs", "Free space, keep fewer checkpoints"),
    ("clocks", "warning", "w2: its clock is 90.0 s ahead of this machine's", "chrony"),
    ("run directory", "error", "w1 cannot write run.storage /root/runs: Read-only file system", "Let the user"),
    ("run directory", "error", "head, this command do not see at run.storage /root/runs what w2 wrote", "Mount one"),
    ("run directory", "error", "w2 does not see at run.storage /root/runs what head, this command wrote", "Mount one"),
    ("links", "warning", "head - w2: ", "All slow pairs include w2: check its interface and cable"),
    ("links", "warning", "w1 - w2: ", "All slow pairs include w2: check its interface and cable"),
    ("collectives", "error", "all_reduce gives w1 a wrong result: element 100 of 256 is ", "Do not train here"),
]


@pytest.fixture
def cluster(lab: Lab) -> Lab:
    for host, number in HOSTS.items():
        lab.add(host, number)
    User(lab, "head").clone()
    for host in HOSTS:
        join(lab, host)
    return lab


def join(lab: Lab, host: str, before: str = "ulimit -n 4096") -> None:
    """Start Ray on a host, after something else in the same shell."""
    role = (
        "--head --port=6379 --include-dashboard=false" if host == "head" else f"--address={lab.addresses['head']}:6379"
    )
    start = f"{RAY} {role} --node-ip-address={lab.addresses[host]}"
    # Twice, since on a busy machine a raylet may take longer than the half minute that Ray waits for it.
    started = lab.run(host, f"set -e\n{before}\n{start} || {{ ray stop; {start}; }}", timeout_s=180)
    assert started.returncode == 0, started.stdout


def examine(lab: Lab, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Give the command on the head. Return its exit code, its findings, and what it showed meanwhile."""
    done = lab.run("head", f"{DOCTOR} {' '.join(words)} 2> ~/progress.txt", timeout_s=240)
    progress = (lab.home("head") / "progress.txt").read_text()
    assert done.stdout.startswith("{"), f"{done.stdout}\n{progress}"
    return done.returncode, json.loads(done.stdout)["findings"], progress


def shown(findings: list[dict[str, Any]]) -> str:
    return "\n".join(f"{each['level']} {each['check']}: {each['what']} -> {each['remedy']}" for each in findings)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_healthy_hosts_give_no_alarm_and_each_fault_is_named_with_its_host_and_remedy(cluster: Lab) -> None:
    code, findings, progress = examine(cluster)
    assert (code, {each["level"] for each in findings}) == (0, {"ok"}), shown(findings)
    assert list(cluster.storage.iterdir()) == []
    assert progress.endswith("0 errors, 0 warnings\n"), progress
    torch = next(each for each in findings if each["check"] == "versions")["what"].split("torch ")[1].split(",")[0]

    for host in ("w1", "w2"):
        assert cluster.run(host, "ray stop").returncode == 0
    join(cluster, "w1", "\n".join([SMALL_SHARED_MEMORY, READ_ONLY, OTHER_TORCH, "ulimit -n 256"]))
    cluster.narrow("w2", mbit_per_s=100)
    join(cluster, "w2", "\n".join([FULL_DISK, "ulimit -n 4096", FAST_CLOCK]))
    code, findings, progress = examine(cluster, "run.storage=/root/runs")
    wrong = [each for each in findings if each["level"] != "ok"]
    for check, level, what, remedy in PLANTED:
        told = [each for each in wrong if (each["check"], each["level"]) == (check, level)]
        expected = what.format(torch=torch)
        assert any(expected in each["what"] and remedy in each["remedy"] for each in told), f"{what}\n{shown(wrong)}"
    slow = [each["figures"]["bytes_per_s"] for each in wrong if each["check"] == "links"]
    assert slow == pytest.approx([11.5e6, 11.5e6], rel=0.2)  # of 12.5e6, less the heads of its packets
    assert (code, len(wrong)) == (1, len(PLANTED)), shown(wrong)
    assert [path.name for path in cluster.home("head").glob("*runs*")] == []
