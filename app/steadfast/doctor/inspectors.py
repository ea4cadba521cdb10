"""Check a cluster's nodes before a run, by an actor on each.

Each call of an actor has a time limit, so that a node that hangs becomes a finding.
"""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from steadfast.doctor.facts import NodeFacts, gather_facts
from steadfast.doctor.findings import (
    Finding,
    Link,
    Sight,
    failed_finding,
    judge_clocks,
    judge_collectives,
    judge_links,
    judge_node,
    judge_storage,
    judge_versions,
    silent_finding,
    slow_links,
)
from steadfast.doctor.marks import Marks
from steadfast.doctor.network import (
    CollectiveFigures,
    LinkFigures,
    RankHost,
    measure_collectives,
    measure_link,
    sizes_for,
)
from steadfast.doctor.rounds import rounds
from steadfast.errors import GpuUnusable
from steadfast.orchestration.trainer import head_host
from steadfast.run.directory import RunDirectory
from steadfast.storage import Store
from steadfast.world.device import assigned_device, started
from steadfast.world.groups import PeerLost, recover_in_process, serve_store

_START_S = 120.0  # time for an actor to start its process, and to import this program and torch
_ANSWER_S = 30.0
# Longer than the time-outs of the measurement, so that both nodes can report the error.
_LINK_S = 60.0
_COLLECTIVES_S = 120.0
_NUM_CLOCK_READINGS = 5
_NUM_DOUBTS = 3  # repeated measurements of a slow link
_DOUBTS_S = 60.0  # time for the repeated measurements of all slow links
_LOCAL_SPEED = 1e9  # bytes per second within one node
_NEVER_RAN = "The actor never ran"  # Ray ends its error about an actor with this line, after the reason


class Peer(NamedTuple):
    """Address of a node's store, and the node's kind of device."""

    host: str
    port: int
    device: str


class Inspector:
    """Ray actor that examines its node.

    Ray starts its process in the same way as a worker's process.
    """

    def __init__(self, name: str, head: str, store: Store, shares_gpu: bool) -> None:
        recover_in_process()
        self._name = name
        self._head = head
        self._store = store
        self._device = assigned_device(ray.get_gpu_ids())
        self._gpu_fault = ""
        try:
            started(self._device)
        except GpuUnusable as error:
            self._gpu_fault = str(error)
        if self._gpu_fault or shares_gpu:  # two ranks of NCCL need two GPUs
            self._device = torch.device("cpu")
        self._served: dist.TCPStore | None = None

    def facts(self) -> NodeFacts:
        return replace(gather_facts(self._head, self._store.uri, self._device), gpu_fault=self._gpu_fault)

    def clock_s(self) -> float:
        return time.time()

    def leave_mark(self, marks: Marks) -> str:
        return marks.leave(self._name)

    def seen_marks(self, marks: Marks, awaited: set[str]) -> set[str]:
        return marks.wait_for(awaited)

    def remove_marks(self, marks: Marks) -> None:
        marks.remove()

    def serve(self, host: str) -> int:
        """Serve a store at an address of this node. Return the store's port."""
        self._served = serve_store(host)
        return int(self._served.port)

    def link(self, place: RankHost, device: str) -> LinkFigures | str | None:
        """Measure a link. Return its figures or the error."""
        try:
            return measure_link(place, self._device_for(device))
        except (PeerLost, RuntimeError) as error:
            return _short(error)

    def collectives(self, place: RankHost, device: str, sizes_bytes: tuple[int, ...]) -> list[CollectiveFigures] | str:
        """Run all collectives. Return their figures or the error."""
        try:
            return measure_collectives(place, self._device_for(device), sizes_bytes)
        except (PeerLost, RuntimeError) as error:
            return _short(error)

    def _device_for(self, kind: str) -> torch.device:
        # The assigned device has an index. A node with a GPU measures on its CPU if another node has no GPU.
        return self._device if self._device.type == kind else torch.device(kind)


