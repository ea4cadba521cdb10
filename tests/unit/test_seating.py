"""Who sits where: whole replicas, each where it was and on one node, as far as that goes."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.config.axes import Layout, layout_of_most
from steadfast.orchestration.membership import Form, Keep, Membership, Resize, Short, Wait
from steadfast.orchestration.seating import seat


@pytest.mark.parametrize(
    ("members", "world", "replica_size", "num_replicas", "expected"),
    [
        # A letter is a node. By node, and the first stays the first.
        ("a1 b1 a2 b2", "", 1, 4, "a1 a2 b1 b2"),
        ("a1 b1 a2 b2", "", 2, 2, "a1 a2 b1 b2"),
        ("a1 b1 b2", "", 2, 1, "b1 b2"),  # within one node, where there is one with room
        ("a1 b1 c1", "", 2, 1, "a1 b1"),
        # Replicas that are whole stay as they are; one that has lost a member waits.
        ("a1 b1 b2", "a1 a2 b1 b2", 2, 1, "b1 b2"),
        ("a1 a2 b2", "a1 a2 b1 b2", 2, 1, "a1 a2"),
        # A newcomer takes the place that is free, on the node where it is.
        ("a1 a2 b2 b3", "a1 a2 b1 b2", 2, 2, "a1 a2 b3 b2"),
        ("a1 b1 b2 a3", "a1 a2 b1 b2", 2, 2, "b1 b2 a1 a3"),
        ("a1 b1 b2 a3 b3 c1", "a1 a2 b1 b2", 2, 3, "b1 b2 b3 c1 a1 a3"),
        # Of two half replicas one is made, each member at its own place.
        ("a1 b2", "a1 a2 b1 b2", 2, 1, "a1 b2"),
        ("a2 b1", "a1 a2 b1 b2", 2, 1, "b1 a2"),
        ("a2 b2 c1", "a1 a2 b1 b2 c1 c2", 2, 1, "c1 a2"),  # not b2, which holds what a2 does
        # All of a node's go: what is left is seated anew.
        ("b1 b2 c1 c2", "a1 a2 b1 b2", 2, 2, "b1 b2 c1 c2"),
    ],
)
def test_who_sits_where(members: str, world: str, replica_size: int, num_replicas: int, expected: str) -> None:
    ranks = {member: rank for rank, member in enumerate(world.split()) if member in members.split()}
    nodes = {member: member[0] for member in members.split()}
    assert " ".join(seat(members.split(), ranks, nodes, replica_size, num_replicas)) == expected


FOUND = st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=12)


@given(FOUND, st.integers(1, 4), st.data())
def test_every_seat_has_one_member_and_nobody_has_two(
    found: list[tuple[str, bool]], replica_size: int, data: st.DataObject
) -> None:
    members = [f"{node}{number}" for number, (node, _) in enumerate(found)]
    world = data.draw(st.permutations([member for member, (_, was_in) in zip(members, found, strict=True) if was_in]))
    ranks = {member: rank for rank, member in enumerate(world)}
    num_replicas = len(members) // replica_size
    seated = seat(members, ranks, {member: member[0] for member in members}, replica_size, num_replicas)
    assert len(set(seated)) == len(seated) == num_replicas * replica_size
    assert set(seated) <= set(members)
    whole = [
        tuple(world[first : first + replica_size]) for first in range(0, len(world) - replica_size + 1, replica_size)
    ]
    now = [tuple(seated[first : first + replica_size]) for first in range(0, len(seated), replica_size)]
    assert set(whole) <= set(now)


def membership_of(largest: int, expected: int, sizes: tuple[int, ...]) -> Membership:
    layout = partial(layout_of_most, replicas=[Layout(1, shard=size) for size in sizes])
    return Membership(1, largest, expected, settle_s=5.0, gather_s=1.0, layout=layout)


def replicas(*members: str, sizes: tuple[int, ...] = (2,)) -> Membership:
    """Members on node a, who have formed a world of replicas of one of these sizes."""
    membership = membership_of(8, len(members), sizes)
    for member in members:
        membership.join(member, 0.0, "a")
    assert membership.decide(0.0) == Form(members)
    return membership


def test_bounds_are_drawn_in_to_whole_replicas_and_one_member_alone_is_short_of_one() -> None:
    membership = membership_of(7, 5, sizes=(2,))
    assert (membership.smallest, membership.largest, membership.expected) == (2, 6, 4)
    membership.join("x", 0.0, "a")
    assert membership.decide(0.0) == Short(1)
    membership.rescale(3, 5)
    assert (membership.smallest, membership.largest) == (4, 4)


def test_a_lost_member_costs_its_replica_and_the_other_waits_for_a_third() -> None:
    membership = replicas("w", "x", "y", "z")
    membership.lose("w")
    for member in ("x", "y", "z"):
        membership.join(member, 10.0, "a")
    assert membership.decide(10.0) == Form(("y", "z"))
    assert membership.decide(20.0) == Keep()
    assert membership.left_over == 1
    membership.join("v", 20.0, "a")
    assert membership.decide(20.5) == Wait(0.5)
    assert membership.decide(21.0) == Resize()
    assert membership.left_over == 0
    for member in ("y", "z"):
        membership.join(member, 22.0, "a")
    assert membership.decide(22.0) == Form(("y", "z", "x", "v"))
    for member in "yzx":
        membership.lose(member)
    membership.join("v", 30.0, "a")
    assert membership.close() == ["v"], "less than a replica is let go when the run stops"


def test_one_holder_of_each_part_is_in_a_world_of_another_layout() -> None:
    membership = replicas(*"abcdefgh", sizes=(4, 6))
    membership.lose("d")  # only h holds the part of d
    for member in "abcefgh":
        membership.join(member, 1.0, "a")
    assert sorted(membership.decide(1.0).members) == list("abcefh")
