"""Events of a run, with their fields and console lines.

`events.jsonl` holds one line for each kept event, and scripts may rely on the names and fields below. A field's name
ends with its unit: `_s` seconds, `_ms` milliseconds, `_bytes` bytes. A field that is None is left out of the line.
"""

import re
import time
from collections.abc import Mapping
from itertools import starmap
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from steadfast.storage.jsonl import is_moment
from steadfast.units import Wording, compact, duration, in_words, joined, node_name, number, plural, size


class Event(BaseModel):
    """Base class of the events of a run."""

    model_config = ConfigDict(frozen=True)

    name: ClassVar[str]  # name in `events.jsonl`: the class's name in lower case
    kept: ClassVar[bool] = True  # whether `events.jsonl` has the event; frequent events are only shown
    detail: ClassVar[bool] = False  # whether the console shows the event only with `-v`
    wording: ClassVar[str] = ""  # console line, with fields in braces; without it all fields follow the name
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
        head: dict[str, Any] = {"time_s": self.time_s, "event": self.name}
        if self.attempt is not None:
            head["attempt"] = self.attempt
        return head | self.fields()

    def line(self, verbose: bool = False) -> str:
        """Return the console line; `verbose` adds the phases of a start."""
        if self.wording:
            return Wording().vformat(self.wording, (), dict(self))
        parts = [self.name.replace("_", " ")]
        if self.attempt is not None:
            parts.append(f"attempt {self.attempt}")
        parts += [f"{key} {value}" for key, value in self.fields().items()]
        return joined(parts)


class RunStarted(Event):
    """A command has started or resumed the run."""

    launcher: str  # "ray" or "torchrun"
    # whether the command owned the run before: torchrun restarted its ranks, or the command restarted itself after Ray
    # died
    again: bool | None = None


class ShortStep(Event):
    """A run that ended with a short step is extended.

    The short step had fewer samples than `batch.global_size`, and is not changed by the extension.
    """

    wording = "step {step} stays short, because the run once ended with it; the next step begins at position {position}"

    step: int  # number of the short step
    position: int  # position in the stream of training samples at which the next step begins


class ForwardsShrunk(Event):
    """A step ran out of memory, so forwards get fewer samples."""

    wording = "out of memory in step {step}: from now on forwards have at most {forward_size:n} samples | {error}"

    step: int  # step that ran out of memory
    forward_size: int  # most samples of a forward; a larger microbatch is split into parts
    error: str  # message of the out-of-memory error


class MicrobatchChosen(Event):
    """The run has chosen its microbatch size for good.

    The choice is made if `batch.microbatch_size` is auto.
    """

    microbatch_size: int  # samples of a microbatch
    rank: int | None = None  # rank with memory for the fewest samples, if memory was measured
    sample_bytes: int | None = None  # bytes that one more sample takes in a forward and backward on this rank
    free_bytes: int | None = None  # bytes that are free on this rank between two steps

    def line(self, verbose: bool = False) -> str:
        chosen = f"batch.microbatch_size auto -> {self.microbatch_size} for the whole run"
        if self.sample_bytes is None or self.free_bytes is None:
            return chosen
        room = f"{size(self.free_bytes)} free on rank {self.rank}"
        return joined([chosen, f"a sample takes {size(self.sample_bytes)} of the {room}"])


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

    @property
    def ready_in_s(self) -> float:
        """Return the seconds of all phases, up to the end of the first step."""
        return self.detected_s + self.formed_s + self.built_s + self.restored_s + self.first_step_s

    def line(self, verbose: bool = False) -> str:
        origin = "from step 0"
        if self.step:
            origin = f"step {self.step} restored from {self.source}"
        line = f"attempt {self.attempt}: {plural(self.world_size, 'worker')}, {origin}"
        line += f" | ready in {self.ready_in_s:.1f} s"
        if verbose:
            line += f" | detected {self.detected_s:.1f}, formed {self.formed_s:.1f}, built {self.built_s:.1f}"
            line += f", restored {self.restored_s:.1f}, first_step {self.first_step_s:.1f}"
        return line


