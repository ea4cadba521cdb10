"""What `doctor` says of machines: a table of what may be wrong with them, and of what is not."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, count
from pathlib import Path

import pytest
import torch

from steadfast.cli import main
from steadfast.config import Config
from steadfast.doctor import facts as of_nodes
from steadfast.doctor import inspectors as checkup
from steadfast.doctor.facts import Gpu, Interface, NodeFacts, Space, gather_facts
from steadfast.doctor.findings import (
    Finding,
    Link,
    Sight,
    judge_clocks,
    judge_collectives,
    judge_links,
    judge_node,
    judge_storage,
    judge_versions,
)
from steadfast.doctor.inspectors import Inspectors, Peer, common_device, skew, training_peers
from steadfast.doctor.marks import Marks
from steadfast.doctor.network import SIZES_BYTES, CollectiveFigures, LinkFigures, sizes_for
from steadfast.doctor.rounds import rounds
from steadfast.storage import LocalStore
from tests.support.json_tables import check_document
from tests.support.verbs import printed

CPU = torch.device("cpu")
MIB, GIB = 2**20, 2**30
VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "CUDA": "13.0", "NCCL": "2.28.3", "driver": "580", "Ray": "2.60.0"}
HEALTHY = NodeFacts(
    versions=VERSIONS,
    num_cpus=8,
    gpus=(Gpu("H100", 79 * GIB, 80 * GIB),),
    device="cuda",
    free_memory_bytes=60 * GIB,
    shared_memory=Space("/dev/shm", 32 * GIB, 32 * GIB),
    disks=(Space("/mnt/shared", 500 * GIB, 1000 * GIB), Space("/tmp", 70 * GIB, 100 * GIB)),
    num_open_files=65536,
    own_address="10.0.0.5",
    interfaces=(Interface("lo", "127.0.0.1", True, 0), Interface("eth0", "10.0.0.5", True, 10000)),
    variables={"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
)
FAST = LinkFigures(1e-4, 1e9, intact=True)
SLOW = LinkFigures(1e-4, 1e7, intact=True)
DENIED = Sight(error="Permission denied")


def of_package(name: str, version: str) -> NodeFacts:
    return replace(HEALTHY, versions={**VERSIONS, name: version})


def on_shm(free: int, total: int) -> NodeFacts:
    return replace(HEALTHY, shared_memory=Space("/dev/shm", free, total))


def on_disk(free: int, total: int) -> NodeFacts:
    return replace(HEALTHY, disks=(Space("/data", free, total),))


def beside_eth0(name: str) -> NodeFacts:
    return replace(HEALTHY, interfaces=(*HEALTHY.interfaces, Interface(name, "10.1.0.5", True, 100000)))


def test_a_healthy_node_is_summed_up_in_one_line() -> None:
    (finding,) = judge_node("w1", HEALTHY)
    assert finding.level == "ok"
    for part in ("H100 with 79.0 GiB of 80.0 GiB free", "/dev/shm 32.0 GiB", "65536 open files", "eth0 (10.0.0.5)"):
        assert part in finding.what
    json.dumps(finding.figures)


PLANTED = {
    "ulimit": (replace(HEALTHY, num_open_files=256), "error", "256 files", "ulimit -n 65536"),
    "few files": (replace(HEALTHY, num_open_files=1000), "warning", "1000 files", "ulimit -n 65536"),
    "container": (on_shm(64 * MIB, 64 * MIB), "error", "64.0 MiB of 64.0 MiB is free in /dev/shm", "--shm-size"),
    "no disk": (on_disk(GIB // 2, 5 * GIB), "error", "512.0 MiB of 5.0 GiB is free at /data", "run.storage"),
    "little disk": (on_disk(5 * GIB, 9 * GIB), "warning", "/data", "keep_last"),
    "full disk": (on_disk(40 * GIB, 1000 * GIB), "warning", "/data", "95 % full"),
    "no memory": (replace(HEALTHY, free_memory_bytes=GIB // 2), "warning", "512.0 MiB of memory", "larger machine"),
    "interface": (
        replace(HEALTHY, variables={"GLOO_SOCKET_IFNAME": "ib0"}),
        "error",
        "GLOO_SOCKET_IFNAME=ib0 names no interface that is up; there are: lo (127.0.0.1), eth0 (10.0.0.5)",
        "Unset GLOO_SOCKET_IFNAME",
    ),
    "interface in the syntax of NCCL": (
        replace(HEALTHY, variables={"GLOO_SOCKET_IFNAME": "=eth0"}),
        "error",
        "GLOO_SOCKET_IFNAME==eth0 names no interface that is up",
        "Unset GLOO_SOCKET_IFNAME",
    ),
    "no GPU": (
        replace(HEALTHY, gpu_fault="h: torch cannot use the GPU: No driver. Please check. Look at nvidia-smi"),
        "error",
        "torch cannot use the GPU: No driver. Please check",
        "Look at nvidia-smi",
    ),
    "slow interface": (
        beside_eth0("ens6"),
        "warning",
        "eth0 has 10000 Mbit/s, and ens6 has 100000",
        "NCCL_SOCKET_IFNAME=ens6",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_wrong_with_a_node_is_found_and_has_its_remedy(planted: str) -> None:
    facts, level, what, remedy = PLANTED[planted]
    (finding,) = judge_node("w1", facts)
    assert (finding.level, what in finding.what, remedy in finding.remedy) == (level, True, True), finding
    assert finding.what.startswith("w1: ")


@pytest.mark.parametrize(
    "facts",
    [
        on_disk(0, 0),  # a file system without a size is not full
        on_shm(0, 0),
        *[replace(HEALTHY, variables={"NCCL_SOCKET_IFNAME": name}) for name in ("eth", "=eth0", "^docker", "ib,eth0")],
        *[beside_eth0(name) for name in ("docker0", "br-0a1b", "virbr0")],  # lead to containers alone
    ],
)
def test_what_is_unusual_about_a_node_and_right_is_no_alarm(facts: NodeFacts) -> None:
    assert [finding.level for finding in judge_node("w1", facts)] == ["ok"]


def test_a_gpu_that_does_not_tell_its_memory_is_one_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in HEALTHY.variables:
        monkeypatch.setenv(variable, "lo")
    monkeypatch.setattr(of_nodes, "output_of", lambda *command: "580.95, NVIDIA GB10, [N/A], [N/A]")
    facts = gather_facts("127.0.0.1", "s3://bucket/runs", CPU)
    assert (facts.gpus, facts.versions["driver"]) == ((Gpu("NVIDIA GB10", 0, 0),), "580.95")
    (finding,) = judge_node("w1", replace(HEALTHY, gpus=facts.gpus))
    assert "8 CPUs, NVIDIA GB10 | free:" in finding.what


@pytest.mark.parametrize("package", VERSIONS)
def test_a_version_that_differs_is_named_with_its_nodes(package: str) -> None:
    nodes = {"w1": HEALTHY, "w2": of_package(package, "2.99"), "w3": HEALTHY}
    (finding,) = judge_versions(nodes)
    assert finding.level == ("warning" if package == "driver" else "error")
    assert finding.what == f"{package} differs between nodes: {VERSIONS[package]} on w1, w3; 2.99 on w2"
    assert f"one {package} on all nodes" in finding.remedy


def test_nodes_that_agree_are_one_line_and_a_head_without_a_gpu_is_no_alarm() -> None:
    (finding,) = judge_versions({"w1": HEALTHY, "w2": HEALTHY})
    assert (finding.level, finding.what.count("torch 2.13.0")) == ("ok", 1)
    versions = {"Python": "3.11.7", "torch": "2.13.0+cpu", "Ray": "2.60.0"}
    head = replace(HEALTHY, versions=versions, gpus=())
    (finding,) = judge_versions({"head": head, "w1": of_package("torch", "2.13.0+cu130"), "w2": HEALTHY})
    assert (finding.level, "NCCL 2.28.3" in finding.what) == ("ok", True)
    broken = replace(head, gpus=HEALTHY.gpus)
    findings = judge_versions({"w1": HEALTHY, "w2": broken})
    assert [finding.what for finding in findings if finding.what.startswith("NCCL")] == [
        "NCCL differs between nodes: 2.28.3 on w1; none on w2"
    ]


@pytest.mark.parametrize(
    ("version", "fixed"),
    [("2.18.1", "2.19.1"), ("2.25.1", "2.26.2"), ("2.19.3", None), ("2.26.2", None), ("2.28.3", None)],
)
def test_a_release_of_nccl_whose_abort_hangs_is_named(version: str, fixed: str | None) -> None:
    (finding,) = judge_versions({"w1": of_package("NCCL", version)})
    assert finding.level == ("warning" if fixed else "ok")
    assert f"NCCL {version}" in finding.what
    assert (fixed or "") in finding.remedy


@pytest.mark.parametrize(
    ("ahead_s", "error_s", "level"),
    [(0.2, 0.01, "ok"), (-3.0, 0.01, "warning"), (3.0, 2.5, "ok"), (1000.0, 0.1, "error"), (-1000.0, 0.1, "error")],
)
def test_a_clock_is_judged_by_what_is_certain_of_it(ahead_s: float, error_s: float, level: str) -> None:
    (finding,) = judge_clocks({"w1": (0.0, 0.01), "w2": (ahead_s, error_s)})
    assert finding.level == level
    if level != "ok":
        assert f"w2: its clock is {abs(ahead_s)} s {'ahead of' if ahead_s > 0 else 'behind'}" in finding.what
        assert "chrony" in finding.remedy


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [
        # The clock of this machine may be the one that is wrong.
        ((0, 30, 30.5), ["w0: its clock is 30.0 s behind that of most nodes"]),
        ((0, -30, -30), ["w0: its clock is 30.0 s ahead of that of most nodes"]),
        # Where most nodes do not agree, clocks are compared with this machine's.
        ((0, 30), ["w1: its clock is 30.0 s ahead of this machine's"]),
        ((0, 30, 60), [f"w{number}: its clock is {30.0 * number} s ahead of this machine's" for number in (1, 2)]),
        ((30,), ["w0: its clock is 30.0 s ahead of this machine's"]),
    ],
)
def test_a_clock_is_compared_with_most_nodes_where_they_agree(ahead_s: tuple[float, ...], said: list[str]) -> None:
    findings = judge_clocks({f"w{number}": (each, 0.01) for number, each in enumerate(ahead_s)})
    assert [finding.what for finding in findings] == said
    assert skew(asked_s=100.0, told_s=105.5, answered_s=101.0) == (5.0, 0.5)  # from the middle of the question


def test_storage_that_cannot_be_written_says_why_and_other_storage_gets_nothing_but_marks(tmp_path: Path) -> None:
    marks = Marks(LocalStore(tmp_path / "shared" / "runs"), "marks")
    assert [marks.leave(name) for name in ("w1", "w2")] == ["", ""]
    assert marks.wait_for({"w1", "w2"}) == {"w1", "w2"}
    assert [path.name for path in tmp_path.iterdir()] == ["marks"]
    assert (tmp_path / "marks" / "w1").stat().st_size > 0  # a full disk takes empty files
    marks.remove()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert Marks(LocalStore(tmp_path / "file"), "marks").leave("w1") == "File exists"
    below = f"File exists (in {tmp_path / 'file'}, the last folder of this path that exists)"
    assert Marks(LocalStore(tmp_path / "file" / "runs"), "marks").leave("w1") == below
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    assert Marks(LocalStore(tmp_path / "link"), "marks").leave("w1") == "File exists"


def seen(*groups: str) -> dict[str, Sight]:
    """Return what each node sees of storage, where the nodes of a group see each other's marks."""
    return {node: Sight(frozenset(group.split())) for group in groups for node in group.split()}


