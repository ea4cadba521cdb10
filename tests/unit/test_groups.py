"""How groups are aborted, with a fake in place of NCCL."""

from __future__ import annotations

import os
import socket

from app.world.groups import Groups


class FakeCommunicator:
    """NCCL's, as far as `abort` goes. NCCL raises when the communicator has failed already."""

    def __init__(self, failed: bool = False) -> None:
        self.failed, self.aborted = failed, False

    def abort(self) -> None:
        self.aborted = True
        if self.failed:
            raise RuntimeError("NCCL communicator was aborted")


def test_an_abort_ends_device_communicators_first_and_the_hosts_connections_whatever_they_answer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        communicators = FakeCommunicator(failed=True), FakeCommunicator()
        inode = os.fstat(ours.fileno()).st_ino
        Groups(None, None, {ours.fileno(): inode}, communicators).abort()  # type: ignore[arg-type]
        assert [each.aborted for each in communicators] == [True, True]
        theirs.settimeout(5)
        assert theirs.recv(1) == b""
