"""A worker process: it outlives attempts."""

from __future__ import annotations

import traceback

from app.config import Config
from app.kept import Kept
from app.rundir import RunDirectory
from app.runtime import Outcome, Runtime, destroy_groups
from app.telemetry.phases import Phases
from app.train import train


def work(config: Config, runtime: Runtime, directory: RunDirectory) -> Outcome | None:
    """Trains in world after world until the run ends, or this worker is not needed any more (None)."""
    kept: Kept | None = None
    while True:
        phases = Phases(directory)
        world = runtime.next_world()
        if world is None:
            return None
        phases.mark("formed")
        try:
            kept = kept or Kept(config, runtime.device)
            outcome = train(config, runtime, world, kept, directory, phases)
            if outcome.kind != "resized":
                return outcome
        except Exception as error:
            # Before the groups go: their sockets are how the others learn that something is wrong here.
            try:
                runtime.failed(max(0, kept.held) if kept else 0, error)
            finally:
                # The traceback's frames hold the groups, and a socket that is still referenced is still open.
                traceback.clear_frames(error.__traceback__)
        finally:
            destroy_groups()
