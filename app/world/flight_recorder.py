"""The last collectives of this process, as torch's flight recorder has seen them begin and end."""

import base64
import os
import threading
import zlib
from typing import Any

_SIZE = "TORCH_FR_BUFFER_SIZE"
_FORMER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_MOMENT_S = 0.1
_LARGEST_BYTES = 2**26  # of a record
_LONGEST = 2**19  # of one that is packed; it goes the way of heartbeats


class FlightRecorder:
    """Remember the last `size` collectives on a kind of device, and read them beside the threads that hang.

    To be made before the first process group, by which time torch asks the environment for the size.
    """

    def __init__(self, size: int, device: str) -> None:
        self._size = size
        self._device = device
        self._reading: threading.Thread | None = None
        self._read = ""
        if _FORMER_SIZE not in os.environ:
            os.environ.setdefault(_SIZE, str(size))

    def read(self) -> None:
        """Read what is remembered, for `take`. Return after a moment also where that takes longer."""
        if not self._size or (self._reading is not None and self._reading.is_alive()):
            return
        # On a thread of its own, which may be stuck for as long as the device: NCCL asks it what has ended.
        self._reading = threading.Thread(target=self._read_all, daemon=True, name="flight recorder")
        self._reading.start()
        self._reading.join(_MOMENT_S)

    def take(self) -> str:
        """Return what has been read, packed, once; "" if there is nothing new."""
        taken, self._read = self._read, ""
        return taken

    def _read_all(self) -> None:
        for only_active in (False, True):
            packed = pack(_recorded(self._device, only_active))
            if len(packed) <= _LONGEST:
                self._read = packed
                return


def pack(record: bytes) -> str:
    """Return a record as text."""
    return base64.b64encode(zlib.compress(record)).decode()


def unpack(packed: str) -> bytes:
    """Return the record of a text. Raises ValueError if it is none."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(packed), _LARGEST_BYTES)
    except zlib.error as error:
        raise ValueError(f"no packed record: {error}") from error


def _recorded(device: str, only_active: bool) -> bytes:
    """Return what torch remembers, a pickle of plain values as its `torchfrtrace` reads them."""
    # Imported here, because the coordinator needs no torch to unpack.
    from torch._C import _distributed_c10d

    # NCCL has a recorder of its own, which a PyTorch without CUDA lacks.
    dump: Any = getattr(_distributed_c10d, "_dump_nccl_trace" if device == "cuda" else "_dump_fr_trace", None)
    # Stacks are left out: their symbols would take the GIL, which who hangs may hold.
    return dump(includeStackTraces=False, onlyActive=only_active) if dump else b""
