"""Recorder of an attempt's ledger, events, figures and summary."""

import math
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.checkpoint.restore import Restored
from steadfast.checkpoint.snapshots import Snapshots
from steadfast.checkpoint.state import Tensors, sha256, weights_digest
from steadfast.config import KeepBestConfig
from steadfast.data.fingerprint import LAYOUT
from steadfast.guards.recompute import adds_parts_by_themselves
from steadfast.loop.worker_state import WorkerState
from steadfast.optim.schedule import warmup_in_force
from steadfast.parallel import strategy_of
from steadfast.parallel.dtensor import unsharded
from steadfast.plan import Plan
from steadfast.run import events
from steadfast.run.directory import METRICS, RunDirectory
from steadfast.run.ledger import ACTS, Ledger, StepStats, StepTimes
from steadfast.storage.jsonl import last_lines, open_stream
from steadfast.tasks import Task
from steadfast.telemetry.goodput import goodput, read_totals
from steadfast.telemetry.meters import GpuMeter, Meters
from steadfast.telemetry.past import Past
from steadfast.telemetry.profiler import Profiler
from steadfast.telemetry.startup import StartupTimer
from steadfast.telemetry.throughput import total_peak_flops
from steadfast.telemetry.trackers import Trackers, build_trackers
from steadfast.units import in_ranges, plural
from steadfast.world.control import StepResult
from steadfast.world.device import variables_kept
from steadfast.world.runtime import Outcome, Runtime, World

# Trackers get every figure. The console gets at most two lines a second, because each line costs a call between
# processes.
_SHOW_EVERY_S = 0.5
_NAMES = 3  # number of unmatched tensors that are named as examples


