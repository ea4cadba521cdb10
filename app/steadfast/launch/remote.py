"""`--cluster FILE`: run the command on the head of a cluster.

`ray up FILE` has started the cluster. The working directory is copied to the head, where the training runs as a Ray
job. The job goes on if this machine ends. This process only shows the output, and the same command shows the output
again, on this machine or another one.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import yaml

from steadfast.errors import TrainingError, UsageError
from steadfast.launch.detect import program
from steadfast.launch.handover import source_and_delete, write_variables

# The working directory on the nodes. The cluster files use the same path in `file_mounts`.
HOME = "~/steadfast"
_PACKAGE = Path(__file__).parents[1]
# The head prints these lines before and after the command's output. All other output comes from ssh and Ray.
_BEGINS = "steadfast begins"
_ENDS = "steadfast ends with exit code"

# Cloud provider -> the module with which Ray finds the head, and the pip arguments that install the module.
_CLOUDS = {
    "aws": ("boto3", "'steadfast[cluster]'"),
    "gcp": ("googleapiclient", "google-api-python-client google-auth"),
    "azure": ("msrestazure", "azure-identity azure-mgmt-compute azure-mgmt-network azure-mgmt-resource msrestazure"),
}

_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def run_on_head(cluster: str, arguments: list[str], verbose: bool, variables: Mapping[str, str]) -> int:
    """Run the command on a cluster's head, and return the exit code.

    The working directory is copied to the head first.

    Args:
        cluster: path of the cluster file.
        variables: environment variables to set for the command on the head.

    Raises:
        UsageError: the cluster file does not exist, or the head cannot be reached.
        TrainingError: the connection was lost.
    """
    if not Path(cluster).is_file():
        raise UsageError(f"--cluster {cluster}: there is no such file")
    description = yaml.safe_load(Path(cluster).read_text())
    provider = description["provider"]["type"]
    if provider in _CLOUDS:
        module, packages = _CLOUDS[provider]
        if find_spec(module) is None:
            raise UsageError(f"--cluster {cluster}: Ray needs {module} to reach {provider}; pip install {packages}")
    if provider == "local":
        from steadfast.orchestration.internals import remember_head

        remember_head(description)

    _copy(cluster, "./", f"{HOME}/")
    started_by = program()
    if started_by != ["main.py"]:
        # Without a checkout the head imports this package from the working directory, and need not have it installed.
        _copy(cluster, f"{_PACKAGE}/", f"{HOME}/{_PACKAGE.name}/")
    # ssh always gives the command a terminal. Without one here, codes of a terminal would end up in a file or a pipe.
    terminal = "" if sys.stdout.isatty() else "TERM=dumb "
    main = f"{_hand_over(cluster, variables)}{terminal}python {shlex.join([*started_by, *arguments])}"
    # The head prints the exit code, because `ray exec` itself returns 1 for every code but 0.
    command = f"echo {_BEGINS}; cd {HOME} && {main}; echo {_ENDS} $?"
    remote = subprocess.Popen(
        [*_RAY, "exec", cluster, command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        exit_code = _show(remote, verbose)
    except KeyboardInterrupt:
        # Only the display ends, so nothing has failed and the exit code is 0.
        remote.terminate()
        print("\nleft; the run goes on. The same command shows it again")
        return 0
    if exit_code is None:
        raise TrainingError("the connection to the head was lost. The run goes on there; the same command shows it")
    return exit_code


def _copy(cluster: str, source: str, target: str) -> None:
    copied = subprocess.run([*_RAY, "rsync-up", cluster, source, target], capture_output=True, text=True, check=False)
    if copied.returncode:
        output = f"{copied.stdout}{copied.stderr}".strip()
        raise UsageError(f"the head of {cluster} cannot be reached. Start it by: ray up {cluster}\n{output}")


def _hand_over(cluster: str, variables: Mapping[str, str]) -> str:
    """Copy variables to the head. Return a shell prefix that sets the variables."""
    if not variables:
        return ""
    file = write_variables(variables)
    try:
        # The file is not copied into the working directory, because Ray copies that directory to all nodes.
        _copy(cluster, str(file), f"~/.{file.name}")
    finally:
        file.unlink()
    return source_and_delete(f"~/.{file.name}")


def _show(remote: subprocess.Popen[str], verbose: bool) -> int | None:
    """Print the output of the command, and return its exit code.

    The result is None if the connection ended before the command.
    """
    assert remote.stdout
    begun = False
    exit_code = None
    hidden = []
    for line in remote.stdout:
        if _BEGINS in line:
            begun = True
        elif _ENDS in line:
            # Only the end of the line is parsed, because terminal codes that reset colours may come first.
            exit_code = int(line.rpartition(_ENDS)[2])
        elif verbose or (begun and exit_code is None):
            print(line, end="", flush=True)
        else:
            hidden.append(line)
    remote.wait()

    if not begun and not verbose:
        # The command has not started. Only the output of ssh and Ray can show the reason.
        print("".join(hidden), end="", file=sys.stderr)
    return exit_code
