"""How groups are aborted, with fakes in place of what needs a device."""

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist

from steadfast.world import groups
from steadfast.world.communicator import NcclCommunicator
from steadfast.world.groups import Groups, PeerLost, WorldRank, is_peer_loss, serve_store
from steadfast.world.timeouts import Timeouts
from tests.support.command import ROOT
from tests.support.like_nccl import Named

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


def test_an_abort_leaves_a_socket_that_has_taken_a_closed_sockets_number(monkeypatch: pytest.MonkeyPatch) -> None:
    former, former_peer = socket.socketpair()
    coming, peer = socket.socketpair()
    number, inode, fstat = former.fileno(), os.fstat(former.fileno()).st_ino, os.fstat

    def fstat_before_another_thread_runs(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        os.dup2(coming.fileno(), number)  # the socket of the next world, under the number of the former one
        return found

    monkeypatch.setattr(os, "fstat", fstat_before_another_thread_runs)
    groups._shut(number, inode)
    monkeypatch.undo()
    with former, former_peer, coming, peer:
        coming.send(b"1")
        peer.settimeout(SOON_S)
        assert peer.recv(1) == b"1"


class FakeGroup:
    """Counts what is launched on it."""

    def __init__(self) -> None:
        self.launched = 0
        self.sizes: list[tuple[str, int]] = []  # (collective, bytes)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.launched += 1
        self.sizes.append(("sum", tensors[0].nbytes))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.sizes.append(("broadcast", tensors[0].nbytes))


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
        (ROOT / "app/steadfast/world/communicator.py", SAID, True),
        (ROOT / "app/steadfast/world/communicator.py", "mat1 and mat2 shapes cannot be multiplied", False),
        (Path("/home/user/task.py"), GLOO, True),  # from a collective of the user's own
    ],
)
def test_error_of_user_code_that_mentions_a_socket_is_no_lost_peer(file: Path, message: str, expected: bool) -> None:
    assert is_peer_loss(raised_at(file, message)) is expected


ECC = "uncorrectable ECC error encountered"


def test_a_rank_whose_gpu_has_failed_says_so_before_it_waits_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"CUDA error: {ECC}")

    monkeypatch.setattr(torch, "zeros", zeros)
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=ECC):
        Groups.form(store, WorldRank(0, 2, 1), torch.device("cuda"), Timeouts())
    assert store.num_keys() == 0
    assert not dist.is_initialized()


class Broken(Named):
    """Raises at its end, as NCCL does in an error state, unless it was aborted before."""

    calls: ClassVar[list[str]] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        raise dist.DistBackendError("NCCL error: remote error")


def test_a_failure_while_nccl_connects_is_a_lost_peer_and_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> None:
        dist.new_group([0], backend="broken")
        raise dist.DistBackendError("NCCL timeout in: NCCLUtils.cpp")

    dist.Backend.register_backend("broken", lambda _, rank, size, limit: Broken(rank, size), devices=["cpu"])  # type: ignore[call-arg]
    monkeypatch.setattr(groups, "connect", connect)
    with pytest.raises(PeerLost, match="NCCL timeout"):
        Groups.form(dist.HashStore(), WorldRank(0, 1, 1), torch.device("cpu"), Timeouts())
    assert Broken.calls == ["abort", "shutdown"]
    assert not dist.is_initialized()


@pytest.mark.parametrize(("device", "is_default"), [("cpu", False), ("cuda", True)])
def test_control_messages_share_a_mesh_with_nothing_that_an_abort_may_leave_stuck(
    monkeypatch: pytest.MonkeyPatch, device: str, is_default: bool
) -> None:
    monkeypatch.setattr(groups, "probe", lambda _: None)
    monkeypatch.setattr(groups, "connect", lambda *_: SimpleNamespace(synchronize=lambda: None, under_way=[]))
    formed = Groups.form(dist.HashStore(), WorldRank(0, 1, 1), torch.device(device), Timeouts())
    assert (formed.control is dist.group.WORLD) is is_default
    formed.destroy()


