"""Who is in the next world, as a table of what happened and what is decided then."""

from __future__ import annotations

import pytest

from steadfast.orchestration.membership import Form, Keep, Membership, Resize, Short, Wait


def membership(smallest: int = 1, largest: int = 8, expected: int = 3) -> Membership:
    return Membership(smallest, largest, expected, settle_s=5.0, gather_s=1.0)


def formed(*members: str, largest: int = 8) -> Membership:
    world = membership(expected=len(members), largest=largest)
    for member in members:
        world.join(member, 0.0)
    assert world.decide(0.0) == Form(members)
    return world


def test_the_first_world_waits_for_those_who_are_expected_but_not_for_ever() -> None:
    world = membership()
    world.join("a", 10.0)
    assert world.decide(10.0) == Wait(5.0)
    world.join("b", 11.0)
    assert world.decide(12.0) == Wait(3.0)
    assert world.decide(15.0) == Form(("a", "b"))


def test_all_who_are_expected_need_not_wait() -> None:
    assert formed("a", "b", "c").world == ("a", "b", "c")


def test_no_world_is_smaller_than_the_smallest() -> None:
    world = membership(smallest=2)
    world.join("a", 0.0)
    assert world.decide(100.0) == Short(missing=1)


def test_survivors_wait_for_each_other_and_for_nobody_else() -> None:
    world = formed("a", "b", "c")
    assert world.lose("a")
    world.join("c", 1.0)
    assert world.decide(1.0) == Keep()  # b has not left the broken world yet
    world.join("b", 1.1)
    assert world.decide(1.1) == Form(("b", "c"))


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_survivor_that_dies_on_the_way_is_not_waited_for(lost: str) -> None:
    world = formed("a", "b", "c")
    world.lose("c")
    left = {"a": "b", "b": "a"}[lost]
    world.join(left, 1.0)
    assert world.lose(lost)
    assert world.decide(1.0) == Form((left,))


def test_where_the_one_that_was_to_stay_is_lost_another_that_holds_the_state_stays() -> None:
    world = formed("a", "b", "c")
    assert world.rescale(1, 1) == []  # b and c are to leave
    world.lose("a")
    assert world.join("b", 1.0)
    assert not world.join("c", 1.0)
    assert world.decide(1.0) == Form(("b",))


def test_a_newcomer_asks_once_others_have_had_time_to_come_too() -> None:
    world = formed("a", "b")
    world.join("c", 10.0)
    assert world.decide(10.0) == Wait(1.0)
    world.join("d", 10.5)
    assert world.decide(11.0) == Wait(0.5)
    assert world.decide(11.5) == Resize()
    world.join("b", 12.0)
    world.join("a", 12.1)
    assert world.decide(12.1) == Form(("a", "b", "c", "d"))  # survivors in their old order


def test_a_newcomer_that_dies_while_it_waits_changes_nothing() -> None:
    world = formed("a", "b")
    world.join("c", 10.0)
    assert not world.lose("c")
    assert world.decide(20.0) == Keep()


def test_after_all_are_lost_it_is_a_first_world_again() -> None:
    world = formed("a", "b")
    world.expected = 2
    world.lose("a")
    world.lose("b")
    world.join("c", 30.0)
    assert world.decide(30.0) == Wait(5.0)
    world.join("d", 31.0)
    assert world.decide(31.0) == Form(("c", "d"))


def test_one_that_is_sent_away_leaves_at_an_agreed_step_and_the_others_go_on() -> None:
    world = formed("a", "b", "c")
    assert world.send_away(["a"]) == []
    assert world.decide(1.0) == Resize()
    assert not world.join("a", 2.0)
    world.join("b", 2.0)
    world.join("c", 2.0)
    assert world.decide(2.0) == Form(("b", "c"))


def test_when_all_are_sent_away_what_they_hold_must_be_written_down() -> None:
    world = formed("a", "b")
    world.send_away(["a", "b"])
    assert world.decide(1.0) == Resize(none_stays=True)
    assert not world.join("a", 2.0)
    assert not world.join("b", 2.0)
    assert world.decide(2.0) == Short(missing=1)


