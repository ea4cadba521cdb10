"""Training loop of one worker for one attempt."""

from functools import partial

from steadfast.balance.shares import build_balance
from steadfast.checkpoint.agreement import Agreement
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints, Fingerprints
from steadfast.checkpoint.restore import restore
from steadfast.checkpoint.snapshots import Snapshots
from steadfast.guards.draws import task_of_steps
from steadfast.guards.guard import CountCheck, Guard
from steadfast.guards.numerics import Numerics
from steadfast.guards.recompute import build_choice, build_recompute
from steadfast.guards.suspects import SuspectFinder
from steadfast.injection.inject import Faults
from steadfast.injection.probes import build_probes
from steadfast.loop.microbatch_size import SizeSearch
from steadfast.loop.periodic import Periodic
from steadfast.loop.task_check import check_task, check_watched_metrics
from steadfast.loop.validate import Validator
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import build_parallel
from steadfast.plan import Plan
from steadfast.run.directory import RunDirectory
from steadfast.run.ledger import PastLosses, past_losses
from steadfast.step.global_step import build_stepper
from steadfast.step.recompute_step import RecomputeStepper
from steadfast.telemetry.recorder import Recorder
from steadfast.telemetry.startup import StartupTimer
from steadfast.world.control import ControlChannel
from steadfast.world.runtime import Outcome, Runtime, World


