"""Events of a run, with their fields and console lines.

`events.jsonl` holds one line for each kept event, and scripts may rely on the names and fields below. A field's name
ends with its unit: `_s` seconds, `_ms` milliseconds, `_bytes` bytes. A field that is None is left out of the line.
"""

import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from itertools import starmap
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from steadfast.storage.jsonl import is_moment
from steadfast.units import clock, compact, duration, in_ranges, in_words, joined, node_name, number, plural, size

CONNECTION_CLOSED = "connection closed"  # error of a failure whose worker ended without a report


class Event(BaseModel):
    """Base class of the events of a run."""

    model_config = ConfigDict(frozen=True)

    name: ClassVar[str]  # name in `events.jsonl`: the class's name in lower case
    kept: ClassVar[bool] = True  # whether `events.jsonl` has the event; frequent events are only shown
    detail: ClassVar[bool] = False  # whether the console shows the event only with `-v`
    # Field whose entries become fields of the line themselves, so that scripts read `loss`, not `metrics.loss`.
    spread: ClassVar[str] = ""

    time_s: float | None = None  # Unix time, set when the event is written
    attempt: int | None = None  # None for an event between two attempts

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def stamped(self) -> Self:
        """Return the event with the current time, unless the event has one."""
        # Ray may repeat the call that publishes an event. A restarted coordinator recognizes the event by its time.
        if self.time_s is not None:
            return self
        return self.model_copy(update={"time_s": round(time.time(), 4)})

    def of_attempt(self, attempt: int) -> Self:
        """Return the event with the number of an attempt."""
        return self.model_copy(update={"attempt": attempt})

    def fields(self) -> dict[str, Any]:
        """Return the fields except name, time and attempt."""
        fields: dict[str, Any] = dict(self)
        fields.update(fields.pop(self.spread, {}))
        return {name: value for name, value in fields.items() if name not in _HEAD and value is not None}

    def to_line(self) -> dict[str, Any]:
        """Return the event's line of `events.jsonl`."""
        # A notice has a field `event`, which replaces the name of its class.
        head: dict[str, Any] = {"time_s": self.time_s, "event": self.name}
        if self.attempt is not None:
            head["attempt"] = self.attempt
        return head | self.fields()

    @abstractmethod
    def line(self) -> str:
        """Return the console line."""

    def verbose_line(self) -> str:
        """Return the console line with `-v`."""
        return self.line()


class Notice(Event):
    """A sentence for the user, whose parts no program reads.

    An example is a setting that the run cannot follow. A notice may have fields of its own, which are facts for
    scripts. An event of a kind that this release does not know is read as a notice with the event's name and fields.
    """

    model_config = ConfigDict(extra="allow")

    event: str = "notice"  # name in `events.jsonl`
    text: str  # the sentence

    def line(self) -> str:
        return self.text


class RunStarted(Event):
    """A command has started or resumed the run."""

    launcher: str  # "ray" or "torchrun"
    # whether the command owned the run before: torchrun restarted its ranks, or the command restarted itself after Ray
    # died
    again: bool | None = None

    def line(self) -> str:
        started = "command started"
        if self.again and self.launcher == "torchrun":
            started = "command continues after torchrun restarted its ranks"
        elif self.again:
            started = "command restarted, because Ray had died"
        return f"{started} | launcher {self.launcher}"


class ShortStep(Event):
    """A run that ended with a short step is extended.

    The short step had fewer samples than `batch.global_size`, and is not changed by the extension.
    """

    step: int  # number of the short step
    position: int  # position in the stream of training samples at which the next step begins

    def line(self) -> str:
        line = f"step {self.step} keeps fewer samples than batch.global_size, because the run had ended with this step"
        return f"{line}; the next step begins at position {self.position} of the training samples"


class ForwardsShrunk(Event):
    """A step ran out of memory, so forwards get fewer samples."""

    step: int  # step that ran out of memory
    forward_size: int  # most samples of a forward; a larger microbatch is split into parts
    error: str  # message of the out-of-memory error
    rank: int | None = None  # rank that ran out of memory

    def line(self) -> str:
        line = f"out of memory in step {self.step}: from now on forwards have at most"
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{line} {plural(self.forward_size, 'sample')} | {where}{self.error}"


