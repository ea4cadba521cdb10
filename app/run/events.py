"""The events of a run: one class for each, with its fields, whether it is kept, and its line on the console.

`events.jsonl` holds one line for each kept event; scripts may rely on the names and fields below. Units are part of a
field's name: `_s` seconds, `_ms` milliseconds, `_bytes` bytes. A field that is None is left out of the line.
"""

import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from app.storage.jsonl import is_moment
from app.units import Wording, compact, duration, in_words, joined, node_name, number, plural, size


class Event(BaseModel):
    """Something that happened in a run."""

    model_config = ConfigDict(frozen=True)

    name: ClassVar[str]  # in `events.jsonl`: that of the class, in small letters
    kept: ClassVar[bool] = True  # written to `events.jsonl`; what comes every few steps is only shown
    detail: ClassVar[bool] = False  # shown to those alone who ask for details
    wording: ClassVar[str] = ""  # the console line, with fields in braces; by default all fields follow the name
    # The field whose entries stand beside the others in the line: scripts ask for `loss`, not for `metrics.loss`.
    spread: ClassVar[str] = ""

    time_s: float | None = None  # Unix time; whoever writes the event down sets it
    attempt: int | None = None  # None between two attempts

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def stamped(self) -> Self:
        """Return the event with the time of now, if it has none."""
        if self.time_s is not None:
            return self
        return self.model_copy(update={"time_s": round(time.time(), 4)})

    def of_attempt(self, attempt: int) -> Self:
        """Return the event as one of an attempt."""
        return self.model_copy(update={"attempt": attempt})

    def fields(self) -> dict[str, Any]:
        """Return what the event says beside its name, time and attempt."""
        fields: dict[str, Any] = {}
        for name, value in self:
            if name == self.spread:
                fields.update(value)
            else:
                fields[name] = value
        return {name: value for name, value in fields.items() if name not in _HEAD and value is not None}

    def to_line(self) -> dict[str, Any]:
        """Return the line of `events.jsonl`."""
        head: dict[str, Any] = {"time_s": self.time_s, "event": self.name}
        if self.attempt is not None:
            head["attempt"] = self.attempt
        return head | self.fields()

    def line(self, verbose: bool = False) -> str:
        """Return what the console shows; `verbose` adds where the time of a start went."""
        if self.wording:
            return Wording().vformat(self.wording, (), dict(self))
        parts = [self.name.replace("_", " ")]
        if self.attempt is not None:
            parts.append(f"attempt {self.attempt}")
        parts += [f"{key} {value}" for key, value in self.fields().items()]
        return joined(parts)


class RunStarted(Event):
    """A command has taken the run up."""

    launcher: str  # "ray" or "torchrun"
    # It is the command that had the run before: torchrun has restarted its ranks, or it came back after Ray had died.
    again: bool | None = None


class ShortStep(Event):
    """The run has ended once, with a step of fewer samples than the others, and is extended."""

    wording = "step {step} stays short, as the run ended with it; the next one goes on at position {position}"

    step: int  # the last one then
    position: int  # in the stream of training samples, behind the last one of `step`


class ForwardsShrunk(Event):
    """Memory has run out in a forward or backward, and from now on a forward is of fewer samples."""

    wording = "out of memory in step {step}: forwards go on with {forward_size:n} samples at the most | {error}"

    step: int
    forward_size: int  # samples; a microbatch of more is run in parts
    error: str


class MicrobatchChosen(Event):
    """`batch.microbatch_size` is auto, and its number has been chosen, for the whole run."""

    microbatch_size: int  # samples
    rank: int | None = None  # the one with room for the fewest samples, where memory was measured
    sample_bytes: int | None = None  # what one more sample in a forward and backward takes there
    free_bytes: int | None = None  # there, beyond what the rank holds between two steps

    def line(self, verbose: bool = False) -> str:
        chosen = f"batch.microbatch_size auto -> {self.microbatch_size} for the whole run"
        if self.sample_bytes is None or self.free_bytes is None:
            return chosen
        room = f"{size(self.free_bytes)} free on rank {self.rank}"
        return joined([chosen, f"a sample takes {size(self.sample_bytes)} of the {room}"])


