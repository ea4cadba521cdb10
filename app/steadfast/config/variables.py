"""Select the environment variables that workers get."""

from collections.abc import Mapping

from steadfast.config.schema import ClusterConfig
from steadfast.errors import ConfigError, Problem


def given_variables(cluster: ClusterConfig) -> dict[str, str]:
    """Return the variables whose values the configuration gives."""
    return {name: value for name, value in cluster.env.items() if value is not None}


def taken_variables(cluster: ClusterConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers inherit from the command.

    The values may be secrets.

    Raises:
        ConfigError: the configuration names a variable that the command's environment lacks.
    """
    taken: dict[str, str] = {}
    # A variable that cluster.env names is not taken by its prefix, because a value there has precedence.
    for name, value in environment.items():
        if name.startswith(cluster.env_prefixes) and name not in cluster.env:
            taken[name] = value
    # All missing variables are reported at once, so that the user need not try again for each of them.
    problems: list[Problem] = []
    for name, given in cluster.env.items():
        if given is not None:
            continue
        if name in environment:
            taken[name] = environment[name]
        else:
            what = f"is null, and this command's environment has no {name}: export it, or give a value here"
            problems.append(Problem("", f"cluster.env.{name}", what))
    if problems:
        raise ConfigError(problems)
    return taken
