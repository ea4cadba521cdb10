"""Faults that a configuration may ask for: for drills, and for users who want to see their own run recover."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from app.config.base import Section

Phase = Literal["loader", "forward", "collective", "checkpoint"]


class Fault(Section):
    step: PositiveInt
    """the step in which it strikes; at the collective or checkpoint that comes first from then on, if there is one"""
    rank: NonNegativeInt = 0
    """whom it strikes: the worker that has this rank when the step comes"""
    times: PositiveInt | None = 1
    """how often in the run, attempts that do the step again included; null for every time"""


class FailAt(Fault):
    """An exception inside the step, as a bug of the user's would raise it."""

    kind: Literal["fail_at"] = "fail_at"


class OomAt(Fault):
    """torch.OutOfMemoryError inside the step."""

    kind: Literal["oom_at"] = "oom_at"


class DrainAt(Fault):
    """The worker wishes to leave after the step."""

    kind: Literal["drain_at"] = "drain_at"


class NanAt(Fault):
    """Loss and gradient of the worker's microbatches become NaN."""

    kind: Literal["nan_at"] = "nan_at"


class SpikeAt(Fault):
    """Loss and gradient of the worker's microbatches are multiplied."""

    kind: Literal["spike_at"] = "spike_at"
    factor: float = 1000.0
    """what they are multiplied by"""


class KillAt(Fault):
    """SIGKILL."""

    kind: Literal["kill_at"] = "kill_at"
    phase: Phase = "forward"
    """during what"""


class HangAt(Fault):
    """The worker does nothing, while its process and its connections live on."""

    kind: Literal["hang_at"] = "hang_at"
    phase: Phase = "forward"
    """during what"""
    seconds: PositiveFloat | None = None
    """for how long; null for ever"""


class SlowAt(Section):
    """Every microbatch takes longer, as on a slower machine."""

    kind: Literal["slow_at"] = "slow_at"
    step: PositiveInt = 1
    """from this step on"""
    until: PositiveInt | None = None
    """the first step that is not slowed any more; null for never"""
    ranks: tuple[NonNegativeInt, ...]
    """who is slowed: the workers that have these ranks at the time"""
    ms: PositiveFloat
    """milliseconds that are added to each microbatch"""


AnyFault = Annotated[FailAt | OomAt | DrainAt | NanAt | SpikeAt | KillAt | HangAt | SlowAt, Field(discriminator="kind")]


class FaultsConfig(Section):
    inject: tuple[AnyFault, ...] = ()
    """what shall go wrong, and when"""
