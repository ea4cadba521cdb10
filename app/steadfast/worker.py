"""Worker process, which lives through several attempts."""

import gc
import traceback

import torch

from steadfast.config import Config
from steadfast.errors import as_exception
from steadfast.guards.corruption import NO_RANK, Corrupted
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import arrange
from steadfast.rescue import Rescue, announce_end
from steadfast.run.directory import RunDirectory
from steadfast.telemetry.memory_history import record_memory_history, write_memory_history
from steadfast.telemetry.startup import StartupTimer
from steadfast.train import train
from steadfast.world.compilation import follow_compilations
from steadfast.world.device import set_numerics
from steadfast.world.runtime import Outcome, Runtime


def work(config: Config, runtime: Runtime, directory: RunDirectory) -> Outcome | None:
    """Run a worker to the end; return None if not needed."""
    worker = start_worker(config, runtime)
    if worker is None:
        return None
    try:
        return train_in_worlds(runtime, worker, directory)
    finally:
        worker.loader.close()


def start_worker(config: Config, runtime: Runtime) -> WorkerState | None:
    """Return a worker with data and model, or None after a failure."""
    try:
        num_threads = config.scaling.cpus_per_worker if config.run.exact else None
        set_numerics(config.precision.tf32, config.run.reproducible, num_threads)
        record_memory_history(config.profile, runtime.device)
        # Built before joining, so that no running worker waits for a new worker's data and model.
        return WorkerState(config, runtime.device)
    except BaseException as raised:
        runtime.failed(0, as_exception(raised))
        return None


def train_in_worlds(runtime: Runtime, worker: WorkerState, directory: RunDirectory) -> Outcome | None:
    """Train in one world after another; return None if no longer needed."""
    config = worker.config
    rescue = Rescue(runtime, worker, directory)
    while True:
        timer = StartupTimer()
        world = runtime.next_world()
        if world is None:
            return None
        world = arrange(world, config.parallel)
        timer.mark("formed")
        try:
            worker.join(world)
            follow_compilations(world.progress)
            outcome = train(runtime, world, worker, directory, timer)
            if outcome.kind != "resized":
                worker.leave_run()
                return outcome
        except BaseException as raised:
            # This is a second Ctrl-C, in a process that belongs to the user.
            if isinstance(raised, KeyboardInterrupt) and runtime.signals().stop:
                raise
            error = as_exception(raised)
            step = worker.step
            # The rank that computes wrongly may pass its state to nobody. `forget` also forgets the step, which is
            # therefore read before.
            if isinstance(error, Corrupted) and error.rank in (world.rank, NO_RANK):
                worker.forget(copies=error.rank == NO_RANK)
            # The abort informs the other ranks of the failure, so it follows once the reason is recorded.
            try:
                if history := write_memory_history(config.profile, directory, world, runtime.device, error):
                    runtime.publish(history)
                trains_on = runtime.failed(step, error)
            except Exception:
                announce_end(world, error)
                world.groups.abort()  # the other ranks need not wait for storage
                rescue.save(world, error, raised=True)
                raise
            else:
                if not trains_on:
                    world.groups.abort()
                    rescue.save(world, error, raised=False)
            finally:
                world.groups.abort()
                _clear_frames(error)
                # Its frames, though cleared, still hold the functions of the attempt, and these hold the model.
                del error
        finally:
            world.progress.leave()
            world.groups.destroy()
            worker.close_attempt()
            if runtime.device.type == "cuda":
                # Memory that torch caches for the attempt's streams serves no other stream, and NCCL allocates its own.
                gc.collect()
                torch.cuda.empty_cache()


def _clear_frames(error: BaseException | None) -> None:
    # The frames hold the model as wrapped for this world, and activations.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