class WarmupShortened(Event):
    """The warm-up is longer than the run, and is shortened."""

    wording = "schedule.warmup_steps {before} -> {after}: the run has {num_steps:step}"

    before: int  # steps of warm-up in the configuration
    after: int  # steps of warm-up in use
    num_steps: int  # length of the run in steps


class WeightsLeftOut(Event):
    """The weights of `run.init_from` do not match the model's names.

    The run continues, because `run.init_strict` is false.
    """

    wording = "run.init_from lacks {num_missing} of the model's names and has {num_unexpected} others: {names:each}"

    num_missing: int  # parameters that the file lacks; they keep their initial values
    num_unexpected: int  # entries of the file that the model lacks; they are not loaded
    names: tuple[str, ...]  # the first missing names, then the first unexpected names


class BuiltWhole(Event):
    """Each worker must build the whole model, not only its shards."""

    wording = "each worker holds the whole model while it is built and restored | {reason}"

    reason: str  # what prevents building the shards alone


class NothingFrozen(Event):
    """`checkpoint.trainable_only` has no effect, because all parameters of the model are trained."""

    wording = "checkpoint.trainable_only leaves nothing out: all parameters of the model are trained"


class PartsInEvaluation(Event):
    """Some modules were built in evaluation mode, and keep that mode."""

    wording = "the model was built with modules in evaluation mode, which stay in it: {modules:each}"

    modules: tuple[str, ...]  # names of the outermost modules in evaluation mode


class ModelSharded(Event):
    """FSDP gathers the model in units.

    Each repeated layer is a unit, and the rest of the model is another one.
    """

    num_units: int  # number of units
    layers: Mapping[str, int]  # number of units by the class of the layer

    def line(self, verbose: bool = False) -> str:
        units = [f"{count} x {kind}" for kind, count in self.layers.items()]
        if units:
            units.append("the rest")
        else:
            units.append("the whole model; a method blocks() makes each layer a unit of its own")
        return f"fsdp: {plural(self.num_units, 'unit')}: {', '.join(units)}"


class NotCompiled(Event):
    """Some ranks cannot compile their layers, and run the layers uncompiled."""

    wording = "compile=blocks: rank {ranks:each} runs its layers uncompiled: {reason}"

    ranks: tuple[int, ...]  # ranks that run uncompiled layers
    reason: str  # reason of the first of these ranks


class GraphBreak(Event):
    """Rank 0 compiled a layer in several parts.

    The code between the parts cannot be compiled, and runs uncompiled.
    """

    wording = "a layer is compiled in parts, which is slower, because of {place}: {reason}"

    place: str  # file:line of the code that cannot be compiled, "" if unknown
    reason: str  # torch's reason


class Recompiled(Event):
    """Rank 0 has compiled a function again."""

    wording = "{function} was compiled again in {seconds:.1f} s: {reason}"

    function: str  # name of the function
    seconds: float  # duration of the compilation in seconds
    reason: str  # condition of the existing code that did not hold


class PrecisionLowered(Event):
    """A GPU has no bf16, so all ranks use fp32.

    The event concerns `precision.kind=auto`, which needs bf16 on every GPU of a world.
    """

    wording = "precision is fp32, not bf16: the {gpu} of rank {rank} has no bf16"

    rank: int  # first rank whose GPU has no bf16
    gpu: str  # name of this GPU


class DataParallelSlower(Event):
    """The run trains with torch's nn.DataParallel, which is slower than ddp."""

    wording = "parallel.kind=data_parallel copies the model to each GPU in every forward; ddp copies it once per worker"


class VariablesKept(Event):
    """The environment overrides variables of `run.deterministic`."""

    wording = "run.deterministic keeps {variables:each} of the environment; results may differ between runs"

    variables: tuple[str, ...]  # NAME=VALUE of each variable, as the leader has it


