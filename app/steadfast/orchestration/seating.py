"""Choose the ranks of a world's members. The module is pure."""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain


def seat(
    members: Sequence[str], ranks: Mapping[str, int], nodes: Mapping[str, str], replica_size: int, num_replicas: int
) -> list[str]:
    """Return the members of the next world, in the order of ranks.

    The result has `num_replicas` times `replica_size` members. A survivor keeps its place within a replica, because it
    holds that part of the model. A replica lies within one node where possible.

    Args:
        members: the candidates; earlier ones are preferred.
        ranks: member of the former world -> its rank there.
        nodes: member -> its node.
        replica_size: members of a replica.
    """
    replicas = _survivors(members, ranks, replica_size)[:num_replicas]
    while len(replicas) < num_replicas:
        replicas.append([""] * replica_size)
    seated = set(chain.from_iterable(replicas))
    parts = {member: rank % replica_size for member, rank in ranks.items()}
    free = _Free([member for member in members if member not in seated], nodes, parts)
    for replica in replicas:
        for part in range(replica_size):
            if not replica[part]:
                near = {nodes[member] for member in replica if member}
                replica[part] = free.take(part, near or {free.roomiest(replica_size)})
    return list(chain.from_iterable(_by_node(replicas, nodes)))


def _survivors(members: Sequence[str], ranks: Mapping[str, int], replica_size: int) -> list[list[str]]:
    """Return the survivors of each former replica, the fullest replica first.

    Each survivor is at its place in the replica. A lost member's place holds "".
    """
    replicas: dict[int, list[str]] = {}
    for member in sorted(ranks.keys() & set(members), key=ranks.__getitem__):
        number, part = divmod(ranks[member], replica_size)
        replicas.setdefault(number, [""] * replica_size)[part] = member
    return sorted(replicas.values(), key=lambda replica: replica.count(""))


class _Free:
    """Members without a place, in the order of preference.

    Args:
        parts: survivor -> the part of the model that the survivor holds.
    """

    def __init__(self, members: Sequence[str], nodes: Mapping[str, str], parts: Mapping[str, int]) -> None:
        self._nodes = nodes
        self._order = {member: number for number, member in enumerate(members)}  # loses a member that gets a place
        self._on_node = Counter(nodes[member] for member in members)
        # Queues by node and part, where None stands for any. Each member is in four queues, and leaves a queue when it
        # has a place and comes to the queue's head.
        self._queues: defaultdict[tuple[str | None, int | None], deque[str]] = defaultdict(deque)
        for member in members:
            for node in (nodes[member], None):
                self._queues[node, None].append(member)
                if member in parts:
                    self._queues[node, parts[member]].append(member)
        self._beginners = deque(members)  # members that may have room on their node for a whole replica

    def roomiest(self, replica_size: int) -> str:
        """Return the node on which to begin a new replica.

        It is the node of the first member whose node has room for a whole replica. If there is none, it is the node of
        the first member.
        """
        while self._beginners:
            member = self._beginners[0]
            if member in self._order and self._on_node[self._nodes[member]] >= replica_size:
                return self._nodes[member]
            self._beginners.popleft()  # a node never gets room again
        return self._nodes[self._first([None], None)]

    def take(self, part: int, near: Iterable[str]) -> str:
        """Take the best member for a place.

        Args:
            part: the part of the model that the place holds.
            near: nodes of the members that the replica has already.
        """
        # Another node counts first, because it slows every step. A missing part of the model counts second, because the
        # part is sent only once.
        member = self._first(near, part) or self._first(near, None) or self._first([None], part)
        member = member or self._first([None], None)
        del self._order[member]
        self._on_node[self._nodes[member]] -= 1
        return member

    def _first(self, nodes: Iterable[str | None], part: int | None) -> str:
        """Return the most preferred member on some nodes, "" if there is none."""
        heads: list[str] = []
        for node in nodes:
            queue = self._queues.get((node, part), deque[str]())
            while queue and queue[0] not in self._order:
                queue.popleft()
            heads += itertools.islice(queue, 1)
        return min(heads, key=self._order.__getitem__, default="")


def _by_node(replicas: Sequence[list[str]], nodes: Mapping[str, str]) -> list[list[str]]:
    # Neighbouring ranks exchange the most data, which is fastest within one machine. So replicas on the same node get
    # neighbouring ranks. The first replica stays first.
    first_on: dict[str, list[list[str]]] = {}
    for replica in replicas:
        first_on.setdefault(nodes[replica[0]], []).append(replica)
    return list(chain.from_iterable(first_on.values()))