class AttemptStarted(Event):
    """The first step of an attempt has finished."""

    step: int  # step of the restored state; 0 if training began from scratch
    source: str  # where the state was found: "rank 2", "snapshot", "checkpoint" or "start"
    world_size: int  # number of workers
    # seconds from the former attempt's last step, or from the command, to the beginning of this start
    detected_s: float
    formed_s: float  # seconds until the workers were connected
    built_s: float  # seconds from then until model, optimizer and data were built
    restored_s: float  # seconds from then until every rank held the state
    first_step_s: float  # seconds from then until the end of the first step
    step_s: float | None = None  # seconds of the first step itself
    # Ranks of each node, if `checkpoint.node_memory` is on.
    nodes: Mapping[str, tuple[int, ...]] | None = None
    gpus: tuple[str, ...] | None = None  # names of the GPUs by rank, if the ranks train on GPUs
    num_samples: int | None = None  # samples of the dataset, including held-out samples
    source_sizes: tuple[int, ...] | None = None  # the same for each source of a mixture
    run: str | None = None  # name of the run
    precision: str | None = None  # kind of numbers in forward and backward: "fp32", "bf16", "fp16" or "fp64"
    num_parameters: int | None = None  # parameters of the model, including frozen ones
    # "resize", "failure" or "restart" (of the command), if another attempt has finished a step before this one
    interruption: str | None = None
    former_size: int | None = None  # number of workers of that attempt
    # Sizes of the axes replicate, stage, shard and tensor, as "2 x 8", if several workers hold a model together. Axes
    # after the first with one worker are left out.
    layout: str | None = None
    former_layout: str | None = None  # of that attempt
    lost_steps: int = 0  # finished steps that must be repeated

    @property
    def ready_in_s(self) -> float:
        """Return the seconds of all phases, up to the end of the first step."""
        return self.detected_s + self.formed_s + self.built_s + self.restored_s + self.first_step_s

    def line(self) -> str:
        stood_s = max(0.0, self.ready_in_s - (self.step_s or 0.0))  # the first step itself trains
        match self.interruption:
            case "resize":
                cost = f" in {stood_s:.1f} s"
                line = f"resized from {self.former_size} to {plural(self.world_size, 'worker')} at step {self.step}"
                if self.former_size == self.world_size:
                    line = f"workers replaced at step {self.step}"
            case "failure":
                cost = f" after {stood_s:.1f} s"
                line = self._line_after_failure()
            case _:
                cost = f" | ready in {self.ready_in_s:.1f} s"
                line = self._line_of_command()
        if self.layout and self.former_layout and self.layout != self.former_layout:
            line += f", layout {self.former_layout} -> {self.layout}"
        if self.lost_steps:
            line += f", {plural(self.lost_steps, 'finished step')} to repeat"
        return line + cost

    def _line_of_command(self) -> str:
        """Return the line of a command's first attempt."""
        devices = " and ".join(sorted(set(self.gpus or ("CPU",))))
        parts = [f"{plural(self.world_size, 'worker')} on {devices}", self.precision or ""]
        if self.num_parameters is not None:
            parts.append(f"{compact(self.num_parameters)} parameters")
        origin = "from step 0"
        if self.step:
            origin = f"step {self.step} restored from {self.source}"
        return f"run {self.run or ''}".rstrip() + f": {', '.join(filter(None, [*parts, origin]))}"

    def _line_after_failure(self) -> str:
        workers = plural(self.world_size, "worker")
        if self.former_size is not None and self.world_size < self.former_size:
            workers = f"{self.world_size} of {plural(self.former_size, 'worker')}"
        line = f"{workers} continue from step {self.step}"
        # The state of a surviving rank is the normal case.
        if not self.source.startswith("rank"):
            line += f", restored from {self.source}"
        return line

    def verbose_line(self) -> str:
        phases = f"detected {self.detected_s:.1f}, formed {self.formed_s:.1f}, built {self.built_s:.1f}"
        phases += f", restored {self.restored_s:.1f}, first_step {self.first_step_s:.1f}"
        return f"attempt {self.attempt}: {self.line()} | {phases}"


class ModelSharded(Event):
    """FSDP gathers the model in units.

    Each repeated layer is a unit, and the rest of the model is another one.
    """

    num_units: int  # number of units
    layers: Mapping[str, int]  # number of units by the class of the layer

    def line(self) -> str:
        units = [f"{count} x {kind}" for kind, count in self.layers.items()]
        if units:
            units.append("the rest of the model")
        else:
            units.append("the whole model; a method blocks() makes each layer a unit of its own")
        return f"fsdp gathers the model in {plural(self.num_units, 'unit')}: {', '.join(units)}"


