"""`--cluster FILE`: run the command on the head of a cluster that `ray up FILE` started.

The working directory is copied to the head, where training becomes a Ray job, which outlives this machine. This end
only shows the output: the same command, here or on another machine, shows it again.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import yaml

from app.errors import TrainingError, UsageError
from app.launch.handover import taking, write_variables

# The working directory on the nodes. `file_mounts` of the cluster files name it too.
HOME = "~/steadfast"
# Printed on the head around the command's output. What comes before and after is of ssh and Ray.
_BEGINS = "steadfast begins"
_ENDS = "steadfast ends with exit code"

# With which Ray finds the head, and what brings them here.
_CLOUDS = {
    "aws": ("boto3", "-c constraints.txt -e '.[cluster]'"),
    "gcp": ("googleapiclient", "google-api-python-client google-auth"),
    "azure": ("msrestazure", "azure-identity azure-mgmt-compute azure-mgmt-network azure-mgmt-resource msrestazure"),
}

_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def run_on_head(cluster: str, arguments: list[str], verbose: bool, variables: Mapping[str, str]) -> int:
    """Copy the working directory to the head, run the command there, and return its exit code.

    Args:
        variables: of this environment, which the command there has too.

    Raises:
        UsageError: there is no such cluster, or it cannot be reached.
        TrainingError: the connection was lost.
    """
    if not Path(cluster).is_file():
        raise UsageError(f"--cluster {cluster}: there is no such file")
    description = yaml.safe_load(Path(cluster).read_text())
    provider = description["provider"]["type"]
    if provider in _CLOUDS:
        module, packages = _CLOUDS[provider]
        if find_spec(module) is None:
            raise UsageError(f"--cluster {cluster}: Ray reaches {provider} by {module}; pip install {packages}")
    if provider == "local":
        from app.orchestration.internals import remember_head

        remember_head(description)

    _copy(cluster, "./", f"{HOME}/")
    main = f"{_hand_over(cluster, variables)}python main.py {shlex.join(arguments)}"
    # The head prints the exit code, because `ray exec` turns every one but 0 into 1.
    command = f"echo {_BEGINS}; cd {HOME} && {main}; echo {_ENDS} $?"
    remote = subprocess.Popen(
        [*_RAY, "exec", cluster, command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        exit_code = _show(remote, verbose)
    except KeyboardInterrupt:
        # Only this end stops, and with 0: nothing has failed.
        remote.terminate()
        print("\nleft; it goes on. The same command shows it again")
        return 0
    if exit_code is None:
        raise TrainingError("the connection to the head was lost. What runs there goes on; the same command shows it")
    return exit_code


def _copy(cluster: str, source: str, target: str) -> None:
    copied = subprocess.run([*_RAY, "rsync-up", cluster, source, target], capture_output=True, text=True, check=False)
    if copied.returncode:
        output = f"{copied.stdout}{copied.stderr}".strip()
        raise UsageError(f"the head of {cluster} cannot be reached. Start it by: ray up {cluster}\n{output}")


def _hand_over(cluster: str, variables: Mapping[str, str]) -> str:
    """Copy variables to the head. Return the beginning of a command there that takes them."""
    if not variables:
        return ""
    file = write_variables(variables)
    try:
        # Not into the working directory, which goes on to all nodes.
        _copy(cluster, str(file), f"~/.{file.name}")
    finally:
        file.unlink()
    return taking(f"~/.{file.name}")


def _show(remote: subprocess.Popen[str], verbose: bool) -> int | None:
    """Print the command's output as it comes. Return its exit code, None if the connection ended before it."""
    assert remote.stdout
    begun = False
    exit_code = None
    hidden = []
    for line in remote.stdout:
        if _BEGINS in line:
            begun = True
        elif _ENDS in line:
            # Taken from the line's end: the codes by which a terminal resets its colours may stand before it.
            exit_code = int(line.rpartition(_ENDS)[2])
        elif verbose or (begun and exit_code is None):
            print(line, end="", flush=True)
        else:
            hidden.append(line)
    remote.wait()

    if not begun and not verbose:
        # The command was not reached, and only what ssh and Ray said can tell why.
        print("".join(hidden), end="", file=sys.stderr)
    return exit_code
