"""What a worker process keeps from one attempt to the next."""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from app.checkpoint.initial import build_initial, build_initial_sharded, load_initial
from app.checkpoint.node_memory import NodeMemory, open_memory
from app.checkpoint.state import (
    HeldShards,
    HeldState,
    ModelState,
    NamedOptimizer,
    State,
    app_state,
    base_sha256,
    buffers_outside_state,
    copy_state,
    named_tensors,
    newest_whole,
)
from app.checkpoint.writer import Writer
from app.components.buffers import Buffers, refuse_running_statistics, refuse_synchronized
from app.components.hooks import Hooks
from app.components.modes import prepare_for_training
from app.components.optimizer import build_optimizer, refuse_sparse
from app.components.optimizer_trial import try_optimizer
from app.components.trigger import Interval
from app.config import Config, Every, TargetOptimizer
from app.data import Dataset, Loader, build_dataset, build_order
from app.data.batches import Batch, stack, tensors_of
from app.data.randomness import own_randomness
from app.errors import NotDeferrable, UsageError
from app.parallel import Parallel, strategy_of
from app.parallel.activations import checkpoint_activations, refuse_parts_of_layers
from app.parallel.blocks import blocks_of
from app.parallel.compiled import CompiledBlocks, probe
from app.parallel.fixed_point import FixedPoint
from app.parallel.precision import Precision, build_precision
from app.plan import Amendments, Plan, begin_of
from app.run.directory import RunDirectory
from app.run.owner import read_key, read_owner
from app.tasks import build_task
from app.tasks.own import GlobalTask
from app.world.control import gather_numbers
from app.world.device import Gpu, gather_gpus
from app.world.hardware import kind_of, refuse_mixed
from app.world.runtime import World

if TYPE_CHECKING:
    from app.parallel.deferred import InitialValues


