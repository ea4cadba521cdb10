"""Exceptions that this program raises on purpose, with their exit codes.

SteadfastError
├── UsageError            2  the command cannot be carried out as given
│   ├── ConfigError       2  the configuration is wrong; carries every problem found
│   ├── RunConflict       2  the run directory is in use, or belongs to another configuration
│   └── ResourcesMissing  2  the cluster did not provide the workers in time
├── TrainingError         1  the run began and cannot continue
│   └── DataError         1  the data are empty, unreadable or of the wrong shape
└── StorageError          1  the run directory cannot be read or written
"""

from __future__ import annotations

from dataclasses import dataclass


class SteadfastError(Exception):
    """Error that the command line shows as one message, without a traceback.

    The message names a remedy.
    """

    exit_code = 1


class UsageError(SteadfastError):
    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One error in a configuration."""

    where: str  # "configs/ddp.yaml:12" or "override"
    path: str  # "optimizer.lr"
    what: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.path, self.what)))


class ConfigError(UsageError):
    """All problems of a configuration at once."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        # Workers raise this error across processes, and Exception would be unpickled from its message alone.
        return ConfigError, (self.problems,)


class RunConflict(UsageError):
    pass


class TrainingError(SteadfastError):
    pass


class NotDeferrable(TrainingError):
    """A model cannot be built without memory for its numbers.

    The message gives the reason.
    """


class DataError(TrainingError):
    pass


class ResourcesMissing(UsageError):
    pass


class StorageError(SteadfastError):
    pass


class UserExit(Exception):
    """SystemExit, KeyboardInterrupt or another BaseException of user code.

    The class also stands for an exception whose text cannot be read.
    """


def as_exception(error: BaseException) -> Exception:
    """Convert an exception of user code into an `Exception`.

    The traceback is kept. Handlers of `Exception` miss SystemExit, KeyboardInterrupt and the user's own BaseExceptions,
    so a worker would exit without reporting them.
    """
    # The text is read even of an error that is returned as it is. An error whose __str__ raises is replaced, because
    # everything that reports the error would raise too.
    try:
        told = str(error)
        if isinstance(error, Exception):
            return error
    except Exception as unprintable:
        told = f"its text cannot be read: {type(unprintable).__name__} in __str__"
    name = "sys.exit" if isinstance(error, SystemExit) else type(error).__name__
    message = f"{name} in your own code"
    if told:
        message += f" ({told})"
    return UserExit(message).with_traceback(error.__traceback__)