class AttemptEnded(Event):
    """The set of workers changes or the run ends."""

    detail = True

    # "finished", "stopped", "resized", "worker lost", "all workers lost", "communication failed", "corruption",
    # "exception" or the reason why a step was bad
    cause: str
    step: int | None = None  # last finished step
    # These are seconds since the last step, if the attempt ended without a failure:
    validation_s: float | None = None  # seconds in which training waited for the last validation
    snapshot_s: float | None = None  # seconds in which training waited for a copy in memory
    checkpoint_s: float | None = None  # seconds in which training waited for a checkpoint

    def line(self) -> str:
        if self.step is None:
            return f"attempt {self.attempt} ended: {self.cause}"
        return f"attempt {self.attempt} ended after step {self.step}: {self.cause}"


class Log(Event):
    """Figures since the last log step, as means and medians."""

    # `metrics.jsonl` has these lines. In `events.jsonl` they would outnumber all other events.
    kept = False

    step: int  # last step in the figures
    total_steps: int  # length of the run in steps
    loss: float  # mean over the global batch
    lr: float  # learning rate
    grad_norm: float  # norm of the gradient before clipping
    unit: str  # unit of `units_per_s`: "tok" or "samples"
    memory_bytes: int  # peak memory of rank 0, on its device or, without a device, of its process
    world_size: int  # number of workers
    step_ms: float  # median duration of a step
    data_wait: float = 0.0  # share of the steps' time in which rank 0 waited for data, 0 to 1
    units_per_s: float  # tokens or samples per second, as `unit` says
    samples_per_s: float  # samples per second
    eta_s: float  # seconds until the end of the run
    # model FLOPs utilisation, 0 to 1: share of the peak of all GPUs in the dtype in use; absent if the peak is unknown
    mfu: float | None = None
    # Rank 0's GPU at this step, if the package nvidia-ml-py is installed:
    gpu_utilization: float | None = None  # share of the last moments in which a kernel ran, 0 to 1
    gpu_memory_bytes: int | None = None  # memory in use by all processes
    gpu_power_w: float | None = None  # power in watts
    metrics: Mapping[str, float] = {}  # metrics of the task, mean over the global batch
    at_risk: Mapping[str, int] = {}  # steps that a loss would cost now, with the fields of the event `at_risk`

    def figures(self) -> dict[str, float]:
        """Return the figures that trackers draw, by tag."""
        train = self.model_dump(include={"loss", "lr", "grad_norm"}) | dict(self.metrics)
        # An unknown `mfu` is left out, because a curve at zero would look like a fault.
        speed = self.model_dump(include=_SPEED, exclude_none=True)
        return _tagged("train", train) | _tagged("speed", speed)

    def line(self) -> str:
        rate = self.samples_per_s if self.unit == "samples" else self.units_per_s
        width = len(str(self.total_steps))
        parts = [
            f"step {self.step:>{width}}/{self.total_steps}",
            f"loss {number(self.loss):>5}",
            *(f"{name} {number(value)}" for name, value in self.metrics.items()),
            f"norm {self.grad_norm:>#5.3g}",
            # Python writes at least two digits of an exponent, but a learning rate needs only one.
            f"lr {self.lr:.1e}".replace("e-0", "e-"),
            f"{self.step_ms:>4.0f} ms",
            f"{compact(rate):>5} {self.unit}/s",
        ]
        if self.mfu:
            parts.append(f"mfu {self.mfu:.1%}")
        parts += [plural(self.world_size, "worker"), f"eta {duration(self.eta_s)}"]
        # The entry comes last, because it would move the columns after it.
        if self.data_wait >= _WAITS_FOR_DATA:
            parts.append(f"data wait {self.data_wait:.0%}")
        return f"{clock(self.time_s)} {'  '.join(parts)}".lstrip()

    def verbose_line(self) -> str:
        return f"{self.line()}  memory {size(self.memory_bytes)}"


class Output(Event):
    """User code in a worker of Ray has written lines to stdout or stderr."""

    kept = False

    member: str  # name of the worker
    rank: int | None = None  # rank of the worker, None before its first world
    lines: tuple[str, ...]  # the lines, without line ends

    def line(self) -> str:
        worker = f"worker {self.member}" if self.rank is None else f"rank {self.rank}"
        return "\n".join(f"[{worker}] {line}" for line in self.lines)