class WorkerState:
    """The data with its loader processes, and the model and optimizer that a survivor brings to its next world.

    All fields are for reading; this class alone writes them.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config = config
        self.gpus: tuple[Gpu, ...] = ()  # of all ranks of the world
        self.kinds: tuple[str, ...] = ()  # of all ranks, what must be equal for equal bits; where that matters
        # How gradients are added up if nothing of it may depend on the world; its unit is a part of the state.
        self._fixed_point = FixedPoint(config.batch.global_size, device) if config.run.exact else None
        self.precision = self._build_precision(device)  # until `join` knows the world
        self.compiled = CompiledBlocks(config.compile)
        self.uncompiled: dict[int, str] = {}  # by rank of the world, why it compiles nothing though it should
        # Code of the user's may draw while it builds these, as `random_split` does: every rank must draw the same.
        with own_randomness(config.run.seed):
            self.task = build_task(config.task)
        self.compiled.take_loss(self.task)
        self.task_checked = False  # see `check_task`
        with own_randomness(config.run.seed):
            self.dataset = build_dataset(config.data)
        # What a sample adds to the loss count if nothing of it is masked, and whether something may be.
        self.units_per_sample: int = getattr(self.dataset, "units_per_sample", 1)
        self.counts_vary: bool = getattr(self.dataset, "counts_vary", True)
        self.order = build_order(config.data, len(self.dataset), config.run.seed)
        param_dtype = self.precision.param_dtype  # not a matter of the world
        self.loader = Loader(self.dataset, self.order, config.data, config.run.seed, device, param_dtype)
        size = config.batch.microbatch_size
        self.loader.check_validation(2 if size == "auto" else min(size, self.order.num_train))
        self.fingerprint = fingerprint(self.dataset)
        self.batch = config.batch  # its microbatch_size is a number once `fix_microbatch_size` was called
        self.held = HeldState()  # the step whose state `model` and `optimizer` hold
        self.amendments = Amendments()  # of the attempt under way
        self.base = ""  # sha256 of the frozen parameters, if checkpoints leave them out
        self.writer = Writer()  # outlives attempts too: a checkpoint on its way is finished in the next one
        self._memory: NodeMemory | None = None
        self.command = ""  # token of the command that started this process; "" if unknown
        self._triggers: dict[str, Interval] = {}
        self._closing: list[Callable[[], object]] = []
        self.built_whole_because = ""  # where a model whose numbers are sharded cannot do without the others at first
        self._values: InitialValues | None = None  # of a model that has been built without
        self._part = 0, 1  # of the model that this rank holds in the world, and of how many
        self._shards: HeldShards | None = None  # of the last attempt
        self._goes_on_with_shards = False
        self._model: nn.Module
        self._optimizer: torch.optim.Optimizer | None
        self._start_anew()
        if isinstance(config.optimizer, TargetOptimizer):
            self._try_optimizer(config.optimizer)
        self._warm_up()

    def _build_precision(self, device: torch.device) -> Precision:
        return build_precision(self._config.precision, device, self.gpus, self._fixed_point)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of `model`, built when it is first asked for."""
        if self._optimizer is None:
            self._optimizer = build_optimizer(self._config.optimizer, self._model)
        return self._optimizer

    def _try_optimizer(self, config: TargetOptimizer) -> None:
        """Refuse an optimizer of the user's own that would train differently here than in a plain loop."""
        sharded = not strategy_of(self._config.parallel).survivors_hold_all
        try_optimizer(config, self._model, self.precision.device, self.precision.param_dtype, sharded)

    def _warm_up(self) -> None:
        """Import what the first step needs, before joining, so that running workers do not wait for this one."""
        # Over a second of imports, most of which torch hides in an optimizer.
        if strategy_of(self._config.parallel).survivors_hold_all:
            self.state(self._model)
        else:
            # Not of the model, which is not sharded yet: its state would take twice what the device may have room for.
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        self._compile_ahead()

    def _compile_ahead(self) -> None:
        """Compile the model's layers; only see that there is a compiler where they have no memory or shape yet."""
        if not self.compiled.wanted:
            return
        is_whole = strategy_of(self._config.parallel).survivors_hold_all
        if is_whole and self.batch.microbatch_size != "auto":
            self.compiled.try_out(partial(self._run_once, self.example()))
        else:
            self.compiled.try_out(partial(probe, self.precision.device))

    def _run_once(self, batch: Batch) -> None:
        """Run a forward and backward that leave nothing behind."""
        with Buffers(self._model).undone():
            with self.precision.autocast():
                loss = self.task.loss(self._model, batch).loss_sum
            self.precision.backward(loss * 0.0)
        self._model.zero_grad(set_to_none=True)

    def _start_anew(self) -> None:
        leaves_out_base = self._config.checkpoint.trainable_only
        model = self._build()
        if leaves_out_base and not self.base:
            self.base = base_sha256(model)
        refuse_synchronized(model)
        refuse_sparse(model)
        self.frozen = prepare_for_training(model)  # names of modules that stay in evaluation mode
        if self._config.run.exact:
            refuse_running_statistics(model)
        if self._values is None:
            self._model = self.precision.convert(model)
        else:
            self._model = model
            self.precision.cast(model)
        self.precision.begin_anew()
        checkpoint_activations(self._model, self._config.memory.activation_checkpointing)
        self.compiled.take(self._model)
        self._optimizer = None
        self.hooks = Hooks(self._config.hooks, self.precision.device)
        self.held.begin_anew(lacks_weights=self._config.run.init_from is not None and not leaves_out_base)
        if self._values is not None:
            gc.collect()  # modules of FSDP refer to each other: without it the shards of the last world would stay

    def _build(self) -> nn.Module:
        """Build the model: without memory where its numbers will be sharded, else whole."""
        self._values = None
        # What a checkpoint leaves out must be there whatever is restored.
        is_sharded = not strategy_of(self._config.parallel).survivors_hold_all
        if is_sharded and not self._config.checkpoint.trainable_only and not self.built_whole_because:
            try:
                model, self._values = build_initial_sharded(self._config)
            except NotDeferrable as error:
                self.built_whole_because = str(error)
            else:
                return model
        model, self.loaded = build_initial(self._config)
        return model

    def load_initial(self) -> None:
        """Compute the initial values that are not there yet, and read the weights that the run starts from, if any."""
        run = self._config.run
        if self._values is not None and (run.init_from is None or not run.init_strict):
            self._values.fill(named_tensors(self._model))
        self.loaded = load_initial(self._model, run)

    def join(self, world: World) -> None:
        """Compute as all ranks of a world can, and learn what they have that differs. A collective.

        Raises UsageError if the ranks' bases differ: no state that they pass on would make them equal; or, in an exact
        run, the processors that they compute on.
        """
        if self._config.checkpoint.trainable_only:
            self._check_bases(world)
        if self.compiled.wanted:
            reasons = [""] * world.size
            dist.all_gather_object(reasons, self.compiled.refused, group=world.groups.control)
            self.uncompiled = {rank: reason for rank, reason in enumerate(reasons) if reason}
        device = self.precision.device
        self.gpus = gather_gpus(device, world.size, world.groups.control)
        if self._config.audit.recompute is not None or self._config.run.exact:
            self.kinds = self._gather_kinds(world)
        if self._config.run.exact:
            refuse_mixed(self.kinds)
        if self._config.precision.kind == "auto":  # no other follows from who is in the world
            self.precision = self._build_precision(device)
        self._part = world.part, world.shard
        self._goes_on_with_shards = world.shard > 1 and self._has_shards_of(world)

    def _gather_kinds(self, world: World) -> tuple[str, ...]:
        # Layers that are compiled add up in another order.
        own = kind_of(self.precision.device) + (", uncompiled" if self.compiled.refused else "")
        kinds: list[Any] = [None] * world.size
        dist.all_gather_object(kinds, own, group=world.groups.control)
        return tuple(kinds)

    def _check_bases(self, world: World) -> None:
        bases = [""] * world.size
        dist.all_gather_object(bases, self.base, group=world.groups.control)
        others = [rank for rank, found in enumerate(bases) if found != bases[0]]
        if others:
            raise UsageError(
                f"checkpoint.trainable_only: the frozen parameters of rank {others[0]} are others than those of "
                f"rank 0: sha256 {bases[others[0]][:12]}, not {bases[0][:12]}"
            )

    def _has_shards_of(self, world: World) -> bool:
        """Return whether this rank holds its part of a state that the ranks together hold all of. A collective."""
        same_steps = world.amendments.skip == self.amendments.skip
        holds = same_steps and self._shards is not None and self._shards.part == (world.part, world.shard)
        control = world.groups.control
        steps: list[int] = gather_numbers(self.step if holds else 0, control).tolist()
        newest = newest_whole(steps, world.shard)
        # A replica that has stood aside may be whole and far behind; what is in memory is newer. Of a step that was
        # interrupted, some ranks have made the update and others have not.
        furthest = int(gather_numbers(self.step, control).max())
        return holds and newest > 0 and newest >= furthest - 1

    def prepare(self, amendments: Amendments, parallel: Parallel) -> tuple[nn.Module, State]:
        """Begin an attempt: keep the state if it may be brought along, else start anew.

        Returns:
            The model as it is trained in this attempt, and live references to everything that a checkpoint holds.
        """
        # If other steps are skipped now, the state may contain an update from one of them, also where this worker did
        # not live to hear of it.
        same_steps = amendments.skip == self.amendments.skip
        is_whole = self.held.step is not None or self.held.untouched
        self.amendments = amendments
        if not parallel.survivors_hold_all:
            return self._prepare_shards(parallel)
        if not (same_steps and is_whole):
            self._start_anew()
        model = parallel.wrap(self._model)
        return model, self.state(parallel.unwrap(model))

    def _prepare_shards(self, parallel: Parallel) -> tuple[nn.Module, State]:
        """Shard a new model, whose groups are those of this world; it goes on with the old shards if it can."""
        from app.parallel.deferred import allocate  # takes a second to import, and sharded models alone need it

        step = self.step
        kept: State = self._shards.take() if self._shards is not None and self._goes_on_with_shards else {}
        self._shards = None  # before there are others
        self._start_anew()
        layers = blocks_of(self._model)  # before their classes get other names
        model = parallel.wrap(self._model)
        parallel.register_methods(model, getattr(self.task, "model_methods", ()))
        if self._config.memory.activation_checkpointing == "selective":
            refuse_parts_of_layers(layers)
        if self._values is not None:
            weights = {name: kept["model"][name] for name, _ in model.named_parameters()} if kept else {}
            allocate(model, self.precision.device, weights, parallel.offloads)
            self._values.fill(buffers_outside_state(self._model))
        if kept:
            NamedOptimizer(model, self.optimizer).adopt(kept.get("optimizer", {}))  # which may have no state
        state = self.state(parallel.unwrap(model))
        if kept and step:
            copy_state(kept, state)
            self.held.complete(step)
        self._shards = HeldShards(self._part, state)
        return model, state

    def memory(self, directory: RunDirectory) -> NodeMemory | None:
        """Return where snapshots of the run in `directory` lie; None where none are wanted."""
        if not self._config.checkpoint.node_memory:
            return None
        if self._memory is None:
            owner = None
            with contextlib.suppress(OSError):  # without storage's answer there is none that outlives this process
                owner = read_owner(directory.store)
            self.command = owner.token if owner else ""
            key = read_key(directory.store)
            self._memory = open_memory(owner, key, directory.uri, self._config.recovery.wait_s, self.precision.device)
        return self._memory

    def leave_run(self) -> None:
        """Give up what is kept for a worker to come: the run is over."""
        if self._memory is not None:
            self._memory.end()

    @property
    def step(self) -> int:
        """Return the step whose state the model and optimizer hold, 0 if none."""
        return self.held.step or 0

    def forget(self) -> None:
        """Take note that the state which the model and optimizer hold may be wrong: no other rank must be given it."""
        self.held.begin_overwriting()

    def advance_to(self, step: int) -> None:
        """Take note that the model and optimizer hold the state of `step`."""
        self.held.complete(step)
        if step not in self.amendments.skip:
            self.hooks.on_step(step)

    def state(self, model: nn.Module) -> State:
        """Return live references to everything that a checkpoint holds, from the model as the strategy unwraps it."""
        self.hooks.setup(model, self.optimizer)
        optimizer = NamedOptimizer(model, self.optimizer)
        held = ModelState(model, self._config.checkpoint.trainable_only)
        return app_state({"model": held, "optimizer": optimizer, "precision": self.precision, "hooks": self.hooks})

    def last_state(self) -> State:
        """Return live references to what this rank holds of the state of `step`, also after an attempt has broken."""
        if self._shards is not None:
            # Not from the model: a forward that was interrupted may have left gathered parameters in it.
            return self.current(self._shards.state)
        return self.state(self._model)

    def current(self, state: State) -> State:
        """Return a state of `state` with what hooks have changed since: only they keep numbers of their own."""
        self.hooks.state_dict()
        return state

    def trigger(self, name: str, every: Every | None, age_s: float = 0.0) -> Interval:
        """Return the trigger of a periodic act, last carried out `age_s` ago or more, for another attempt."""
        # The same one for all attempts: with a clock of its own, each of many short attempts would put the act off.
        if name not in self._triggers:
            self._triggers[name] = Interval(every, self.order.num_train, self._samples_up_to)
        self._triggers[name].begin(age_s)
        return self._triggers[name]

    def _samples_up_to(self, step: int) -> int:
        """Return the number of samples in the steps up to `step`, those that are left out too."""
        return begin_of(step + 1, self._config.batch.global_size, self.amendments.ends)

    def close_later(self, close: Callable[[], object]) -> None:
        """Have `close` called when the attempt is over, however it ends."""
        self._closing.append(close)

    def close_attempt(self) -> None:
        """Close what the attempt has opened. Before the next one, whose leader reads what this one has written."""
        while self._closing:
            self._closing.pop()()

    @property
    def num_steps(self) -> int:
        """Return the length of the run in optimizer steps."""
        return self._config.run.num_steps(self.order.num_train, self._config.batch.global_size, self.amendments.ends)

    def fix_microbatch_size(self, size: int) -> None:
        """Take note of the size of a microbatch in this run."""
        self.batch = self.batch.with_microbatches_of(size)

    def plan(self, world: World) -> Plan:
        """Return the plan of the steps of an attempt, with even shares."""
        return Plan.even(
            self.batch.global_size,
            self.batch.samples_per_microbatch,
            world.size,
            world.shard,
            num_samples=self._config.run.num_samples(self.order.num_train),
            skip=self.amendments.skip,
            ends=self.amendments.ends,
        )

    def validation_plan(self, world: World) -> Plan | None:
        """Return the plan of the samples that are held out, None if none are: one step, or global batches.

        A loss over the global batch follows from the number of its samples.
        """
        size = self.loader.num_validation
        if not size:
            return None
        step_size = self.batch.global_size if isinstance(self.task, GlobalTask) else size
        return Plan.even(step_size, self.batch.samples_per_microbatch, world.size, world.shard, num_samples=size)

    def example(self) -> Batch:
        """Return a microbatch of real samples, on the device."""
        return self.loader.example(min(self.batch.samples_per_microbatch, self.order.num_train))


def fingerprint(dataset: Dataset) -> str:
    """Return what tells one dataset from another, at the cost of two samples."""
    # Resuming with other data would break every promise on the order of samples; reading all of it would take hours.
    digest = hashlib.sha256(str(len(dataset)).encode())
    for index in (0, len(dataset) - 1):
        # Without a seed, a dataset that augments would look like another one each time.
        with own_randomness(0):
            sample = stack([dataset[index]])
        for tensor in tensors_of(sample):
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