@pytest.mark.parametrize(
    ("sights", "said", "remedy"),
    [
        (seen("w1 w2"), [], ""),
        (seen("w1") | {"w2": DENIED}, ["w2 cannot write run.storage /runs: Permission denied"], "choose another run"),
        (
            {"this command": DENIED, "w1": DENIED},
            ["this command, w1 cannot write run.storage /runs: Permission denied"],
            "choose another run.storage",
        ),
        (
            seen("w1 w2 w3", "w4"),
            [
                "w1, w2, w3 do not see at run.storage /runs what w4 wrote there",
                "w4 does not see at run.storage /runs what w1, w2, w3 wrote there",
            ],
            "Mount one folder on all nodes",
        ),
    ],
)
def test_nodes_with_one_fault_of_storage_are_a_finding(sights: dict[str, Sight], said: list[str], remedy: str) -> None:
    findings = judge_storage("/runs", sights)
    assert [finding.what for finding in findings if finding.level != "ok"] == said
    assert {finding.level for finding in findings} == {"error" if said else "ok"}
    assert all(remedy in finding.remedy for finding in findings)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_where_storage_is_full_the_remedy_is_space(number: int) -> None:
    (finding,) = judge_storage("/runs", {"w1": Sight(error=os.strerror(number))})
    assert finding.remedy == "Free space there (df -h -i /runs), or choose another run.storage"


