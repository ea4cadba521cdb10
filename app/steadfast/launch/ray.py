"""Train on Ray, from a configuration to the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from steadfast.analysis.report.write import reported
from steadfast.config import Config
from steadfast.errors import UsageError
from steadfast.launch.again import Comebacks
from steadfast.launch.resume import end_copies, release_run, start_or_resume
from steadfast.run import events
from steadfast.run.directory import RunDirectory
from steadfast.run.interrupts import Interrupts
from steadfast.run.owner import Ownership
from steadfast.telemetry.console import Console
from steadfast.units import plural

if TYPE_CHECKING:
    from steadfast.orchestration.objects import Objects
    from steadfast.orchestration.trainer import Fit, RayDied


def launch(config: Config, started_s: float, console: Console) -> int:
    """Train on Ray, and return the exit code of the command.

    Args:
        started_s: Unix time at which the command was given.

    Raises:
        ResourcesMissing: the cluster has no room for the smallest number of workers.
    """
    before = Comebacks.of_this_process()
    before.check(config.recovery.max_failures)
    return _launch(config, started_s, console, before)


def launch_within(config: Config, started_s: float, console: Console, return_finished: bool) -> None:
    """Train on Ray within a program of the user's, whose process goes on.

    A Ray that runs in the program is used and left running.

    Args:
        started_s: Unix time of the call.
        return_finished: as in `start_or_resume`.

    Raises:
        SteadfastError: the run cannot begin or go on. Without a process to replace, the death of Ray is an error too.
    """
    from steadfast.orchestration.cluster import restored_settings

    with restored_settings():
        _launch(config, started_s, console, Comebacks(), within=True, return_finished=return_finished)


def _launch(
    config: Config,
    started_s: float,
    console: Console,
    before: Comebacks,
    within: bool = False,
    return_finished: bool = False,
) -> int:
    """Claim the run, train, and return the exit code.

    Args:
        within: as in `_Launch`.
    """
    directory = RunDirectory.of(config)
    new = directory.check_writable()
    # The run is claimed before its directory is read, so that no other command changes the directory meanwhile.
    ownership = Ownership.claim(directory.store, before.token, say=console.line)
    try:
        begun = events.RunStarted(time_s=started_s, launcher="ray", again=bool(before.what) or None)
        if not start_or_resume(config, directory, begun, console.line, return_finished):
            return 0
        bounds = before.num_workers or config.scaling.num_workers
        num_microbatches = directory.batch(config.batch).num_microbatches
        sizes = config.world_sizes(bounds, num_microbatches)
        config = config.replace("scaling.num_workers", _narrowed(bounds, sizes, num_microbatches))
        stopping = "stopping; Ctrl-C again to stop at once"
        interrupts = Interrupts(lambda _: console.line(stopping), of_process=not within)
        with reported(config.run, directory, console.line), interrupts:
            return _Launch(config, directory, ownership, console, interrupts, before, within).run(started_s)
    finally:
        release_run(directory, ownership, new)


def _narrowed(bounds: tuple[int, int], sizes: Sequence[int], num_microbatches: int) -> tuple[int, int]:
    """Return the bounds narrowed to the possible numbers of workers.

    Raises UsageError if no number of workers is possible. With `batch.microbatch_size=auto` the run may have chosen too
    few microbatches.
    """
    if not sizes:
        raise UsageError(
            f"scaling.num_workers: at least {bounds[0]} workers have only {num_microbatches} microbatches in a "
            "global batch, because batch.microbatch_size=auto was resolved when the run began. Ask for fewer workers, "
            "or give batch.microbatch_size as a number"
        )
    return sizes[0], sizes[-1]


@dataclass(frozen=True)
class _Launch:
    """Training of one command on Ray, after the command has claimed the run.

    Attributes:
        within: whether a program of the user's trains, so that its process must not be replaced or ended.
    """

    config: Config
    directory: RunDirectory
    ownership: Ownership
    console: Console
    interrupts: Interrupts
    before: Comebacks
    within: bool = False

    def run(self, started_s: float) -> int:
        """Connect to a cluster, train there, and return the exit code."""
        import ray

        packed = self._pack()
        joined = self.within and ray.is_initialized()
        if joined:
            from steadfast.orchestration.cluster import running_cluster

            address = running_cluster(self.config.cluster)
        else:
            address = self._connect(started_s)
        self.interrupts.on_abort = ray.shutdown
        from steadfast.orchestration.internals import end_embedded
        from steadfast.orchestration.trainer import RayDied

        try:
            return self._train(address, packed)
        except RayDied as died:
            if not self.within:
                self._come_back(died)
            if not joined:
                end_embedded()  # a shutdown would wait for the dead part
            raise
        finally:
            if not joined:
                ray.shutdown()

    def _pack(self) -> bytes:
        """Return the objects that a program gave to `fit`, pickled."""
        if not self.within:
            return b""
        # This comes before Ray starts, because an object that cannot be sent to workers is refused.
        from steadfast.orchestration.objects import pack_objects

        return pack_objects(self.config)

    def _come_back(self, died: RayDied) -> NoReturn:
        """Start the command again in this process."""
        from steadfast.orchestration.internals import end_embedded

        follows = "the command starts again from the newest state"
        if self.interrupts.stopping:
            follows += ", to save it and stop"
        restarted = events.ProcessRestarted(process=died.what, follows=follows)
        self.directory.record(restarted)
        self.console.line(restarted.line())
        self.console.close()
        # The children of a process survive `exec`, so the processes of an embedded Ray would run beside those of the
        # next one.
        end_embedded()
        # The process is replaced even if Ray has died too often: a process in which Ray has died may hang at its end.
        # The new process counts the deaths and raises the error.
        stopping = self.interrupts.stopping
        self.before.after(died.what, died.step, died.num_workers, died.cluster, stopping).come_back()

    def _connect(self, started_s: float) -> str:
        """Connect to a cluster, or embed Ray. Return the address or `EMBEDDED`."""
        from steadfast.orchestration.cluster import RayNotStarted, connect

        # The next steps need torch and Ray Train. A thread imports both while Ray's processes start.
        importing = threading.Thread(target=import_module, args=("steadfast.orchestration.trainer",))
        try:
            with self.interrupts.spared():
                # Threads and processes that start here inherit the blocked signals.
                self.console.stage("starting or joining Ray", started_s)
                importing.start()
                address = connect(self.config.cluster, self.config.scaling, self.console.verbose)
        except Exception as error:
            if self.before.cluster:
                raise self.before.cluster_gone(error) from error
            if not self.before.restarts_without_progress or not isinstance(error, RayNotStarted):
                raise
            # On a busy machine the start of an embedded Ray may exceed Ray's own time limit, so it is tried again.
            self.before.after("Ray", self.before.last_step).come_back()
        importing.join()
        return address

    def _train(self, address: str, packed: bytes) -> int:
        """Wait for room on the cluster, and train until the run ends."""
        from steadfast.orchestration.cluster import EMBEDDED, await_room, describe_cluster, gpus_per_worker
        from steadfast.orchestration.objects import Objects
        from steadfast.orchestration.trainer import RayDied, head_host

        config = self.config
        self.console.line(describe_cluster(address))
        if (
            address != EMBEDDED
            and not self.within
            and config.cluster.address == "auto"
            and "RAY_ADDRESS" not in os.environ
        ):
            self.console.line("joined the Ray that runs on this machine; cluster.address=local starts another one")
        head_host()  # raises if there is no head; Ray would wait for one
        embedded = address == EMBEDDED
        if embedded and config.cluster.pip:
            # All workers of an embedded Ray run on the Python of this command.
            self.console.line(f"cluster.pip: nothing is installed here, because all workers run on {sys.executable}")
            config = config.replace("cluster.pip", ())
        self.console.stage(f"waiting for room for {plural(config.scaling.min_workers, 'worker')}")
        gpus = gpus_per_worker(config.scaling, embedded)
        expected = await_room(config.scaling, gpus, self.ownership, self.interrupts, embedded)
        objects = Objects(packed)
        fit = self._fit(config, embedded, gpus, expected, objects)
        ray_lives = True
        try:
            return fit.result()
        except RayDied:
            ray_lives = False
            raise
        finally:
            if self.within and ray_lives:
                fit.end()
                objects.close()
            # If another command has taken the run over, its workers need the copies.
            if fit.over and self.ownership.holds():
                with contextlib.suppress(OSError):
                    end_copies(self.directory)

    def _fit(self, config: Config, embedded: bool, gpus: int, expected: int, objects: Objects) -> Fit:
        """Start the coordinator, and return the training of its workers."""
        import ray

        from steadfast.orchestration.membership import Membership
        from steadfast.orchestration.trainer import Fit, build_trainer, start_coordinator

        membership = Membership.of(config.scaling, expected, config.parallel.layout)
        coordinator = start_coordinator(config.recovery, membership, self.directory, self.ownership)
        cluster = "" if embedded else ray.get_runtime_context().gcs_address
        return Fit(
            partial(build_trainer, config, self.directory, coordinator, gpus, objects),
            coordinator,
            self.directory,
            self.console,
            self.interrupts,
            expected,
            config.recovery.max_failures,
            cluster,
            self.before.stopping,
        )
