"""Models that are more than a chain of layers: buffers that a forward changes, pads, hooks, unused parameters."""

import json
from collections.abc import Iterator
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
from steadfast.parallel.dtensor import is_sharded
from steadfast.tasks import LanguageModeling, Sums
from tests.support.claims import check_equal, check_run
from tests.support.deaths import Plot, survive, undisturbed
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.like_nccl import Death
from tests.support.models import WIDTH, Embedded, Extra, Fused, Normalised
from tests.support.reference import reference
from tests.support.small import VOCABULARY, small

HERE = "tests.dist.test_unusual_models"
COUPLED = "task.coupled=true"  # which layers a forward runs follows from all samples of its microbatch
NUM_EXPERTS = 5


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
    """Each microbatch counts once in them, and nothing else does: neither warm-ups nor pads, nor a stop."""
    model = f"model.args={{momentum: {momentum}}}"
    words = [f"parallel={{kind: {kind}}}", "model.target=tests.support.models:Normalised", model, "run.epochs=3"]
    config = small(tmp_path, *words)
    drill(config, worlds=[3, 1], leave_after=[2], stop_after=2)
    check_run(drill(config, worlds=[4, 2], leave_after=[2]), reference(config))


@pytest.mark.parametrize(("kind", "num_microbatches"), [("fsdp", 7), ("ddp", 2)])
def test_workers_without_a_share_run_what_a_model_can_take(tmp_path: Path, kind: str, num_microbatches: int) -> None:
    """In a world of three two ranks run a pad in each step, or one rank has nothing but a pad."""
    model = "model.target=tests.dist.test_unusual_models:Pooled"
    size = [f"batch.global_size={4 * num_microbatches}", "batch.microbatch_size=4"]
    config = small(tmp_path, f"parallel.kind={kind}", model, *size)
    check_run(drill(config, worlds=[3, 2], leave_after=[6]), reference(config))


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


def params(run: HookContext) -> dict[str, Tensor]:
    return {} if any(map(is_sharded, run.model.parameters())) else dict(run.model.named_parameters())


class Held:
    """Writes down what each rank holds after each step."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_step(self, run: HookContext) -> None:
        held = {name: tensor.tolist() for name, tensor in {**dict(run.model.named_buffers()), **params(run)}.items()}
        with open(self._folder / "held", "a") as file:
            file.write(json.dumps([run.attempt, run.step, run.rank, held]) + "\n")


class FirstBatch(Embedded):
    """Sets a shift and a scale from the first batch, as ActNorm does."""

    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("ready", torch.tensor(False))

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if self.training and not self.ready:
            self.shift.data.copy_(-hidden.detach().mean((0, 1)))
            self.scale.data = 1 / hidden.detach().std((0, 1))
            self.ready.fill_(True)
        scaled: Tensor = (hidden + self.shift) * self.scale
        return scaled


class Momentum(Embedded):
    """Moves a frozen copy of its embedding in every forward, as a momentum encoder, and scales a weight in place."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.slow.weight.data.mul_(0.9).add_(self.embedding.weight.data, alpha=0.1)
            self.head.weight.data = self.head.weight.data * (1 - 0.01 * hidden.detach().mean())
        moved: Tensor = hidden + self.slow(tokens)
        return moved


class Quantized(Embedded):
    """Moves a codebook by way of `data`, and keeps the largest input that it has seen, by a new tensor."""

    codes: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(WIDTH))
        self.register_buffer("largest", torch.zeros(()))

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.codes.data.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
            self.largest = torch.maximum(self.largest, hidden.detach().max())
        return hidden / (1 + self.largest) + self.codes


@pytest.mark.parametrize(
    ("model", "kind"),
    [("Codebook", "ddp"), ("Codebook", "fsdp"), ("FirstBatch", "ddp"), ("Momentum", "ddp"), ("Quantized", "ddp")],
)
def test_state_that_a_forward_writes_is_the_leaders_on_all_ranks_and_in_the_checkpoint(
    tmp_path: Path, model: str, kind: str
) -> None:
    hook = f"hooks=[{{target: '{HERE}:Held', args: {{folder: {tmp_path}}}}}]"
    target = f"model.target={'tests.support.models' if model == 'Codebook' else HERE}:{model}"
    config = small(tmp_path, target, hook, f"parallel.kind={kind}", "run.epochs=1")
    run = drill(config, worlds=[2, 3], leave_after=[2])
    lines = [json.loads(line) for line in (tmp_path / "held").read_text().splitlines()]
    for step in range(1, 6):
        first, *others = (held for _, each, _, held in lines if each == step)
        assert others == [first] * (1 if step < 4 else 2)
        if model == "Codebook":
            # Of 7 microbatches 4 are the leader's in a world of two, 3 in one of three. The last step has two of its
            # microbatches; the third one is a pad, and counts for nothing.
            assert first["seen"] == [4, 8, 12, 15, 17][step - 1]
    assert {name: run.weights[name].tolist() for name in first} == first
    alone = small(tmp_path / "alone", target)
    check_run(drill(alone, worlds=[1]), reference(alone))


