"""Who is in the next world, as a table of what happened and what is decided then."""

import re
from functools import partial
from typing import NamedTuple

import pytest

from steadfast.config import Layout
from steadfast.config.axes import layout_of_most
from steadfast.orchestration.membership import Decision, Form, Keep, Membership, Resize, Short, Wait

HAPPENS = r"(?P<at_s>[\d.]+)? ?(?P<verb>[a-z]+)?(?P<words>[ \w]*?)"
MOVE = re.compile(HAPPENS + r"( =(?P<answer>[ \w]*))?( > (?P<decision>.+))?")


class Story(NamedTuple):
    """Moves between bars: a second, what happens then, what is answered after `=`, and what is decided after `>`."""

    moves: str
    formed: str = ""  # the members of a first world, a letter each
    smallest: int = 1
    largest: int = 8
    spares: int = 0

    def world(self) -> Membership:
        expected = len(self.formed) or 3
        world = Membership(self.smallest, self.largest, expected, settle_s=5.0, gather_s=1.0, spares=self.spares)
        for member in self.formed:
            world.join(member, 0.0)
        assert not self.formed or world.decide(0.0) == Form(tuple(self.formed)), "nobody who is expected is missing"
        return world


def happen(world: Membership, verb: str, words: list[str], now_s: float) -> list[object]:
    """Let something happen to a world, and return what is answered."""
    match verb:
        case "join":  # a number behind a member's node
            return [world.join(member, now_s, member.rstrip("0123456789")) for member in words]
        case "lose":
            return [world.lose(member) for member in words]
        case "send":
            return [*world.send_away(words)]
        case "scale":
            return [*world.rescale(*map(int, words))]
        case "close":
            return [*world.close()]
        case _:
            raise ValueError(verb)


def in_words(decision: Decision) -> str:
    match decision:
        case Form(members):
            return " ".join(["form", *members])
        case Resize(none_stays):
            return "resize, none stays" if none_stays else "resize"
        case Wait(seconds):
            return f"wait {seconds:g}"
        case Short(missing):
            return f"short {missing}"
        case Keep():
            return "keep"


STORIES = {
    "the first world waits for those who are expected but not for ever": Story(
        "10 join a > wait 5 | 11 join b | 12 > wait 3 | 15 > form a b"
    ),
    "no world is smaller than the smallest": Story("0 join a | 100 > short 1", smallest=2),
    "survivors wait for each other and for nobody else": Story(
        "lose a = True | 1 join c > keep | 1.1 join b > form b c", "abc"
    ),
    "a leader that dies on the way is not waited for": Story("lose c | 1 join b | lose a = True > form b", "abc"),
    "another that dies on the way is not waited for": Story("lose c | 1 join a | lose b = True > form a", "abc"),
    "where the one that was to stay is lost another that holds the state stays": Story(
        "scale 1 1 = | lose a | 1 join b c = True False > form b", "abc"
    ),
    "a newcomer asks once others have had time to come too, and survivors keep their order": Story(
        "10 join c > wait 1 | 10.5 join d | 11 > wait 0.5 | 11.5 > resize | 12 join b | 12.1 join a > form a b c d",
        "ab",
    ),
    "a newcomer that dies while it waits changes nothing": Story("10 join c | lose c = False | 20 > keep", "ab"),
    "after all are lost it is a first world again": Story("lose a b | 30 join c > wait 5 | 31 join d > form c d", "ab"),
    "one that is sent away leaves at an agreed step and the others go on": Story(
        "send a = | 1 > resize | 2 join a = False | join b c > form b c | 9 > keep", "abc"
    ),
    "when all are sent away what they hold must be written down": Story(
        "send a b | 1 > resize, none stays | 2 join a b = False False > short 1", "ab"
    ),
    "one that is sent away while it waits goes at once": Story("1 join c | send c = c | 5 > keep", "ab"),
    "one that is sent away and dies is not waited for": Story("send b | lose b = True | 2 join a > form a", "ab"),
    "a smaller scale sends the last ranks away": Story(
        "scale 1 2 = | 1 > resize | 2 join c = False | join a b > form a b", "abc"
    ),
    "nobody joins a world that is full": Story("1 join c | 9 > keep | scale 1 3 > resize", "ab", largest=2),
    "a larger smallest leaves the world under way alone until it ends": Story(
        "scale 3 4 | 1 > keep | lose b | 2 join a > short 2", "ab"
    ),
    "survivors form a last world without newcomers however few they are": Story(
        "scale 2 3 | lose b c | 1 join d | close = d > keep | 2 join a > form a", "abc"
    ),
    "nobody who was never in a world forms a last one": Story("0 join a | close = a > short 1"),
    "members of a node sit side by side and the leader stays": Story(
        "0 join a1 b1 a2 b2 | 5 > form a1 a2 b1 b2"
        " | lose a1 | 6 join b2 a2 b1 a3 > form a2 a3 b1 b2"
        " | lose a2 | 7 join b2 a3 b1 c1 b3 | lose a3 > form b1 b2 b3 c1"
    ),
    "a spare waits beside a full world and takes the place of one that is lost": Story(
        "1 join c | 9 > keep | lose a | 10 join b > form b c", "ab", largest=2, spares=1
    ),
    "of those who are too many only spares stay": Story(
        "1 join d e | scale 1 3 = e > keep | scale 1 2 = > resize | 2 join c = False | join a b > form a b | close = d",
        "abc",
        largest=3,
        spares=1,
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_membership_decides_who_is_in_the_next_world(name: str) -> None:
    story = STORIES[name]
    world, now_s = story.world(), 0.0
    for move in story.moves.split(" | "):
        found = MOVE.fullmatch(move)
        assert found, move
        now_s = float(found["at_s"] or now_s)
        answers = happen(world, found["verb"], found["words"].split(), now_s) if found["verb"] else []
        assert found["answer"] is None or list(map(str, answers)) == found["answer"].split(), move
        if found["decision"]:
            assert in_words(world.decide(now_s)) == found["decision"], move


def test_spares_are_wanted_beside_a_full_world() -> None:
    assert Story("", largest=2, spares=1).world().wanted == 3


def test_survivors_keep_their_seats_before_newcomers_when_replicas_change_their_size() -> None:
    layout = partial(layout_of_most, replicas=[Layout(1, shard=2), Layout(1, shard=3)])
    world = Membership(2, 4, 4, settle_s=5.0, gather_s=1.0, spares=2, layout=layout)
    for member in ("a", "b", "c", "d"):
        world.join(member, 0.0)
    assert world.decide(0.0) == Form(("a", "b", "c", "d"))
    world.lose("d")
    for member in ("e", "f", "c", "b", "a"):
        world.join(member, 1.0)
    assert world.rescale(2, 3) == []
    assert world.decide(1.0) == Form(("a", "b", "c"))
