"""Put configurations, results and costs of several runs side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from steadfast.analysis.status import StatusReader
from steadfast.config import Config, diff
from steadfast.run.directory import RunDirectory
from steadfast.storage.jsonl import Line
from steadfast.telemetry.goodput import TimeLedger, goodput, read_totals

_PLACE = ("run.name", "run.storage")  # keys that differ between any two runs


@dataclass(frozen=True)
class Outcome:
    """Results and cost of a run. Unknown values are None."""

    name: str
    uri: str
    state: str
    step: int
    loss: float | None  # training loss of the newest log step
    metrics: dict[str, float]  # of the newest validation
    wall_s: float
    worker_s: float  # seconds of all workers together
    interruptions: dict[str, int]  # number by kind: failure, resize, restart
    lost_steps: int

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read the outcome of a run from its directory."""
        status = StatusReader(directory).read(brief=True)
        totals = read_totals(directory)
        times = TimeLedger(totals, directory.all_events())
        loss = None
        if status.log is not None:
            loss = status.log.loss
        return cls(
            name=directory.name,
            uri=directory.uri,
            state=status.state,
            step=status.step,
            loss=loss,
            metrics=status.metrics or {},
            wall_s=goodput(totals)["wall_s"],
            worker_s=round(sum(times.rank_s().values()), 3),
            interruptions=dict(Counter(each.kind for each in status.interruptions)),
            lost_steps=totals.num_lost,
        )

    def to_line(self) -> Line:
        """Return the outcome as a JSON object for scripts."""
        return asdict(self)


def differing_keys(configs: Sequence[Config | None]) -> dict[str, list[Any]]:
    """Return the keys that differ between the configurations, with one value for each of these.

    The value is "unknown" for a configuration that is None. Name and storage of the runs are left out.
    """
    known = [config for config in configs if config is not None]
    found: dict[str, list[Any]] = {}
    for index, config in enumerate(configs):
        if config is None:
            continue
        for change in diff(known[0], config):
            if change.key in _PLACE:
                continue
            # Configurations without a difference in this key have the value of the first one.
            if change.key not in found:
                found[change.key] = [change.old] * len(configs)
            found[change.key][index] = change.new
    for index, config in enumerate(configs):
        if config is None:
            for values in found.values():
                values[index] = "unknown"
    return found