class AttemptEnded(Event):
    """The set of workers changes or the run ends."""

    # "finished", "stopped", "resized", "worker lost", "all workers lost", "communication failed", "corruption",
    # "exception" or the reason why a step was bad
    cause: str
    step: int | None = None  # last finished step
    # These are seconds since the last step, if the attempt ended without a failure:
    validation_s: float | None = None  # seconds in which training waited for the last validation
    snapshot_s: float | None = None  # seconds in which training waited for a copy in memory
    checkpoint_s: float | None = None  # seconds in which training waited for a checkpoint

    def line(self, verbose: bool = False) -> str:
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
    memory_bytes: int  # peak memory of the leader, on its device or, without a device, of its process
    world_size: int  # number of workers
    step_ms: float  # median duration of a step
    data_wait: float = 0.0  # share of the steps' time in which the leader waited for data, 0 to 1
    units_per_s: float  # tokens or samples per second, as `unit` says
    samples_per_s: float  # samples per second
    eta_s: float  # seconds until the end of the run
    # model FLOPs utilisation, 0 to 1: share of the peak of all GPUs in the format in use; absent if the peak is unknown
    mfu: float | None = None
    metrics: Mapping[str, float] = {}  # metrics of the task, mean over the global batch
    at_risk: Mapping[str, int] = {}  # steps that a loss would cost now, with the fields of the event `at_risk`

    def figures(self) -> dict[str, float]:
        """Return the figures that trackers draw, by tag."""
        train = self.model_dump(include={"loss", "lr", "grad_norm"}) | dict(self.metrics)
        # An unknown `mfu` is left out, because a curve at zero would look like a fault.
        speed = self.model_dump(include=_SPEED, exclude_none=True)
        return _tagged("train", train) | _tagged("speed", speed)

    def line(self, verbose: bool = False) -> str:
        rate = self.samples_per_s if self.unit == "samples" else self.units_per_s
        parts = [
            f"step {self.step}/{self.total_steps} {100 * self.step // self.total_steps}%",
            f"loss {number(self.loss)}",
            in_words(self.metrics),
            # Python writes at least two digits of an exponent, but a learning rate needs only one.
            f"lr {self.lr:.1e}".replace("e-0", "e-"),
            f"{self.step_ms:.0f} ms",
            f"data wait {self.data_wait:.0%}",
            f"{compact(rate)} {self.unit}/s",
        ]
        if self.mfu:
            parts.append(f"mfu {self.mfu:.1%}")
        parts += [size(self.memory_bytes), plural(self.world_size, "worker"), f"eta {duration(self.eta_s)}"]
        return joined(parts)


class Profile(Event):
    """The profiler has recorded some steps."""

    wording = "profile of rank {rank} up to step {step} is in {path}: open it in Perfetto or TensorBoard\n{table}"

    rank: int  # rank that was profiled
    step: int  # last step in the profile
    path: str  # file of the profile
    table: str  # operators that took the most time


class MemoryHistory(Event):
    """A GPU ran out of memory, and its last allocations were saved."""

    wording = "rank {rank} ran out of memory; its last allocations are in {path}: open it on pytorch.org/memory_viz"

    rank: int  # rank that ran out of memory
    path: str  # file to open on https://pytorch.org/memory_viz


class Validation(Event):
    """A validation has finished.

    The metrics are fields of the line themselves, beside `step`.
    """

    wording = "validation at step {step} | {metrics:metrics}"
    spread = "metrics"

    step: int  # last step before the validation
    metrics: Mapping[str, float]  # means over all held-out samples

    def figures(self) -> dict[str, float]:
        """Return the figures that trackers draw, by tag."""
        return _tagged("validation", self.metrics)


class Restore(Event):
    """An attempt continues from an existing state."""

    step: int  # step of the restored state
    source: str  # where the state was found: "rank 2", "snapshot" or "checkpoint"
    lost_steps: int  # finished steps that must be repeated


class Checkpoint(Event):
    """A checkpoint is committed."""

    wording = "checkpoint at step {step} | {bytes:size} in {seconds:.1f} s | {path}"

    step: int  # step of the state in the checkpoint
    path: str  # folder of the checkpoint
    seconds: float  # seconds from the copy to the commit
    blocked_s: float  # seconds in which training waited for the checkpoint
    bytes: int  # size of the checkpoint
    not_deleted: str | None = None  # reason why an older checkpoint could not be deleted

    def line(self, verbose: bool = False) -> str:
        line = super().line()
        if self.not_deleted:
            line += f" | older ones cannot be deleted: {self.not_deleted}"
        return line


