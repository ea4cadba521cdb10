"""State that a worker process keeps from one attempt to the next."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from steadfast.checkpoint.initial import build_initial, build_initial_sharded, load_initial
from steadfast.checkpoint.model_check import refuse_lossy_copies, refuse_unsaved
from steadfast.checkpoint.node_memory import NodeMemory, open_memory
from steadfast.checkpoint.snapshots import copy_shards
from steadfast.checkpoint.state import (
    HeldShards,
    HeldState,
    ModelState,
    NamedOptimizer,
    RequiresGrad,
    State,
    Stateful,
    app_state,
    base_sha256,
    buffers_outside_state,
    copy_state,
    named_tensors,
    newest_whole,
)
from steadfast.checkpoint.writer import Writer
from steadfast.config import Config, EmaConfig, Every, Target, TargetOptimizer, TaskConfig, TensorSection
from steadfast.data import Extent, Loader, build_dataset, build_order
from steadfast.data.batches import Batch
from steadfast.data.randomness import own_randomness
from steadfast.errors import NotDeferrable, SteadfastError, TrainingError, UsageError
from steadfast.hooks.hooks import Hooks
from steadfast.loop.buffers import Effects, refuse_layers
from steadfast.loop.modes import prepare_for_training
from steadfast.loop.side_effects import undone
from steadfast.loop.trigger import Interval
from steadfast.optim.optimizer import PEAK, build_optimizer, extend_optimizer, refuse_sparse
from steadfast.optim.optimizer_trial import try_optimizer
from steadfast.optim.own_optimizer import parameters_of
from steadfast.parallel import Parallel
from steadfast.parallel.activations import checkpoint_activations, refuse_parts_of_layers
from steadfast.parallel.blocks import blocks_of, stop_caching
from steadfast.parallel.compiled import CompiledBlocks, probe
from steadfast.parallel.fixed_point import FixedPoint
from steadfast.parallel.precision import Precision, build_precision
from steadfast.parallel.stages import Outline, examine, lend_memory, set_outline
from steadfast.parallel.tensor import examine_split, layers_of_plan
from steadfast.plan import Amendments, Plan, begin_of
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import read_key, read_owner
from steadfast.tasks import Sums, build_task
from steadfast.tasks.own import GlobalTask
from steadfast.world.control import gather_numbers, gather_objects
from steadfast.world.device import Gpu, gather_gpus
from steadfast.world.hardware import kind_of, refuse_mixed
from steadfast.world.runtime import World

if TYPE_CHECKING:
    from steadfast.parallel.deferred import InitialValues


class WorkerState:
    """Data, model and optimizer of a worker process, kept across attempts.

    Other modules read the fields; only this class writes them.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.gpus: tuple[Gpu, ...] = ()  # of all ranks of the world
        self.kinds: tuple[str, ...] = ()  # hardware of all ranks, which must be equal for equal bits; set if needed
        # An exact run sums gradients as integers, independently of the world. The integers' unit is part of the state.
        self._fixed_point = FixedPoint(config.batch.global_size, device) if config.run.exact else None
        self.precision = self._build_precision(device)  # provisional until `join` knows the world
        self.compiled = CompiledBlocks(config.compile)
        self.uncompiled: dict[int, str] = {}  # rank -> why the rank compiles nothing although it should
        # User code may draw random numbers while it builds task or data, as `random_split` does; all ranks must agree.
        with own_randomness(config.run.seed):
            self.task = build_task(config.task)
        self.compiled.take_loss(self.task)
        self.task_checked = False  # see `check_task`
        self.watched_checked = False  # see `check_watched_metrics`
        with own_randomness(config.run.seed):
            self.dataset = build_dataset(config.data)
        # The loss count of a sample without masking, and whether samples may be masked.
        self.units_per_sample: int = getattr(self.dataset, "units_per_sample", 1)
        self.counts_vary: bool = getattr(self.dataset, "counts_vary", True)
        self.order = build_order(config.data, Extent.of(self.dataset), config.run.seed)
        param_dtype = self.precision.param_dtype  # does not depend on the world
        # A task of the user's own may have other integers in its batches.
        vocab_size = getattr(config.model, "vocab_size", None) if isinstance(config.task, TaskConfig) else None
        self.loader = Loader(self.dataset, self.order, config.data, device, param_dtype, vocab_size)
        size = config.batch.microbatch_size
        if size == "auto":
            self.loader.check_validation(2)
        else:
            self.loader.check_validation(min(size, self.order.num_train))
        self.fingerprint = self.loader.fingerprint()
        self.batch = config.batch  # its microbatch_size is a number once `fix_microbatch_size` was called
        self.effects = Effects()  # of forwards on model and task
        self.held = HeldState()  # the step whose state `model` and `optimizer` hold
        self.amendments = Amendments()  # of the current attempt
        self.base = ""  # sha256 of the frozen parameters, if checkpoints leave them out
        # The writer outlives an attempt, so that the next attempt finishes a pending checkpoint.
        self.writer = Writer()
        self._memory: NodeMemory | None = None
        self.command = ""  # token of the command that started this process; "" if unknown
        self._triggers: dict[str, Interval] = {}
        self._closing: list[Callable[[], object]] = []
        self.built_whole_because = ""  # why a sharded model could not be built without memory at first
        self._values: InitialValues | None = None  # initial values of a model that was built without memory
        self._shards: HeldShards | None = None  # of the last attempt
        self._goes_on_with_shards = False
        self._shards_move = False  # the last world's replicas had other parts, or none of them is complete
        self._outline: Outline | None = None  # of the model, in a pipeline
        self._examined = False  # whether workers can divide the computation of a sample, see `_examine`
        self._frozen: dict[str, nn.Parameter] = {}  # parameters that the optimizer does not update
        self._model: nn.Module
        self._optimizer: torch.optim.Optimizer | None
        self._start_anew()
        if isinstance(config.optimizer, TargetOptimizer):
            self._try_optimizer(config.optimizer)
        self._warm_up()

    def _build_precision(self, device: torch.device) -> Precision:
        return build_precision(self.config.precision, device, self.gpus, self._fixed_point)

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def units_per_unmasked_sample(self) -> int | None:
        """Return the loss count of every sample, None if samples may be masked."""
        return None if self.counts_vary else self.units_per_sample

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of `model`, built on the first call."""
        if self._optimizer is None:
            self._optimizer = build_optimizer(self.config.optimizer, self._model)
        return self._optimizer

    def _try_optimizer(self, config: TargetOptimizer) -> None:
        """Refuse a user's optimizer that would train differently here."""
        sharded = not self.config.parallel.survivors_hold_all
        try_optimizer(config, self._model, self.precision.device, self.precision.param_dtype, sharded)

    def _warm_up(self) -> None:
        """Import modules that the first step needs, before joining a world."""
        # Running workers would otherwise wait over a second for imports, most of which torch starts in an optimizer.
        if self.config.parallel.survivors_hold_all:
            self.state(self._model)
        else:
            # Not with the real model, which is not sharded yet: its state may exceed the memory of the device.
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        if self.config.parallel.ranks_per_sample > 1:
            # Code that asks for its rank fails without a world. `prepare` tries again there.
            try:
                self._examine()
            except SteadfastError:
                raise
            except Exception:
                self._examined = False
        self._compile_ahead()

    def _examine(self) -> None:
        """Run forwards of the whole model, which has to be built anew afterwards.

        Raises UsageError if several workers cannot compute the same samples together.
        """
        parallel = self.config.parallel
        if isinstance(self.task, GlobalTask):
            key = "parallel.kind=pipeline" if parallel.has_stages else "parallel.tensor_size"
            raise UsageError(f"{key}: a task with embed and loss(embeddings) needs the whole model")
        device = self.precision.device
        if self._values is not None:
            lend_memory(self._model, device)
            self._values.fill(dict(self._model.named_buffers()))
        batch = self.loader.example(min(2, self.batch.samples_per_microbatch, self.order.num_train))

        def run() -> Sums:
            with self.precision.autocast():
                return self.task.loss(self._model, batch)

        with (
            undone(nn.Module(), self.task),
            own_randomness(0),
            torch.random.fork_rng([device], enabled=device.type == "cuda"),
        ):
            if isinstance(parallel, TensorSection) and parallel.has_tensor_parts:
                for num_parts in parallel.tensor_sizes:
                    layers = layers_of_plan(self._model, parallel.plan, num_parts)
                    examine_split(self._model, layers, num_parts, run, device)
            if parallel.has_stages:
                self._outline = examine(self._model, run, device)
        self._examined = True

    def _compile_ahead(self) -> None:
        """Compile the layers before this worker joins a world.

        While the shapes of parameters or inputs are unknown, this method only tests that the compiler works.
        """
        if not self.compiled.wanted:
            return
        if self.config.parallel.survivors_hold_all and self.batch.microbatch_size != "auto":
            self.compiled.try_out(partial(self._run_once, self.example()))
        else:
            self.compiled.try_out(partial(probe, self.precision.device))

    def _run_once(self, batch: Batch) -> None:
        """Run a forward and backward without side effects."""
        with undone(self._model, self.task):
            with self.precision.autocast():
                loss = self.task.loss(self._model, batch).loss_sum
            self.precision.backward(loss * 0.0)
        self._model.zero_grad(set_to_none=True)

    def _start_anew(self) -> None:
        leaves_out_base = self.config.checkpoint.trainable_only
        model = self._build()
        refuse_unsaved(model, self.config.parallel.survivors_hold_all)
        if leaves_out_base and not self.base:
            self.base = base_sha256(model)
        refuse_sparse(model)
        if self.config.data.has_documents:
            stop_caching(model)  # with a cache, models of Hugging Face would attend to other documents
        self.frozen = prepare_for_training(model)  # names of modules that stay in evaluation mode
        refuse_layers(model, self.config.run.exact, self.config.batch.balance == "even_samples")
        if self._values is None:
            self._model = self.precision.convert(model)
            refuse_lossy_copies(self._model)
        else:
            self._model = model
            self.precision.cast(model)
        self.precision.begin_anew()
        checkpoint_activations(self._model, self.config.memory.activation_checkpointing)
        self.compiled.take(self._model)
        self._optimizer = None
        self.hooks = Hooks(self.config.hooks, self.precision.device)
        self.held.begin_anew(lacks_weights=self.config.run.init_from is not None and not leaves_out_base)
        # FSDP modules form reference cycles, which would keep the shards of the last world in memory.
        if self._values is not None:
            gc.collect()

    def _build(self) -> nn.Module:
        """Build the model; a model to be sharded gets no memory."""
        self._values = None
        # With `trainable_only` the frozen weights are in no checkpoint, so the model is built with its weights.
        is_sharded = not self.config.parallel.survivors_hold_all
        if is_sharded and not self.config.checkpoint.trainable_only and not self.built_whole_because:
            try:
                model, self._values = build_initial_sharded(self.config)
            except NotDeferrable as error:
                self.built_whole_because = str(error)
            else:
                return model
        model, self.loaded = build_initial(self.config)
        return model

    def load_initial(self) -> None:
        """Compute missing initial values, and read the configured starting weights."""
        run = self.config.run
        if self._values is not None and (run.init_from is None or not run.init_strict):
            self._values.fill(named_tensors(self._model))
        self.loaded = load_initial(self._model, run)
        self.held.refresh()

    def join(self, world: World) -> None:
        """Exchange properties of the ranks and choose the common precision. A collective.

        Raises UsageError if the ranks have different frozen parameters, which no shared state would make equal, or, in
        an exact run, different processors.
        """
        if self.config.checkpoint.trainable_only:
            self._check_bases(world)
        if self.compiled.wanted:
            refused = gather_objects(self.compiled.refused, world.groups.control)
            self.uncompiled = {rank: reason for rank, reason in enumerate(refused) if reason}
        device = self.precision.device
        self.gpus = gather_gpus(device, world.size, world.groups.control)
        if self.config.recompute.every is not None or self.config.run.exact:
            self.kinds = self._gather_kinds(world)
        if self.config.run.exact:
            refuse_mixed(self.kinds)
        # Only `auto` depends on which GPUs are in the world.
        if self.config.precision.kind == "auto":
            self.precision = self._build_precision(device)
        if not self.config.parallel.survivors_hold_all:
            self._compare_shards(world)

    def _gather_kinds(self, world: World) -> tuple[str, ...]:
        own = kind_of(self.precision.device)
        # Compiled layers sum in another order than uncompiled ones.
        if self.compiled.refused:
            own += ", uncompiled"
        return tuple(gather_objects(own, world.groups.control))

    def _check_bases(self, world: World) -> None:
        bases = gather_objects(self.base, world.groups.control)
        for rank, base in enumerate(bases):
            if base != bases[0]:
                raise UsageError(
                    f"checkpoint.trainable_only: the frozen parameters of rank {rank} differ from those of "
                    f"rank 0: sha256 {base[:12]}, not {bases[0][:12]}"
                )

    def _compare_shards(self, world: World) -> None:
        """Find out whether this rank's shards remain valid, or move to other ranks. A collective."""
        if world.amendments.skip != self.amendments.skip:
            self._shards = None
        if self._shards is not None:
            self.current(self._shards.state)  # an attempt that was interrupted has not noted its hooks' numbers
        in_place = world.replica_size > 1 and self._shards is not None and self._shards.world.box == world.box
        control = world.groups.control
        steps: list[int] = gather_numbers(self.step if in_place else 0, control).tolist()
        newest = newest_whole(steps, world.replica_size)
        # A complete replica of a rank that was left out may be far behind, and memory holds a newer state. After an
        # interrupted step some ranks have made the update and some have not, hence the 1.
        furthest = int(gather_numbers(0 if self._shards is None else self.step, control).max())
        is_whole = newest > 0 and newest >= furthest - 1
        self._goes_on_with_shards = in_place and is_whole
        self._shards_move = furthest > 0 and not is_whole

    def copy_shards(self, world: World, memory: NodeMemory | None) -> None:
        """Copy shards that move to `memory`, as parts of a snapshot of the last world. A collective if shards move."""
        if not self._shards_move or memory is None:
            return
        part = None
        if self._shards is not None and self.step:
            part = self.step, self._shards.world.attempt, self._shards.world.part
        parts = gather_objects(part, world.groups.control)
        # Of several ranks with the same part one is enough. Without memory the restore finds older copies.
        if part is not None and self._shards is not None and parts.index(part) == world.rank:
            with contextlib.suppress(OSError):
                copy_shards(self._shards, self.step, memory, self.fingerprint + self.base, self.amendments.skip)

    def prepare(self, world: World, parallel: Parallel) -> tuple[nn.Module, State]:
        """Begin an attempt with a valid held state, or anew.

        Returns:
            the model to train in this attempt, and live references to everything that a checkpoint holds.
        """
        # If other steps are skipped now, the state may contain an update from one of them, even if this worker ended
        # before it learned of that.
        same_steps = world.amendments.skip == self.amendments.skip
        is_whole = self.held.step is not None or self.held.untouched
        self.amendments = world.amendments
        if not parallel.survivors_hold_all:
            return self._prepare_shards(world, parallel)
        if not (same_steps and is_whole):
            self._start_anew()
        model = parallel.wrap(self._model)
        return model, self.state(parallel.unwrap(model))

    def _prepare_shards(self, world: World, parallel: Parallel) -> tuple[nn.Module, State]:
        """Shard a new model, filled from old shards if these are valid."""
        # The import takes a second, and only sharded models need it.
        from steadfast.parallel.deferred import allocate

        step = self.step
        kept: State = {}
        if self._shards is not None and self._goes_on_with_shards:
            kept = self._shards.take()
        self._shards = None  # releases the old shards before new ones are allocated
        self._start_anew()
        if self.config.parallel.ranks_per_sample > 1 and not self._examined:
            self._examine()
            self._start_anew()
        if self._outline is not None:
            set_outline(self._model, self._outline)
        # Found before the model is wrapped, which changes the names of the layers' classes.
        layers = blocks_of(self._model)
        model = parallel.wrap(self._model)
        parallel.register_methods(model, getattr(self.task, "model_methods", ()))
        if self.config.memory.activation_checkpointing == "selective":
            refuse_parts_of_layers(layers)
        if self._values is not None:
            weights: dict[str, Tensor] = {}
            if kept:
                for name, _ in model.named_parameters():
                    weights[name] = kept["model"][name]
            allocate(model, self.precision.device, weights, parallel.offloads)
            self._values.fill(buffers_outside_state(self._model))
        if kept:
            NamedOptimizer(model, self.optimizer).adopt(kept.get("optimizer", {}))  # some optimizers have no state
        state = self.state(parallel.unwrap(model))
        if kept and step:
            copy_state(kept, state)
            self.held.complete(step)
        self._shards = HeldShards(world, state)
        return model, state

    def memory(self, directory: RunDirectory) -> NodeMemory | None:
        """Return the node memory for snapshots, None if `checkpoint.node_memory` is off."""
        if not self.config.checkpoint.node_memory:
            return None
        if self._memory is None:
            owner = None
            # Without an owner the memory ends with this process.
            with contextlib.suppress(OSError):
                owner = read_owner(directory.store)
            self.command = owner.token if owner else ""
            key = read_key(directory.store)
            self._memory = open_memory(owner, key, directory.uri, self.config.recovery.wait_s, self.precision.device)
        return self._memory

    def leave_run(self) -> None:
        """Release the copies in node memory, because the run is over."""
        if self._memory is not None:
            self._memory.end()

    @property
    def step(self) -> int:
        """Return the step whose state model and optimizer hold, 0 if none."""
        return self.held.step or 0

    def forget(self, copies: bool) -> None:
        """Mark the held state as possibly wrong, and its copies in memory: no rank may copy this state."""
        self.held.begin_overwriting()
        if copies and self._memory is not None:
            with contextlib.suppress(OSError):
                self._memory.keep(())

    def advance_to(self, step: int) -> None:
        """Record that model and optimizer hold the state of `step`."""
        self.held.complete(step)
        if step not in self.amendments.skip:
            # Gradient buckets are cleared in place, and a hook would take their zeros for the gradients of the step.
            params = list(self._model.parameters()) if self.hooks.acts_on_steps else []
            gradients = [param.grad for param in params]
            try:
                for param in params:
                    param.grad = None
                self.hooks.on_step(step)
            finally:
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient

    def state(self, model: nn.Module) -> State:
        """Return live references to everything that a checkpoint holds.

        `model` is the model as the parallel strategy unwraps it.
        """
        self.hooks.setup(model, self.optimizer)
        weights = ModelState(model, self.config.checkpoint.trainable_only)
        parts: dict[str, Stateful] = {"model": weights, "optimizer": NamedOptimizer(model, self.optimizer)}
        parts |= {"precision": self.precision, "hooks": self.hooks}
        self.held.copied = [weights]
        trained = set(parameters_of(self.optimizer.param_groups))
        self._frozen = {name: param for name, param in model.named_parameters() if param not in trained}
        # A stage may lack parameters.
        if self.has_own_hooks and not self.config.parallel.has_stages:
            parts["requires_grad"] = flags = RequiresGrad(model, self.precision.device)
            self.held.copied.append(flags)
        return app_state(parts)

    @property
    def has_own_hooks(self) -> bool:
        """Return whether hooks of the user may change which parameters train."""
        return any(isinstance(hook, Target) for hook in self.config.hooks)

    def train_as_stored(self, stored: Collection[str], state: State, parallel: Parallel) -> None:
        """Train the parameters of which a stored state, given by its names of tensors, has optimizer state."""
        names = [name for name in self._frozen if any(each.startswith(f"optimizer.{name}.") for each in stored)]
        if names:
            self.train_also(names, state, parallel)

    def follow_requires_grad(self, step: int, state: State, parallel: Parallel, world: World) -> None:
        """Train the parameters that hooks have unfrozen, from `step` on. A collective if there are any."""
        unfrozen = [name for name, param in self._frozen.items() if param.requires_grad]
        if not unfrozen:
            return
        if any(names != unfrozen for names in gather_objects(unfrozen, world.groups.control)):
            raise TrainingError(f"before step {step} hooks of some ranks have unfrozen {unfrozen[0]}, of others not")
        self.train_also(unfrozen, state, parallel, f" at step {step}")

    def train_also(self, names: Collection[str], state: State, parallel: Parallel, when: str = "") -> None:
        """Give frozen parameters gradients, and entries in the optimizer and in `state`.

        Raises:
            UsageError: these parameters can train only from the beginning.
        """
        added = [self._frozen[name] for name in names]
        for param in added:
            param.requires_grad_(True)
        trained = {*parameters_of(self.optimizer.param_groups), *added}
        why = ""
        if self.config.checkpoint.trainable_only:
            why = "checkpoint.trainable_only leaves it out of checkpoints"
        elif not self.has_own_hooks:
            why = "the task or the model has done that, which only a hook may do"
        elif any(isinstance(hook, EmaConfig) for hook in self.config.hooks):
            why = "the hook ema has no average of it"
        elif any(PEAK not in group for group in self.optimizer.param_groups):
            why = "a hook has given the optimizer a group for it, which no resume would have (use optimizer.groups)"
        elif not parallel.train_also([param for param in self._model.parameters() if param in trained]):
            why = f"parallel.kind={self.config.parallel.kind} (reducer=torch, pipeline) has no gradient of it"
        if why:
            raise UsageError(
                f"the parameter {next(iter(names))} was frozen when the model was built, and is not{when}: {why}. "
                "Build the model with all that will ever train unfrozen, and freeze it in a hook's on_start"
            )
        extend_optimizer(self.optimizer, self.config.optimizer, self._model, added)
        optimizer = NamedOptimizer(self._model, self.optimizer).state_dict()
        state.setdefault("optimizer", {}).update(optimizer)
        for name in names:
            del self._frozen[name]

    def last_state(self) -> State:
        """Return live references to this rank's state, even after a failure."""
        if self._shards is not None:
            # Not from the model, in which an interrupted forward may have left gathered parameters.
            return self.current(self._shards.state)
        return self.state(self._model)

    def current(self, state: State) -> State:
        """Return `state` with the current numbers of all hooks, and of the model where they are copies."""
        self.hooks.state_dict()
        self.held.refresh()
        return state

    def trigger(self, name: str, every: Every | None, age_s: float = 0.0) -> Interval:
        """Return the trigger of a periodic act for another attempt.

        The act was last carried out at least `age_s` seconds ago.
        """
        # All attempts share one trigger: with a clock of its own, each of many short attempts would postpone the act.
        if name not in self._triggers:
            self._triggers[name] = Interval(every, self.order.num_train, self._samples_up_to)
        self._triggers[name].begin(age_s)
        return self._triggers[name]

    def _samples_up_to(self, step: int) -> int:
        """Return the number of samples up to `step`, skipped steps included."""
        return begin_of(step + 1, self.config.batch.global_size, self.amendments.ends)

    def close_later(self, close: Callable[[], object]) -> None:
        """Call `close` at the end of the attempt, after any outcome."""
        self._closing.append(close)

    def close_attempt(self) -> None:
        """Close everything that the attempt opened, before another leader reads its files."""
        while self._closing:
            self._closing.pop()()

    @property
    def num_steps(self) -> int:
        """Return the length of the run in optimizer steps."""
        return self.config.run.num_steps(self.order.num_train, self.config.batch.global_size, self.amendments.ends)

    @property
    def at_end(self) -> bool:
        """Return whether the run ends after the held step, by its length or by a hook."""
        return bool(self.hooks.ended_early) or self.step >= self.num_steps

    def fix_microbatch_size(self, size: int) -> None:
        """Record the size of a microbatch in this run."""
        self.batch = self.batch.with_microbatches_of(size)

    def plan(self, world: World) -> Plan:
        """Return the plan of an attempt's steps, as it is before `build_balance`."""
        num_samples = self.config.run.num_samples(self.order.num_train)
        batch = self.batch
        plan = batch.plan_kind.even(
            batch.global_size, batch.samples_per_microbatch, world.data_size, world.shard_size, num_samples
        )
        return plan.amended(self.amendments)

    def validation_plan(self, world: World, num_samples: int = 0) -> Plan | None:
        """Return the plan of the first `num_samples` held-out samples, 0 for all; None if there are none.

        The plan has one step, or one step per global batch for a loss that depends on the size of its batch.
        """
        size = num_samples or self.loader.num_validation
        if not size:
            return None
        step_size = self.batch.global_size if isinstance(self.task, GlobalTask) else size
        return Plan.even(step_size, self.batch.samples_per_microbatch, world.data_size, world.shard_size, size)

    def example(self) -> Batch:
        """Return a microbatch of real samples on the device."""
        return self.loader.example(min(self.batch.samples_per_microbatch, self.order.num_train))
