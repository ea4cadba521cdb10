"""The faults, what is claimed of this application under each, and what all contenders train: data, no code."""

from dataclasses import dataclass

NUM_STEPS = 1000
SNAPSHOT_STEPS = 25  # steps between two snapshots, of every contender
LIMIT_S = 5  # after which a silent worker is dead, for every contender: recovery.silence_s at its default
NOTICE_S = 4.0  # between the announcement that a node is taken away and its end
SLOW_S = 3.0  # how long one worker is slow: stopped for two thirds of the time
PACE_S = 0.024  # a forward of one microbatch; a step of two workers has three each
HELD_S = 0.8  # the same while others have their turn, who need the processor


@dataclass(frozen=True)
class Fault:
    """new_attempt: whether it is another attempt once the run has settled again."""

    name: str
    new_attempt: bool = True


# The commonest ones first: if time is short, the first rows are whole. Last the one that stock Ray Train does not come
# back from.
FAULTS = (
    Fault("kill worker"),
    Fault("kill all"),
    Fault("kill last holder"),
    Fault("grow"),
    Fault("drain"),
    Fault("hang"),
    Fault("kill node"),
    Fault("slow worker", new_attempt=False),
    Fault("shrink"),
    Fault("kill coordinator", new_attempt=False),
)


@dataclass(frozen=True)
class Claim:
    """What this application promises. Besides: no sample lost or used twice, an equal result, and the run finishes.

    stall_s: on a quiet machine. On a busy one all takes longer, by the factor that the yardstick shows meanwhile.
    of_torchrun: most of the stall, as a share of torchrun's under the same fault.
    """

    fault: str
    redone: int
    stall_s: float | None = None
    of_torchrun: float | None = None


CLAIMS = (
    Claim("kill worker", redone=1, of_torchrun=0.15),
    Claim("kill all", redone=SNAPSHOT_STEPS + 5),  # the newest snapshot may be five steps short of whole
    Claim("kill last holder", redone=SNAPSHOT_STEPS + 5),
    Claim("drain", redone=0, stall_s=0.5),
    Claim("grow", redone=0, stall_s=0.5),
    Claim("hang", redone=1, stall_s=LIMIT_S + 0.5),
    Claim("kill node", redone=1),
    Claim("kill coordinator", redone=0, stall_s=1.0),
    Claim("slow worker", redone=0, stall_s=1.0),
    Claim("shrink", redone=1, stall_s=1.0),
)

# What the configuration is changed to for all contenders: fp64, since fp32 sums of another order already differ, and a
# model small enough for two cores.
TRAINING = (
    f"run.steps={NUM_STEPS}",
    "run.resume=auto",
    "model={kind: gpt, num_layers: 2, embed_dim: 32, num_heads: 2, context_length: 16}",
    "data={kind: text, source: python-docs, context_length: 16}",
    "batch={global_size: 24, microbatch_size: 4}",
    "schedule={kind: constant, warmup_steps: 0}",
    "precision.kind=fp64",
    "parallel={kind: ddp}",
    "scaling={num_workers: [1, 3], gpus_per_worker: 0}",
    "validation.every=null",
    f"checkpoint.every={SNAPSHOT_STEPS} steps",
    f"recovery={{silence_s: {LIMIT_S}, hang_limit_s: 3}}",  # far below its default: all steps here take alike
    "trackers=[]",
)