def links(nodes: str, slow: str = "", figures: LinkFigures | None = None) -> list[Link]:
    """Return the links of all pairs of nodes, where those of `slow` have these figures."""
    found = []
    for first, second in combinations(nodes, 2):
        is_slow = slow in (first, second, first + second)
        found.append(Link(first, second, figures if is_slow and figures else FAST))
    return found


@pytest.mark.parametrize(
    ("nodes", "slow", "figures", "named"),
    [
        ("abcd", "bd", LinkFigures(1e-4, 2e8, True), ["b - d"]),
        ("abcd", "bd", LinkFigures(2e-2, 1e9, True), ["b - d"]),
        ("bd", "bd", SLOW, ["b - d"]),  # with no other pair to compare
        ("abc", "c", LinkFigures(1e-4, 5e7, True), ["a - c", "b - c"]),  # most pairs are slow
    ],
)
def test_slow_pairs_are_named_and_the_node_that_all_of_several_include(
    nodes: str, slow: str, figures: LinkFigures, named: list[str]
) -> None:
    findings = judge_links(links(nodes, slow, figures))
    assert [(finding.level, finding.what[:5]) for finding in findings] == [("warning", pair) for pair in named]
    remedy = "GLOO_SOCKET_IFNAME" if len(named) == 1 else "All slow pairs include c"
    assert all(remedy in finding.remedy for finding in findings)