class AttemptStarted(Event):
    """The first step of an attempt is done."""

    step: int  # the one whose state the attempt begins with, 0 at the start of a run
    source: str  # where that was found: "rank 2", "snapshot", "checkpoint" or "start"
    world_size: int
    detected_s: float  # from the last step before to the end of the former attempt, as this worker saw it
    formed_s: float  # until the workers were connected
    built_s: float  # from there until model, optimizer and the rest were there
    restored_s: float  # from there until every rank held the state
    first_step_s: float  # from there to the end of the first step
    step_s: float | None = None  # that step by itself
    # The ranks on each, where `checkpoint.node_memory` has them tell.
    nodes: Mapping[str, tuple[int, ...]] | None = None
    gpus: tuple[str, ...] | None = None  # by rank, where they train on GPUs
    num_samples: int | None = None  # of the dataset, held-out ones included

    def line(self, verbose: bool = False) -> str:
        origin = f"step {self.step} restored from {self.source}" if self.step else "from step 0"
        ready_s = self.detected_s + self.formed_s + self.built_s + self.restored_s + self.first_step_s
        line = f"attempt {self.attempt}: {plural(self.world_size, 'worker')}, {origin} | ready in {ready_s:.1f} s"
        if verbose:
            line += f" | detected {self.detected_s:.1f}, formed {self.formed_s:.1f}, built {self.built_s:.1f}"
            line += f", restored {self.restored_s:.1f}, first_step {self.first_step_s:.1f}"
        return line


class WarmupShortened(Event):
    """The schedule's warm-up is longer than the run, and ends with it."""

    wording = "schedule.warmup_steps {before} -> {after}: the run has {num_steps:step}"

    before: int  # as the configuration says
    after: int
    num_steps: int  # length of the run


class WeightsLeftOut(Event):
    """`run.init_from` and the model do not hold the same names, and `run.init_strict` is false."""

    wording = "run.init_from lacks {num_missing} of the model's names and has {num_unexpected} others: {names:each}"

    num_missing: int  # these are left as they were initialised
    num_unexpected: int
    names: tuple[str, ...]  # the first of both


class BuiltWhole(Event):
    """The model's construction does not allow that a worker begins with its shards alone."""

    wording = "each worker holds the whole model while it is built and restored | {reason}"

    reason: str


class NothingFrozen(Event):
    """All parameters of the model train, so `checkpoint.trainable_only` leaves nothing out."""

    wording = "checkpoint.trainable_only leaves nothing out: all parameters of the model train"


class PartsInEvaluation(Event):
    """Some modules of the model came in evaluation mode and stay in it; the others train."""

    wording = "in evaluation mode, as the model came: {modules:each}"

    modules: tuple[str, ...]  # names of the outermost ones


class ModelSharded(Event):
    """The model is gathered in units: its repeated layers one at a time, then the rest."""

    num_units: int
    layers: Mapping[str, int]  # how many of each class have a unit of their own

    def line(self, verbose: bool = False) -> str:
        units = [f"{count} x {kind}" for kind, count in self.layers.items()]
        rest = "the rest" if units else "the whole model; a method blocks() names layers to gather one at a time"
        return f"fsdp: {plural(self.num_units, 'unit')}: {', '.join([*units, rest])}"


class NotCompiled(Event):
    """Some ranks cannot compile the layers that `compile` names, and run them as they are."""

    wording = "compile=blocks: rank {ranks:each} runs its layers uncompiled: {reason}"

    ranks: tuple[int, ...]
    reason: str  # of the first of them


class GraphBreak(Event):
    """A layer is compiled in parts, as rank 0 sees it: what is between them cannot be compiled, and runs as it is."""

    wording = "a layer is compiled in parts, which is slower, for what {place} does: {reason}"

    place: str  # file:line, "" where it is not known
    reason: str


class Recompiled(Event):
    """A function has been compiled again by rank 0, in a step or before the first one."""

    wording = "{function} was compiled again in {seconds:.1f} s: {reason}"

    function: str
    seconds: float
    reason: str  # the condition under which the code that was there may run, and that did not hold


