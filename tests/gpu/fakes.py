"""Drills that end in every way there is, for the test of what runs them. They need neither torch nor the app."""

import os
import subprocess
import sys
import time
from importlib import import_module

from tests.gpu.scene import Scene, Skip


def passes(scene: Scene) -> None:
    """Pass, with a figure."""
    scene.figure(answer=42, ratio=0.98765)
    scene.check(True, "never said")


def fails(scene: Scene) -> None:
    """Break two claims, and keep the figure of between."""
    scene.check(False, "the first claim")
    scene.figure(between=1)
    scene.check(False, "the second | claim")


def raises(scene: Scene) -> None:
    """Raise."""
    raise ValueError(f"of {scene.device}")


def skips(scene: Scene) -> None:
    """Say why it cannot run."""
    raise Skip("it lacks a second GPU")


def hangs(scene: Scene) -> None:
    """Hang with a figure, beside a process that leads a session of its own, as torchrun's workers do."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    scene.figure(sleeper=sleeper.pid)
    time.sleep(600)


def dies(scene: Scene) -> None:
    """End without a word."""
    os._exit(7)


def lacks_a_package(scene: Scene) -> None:
    """Need a package that is not there."""
    import package_that_nobody_has  # type: ignore[import-not-found] # noqa: F401


def lacks_a_module_of_ours(scene: Scene) -> None:
    """Need a module of this project that has moved."""
    import_module("steadfast.moved_elsewhere")


def saves(scene: Scene) -> None:
    """Leave a checkpoint and a note."""
    (scene.folder / "model.safetensors").write_bytes(b"0" * 100)
    (scene.folder / "note.txt").write_text("saved")