def train(runtime: Runtime, world: World, worker: WorkerState, directory: RunDirectory, timer: StartupTimer) -> Outcome:
    """Run one attempt, from building the model to its end.

    Every attempt begins in the same way, whatever ended the last one.
    """
    # Build. `worker` keeps objects of the process across attempts; everything else belongs to this attempt.
    config = worker.config
    parallel = build_parallel(config.parallel, world, worker.precision)
    memory = worker.memory(directory)
    worker.copy_shards(world, memory)
    model, state = worker.prepare(world, parallel)
    catalog = Catalog(directory.store, config.checkpoint)
    fingerprints = Fingerprints(worker.fingerprint, worker.base)
    checkpoints = Checkpoints(catalog, world, parallel, worker.writer, fingerprints)
    snapshots = Snapshots(world, memory, parallel, state, config.checkpoint.lose_at_most, "".join(fingerprints))
    timer.mark("built")

    # Restore the newest of a survivor's state, a copy in memory, a checkpoint and step 0, the same on every rank.
    # A hook may have unfrozen parameters before, which a model that is built anew does not train.
    extend = partial(worker.train_as_stored, state=state, parallel=parallel) if worker.has_own_hooks else None
    restored = restore(state, worker.held, worker.load_initial, checkpoints, snapshots, extend)
    world.progress.resume(restored.step)
    checkpoints.reserve(state)

    # Hooks start before the first forward, because a task may need what its hook prepares.
    recorder = Recorder(directory, runtime, world, worker)
    worker.hooks.begin(restored.step, worker.num_steps, world, recorder.figures)

    # Plan. Cut each step into microbatches of the run's size, and assign the microbatches to ranks. The balance may
    # change the shares of the plan, so all later parts read the plan after it.
    world.progress.enter("plan")
    if config.batch.microbatch_size == "auto":
        SizeSearch(worker, world, parallel, model).fix(directory, runtime)
    plan = worker.plan(world)
    balance = build_balance(config.batch.balance, config.parallel.kind, plan, worker.loader.num_ahead, world, runtime)
    check_task(worker, world, parallel, model)
    check_watched_metrics(worker, world, parallel, model)
    validator = Validator(worker, parallel, world)

    # Build the step. Without injected faults and timing the probes pass everything on unchanged.
    probes = build_probes(Faults(config.faults.inject, directory, world, runtime), balance, world.progress)
    task = probes.task(task_of_steps(worker.task, config.batch, worker.precision.device))
    choice = build_choice(config.recompute, config.run, world, plan, worker.kinds)
    if choice is None:
        stepper = build_stepper(worker, task, world, plan, parallel, model)
    else:
        recompute = build_recompute(choice, partial(probes.repeating, worker.loader), parallel, runtime, world)
        stepper = RecomputeStepper(worker, task, world, plan, parallel, model, recompute)
    timer.mark("restored")

    # Step until the run or the attempt ends. All ranks learn of a request after the same step.
    guard = _build_guard(worker, world, plan, runtime, past_losses(directory.store, restored.step))
    recorder.checkpoints(checkpoints.news())
    recorder.begin(plan, restored, timer, snapshots)
    validator.resume(restored.step, recorder.metrics)

    def validate(step: int) -> None:
        recorder.validation(step, validator.run(step, model))

    agreement = Agreement(checkpoints, worker.writer, directory, runtime)

    def save(step: int, ending: Outcome | None = None) -> None:
        # The last message shows whether this state is finite. A state that is not must not become a checkpoint.
        recorder.commit(guard.accept(control.drain()))
        probes.enter("checkpoint")
        metrics = validator.metrics_of(step)
        if not checkpoints.has(step, metrics):
            worker.hooks.on_checkpoint(step)
        agreement.check(step, worker.current(state), at_end=ending is not None)
        checkpoints.save(step, worker.current(state), metrics, ending, config.recovery.wait_s)
        recorder.checkpoints(checkpoints.news())

    # A checkpoint comes after the validation of its step, because the manifest holds the metrics.
    periodic = Periodic(world.leader, lambda: worker.at_end)
    periodic.add("validation", validator.trigger, validate)
    periodic.add("snapshot", snapshots, lambda step: recorder.snapshot(snapshots.take(step, worker.current(state))))
    saving = validator.checkpoint_trigger(restored.age_s, recorder.is_left_on_one_node)
    periodic.add("checkpoint", saving, save)
    periodic.add("gradient_norms", recorder.norms_trigger, lambda step: recorder.gradient_norms(result))
    control = ControlChannel(world.groups.control, worker.precision.lag_steps, periodic.names, probes)
    world.progress.reading = lambda: worker.loader.reading()
    batches = probes.batches(worker.loader.steps(plan.stream(world.data_rank, restored.step + 1, worker.num_steps)))
    # A worker may have died in the validation or checkpoint that was due after the restored step.
    step = restored.step
    if step and not worker.at_end and validator.trigger.due(step):
        validate(step)
    if step and not worker.at_end and saving.due(step) and checkpoints.lacks(step, validator.metrics_of(step)):
        save(step)
    while not (worker.at_end or control.ending):
        worker.follow_requires_grad(worker.step + 1, state, parallel, world)
        result = stepper.step(worker.step + 1, batches)
        worker.advance_to(result.step)
        recorder.ran(result)
        requests = periodic.requests(agreement.signals(probes.signals(runtime.signals())))
        recorder.commit(guard.accept(control.exchange(result, requests)))
        periodic.run(worker.step, control)
        recorder.checkpoints(checkpoints.news())

    # Leave. Under DDP the survivors carry the state to the next world; a sharded state is written and copied.
    recorder.commit(guard.accept(control.drain()))
    outcome = Outcome.of(worker.step, worker.at_end, control.requested)
    recorder.validation(outcome.step, validator.at_end(outcome, model))
    if outcome.needs_checkpoint(parallel.survivors_hold_all, control.requested):
        save(outcome.step, ending=outcome)
    recorder.snapshot(snapshots.hand_over(outcome, worker.current(state)))
    worker.hooks.end(outcome, world)
    recorder.end(outcome, parallel.whole(model), worker.current(state))
    return outcome


def _build_guard(worker: WorkerState, world: World, plan: Plan, runtime: Runtime, losses: PastLosses) -> Guard:
    config = worker.config
    task = getattr(config.task, "target", config.task.kind)
    numerics = Numerics(config.recovery, world.amendments.skip, losses)
    counts = CountCheck(task, plan, worker.units_per_unmasked_sample)
    return Guard(numerics, counts, SuspectFinder(task, plan, worker.loader, world), runtime, world)