class Recorder:
    """Writes one attempt's results to ledger, events and trackers.

    The recorder makes no decisions: `Guard` has already judged each step.
    """

    # Every rank has a recorder, so that `train` needs no condition. Only the leader's recorder writes results.
    def __init__(self, directory: RunDirectory, runtime: Runtime, world: World, worker: WorkerState) -> None:
        config = worker.config
        self._config = config
        self._directory = directory
        self._runtime = runtime
        self._world = world
        self._worker = worker
        # Of the last validation in this attempt, or of the restored step. Other ranks know those of this attempt only.
        self.metrics: dict[str, float] = {}
        self._ran: dict[int, tuple[StepResult, StepTimes]] = {}  # steps finished on this rank, but not on all ranks yet
        self._digests: dict[int, str] = {}  # by step: digest of the weights after it, for its ledger line
        self._acts_s = dict.fromkeys(ACTS, 0.0)  # seconds in each act of this attempt, up to the last step
        self._started: tuple[Restored, StartupTimer] | None = None
        self._shown_s = -math.inf
        self._told_once: set[str] = set()
        self._snapshots: Snapshots | None = None
        self._committed = worker.writer.committed  # newest checkpointed step that this rank knows of
        self._past = Past()
        self._best = math.inf  # best value of a validation so far, with the other sign if the greatest is the best
        self._lost_steps = 0  # finished steps that this attempt repeats
        self._trackers = Trackers([])
        self._early: list[tuple[int, Mapping[str, Any]]] | None = []  # figures of hooks before `begin`
        self._meters = _meters(worker, config.precision.tf32)
        self._gpu_meter = GpuMeter(worker.precision.device)
        self._profiler = Profiler(config.profile, directory, world, worker.precision.device)
        worker.close_later(self._profiler.close)
        self.norms_trigger = worker.trigger("gradient_norms", config.logging.gradient_norms_every)
        self._digest_trigger = worker.trigger("weights_digest", config.weights_digest_every)

    def begin(self, plan: Plan, restored: Restored, timer: StartupTimer, snapshots: Snapshots) -> None:
        """Record the start of the attempt, before its first step.

        The leader publishes the restored state, damaged copies, refused snapshots, the promise about a sharded state,
        and facts about model and GPUs that affect the run.
        """
        self._plan = plan
        self._ledger = Ledger(self._directory.store, self._world.attempt, plan, self._world.leader)
        self._worker.close_later(self._ledger.close)
        self._started = restored, timer
        self._profiler.begin(restored.step)
        self._snapshots = snapshots
        if snapshots.promise is not None:
            snapshots.promise.begin(restored.step)
        early, self._early = self._early or (), None
        if not self._world.leader:
            return
        self._figures = open_stream(self._directory.store, METRICS)
        self._worker.close_later(self._figures.close)
        self._past = Past.read(self._directory)
        for metrics in self._past.validations.values():
            self._is_best(metrics)
        self.metrics = dict(self._past.validations.get(restored.step, {}))
        # A checkpoint of an earlier process is known only from its event.
        self._committed = max(self._committed, self._past.committed)
        if restored.source == "checkpoint":
            # Newer checkpoints are damaged, or have the update of a step that is skipped now. They are never restored.
            self._committed = restored.step
        timer.measure_detection(self._directory)
        if snapshots.refused is not None:
            self._publish(snapshots.refused)
        if snapshots.promise is not None:
            self._notify_once(snapshots.promise.stated)
        self._tell_of_numerics()
        self._tell_of_nothing_to_compare()
        # Trackers drop the figures of earlier attempts from the first step on, which is only known now.
        self._trackers = build_trackers(self._config, self._directory.store, restored.step + 1)
        # The lambda looks up the trackers only when it is called, because `end` removes them from the recorder.
        self._worker.close_later(lambda: self._trackers.leave())
        self._trackers.begin(restored.step, self._past, self._newest_figures(restored.step))
        for step, values in early:
            self._trackers.log(step, values)
        for step, why in snapshots.damaged.items():
            self._notify(f"the snapshot of step {step} is damaged and will not be used: {why}")
        if restored.source == "start":
            self._tell_of_shortened_warmup()
            self._tell_of_the_model()
            return
        written = self._directory.last_step()
        self._lost_steps = max(0, written - restored.step)
        self._publish(events.Restore(step=restored.step, source=restored.source, lost_steps=self._lost_steps))
        # The state of survivors, or an emergency checkpoint, may be ahead of the ledger, because the former leader
        # ended before it wrote the lines of these steps.
        for step in range(written + 1, restored.step + 1):
            self._write_as_planned(step)

    def _newest_figures(self, step: int) -> list[events.Log | events.Validation]:
        """Return the newest figures up to `step`, in the order of steps."""
        found: dict[int, list[events.Log | events.Validation]] = {}
        for line in last_lines(self._directory.store, METRICS):
            log = events.parse_event(line)
            if isinstance(log, events.Log) and log.step <= step:
                found[log.step] = [log]  # the line of a step that was done again replaces the former one
        for validated, metrics in self._past.validations.items():
            if validated in range(min(found, default=0), step + 1):
                found.setdefault(validated, []).append(events.Validation(step=validated, metrics=metrics))
        return [event for _, each in sorted(found.items()) for event in each]

    def _tell_of_numerics(self) -> None:
        gpus = self._worker.gpus
        lacking = [rank for rank, gpu in enumerate(gpus) if not gpu.has_bf16]
        if self._config.precision.kind == "auto" and 0 < len(lacking) < len(gpus):
            gpu = gpus[lacking[0]].name
            self._notify(f"precision.kind=auto is fp32, not bf16: the {gpu} of rank {lacking[0]} has no bf16")
        if self._config.run.reproducible and (kept := variables_kept()):
            self._notify(
                f"run.deterministic keeps {', '.join(kept)} of the environment; results may differ between runs"
            )
        if uncompiled := self._worker.uncompiled:
            ranks, reason = list(uncompiled), next(iter(uncompiled.values()))
            text = f"compile=blocks: layers run uncompiled on {in_ranges('rank', ranks)}: {reason}"
            self._publish(events.Notice(event="not_compiled", text=text, ranks=ranks, reason=reason))

    def _tell_of_nothing_to_compare(self) -> None:
        kinds = self._worker.kinds
        if self._config.recompute.every is None:
            return
        if adds_parts_by_themselves(self._config.run, self._world):
            reason = "memory has run out, and run.exact adds up the gradients of parts of microbatches"
        elif len(kinds) == 1:
            reason = "the run has one worker"
        elif len(set(kinds)) == len(kinds):
            reason = f"no two workers are alike: {'; '.join(kinds)}"
        else:
            return
        self._notify_once(f"recompute.every compares no gradients of two workers: {reason}")

    def _tell_of_unsaved(self) -> None:
        if names := self._worker.effects.unsaved:
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            self._notify_once(
                f"the first step changes {', '.join(names[:_NAMES])}{more}, which no checkpoint holds: a resumed run "
                "and a worker that joins begin without it. Make state a buffer of the model; a cache needs nothing"
            )

    def _notify_once(self, text: str) -> None:
        """Publish a notice once in a run, not in every attempt."""
        if all(notice.text != text for notice in self._directory.events(events.Notice)):
            self._notify(text)

    def _tell_of_the_model(self) -> None:
        missing, unexpected = self._worker.loaded
        if missing or unexpected:
            names = ", ".join((*missing[:_NAMES], *unexpected[:_NAMES]))
            counts = f"lacks {len(missing)} of the model's names and has {plural(len(unexpected), 'other name')}"
            self._notify(f"run.init_from {counts}: {names}")
        if frozen := self._worker.frozen:
            self._notify(f"these modules stay in evaluation mode: {', '.join(frozen)}")
        if self._worker.fingerprint.startswith(LAYOUT):
            self._notify(
                "the dataset draws numbers that nothing seeds: a sample that is read twice differs. So a resume knows "
                "the data by length and layout alone. Draw from torch, numpy.random or random, which are seeded"
            )
        if reason := self._worker.built_whole_because:
            self._notify(f"each worker holds the whole model while the model is built and restored: {reason}")
        if self._config.checkpoint.trainable_only and not self._worker.base:
            self._notify("checkpoint.trainable_only leaves nothing out: all parameters of the model are trained")
        if units := strategy_of(self._config.parallel).units(self._worker.model):
            self._publish(events.ModelSharded(num_units=len(units), layers=Counter(units[1:])))

    def _tell_of_shortened_warmup(self) -> None:
        # The command that starts the run cannot know this: with `run.epochs` the number of steps follows from the
        # dataset, which only workers build.
        num_steps = self._worker.num_steps
        wanted = getattr(self._config.schedule, "warmup_steps", 0)
        in_force = warmup_in_force(self._config.schedule, num_steps)
        if in_force < wanted:
            length = plural(num_steps, "step")
            self._notify(f"schedule.warmup_steps {wanted} -> {in_force}: the run has {length}")

    @property
    def is_left_on_one_node(self) -> bool:
        """Return whether the run moved from several nodes to one node.

        Only the leader knows the nodes of the last attempt; other ranks return False.
        """
        return self._past.num_nodes > 1 and self._snapshots is not None and self._snapshots.num_nodes == 1

    def ran(self, result: StepResult) -> None:
        """Record that this rank finished a step.

        Its loss is only known after the next exchange between ranks.
        """
        if self._world.leader and self._digest_trigger.due(result.step):
            # The digest cannot wait: when the step's line is written, later steps have changed the weights. Other ranks
            # wait for the leader meanwhile, and the mark shows the watchdog what the leader does.
            self._world.progress.mark("digest")
            self._digests[result.step] = weights_digest(self._worker.model)
        self._world.progress.enter("collective", result.step)
        self._ran[result.step] = result, StepTimes(result.seconds, time.time(), result.data_s, self._new_acts_s())
        for profile in self._profiler.step(result.step):
            # Any rank may be profiled, so its event does not depend on the leader.
            self._runtime.publish(profile.of_attempt(self._world.attempt))
        for event in self._worker.compiled.news():
            self._publish(event)
        if self._snapshots is not None and (promise := self._snapshots.promise) and promise.broken is not None:
            self._tell_once(promise.broken)
        if self._started is not None:
            restored, timer = self._started
            self._started = None
            timer.mark("first_step")
            self._tell_of_start(timer.event(restored.step, restored.source, self._world.size), result.seconds)
            if self._world.leader:
                self._tell_of_unsaved()

    def _tell_of_start(self, event: events.AttemptStarted, step_s: float) -> None:
        """Publish the attempt's start, with facts about the run, its nodes and GPUs."""
        known: dict[str, Any] = {
            "step_s": round(step_s, 4),
            "num_samples": len(self._worker.dataset),
            "source_sizes": tuple(map(len, getattr(self._worker.dataset, "sources", ()))) or None,
            "run": self._config.run.name,
            "precision": self._worker.precision.kind,
            "num_parameters": sum(param.numel() for param in self._worker.model.parameters()),
            "interruption": self._past.kind,
            "former_size": self._past.num_workers,
            "former_layout": self._past.layout,
            "lost_steps": self._lost_steps,
        }
        if self._snapshots is not None and self._snapshots.nodes:
            known["nodes"] = self._snapshots.nodes
        if self._world.replica_size > 1:
            known["layout"] = str(self._config.parallel.layout(self._world.size))
        if self._worker.gpus:
            known["gpus"] = tuple(gpu.name for gpu in self._worker.gpus)
        self._publish(event.model_copy(update=known))

    def _new_acts_s(self) -> dict[str, float]:
        """Return the seconds that each act between steps took since the last call."""
        new_s = {}
        for act in ACTS:
            spent_s = self._world.progress.spent_s(act)
            new_s[act] = spent_s - self._acts_s[act]
            self._acts_s[act] = spent_s
        return new_s

    def commit(self, steps: Iterable[StepStats]) -> None:
        """Write the ledger lines and figures of steps that all ranks have finished."""
        # `steps` raises at the first bad step. The `finally` still writes the good steps before it.
        lines: list[tuple[StepStats, StepTimes]] = []
        try:
            for stats in steps:
                result, times = self._ran.pop(stats.step)
                if stats.step in self._plan.skip:
                    # The lines so far are written first, so that the line of the skipped step keeps its place.
                    self._ledger.commit(lines)
                    lines.clear()
                    self._write_as_planned(stats.step)
                    continue
                if stats.step in self._digests:
                    stats = replace(stats, weights=self._digests.pop(stats.step))
                lines.append((stats, times))
                if self._world.leader:  # other ranks never log, so their meters would grow without end
                    self._meters.record(result.seconds, stats.num_samples, int(stats.count), result.data_s)
                    if stats.step % self._config.logging.every_steps == 0:
                        self._log(stats, result.lr)
        finally:
            self._ledger.commit(lines)

    def _write_as_planned(self, step: int) -> None:
        samples_digest = self._worker.loader.train.digest(*self._plan.positions(step))
        self._ledger.as_planned(step, samples_digest, self._digests.pop(step, ""))

    def _log(self, stats: StepStats, lr: float) -> None:
        """Write a step's figures, and show the figures every `_SHOW_EVERY_S` seconds."""
        total_steps = self._worker.num_steps
        # If both counts are equal, every token is a sample.
        unit = "samples" if stats.count == stats.num_samples else "tok"
        log = events.Log(
            attempt=self._world.attempt,
            step=stats.step,
            total_steps=total_steps,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            unit=unit,
            memory_bytes=_memory_bytes(self._worker.precision.device),
            world_size=self._world.size,
            metrics=stats.metrics,
            at_risk=self._at_risk(stats.step),
            **self._meters.snapshot(total_steps - stats.step),
            **self._gpu_meter.read(),
        )
        self._figures.write([log.stamped().to_line()])
        self._trackers.record(log)
        if time.monotonic() - self._shown_s >= _SHOW_EVERY_S:
            self._shown_s = time.monotonic()
            self._publish(log)

    def _at_risk(self, step: int) -> dict[str, int]:
        if self._snapshots is None:
            return {}
        at_risk = self._snapshots.at_risk(step, self._committed)._asdict()
        # Before the first snapshot a loss costs more than later in the attempt, so the event waits for the snapshot.
        if events.Snapshot.name in self._told_once:
            self._tell_once(events.AtRisk(step=step, **at_risk))
        return at_risk

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a validation after `step`.

        Without held-out samples there are no metrics, and nothing is recorded.
        """
        if not metrics:
            return
        self.metrics = metrics
        event = events.Validation(step=step, metrics=metrics, best=self._is_best(metrics) or None)
        self._publish(event)
        # Trackers come last: the next attempt sends them what is in the events.
        if self._world.leader:
            self._trackers.record(event)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Remember a validation, and return whether no earlier one was as good.

        The first validation has nothing to be compared with. Only the leader knows the validations of other attempts.
        """
        keep = self._config.checkpoint.keep_best or KeepBestConfig()
        sign = 1 if keep.mode == "min" else -1
        value = sign * metrics.get(keep.metric, math.nan)
        before, self._best = self._best, min(self._best, value)
        return value < before < math.inf

    def figures(self, step: int, values: Mapping[str, Any]) -> None:
        """Send what the user's hooks log to the trackers."""
        if self._early is None:
            self._trackers.log(step, values)
        else:
            self._early.append((step, values))

    def gradient_norms(self, result: StepResult) -> None:
        """Send the distribution of the parameters' gradient norms to the trackers.

        This is a collective if gradients are sharded.
        """
        # A skipped step has no gradient norms.
        if result.grad_norms is not None and not result.overflowed:
            norms = unsharded(result.grad_norms)
            self._world.groups.gate()
            # The norms were taken before the sums were divided by the true count, the total norm after it. This brings
            # the norms to the scale of the total norm.
            norms = norms * (result.grad_norm / torch.linalg.vector_norm(norms))
            self._trackers.histogram(result.step, "train/gradient_norms", norms.tolist())

    def snapshot(self, event: events.Snapshot | events.Notice | None) -> None:
        """Publish the first snapshot, or the refusal of one, in this attempt.

        Later events of the same kind are dropped, because snapshots are frequent.
        """
        if event is not None:
            self._tell_once(event)

    def _tell_once(self, event: events.Event) -> None:
        name = event.event if isinstance(event, events.Notice) else event.name
        if name not in self._told_once:
            self._told_once.add(name)
            self._publish(event)

    def checkpoints(self, news: list[events.Event]) -> None:
        """Publish the events of this rank's checkpoint writer."""
        # Every rank publishes its own events: the disk of a single rank may be full.
        for event in news:
            if isinstance(event, events.Checkpoint):
                self._committed = event.step
            self._runtime.publish(event.of_attempt(self._world.attempt))

    def end(self, outcome: Outcome, whole: nn.Module | None, state: dict[str, Tensors]) -> None:
        """Close the attempt, and write the summary if the run has ended.

        Args:
            outcome: how the attempt ended.
            whole: the whole model, from which the task may draw a sample such as a text; None if the state is sharded.
            state: this rank's tensors of the state, whose digests enter the summary.
        """
        self._world.progress.enter("end")
        acts_s = {f"{act}_s": round(seconds, 4) for act, seconds in self._new_acts_s().items()}
        self._publish(events.AttemptEnded(cause=outcome.kind, step=outcome.step, **acts_s))
        # The trackers stay open while the attempt closes, because the sample is drawn after everything else is closed.
        # Removing them here also keeps `leave` from closing them on another thread.
        trackers, self._trackers = self._trackers, Trackers([])
        self._worker.close_attempt()
        if outcome.kind == "resized":
            trackers.close()
            return
        # Every rank computes the digests, because this is a collective if state is sharded.
        hashes = {f"{part}_sha256": sha256(tensors, self._world) for part, tensors in state.items()}
        if whole is None:  # the state is sharded, so the digests used collectives and must pass the gate
            self._world.groups.gate()
        if self._world.leader:
            summary = self._summary(outcome, hashes)
            # The sample is code of the task, which may fail, so the summary is written without the sample first.
            self._directory.write_summary(summary)
            sample = _sample(self._worker.task, whole, self._worker.precision.device)
            if sample:
                summary["sample"] = sample
                self._directory.write_summary(summary)
                trackers.text(outcome.step, "sample", sample)
            trackers.close()
            self._publish(events.Finished(summary=summary))

    def _summary(self, outcome: Outcome, hashes: dict[str, str]) -> dict[str, Any]:
        units = self._worker.units_per_sample
        # A long ledger takes a while to read. The mark shows the watchdog that this rank makes progress meanwhile,
        # since other ranks wait for it.
        totals = read_totals(self._directory, lambda: self._world.progress.mark("end"))
        newest = Catalog(self._directory.store).newest()
        tokens = last_checkpoint = None
        if units > 1:
            tokens = totals.samples * units
        if newest:
            last_checkpoint = self._directory / path_of(newest)
        return {
            "status": outcome.kind,
            "ended_early": self._worker.hooks.ended_early or None,
            "step": outcome.step,
            "samples": totals.samples,
            "tokens": tokens,
            "metrics": self.metrics,
            **hashes,
            "attempts": self._world.attempt,
            "lost_steps": totals.num_lost,
            **goodput(totals),
            "last_checkpoint": last_checkpoint,
        }

    def _notify(self, text: str) -> None:
        self._publish(events.Notice(text=text))

    def _publish(self, event: events.Event) -> None:
        if self._world.leader:
            self._runtime.publish(event.of_attempt(self._world.attempt))


def _sample(task: Task, model: nn.Module | None, device: torch.device) -> str | None:
    """Return the text that the task's `sample` draws from the model, if any."""
    sample = getattr(task, "sample", None)
    if sample is None or model is None:
        return None
    # A sample drawn with dropout would make the model look worse than it is.
    model.eval()
    text: str | None = sample(model, device)
    return text


def _meters(worker: WorkerState, tf32: bool) -> Meters:
    flops_of = getattr(worker.model, "flops_per_sample", None)
    flops_per_sample = flops_of() if flops_of else None
    return Meters(flops_per_sample, total_peak_flops(worker.gpus, worker.precision.compute_dtype, tf32))


def _memory_bytes(device: torch.device) -> int:
    """Return the peak memory of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts `ru_maxrss` in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
