"""Everything of Ray that is not public API. tests/cluster/test_internals.py fails first when an upgrade moves it."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import ray._private.state
from ray._private import services, utils, worker
from ray._private.node import Node


def silence_raylet() -> None:
    """Keep the raylet's messages off the terminal, which `log_to_driver=False` does not."""
    # What matters of them the run says itself; all of them are in Ray's log files.
    worker.print_to_stdstream = lambda data, ignore_prefix: None


def keep_sigterm_handler() -> None:
    """Keep this process's handler of SIGTERM, which `ray.init` would replace by one that ends the process."""
    utils.set_sigterm_handler = lambda handler: None


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started in this context listen on the loopback alone, where its node is to be 127.0.0.1."""
    # Ray makes the machine's address of 127.0.0.1, and then listens on every interface.
    stock = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = stock


def current_cluster() -> str | None:
    """Return the address of the cluster that `ray start` has made this machine a part of."""
    # Ray's own "auto" takes any Ray that runs here, also one that another command has embedded, and that ends with it.
    found: str | None = utils.read_ray_address()
    return found or None


def without_idle_actors(callbacks: list[Any]) -> list[Any]:
    """Return Ray Train's callbacks less those that start an actor for what is not used here."""
    # A manager of Ray Data datasets, and a cleaner of placement groups for controllers that outlive their driver. Each
    # start of a run would be longer by three seconds of CPU.
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    return [each for each in callbacks if not isinstance(each, DatasetsCallback | PlacementGroupCleanerCallback)]


def dead_processes() -> set[str]:
    """Return what of Ray has died: the "raylet" of this machine, and the "gcs_server" where Ray is embedded."""
    node = worker._global_node
    if node is None:
        return set()
    dead = {kind for kind, _ in node.dead_processes()}
    if not _listens(node.raylet_socket_name):
        dead.add("raylet")
    return dead


def end_at_once() -> None:
    """Have `ray.shutdown` end what this process has embedded of Ray by SIGKILL."""
    # It would send SIGTERM to one process after another, which they do not heed, and wait for a second each.
    node = worker._global_node
    if node is not None:
        node.kill_all_processes = lambda **_: end_embedded()


def end_embedded() -> None:
    """Kill what this process has embedded of Ray, and Ray's processes below it. Ray itself is not asked."""
    workers = [each for each in psutil.Process().children(recursive=True) if _is_rays(each)]
    node = worker._global_node
    if node is not None:
        Node.kill_all_processes(node, check_alive=False, allow_graceful=False, wait=True)
    for each in workers:
        with contextlib.suppress(psutil.Error):
            each.kill()


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it has no time to accept
            return True
    return True


def _is_rays(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::") for word in process.cmdline()[:1])
    except psutil.Error:  # it has just ended
        return False


def draining_nodes() -> dict[str, float]:
    """Return the nodes that are about to go: id -> Unix time at which the node goes; 0 where nobody said when."""
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in found.items()}


def remember_head(cluster: dict[str, Any]) -> None:
    """Let Ray's commands find the head of `cluster`, a parsed cluster file of one's own machines (provider local)."""
    # Ray itself remembers the head only on the machine where `ray up` was given.
    from ray.autoscaler._private.local.node_provider import LocalNodeProvider, record_local_head_state_if_needed

    record_local_head_state_if_needed(LocalNodeProvider(cluster["provider"], cluster["cluster_name"]))
