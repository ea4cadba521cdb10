"""How a failed command ends as one of torchrun's ranks: one of them says why, and torchrun repeats it at its end."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from app.errors import SteadfastError

_PROGRAM = Path(__file__).parents[1]
# How long a rank leaves it to others to say why all have failed. As soon as one has ended, torchrun ends the rest.
_OF_FIRST_S = 3.0  # the same error, on rank 0
_OF_CAUSE_S = 6.0  # the error of a rank that this one has lost


def of_torchrun() -> bool:
    """Return whether this process is a rank that torchrun has started, and will end once another one has failed."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def expect_end() -> None:
    """Let SIGTERM end this rank without an error: torchrun sends it once another rank has failed.

    It would list this rank as a failure too, and the user would look for a second reason.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def end_rank(error: Exception, text: str) -> NoReturn:
    """End this rank of torchrun's after an error, of which it says `text` unless another rank does."""
    _let_others_speak(error)
    _leave_message(error)
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    # At once: as long as this process is there, torchrun has not heard, and the others wait.
    os._exit(error.exit_code if isinstance(error, SteadfastError) else 1)


def traceback_of(error: Exception) -> str:
    """Return the traceback of an error from the first line of the user's own code on; all of it if there is none."""
    users = error.__traceback__
    while users is not None and _is_own(users.tb_frame.f_code.co_filename):
        users = users.tb_next
    return "".join(traceback.format_exception(error.with_traceback(users or error.__traceback__))).rstrip()


def _is_own(file: str) -> bool:
    return Path(file).is_relative_to(_PROGRAM) or Path(file) == _PROGRAM.parent / "main.py"


def _let_others_speak(error: Exception) -> None:
    wait_s = 0.0
    if _is_of_another(error):
        wait_s = _OF_CAUSE_S
    elif os.environ.get("RANK", "0") != "0":
        wait_s = _OF_FIRST_S
    if wait_s:
        expect_end()
        time.sleep(wait_s)


def _leave_message(error: Exception) -> None:
    """Write the message where torchrun looks for what to show of a rank that has failed."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = str(error) if isinstance(error, SteadfastError) else f"{type(error).__name__}: {error}"
        # As torch.distributed.elastic's ErrorHandler does, less the traceback, which stands above.
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}))


def _is_of_another(error: Exception) -> bool:
    cause = error.__cause__ if isinstance(error, SteadfastError) else error
    if cause is None or "torch" not in sys.modules:  # nothing has been computed
        return False
    from app.world.groups import is_peer_loss

    return is_peer_loss(cause)