def test_a_link_that_was_slow_once_is_not_slow_and_slow_ones_are_measured_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, fast = Link("a", "b", LinkFigures(1.0, 1e6, intact=True)), Link("a", "b", FAST)
    assert slow.or_better(fast) == fast.or_better(slow) == fast
    assert not fast.or_better(Link("a", "b", replace(FAST, intact=False))).figures.intact
    assert fast.or_better(Link("a", "b", None, "gone")).error == "gone"
    measured: list[tuple[str, str]] = []

    def measure(inspectors: Inspectors, pairs: list[tuple[str, str]], *others: object) -> list[Link]:
        measured.extend(pairs)
        return [Link(first, second, SLOW) for first, second in pairs]

    monkeypatch.setattr(checkup, "_measure_pairs", measure)
    found = links("abcd", "d", SLOW)
    again = checkup._doubted(Inspectors({}), found, {}, count())
    assert (again, measured) == (found, 3 * [("a", "d"), ("b", "d"), ("c", "d")])
    measured.clear()
    monkeypatch.setattr(checkup, "_DOUBTS_S", -1.0)
    assert checkup._doubted(Inspectors({}), found, {}, count()) == found
    assert measured == []


def test_of_an_actor_that_did_not_start_the_reason_is_told() -> None:
    error = "The actor died unexpectedly.\n\tactor_id: 1\nno room for it\nThe actor never ran - it was cancelled."
    assert checkup._short(RuntimeError(error)) == "no room for it"
    assert checkup._short(RuntimeError("")) == "RuntimeError"


@pytest.mark.parametrize("slowest", [FAST, LinkFigures(1e-3, 3e8, True)])
def test_links_that_vary_are_no_alarm(slowest: LinkFigures) -> None:
    (finding,) = judge_links(links("abcd", "bd", slowest))
    assert finding.level == "ok"
    assert len(finding.figures) == 6


def test_a_pair_that_cannot_connect_or_that_changes_messages_is_an_error() -> None:
    broken = [Link("a", "b", None, "no route to host"), Link("a", "c", LinkFigures(1e-4, 1e9, intact=False))]
    first, second = judge_links([*broken, Link("b", "c", FAST)])
    assert (first.level, second.level) == ("error", "error")
    assert "a - b cannot reach each other: no route to host" in first.what
    assert "a - c: a message came back changed" in second.what


