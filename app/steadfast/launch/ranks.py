"""End a failed rank under torchrun.

Of several failed ranks only one reports the cause. torchrun repeats the report at its end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from steadfast.errors import SteadfastError, described

# Time that a failed rank waits for another rank to report the cause. torchrun ends all other ranks after one exit.
_OF_FIRST_S = 3.0  # time for rank 0 to report the same error
_OF_CAUSE_S = 6.0  # time for a lost peer to report its own error


def of_torchrun() -> bool:
    """Return whether torchrun has started this process as a rank.

    torchrun ends such a process when another rank fails.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def expect_end() -> None:
    """Make SIGTERM end this rank without an error."""
    # torchrun sends SIGTERM when another rank fails. With an error torchrun would list this rank as a failure too, and
    # the user would look for a second cause.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def end_rank(error: Exception, text: str) -> NoReturn:
    """End this rank after an error, and print `text` unless another rank reports first."""
    _let_others_speak(error)
    _leave_message(error)
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    exit_code = error.exit_code if isinstance(error, SteadfastError) else 1
    # The exit skips all cleanup, because the other ranks wait until torchrun notices the end of this process.
    os._exit(exit_code)


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
    """Write the message to torchrun's error file for this rank."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = f"error: {error}" if isinstance(error, SteadfastError) else described(error)
        # The format is that of torch.distributed.elastic's ErrorHandler, without the traceback, which is printed.
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": message}))


def _is_of_another(error: Exception) -> bool:
    cause = error.__cause__ if isinstance(error, SteadfastError) else error
    # Without torch there has been no collective. The import below would load torch, which takes seconds.
    if cause is None or "torch" not in sys.modules:
        return False
    from steadfast.world.groups import is_peer_loss

    return is_peer_loss(cause)