class PrecisionLowered(Event):
    """A GPU has no bf16 where others have it, so `precision.kind=auto` is fp32 on all ranks of this world."""

    wording = "precision is fp32, not bf16: the {gpu} of rank {rank} has no bf16"

    rank: int  # the first one whose GPU has none
    gpu: str  # its name


class DataParallelSlower(Event):
    """The run trains by torch's nn.DataParallel."""

    wording = "parallel.kind=data_parallel copies the model to each GPU in every forward; ddp, a worker a GPU, does not"


class VariablesKept(Event):
    """The environment has variables that `run.deterministic` would have set otherwise; they stay as they are."""

    wording = "run.deterministic keeps {variables:each} of the environment; results may differ"

    variables: tuple[str, ...]  # NAME=VALUE, of the leader


class AttemptEnded(Event):
    """The set of workers changes, or the run ends."""

    # "finished", "stopped", "resized", "worker lost", "all workers lost", "communication failed", "corruption",
    # "exception" or what was wrong with a step
    cause: str
    step: int | None = None  # the last one that was done
    # Since the last step, where the attempt ended by itself:
    validation_s: float | None = None  # in which training waited for the last validation
    snapshot_s: float | None = None  # for a copy in memory
    checkpoint_s: float | None = None  # for a checkpoint

    def line(self, verbose: bool = False) -> str:
        after = f" after step {self.step}" if self.step is not None else ""
        return f"attempt {self.attempt} ended{after}: {self.cause}"


class Log(Event):
    """The figures of a log step, means and medians since the last one."""

    kept = False

    step: int
    total_steps: int  # length of the run
    loss: float  # mean over the global batch
    lr: float
    grad_norm: float  # before clipping
    unit: str  # what a "unit" is here: "tok" or "samples"
    memory_bytes: int  # peak of this worker, on its device or, without one, in the process
    world_size: int
    step_ms: float  # median
    data_wait: float = 0.0  # share of the steps' time in which the leader waited for data, 0 to 1
    units_per_s: float
    samples_per_s: float
    eta_s: float  # until the end of the run
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1: of the peaks of all GPUs in the format in use, if known
    metrics: Mapping[str, float] = {}  # of the task, mean over the global batch
    at_risk: Mapping[str, int] = {}  # steps that a loss would cost now, as in the event of this name

    def figures(self) -> dict[str, float]:
        """Return what trackers draw, by tag."""
        train = self.model_dump(include={"loss", "lr", "grad_norm"}) | dict(self.metrics)
        # `mfu` has no curve where it is unknown: a zero would be read as a fault.
        speed = self.model_dump(include=_SPEED, exclude_none=True)
        return _tagged("train", train) | _tagged("speed", speed)

    def line(self, verbose: bool = False) -> str:
        rate = self.samples_per_s if self.unit == "samples" else self.units_per_s
        return joined(
            [
                f"step {self.step}/{self.total_steps} {100 * self.step // self.total_steps}%",
                f"loss {number(self.loss)}",
                in_words(self.metrics),
                f"lr {self.lr:.1e}".replace("e-0", "e-"),
                f"{self.step_ms:.0f} ms",
                f"data wait {self.data_wait:.0%}",
                f"{compact(rate)} {self.unit}/s",
                f"mfu {self.mfu:.1%}" if self.mfu else "",
                size(self.memory_bytes),
                plural(self.world_size, "worker"),
                f"eta {duration(self.eta_s)}",
            ]
        )


class Profile(Event):
    """The profiler has recorded some steps."""

    wording = "profile of rank {rank} to step {step} in {path}, for Perfetto or TensorBoard\n{table}"

    rank: int
    step: int  # the last one in it
    path: str
    table: str  # the operators that took the most time


class MemoryHistory(Event):
    """A GPU was out of memory, and the last allocations there have been written down."""

    wording = "allocations of rank {rank}, which was out of memory, are in {path}: drop it on pytorch.org/memory_viz"

    rank: int
    path: str  # for https://pytorch.org/memory_viz


class Validation(Event):
    """Means over all held-out samples, after `step`. In the line the metrics stand beside the other fields."""

    wording = "validation at step {step} | {metrics:metrics}"
    spread = "metrics"

    step: int
    metrics: Mapping[str, float]

    def figures(self) -> dict[str, float]:
        """Return what trackers draw, by tag."""
        return _tagged("validation", self.metrics)


