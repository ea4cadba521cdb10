"""Models that are more than a chain of layers: buffers that a forward changes, pads, hooks of torch's own reducer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from steadfast.data.batches import Batch
from steadfast.hooks.hook import HookContext
from steadfast.tasks import LanguageModeling, Sums
from tests.support.claims import check_identical, check_run
from tests.support.deaths import Plot, survive, undisturbed
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.like_nccl import Death
from tests.support.models import WIDTH, Embedded, Normalised
from tests.support.reference import reference
from tests.support.small import VOCABULARY, small


class Pooled(Normalised):
    """Its statistics are of one number a sample, as those of a network for images behind its last pooling may be."""

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        pooled: Tensor = self.norm(hidden.mean(1))  # (microbatch, embedding)
        return hidden + pooled[:, None]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("ddp, reducer: torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("momentum", ["0.1", "null"])
def test_running_statistics_are_those_of_one_process_at_any_world_size(
    tmp_path: Path, kind: str, momentum: str
) -> None:
    """Each microbatch counts once in them, and nothing else does: neither warm-ups nor pads."""
    model = f"model.args={{momentum: {momentum}}}"
    words = [f"parallel={{kind: {kind}}}", "model.target=tests.support.models:Normalised", model, "run.epochs=3"]
    config = small(tmp_path, *words)
    check_run(drill(config, worlds=[3, 1, 4, 2], leave_after=[2, 2, 2]), reference(config))


@pytest.mark.parametrize(("kind", "num_microbatches"), [("fsdp", 7), ("ddp", 2)])
def test_a_worker_without_a_microbatch_runs_what_a_model_can_take(
    tmp_path: Path, kind: str, num_microbatches: int
) -> None:
    """In a world of three two ranks run a pad in each step, or one rank has nothing but a pad."""
    model = "model.target=tests.dist.test_unusual_models:Pooled"
    size = [f"batch.global_size={4 * num_microbatches}", "batch.microbatch_size=4"]
    config = small(tmp_path, f"parallel.kind={kind}", model, *size)
    check_run(drill(config, worlds=[3, 2], leave_after=[6]), reference(config))


def test_a_run_with_running_statistics_that_is_stopped_and_resumed_is_identical(tmp_path: Path) -> None:
    words = ["precision.kind=fp32", "model.target=tests.support.models:Normalised", "run.steps=40"]
    undisturbed = drill(small(tmp_path / "undisturbed", *words), worlds=[2])
    config = small(tmp_path / "stopped", *words)
    drill(config, worlds=[2], stop_after=19)
    check_identical(drill(config, worlds=[2]), undisturbed)


@pytest.mark.parametrize("collective", [14, 15])
def test_a_step_that_a_death_breaks_counts_once_in_the_statistics(tmp_path: Path, collective: int) -> None:
    words = ["model.target=tests.support.models:Normalised", "run.steps=18"]
    calm = undisturbed(small(tmp_path / "undisturbed", *words))
    killed = Plot(worlds=[[0, 1, 2], [0, 1, 3]], deaths={1: (2, Death(collective, "before it is launched"))})
    survived = survive(small(tmp_path / "killed", *words), killed)
    held = [each for each in survived.held if each.attempt == 2 and each.member != 3]  # who is new holds nothing
    assert len(held) == 2
    for each in held:
        assert 0 < each.step < 18
        assert each.state.digest == calm.states[each.step].digest


@pytest.mark.parametrize("parallel", ["{reducer: steadfast}", "{reducer: torch}", "{kind: fsdp}"])
def test_a_model_with_unused_branches_trains_as_one_process_does(tmp_path: Path, parallel: str) -> None:
    config = small(tmp_path, "model.target=tests.support.models:Branched", f"parallel={parallel}", "task.coupled=true")
    check_run(drill(config, worlds=[3, 2], leave_after=[5]), reference(config))


class Held:
    """Writes down what each rank holds after each step."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_step(self, run: HookContext) -> None:
        held = {name: buffer.tolist() for name, buffer in run.model.named_buffers()}
        with open(self._folder / "held", "a") as file:
            file.write(json.dumps([run.attempt, run.step, run.rank, held]) + "\n")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_buffers_that_a_forward_changes_are_the_leaders_after_each_step(tmp_path: Path, kind: str) -> None:
    hook = f"hooks=[{{target: 'tests.dist.test_unusual_models:Held', args: {{folder: {tmp_path}}}}}]"
    model = "model.target=tests.support.models:Codebook"
    run = drill(small(tmp_path, model, hook, f"parallel.kind={kind}", "run.epochs=1"), worlds=[2, 3], leave_after=[2])
    lines = [json.loads(line) for line in (tmp_path / "held").read_text().splitlines()]
    held: dict[int, list[dict[str, object]]] = {}
    for _, step, _, buffers in sorted(lines, key=lambda line: line[:3]):
        held.setdefault(step, []).append(buffers)
    assert [len(held[step]) for step in range(1, 6)] == [2] * 3 + [3] * 2
    for buffers in held.values():
        assert all(each == buffers[0] for each in buffers)
    # 7 microbatches: 4 of them the leader's in a world of two, 3 in one of three. The last step has three samples, in
    # two of the leader's microbatches; the third one is a pad, and counts for nothing.
    assert [line["num_samples"] for line in run.history.lines] == [13, 13, 13, 13, 3]
    assert [held[step][0]["seen"] for step in range(1, 6)] == [4, 8, 12, 15, 17]
    assert run.weights["seen"] == 17


