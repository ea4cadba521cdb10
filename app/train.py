"""The page: one attempt at the run, as one worker sees it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from time import perf_counter

from app.agree import ControlWord, Flags
from app.balance import build_balance
from app.checkpoint.durable import Checkpoints
from app.checkpoint.restore import NO_STATE, restore
from app.checkpoint.snapshots import Snapshots
from app.checkpoint.state import app_state
from app.config import Config
from app.errors import StorageError
from app.faults.inject import Faults
from app.faults.numerics import left_out
from app.kept import Kept
from app.optim import build_optimizer, learning_rate
from app.parallel import build_parallel
from app.rundir import RunDirectory
from app.runtime import Outcome, Runtime, World
from app.step import Stepper
from app.telemetry.phases import Phases
from app.telemetry.recorder import Recorder
from app.validate import validate


def train(
    config: Config, runtime: Runtime, world: World, kept: Kept, directory: RunDirectory, phases: Phases
) -> Outcome:
    """One attempt. Whatever ended the last one, this one begins the same way: build, restore, go on."""
    parallel = build_parallel(config, world, kept.precision)
    kept.leave_out(world.skip)
    plan = kept.plan(world.size, parallel.lockstep)
    held_out = kept.validation_plan(world.size, parallel.lockstep)
    balance = build_balance(config, plan, kept.loader.num_ahead, world, runtime)
    faults = Faults(config.faults.inject, directory, world, runtime)
    if not parallel.replicated or kept.held == NO_STATE:
        kept.forget()
    model = parallel.wrap(kept.model)
    kept.optimizer = optimizer = kept.optimizer or build_optimizer(config.optimizer, kept.model)
    stepper = Stepper(
        model,
        optimizer,
        balance.task(faults.task(kept.task)),
        parallel,
        kept.precision,
        units_per_sample=kept.units_per_sample,
        counts_vary=kept.counts_vary,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=config.run.seed,
        progress=world.progress,
    )
    state = app_state(parallel.plain(model), optimizer)
    checkpoints = faults.store(
        Checkpoints(config, directory, world, kept.fingerprint, parallel.replicated, kept.writer)
    )
    phases.mark("built")

    snapshots = Snapshots(world, kept.shelf, None if parallel.replicated else state)
    world.progress.enter("restore")
    restored = restore(state, kept, checkpoints, world.groups, parallel.replicated)
    step = restored.step
    if parallel.replicated:  # shards have no buckets to lay out
        stepper.rehearse(kept.example())
    checkpoints.prepare(state)
    phases.mark("restored")

    num_steps = kept.num_steps
    kept.validation_trigger.begin()
    kept.checkpoint_trigger.begin(restored.age_s)
    control = ControlWord(faults.group(world.groups.control), int(kept.precision.device.type == "cuda"), balance)
    recorder = Recorder(config, runtime, world, directory, plan, kept, restored, phases, snapshots.why_not)
    fetched = faults.batches(kept.loader.steps(plan.stream(world.rank, step + 1, num_steps)))
    batches = balance.batches(world.progress.fetching(fetched))

    def settle() -> None:
        recorder.commit(control.drain())

    def run_validation() -> None:
        assert held_out
        metrics = validate(parallel.plain(model), kept.task, kept.loader, held_out, world, kept.precision)
        recorder.validation(step, metrics)
        kept.validation_trigger.done()
        control.granted(validate=True)

    def save(last: bool = False) -> None:
        settle()  # the last word says whether this state is finite
        world.progress.enter("checkpoint")
        checkpoints.save(step, state, recorder.metrics, last)
        recorder.checkpoints(checkpoints.news())
        kept.checkpoint_trigger.done()
        control.granted(checkpoint=True)

    def copy() -> None:
        world.progress.enter("snapshot")
        snapshots.take(step, state)
        recorder.snapshot(snapshots)
        control.granted(snapshot=True)

    while step < num_steps and not control.ending:
        began = perf_counter()
        lr = learning_rate(config.schedule, config.optimizer.lr, step + 1, num_steps)
        run = left_out if step + 1 in plan.skip else stepper.step
        result = run(step + 1, lr, batches, plan, world.rank)
        kept.held = step = step + 1
        signals = faults.signals(runtime.signals())
        wishes = Flags(
            stop=signals.stop,
            leave=signals.leave,
            checkpoint=signals.checkpoint or (world.leader and kept.checkpoint_trigger.wanted()),
            snapshot=snapshots.wanted() and world.leader,
            validate=world.leader and kept.validation_trigger.wanted(),
        )
        recorder.ran(step, perf_counter() - began, lr)
        recorder.commit(control.exchange(result, wishes))
        if held_out and step < num_steps and (kept.validation_trigger.due(step) or control.wished.validate):
            run_validation()
        if control.wished.snapshot and not control.ending:
            copy()
        wished = control.wished.checkpoint and not control.ending
        if step < num_steps and (kept.checkpoint_trigger.due(step) or wished):
            save()
        recorder.checkpoints(checkpoints.news())

    settle()
    leaving = step < num_steps and control.wished.leave and not control.wished.stop
    by_survivors = leaving and parallel.replicated and not control.wished.checkpoint  # the state goes on
    if step and not by_survivors:
        with suppress(StorageError) if leaving else nullcontext():  # then the next world has what else there is
            save(last=True)
    if step == num_steps and held_out:
        run_validation()
    outcome = Outcome("finished" if step == num_steps else "resized" if leaving else "stopped", step)
    recorder.end(outcome.kind, step, parallel.plain(model) if parallel.replicated else None, state)
    return outcome
