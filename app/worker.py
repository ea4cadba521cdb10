"""A worker process: it outlives attempts."""

from __future__ import annotations

import traceback

from app.checkpoint.rescue import rescue
from app.config import Config
from app.kept import Kept
from app.rundir import RunDirectory
from app.runtime import Outcome, Runtime
from app.telemetry.phases import Phases
from app.train import train


def work(config: Config, runtime: Runtime, directory: RunDirectory) -> Outcome | None:
    """Trains in world after world until the run ends, or this worker is not needed any more (None)."""
    try:
        kept = Kept(config, runtime.device)  # before joining, so that nobody waits for a newcomer's data and model
    except Exception as error:
        runtime.failed(0, error)
        return None
    while True:
        phases = Phases()
        world = runtime.next_world()
        if world is None:
            return None
        phases.mark("formed")
        try:
            outcome = train(config, runtime, world, kept, directory, phases)
            if outcome.kind != "resized":
                return outcome
        except Exception as error:
            try:
                runtime.failed(max(0, kept.held), error)
            except Exception:
                world.groups.abort()  # the others need not wait for storage
                rescue(config, runtime, world, kept, directory, error)
                raise
            finally:
                world.groups.abort()  # after the word is out why: this is how the others learn that something is wrong
                traceback.clear_frames(error.__traceback__)  # they hold the model as it was wrapped for this world
        finally:
            world.progress.leave()
            world.groups.destroy()
            kept.close_ledger()