class Validation(Event):
    """A validation has finished.

    The metrics are fields of the line themselves, beside `step`.
    """

    spread = "metrics"

    step: int  # last step before the validation
    metrics: Mapping[str, float]  # means over all held-out samples
    best: bool | None = None  # true if no earlier validation of the run was as good; absent for the first validation

    def line(self) -> str:
        best = "best so far" if self.best else ""
        return joined([f"validation at step {self.step}", in_words(self.metrics), best])

    def figures(self) -> dict[str, float]:
        """Return the figures that trackers draw, by tag."""
        return _tagged("validation", self.metrics)


class Restore(Event):
    """An attempt continues from an existing state."""

    detail = True

    step: int  # step of the restored state
    source: str  # where the state was found: "rank 2", "snapshot" or "checkpoint"
    lost_steps: int  # finished steps that must be repeated

    def line(self) -> str:
        return f"step {self.step} restored from {self.source} | {plural(self.lost_steps, 'finished step')} to repeat"


class Checkpoint(Event):
    """A checkpoint is committed."""

    step: int  # step of the state in the checkpoint
    path: str  # folder of the checkpoint
    seconds: float  # seconds from the copy to the commit
    blocked_s: float  # seconds in which training waited for the checkpoint
    bytes: int  # size of the checkpoint
    not_deleted: str | None = None  # reason why an older checkpoint could not be deleted

    def line(self) -> str:
        line = f"checkpoint at step {self.step} | {size(self.bytes)} in {self.seconds:.1f} s | {self.path}"
        if self.not_deleted:
            line += f" | older ones cannot be deleted: {self.not_deleted}"
        return line


class Snapshot(Event):
    """The first snapshot of an attempt lies in node memory.

    Later snapshots cause no event.
    """

    detail = True

    step: int  # step of the first snapshot
    stall_s: float  # seconds in which training waited for the copy
    bytes: int  # size of one worker's copy

    def line(self) -> str:
        cost = f"{size(self.bytes)} per worker; training waited {1e3 * self.stall_s:.0f} ms for the copy"
        return f"snapshots in node memory from step {self.step} on: {cost}"


class AtRisk(Event):
    """Number of finished steps that must be repeated after a loss now.

    The event comes once per attempt.
    """

    detail = True

    step: int  # last finished step
    worker: int  # steps after the loss of one worker
    workers_of_node: int  # steps after the loss of all processes of a node, while the machine stays
    workers: int  # steps after the loss of all workers, while the machines stay
    node: int  # steps after the loss of a machine
    everything: int  # steps after the loss of everything except storage

    def line(self) -> str:
        return (
            f"steps to repeat after a loss now: of a worker {self.worker}, of all workers of a node "
            f"{self.workers_of_node}, of all workers {self.workers}, of a node {self.node}, "
            f"of everything {self.everything}"
        )


class Failure(Event):
    """A worker was lost, or its code raised an exception."""

    error: str  # cause of the failure
    # "worker", "hang", "preemption", "exception", "oom", "communication" if live workers cannot reach each other,
    # "corruption" if a worker computed wrongly, "device" if torch cannot use a worker's GPU, "peer" under torchrun if
    # another rank is gone, or "ours" for an error of this program that names its own remedy
    kind: str | None = None
    member: str | None = None  # name of the worker
    rank: int | None = None  # rank of the worker in its last world
    pid: int | None = None  # process of the worker
    host: str | None = None  # host name of the worker's machine
    node: str | None = None  # Ray's id of the machine
    step: int | None = None  # last finished step of the worker
    fatal: bool = False  # whether the failure ends the run
    budget: str | None = None  # explanation, if the run ends because failures of one kind came too often
    traceback: str | None = None  # traceback of the exception

    def line(self) -> str:
        # No worker is named if the run as a whole has failed. A rank of torchrun has no name.
        if self.member is None and self.rank is None and self.node is None:
            return f"failure: {self.error}"
        what = f"{_FATES.get(self.kind or '', 'failed:')} {self.error}"
        if self.kind == "preemption":
            what = "is gone with its node"
        elif self.kind == "worker" and self.error == CONNECTION_CLOSED:
            # Only Ray's own process on that machine learns the exit status.
            what = "has died: it was killed or has crashed"
        return f"{self._worker()} {what}"

    def _worker(self) -> str:
        worker = f"worker {self.member}"
        if self.rank is not None:
            worker = f"rank {self.rank}"
        elif self.member is None:  # it has not joined
            worker = f"a new worker on node {node_name(self.node or '')}"
        if self.pid is not None:
            return f"{worker} (pid {self.pid} on {self.host})"
        if self.node is not None and self.member is not None:
            return f"{worker} on node {node_name(self.node)}"
        return worker