class Restore(Event):
    """An attempt goes on from state that was there."""

    step: int
    source: str  # "rank 2", "snapshot" or "checkpoint"
    lost_steps: int  # finished steps that are done again


class Checkpoint(Event):
    """A checkpoint is committed."""

    wording = "checkpoint at step {step} | {bytes:size} in {seconds:.1f} s | {path}"

    step: int
    path: str
    seconds: float  # from the copy to the commit
    blocked_s: float  # those of them in which training waited
    bytes: int
    not_deleted: str | None = None  # why an older one could not be deleted

    def line(self, verbose: bool = False) -> str:
        stays = f"older ones cannot be deleted: {self.not_deleted}" if self.not_deleted else ""
        return joined([super().line(), stays])


class CheckpointFailed(Event):
    """Storage refuses a checkpoint. It is tried again, or the next one is."""

    wording = "no checkpoint at step {step} yet, training goes on: {error}"

    step: int
    error: str
    needed_bytes: int

    def line(self, verbose: bool = False) -> str:
        needed = f" ({size(self.needed_bytes)} are needed)" if self.needed_bytes else ""
        return super().line() + needed


class NotSaved(Event):
    """What a worker held when the user's code raised was not worth a checkpoint, or could not be written."""

    wording = "step {step} was not saved: {error}"

    step: int
    error: str


class CheckpointQuarantined(Event):
    """A checkpoint is not what was written, so nothing reads it any more."""

    wording = "checkpoint at step {step} is damaged and will not be used: {error}"

    step: int
    error: str


class Snapshot(Event):
    """The first copy of an attempt in the nodes' memory; later ones are not told."""

    wording = "snapshots in node memory from step {step} on: {bytes:size} a worker, {stall_s:ms} each"

    step: int
    stall_s: float  # how long training waited
    bytes: int  # of one worker


class AtRisk(Event):
    """What a loss would cost now, in finished steps that would be done again: told once an attempt."""

    wording = (
        "a loss now would cost, in steps: a worker {worker}, all workers of a node {workers_of_node}, all workers "
        "{workers}, a node {node}, everything {everything}"
    )

    step: int
    worker: int
    workers_of_node: int  # all processes of it; the machine stays
    workers: int  # all of them; the machines stay
    node: int
    everything: int  # but storage


class SnapshotDamaged(Event):
    """A copy in node memory has changed since it was made, and is not restored."""

    wording = "the snapshot of step {step} is damaged and will not be used: {error}"

    step: int
    error: str


class NoSnapshots(Event):
    """The state is not copied to the nodes' memory."""

    wording = "no snapshots in node memory, the death of all workers costs the steps since the last checkpoint: {error}"

    error: str


class Failure(Event):
    """A worker is lost, or its code raised."""

    error: str
    # "worker", "hang", "preemption", "exception", "oom", "communication" where workers that live cannot reach each
    # other, "corruption" of one that computes wrongly, or "ours" for an error that has a remedy of its own
    kind: str | None = None
    member: str | None = None  # name of the worker
    node: str | None = None  # Ray's id of the machine
    step: int | None = None
    fatal: bool = False  # the run ends
    budget: str | None = None  # why it ends, where one kind of failure has come too often
    traceback: str | None = None

    def line(self, verbose: bool = False) -> str:
        if self.member is None:
            return f"failure: {self.error}"
        where = f" on node {node_name(self.node)}" if self.node is not None else ""
        return f"failure ({self.kind}) of worker {self.member}{where}: {self.error}"


class Preemption(Event):
    """A node is about to go."""

    node: str  # Ray's id of the machine
    deadline_s: float  # Unix time at which it goes, 0 where nobody has said when
    members: tuple[str, ...]  # the workers on it

    def line(self, verbose: bool = False) -> str:
        when = "is going"
        if self.deadline_s and self.time_s is not None:
            when = f"goes in {self.deadline_s - self.time_s:.0f} s"
        return f"node {node_name(self.node)} {when}: {plural(len(self.members), 'worker')} will leave it"