class CheckpointFailed(Event):
    """Storage has refused a checkpoint.

    The write is repeated until it succeeds or a newer checkpoint is due.
    """

    wording = "no checkpoint at step {step} yet, training continues: {error}"

    step: int  # step of the state that was not written
    error: str  # message of the storage error
    needed_bytes: int  # bytes that the checkpoint needs, 0 if unknown

    def line(self, verbose: bool = False) -> str:
        line = super().line()
        if self.needed_bytes:
            line += f" ({size(self.needed_bytes)} are needed)"
        return line


class NotSaved(Event):
    """The state at an exception in the user's code was not saved."""

    wording = "step {step} was not saved: {error}"

    step: int  # step of the state
    error: str  # reason why the state could not be used or written


class CheckpointQuarantined(Event):
    """A checkpoint is damaged, and is no longer used."""

    wording = "checkpoint at step {step} is damaged and will not be used: {error}"

    step: int  # step of the damaged checkpoint
    error: str  # what is wrong with the checkpoint


class Snapshot(Event):
    """The first snapshot of an attempt lies in node memory.

    Later snapshots cause no event.
    """

    wording = "snapshots in node memory from step {step} on: {bytes:size} per worker, {stall_s:ms} each"

    step: int  # step of the first snapshot
    stall_s: float  # seconds in which training waited for the copy
    bytes: int  # size of one worker's copy


class AtRisk(Event):
    """Number of finished steps that must be repeated after a loss now.

    The event comes once per attempt.
    """

    wording = (
        "steps to repeat after a loss now: of a worker {worker}, of all workers of a node {workers_of_node}, of all "
        "workers {workers}, of a node {node}, of everything {everything}"
    )

    step: int  # last finished step
    worker: int  # steps after the loss of one worker
    workers_of_node: int  # steps after the loss of all processes of a node, while the machine stays
    workers: int  # steps after the loss of all workers, while the machines stay
    node: int  # steps after the loss of a machine
    everything: int  # steps after the loss of everything except storage


class SnapshotDamaged(Event):
    """A damaged copy in node memory is not restored."""

    wording = "the snapshot of step {step} is damaged and will not be used: {error}"

    step: int  # step of the damaged snapshot
    error: str  # what is wrong with the snapshot


class NoSnapshots(Event):
    """The state is not copied to node memory."""

    wording = "no snapshots in node memory: the death of all workers costs the steps since the last checkpoint: {error}"

    error: str  # reason why no snapshot is taken


class Failure(Event):
    """A worker was lost, or its code raised an exception."""

    error: str  # cause of the failure
    # "worker", "hang", "preemption", "exception", "oom", "communication" if live workers cannot reach each other,
    # "corruption" if a worker computed wrongly, or "ours" for an error of this program that names its own remedy
    kind: str | None = None
    member: str | None = None  # name of the worker
    node: str | None = None  # Ray's id of the machine
    step: int | None = None  # last finished step of the worker
    fatal: bool = False  # whether the failure ends the run
    budget: str | None = None  # explanation, if the run ends because failures of one kind came too often
    traceback: str | None = None  # traceback of the exception

    def line(self, verbose: bool = False) -> str:
        # No worker is named under torchrun, or if the run as a whole has failed.
        if self.member is None:
            return f"failure: {self.error}"
        worker = f"worker {self.member}"
        if self.node is not None:
            worker += f" on node {node_name(self.node)}"
        return f"failure ({self.kind}) of {worker}: {self.error}"


class Preemption(Event):
    """A node is about to be taken away."""

    node: str  # Ray's id of the machine
    deadline_s: float  # Unix time at which the node goes, 0 if unknown
    members: tuple[str, ...]  # names of the workers on the node

    def line(self, verbose: bool = False) -> str:
        when = "is about to go"
        if self.deadline_s and self.time_s is not None:
            when = f"goes in {self.deadline_s - self.time_s:.0f} s"
        return f"node {node_name(self.node)} {when}: {plural(len(self.members), 'worker')} will leave it"