class Scaled(Embedded):
    """Keeps a table that never changes in its state."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden * self.scale


def test_a_buffer_that_never_changes_is_none_that_a_pad_has_changed(tmp_path: Path) -> None:
    """Or an exact run would be refused in a world with a worker too many."""
    words = ["model.target=tests.dist.test_unusual_models:Scaled", "run.exact=true", "run.deterministic=true"]
    config = small(tmp_path, *words, "batch.global_size=4")
    check_run(drill(config, worlds=[3]), reference(config))


def test_layers_that_mix_the_samples_of_workers_are_refused(tmp_path: Path) -> None:
    config = small(tmp_path, "model.target=tests.dist.test_unusual_models:Mixing")
    with pytest.raises(
        MemberFailed, match="its layer norm is a SyncBatchNorm: it mixes one microbatch of every worker"
    ):
        drill(config, worlds=[1])


class Mixing(Normalised):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(12)  # type: ignore[assignment]


class Asked(LanguageModeling):
    """Asks the model for what only it has."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        assert model.head.out_features == VOCABULARY
        with pytest.raises(AttributeError, match="nothing"):
            _ = model.nothing
        return super().loss(model, batch)


@pytest.mark.parametrize("parallel", ["{reducer: torch}", "{reducer: steadfast}", "{kind: fsdp}"])
def test_a_task_sees_the_attributes_of_the_plain_model(tmp_path: Path, parallel: str) -> None:
    words = [
        "model.target=tests.support.models:Normalised",
        "task.target=tests.dist.test_unusual_models:Asked",
    ]
    run = drill(small(tmp_path, *words, f"parallel={parallel}", "run.steps=3"), worlds=[2])
    assert run.summary["status"] == "finished"


class Hooked(LanguageModeling):
    """Registers a communication hook on each DistributedDataParallel that computes a loss.

    Args:
        dropped: whether the hook replaces the gradients by zeros.
    """

    def __init__(self, dropped: bool, **fields: Any) -> None:
        super().__init__(**fields)
        self._hooked: nn.Module | None = None
        self._dropped = dropped

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        # Each world wraps the model anew, and the check before the first step passes the model without a wrapper.
        if isinstance(model, DistributedDataParallel) and model is not self._hooked:
            model.register_comm_hook(None, drop_gradients if self._dropped else allreduce_hook)
            self._hooked = model
        return super().loss(model, batch)


def drop_gradients(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros_like(bucket.buffer()))
    return future


@pytest.mark.parametrize("dropped", [False, True])
def test_a_hook_that_the_task_registers_sums_the_gradients_in_every_world(tmp_path: Path, dropped: bool) -> None:
    hooked = f"task={{target: 'tests.dist.test_unusual_models:Hooked', args: {{dropped: {str(dropped).lower()}}}}}"
    run = drill(small(tmp_path, "parallel.reducer=torch", hooked), worlds=[3, 2], leave_after=[4])
    if not dropped:
        check_run(run, reference(small(tmp_path)))
        return
    with pytest.raises(AssertionError):
        check_run(run, reference(small(tmp_path)))
