"""The exceptions that this program raises on purpose, and the exit code of each.

SteadfastError
├── UsageError            2  the command cannot be carried out as given
│   ├── ConfigError       2  the configuration is wrong; carries every problem found
│   ├── RunConflict       2  the run directory is in use, or belongs to another configuration
│   └── ResourcesMissing  2  the cluster did not give the workers asked for in time
├── TrainingError         1  the run began and cannot go on
│   └── DataError         1  the data are empty, unreadable or of the wrong shape
└── StorageError          1  the run directory cannot be read or written
"""

from __future__ import annotations

from dataclasses import dataclass


class SteadfastError(Exception):
    """An error told to the user in one clear message, with its remedy and without a traceback."""

    exit_code = 1


class UsageError(SteadfastError):
    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    where: str  # "configs/ddp.yaml:12" or "override"
    path: str  # "optimizer.lr"
    what: str

    def __str__(self) -> str:
        known = [part for part in (self.where, self.path, self.what) if part]
        return ": ".join(known)


class ConfigError(UsageError):
    """All problems of a configuration at once, so that one edit mends them all."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        # Workers raise it across processes, and Exception would unpickle it from its message.
        return ConfigError, (self.problems,)


class RunConflict(UsageError):
    pass


class TrainingError(SteadfastError):
    pass


class NotDeferrable(TrainingError):
    """A model cannot be built without memory for its numbers; the message says why."""


class DataError(TrainingError):
    pass


class ResourcesMissing(UsageError):
    pass


class StorageError(SteadfastError):
    pass


class UserExit(Exception):
    """The user's code would have ended the process, or raised what cannot be told as it is."""


def as_exception(error: BaseException) -> Exception:
    """Convert what the user's code raised into an exception like any other, with its traceback.

    Handlers of `Exception` miss SystemExit, KeyboardInterrupt and the user's own BaseExceptions: the worker would exit
    without reporting them.
    """
    try:
        told = str(error)
        if isinstance(error, Exception):
            return error
    except Exception as unprintable:
        told = f"its own text cannot be had: {type(unprintable).__name__} in __str__"
    name = "sys.exit" if isinstance(error, SystemExit) else type(error).__name__
    return UserExit(f"{name} in code of your own{f' ({told})' if told else ''}").with_traceback(error.__traceback__)
