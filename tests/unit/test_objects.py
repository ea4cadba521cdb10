"""Objects that a program gives to `fit`, on their way to workers."""

import pickle
import threading
from typing import Any

import pytest
import torch

from steadfast.config import Config, Target, TargetData, TargetOptimizer
from steadfast.config.target import build_target
from steadfast.errors import UsageError
from steadfast.orchestration.internals.slots import InlineFunction
from steadfast.orchestration.objects import Objects, pack_objects


def holding(shared: Any) -> Config:
    """Return a configuration whose dataset, optimizer, order and hook are objects of this process."""
    data = TargetData.of_object("data", "Points", lambda: [shared])
    order = Target.of_object("data.order", "backwards", lambda *_: 0)
    sections = {
        "data": data.replace("order", order),
        "optimizer": TargetOptimizer.of_object("optimizer", "SGD", torch.optim.SGD),
        "hooks": (Target(target="json:loads"), Target.of_object("hooks.0", "Counts", lambda: shared)),
    }
    return Config().model_copy(update=sections)


def test_objects_reach_a_worker_beside_its_configuration_and_keep_what_they_share() -> None:
    config = holding([1])
    received: Config = pickle.loads(pickle.dumps(config))  # lambdas would raise
    assert received.model_dump() == config.model_dump()
    sections = received.target_sections()
    assert list(sections) == ["data", "optimizer", "data.order", "hooks.0", "hooks.1"]
    assert not any(section.given for section in sections.values())
    Objects(pack_objects(config)).give_to(received)
    assert sections["optimizer"].given is torch.optim.SGD
    assert sections["hooks.0"].given is None
    assert build_target(sections["data"], "data")[0] is build_target(sections["hooks.1"], "hooks.1")
    without = Config()
    assert pack_objects(without) == b""
    Objects(b"").give_to(without)
    assert without == Config()


@pytest.mark.parametrize(
    ("key", "argument"),
    [
        ("model", "model"),
        ("data", "dataset"),
        ("data.validation.collate", "validation_collate"),
        ("hooks.1", r"hooks\[1\]"),
    ],
)
def test_an_object_that_cannot_be_sent_is_named_with_the_remedy(key: str, argument: str) -> None:
    lock = threading.Lock()
    fine, locked = Target.of_object("task", "fine", len), Target.of_object(key, "Mine", lambda: lock)
    message = (
        rf"^{argument}: this Mine cannot be sent to workers: cannot pickle '_thread.lock' object\. Create that part"
    )
    with pytest.raises(UsageError, match=message):
        pack_objects(Config().model_copy(update={"hooks": (fine, locked)}))


class Unloadable:
    def __reduce__(self) -> Any:
        return __import__, ("not_on_this_node",)


def test_an_object_that_a_worker_cannot_load_is_one_clear_error() -> None:
    config = holding(Unloadable())
    with pytest.raises(
        UsageError, match=r"cannot be loaded on .*: ModuleNotFoundError: .*not_on_this_node.*importable"
    ):
        Objects(pack_objects(config)).give_to(config)


class Reference:
    """Stands for a reference to an object in Ray's store."""

    def __reduce__(self) -> Any:
        raise AssertionError("pickled where Ray does not count it")


def test_references_travel_beside_the_function_for_ray_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.ObjectRef", Reference)
    one, other = Reference(), Reference()
    stored: Any = type("Stored", (), {"get": lambda self: lambda: [one, other, one]})()
    function = InlineFunction(stored)
    assert function.get()() == [one, other, one]
