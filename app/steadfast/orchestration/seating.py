"""Choose the ranks of a world's members. The module is pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
    free = [member for member in members if member not in seated]
    parts = {member: rank % replica_size for member, rank in ranks.items()}
    for replica in replicas:
        for part in range(replica_size):
            if not replica[part]:
                near = {nodes[member] for member in replica if member}
                if not near:
                    near.add(_roomiest(free, nodes, replica_size))
                # Of equally good members `min` takes the first one, which is preferred.
                replica[part] = min(free, key=lambda member: _distance(member, part, near, parts, nodes))
                free.remove(replica[part])
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


def _roomiest(free: Sequence[str], nodes: Mapping[str, str], replica_size: int) -> str:
    """Return the node on which to begin a new replica.

    It is the node of the first member whose node has room for a whole replica. If there is none, it is the node of the
    first member.
    """
    on_node = Counter(nodes[member] for member in free)
    for member in free:
        if on_node[nodes[member]] >= replica_size:
            return nodes[member]
    return nodes[free[0]]


def _distance(
    member: str, part: int, near: set[str], parts: Mapping[str, int], nodes: Mapping[str, str]
) -> tuple[bool, bool]:
    """Return a sort key, which is smallest for the best member for a place.

    Args:
        part: the part of the model that the place holds.
        near: nodes of the members that the replica has already.
        parts: survivor -> the part of the model that the survivor holds.
    """
    # Another node counts first, because it slows every step. A missing part of the model counts second, because the
    # part is sent only once.
    return nodes[member] not in near, parts.get(member) != part


def _by_node(replicas: Sequence[list[str]], nodes: Mapping[str, str]) -> list[list[str]]:
    # Neighbouring ranks exchange the most data, which is fastest within one machine. So replicas on the same node get
    # neighbouring ranks. The first replica stays first.
    first_on: dict[str, list[list[str]]] = {}
    for replica in replicas:
        first_on.setdefault(nodes[replica[0]], []).append(replica)
    return list(chain.from_iterable(first_on.values()))
