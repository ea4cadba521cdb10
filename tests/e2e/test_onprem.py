"""`ray up` and the command of a checkout or of an installed package, over real ssh, on hosts that go and come back."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.lab.hosts import ROOT, Lab
from tests.e2e.user import SLOW, WORDS, User, copy_project
from tests.support.checks import check_ledger, distance, summary_of
from tests.support.command import Command, Running, files_with
from tests.support.wheels import write_wheel

pytestmark = pytest.mark.timeout(600)

HEAD, WORKERS = "head", ("w1", "w2", "w3")
CLUSTER = "cluster/onprem.yaml"
STEPS = 500
EPOCHS = 22
# A worker a host: Ray finds this machine's two cores on each of them.
PLACED = ["scaling.cpus_per_worker=2", "scaling.gpus_per_worker=0"]
# Of a node whose head is gone: 15 s until its raylet ends, another 60 until Ray's agents have given up telling of it.
LAST_S = 150


@pytest.fixture
def nodes(lab: Lab) -> Lab:
    """A head and workers, for which the laptop has the key."""
    lab.add(HEAD, 10)
    for number, host in enumerate(WORKERS, 11):
        lab.add(host, number)
    lab.give_key("laptop")
    return lab


@pytest.fixture
def user(nodes: Lab) -> User:
    """At a laptop, after `ray up`."""
    user = User(nodes)
    user.clone()
    ray_up(user, CLUSTER)
    return user


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The installed package, which is not built in the checkout, since that leaves folders there."""
    copy_project(tmp_path / "project")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(tmp_path), str(tmp_path / "project")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


def ray_up(user: User, cluster: str) -> None:
    """Give the file of a cluster the addresses and the key of this lab, and start the cluster."""
    addresses = [user.lab.addresses[host] for host in WORKERS]
    user.change(cluster, head_ip=user.lab.addresses[HEAD], worker_ips=f"[{', '.join(addresses)}]")
    user.change(cluster, ssh_user="root", ssh_private_key="~/.ssh/id_lab")
    user.types(f"ray up -y {cluster}", timeout_s=240)


def test_a_host_is_switched_off_and_on_while_the_plain_command_trains(user: User, tmp_path: Path) -> None:
    lab = user.lab
    words = [*WORDS, f"run.steps={STEPS}", "precision.kind=fp32"]
    running = train_on_all(lab, *words)
    lab.power_off("w3")
    running.wait_until(lambda: last(running)["world_size"] == 2, "a world of two")
    lab.power_on("w3")
    running.wait_until(lambda: last(running)["world_size"] == 3, "a world of three again", timeout_s=180)
    finished = running.wait(240)
    assert finished.code == 0, finished.output
    check_ledger(running.directory, STEPS)
    check_curves_on_the_laptop(user)
    user.types(f"ray down -y {CLUSTER}", timeout_s=120)
    lab.await_end_of("[r]aylet|[g]cs_server|[r]ay::|[m]ain.py|[t]ensorboard", (HEAD, *WORKERS), LAST_S)

    one, two = Command(tmp_path, "one"), Command(tmp_path, "two")
    words += ["cluster.address=local"]
    assert one.run(*words, "scaling.num_workers=1", small=False).code == 0
    assert two.run(*words, "scaling.num_workers=2", small=False).code == 0
    losses = [summary_of(directory)["metrics"]["loss"] for directory in (running.directory, one.directory)]
    assert losses[0] == pytest.approx(losses[1], rel=0.002)
    assert distance(running.directory, one.directory) <= 3 * distance(one.directory, two.directory)


def test_one_host_is_cut_off_for_good_and_another_for_a_while(user: User) -> None:
    lab = user.lab
    running = train_on_all(lab, *WORDS, f"run.steps={STEPS}")
    lab.cut("w3")
    running.wait_until(lambda: last(running)["world_size"] == 2, "a world of two")
    lab.cut("w2")
    running.wait_until(lambda: last(running)["world_size"] == 1, "a world of one")
    lab.heal("w2")
    running.wait_until(lambda: last(running)["world_size"] == 2, "a world of two again", timeout_s=180)
    finished = running.wait(240)
    assert finished.code == 0, finished.output
    check_ledger(running.directory, STEPS)


# Packages of the user's own, with names that this project has too.
OWN = {
    "configs/__init__.py": "",
    "configs/places.py": "SEEN = '/mnt/shared/seen'\n",
    "tests/__init__.py": "",
    "tests/environment.py": (ROOT / "tests/examples/environment.py").read_text(),
    "app/__init__.py": "",
    "app/task.py": """
import mine
from configs.places import SEEN
from tests.environment import write_down

class Task(mine.Task):
    def __init__(self, names, package):
        write_down(SEEN, names, package)
""",
}


