"""Schedule of node pairs, in rounds of disjoint pairs."""

from collections.abc import Iterator, Sequence


def rounds(nodes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield rounds of node pairs by the circle method.

    A round contains a node at most once, and each pair is in exactly one round.
    """
    circle = [*nodes, *([""] * (len(nodes) % 2))]  # a node paired with the empty name has a break
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(first, second) for first, second in opposite if first and second]
        # The first node stays, and all others move on by one place.
        circle = [circle[0], circle[-1], *circle[1:-1]]
