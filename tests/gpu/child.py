"""One drill in a process of its own: `python -m tests.gpu.child TARGET --device DEVICE --folder FOLDER`."""

import argparse
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Literal

from tests.gpu.scene import Scene, Skip

State = Literal["PASSED", "REHEARSED", "FAILED", "SKIPPED"]
OWN = ("steadfast", "tests")
ENDING = "ending.json"
_APP = ("steadfast.config", "steadfast.launch.torchrun")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="module:function")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--app", action="store_true", help="the drill, or a process that it starts, imports the app")
    options = parser.parse_args()
    state, reason = run(options.target, Scene(options.device, options.folder), options.app)
    (options.folder / ENDING).write_text(json.dumps({"state": state, "reason": reason}))


def run(target: str, scene: Scene, needs_app: bool) -> tuple[State, str]:
    """Run a drill. Return its state, and why it has not passed."""
    module, _, name = target.partition(":")
    try:
        # First what needs least, so that a package that is missing is told before torch has been waited for.
        for needed in _APP if needs_app else ():
            import_module(needed)
        getattr(import_module(module), name)(scene)
    except Skip as skip:
        return "SKIPPED", str(skip)
    except ImportError as error:
        traceback.print_exc()
        # A name of our own that is gone is a drill that has fallen behind the code, and no matter of the machine.
        if (error.name or "").partition(".")[0] in OWN:
            return "FAILED", f"the drill does not fit this code: {error}"
        return "SKIPPED", f"the app cannot be imported: {error}"
    except Exception as error:
        traceback.print_exc()
        scene.failures.append(f"{type(error).__name__}: {error}")
    if scene.failures:
        return "FAILED", "; ".join(scene.failures)
    return ("PASSED" if scene.on_gpu else "REHEARSED"), ""


if __name__ == "__main__":
    main()
    sys.stdout.flush()