class ProcessRestarted(Event):
    """A process that does not train has died and was replaced."""

    wording = "{process} has died: {follows}"

    process: str  # "the coordinator", "Ray's controller", or a process of an embedded Ray: "gcs_server", "raylet" ...
    follows: str  # what the run does next


class NodeQuarantined(Event):
    """A node gets no new workers for a while.

    Its workers died early or computed wrongly.
    """

    node: str  # Ray's id of the machine


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

    def line(self, verbose: bool = False) -> str:
        ranks = ", ".join(map(str, self.ranks))
        what = "slow" if self.guess == "slow" else "stuck"
        line = f"rank {ranks} {what} in {self.phase} after step {self.step} for {self.seconds:.1f} s"
        if self.ends_s is not None:
            # The guess "all wait" is shown as it is.
            waiting = {"stuck": "the other ranks wait", "slow": "no rank waits for it"}.get(self.guess, self.guess)
            line += f", {waiting}; the attempt ends after {self.ends_s:.0f} s"
        return f"{line}; stacks in {self.stacks}"


class HangOver(Event):
    """Ranks that seemed to be stuck have continued by themselves."""

    wording = "rank {ranks:each} continued after {seconds:.1f} s in {phase}"

    ranks: tuple[int, ...]  # ranks that seemed to be stuck
    phase: str  # phase in which these ranks seemed to be stuck
    step: int  # last finished step of these ranks at the warning
    seconds: float  # seconds that these ranks spent in `phase`


class Silent(Event):
    """A worker with an open connection sends no heartbeats.

    This early warning ends nothing.
    """

    member: str  # name of the worker
    seconds: float  # seconds since the last heartbeat
    # whether the worker's machine acknowledges data; if so, the process is stopped, or its code blocks all other
    # threads
    answers: bool
    ends_s: float  # seconds of silence after which the worker is declared dead, by the current estimate

    def line(self, verbose: bool = False) -> str:
        where = "its machine answers, its process does not" if self.answers else "nor does its machine answer"
        line = f"no heartbeat from worker {self.member} for {self.seconds:.1f} s: {where}"
        return f"{line}; declared dead after {self.ends_s:.0f} s"


class Straggler(Event):
    """One rank makes the other ranks wait in every step."""

    wording = "rank {rank} is slow in {phase}: the other ranks wait {share:.0%} of every step"

    member: str  # name of the worker
    rank: int  # rank of the worker
    phase: str  # phase that takes the most time: "loader", "forward", or on CUDA "device"
    lost_s: float  # seconds per step in which the other ranks wait for this rank
    share: float  # share of the step's time in which the other ranks wait, 0 to 1


class RankTimes(Event):
    """Time that each rank itself needs for a step.

    The time is the sum of loader and forward, or on GPUs the longer of loader and device. The event exists under Ray
    only, where the heartbeats of all workers are compared. The first event of an attempt comes after 20 seconds, and
    later events come ever more rarely. Each event covers the time since the last one.
    """

    detail = True
    wording = "ms that each rank itself needs for a step, up to step {step}: {own_ms:each}"

    step: int  # last step that all ranks have finished
    num_steps: int  # steps since the last event of this kind in the attempt
    own_ms: tuple[float, ...]  # mean milliseconds per step, by rank
    last: tuple[int, ...]  # by rank: number of comparisons, seconds apart, in which this rank was the slowest


class Scale(Event):
    """The bounds of the number of workers have changed.

    Both fields are [smallest, largest].
    """

    wording = "scaling.num_workers [{before:each}] -> [{after:each}]"

    before: tuple[int, int]  # former bounds
    after: tuple[int, int]  # new bounds


class Waiting(Event):
    """The run has too few workers to train."""

    wording = "waiting for workers: {workers} of at least {needed} have started"

    workers: int  # workers that have started
    needed: int  # smallest number of workers that can train
    seconds: float | None = None  # seconds for which workers have been missing


class LeftOver(Event):
    """Some workers wait until another replica is complete.

    A replica has `parallel.shard_size` workers.
    """

    wording = "{workers} of the workers wait: a replica needs {unit}"

    workers: int  # workers that wait
    unit: int  # workers of a replica


class WaitingForStorage(Event):
    """No world can form, because storage refuses to be written.

    The number of the next attempt must be recorded before a world forms.
    """

    error: str  # message of the storage error