class ProcessRestarted(Event):
    """A process of the run that does not train has died, and the command goes on by itself."""

    wording = "{process} has died: {follows}"

    process: str  # "the coordinator", "Ray's controller", or of an embedded Ray "gcs_server", "raylet" ...
    follows: str


class NodeQuarantined(Event):
    """Workers keep dying young on a node, or one has computed wrongly, so it gets no more of them for a while."""

    node: str


class Hang(Event):
    """Some ranks seem to be stuck. This is told early, and ends nobody: that is a failure of the kind "hang"."""

    ranks: tuple[int, ...]  # those who are stuck
    phase: str  # "loader", "forward", "backward", "gradients", "update", "collective", "checkpoint", "compile" ...
    step: int
    seconds: float  # how long they have been in `phase`
    stacks: str  # folder with what every thread of every worker was doing
    guess: str = "stuck"  # or "all wait" for each other, or "slow": all are in code of their own, and nobody waits
    ends_s: float | None = None  # after how many seconds in `phase` the attempt is ended, as things stand

    def line(self, verbose: bool = False) -> str:
        ranks = ", ".join(map(str, self.ranks))
        what = "slow" if self.guess == "slow" else "stuck"
        line = f"rank {ranks} {what} in {self.phase} after step {self.step} for {self.seconds:.1f} s"
        if self.ends_s is not None:
            waiting = {"stuck": "the others wait", "slow": "nobody waits for it"}.get(self.guess, self.guess)
            line += f", {waiting}; the attempt ends after {self.ends_s:.0f} s"
        return f"{line}; stacks in {self.stacks}"


class HangOver(Event):
    """Ranks that seemed to be stuck have gone on by themselves."""

    wording = "rank {ranks:each} went on after {seconds:.1f} s in {phase}"

    ranks: tuple[int, ...]
    phase: str  # in which they seemed to be stuck
    step: int
    seconds: float  # how long it took


class Silent(Event):
    """No heartbeats come from a worker whose connection stands. This is told early, and ends nobody."""

    member: str  # name of the worker
    seconds: float  # how long it has not been heard of
    answers: bool  # its machine takes what is sent to it: a process that is stopped, or code that lets nothing else run
    ends_s: float  # after how many seconds of silence it is taken for dead, as things stand

    def line(self, verbose: bool = False) -> str:
        where = "its machine answers, its process does not" if self.answers else "nor does its machine answer"
        line = f"worker {self.member} not heard of for {self.seconds:.1f} s: {where}"
        return f"{line}; taken for dead after {self.ends_s:.0f} s"


class Straggler(Event):
    """One rank makes the others wait in every step."""

    wording = "rank {rank} is slow in {phase}: others wait {share:.0%} of every step"

    member: str  # name of the worker
    rank: int
    phase: str  # "loader", "forward", or on CUDA "device"
    lost_s: float  # how long they wait for it in a step, most of it in `phase`
    share: float  # of the step's time, 0 to 1


class RankTimes(Event):
    """What a step costs each rank by itself: loader and forward, or on GPUs the longer of loader and device.

    Under Ray, which brings the heartbeats of all workers together: 20 seconds after an attempt has begun, and then ever
    more rarely. Each tells of the time since the one before it.
    """

    detail = True
    wording = "ms of a step that each rank spends by itself, up to step {step}: {own_ms:each}"

    step: int  # the last one that all ranks have done
    num_steps: int  # since the last such event of the attempt
    own_ms: tuple[float, ...]  # by rank, mean of these steps
    last: tuple[int, ...]  # by rank: at how many looks, seconds apart, the others had to wait for it most


class Scale(Event):
    """The bounds of the number of workers are other ones from now on: (smallest, largest)."""

    wording = "scaling.num_workers [{before:each}] -> [{after:each}]"

    before: tuple[int, int]
    after: tuple[int, int]


class Waiting(Event):
    """The run is short of workers."""

    wording = "waiting for workers: {workers} of at least {needed} are there"

    workers: int  # that are there
    needed: int  # at least
    seconds: float | None = None  # for how long the run has been short of them


class LeftOver(Event):
    """Workers wait until they make a whole replica of `parallel.shard_size`, beside those that train."""

    wording = "{workers} of the workers wait: a replica has {unit}"

    workers: int
    unit: int  # workers of a replica