@pytest.mark.parametrize("model", ["FirstBatch", "Momentum"])
def test_parameters_that_a_forward_wrote_before_a_death_are_written_once(tmp_path: Path, model: str) -> None:
    words = [f"model.target={HERE}:{model}", "run.steps=6"]
    calm = undisturbed(small(tmp_path / "undisturbed", *words))
    for collective in (2, 9):  # in the first step, and in a later one
        killed = Plot([[0, 1, 2], [0, 1, 3]], {1: (2, Death(collective, "before it is launched"))})
        survived = survive(small(tmp_path / str(collective), *words), killed)
        check_equal(survived.left.weights, calm.states[6].weights)


@pytest.mark.parametrize(("model", "name"), [("FirstBatch", "buffer ready"), ("Momentum", r"parameter \S+")])
def test_a_forward_that_writes_parameters_is_refused_under_fsdp_and_in_an_exact_run(
    tmp_path: Path, model: str, name: str
) -> None:
    for words, message in (
        (["parallel.kind=fsdp"], r"TrainingError: a forward changes the model's parameter \S+, of which each worker"),
        (["run.exact=true", "run.deterministic=true"], rf"run\.exact: a forward changes the model's {name}"),
    ):
        with pytest.raises(MemberFailed, match=message):
            drill(small(tmp_path / words[0], f"model.target={HERE}:{model}", *words), worlds=[2])


class Growing(Embedded):
    """Appends to a buffer in each forward."""

    seen: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent)

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, self.seen[:1] + 1])
        return hidden


def test_a_buffer_that_grows_is_refused_with_its_shapes_and_a_cache_is_named(tmp_path: Path) -> None:
    words = [f"model.target={HERE}:Growing", "run.steps=4"]
    message = r"a forward changes the model's buffer seen from \[1\] float64 to \[\d\] float64, .*persistent=False"
    with pytest.raises(MemberFailed, match=message):
        drill(small(tmp_path / "state", *words, "model.args={persistent: true}"), worlds=[2])
    run = drill(small(tmp_path / "cache", *words, "model.args={persistent: false}"), worlds=[2, 3], leave_after=[2])
    (notice,) = (text for text in run.told("notice", "text") if "which no checkpoint holds" in text)
    assert notice.startswith("the first step changes Growing.seen, which no checkpoint holds")


class Mixed(Embedded):
    """Has copies in its state_dict: two parts of a weight, and a number that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.rate = Fused(WIDTH), Extra(torch.tensor(1.0, dtype=torch.float64))

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.fused(hidden) * self.rate.extra
        return mixed


class Decaying:
    """Changes the extra state after each step."""

    def on_step(self, run: HookContext) -> None:
        run.model.rate.set_extra_state(run.model.rate.extra * 0.9)  # type: ignore[operator]


def test_copies_in_a_state_dict_reach_new_workers_and_resumed_runs(tmp_path: Path) -> None:
    config = small(tmp_path, f"model.target={HERE}:Mixed", f"hooks=[{{target: '{HERE}:Decaying'}}]")

    def decay(model: nn.Module, step: int) -> None:
        if step > 1:
            Decaying().on_step(HookContext(model, None))  # type: ignore[arg-type]

    expected = reference(config, before_step=decay)
    drill(config, worlds=[1, 3], leave_after=[4], stop_after=6)
    found = drill(config, worlds=[[3, 4], 1], leave_after=[3])
    assert float(found.weights["rate._extra_state"]) == pytest.approx(0.9**14)
    check_equal(found.weights, expected.weights | {"rate._extra_state": found.weights["rate._extra_state"]})


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
    said = "its layer norm is a SyncBatchNorm: it mixes one microbatch of every worker"
    with pytest.raises(MemberFailed, match=said):
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
    words = ["model.target=tests.support.models:Normalised", f"task.target={HERE}:Asked"]
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


class Block(nn.Module):
    """Chooses one of its experts for each microbatch: half of the time at random, else by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(NUM_EXPERTS)])
        self.norm = nn.LayerNorm(12)

    def forward(self, hidden: Tensor, number: int) -> Tensor:
        if self.training and number % 2:
            number = int(torch.randint(NUM_EXPERTS, ()))
        mixed: Tensor = self.experts[number % NUM_EXPERTS](self.norm(hidden))
        return hidden + torch.tanh(mixed)


