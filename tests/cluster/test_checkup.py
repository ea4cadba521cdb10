"""`doctor` on a cluster of three nodes: a healthy one, one with faults, one of whose nodes stops to answer."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from steadfast.config import Config, load_config
from steadfast.doctor import inspectors as checkup
from steadfast.doctor.findings import Finding
from steadfast.doctor.inspectors import Inspector
from steadfast.doctor.machines import check_machines
from steadfast.storage import Store
from tests.support.bed import Bed
from tests.support.command import descendants

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(num_nodes=2) as bed:
        yield bed


@pytest.fixture
def config(bed: Bed, tmp_path: Path) -> Config:
    return load_config("ddp.yaml", [f"cluster.address={bed.address}", f"run.storage={tmp_path / 'runs'}"])


def of_check(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def test_a_healthy_cluster_gives_no_alarm(config: Config, tmp_path: Path) -> None:
    findings = list(check_machines(config, verbose=False))
    assert [finding for finding in findings if finding.level == "error"] == []
    checks = [finding.check for finding in findings]
    for check in ("cluster", "versions", "clocks", "run directory", "links", "node", "collectives"):
        assert check in checks
    (links,) = of_check(findings, "links")
    assert (links.level, links.what.startswith("3 pairs of nodes; ")) == ("ok", True)
    assert len(of_check(findings, "node")) == 3
    assert list(tmp_path.iterdir()) == []


class EndsAtFirst(Inspector):
    """Ends while it starts, where it is the first one of its node."""

    def __init__(self, name: str, head: str, store: Store, shares_gpu: bool) -> None:
        try:
            Path(store.uri).with_name(f"begun-{name}").mkdir()
        except FileExistsError:
            super().__init__(name, head, store, shares_gpu)
            return
        os._exit(1)


def test_a_process_that_ray_could_not_start_is_started_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "Inspector", EndsAtFirst)
    findings = list(check_machines(config, verbose=False))
    assert [finding for finding in findings if finding.level == "error"] == []
    assert len(of_check(findings, "node")) == 3


def test_an_unshared_run_directory_and_a_wrong_interface_are_found(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    # The directory of each process's own: of a worker it is the code that Ray has brought there.
    unshared = config.replace("run.storage", "/proc/self/cwd/.unshared")
    findings = list(check_machines(unshared, verbose=False))
    wrong = of_check(findings, "run directory")
    assert {finding.level for finding in wrong} == {"error"}
    assert any(finding.what.startswith("this command does not see at run.storage ") for finding in wrong)
    interfaces = of_check(findings, "interfaces")
    assert len(interfaces) == 3
    assert all("GLOO_SOCKET_IFNAME=ib0 names no interface that is up" in finding.what for finding in interfaces)
    assert ["cannot reach each other" in finding.what for finding in of_check(findings, "links")] == [True] * 3


def test_a_node_that_does_not_answer_is_named_and_the_others_are_checked(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "_ANSWER_S", 5.0)
    findings = []
    for finding in check_machines(config, verbose=False):
        findings.append(finding)
        if finding.check == "versions":
            (stopped, *_) = [pid for pid, title in descendants(os.getpid()) if title.startswith("ray::Inspector")]
            os.kill(stopped, signal.SIGSTOP)  # it ends with its actor, by a signal that reaches it all the same
    assert not ray.is_initialized()
    (silent,) = of_check(findings, "answer")
    assert "did not answer within 5 s (tell its time)" in silent.what
    assert of_check(findings, "links")[0].what.startswith("1 pair of nodes")
    assert {finding.level for finding in of_check(findings, "collectives")} == {"ok"}