class WaitingForStorage(Event):
    """No world can form, since storage does not take the number of the next attempt."""

    error: str


class Shares(Event):
    """Microbatches of a step are shared out in another way from `step` on; or stay even, and why."""

    step: int
    before: tuple[int, ...]  # microbatches by rank
    after: tuple[int, ...]
    microbatch_ms: tuple[float, ...] | None = None  # by rank, where measured speeds are the reason
    weights: tuple[float, ...] | None = None  # by rank, where the configuration's weights are
    parallel: str | None = None  # the strategy under which shares must stay even

    def line(self, verbose: bool = False) -> str:
        if self.parallel is not None:
            return f"shares stay even {self.after}: under {self.parallel} every worker runs as many microbatches"
        change = f"shares {self.before} -> {self.after} from step {self.step}"
        if self.weights is not None:
            return f"{change}: weights {', '.join(f'{weight:g}' for weight in self.weights)}"
        times_ms = self.microbatch_ms or (1.0,)
        slower = max(times_ms) / min(times_ms)
        if slower < 1.05:
            return f"{change}: equally fast"
        return f"{change}: rank {times_ms.index(max(times_ms))} is {slower:.1f}x slower"


class Rollback(Event):
    """A step was bad: the run goes back to a checkpoint before `steps`, and leaves them out from now on."""

    wording = "rolling back: {cause}; left out from now on: {steps:each}"

    steps: tuple[int, ...]
    cause: str
    microbatches: tuple[int, ...] | None = None  # of the bad step, by index, whose own loss is not finite
    samples: tuple[int, ...] | None = None  # ids of their samples
    not_finite: tuple[int, ...] | None = None  # those of them that hold a NaN or an infinity when they are read again


class Corruption(Event):
    """Ranks have come to different gradients of one microbatch. The step is not committed, and is done again."""

    wording = "wrong result found in {cause}"

    step: int
    microbatch: int  # by index
    rank: int | None = None  # the one that computes wrongly; None where that cannot be told
    node: str | None = None  # its host, as the host calls itself
    device: str | None = None  # its GPU's name, else its processor's
    gpu_uuid: str | None = None  # as nvidia-smi names the GPU
    gpu_serial: str | None = None  # of the GPU's board
    # By rank, as hexadecimal numbers; two of each where only two ranks can be compared, and both computed it again.
    digests: Mapping[str, tuple[str, ...]]
    cause: str


class NothingToCompare(Event):
    """`audit.recompute` has nobody to compare with. Told once a run for each reason."""

    wording = "audit.recompute compares nothing: {reason}"

    reason: str


class Spike(Event):
    """A loss spiked, and there is no budget to leave the step out."""

    step: int
    cause: str


class FaultInjected(Event):
    """A fault that the configuration asks for has struck."""

    kind: str  # as in the configuration: "kill_at", "hang_at" ...
    phase: str
    step: int
    rank: int


class Finished(Event):
    """The run has ended, by itself or on request."""

    spread = "summary"

    summary: Mapping[str, Any]  # the contents of `summary.json`; in the line they stand beside the other fields


_KINDS: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}
_HEAD = Event.model_fields.keys()
_SPEED = {"step_ms", "data_wait", "units_per_s", "samples_per_s", "memory_bytes", "world_size", "mfu"}


def parse_event(line: Mapping[str, Any]) -> Event | None:
    """Return the event of a line of `events.jsonl`; None for a line that this release cannot read."""
    kind = _KINDS.get(str(line.get("event")))
    if kind is None:
        return None
    fields = dict(line)
    if kind.spread:
        own = {"event", *kind.model_fields} - {kind.spread}
        fields[kind.spread] = {key: value for key, value in line.items() if key not in own}
    try:
        event = kind.model_validate(fields)
        return event if all(_is_plausible(name, value) for name, value in event) else None
    # A line of a release whose event had not this one's fields. Fields that only that release knew are passed over.
    except ValidationError:
        return None


def _is_plausible(name: str, value: Any) -> bool:
    """Return whether the field of an event is within what times and counts can be, so that readers can compute."""
    match value:
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


def _tagged(group: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in figures.items()}