def test_an_abort_does_not_wait_for_a_launch_that_hangs() -> None:
    launching, may_go_on, aborted = threading.Event(), threading.Event(), threading.Event()
    told: list[bool] = []

    class Hanging(FakeGroup):
        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            launching.set()
            told.append(may_go_on.wait(SOON_S))

    group: Any = Hanging()
    communicator = NcclCommunicator(group, aborted.set, SOON_S)
    launcher = threading.Thread(target=communicator.sum, args=(torch.ones(1),))
    launcher.start()
    assert launching.wait(SOON_S)
    communicator.abort()
    assert not aborted.is_set()
    may_go_on.set()
    launcher.join()
    assert told == [True]  # the launch still hung when the abort had returned
    assert aborted.wait(SOON_S)


def test_the_short_time_out_is_for_an_abort_alone() -> None:
    calls: list[str] = []
    backend = SimpleNamespace(
        _set_default_timeout=lambda limit: calls.append(f"{limit.total_seconds():g} s"),
        abort=lambda: calls.append("abort"),
    )
    groups._abort_soon(backend, 5.0)
    assert calls == ["5 s", "abort"]


class Failed(FakeGroup):
    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")


class Connecting(NcclCommunicator):
    """Its first collectives complete if its peers are there."""

    def __init__(self, group: Any, alive: bool) -> None:
        self.num_aborts, self._alive = 0, alive
        super().__init__(group, self._count, SOON_S)

    def _count(self) -> None:
        self.num_aborts += 1

    def _mark(self) -> Any:
        return lambda: self._alive


def connect(communicator: NcclCommunicator, limit_s: float, aborted: threading.Event) -> list[str]:
    """Connect on a thread that may hang. Return what it raised; it is still there after a while if it hangs."""
    raised: list[str] = []

    def run() -> None:
        try:
            communicator.connect(torch.device("cpu"), limit_s, aborted)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    return raised


def test_a_communicator_connects_by_collectives_of_the_sizes_that_steps_use() -> None:
    group = FakeGroup()
    communicator = Connecting(group, alive=True)
    assert connect(communicator, SOON_S, threading.Event()) == []
    assert group.sizes == [("sum", 4), ("sum", 25 * 2**20), ("broadcast", 25 * 2**20)]
    assert communicator.num_aborts == 0


@pytest.mark.parametrize(
    ("group", "limit_s", "is_aborted", "message"),
    [
        (FakeGroup(), 0.05, False, "NCCL's first collectives took longer than 0.05 s"),
        (FakeGroup(), 100.0, True, "the world was aborted while NCCL connected"),
        (Failed(), SOON_S, False, "NCCL error: remote process exited or there was a network error"),
    ],
)
def test_first_collectives_that_never_end_or_fail_are_aborted(
    group: FakeGroup, limit_s: float, is_aborted: bool, message: str
) -> None:
    aborted = threading.Event()
    if is_aborted:
        aborted.set()
    communicator = Connecting(group, alive=False)
    assert connect(communicator, limit_s, aborted) == [message]
    assert communicator.num_aborts == 1


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy"])
def test_nccl_groups_wait_briefly_while_they_form_and_long_afterwards(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[str] = []
    options = SimpleNamespace(config=SimpleNamespace(blocking=1))
    backend = SimpleNamespace(_set_default_timeout=lambda limit: calls.append(f"{limit.total_seconds():g} s"))

    class Group(FakeGroup):
        def _get_backend(self, device: torch.device) -> Any:
            return backend

        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            calls.append("sum")

    def new_group(ranks: list[int], limit: timedelta, kind: str, pg_options: Any, device_id: torch.device) -> Any:
        assert pg_options._timeout == limit
        calls.append(f"{kind} of {len(ranks)}: {limit.total_seconds():g} s, blocking={pg_options.config.blocking}")
        return Group()

    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo", "nccl", name])
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "1")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(NcclCommunicator, "_mark", lambda _: lambda: True)
    formed = groups._connect_nccl(range(100), torch.device("cpu"), threading.Event(), Timeouts(silence_s=5.0))
    assert isinstance(formed, NcclCommunicator)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "30"
    assert calls == [f"{name} of 100: 20 s, blocking=0", "1800 s", "sum", "sum"]