class Preemption(Event):
    """A node is about to be taken away."""

    node: str  # Ray's id of the machine
    deadline_s: float  # Unix time at which the node goes, 0 if unknown
    members: tuple[str, ...]  # names of the workers on the node

    def line(self) -> str:
        when = "is about to be taken away"
        if self.deadline_s and self.time_s is not None:
            when = f"will be taken away in {self.deadline_s - self.time_s:.0f} s"
        return f"node {node_name(self.node)} {when}: {plural(len(self.members), 'worker')} will leave it"


class ProcessRestarted(Event):
    """A process that does not train has died and was replaced."""

    process: str  # "the coordinator", "Ray's controller", or a process of an embedded Ray: "gcs_server", "raylet" ...
    follows: str  # what the run does next

    def line(self) -> str:
        return f"{self.process} has died: {self.follows}"


class Hang(Event):
    """Some ranks seem to be stuck.

    This early warning ends nothing. If the hang lasts, a `failure` of kind "hang" follows.
    """

    ranks: tuple[int, ...]  # ranks that seem to be stuck
    # phase of these ranks: "loader", "forward", "backward", "gradients", "update", "collective", "checkpoint",
    # "compile" ...
    phase: str
    step: int  # last finished step of these ranks
    seconds: float  # seconds that these ranks have spent in `phase`
    stacks: str  # folder with the stacks of every thread of every worker
    # "stuck"; "all wait" if all ranks wait for each other; "slow" if each rank runs code of its own, so that no rank
    # waits
    guess: str = "stuck"
    ends_s: float | None = None  # seconds in `phase` after which the attempt ends, by the current estimate
    reading: str | None = None  # samples that the first of these ranks waits for, in words

    @property
    def what(self) -> str:
        """Return the ranks and their phase in words."""
        what = "slow" if self.guess == "slow" else "stuck"
        return f"{in_ranges('rank', self.ranks)} {what} in {self.phase}"

    def line(self) -> str:
        line = f"{self.what} after step {self.step} for {self.seconds:.1f} s {self.reading or ''}".rstrip()
        if self.ends_s is not None:
            # The guess "all wait" is shown as it is.
            waiting = {"stuck": "the other ranks wait", "slow": "no rank waits"}.get(self.guess, self.guess)
            line += f", {waiting}; the attempt ends after {self.ends_s:.0f} s"
        return f"{line}; stacks in {self.stacks}"


class HangOver(Event):
    """Ranks that seemed to be stuck have continued by themselves."""

    ranks: tuple[int, ...]  # ranks that seemed to be stuck
    phase: str  # phase in which these ranks seemed to be stuck
    step: int  # last finished step of these ranks at the warning
    seconds: float  # seconds that these ranks spent in `phase`

    def line(self) -> str:
        return f"{in_ranges('rank', self.ranks)} continued after {self.seconds:.1f} s in {self.phase}"


class Straggler(Event):
    """One rank makes the other ranks wait in every step."""

    member: str  # name of the worker
    rank: int  # rank of the worker
    phase: str  # phase that takes the most time: "loader", "forward", or on CUDA "device"
    lost_s: float  # seconds per step in which the other ranks wait for this rank
    share: float  # share of the step's time in which the other ranks wait, 0 to 1

    def line(self) -> str:
        return f"rank {self.rank} is slow in {self.phase}: the other ranks wait {self.share:.0%} of every step"


class RankTimes(Event):
    """Time that each rank itself needs for a step.

    The time is the sum of loader and forward, or on GPUs the longer of loader and device. The event exists under Ray
    only, where the heartbeats of all workers are compared. The first event of an attempt comes after 20 seconds, and
    later events come ever more rarely. Each event covers the time since the last one.
    """

    detail = True

    step: int  # last step that all ranks have finished
    num_steps: int  # steps since the last event of this kind in the attempt
    own_ms: tuple[float, ...]  # mean milliseconds per step, by rank
    last: tuple[int, ...]  # by rank: number of comparisons, seconds apart, in which this rank was the slowest

    def line(self) -> str:
        return f"own time of each rank per step, up to step {self.step}: {_listed(self.own_ms)} ms"


class Scale(Event):
    """The bounds of the number of workers have changed.

    Bounds are [smallest, largest].
    """

    before: tuple[int, int]  # former bounds
    after: tuple[int, int]  # new bounds
    request: str | None = None  # name of the request

    def line(self) -> str:
        return f"scaling.num_workers (fewest, most): {_listed(self.before)} -> {_listed(self.after)}"