class Half(Embedded):
    """A model with blocks, whose own embedding is a part of the halves' alternation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, int(tokens.sum()))
        return hidden


class Alternating(nn.Module):
    """Two models that are trained in turns, as the two of a GAN are, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleDict({"even": Half(), "odd": Half()})
        self.never = nn.Linear(12, 12)
        self.turn = "odd"

    def blocks(self) -> Iterator[nn.Module]:
        for half in self.halves.values():
            yield from half.layers  # type: ignore[misc]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.halves[self.turn if self.training else "even"](tokens)
        return logits


def take_turn(model: nn.Module, step: int) -> None:
    model.turn = "odd" if step % 2 else "even"  # type: ignore[assignment]


class Turns:
    """Sets whose turn it is in the next step."""

    def on_start(self, run: HookContext) -> None:
        take_turn(run.model, run.step + 1)

    on_step = on_start


@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        (["parallel.kind=ddp"], [1, 4, 2, 3]),
        (["run.exact=true", "run.deterministic=true"], [3, 1, 4, 2]),
        (["parallel.reducer=torch"], [1, 4, 2, 3]),
        (["parallel.kind=fsdp"], [1, 4, 2, 3]),
        (["parallel={kind: fsdp, reduce_every_microbatch: true}"], [3, 1, 4, 2]),
        (["parallel={kind: fsdp, reshard_after_forward: false, cpu_offload: true}"], [2, 3]),
        (["parallel={kind: fsdp, shard_size: 2}"], [2, 4]),
        (["parallel={kind: fsdp, shard_size: 2, reduce_every_microbatch: true}"], [4, 2]),
    ],
    ids=["ddp", "exact", "torch", "fsdp", "every", "offload", "hsdp", "hsdp_every"],
)
def test_unused_parameters_are_left_alone_as_in_a_plain_loop(
    tmp_path: Path, words: list[str], worlds: list[int]
) -> None:
    """Three microbatches of a step use three experts of five at most; one worker of four, or of two, runs a pad."""
    model = f"model.target={HERE}:Alternating"
    turns = f"hooks=[{{target: '{HERE}:Turns'}}]"
    optimizer = "optimizer={kind: adamw, lr: 1.0e-2, weight_decay: 0.3, betas: [0.8, 0.9], max_grad_norm: 0.5}"
    config = small(tmp_path, model, turns, optimizer, "batch.global_size=5", COUPLED, *words)
    check_run(drill(config, worlds, leave_after=[2] * (len(worlds) - 1)), reference(config, before_step=take_turn))


def test_fsdp_adds_up_microbatches_of_different_experts_in_16_bits(tmp_path: Path) -> None:
    """Gradients of earlier microbatches are kept in fp32 then, and those of the last one come in bf16."""
    config = small(tmp_path, f"model.target={HERE}:Alternating", "parallel.kind=fsdp", "precision.kind=bf16", COUPLED)
    found = drill(config, [2, 1], leave_after=[4])
    expected = reference(config)
    assert [line["loss"] for line in found.history.lines] == pytest.approx(expected.losses, abs=0.05)
    assert found.weights["never.weight"].double().equal(expected.weights["never.weight"].float().double())


class Scattered(Embedded):
    """Has experts that fsdp gathers one by one, and runs one of them for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(NUM_EXPERTS)])

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.experts[int(tokens.sum()) % NUM_EXPERTS](hidden)
        return hidden + mixed


@pytest.mark.parametrize("parallel", ["{kind: fsdp}", "{kind: fsdp, shard_size: 2}"])
def test_fsdp_refuses_ranks_that_run_different_layers(tmp_path: Path, parallel: str) -> None:
    """Layers of one size are taken for each other otherwise, without any error of torch's."""
    config = small(tmp_path, f"model.target={HERE}:Scattered", f"parallel={parallel}", COUPLED)
    with pytest.raises(MemberFailed, match=r"TrainingError: .*the ranks did not run the same layers in one step"):
        drill(config, [2])


def test_fsdp_trains_experts_that_are_gathered_with_the_model(tmp_path: Path) -> None:
    config = small(tmp_path, f"model.target={HERE}:Scattered", "parallel={kind: fsdp, wrap: [Embedding]}", COUPLED)
    check_run(drill(config, [2, 3], leave_after=[4]), reference(config))