def test_the_slowest_rank_is_the_time_of_a_collective_and_a_wrong_result_names_its_rank() -> None:
    def seen(of_sum_s: float, wrong: str = "") -> list[CollectiveFigures]:
        return [CollectiveFigures("all_reduce", {1024: of_sum_s}, ""), CollectiveFigures("gather", {1024: 1e-3}, wrong)]

    good, bad = judge_collectives({"w1": seen(1e-3), "w2": seen(4e-3, "element 3 of 9 is 1 instead of 2")}, "NCCL")
    assert (good.level, good.figures) == ("ok", {"1024": 4e-3})
    assert good.what.startswith("all_reduce over NCCL is right on 2 ranks")
    assert (bad.level, bad.what) == ("error", "gather gives w2 a wrong result: element 3 of 9 is 1 instead of 2")


def test_a_head_without_a_gpu_keeps_no_gpus_from_nccl() -> None:
    head, w1, w2 = Peer("10.0.0.1", 1, "cpu"), Peer("10.0.0.2", 2, "cuda"), Peer("10.0.0.3", 3, "cuda")
    assert training_peers({"head": head, "w1": w1, "w2": w2}) == ["w1", "w2"]
    assert training_peers({"head": head, "w1": head}) == ["head", "w1"]
    assert [common_device(pair) for pair in ((head, w1), (w1, w2), (head, head))] == ["cpu", "cuda", "cpu"]


@pytest.mark.parametrize("num_nodes", range(8))
def test_each_pair_is_in_one_round_and_no_node_twice_in_a_round(num_nodes: int) -> None:
    nodes = [str(number) for number in range(num_nodes)]
    pairs = []
    for of_round in rounds(nodes):
        busy = [node for pair in of_round for node in pair]
        assert len(busy) == len(set(busy))
        pairs += of_round
    assert sorted(tuple(sorted(pair)) for pair in pairs) == list(combinations(nodes, 2))


def test_messages_are_as_large_as_the_slowest_link_bears() -> None:
    assert sizes_for(1e9) == SIZES_BYTES
    assert sizes_for(1e6) == SIZES_BYTES[:2]
    assert sizes_for(1.0) == SIZES_BYTES[:1]


def test_the_facts_of_this_machine_are_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in HEALTHY.variables:
        monkeypatch.setenv(variable, "lo")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        facts = gather_facts("127.0.0.1", str(tmp_path / "not" / "there"), CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (facts.num_open_files, facts.own_address, facts.variables["GLOO_SOCKET_IFNAME"]) == (256, "127.0.0.1", "lo")
    assert [disk.path for disk in facts.disks] == [str(tmp_path)]  # and not that of /tmp, which is the same
    assert {"Python", "torch", "Ray"} <= facts.versions.keys()
    assert "open files" in {finding.check for finding in judge_node("here", facts)}


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warning", 0), ("error", 1)])
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_only_an_error_is_the_exit_code(
    words: list[str], level: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Config] = []

    def check(config: Config, verbose: bool) -> Iterator[Finding]:
        asked.append(config)
        yield Finding("ok", "versions", "all the same")
        yield Finding(level, "clocks", "w2 is late", "Synchronize it")  # type: ignore[arg-type]

    monkeypatch.setattr("steadfast.doctor.machines.check_machines", check)
    shown = printed(capsys, "doctor", "--config", "ddp.yaml", "run.storage=/somewhere", *words, code=code)
    assert asked[0].run.storage == "/somewhere"
    if words:
        found = json.loads(shown.out)
        assert [each["level"] for each in found["findings"]] == ["ok", level]
        check_document("`doctor`", found)
    progress = shown.err if words else shown.out
    assert f"{level:<8} clocks: w2 is late\n         -> Synchronize it\n" in progress
    counted = {"ok": "0 errors, 0 warnings", "warning": "0 errors, 1 warning", "error": "1 error, 0 warnings"}
    assert progress.endswith(f"\n{counted[level]}\n")


def test_findings_show_at_once_with_json_unless_that_goes_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []

    def check(config: Config, verbose: bool) -> Iterator[Finding]:
        for check in ("versions", "clocks"):
            shown.append(capsys.readouterr().err)
            yield Finding("ok", check, "good")

    monkeypatch.setattr("steadfast.doctor.machines.check_machines", check)
    assert main(0.0, ["doctor", "--json"]) == 0
    assert ["checking the machines" in shown[0], shown[1]] == [True, "ok       versions: good\n"]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert printed(capsys, "doctor", "--json").err == ""
    assert shown[2:] == ["", ""]
