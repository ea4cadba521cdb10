"""Come back: where Ray has died under a command, its process begins the same command anew."""

# Ray keeps threads and connections in this process that do not end without the rest of it, and some of them end the
# process. So it is replaced, and not cleaned up: its number, its terminal and its children stay.
import json
import os
import sys
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import NoReturn, Self

from app.errors import TrainingError, UsageError
from app.orchestration.reach import answers

_VARIABLE = "STEADFAST_CAME_BACK"


@dataclass(frozen=True)
class Comebacks:
    """How often this command has come back, and what it had been told by then."""

    # Of its claim on the run, which it does not release: what is left of the former Ray may renew it for a moment.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    what: str = ""  # had died
    in_a_row: int = 0  # without a new step between two of them
    furthest_step: int = 0  # at the last one
    num_workers: tuple[int, int] | None = None  # bounds that `scale` has set
    cluster: str = ""  # the address of the GCS that has died; "" if it was this command's own
    stopping: bool = False  # it was to stop when Ray died: what the machines still hold is saved, and no more

    @classmethod
    def of_this_process(cls) -> Self:
        """Read the record of the former process from the environment; a new command has an empty one.

        Raises UsageError if another program has set the variable.
        """
        text = os.environ.get(_VARIABLE, "{}")
        try:
            record = json.loads(text)
            bounds = record.pop("num_workers", None)
            return cls(**record, num_workers=tuple(bounds) if bounds else None)
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"{_VARIABLE}={text[:80]}: steadfast sets this variable for itself; unset it") from error

    def check(self, allowed: int) -> None:
        """Raise TrainingError if the command has come back more often than is `allowed`, or its cluster has not."""
        if self.in_a_row > allowed:
            raise TrainingError(
                f"{self.what} has died {self.in_a_row} times and no step beyond {self.furthest_step}; recovery allows "
                f"{allowed} in a row. Give the same command again: it goes on from the newest checkpoint. -v shows "
                "Ray's own messages"
            )
        if self.cluster and not answers(self.cluster):
            raise self.not_there("it does not answer any more")

    def not_there(self, why: object) -> TrainingError:
        """Return the error that says what to do where the cluster has not come back."""
        return TrainingError(
            f"the cluster at {self.cluster} cannot be joined again: {str(why).partition(chr(10))[0]}. Start its Ray "
            "again (ray up FILE, or ray start on this machine), then give the same command again: it goes on from the "
            "newest checkpoint"
        )

    def after(
        self,
        what: str,
        step: int,
        num_workers: tuple[int, int] | None = None,
        cluster: str = "",
        stopping: bool = False,
    ) -> Self:
        """Return the next record, for a command that has done `step` when it comes back once more."""
        in_a_row = self.in_a_row if step <= self.furthest_step else 0
        return replace(
            self,
            what=what,
            in_a_row=in_a_row + 1,
            furthest_step=max(step, self.furthest_step),
            num_workers=num_workers or self.num_workers,
            cluster=cluster,
            stopping=stopping or self.stopping,
        )

    def come_back(self) -> NoReturn:
        """Replace this process by a new one of the same command."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
