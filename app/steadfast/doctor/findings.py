"""Judgement of the machines of a run: problems and remedies.

All functions are pure. They take facts and measurements, and return findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any, Literal, NamedTuple

from steadfast.doctor.facts import Interface, NodeFacts, Space
from steadfast.doctor.network import CollectiveFigures, LinkFigures
from steadfast.units import joined, plural, size

Level = Literal["ok", "warning", "error"]
_MIB, _GIB = 2**20, 2**30
# A small run has 200 files open: sockets of gloo and Ray, files of checkpoints and data.
_FEW_OPEN_FILES, _TOO_FEW_OPEN_FILES = 1024, 512
_LITTLE_SHARED_MEMORY, _TOO_LITTLE_SHARED_MEMORY = _GIB, 128 * _MIB  # a container has 64 MiB by default
_LITTLE_DISK, _TOO_LITTLE_DISK = 10 * _GIB, _GIB
# Used share of a disk above which Ray stops writing to it.
_FULL_DISK = 0.95
_LITTLE_MEMORY = _GIB
_NO_SPACE = ("No space left on device", "Disk quota exceeded")  # Linux's messages for ENOSPC and EDQUOT
_SKEW_S = 1.0  # skew above which times of events mislead
_TOO_MUCH_SKEW_S = 900.0  # S3 refuses requests with more skew
_SLOW_SHARE = 0.25  # share of the best link's speed below which a link counts as slow
_SLOW_BYTES_PER_S = 30e6
_SLOW_LATENCY_S = 5e-3
_SLOW_LATENCY_RATIO = 10.0
# Interfaces to containers and virtual machines on the same machine. Their reported speed means nothing.
_WITHIN_MACHINE = ("br-", "cali", "cni", "docker", "lxc", "lxd", "podman", "veth", "virbr")

# By package: the level of a difference between nodes, and the reason.
_MUST_AGREE: dict[str, tuple[Level, str]] = {
    "Python": ("error", "Ray and pickled code need the same version"),
    "torch": ("error", "state and collectives of two releases are not compatible"),
    "CUDA": ("error", "torch must be the same build on all nodes"),
    "NCCL": ("error", "NCCL connects only to its own version"),
    "driver": ("warning", "NCCL may choose different transports on the nodes"),
    "Ray": ("error", "Ray refuses nodes of another version"),
}
# Packages that a node without GPUs does not need, such as a head that only coordinates.
_OF_GPUS = ("CUDA", "NCCL", "driver")
_NONE = "none"


class _Fault(NamedTuple):
    """Known fault of NCCL's abort."""

    since: tuple[int, ...]  # first version with the fault
    until: tuple[int, ...]  # first version without the fault
    what: str


_NCCL_FAULTS = (
    _Fault((0,), (2, 19, 1), "an abort by another thread may hang (NVIDIA/nccl#992)"),
    _Fault((2, 25), (2, 26, 2), "an abort hangs (pytorch/pytorch#149153)"),
)


@dataclass(frozen=True)
class Finding:
    """Result of one check, with a remedy if something is wrong."""

    level: Level
    check: str
    what: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """Measured link between a pair of nodes."""

    first: str
    second: str
    figures: LinkFigures | None  # None if the nodes cannot reach each other
    error: str = ""

    @property
    def name(self) -> str:
        """Return the names of both nodes."""
        return f"{self.first} - {self.second}"

    def or_better(self, again: Link) -> Link:
        """Combine two measurements: the error if any, else the better figures."""
        if self.figures is None:
            return self
        if again.figures is None:
            return again
        # Other load on the machines can only slow down a measurement, so the better figures are closer to the link's.
        best = LinkFigures(
            latency_s=min(self.figures.latency_s, again.figures.latency_s),
            bytes_per_s=max(self.figures.bytes_per_s, again.figures.bytes_per_s),
            intact=self.figures.intact and again.figures.intact,
        )
        return Link(self.first, self.second, best)


@dataclass(frozen=True)
class Sight:
    """View of one node on `run.storage`: the visible files, or an error."""

    seen: frozenset[str] = frozenset()  # names of the nodes whose files it saw
    error: str = ""


def silent_finding(node: str, doing: str, limit_s: float) -> Finding:
    """Return the finding for a node that has not answered in time."""
    remedy = (
        "Look at the load of the machine and at Ray's logs there (/tmp/ray/session_latest/logs). If a run uses its "
        "GPUs or its memory, check the node again when the run has ended"
    )
    return Finding("error", "answer", f"{node} did not answer within {limit_s:g} s ({doing})", remedy)