def test_a_laptop_with_the_installed_package_may_be_switched_off_and_another_one_shows_the_result(
    nodes: Lab, wheel: Path
) -> None:
    lab = nodes
    for host in (HEAD, *WORKERS):
        assert "No module named 'steadfast'" in lab.run(host, "python -c 'import steadfast'").stdout
    user = starter_at(lab, "laptop", wheel)
    ray_up(user, "cluster.yaml")
    secret = f"secret-{uuid.uuid4()}"
    user.settings = {"TOKEN": secret, "WANDB_API_KEY": secret}
    package = write_wheel(user.project, "of_the_user")
    given = [f"run.epochs={EPOCHS}", *PLACED, "scaling.num_workers=[1,3]", SLOW, "cluster.env.TOKEN=null"]
    given += ["task={target: 'app.task:Task', args: {names: [TOKEN, WANDB_API_KEY], package: of_the_user}}"]
    given += [f"cluster.pip={package.name}", "--cluster", "cluster.yaml"]
    running = user.trains(*given)
    running.wait_for_event("attempt_started", world_size=3, timeout_s=180)
    check_what_workers_have_seen(lab, secret)
    running.wait_until(lambda: "step" in running.output_path.read_text(), "what the run says, on the laptop")
    assert lab.run("w1", "pkill -9 -o -f ray::SlotWorker").returncode == 0
    running.wait_until(lambda: last(running)["world_size"] == 2, "a world of two")
    page = user.types("steadfast status run --cluster cluster.yaml")
    assert ("running on head" in page, "\x1b" in page, "INFO" in page) == (True, False, False), page
    lab.power_off("laptop")
    step = running.history.last_step

    lab.add("laptop2", 5, storage=False)
    lab.give_key("laptop2")
    other = starter_at(lab, "laptop2", wheel, user.settings)
    for file in ("cluster.yaml", package.name):
        (other.project / file).write_bytes((user.project / file).read_bytes())
    attached = other.trains(*given).wait(240)
    assert attached.code == 0, attached.output
    started = [event for event in running.events if event["event"] == "run_started"]
    assert (len(started), summary_of(running.directory)["lost_steps"]) == (1, 0)  # shown again, not started again
    proof = other.types("steadfast audit run --cluster cluster.yaml")
    last_step = running.history.last_step
    assert f"steps     1 to {last_step}, each once" in proof
    assert f"epochs    {EPOCHS} finished, each with every training sample once" in proof
    assert last_step > step

    assert files_with(secret, running.directory) == []
    for host in (HEAD, *WORKERS):
        tmp = lab.home(host).parent / "tmp"
        assert files_with(secret, *tmp.glob("ray/session_2*/logs"), lab.home(host)) == []
        assert not list(tmp.glob("steadfast-*"))


def starter_at(lab: Lab, host: str, wheel: Path, settings: dict[str, str] | None = None) -> User:
    """Return a user who has installed the package, and works in a folder of their own that `init` has begun."""
    user = User(lab, host, settings, "project", ("steadfast", "--config", "train.yaml"))
    user.install(wheel)
    for name, text in OWN.items():
        (user.project / name).parent.mkdir(parents=True, exist_ok=True)
        (user.project / name).write_text(text)
    user.types("steadfast init")
    return user


def check_what_workers_have_seen(lab: Lab, secret: str) -> None:
    """All three hosts have what the laptop has given: variables and a package."""
    seen = {file.name.partition("-")[0]: json.loads(file.read_text()) for file in (lab.storage / "seen").iterdir()}
    given = {"TOKEN": secret, "WANDB_API_KEY": secret, "of_the_user": "1.0"}
    assert seen == {host: given for host in WORKERS}


def test_nobody_from_outside_gets_in_without_the_token(user: User) -> None:
    lab = user.lab
    address = lab.addresses[HEAD]
    joins = f"ray start --address {address}:6379 --node-ip-address {lab.addresses['stranger']}"
    for entry in (f"ray status --address {address}:6379", joins):
        refused = lab.run("stranger", f"timeout 30 {entry}")
        assert refused.returncode != 0, refused.stdout
        assert "token" in refused.stdout.lower(), refused.stdout
    submitted = lab.run("stranger", f"timeout 20 ray job submit --address http://{address}:8265 -- true")
    assert submitted.returncode != 0
    assert 8265 not in lab.open_ports(HEAD, seen_from="stranger")
    connects = f"python -c \"import ray; ray.init('ray://{address}:10001')\""
    assert "timeout" in lab.run("stranger", connects).stdout  # it is not told why
    assert "Authentication required" in lab.run(HEAD, "cat /tmp/ray/session_latest/logs/ray_client_server.err").stdout


def check_curves_on_the_laptop(user: User) -> None:
    """Check that the command of the guide forwards TensorBoard's port, by which the laptop sees the whole run."""
    command = f"ray exec {CLUSTER} --port-forward=6006 'tensorboard --logdir /mnt/shared/runs'"
    assert command.replace(CLUSTER, "cluster/aws.yaml") in (ROOT / "docs/deploy/clouds.md").read_text()
    output = user.lab.home(user.host) / "tensorboard.txt"
    viewer = user.lab.start(user.host, f"cd ~/steadfast && exec {command} > ~/{output.name} 2>&1")
    try:
        points: list[list[float]] = []
        until = time.monotonic() + 60
        while not points or points[-1][1] < STEPS:
            assert viewer.poll() is None, output.read_text()
            assert time.monotonic() < until, points
            time.sleep(0.5)
            points = scalars(user, "run/tensorboard", "train/loss")
    finally:
        os.killpg(viewer.pid, signal.SIGKILL)
    steps = [step for _, step, _ in points]
    assert steps == sorted(set(steps))


def scalars(user: User, run: str, tag: str) -> list[list[float]]:
    """Return [time, step, value] of each point that TensorBoard serves at the host's port 6006, [] if none yet."""
    place = f"http://localhost:6006/data/plugin/scalars/scalars?run={run}&tag={tag}"
    got = user.lab.run(user.host, f"curl -fs --max-time 10 '{place}'")
    found: list[list[float]] = json.loads(got.stdout) if got.returncode == 0 else []
    return found


def train_on_all(lab: Lab, *words: str) -> Running:
    """The plain command on the head, once workers on all three hosts have done a step together."""
    running = User(lab, HEAD).trains(*words, *PLACED, "scaling.num_workers=[1,3]", SLOW)
    running.wait_until(lambda: last(running)["world_size"] == 3, "a step of a world of three", timeout_s=180)
    return running


def last(running: Running) -> dict[str, Any]:
    return next(reversed(running.history.lines), {"world_size": 0})
