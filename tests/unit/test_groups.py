"""How groups are aborted, with fakes in place of what needs a device."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from app.world.communicator import NcclCommunicator
from app.world.groups import Groups, PeerLost, is_peer_loss, serve_store
from tests.command import ROOT

SOON_S = 10.0


class FakeCommunicator:
    """Notes what was so when it was aborted."""

    def __init__(self, aborted: threading.Event, theirs: socket.socket) -> None:
        self.seen: list[bool] = []
        self._aborted, self._theirs = aborted, theirs

    def synchronize(self) -> None:
        pass

    def abort(self) -> None:
        try:
            connected = self._theirs.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            connected = True
        self.seen = [self._aborted.is_set(), connected]


def test_an_abort_sets_the_flag_then_ends_the_device_s_communicator_and_then_the_host_s_connections() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        aborted = threading.Event()
        communicator = FakeCommunicator(aborted, theirs)
        groups = Groups(None, communicator, None, {ours.fileno(): os.fstat(ours.fileno()).st_ino}, aborted)  # type: ignore[arg-type]
        groups.gate()
        groups.abort()
        assert communicator.seen == [True, True]
        theirs.settimeout(SOON_S)
        assert theirs.recv(1) == b""
        with pytest.raises(PeerLost):
            groups.gate()


class FakeGroup:
    """Counts what is launched on it."""

    def __init__(self) -> None:
        self.launched = 0

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.launched += 1


def test_an_abort_of_nccl_holds_up_nobody_and_nothing_is_launched_after_it() -> None:
    called, may_end = threading.Event(), threading.Event()

    def abort() -> None:
        called.set()
        may_end.wait(SOON_S)
        raise RuntimeError("NCCL communicator was aborted")  # it has failed already

    group: Any = FakeGroup()
    communicator = NcclCommunicator(group, abort, SOON_S)
    communicator.sum(torch.ones(1))
    communicator.abort()  # returns though the abort has not ended
    assert called.wait(SOON_S)
    may_end.set()
    communicator.sum(torch.ones(1))
    assert group.launched == 1


def test_a_process_that_cannot_abort_nccl_in_time_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    group: Any = FakeGroup()
    NcclCommunicator(group, lambda: may_end.wait(SOON_S), 0.05).abort()
    assert ended.wait(SOON_S)
    may_end.set()


def test_a_store_listens_on_one_address_and_ends_with_its_last_reference() -> None:
    store = serve_store("127.0.0.1")
    port = store.port
    own = [
        each.laddr
        for each in psutil.Process().net_connections("tcp")
        if each.laddr.port == port and each.status == psutil.CONN_LISTEN
    ]
    assert [address.ip for address in own] == ["127.0.0.1"]
    client = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=10))
    client.set("key", "value")
    assert store.get("key") == b"value"
    del client, store
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", port)):
        pass


def raised_at(file: Path, message: str) -> RuntimeError:
    """Return an error as a function in `file` raises it."""
    names: dict[str, Any] = {}
    exec(compile(f"def fail(): raise RuntimeError({message!r})", str(file), "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["fail"]()
    return raised.value


SAID = "cannot connect to the websocket of my metrics server"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
TORCH = Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("file", "message", "expected"),
    [
        (Path("/home/user/task.py"), SAID, False),
        (TORCH.parent / "websockets/client.py", SAID, False),
        (TORCH / "utils/data/dataloader.py", SAID, False),
        (TORCH / "distributed/distributed_c10d.py", SAID, True),
        (TORCH / "autograd/graph.py", SAID, True),  # a collective of a backward
        (ROOT / "app/world/communicator.py", SAID, True),
        (ROOT / "app/world/communicator.py", "mat1 and mat2 shapes cannot be multiplied", False),
        (Path("/home/user/task.py"), GLOO, True),  # from a collective of the user's own
    ],
)
def test_an_error_of_the_users_code_that_mentions_a_socket_is_no_lost_peer(
    file: Path, message: str, expected: bool
) -> None:
    assert is_peer_loss(raised_at(file, message)) is expected