class Waiting(Event):
    """The run has too few workers to train."""

    workers: int  # workers that have started
    needed: int  # smallest number of workers that can train
    seconds: float | None = None  # seconds for which workers have been missing

    def line(self) -> str:
        return f"training waits for workers: {self.workers} of at least {self.needed} have started"


class Rollback(Event):
    """The run returns to an earlier checkpoint after a bad step.

    The run skips `steps` from now on.
    """

    steps: tuple[int, ...]  # steps that the run skips
    cause: str  # reason why a step was bad
    microbatches: tuple[int, ...] | None = None  # indices of the bad step's microbatches whose own loss is not finite
    samples: tuple[int, ...] | None = None  # ids of the samples in these microbatches
    not_finite: tuple[int, ...] | None = None  # ids of these samples that contain a NaN or an infinity when read again

    def line(self) -> str:
        return f"rolling back: {self.cause}; steps skipped from now on: {_listed(self.steps)}"


class RanksDiffer(Event):
    """Ranks hold different numbers in a tensor that should be equal on all of them.

    The run goes back to the newest checkpoint, of which the ranks held equal copies.
    """

    step: int  # step of the comparison
    tensor: str  # first such tensor, as named in checkpoints
    ranks: Mapping[str, tuple[int, ...]]  # ranks by the digest of what they hold, a hexadecimal number

    def line(self) -> str:
        held = " and ".join(
            f"ranks {_listed(each)}" if len(each) > 1 else f"rank {each[0]}" for each in self.ranks.values()
        )
        return f"step {self.step}: {held} hold different numbers in {self.tensor}"


class Finished(Event):
    """The run has ended, by itself or on request."""

    spread = "summary"

    summary: Mapping[str, Any]  # contents of `summary.json`, whose entries are fields of the line themselves

    def line(self) -> str:
        return f"run {self.summary.get('status', 'ended')}"


# Beginning of the console line of a failure, by its kind.
_FATES = {
    "worker": "is lost:",
    "hang": "was ended:",
    "corruption": "was ended:",
    "exception": "raised",
    "oom": "ran out of memory:",
    "peer": "has lost another rank:",
    "communication": "cannot reach the other workers:",
}
# All events are direct subclasses, so a new class needs no entry here.
_KINDS: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}
_HEAD = Event.model_fields.keys()
# Share of the step time from which on a log line shows the wait for data.
_WAITS_FOR_DATA = 0.1
_SPEED = {"step_ms", "data_wait", "units_per_s", "samples_per_s", "memory_bytes", "world_size", "mfu"}
_SPEED |= {"gpu_utilization", "gpu_memory_bytes", "gpu_power_w"}


def parse_event(line: Mapping[str, Any]) -> Event | None:
    """Return the event of a line of `events.jsonl`.

    An event of an unknown kind becomes a notice with its name and fields. Returns None if this release cannot read the
    line.
    """
    name = line.get("event")
    if not isinstance(name, str):
        return None
    kind = _KINDS.get(name, Notice)
    fields = dict(line)
    if name not in _KINDS and not isinstance(line.get("text"), str):
        fields["text"] = _in_one_line(line)
    elif kind.spread:
        own = {"event", *kind.model_fields} - {kind.spread}
        fields[kind.spread] = {key: value for key, value in line.items() if key not in own}
    try:
        event = kind.model_validate(fields)
    # Another release wrote the line, and its event had other fields. Fields that this release does not know are
    # ignored.
    except ValidationError:
        return None
    if not all(starmap(_is_plausible, event)):
        return None
    return event


def _is_plausible(name: str, value: Any) -> bool:
    """Return whether an event's value is a plausible time or count.

    Readers may then compute with the value.
    """
    match value:
        # This case comes first, because Python counts true and false as ints.
        case bool():
            return True
        case int() | float() if name.endswith(("_s", "_ms")):
            return is_moment(value)
        case int():
            return abs(value) < 2**53
        case list() | tuple():
            return all(_is_plausible(name, each) for each in value)
        case Mapping():
            return all(_is_plausible(str(key), each) for key, each in value.items())
    return True


def _in_one_line(line: Mapping[str, Any]) -> str:
    parts = [line["event"].replace("_", " ")]
    for name, value in line.items():
        if isinstance(value, list):
            value = _listed(value)
        if name not in ("event", *_HEAD):
            parts.append(f"{name} {value}")
    return joined(parts)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _tagged(group: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in figures.items()}
