"""Program that the raylet of the shared head starts for each worker, instead of Ray's `setup_worker.py`.

It imports almost nothing. Controllers and coordinators of a run become forks of the fork server that the run's training
workers have, with the code that Ray has uploaded. Other workers start as Ray starts them. The clusters of
`tests/support/bed.py` keep Ray's own program.
"""

import os
import re
import shlex
import sys
from pathlib import Path

# By its path, because a raylet's environment has no folder of the checkout.
sys.path[0] = str(Path(__file__).parents[2] / "app")
from steadfast.orchestration import fork_worker  # noqa: E402 - found by the path above

_NUM_THREADS = 1


def main() -> None:
    arguments = sys.argv[1:]
    context, rest = fork_worker._context_of(arguments)
    if context.pop("language", "") != "PYTHON" or context.get("override_worker_entrypoint"):
        stock = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, stock, *arguments])
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))  # as Ray does
    python = context.get("py_executable") or sys.executable
    if python == sys.executable and "py_modules_files" in os.environ.get("PYTHONPATH", ""):  # the code of a run
        python = fork_worker.python_of_cluster(_NUM_THREADS)
    command = [*(context.get("command_prefix") or []), "exec", python, *map(shlex.quote, rest)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


if __name__ == "__main__":
    main()
