"""Restart the same command in its process after Ray has died."""

# Ray keeps threads and connections in a process that only end with the process, and some of them end the process. So
# `exec` replaces the whole process. Its process id, its terminal and its children stay the same.
import json
import os
import sys
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import NoReturn, Self

from steadfast.errors import TrainingError, UsageError
from steadfast.orchestration.reach import answers

# The environment survives `exec`. A file could outlive the command, and a later command would read it.
_VARIABLE = "STEADFAST_CAME_BACK"


@dataclass(frozen=True)
class Comebacks:
    """Record of a command's restarts, passed on from process to process."""

    # Identifies the claim on the run, which a restart keeps. Processes of the former Ray may still renew the claim for
    # a moment.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    what: str = ""  # part of Ray that had died before the last restart
    restarts_without_progress: int = 0  # restarts in a row without a new step between them
    last_step: int = 0  # furthest step at the last restart
    num_workers: tuple[int, int] | None = None  # bounds that `steadfast scale` has set
    cluster: str = ""  # address of the GCS that has died; "" if Ray was embedded
    stopping: bool = False  # the command was stopping when Ray died, so the restart only saves the state in memory

    @classmethod
    def of_this_process(cls) -> Self:
        """Read the record of the former process from the environment.

        A new command has an empty record. Raises UsageError if another program has set the variable.
        """
        text = os.environ.get(_VARIABLE, "{}")
        try:
            record = json.loads(text)
            # JSON turns a tuple into a list.
            record["num_workers"] = tuple(record.get("num_workers") or ()) or None
            return cls(**record)
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"{_VARIABLE}={text[:80]}: steadfast sets this variable for itself; unset it") from error

    def check(self, allowed: int) -> None:
        """Check that the command may go on after its restarts.

        Raises TrainingError after more than `allowed` restarts in a row, or if the cluster does not answer.
        """
        if self.restarts_without_progress > allowed:
            deaths = f"{self.what} has died {self.restarts_without_progress} times"
            raise TrainingError(
                f"{deaths} and no step beyond {self.last_step}; recovery allows {allowed} in a row. Give the same "
                "command again: it goes on from the newest checkpoint. -v shows Ray's own messages"
            )
        if self.cluster and not answers(self.cluster):
            raise self.cluster_gone("it does not answer any more")

    def cluster_gone(self, why: object) -> TrainingError:
        """Return the error for a cluster that cannot be joined again."""
        # Errors of Ray have many lines, of which only the first one says what has happened.
        first, _, _ = str(why).partition("\n")
        return TrainingError(
            f"the cluster at {self.cluster} cannot be joined again: {first}. Start its Ray again (ray up FILE, or ray "
            "start on this machine), then give the same command again: it goes on from the newest checkpoint"
        )

    def after(
        self,
        what: str,
        step: int,
        num_workers: tuple[int, int] | None = None,
        cluster: str = "",
        stopping: bool = False,
    ) -> Self:
        """Return the record for the next restart.

        Args:
            what: the part of Ray that has died.
            step: the last finished step.
            num_workers: bounds that `steadfast scale` has set, if it did.
            cluster: address of the GCS that has died; "" if Ray was embedded.
            stopping: whether the command was stopping.
        """
        restarts_without_progress = 1
        # Steps up to the furthest one are repetitions after a restore, and no progress.
        if step <= self.last_step:
            restarts_without_progress += self.restarts_without_progress
        return replace(
            self,
            what=what,
            restarts_without_progress=restarts_without_progress,
            last_step=max(step, self.last_step),
            num_workers=num_workers or self.num_workers,
            cluster=cluster,
            stopping=stopping or self.stopping,
        )

    def come_back(self) -> NoReturn:
        """Replace this process by a new process of the same command."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))
        # `exec` discards the text in Python's buffers.
        sys.stdout.flush()
        sys.stderr.flush()
        # `sys.orig_argv` also has the options of the interpreter, such as -m, which `sys.argv` lacks. Its first word
        # may be a name that only the shell's search path has found, so `sys.executable` replaces that word.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
