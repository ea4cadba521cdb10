"""`--cluster FILE`: the command runs on the head of a cluster that `ray up FILE` started, and outlives this machine.

The working directory goes to the head, where training becomes a Ray job. This end only shows what it says: the same
command, here or on another machine, shows it again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from app.errors import TrainingError, UsageError

HOME = "~/steadfast"  # the working directory on the nodes: `file_mounts` of the cluster files name it too
_BEGINS, _ENDS = "steadfast begins", "steadfast ends with exit code"  # around what is meant for the user
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def run_on_head(cluster: str, arguments: list[str], verbose: bool) -> int:
    """Copies the working directory and gives the command there.

    Args:
        arguments: the command line there.
        verbose: shows what Ray says of its ssh connections too.

    Returns:
        The command's exit code; 0 when this end is left by Ctrl-C.

    Raises:
        UsageError: there is no such cluster, or it cannot be reached.
        TrainingError: the connection was lost.
    """
    if not Path(cluster).is_file():
        raise UsageError(f"--cluster {cluster}: there is no such file")
    described = yaml.safe_load(Path(cluster).read_text())
    if described["provider"]["type"] == "local":
        from app.orchestration.internals.own_machines import remember_head

        remember_head(described)
    copied = subprocess.run([*_RAY, "rsync-up", cluster, "./", f"{HOME}/"], capture_output=True, text=True, check=False)
    if copied.returncode:
        said = f"{copied.stdout}{copied.stderr}".strip()
        raise UsageError(f"the head of {cluster} cannot be reached. Start it by: ray up {cluster}\n{said}")
    command = f"echo {_BEGINS}; cd {HOME} && python main.py {shlex.join(arguments)}; echo {_ENDS} $?"
    following = subprocess.Popen(
        [*_RAY, "exec", cluster, command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        code = _show(following, verbose)
    except KeyboardInterrupt:
        following.terminate()
        print("\nleft; it goes on. The same command shows it again")
        return 0
    if code is None:
        raise TrainingError("the connection to the head was lost. What runs there goes on; the same command shows it")
    return code


def _show(following: subprocess.Popen[str], verbose: bool) -> int | None:
    assert following.stdout
    meant, code, unseen = verbose, None, []
    for line in following.stdout:
        if _BEGINS in line:
            meant = True
        elif _ENDS in line:  # after what a terminal is told to forget colours by, it may be
            code, meant = int(line.rpartition(_ENDS)[2]), verbose
        elif meant:
            print(line, end="", flush=True)
        else:
            unseen.append(line)
    following.wait()
    if code is None and not meant:
        print("".join(unseen), end="", file=sys.stderr)
    return code