def test_one_that_is_sent_away_while_it_waits_goes_at_once() -> None:
    world = formed("a", "b")
    world.join("c", 1.0)
    assert world.send_away(["c"]) == ["c"]
    assert world.decide(5.0) == Keep()


def test_one_that_is_sent_away_and_dies_is_not_waited_for() -> None:
    world = formed("a", "b")
    world.send_away(["b"])
    assert world.lose("b")
    world.join("a", 2.0)
    assert world.decide(2.0) == Form(("a",))


def test_a_smaller_scale_sends_the_last_ranks_away() -> None:
    world = formed("a", "b", "c")
    assert world.rescale(1, 2) == []
    assert world.decide(1.0) == Resize()
    assert not world.join("c", 2.0)
    world.join("a", 2.0)
    world.join("b", 2.0)
    assert world.decide(2.0) == Form(("a", "b"))


def test_nobody_joins_a_world_that_is_full() -> None:
    world = formed("a", "b", largest=2)
    world.join("c", 1.0)
    assert world.decide(9.0) == Keep()
    world.rescale(1, 3)
    assert world.decide(9.0) == Resize()


def test_a_larger_smallest_leaves_the_world_under_way_alone_until_it_ends() -> None:
    world = formed("a", "b")
    world.rescale(3, 4)
    assert world.decide(1.0) == Keep()
    world.lose("b")
    world.join("a", 2.0)
    assert world.decide(2.0) == Short(missing=2)


def test_survivors_form_a_last_world_without_newcomers_however_few_they_are() -> None:
    world = formed("a", "b", "c")
    world.rescale(2, 3)
    world.lose("b")
    world.lose("c")
    world.join("d", 1.0)
    assert world.close() == ["d"]
    assert world.decide(1.0) == Keep()
    world.join("a", 2.0)
    assert world.decide(2.0) == Form(("a",))


def test_nobody_who_was_never_in_a_world_forms_a_last_one() -> None:
    world = membership(expected=1)
    world.join("a", 0.0)
    assert world.close() == ["a"]
    assert world.world == ()


def test_members_of_a_node_sit_side_by_side_and_the_leader_stays() -> None:
    world = membership(expected=4)
    for member, node in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
        world.join(member, 0.0, node)
    assert world.decide(0.0) == Form(("a1", "a2", "b1", "b2"))
    world.lose("a1")
    for member, node in (("b2", "b"), ("a2", "a"), ("b1", "b"), ("a3", "a")):
        world.join(member, 1.0, node)
    assert world.decide(1.0) == Form(("a2", "a3", "b1", "b2"))
    world.lose("a2")
    for member, node in (("b2", "b"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b3", "b")):
        world.join(member, 2.0, node)
    world.lose("a3")
    assert world.decide(2.0) == Form(("b1", "b2", "b3", "c1"))


def test_spares_wait_beside_a_full_world_and_take_the_place_of_one_that_is_lost() -> None:
    world = formed("a", "b", largest=2)
    world.spares = 1
    assert world.wanted == 3
    world.join("c", 1.0)
    assert world.decide(9.0) == Keep()
    world.lose("a")
    world.join("b", 10.0)
    assert world.decide(10.0) == Form(("b", "c"))


def test_of_those_who_are_too_many_only_spares_stay() -> None:
    world = formed("a", "b", "c", largest=3)
    world.spares = 1
    for member in ("d", "e"):
        world.join(member, 1.0)
    assert world.rescale(1, 3) == ["e"]
    assert world.decide(1.0) == Keep()
    assert world.rescale(1, 2) == []
    assert world.decide(1.0) == Resize()
    assert not world.join("c", 2.0)
    world.join("a", 2.0)
    world.join("b", 2.0)
    assert world.decide(2.0) == Form(("a", "b"))
    assert world.close() == ["d"]
