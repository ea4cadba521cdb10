"""A world under a supervisor, without a coordinator, on a clock of the test's own."""

from collections.abc import Iterable
from dataclasses import replace

from steadfast.config import RecoveryConfig
from steadfast.guards.failures import FailureKind
from steadfast.orchestration.heartbeat import Commands, Silence
from steadfast.orchestration.supervisor import Abort, Decision, Dump, Lose, Record, Situation, Supervisor
from steadfast.run import events

ATTEMPT = 1
_SECONDS = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.5)


class Supervised:
    """Members of one attempt, whose supervisor's decisions are noted and take effect."""

    def __init__(self, names: Iterable[str], recovery: RecoveryConfig) -> None:
        self.supervisor = Supervisor(recovery, "stacks")
        self.world = tuple(names)
        self.commands = Commands()
        self.decisions: list[Decision] = []
        size = len(self.world)
        started = events.AttemptStarted(attempt=ATTEMPT, step=0, source="start", world_size=size, **_SECONDS)
        self.supervisor.observe(started)

    def check(self, now_s: float) -> None:
        self.carry_out(self.supervisor.check_workers(Situation(ATTEMPT, self.world, self.commands, now_s)))

    def stay_silent(self, name: str, silence: Silence) -> float:
        """Let a member be silent, and lose it after its limit. Return the limit."""
        limit_s = self.supervisor.patience(name, silence, self.world)
        self.carry_out(self.supervisor.report_silence(name, silence, limit_s, ATTEMPT))
        if silence.seconds >= limit_s:
            self.carry_out([Lose(name, "not heard of", FailureKind.WORKER)])
        return limit_s

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self.decisions.append(decision)
            match decision:
                case Record(event):
                    self.supervisor.observe(event)
                case Dump(attempt):
                    self.commands = replace(self.commands, dump=attempt)
                case Abort():
                    self.commands = replace(self.commands, aborted=ATTEMPT)
                case Lose(member):
                    self.commands = replace(self.commands, aborted=ATTEMPT)
                    self.world = tuple(name for name in self.world if name != member)

    @property
    def events(self) -> list[events.Event]:
        return [decision.event for decision in self.decisions if isinstance(decision, Record)]

    @property
    def endings(self) -> list[Abort | Lose]:
        """Return the decisions that end the attempt."""
        return [decision for decision in self.decisions if isinstance(decision, Abort | Lose)]
