"""Configuration of injected faults.

Drills use injected faults, and users inject faults to see their own run recover.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from steadfast.config.base import Section

Phase = Literal["loader", "forward", "collective", "checkpoint"]


class Fault(Section):
    step: PositiveInt
    """the step of the fault; a fault in a collective or checkpoint strikes at the first one from this step on"""
    rank: NonNegativeInt = 0
    """the rank, at that step, of the worker that the fault strikes"""
    # The default is once: a later attempt repeats the step, and would fail again in each attempt.
    times: PositiveInt | None = 1
    """how often the fault strikes in the whole run, including attempts that repeat the step; null for every time"""


class FailAt(Fault):
    """Raise an exception inside the step, as a bug in the user's code would."""

    kind: Literal["fail_at"] = "fail_at"


class OomAt(Fault):
    """Raise torch.OutOfMemoryError inside the step."""

    kind: Literal["oom_at"] = "oom_at"


class DrainAt(Fault):
    """Make the worker ask to leave after the step."""

    kind: Literal["drain_at"] = "drain_at"


class NanAt(Fault):
    """Set loss and gradient of the worker's microbatches to NaN."""

    kind: Literal["nan_at"] = "nan_at"


class SpikeAt(Fault):
    """Multiply loss and gradient of the worker's microbatches."""

    kind: Literal["spike_at"] = "spike_at"
    factor: float = 1000.0
    """the factor by which loss and gradient are multiplied"""


class KillAt(Fault):
    """End the worker's process with SIGKILL."""

    kind: Literal["kill_at"] = "kill_at"
    phase: Phase = "forward"
    """the part of the step in which it strikes"""


class HangAt(Fault):
    """Make the worker sleep, while its process and connections stay open."""

    kind: Literal["hang_at"] = "hang_at"
    phase: Phase = "forward"
    """the part of the step in which it strikes"""
    seconds: PositiveFloat | None = None
    """how long the worker hangs; null to hang for ever"""


class FlipAt(Fault):
    """Flip one bit of a tensor, as broken hardware does, and continue."""

    kind: Literal["flip_at"] = "flip_at"
    where: Literal["gradient", "activation", "weight"] = "gradient"
    """the tensor that is changed: the gradient of a microbatch, the output of a layer in the forward, or a weight
    before the forward; the weight stays wrong"""
    bit: Annotated[int, Field(ge=0, lt=64)] = 30
    """the bit, 0 is the lowest; in fp32 bit 30 is the highest of the exponent and bit 31 the sign. The value is taken
    modulo the bits of the number"""
    element: NonNegativeInt = 0
    """selects the parameter or layer, and the number in the tensor; any integer is valid"""
    microbatch: NonNegativeInt = 0
    """the index of the microbatch among the worker's microbatches of the step, from 0"""
    during: Literal["step", "recompute"] = "step"
    """recompute strikes when the worker repeats another rank's microbatch for recompute.every; step strikes in the
    worker's own microbatches"""


class SlowAt(Section):
    """Slow down every microbatch of some workers."""

    kind: Literal["slow_at"] = "slow_at"
    step: PositiveInt = 1
    """the first slow step"""
    until: PositiveInt | None = None
    """the first step at normal speed again; null to slow all later steps"""
    ranks: tuple[NonNegativeInt, ...]
    """the ranks, at that step, of the workers that are slowed"""
    ms: PositiveFloat
    """milliseconds added to each microbatch"""


AnyFault = Annotated[
    FailAt | OomAt | DrainAt | NanAt | SpikeAt | KillAt | HangAt | FlipAt | SlowAt, Field(discriminator="kind")
]


class FaultsConfig(Section):
    inject: tuple[AnyFault, ...] = ()
    """the faults to inject, each with its step"""
