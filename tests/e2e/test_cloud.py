"""`ray up cluster/aws.yaml` through EC2's API: training asks for spot nodes, loses one and gets another."""

from collections.abc import Iterator

import pytest

from tests.e2e.lab.cloud import Cloud
from tests.e2e.lab.hosts import Lab
from tests.e2e.user import SLOW, WORDS, User
from tests.support.checks import check_ledger

CLUSTER = "cluster/aws.yaml"
STEPS = 300


@pytest.fixture
def cloud(lab: Lab) -> Iterator[Cloud]:
    cloud = Cloud(lab)
    yield cloud
    cloud.close()


@pytest.mark.timeout(900)
def test_training_on_spot_instances_of_which_one_is_taken_away(lab: Lab, cloud: Cloud) -> None:
    user = User(lab, settings=cloud.settings)
    user.clone()
    user.change(CLUSTER, ssh_user="root")
    path = user.project / CLUSTER
    text = path.read_text().replace("ami-00000000000000000", cloud.image())
    text = text.replace("InstanceType:", f"SubnetIds: [{cloud.subnet()}]\n      InstanceType:")
    # The head starts instances too: the stand-in's address and keys, which on AWS the instance's role gives.
    keys = " ".join(f"{name}={value}" for name, value in cloud.settings.items())
    path.write_text(text.replace("export RAY_health", f"export {keys} RAY_health"))
    user.types(f"ray up -y {CLUSTER}", timeout_s=300)
    assert [each.type for each in cloud.running()] == ["m5.xlarge"]

    # The instances declare GPUs, which the torch of this machine cannot use.
    sizes = ["scaling.cpus_per_worker=8", "scaling.gpus_per_worker=0", "scaling.num_workers=[1,2]"]
    words = [*WORDS, f"run.steps={STEPS}", *sizes, SLOW]
    running = user.trains(*words, "--cluster", CLUSTER)
    running.wait_for_event("attempt_started", world_size=2, timeout_s=400)
    workers = [each for each in cloud.running() if each.tags["ray-node-type"] == "worker"]
    assert len(workers) == 2
    assert all(each.is_spot and each.type in ("g5.2xlarge", "g6.2xlarge") for each in workers)
    assert {each.tags["ray-cluster-name"] for each in cloud.running()} == {"steadfast"}

    cloud.terminate(workers[0])
    running.wait_until(lambda: running.history.lines[-1]["world_size"] == 1, "a world of one")
    running.wait_until(lambda: running.history.lines[-1]["world_size"] == 2, "a replacement", timeout_s=300)
    finished = running.wait(300)
    assert finished.code == 0, finished.output
    check_ledger(running.directory, STEPS)

    groups = cloud.ask("describe_security_groups", Filters=[{"Name": "group-name", "Values": ["steadfast"]}])
    rules = groups["SecurityGroups"][0]["IpPermissions"]
    open_to_all = [rule for rule in rules if rule["IpRanges"]]
    assert {(rule["FromPort"], rule["ToPort"]) for rule in open_to_all} == {(22, 22)}
    user.types(f"ray down -y {CLUSTER}", timeout_s=120)
    assert cloud.running() == []
