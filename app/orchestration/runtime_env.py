"""What every worker of a run gets from Ray's runtime environment: code and variables."""

import json
import os
from collections.abc import Callable
from typing import Any

from app.config import ClusterConfig
from app.config.variables import given_variables, taken_variables

_NOT_CODE = [".git", ".venv", "runs", "__pycache__"]


def runtime_env(cluster: ClusterConfig) -> dict[str, Any]:
    """Return the runtime environment of a run, for `ray.init`. Raises ConfigError."""
    found: dict[str, Any] = {}
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    if "working_dir" not in job.get("runtime_env", {}):  # else `ray job submit --working-dir` has seen to it
        # It goes to every node, those that come later too, and is what its workers import from.
        found |= {"working_dir": os.getcwd(), "excludes": _NOT_CODE}
    if given := given_variables(cluster):
        found["env_vars"] = given
    # Not as `env_vars`: Ray writes those into its logs on every node, shows them in the dashboard, and puts them on the
    # command line on which a worker starts.
    if taken := taken_variables(cluster, os.environ):
        found["worker_process_setup_hook"] = _setting(taken)
    return found


def _setting(variables: dict[str, str]) -> Callable[[], None]:
    def set_variables() -> None:
        os.environ.update(variables)

    return set_variables
