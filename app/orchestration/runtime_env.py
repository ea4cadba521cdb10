"""Ray's runtime environment, which brings code and variables to workers."""

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
    if "working_dir" not in job.get("runtime_env", {}):  # otherwise `ray job submit --working-dir` has set it
        # Ray copies the directory to every node, also to later ones, and workers import from the copy.
        found |= {"working_dir": os.getcwd(), "excludes": _NOT_CODE}
    if given := given_variables(cluster):
        found["env_vars"] = given
    # Variables taken from the command's environment may be secrets, so a hook sets them. Ray would write `env_vars`
    # into its logs on every node, and show them in the dashboard and on the command line of each worker.
    if taken := taken_variables(cluster, os.environ):
        found["worker_process_setup_hook"] = _setting(taken)
    return found


def _setting(variables: dict[str, str]) -> Callable[[], None]:
    def set_variables() -> None:
        os.environ.update(variables)

    return set_variables
