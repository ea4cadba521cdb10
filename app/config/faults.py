"""Faults that a configuration may inject, for drills and for users who want to see their own run recover."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from app.config.base import Section

Phase = Literal["loader", "forward", "collective", "checkpoint"]


class Fault(Section):
    step: PositiveInt
    """the step of the fault; one in a collective or a checkpoint strikes at the first of these from this step on"""
    rank: NonNegativeInt = 0
    """the worker that has this rank when the step comes"""
    # By default once: attempts do the step again, and would never get beyond it.
    times: PositiveInt | None = 1
    """how often it strikes in the whole run, attempts that do the step again included; null for every time"""


class FailAt(Fault):
    """Raise an exception inside the step, as a bug in the user's code would."""

    kind: Literal["fail_at"] = "fail_at"


class OomAt(Fault):
    """Raise torch.OutOfMemoryError inside the step."""

    kind: Literal["oom_at"] = "oom_at"


class DrainAt(Fault):
    """Let the worker ask to leave after the step."""

    kind: Literal["drain_at"] = "drain_at"


class NanAt(Fault):
    """Make loss and gradient of the worker's microbatches NaN."""

    kind: Literal["nan_at"] = "nan_at"


class SpikeAt(Fault):
    """Multiply loss and gradient of the worker's microbatches."""

    kind: Literal["spike_at"] = "spike_at"
    factor: float = 1000.0
    """the multiplier"""


class KillAt(Fault):
    """End the worker's process with SIGKILL."""

    kind: Literal["kill_at"] = "kill_at"
    phase: Phase = "forward"
    """the part of the step in which it strikes"""


class HangAt(Fault):
    """Stop the worker from doing anything, while its process and its connections live on."""

    kind: Literal["hang_at"] = "hang_at"
    phase: Phase = "forward"
    """the part of the step in which it strikes"""
    seconds: PositiveFloat | None = None
    """how long the worker hangs; null for ever"""


class FlipAt(Fault):
    """Flip one bit of what the worker computes with, as a broken machine would, and go on."""

    kind: Literal["flip_at"] = "flip_at"
    where: Literal["gradient", "activation", "weight"] = "gradient"
    """in the gradient of a microbatch, in what a layer puts out in its forward, or before that in a weight, which stays
    wrong"""
    bit: Annotated[int, Field(ge=0, lt=64)] = 30
    """0 is the lowest; of fp32 30 is the highest of the exponent, and 31 the sign. Modulo the bits that a number has"""
    element: NonNegativeInt = 0
    """chooses the parameter or layer, and the number in it; any integer will do"""
    microbatch: NonNegativeInt = 0
    """which of those that the worker runs in the step, from 0"""
    during: Literal["step", "recompute"] = "step"
    """recompute strikes where the worker computes a microbatch a second time for audit.recompute, not in its own"""


class SlowAt(Section):
    """Lengthen every microbatch of some workers, as slower machines would."""

    kind: Literal["slow_at"] = "slow_at"
    step: PositiveInt = 1
    """the first step that is slowed"""
    until: PositiveInt | None = None
    """the first step that is not slowed any more; null to slow all"""
    ranks: tuple[NonNegativeInt, ...]
    """the workers that have these ranks at the time"""
    ms: PositiveFloat
    """milliseconds added to each microbatch"""


AnyFault = Annotated[
    FailAt | OomAt | DrainAt | NanAt | SpikeAt | KillAt | HangAt | FlipAt | SlowAt, Field(discriminator="kind")
]


class FaultsConfig(Section):
    inject: tuple[AnyFault, ...] = ()
    """the faults, each with its step"""