class Shares(Event):
    """Microbatches are distributed differently from `step` on, or must stay distributed evenly."""

    step: int  # first step with the new shares
    before: tuple[int, ...]  # former microbatches per step, by rank
    after: tuple[int, ...]  # new microbatches per step, by rank
    # milliseconds per microbatch by rank, if measured speeds are the reason
    microbatch_ms: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None  # weights by rank, if `batch.balance` gives weights
    parallel: str | None = None  # strategy that requires even shares

    def line(self, verbose: bool = False) -> str:
        if self.parallel is not None:
            return f"shares stay even {self.after}: under {self.parallel} every worker runs the same number"
        change = f"shares {self.before} -> {self.after} from step {self.step}"
        if self.weights is not None:
            weights = ", ".join(f"{weight:g}" for weight in self.weights)
            return f"{change}: weights {weights}"
        times_ms = self.microbatch_ms or (1.0,)
        slower = max(times_ms) / min(times_ms)
        if slower < 1.05:
            return f"{change}: all ranks are equally fast"
        return f"{change}: rank {times_ms.index(max(times_ms))} is {slower:.1f}x slower"


class Rollback(Event):
    """The run returns to an earlier checkpoint after a bad step.

    The run skips `steps` from now on.
    """

    wording = "rolling back: {cause}; skipped from now on: {steps:each}"

    steps: tuple[int, ...]  # steps that the run skips
    cause: str  # reason why a step was bad
    microbatches: tuple[int, ...] | None = None  # indices of the bad step's microbatches whose own loss is not finite
    samples: tuple[int, ...] | None = None  # ids of the samples in these microbatches
    not_finite: tuple[int, ...] | None = None  # ids of these samples that contain a NaN or an infinity when read again


class Corruption(Event):
    """Ranks have computed different gradients for one microbatch.

    The step is not committed, and is repeated.
    """

    wording = "wrong result found in {cause}"

    step: int  # step of the comparison
    microbatch: int  # index of the microbatch
    rank: int | None = None  # rank that computes wrongly; None if unknown
    node: str | None = None  # host name of this rank's machine
    device: str | None = None  # name of its GPU, or of its processor if it has no GPU
    gpu_uuid: str | None = None  # id of the GPU, as nvidia-smi shows it
    gpu_serial: str | None = None  # serial number of the GPU's board
    # Digests as hexadecimal numbers by rank; two of each rank if only two ranks could be compared, and both computed
    # again.
    digests: Mapping[str, tuple[str, ...]]
    cause: str  # description of the step, the rank and its machine


class NothingToCompare(Event):
    """`recompute.every` has no second rank to compare with.

    The event comes once per run for each reason.
    """

    wording = "recompute.every compares nothing: {reason}"

    reason: str  # why no rank can be compared


class Spike(Event):
    """A loss spiked, and no budget is left to skip the step."""

    step: int  # step of the spike
    cause: str  # height of the spike


class FaultInjected(Event):
    """A fault of the configuration has struck."""

    kind: str  # kind in the configuration: "kill_at", "hang_at" ...
    phase: str  # phase of the step in which the fault struck
    step: int  # step of the fault
    rank: int  # rank that the fault struck


class Finished(Event):
    """The run has ended, by itself or on request."""

    spread = "summary"

    summary: Mapping[str, Any]  # contents of `summary.json`, whose entries are fields of the line themselves


# All events are direct subclasses, so a new class needs no entry here.
_KINDS: dict[str, type[Event]] = {kind.name: kind for kind in Event.__subclasses__()}
_HEAD = Event.model_fields.keys()
_SPEED = {"step_ms", "data_wait", "units_per_s", "samples_per_s", "memory_bytes", "world_size", "mfu"}


def parse_event(line: Mapping[str, Any]) -> Event | None:
    """Return the event of a line of `events.jsonl`.

    Returns None if this release cannot read the line.
    """
    kind = _KINDS.get(str(line.get("event")))
    if kind is None:
        return None
    fields = dict(line)
    if kind.spread:
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


def _tagged(group: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{group}/{name}": value for name, value in figures.items()}
