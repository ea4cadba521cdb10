"""Choose the ranks of a world's members. The module is pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain


def seat(
    members: Sequence[str], ranks: Mapping[str, int], nodes: Mapping[str, str], unit: int, num_replicas: int
) -> list[str]:
    """Return the members of the next world, in the order of ranks.

    The result has `num_replicas` times `unit` members. A survivor keeps its place within a replica, because it holds
    that part of the model. A replica lies within one node where possible.

    Args:
        members: the candidates; earlier ones are preferred.
        ranks: member of the former world -> its rank there.
        nodes: member -> its node.
        unit: members of a replica.
    """
    replicas = _survivors(members, ranks, unit)[:num_replicas]
    seated = set(chain.from_iterable(replicas))
    free = [member for member in members if member not in seated]
    replicas += [[""] * unit for _ in range(num_replicas - len(replicas))]
    for replica in replicas:
        for part in range(unit):
            if not replica[part]:
                near = {nodes[member] for member in replica if member} or {_roomiest(free, nodes, unit)}
                replica[part] = min(free, key=lambda member: _distance(member, part, near, ranks, nodes, unit))
                free.remove(replica[part])
    return list(chain.from_iterable(_by_node(replicas, nodes)))


def _survivors(members: Sequence[str], ranks: Mapping[str, int], unit: int) -> list[list[str]]:
    """Return the survivors of each former replica, the fullest replica first.

    Each survivor is at its place in the replica. A lost member's place holds "".
    """
    replicas: dict[int, list[str]] = {}
    for member in sorted((each for each in members if each in ranks), key=ranks.__getitem__):
        number, part = divmod(ranks[member], unit)
        replicas.setdefault(number, [""] * unit)[part] = member
    return sorted(replicas.values(), key=lambda replica: replica.count(""))


def _roomiest(free: Sequence[str], nodes: Mapping[str, str], unit: int) -> str:
    """Return the node on which to begin a new replica.

    It is the node of the first member whose node has room for a whole replica. If there is none, it is the node of the
    first member.
    """
    on_node = Counter(nodes[member] for member in free)
    return next((nodes[member] for member in free if on_node[nodes[member]] >= unit), nodes[free[0]])


def _distance(
    member: str, part: int, near: set[str], ranks: Mapping[str, int], nodes: Mapping[str, str], unit: int
) -> tuple[bool, bool]:
    """Return a sort key, which is smallest for the best member for a place.

    Another node counts first, because it slows every step. A missing part of the model counts second, because the part
    is sent only once.
    """
    return nodes[member] not in near, member not in ranks or ranks[member] % unit != part


def _by_node(replicas: Sequence[list[str]], nodes: Mapping[str, str]) -> list[list[str]]:
    # Neighbouring ranks exchange the most data, which is fastest within one machine. So replicas on the same node get
    # neighbouring ranks. The first replica stays first.
    first_on: dict[str, list[list[str]]] = {}
    for replica in replicas:
        first_on.setdefault(nodes[replica[0]], []).append(replica)
    return list(chain.from_iterable(first_on.values()))
