"""A worker process: it outlives attempts."""

import gc
import traceback

import torch

from app.components.worker_state import WorkerState
from app.config import Config
from app.errors import as_exception
from app.faults.corruption import Corrupted
from app.parallel import arrange
from app.rescue import announce_end, rescue
from app.run.directory import RunDirectory
from app.telemetry.memory_history import record_memory_history, write_memory_history
from app.telemetry.startup import StartupTimer
from app.train import train
from app.world.compilation import follow_compilations
from app.world.device import set_numerics
from app.world.runtime import Outcome, Runtime


def work(config: Config, runtime: Runtime, directory: RunDirectory) -> Outcome | None:
    """Be a worker until the run ends, or this worker is not needed any more (None)."""
    worker = start_worker(config, runtime)
    if worker is None:
        return None
    try:
        return train_in_worlds(config, runtime, worker, directory)
    finally:
        worker.loader.close()


def start_worker(config: Config, runtime: Runtime) -> WorkerState | None:
    """Return a worker with its data and model; None if these cannot be built, after the runtime was told of it."""
    try:
        num_threads = config.scaling.cpus_per_worker if config.run.exact else None
        set_numerics(config.precision.tf32, config.run.reproducible, num_threads)
        record_memory_history(config.profile, runtime.device)
        # Before joining, so that nobody waits for a newcomer's data and model.
        return WorkerState(config, runtime.device)
    except BaseException as raised:
        runtime.failed(0, as_exception(raised))
        return None


def train_in_worlds(config: Config, runtime: Runtime, worker: WorkerState, directory: RunDirectory) -> Outcome | None:
    """Train in world after world until the run ends, or this worker is not needed any more (None)."""
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
            outcome = train(config, runtime, world, worker, directory, timer)
            if outcome.kind != "resized":
                worker.leave_run()
                return outcome
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt) and runtime.signals().stop:
                raise  # a second Ctrl-C, where the process is not ours
            error = as_exception(raised)
            step = worker.step
            if isinstance(error, Corrupted) and error.rank == world.rank:
                worker.forget()  # its step too, which is reported all the same
            # The abort is how the others learn that something is wrong, so it comes once the reason is known.
            try:
                if history := write_memory_history(config.profile, directory, world, runtime.device, error):
                    runtime.publish(history)
                trains_on = runtime.failed(step, error)
            except Exception:
                announce_end(world, error)
                world.groups.abort()  # the others need not wait for storage
                rescue(config, runtime, world, worker, directory, error, raised=True)
                raise
            else:
                if not trains_on:
                    world.groups.abort()
                    rescue(config, runtime, world, worker, directory, error, raised=False)
            finally:
                world.groups.abort()
                _clear_frames(error)
                del error  # its frames, though cleared, still hold the functions of the attempt, and these the model
        finally:
            world.progress.leave()
            world.groups.destroy()
            worker.close_attempt()
            if runtime.device.type == "cuda":
                # What is cached for the attempt's streams serves no other stream, and NCCL allocates beside torch.
                gc.collect()
                torch.cuda.empty_cache()


def _clear_frames(error: BaseException | None) -> None:
    # They hold the model as it was wrapped for this world, and activations.
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