class Inspectors:
    """The inspectors that still answer, by the names of their nodes.

    Args:
        start: for each node, a function that starts an inspector there.
    """

    def __init__(self, start: Mapping[str, Callable[[], Any]]) -> None:
        self._start = start
        self._actors = {name: start_one() for name, start_one in start.items()}
        self.findings: list[Finding] = []  # findings about inspectors that do not answer

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    def start_again(self) -> None:
        """Wait until all inspectors run. Restart inspectors that have ended once."""
        # On a busy machine Ray gives up a process that starts slowly. That is no fault of the node.
        questions = {actor.clock_s.remote(): name for name, actor in self._actors.items()}
        started, silent = ray.wait(list(questions), num_returns=len(questions), timeout=_START_S)
        for question in silent:
            self._dismiss(questions[question], silent_finding(questions[question], "start", _START_S))
        for question in started:
            try:
                ray.get(question)
            except RayError:
                name = questions[question]
                self._actors[name] = self._start[name]()

    def ask(self, doing: str, limit_s: float, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of all inspectors with the same arguments.

        Args and result are those of `ask_each`.
        """
        return self.ask_each(doing, limit_s, method, dict.fromkeys(self._actors, arguments))

    def ask_each(self, doing: str, limit_s: float, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a method of some inspectors at the same time.

        Return the answers that arrived within the limit, by node. An inspector without an answer becomes a finding and
        is dismissed.

        Args:
            doing: the call in words for the finding, such as "measure a link".
            arguments: for each node, the arguments of the call.
        """
        asked = {name: getattr(self._actors[name], method).remote(**own) for name, own in arguments.items()}
        # The limit is for all calls together: they run at the same time, and one hanging node would otherwise delay the
        # check by the limit once more for each node after it.
        until_s = time.monotonic() + limit_s
        answers = {}
        for name, question in asked.items():
            try:
                answers[name] = ray.get(question, timeout=max(0.0, until_s - time.monotonic()))
            except GetTimeoutError:
                self._dismiss(name, silent_finding(name, doing, limit_s))
            except RayError as error:
                self._dismiss(name, failed_finding(name, doing, _short(error)))
        return answers

    def _dismiss(self, name: str, finding: Finding) -> None:
        # A node is reported once. Every further check would wait for an inspector that hangs, and report it again.
        self.findings.append(finding)
        ray.kill(self._actors.pop(name))

    def news(self) -> list[Finding]:
        """Return the findings about silent nodes since the last call."""
        found, self.findings = self.findings, []
        return found

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def check_nodes(storage: str, on_gpus: bool) -> Iterator[Finding]:
    """Check all nodes of the joined cluster, and yield findings.

    Args:
        storage: the value of `run.storage`.
        on_gpus: whether workers would train on GPUs.
    """
    store = RunDirectory.at(storage).store
    inspectors = _start(store, on_gpus)
    try:
        inspectors.start_again()
        facts = inspectors.ask("look at itself", _START_S, "facts")
        yield from inspectors.news()
        # If no node answers, there is nothing to judge, and the silent nodes are findings already.
        if not facts:
            return
        yield from judge_versions(_of_nodes(facts))
        for node, own in _of_nodes(facts).items():
            yield from judge_node(node, own)
        yield from judge_clocks(_of_nodes(_skews(inspectors)))
        yield from judge_storage(store.uri, _sights(store, inspectors))
        yield from inspectors.news()
        yield from _check_network(inspectors, facts)
        yield from inspectors.news()
    finally:
        inspectors.close()


def _check_network(inspectors: Inspectors, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    arguments = {name: {"host": facts[name].own_address} for name in inspectors.names}
    ports = inspectors.ask_each("serve a store", _ANSWER_S, "serve", arguments)
    peers = {name: Peer(facts[name].own_address, port, facts[name].device) for name, port in ports.items()}
    numbers = count(1)
    links = []
    if len(_of_nodes(peers)) > 1:
        for pairs in rounds(list(peers)):
            links += _measure_pairs(inspectors, pairs, peers, numbers)
        links = _doubted(inspectors, links, peers, numbers)
        yield from judge_links(links)
    if all(link.figures for link in links):
        yield from _check_collectives(inspectors, peers, numbers, links)


def _measure_pairs(
    inspectors: Inspectors, pairs: list[tuple[str, str]], peers: Mapping[str, Peer], numbers: Iterator[int]
) -> list[Link]:
    """Measure the links of disjoint pairs of nodes at the same time."""
    alive = set(inspectors.names)
    asked = []
    # All pairs use one kind of device: gloo between some nodes would look slow beside NCCL between other nodes.
    device = common_device(peers.values())
    arguments: dict[str, Any] = {}
    for pair in pairs:
        # A node that did not answer an earlier call has a finding already.
        if not alive.issuperset(pair):
            continue
        asked.append(pair)
        host, port, _ = peers[pair[0]]
        # The store of a node serves several worlds in turn. Keys of an earlier world would mislead the next one.
        number = next(numbers)
        for rank, name in enumerate(pair):
            arguments[name] = {"place": RankHost(host, port, number, rank, 2), "device": device}
    answers = inspectors.ask_each("measure a link", _LINK_S, "link", arguments)
    return [_link(pair, answers) for pair in asked]


def _doubted(
    inspectors: Inspectors, links: list[Link], peers: Mapping[str, Peer], numbers: Iterator[int]
) -> list[Link]:
    """Measure slow links again, one at a time.

    Return all links, with the better figures of each.
    """
    # A process that had to wait for a core makes a link look slow, but hardly in each measurement. The total time is
    # limited, because a slow node makes all of its links slow.
    until_s = time.monotonic() + _DOUBTS_S
    for _ in range(_NUM_DOUBTS):
        measured = {}
        for link in slow_links(links):
            if time.monotonic() > until_s:
                break
            for again in _measure_pairs(inspectors, [(link.first, link.second)], peers, numbers):
                measured[link.name] = link.or_better(again)
        links = [measured.get(link.name, link) for link in links]
    return links


def _link(pair: tuple[str, str], answers: Mapping[str, LinkFigures | str | None]) -> Link:
    first, second = pair
    for name in pair:
        answer = answers.get(name)
        if isinstance(answer, str):
            return Link(first, second, None, answer)
    # Only rank 0, the first node, measures. The second one sends back what it receives, and answers None.
    measured = answers.get(first)
    if isinstance(measured, LinkFigures):
        return Link(first, second, measured)
    return Link(first, second, None, f"no answer within {_LINK_S:g} s")


def _check_collectives(
    inspectors: Inspectors, peers: Mapping[str, Peer], numbers: Iterator[int], links: list[Link]
) -> Iterator[Finding]:
    ranks = training_peers({name: peers[name] for name in inspectors.names})
    device = common_device([peers[name] for name in ranks])
    # A world within one node has no link that was measured, and its speed allows the largest messages.
    slowest = min([_LOCAL_SPEED, *(link.figures.bytes_per_s for link in links if link.figures)])
    number = next(numbers)
    arguments = {}
    for rank, name in enumerate(ranks):
        place = RankHost(peers[ranks[0]].host, peers[ranks[0]].port, number, rank, len(ranks))
        arguments[name] = {"place": place, "device": device, "sizes_bytes": sizes_for(slowest)}
    answers = inspectors.ask_each("run collectives", _COLLECTIVES_S, "collectives", arguments)
    seen = {}
    for name, answer in answers.items():
        if isinstance(answer, str):
            yield failed_finding(name, "run collectives", answer)
        else:
            seen[name] = answer
    yield from judge_collectives(seen, "NCCL" if device == "cuda" else "gloo")


def common_device(peers: Iterable[Peer]) -> str:
    """Return "cuda" if all peers have a GPU, otherwise "cpu"."""
    if all(peer.device == "cuda" for peer in peers):
        return "cuda"
    return "cpu"


def training_peers(peers: Mapping[str, Peer]) -> list[str]:
    """Return the names of the peers that would train together.

    These are the peers with GPUs, or all peers if no peer has a GPU.
    """
    # A head without a GPU only coordinates. With the head among the ranks, only gloo could be checked.
    return [name for name, peer in peers.items() if peer.device == "cuda"] or list(peers)


def _skews(inspectors: Inspectors) -> dict[str, tuple[float, float]]:
    skews = {}
    # One node at a time: if all were asked together, the slowest one would add its delay to the error of each node.
    for name in inspectors.names:
        readings = []
        for _ in range(_NUM_CLOCK_READINGS):
            asked_s = time.time()
            answer = inspectors.ask_each("tell its time", _ANSWER_S, "clock_s", {name: {}})
            if not answer:
                break
            readings.append(skew(asked_s, answer[name], time.time()))
        # The reading with the shortest way there and back has the smallest error.
        if readings:
            skews[name] = min(readings, key=lambda reading: reading[1])
    return skews


def skew(asked_s: float, told_s: float, answered_s: float) -> tuple[float, float]:
    """Return the lead of another clock and its largest error, in seconds.

    Args:
        asked_s: time of the question by this clock.
        told_s: time by the other clock.
        answered_s: time of the answer by this clock.
    """
    return told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2


def _sights(store: Store, inspectors: Inspectors) -> dict[str, Sight]:
    """Check that nodes and command see the same files in run.storage."""
    marks = Marks(store, f".doctor-{uuid.uuid4().hex[:8]}")
    here = "this command"
    errors = {here: marks.leave(here)}
    errors |= _of_nodes(inspectors.ask("write to run.storage", _ANSWER_S, "leave_mark", marks=marks))
    # The folder would never show the file of a node that could not write one.
    awaited = {name for name, error in errors.items() if not error}
    seen = inspectors.ask("read run.storage", _ANSWER_S, "seen_marks", marks=marks, awaited=awaited)
    seen[here] = marks.seen()
    # Each node cleans up, because without a shared storage each node has a folder of its own.
    inspectors.ask("clean up run.storage", _ANSWER_S, "remove_marks", marks=marks)
    marks.remove()
    return {name: Sight(frozenset(seen.get(name, ())), error) for name, error in errors.items()}


@dataclass(frozen=True)
class _Node:
    name: str
    id: str
    gpus: float


def _start(store: Store, on_gpus: bool) -> Inspectors:
    """Start an inspector on each node, and two on a single node."""
    nodes = _alive()
    if len(nodes) == 1:  # a collective needs two ranks
        both = replace(nodes[0], gpus=nodes[0].gpus / 2)
        nodes = [both, replace(both, name=f"{both.name}{_SECOND}")]
    head = head_host()
    start = {}
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node.id, soft=False)
        num_gpus = min(1.0, node.gpus) if on_gpus else 0
        # An inspector takes no CPU, because Ray would not start it on a node whose CPUs a run has taken.
        actor = ray.remote(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=here)(Inspector)
        start[node.name] = partial(actor.remote, node.name, head, store, 0 < num_gpus < 1)
    return Inspectors(start)


_SECOND = " (second process)"


def _of_nodes(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of nodes, without entries of second processes."""
    return {name: each for name, each in found.items() if not name.endswith(_SECOND)}


def _alive() -> list[_Node]:
    """Return the live nodes of the cluster, with names.

    A node is named by its host. If several nodes share a host, their names end with a part of their ids.
    """
    # Ray keeps listing nodes that have left the cluster.
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=_host)
    num_on = Counter(map(_host, nodes))
    found = []
    for node in nodes:
        name, identity = _host(node), node["NodeID"]
        # Several raylets on one machine are nodes with one hostname, as in tests.
        if num_on[name] > 1:
            name = f"{name}-{identity[:6]}"
        found.append(_Node(name, identity, int(node["Resources"].get("GPU", 0))))
    return found


def _host(node: Mapping[str, Any]) -> str:
    return str(node["NodeManagerHostname"])


def _short(error: BaseException) -> str:
    """Return the last informative line of an error's text."""
    # Ray's errors begin with general sentences and the actor's ids. The reason comes last.
    for line in reversed(str(error).strip().splitlines()):
        if not line.startswith(_NEVER_RAN):
            return line
    return type(error).__name__
