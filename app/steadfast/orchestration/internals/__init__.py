"""All uses of Ray's internal API.

tests/cluster/test_internals.py tests each use, so that it fails first when a new version of Ray changes one.
"""

import contextlib
import logging
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray._private.state
import ray.actor
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants, services, utils, worker
from ray._private.node import Node

from steadfast.orchestration import fork_worker
from steadfast.orchestration.fork_server import ForkServer

UV_VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_fork_server: ForkServer | None = None  # that of the embedded Ray


def silence_raylet() -> None:
    """Suppress the raylet's messages, which `log_to_driver=False` still prints."""
    # The run reports the important events itself. Ray's log files contain all messages.
    worker.print_to_stdstream = lambda data, ignore_prefix: None


@contextlib.contextmanager
def restored_functions() -> Iterator[None]:
    """Undo `silence_raylet`, `keep_sigterm_handler` and `use_own_python` after the context."""
    stock = worker.print_to_stdstream, utils.set_sigterm_handler, ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    try:
        yield
    finally:
        worker.print_to_stdstream, utils.set_sigterm_handler, ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = stock


def keep_sigterm_handler() -> None:
    """Keep this process's handler of SIGTERM during `ray.init`."""
    # Ray's own handler ends the process, and the run could not write a checkpoint first.
    utils.set_sigterm_handler = lambda handler: None


def ray_folder() -> Path:
    """Return the folder of an embedded Ray's sockets and logs."""
    return Path(get_default_ray_temp_dir())


def use_own_python() -> None:
    """Start workers of an embedded Ray by this Python, also if `uv run` has started this process."""
    # Ray would start each worker by `uv run` in a copy of the working directory, where packages that this environment
    # has beside those of pyproject.toml are missing: this program too. Ray reads the variable when it is imported.
    if UV_VARIABLE not in os.environ:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make a Ray started in this context listen on loopback only.

    The address of Ray's node must be given as 127.0.0.1.
    """
    # Ray would replace 127.0.0.1 by the machine's address, and listen on every interface.
    stock = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = stock


@contextlib.contextmanager
def without_services(log_monitor: bool) -> Iterator[None]:
    """Start an embedded Ray in this context without processes that a run does not use.

    These processes are the autoscaler's monitor, the dashboard's server and, unless `log_monitor` is true, the process
    that sends the workers' output to the driver. Together they take three seconds of CPU.
    """
    unused = {"start_monitor", "start_api_server"} | (set() if log_monitor else {"start_log_monitor"})
    stock = {name: getattr(Node, name) for name in unused}
    for name in unused:
        setattr(Node, name, lambda self, **_: None)
    try:
        yield
    finally:
        for name, function in stock.items():
            setattr(Node, name, function)


@contextlib.contextmanager
def forked_workers(num_threads: int, verbose: bool) -> Iterator[None]:
    """Make a Ray started in this context fork its workers from a fork server.

    The arguments are those of `ForkServer`.
    """
    global _fork_server
    if sys.platform != "linux":
        yield
        return
    # Ray appends this name to a folder, so an absolute path replaces the whole path.
    stock = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = fork_worker.__file__
    address = os.environ[fork_worker.ADDRESS_VARIABLE] = f"steadfast-{uuid.uuid4().hex}"
    _fork_server = ForkServer(num_threads, address, verbose=verbose)
    try:
        yield
    except BaseException:
        _fork_server.close()
        raise
    finally:
        ray_constants.SETUP_WORKER_FILENAME = stock
        del os.environ[fork_worker.ADDRESS_VARIABLE]


@contextlib.contextmanager
def other_class_ids() -> Iterator[None]:
    """Make actor classes defined in this context take their ids from Python's random bytes.

    Forks of a process whose Ray has drawn a random number would draw the same numbers, and give tasks the same ids.
    """
    stock = ray.actor.ActorClassID
    drawn = SimpleNamespace(from_random=lambda: stock(os.urandom(stock.size())))
    ray.actor.ActorClassID = drawn
    try:
        yield
    finally:
        ray.actor.ActorClassID = stock


def random_id() -> bytes:
    """Return an id that Ray draws."""
    return bytes(ray.UniqueID.from_random().binary())


def current_cluster() -> str | None:
    """Return the address of the cluster joined by `ray start`."""
    # Ray's own "auto" accepts any Ray on this machine, even one that another command has embedded. Such a Ray ends with
    # its command.
    found: str | None = utils.read_ray_address()
    return found or None


def without_idle_actors(callbacks: list[Any]) -> list[Any]:
    """Return Ray Train's callbacks without two that start unused actors."""
    # One actor manages datasets of Ray Data, the other cleans up placement groups for controllers that outlive their
    # driver. Together the actors would cost each start of a run three seconds of CPU.
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    return [each for each in callbacks if not isinstance(each, DatasetsCallback | PlacementGroupCleanerCallback)]


def dead_processes() -> set[str]:
    """Return the processes of Ray on this machine that have died.

    The names are "raylet" and, if Ray is embedded, "gcs_server".
    """
    node = worker._global_node
    if node is None:
        return set()
    # `dead_processes` only knows the processes that this node object has started. A command that has joined a cluster
    # has started no raylet, so it asks the raylet's socket.
    dead = {kind for kind, _ in node.dead_processes()}
    if not _listens(node.raylet_socket_name):
        dead.add("raylet")
    return dead


def is_embedded() -> bool:
    """Return whether Ray is embedded in this process."""
    node = worker._global_node
    return node is not None and bool(node.head)


def end_at_once() -> None:
    """Make `ray.shutdown` kill the embedded Ray by SIGKILL."""
    # Ray would send SIGTERM to one process after another. The processes do not react, and Ray waits a second for each.
    node = worker._global_node
    if node is not None:
        node.kill_all_processes = lambda **_: end_embedded()


def end_embedded() -> None:
    """Kill the embedded Ray and its workers, without calls to Ray."""
    workers = [each for each in psutil.Process().children(recursive=True) if _is_rays(each)]
    node = worker._global_node
    if node is not None:
        Node.kill_all_processes(node, check_alive=False, allow_graceful=False, wait=True)
    for each in workers:
        with contextlib.suppress(psutil.Error):
            each.kill()
    if _fork_server is not None:
        _fork_server.close()


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # the process listens, but is too busy to accept
            return True
    return True


def _is_rays(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # the process has just ended
        return False
    # A worker of Ray replaces its command line by "ray::" and the name of what it runs.
    return bool(words) and words[0].startswith("ray::")


def draining_nodes() -> dict[str, float]:
    """Return the nodes that are about to go, by id.

    Each value is the Unix time at which the node goes, or 0 if that is unknown.
    """
    found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return {node: deadline_ms / 1000 for node, deadline_ms in found.items()}


def remember_head(cluster: dict[str, Any]) -> None:
    """Record a local cluster's head for Ray's commands.

    Args:
        cluster: parsed cluster file with `provider.type: local`.
    """
    # Ray records the head only on the machine on which `ray up` was called.
    from ray.autoscaler._private.local import node_provider
    from ray.autoscaler._private.local.node_provider import LocalNodeProvider, record_local_head_state_if_needed

    node_provider.logger.setLevel(logging.WARNING)  # a line for each read and write of the record, before the output
    record_local_head_state_if_needed(LocalNodeProvider(cluster["provider"], cluster["cluster_name"]))
