"""Ranks whose states have come to differ: the run names them and goes back to a checkpoint on which all agreed."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.config import Config
from tests.support.claims import check_identical
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.small import small

EVERY = "checkpoint.every=3 steps"
HSDP = "parallel={kind: fsdp, shard_size: 2}"


class Changing:
    """Changes something on one rank after step 4, once a checkpoint is there; `times` times in all."""

    def __init__(self, what: str, rank: int, folder: str, times: int = 1) -> None:
        self._what, self._rank, self._folder, self._times = what, rank, Path(folder), times

    def setup(self, run: Any) -> None:
        if self._what == "buffer":
            run.model.register_buffer("table", torch.zeros(3))

    @torch.no_grad()
    def on_step(self, run: Any) -> None:
        count = len(list(self._folder.glob("changed-*")))
        if (run.step, run.rank) != (4, self._rank) or count == self._times:
            return
        while not list(self._folder.glob("**/manifest.json")):
            time.sleep(0.01)
        (self._folder / f"changed-{count}").touch()
        weight = next(iter(run.model.parameters()))
        match self._what:
            case "weight":
                changed = weight
            case "moment":
                changed = run.optimizer.state[weight]["exp_avg"]
            case "buffer":
                changed = run.model.table
        getattr(changed, "to_local", lambda: changed)().view(-1)[-1] += 0.5

    def state_dict(self) -> dict[str, object]:
        return {"rank": self._rank + time.monotonic()}  # on each rank another one, which is no fault

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def changing(folder: Path, what: str, rank: int, *words: str, times: int = 1) -> Config:
    args = f"{{what: {what}, rank: {rank}, folder: '{folder}', times: {times}}}"
    hook = f"hooks=[{{target: 'tests.dist.test_agreement:Changing', args: {args}}}, {{kind: ema}}]"
    return small(folder, "precision.kind=fp32", EVERY, hook, *words)


@pytest.mark.parametrize(
    ("what", "kind", "size", "rank", "tensor", "ranks"),
    [
        ("weight", "parallel.kind=ddp", 3, 1, "model.embed.weight", [[0, 2], [1]]),
        ("buffer", "parallel.kind=ddp", 2, 0, "model.table", [[0], [1]]),
        ("moment", HSDP, 4, 3, "model.embed.weight", [[1], [3]]),  # which the next update has moved apart,
    ],
)
def test_the_run_goes_back_to_the_checkpoint_before_a_change_on_one_rank(
    tmp_path: Path, what: str, kind: str, size: int, rank: int, tensor: str, ranks: list[list[int]]
) -> None:
    run = drill(changing(tmp_path / "run", what, rank, kind), worlds=[size, size])
    assert run.told("ranks_differ", "tensor") == [tensor]
    assert [list(told.values()) for told in run.told("ranks_differ", "ranks")] == [ranks]
    assert [event["step"] for event in run.events if event["event"] == "checkpoint" and event["attempt"] == 1] == [3]
    assert (run.told("restore", "step"), run.told("restore", "source")) == ([3], ["checkpoint"])
    undisturbed = drill(changing(tmp_path / "undisturbed", what, rank, kind, times=0), worlds=[size])
    assert not undisturbed.told("ranks_differ", "tensor")
    check_identical(run, undisturbed)


def test_a_second_change_ends_the_run(tmp_path: Path) -> None:
    said = "ranks? .* hold different numbers in model.embed.weight, for the second time. Something changes it"
    with pytest.raises(MemberFailed, match=said):
        drill(changing(tmp_path, "weight", 1, times=2), worlds=[2, 2])
