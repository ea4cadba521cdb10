"""Exceptions that this program raises on purpose, with their exit codes.

SteadfastError
├── UsageError            2  the command cannot be carried out as given
│   ├── ConfigError       2  the configuration is wrong; carries every problem found
│   ├── RunConflict       2  the run directory is in use, or belongs to another configuration
│   ├── ResourcesMissing  2  the cluster did not provide the workers in time
│   └── GpuUnusable       2  torch cannot use a GPU that was asked for
├── TrainingError         1  the run began and cannot continue
│   └── DataError         1  the data are empty, unreadable or of the wrong shape
└── StorageError          1  the run directory cannot be read or written
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PROGRAM = Path(__file__).parent
_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
_NUM_LINES = 20  # of a traceback on the console
_NUM_FIRST = 8  # of these, before the lines that are left out


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


class GpuUnusable(UsageError):
    pass


class StorageError(SteadfastError):
    @classmethod
    def cannot_write(cls, path: object, reason: object) -> StorageError:
        """Return the error of a file that nothing can write until its user helps."""
        reason = getattr(reason, "strerror", None) or reason
        remedy = "Make room or remove what is in the way there, and give the command again"
        return cls(f"{path} cannot be written: {reason}. {remedy}")


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


def described(error: BaseException) -> str:
    """Return the type, the text and the notes of an exception."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def traceback_of(error: Exception) -> str:
    """Return an error's traceback, beginning with the user's own code.

    Without a frame of the user's code it begins with the first frame of a library, or else is whole.
    """
    start = _first_frame(error, lambda file: not _is_own(file) and not _is_of_library(file))
    start = start or _first_frame(error, lambda file: not _is_own(file)) or error.__traceback__
    # `with_traceback` would change the error itself, whose frames the worker still has to clear.
    return "".join(traceback.format_exception(type(error), error, start)).rstrip()


def shortened(text: str) -> str:
    """Return a traceback in at most twenty lines, without lines of its middle."""
    lines = text.splitlines()
    num_left_out = len(lines) - _NUM_LINES + 1
    if num_left_out < 2:
        return text
    note = f"  ... {num_left_out} lines left out, which -v shows"
    return "\n".join([*lines[:_NUM_FIRST], note, *lines[_NUM_FIRST + num_left_out :]])


def _first_frame(error: Exception, accepts: Callable[[str], bool]) -> TracebackType | None:
    frame = error.__traceback__
    while frame is not None and not accepts(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return frame


def _is_own(file: str) -> bool:
    return Path(file).is_relative_to(_PROGRAM) or Path(file) == _PROGRAM.parents[1] / "main.py"


def _is_of_library(file: str) -> bool:
    return any(Path(file).is_relative_to(place) for place in _LIBRARIES)