def failed_finding(node: str, doing: str, error: str) -> Finding:
    """Return the finding for a node on which a check has failed."""
    remedy = "Fix the cause of the error, or remove the node from the cluster. -v shows Ray's own messages"
    return Finding("error", "answer", f"{node} could not be checked ({doing}): {error}", remedy)


def judge_versions(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """Compare the versions of packages on all nodes."""
    findings = []
    agreed = []
    for package, (level, why) in _MUST_AGREE.items():
        users = _users(package, nodes)
        if len(users) > 1:
            found = "; ".join(f"{version} on {', '.join(where)}" for version, where in users.items())
            what = f"{package} differs between nodes: {found}"
            findings.append(Finding(level, "versions", what, f"Install one {package} on all nodes: {why}", dict(users)))
        # A package that no node has, such as NCCL in a cluster without GPUs, is not listed as agreed.
        elif users and _NONE not in users:
            agreed.append(f"{package} {next(iter(users))}")
    findings += _judge_nccl(nodes)
    if not findings:
        findings.append(Finding("ok", "versions", f"{', '.join(agreed)}{_on_all(nodes)}"))
    return findings


def _users(package: str, nodes: Mapping[str, NodeFacts]) -> dict[str, list[str]]:
    """Return the nodes with each version of a package."""
    users: dict[str, list[str]] = {}
    for node, facts in nodes.items():
        version = facts.versions.get(package, _NONE)
        # A head that only coordinates may have a torch without CUDA, which is no difference between workers.
        if version == _NONE and package in _OF_GPUS and not facts.gpus:
            continue
        if package == "torch":
            version = version.partition("+")[0]  # the suffix only repeats CUDA's version, or says "cpu"
        users.setdefault(version, []).append(node)
    return users


def _judge_nccl(nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    findings = []
    versions = {facts.versions["NCCL"] for facts in nodes.values() if "NCCL" in facts.versions}
    for version in sorted(versions):
        # As texts, 2.9 would be newer than 2.28.
        numbers = tuple(map(int, version.split(".")))
        for fault in _NCCL_FAULTS:
            if fault.since <= numbers < fault.until:
                fixed = ".".join(map(str, fault.until))
                what = f"NCCL {version}: {fault.what}, so a worker may not survive the death of a peer"
                findings.append(Finding("warning", "versions", what, f"Install a torch with NCCL {fixed} or newer"))
    return findings


def judge_node(node: str, facts: NodeFacts) -> list[Finding]:
    """Judge the facts of one node.

    Return its problems, or one finding that sums up the node if there are no problems.
    """
    problems = [
        *_judge_gpu(node, facts.gpu_fault),
        *_judge_disks(node, facts.disks),
        *_judge_shared_memory(node, facts.shared_memory),
        *_judge_memory(node, facts.free_memory_bytes),
        *_judge_open_files(node, facts.num_open_files),
        *_judge_interfaces(node, facts),
    ]
    return problems or [Finding("ok", "node", f"{node}: {_summary(facts)}", figures=asdict(facts))]


def _summary(facts: NodeFacts) -> str:
    gpus = []
    for gpu in facts.gpus:
        # The driver reports no memory of a GPU that shares the host's memory.
        if gpu.total_bytes:
            gpus.append(f"{gpu.name} with {size(gpu.free_bytes)} of {size(gpu.total_bytes)} free")
        else:
            gpus.append(gpu.name)
    free = [f"memory {size(facts.free_memory_bytes)}"]
    free += [f"{space.path} {size(space.free_bytes)}" for space in (facts.shared_memory, *facts.disks)]
    return joined(
        [
            f"{plural(facts.num_cpus, 'CPU')}, {', '.join(gpus) or 'no GPU'}",
            f"free: {', '.join(free)}",
            f"{facts.num_open_files} open files",
            f"gloo, NCCL and copies use {_interface(facts)}",
        ]
    )


def _interface(facts: NodeFacts) -> str:
    # A dict keeps the order of the variables, and usually both libraries use one interface, which is then named once.
    chosen = dict.fromkeys(value.lstrip("=") for value in facts.variables.values())
    return f"{' and '.join(chosen) or 'the default route'} ({facts.own_address})"


def _error_if(fails: bool) -> Level:
    """Return "error" for a value that makes a run fail, else "warning"."""
    return "error" if fails else "warning"


def _judge_gpu(node: str, fault: str) -> list[Finding]:
    what, _, remedy = fault.partition(": ")[2].rpartition(". ")
    return [Finding("error", "GPU", f"{node}: {what}", remedy)] if fault else []


def _judge_disks(node: str, disks: Iterable[Space]) -> list[Finding]:
    findings = []
    for disk in disks:
        if not disk.total_bytes:  # a mounted bucket may have no size
            continue
        # Ray's limit is a share of the disk, so a large disk may be full for Ray with many GiB left.
        full = 1 - disk.free_bytes / disk.total_bytes > _FULL_DISK
        if disk.free_bytes >= _LITTLE_DISK and not full:
            continue
        level = _error_if(disk.free_bytes < _TOO_LITTLE_DISK)
        what = f"{node}: {size(disk.free_bytes)} of {size(disk.total_bytes)} is free at {disk.path}"
        remedy = (
            "Free space, keep fewer checkpoints (checkpoint.keep_last), or store them on another disk (run.storage)"
        )
        if full:
            remedy += "; Ray, whose files are in its temporary directory, writes nothing to a disk more than 95 % full"
        findings.append(Finding(level, "disk", what, remedy, asdict(disk)))
    return findings


def _judge_shared_memory(node: str, space: Space) -> list[Finding]:
    if not space.total_bytes:  # the file system was mounted without a limit (size=0)
        return []
    if space.free_bytes >= _LITTLE_SHARED_MEMORY:
        return []
    level = _error_if(space.free_bytes < _TOO_LITTLE_SHARED_MEMORY)
    what = f"{node}: {size(space.free_bytes)} of {size(space.total_bytes)} is free in {space.path}"
    remedy = (
        "Loader processes and Ray's object store need shared memory. In a container: --shm-size=8g; else: "
        f"mount -o remount,size=8G {space.path}; or train without loader processes (data.num_workers=0)"
    )
    return [Finding(level, "shared memory", what, remedy, asdict(space))]


def _judge_memory(node: str, num_bytes: int) -> list[Finding]:
    if num_bytes >= _LITTLE_MEMORY:
        return []
    what = f"{node}: {size(num_bytes)} of memory is free, and at most half of that may hold copies of the state"
    return [Finding("warning", "memory", what, "End other processes there, or use a larger machine")]


def _judge_open_files(node: str, limit: int) -> list[Finding]:
    if limit >= _FEW_OPEN_FILES:
        return []
    level = _error_if(limit < _TOO_FEW_OPEN_FILES)
    what = f"{node}: a process may have {limit} files and sockets open (ulimit -n)"
    remedy = "Run `ulimit -n 65536` before `ray start` there, or set it in /etc/security/limits.conf or by LimitNOFILE="
    return [Finding(level, "open files", what, remedy, {"limit": limit})]


def _judge_interfaces(node: str, facts: NodeFacts) -> list[Finding]:
    findings = []
    names = []
    listed = []
    for each in facts.interfaces:
        if each.is_up:
            names.append(each.name)
            listed.append(f"{each.name} ({each.address})")
    for variable, value in facts.variables.items():
        if not any(_selects(variable, value, name) for name in names):
            what = f"{node}: {variable}={value} names no interface that is up; there are: {', '.join(listed)}"
            remedy = f"Unset {variable}, or name one of these (in cluster.env or in the environment of the command)"
            findings.append(Finding("error", "interfaces", what, remedy))
    return findings + _judge_speed(node, facts)


def _selects(variable: str, value: str, name: str) -> bool:
    """Return whether the value of an interface variable allows an interface."""
    # NCCL takes a list of prefixes, after "^" of excluded prefixes, after "=" of full names. Gloo takes only prefixes.
    if variable.startswith("NCCL") and value.startswith("^"):
        return not name.startswith(tuple(value[1:].split(",")))
    if variable.startswith("NCCL") and value.startswith("="):
        return name in value[1:].split(",")
    return name.startswith(tuple(value.split(",")))


def _judge_speed(node: str, facts: NodeFacts) -> list[Finding]:
    own = _own_interface(facts)
    if own is None:
        return []
    best = own
    for each in facts.interfaces:
        if not each.is_up or each.mbit_per_s <= own.mbit_per_s or each.name.startswith(_WITHIN_MACHINE):
            continue
        # A user who has chosen one of the faster interfaces knows about them.
        if each.name == facts.variables.get("GLOO_SOCKET_IFNAME", ""):
            return []
        if each.mbit_per_s > best.mbit_per_s:
            best = each
    if best == own:
        return []
    what = f"{node}: {own.name} has {own.mbit_per_s} Mbit/s, and {best.name} has {best.mbit_per_s}"
    remedy = f"If {best.name} leads to other nodes, set GLOO_SOCKET_IFNAME={best.name} NCCL_SOCKET_IFNAME={best.name}"
    return [Finding("warning", "interfaces", what, remedy)]


def _own_interface(facts: NodeFacts) -> Interface | None:
    """Return the interface towards the head, None if its speed is unknown."""
    for each in facts.interfaces:
        if each.address == facts.own_address and each.mbit_per_s:
            return each
    return None


def judge_clocks(skews: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Judge the clock of each node.

    The reference is the clock of most nodes, or this machine's clock if most nodes do not agree.

    Args:
        skews: by node: seconds by which its clock is ahead of this machine's, and the largest error of that value.
    """
    findings = []
    largest_s = 0.0
    reference_s, of_whom = _reference(skews)
    for node, (ahead_of_this_s, error_s) in skews.items():
        ahead_s = ahead_of_this_s - reference_s
        # A busy node answers late. Only the part beyond the error of the reading is certainly the clock's.
        certain_s = abs(ahead_s) - error_s
        largest_s = max(largest_s, certain_s)
        if certain_s <= _SKEW_S:
            continue
        level = _error_if(certain_s >= _TOO_MUCH_SKEW_S)
        side = "ahead of" if ahead_s > 0 else "behind"
        what = f"{node}: its clock is {abs(ahead_s):.1f} s {side} {of_whom}"
        remedy = (
            "Synchronize the clock (chrony, or timedatectl set-ntp true): a wrong clock makes times of events "
            "misleading, and S3 refuses requests"
        )
        findings.append(Finding(level, "clocks", what, remedy, {"ahead_s": ahead_s, "error_s": error_s}))
    if findings:
        return findings
    # A reading is not as exact as a microsecond, so no smaller value than a millisecond is reported.
    return [Finding("ok", "clocks", f"within {max(0.001, largest_s):.3f} s of {of_whom}{_on_all(skews)}")]


def _reference(skews: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Return the reference clock, in seconds ahead of this machine's, and its name."""
    own = 0.0, "this machine's"
    if not skews:
        return own
    # If this machine's own clock is wrong, the clocks of all other nodes would be reported instead.
    all_ahead_s = [ahead_s for ahead_s, _ in skews.values()]
    # The low median is the reading of a node. A mean of two readings may be near no clock at all.
    middle_s = median_low(all_ahead_s)
    num_near = sum(abs(ahead_s - middle_s) <= _SKEW_S for ahead_s in all_ahead_s)
    # A single node is no majority over this machine: either clock may be the wrong one.
    if abs(middle_s) > _SKEW_S and num_near > len(all_ahead_s) / 2 and num_near > 1:
        return middle_s, "that of most nodes"
    return own


def judge_storage(location: str, sights: Mapping[str, Sight]) -> list[Finding]:
    """Judge whether all nodes share `run.storage` and can write there."""
    findings = []
    # Nodes with the same error are one finding, because a fault of a shared storage shows on all of them.
    errors: dict[str, list[str]] = {}
    writers = set()
    for node, sight in sights.items():
        if sight.error:
            errors.setdefault(sight.error, []).append(node)
        else:
            writers.add(node)
    for error, nodes in errors.items():
        what = f"{', '.join(nodes)} cannot write run.storage {location}: {error}"
        mend = f"Let the user of the workers write there (ls -ld {location})"
        if any(words in error for words in _NO_SPACE):
            mend = f"Free space there (df -h -i {location})"
        findings.append(Finding("error", "run directory", what, f"{mend}, or choose another run.storage"))
    # Only writers are compared: a node that could not write has left nothing to see, and its error says more.
    missing: dict[frozenset[str], list[str]] = {}
    for node in sorted(writers):
        missing.setdefault(frozenset(writers - sights[node].seen), []).append(node)
    for unseen, nodes in missing.items():
        if unseen:
            verb = "does" if len(nodes) == 1 else "do"
            wrote = ", ".join(sorted(unseen))
            what = f"{', '.join(nodes)} {verb} not see at run.storage {location} what {wrote} wrote there"
            remedy = (
                "Mount one folder on all nodes, for example at /mnt/shared, or set run.storage to a bucket or to a "
                "path that all nodes share"
            )
            findings.append(Finding("error", "run directory", what, remedy))
    if not findings:
        what = f"{location}: {', '.join(sights)} can write there and see each other's files"
        findings.append(Finding("ok", "run directory", what))
    return findings


def judge_links(links: Sequence[Link]) -> list[Finding]:
    """Judge the links of all pairs of nodes, relative to the best link."""
    findings = []
    slow = slow_links(links)
    shared = _shared_node(slow)
    for link in links:
        figures = link.figures
        if figures is None:
            what = f"{link.name} cannot reach each other: {link.error}"
            remedy = "Look for a firewall between them, or name the connecting interface: GLOO_SOCKET_IFNAME"
            findings.append(Finding("error", "links", what, remedy))
        elif not figures.intact:
            what = f"{link.name}: a message came back changed"
            remedy = "Do not train on both nodes: replace cable, interface or memory of one node, and check again"
            findings.append(Finding("error", "links", what, remedy))
        elif link in slow:
            findings.append(_slow_finding(link, figures, links, shared))
    if links and not findings:
        findings.append(_links_ok(links))
    return findings


def slow_links(links: Iterable[Link]) -> list[Link]:
    """Return links that are slow, or much slower than the best link."""
    measured = _measured(links)
    best_bytes_per_s = max((figures.bytes_per_s for _, figures in measured), default=0.0)
    best_latency_s = min((figures.latency_s for _, figures in measured), default=0.0)
    slow = []
    for link, figures in measured:
        # A share of the best link finds the outlier of a fast network. The fixed limits find a slow link between two
        # nodes, which have no other link to compare with, and ignore a latency that is many times the best but small.
        narrow = figures.bytes_per_s < max(_SLOW_BYTES_PER_S, _SLOW_SHARE * best_bytes_per_s)
        late = figures.latency_s > max(_SLOW_LATENCY_S, _SLOW_LATENCY_RATIO * best_latency_s)
        if narrow or late:
            slow.append(link)
    return slow


def _measured(links: Iterable[Link]) -> list[tuple[Link, LinkFigures]]:
    """Return the links whose nodes reach each other, with their figures."""
    return [(link, link.figures) for link in links if link.figures]


def _shared_node(links: Sequence[Link]) -> str:
    """Return the common node of several links, "" if there is none."""
    # A single link says nothing about which of its two nodes is slow.
    if len(links) < 2:
        return ""
    common = {links[0].first, links[0].second}
    for link in links[1:]:
        common &= {link.first, link.second}
    return next(iter(common), "")


def _slow_finding(link: Link, figures: LinkFigures, links: Sequence[Link], shared: str) -> Finding:
    middle = median(each.bytes_per_s for _, each in _measured(links))
    what = f"{link.name}: {_figures(figures)}; the median of {plural(len(links), 'pair')} is {size(middle)}/s"
    remedy = "Check the path between them (cable, switch, instance type) and the interface in use (GLOO_SOCKET_IFNAME)"
    if shared:
        remedy = f"All slow pairs include {shared}: check its interface and cable, or remove it from the cluster"
    return Finding("warning", "links", what, remedy, {"first": link.first, "second": link.second, **asdict(figures)})


def _figures(figures: LinkFigures) -> str:
    return f"{size(figures.bytes_per_s)}/s, latency {1e3 * figures.latency_s:.2f} ms"


def _links_ok(links: Sequence[Link]) -> Finding:
    measured = _measured(links)
    slowest, least = min(measured, key=lambda each: each[1].bytes_per_s)
    what = f"{plural(len(links), 'pair')} of nodes; the slowest is {slowest.name}: {_figures(least)}"
    figures = {link.name: asdict(of_link) for link, of_link in measured}
    return Finding("ok", "links", what, figures=figures)


def judge_collectives(seen: Mapping[str, Sequence[CollectiveFigures]], library: str) -> list[Finding]:
    """Judge the collectives of gloo or NCCL by the measurements of each rank."""
    findings = []
    for of_one in zip(*seen.values(), strict=True):
        name = of_one[0].name
        is_right = True
        for rank, figures in zip(seen, of_one, strict=True):
            if figures.wrong:
                is_right = False
                what = f"{name} gives {rank} a wrong result: {figures.wrong}"
                remedy = "Do not train here: a wrong result silently ruins the model. Check the nodes one by one"
                findings.append(Finding("error", "collectives", what, remedy))
        if is_right:
            findings.append(_timed(f"{name} over {library}", of_one, len(seen)))
    return findings


def _timed(name: str, of_ranks: Sequence[CollectiveFigures], num_ranks: int) -> Finding:
    figures = {}
    times = []
    for num_bytes in of_ranks[0].seconds:
        # A collective ends when its slowest rank has finished.
        passed_s = max(each.seconds[num_bytes] for each in of_ranks)
        times.append(f"{size(num_bytes)} in {1e3 * passed_s:.2f} ms")
        # Keys of a JSON object are texts.
        figures[str(num_bytes)] = passed_s
    what = f"{name} is right on {plural(num_ranks, 'rank')}: {', '.join(times)}"
    return Finding("ok", "collectives", what, figures=figures)


def _on_all(nodes: Mapping[str, object]) -> str:
    return f", on all {len(nodes)} nodes" if len(nodes) > 1 else ""
