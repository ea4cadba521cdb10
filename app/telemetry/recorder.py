"""What the leader writes down of an attempt: ledger, events, figures, and the summary at the end."""

from __future__ import annotations

import math
import resource
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from app.agree import Agreed
from app.checkpoint.catalog import Catalog, path_of
from app.checkpoint.restore import Restored
from app.checkpoint.snapshots import Snapshots
from app.checkpoint.state import Tensors, sha256
from app.config import Config
from app.errors import TrainingError
from app.faults.numerics import BadStep, Ignore, Numerics, Rollback, Stop
from app.kept import Kept
from app.ledger import Ledger, read_ledger, recent_losses
from app.plan import Plan
from app.rundir import RunDirectory
from app.runtime import Event, Runtime, World
from app.tasks import Task
from app.telemetry.goodput import goodput
from app.telemetry.meters import Meters
from app.telemetry.phases import Phases
from app.telemetry.throughput import peak_flops
from app.telemetry.trackers import Trackers, build_trackers

_SHOW_EVERY_S = 0.5  # trackers keep every figure; a person reads two lines a second


class _Ran(NamedTuple):
    """A step that this rank has done and the others have not confirmed yet."""

    seconds: float
    ended_s: float
    lr: float


class Recorder:
    """Every rank has one, so that the page needs no `if`; only the leader's writes.

    metrics: of the last validation in this attempt.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        world: World,
        directory: RunDirectory,
        plan: Plan,
        kept: Kept,
        restored: Restored,
        phases: Phases,
        why_not: str = "",
    ) -> None:
        """
        Args:
            why_not: there are no snapshots, though the state is sharded.
        """
        self._config, self._runtime, self._world, self._directory = config, runtime, world, directory
        self._plan, self._kept, self._restored, self._phases = plan, kept, restored, phases
        self._ledger = kept.ledger = Ledger(directory.store, world, plan)
        self._numerics = Numerics(config.recovery, world.skip, recent_losses(directory.store, restored.step))
        self._running: dict[int, _Ran] = {}
        self.metrics: dict[str, float] = {}
        self._shown_s, self._told_of_snapshots = -math.inf, False
        self._trackers = Trackers([])
        self._meters = _meters(kept, world)
        if world.leader:
            phases.look_back(directory)
            if why_not:
                self._publish("no_snapshots", error=why_not)
            self._trackers = build_trackers(config.trackers, directory.store, restored.step + 1)
            for step, why in restored.damaged.items():
                self._publish("checkpoint_quarantined", step=step, error=why)
            if restored.source != "start":
                written = (directory.last_step_line() or {}).get("step", 0)
                lost = max(0, written - restored.step)
                self._publish("restore", step=restored.step, source=restored.source, lost_steps=lost)
                # Survivors, and a state that was saved in an emergency, are ahead of what the leader lived to write.
                for step in range(written + 1, restored.step + 1):
                    self._write_as_planned(step)

    def ran(self, step: int, seconds: float, lr: float) -> None:
        """This rank has done `step`; what it was worth is known when its word has been read."""
        self._world.progress.enter("collective", step)
        self._running[step] = _Ran(seconds, time.time(), lr)
        if len(self._phases.seconds) == 4:
            self._phases.mark("first_step")
            self._publish(
                "attempt_started",
                step=self._restored.step,
                source=self._restored.source,
                world_size=self._world.size,
                **self._phases.seconds,
            )

    def commit(self, steps: list[Agreed]) -> None:
        """Writes down steps that all ranks have agreed on.

        Raises:
            BadStep: the numbers of one of them are bad; it is to be left out. On every rank alike.
            TrainingError: they are, and too many have been left out already; on every rank alike.
        """
        lines: list[tuple[Agreed, float, float]] = []
        try:
            for agreed in steps:
                ran = self._running.pop(agreed.step)
                if agreed.step in self._plan.skip:
                    self._ledger.commit(lines)
                    lines.clear()
                    self._write_as_planned(agreed.step)
                    continue
                self._check(agreed)
                lines.append((agreed, ran.seconds, ran.ended_s))
                self._meters.record(ran.seconds, agreed.num_samples, agreed.count)
                if self._world.leader and agreed.step % self._config.logging.every_steps == 0:
                    self._log(agreed, ran.lr)
        finally:
            self._ledger.commit(lines)

    def _check(self, agreed: Agreed) -> None:
        match self._numerics.judge(agreed):
            case Rollback(steps, cause):
                self._publish("rollback", steps=steps, cause=cause)
                dist.barrier(self._world.groups.control)  # nobody leaves before it is written down
                raise BadStep(steps, cause)
            case Ignore(cause):
                self._publish("spike", step=agreed.step, cause=cause)
            case Stop(why):
                raise TrainingError(why)
        expected = self._plan.num_samples_in(agreed.step) * self._kept.units_per_sample
        if agreed.count != expected and not self._kept.counts_vary:
            raise TrainingError(
                f"step {agreed.step}: the task counted {agreed.count}, the dataset's units_per_sample says {expected}. "
                "A dataset with masked targets must not set counts_vary = False"
            )

    def _write_as_planned(self, step: int) -> None:
        """A step that was left out, or whose word died with a worker."""
        self._ledger.as_planned(step, self._kept.loader.digest(*self._plan.positions(step)))

    def _log(self, agreed: Agreed, lr: float) -> None:
        total = self._kept.num_steps
        self._publish(
            "log",
            step=agreed.step,
            total_steps=total,
            loss=agreed.loss,
            lr=lr,
            grad_norm=agreed.grad_norm,
            unit="samples" if agreed.count == agreed.num_samples else "tok",
            memory_bytes=_memory_bytes(),
            world_size=self._world.size,
            **self._meters.snapshot(total - agreed.step),
        )

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        self._publish("validation", step=step, **metrics)

    def snapshot(self, snapshots: Snapshots) -> None:
        """Told once an attempt: they come often, and cost next to nothing."""
        if self._told_of_snapshots:
            return
        self._told_of_snapshots = True
        self._publish("snapshot", step=snapshots.step, stall_s=round(snapshots.stall_s, 4), bytes=snapshots.num_bytes)

    def checkpoints(self, news: list[Event]) -> None:
        """Of this rank, be it the leader or not: it may be the only one whose disk is full."""
        for each in news:
            self._runtime.publish({"attempt": self._world.attempt, **each})

    def end(self, cause: str, step: int, whole: nn.Module | None, state: dict[str, Tensors]) -> None:
        """Closes the attempt, and on the run's end writes its summary. A collective where state is sharded.

        Args:
            whole: the model, where this rank alone can run it.
        """
        self._world.progress.enter("end")
        self._publish("attempt_ended", cause=cause, step=step)
        self._trackers.close()
        self._kept.close_ledger()
        if cause == "resized":
            return
        hashes = {f"{part}_sha256": sha256(tensors) for part, tensors in state.items()}
        if not self._world.leader:
            return
        units = self._kept.units_per_sample
        history = read_ledger(self._directory.store)
        samples = sum(line["num_samples"] for line in history.committed.values())
        newest = Catalog(self._directory.store).newest()
        summary: dict[str, Any] = {
            "status": cause,
            "step": step,
            "samples": samples,
            "tokens": samples * units if units > 1 else None,
            "metrics": self.metrics,
            **hashes,
            "attempts": self._world.attempt,
            "lost_steps": history.num_lost,
            **goodput(history, self._directory.read_events()),
            "last_checkpoint": self._directory / path_of(newest) if newest else None,
        }
        self._directory.write_summary(summary)
        self._publish("finished", **summary, sample=_sample(self._kept.task, whole, self._kept.precision.device))

    def _publish(self, name: str, **fields: Any) -> None:
        if not self._world.leader:
            return
        event = {"event": name, "attempt": self._world.attempt, **fields}
        if name in ("log", "validation"):
            self._trackers.record(event)
        if name == "log":
            if time.monotonic() - self._shown_s < _SHOW_EVERY_S:
                return
            self._shown_s = time.monotonic()
        self._runtime.publish(event)


def _sample(task: Task, model: nn.Module | None, device: torch.device) -> str | None:
    """What the task has to show of the model, if it has anything."""
    sample = getattr(task, "sample", None)
    if sample is None or model is None:
        return None
    model.eval()
    text: str | None = sample(model, device)
    return text


def _meters(kept: Kept, world: World) -> Meters:
    flops = getattr(kept.model, "flops_per_sample", None)
    device = kept.precision.device
    peak = (
        peak_flops(torch.cuda.get_device_name(device), kept.precision.compute_dtype) if device.type == "cuda" else None
    )
    return Meters(flops() if flops else None, peak * world.size if peak else None)


def _memory_bytes() -> int:
    """The peak so far: of the device, or of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
