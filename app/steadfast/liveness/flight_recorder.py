"""The last collectives of this process, from torch's flight recorder."""

import base64
import os
import threading
import zlib
from typing import Any

_NUM_COLLECTIVES = "2000"  # torch's own default
_SIZE = "TORCH_FR_BUFFER_SIZE"
_FORMER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_MOMENT_S = 0.1
_LARGEST_BYTES = 2**26  # of an unpacked record
_LONGEST = 2**19  # of a packed record, which is sent with the heartbeats


class FlightRecorder:
    """Records the last collectives, readable while threads hang.

    Create it before the first process group, when torch reads the size from the environment.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._reading: threading.Thread | None = None
        self._read = ""
        if _FORMER_SIZE not in os.environ:
            os.environ.setdefault(_SIZE, _NUM_COLLECTIVES)

    def read(self) -> None:
        """Read the record for `take`, and return after a moment anyway."""
        if self._reading is not None and self._reading.is_alive():
            return
        # NCCL asks the device which collectives have ended, so a hanging device may block this thread as well.
        self._reading = threading.Thread(target=self._read_all, daemon=True, name="flight recorder")
        self._reading.start()
        self._reading.join(_MOMENT_S)

    def take(self) -> str:
        """Return the packed record once after each read, else ""."""
        taken, self._read = self._read, ""
        return taken

    def _read_all(self) -> None:
        # A record of all collectives may be too long for a heartbeat. Those that have not ended matter most.
        for only_active in (False, True):
            packed = pack(_recorded(self._device, only_active))
            if len(packed) <= _LONGEST:
                self._read = packed
                return


def pack(record: bytes) -> str:
    """Return a record as text."""
    return base64.b64encode(zlib.compress(record)).decode()


def unpack(packed: str) -> bytes:
    """Return the record of a packed text, or raise ValueError."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(packed), _LARGEST_BYTES)
    except zlib.error as error:
        raise ValueError(f"no packed record: {error}") from error


def _recorded(device: str, only_active: bool) -> bytes:
    """Return torch's record, a pickle of plain values for `torchfrtrace`."""
    # Imported here, because the coordinator unpacks records without torch.
    from torch._C import _distributed_c10d

    # NCCL has its own recorder, which PyTorch without CUDA lacks.
    name = "_dump_nccl_trace" if device == "cuda" else "_dump_fr_trace"
    dump: Any = getattr(_distributed_c10d, name, None)
    if dump is None:
        return b""
    # Stacks are left out, because symbolizing them takes the GIL, which the hanging thread may hold.
    recorded: bytes = dump(includeStackTraces=False, onlyActive=only_active)
    return recorded
