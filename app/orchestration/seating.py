"""Seat members as whole replicas. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain


def seat(
    members: Sequence[str], ranks: Mapping[str, int], nodes: Mapping[str, str], unit: int, num_replicas: int
) -> list[str]:
    """Return who sits where: `num_replicas` times `unit` of the members, in the order of their ranks.

    Args:
        members: those to choose from, the first ones first.
        ranks: in the world before, of those who were in it. They stay with what they hold of the model.
        nodes: of each member. A replica is within one where it can be.
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
    """Return who is left of each replica of the world before, at their places; the fullest first."""
    replicas: dict[int, list[str]] = {}
    for member in sorted((each for each in members if each in ranks), key=ranks.__getitem__):
        number, part = divmod(ranks[member], unit)
        replicas.setdefault(number, [""] * unit)[part] = member
    return sorted(replicas.values(), key=lambda replica: replica.count(""))


def _roomiest(free: Sequence[str], nodes: Mapping[str, str], unit: int) -> str:
    """Return the node of the first member whose node has a whole replica, or of the first one if there is none."""
    on_node = Counter(nodes[member] for member in free)
    return next((nodes[member] for member in free if on_node[nodes[member]] >= unit), nodes[free[0]])


def _distance(
    member: str, part: int, near: set[str], ranks: Mapping[str, int], nodes: Mapping[str, str], unit: int
) -> tuple[bool, bool]:
    """Return what counts against a member for a seat: another node for good; what it has to be sent, but once."""
    return nodes[member] not in near, member not in ranks or ranks[member] % unit != part


def _by_node(replicas: Sequence[list[str]], nodes: Mapping[str, str]) -> list[list[str]]:
    # Neighbours in rank exchange the most, and fastest within one machine. The first replica stays the first.
    first_on: dict[str, list[list[str]]] = {}
    for replica in replicas:
        first_on.setdefault(nodes[replica[0]], []).append(replica)
    return list(chain.from_iterable(first_on.values()))
