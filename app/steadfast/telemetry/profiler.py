"""Traces of the time that steps take, by torch.profiler."""

import logging

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from steadfast.config import ProfileConfig
from steadfast.run.directory import PROFILE, RunDirectory
from steadfast.run.events import Notice
from steadfast.telemetry.spool import Spool
from steadfast.world.runtime import World

_log = logging.getLogger(__name__)
_ROWS = 12  # rows of the table; the operations after them take little time


class Profiler:
    """Records steps of an attempt by torch.profiler on the configured ranks."""

    def __init__(self, config: ProfileConfig, directory: RunDirectory, world: World, device: torch.device) -> None:
        self._config = config
        self._directory = directory
        self._world = world
        self._device = device
        self._profile: profile | None = None
        self._step = 0

    def begin(self, step: int) -> None:
        """Start after `step`, if this rank is to record."""
        config = self._config
        if not config.active or self._world.rank not in config.ranks:
            return
        self._step = step
        self._is_over = False
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            # The profiler is slow in its first step, so the record of that step is discarded.
            schedule=schedule(wait=config.wait, warmup=1, active=config.active, repeat=1),
            on_trace_ready=self._write,
        )
        self._written: list[Notice] = []
        self._profile.start()

    def step(self, step: int) -> list[Notice]:
        """Record that a step has ended. Return the recording that it completed, if any."""
        if self._profile is None:
            return []
        self._step = step
        self._profile.step()
        written, self._written = self._written, []
        # After its recording torch's profiler would still cost time in each step.
        if self._is_over:
            self.close()
        return written

    def close(self) -> None:
        """Stop the profiler, and discard an incomplete recording."""
        if self._profile is None:
            return
        ended, self._profile = self._profile, None
        # torch would write the steps recorded so far as a complete recording.
        ended.on_trace_ready = None
        ended.stop()

    def _write(self, recorded: profile) -> None:
        name = f"attempt-{self._world.attempt}-rank-{self._world.rank}-step-{self._step}"
        by = f"self_{self._device.type}_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=40)
        self._is_over = True
        try:
            spool = Spool(self._directory.store, PROFILE)
            spool.path.mkdir(parents=True, exist_ok=True)
            # TensorBoard's plug-in finds traces by this suffix.
            recorded.export_chrome_trace(str(spool.path / f"{name}.pt.trace.json"))
            (spool.path / f"{name}.txt").write_text(table)
            spool.close()
        except (OSError, RuntimeError) as error:
            _log.warning("cannot write the profile of step %s, training goes on: %s", self._step, error)
            return
        path = self._directory / f"{PROFILE}/{name}.pt.trace.json"
        rank, step = self._world.rank, self._step
        text = f"profile of rank {rank} up to step {step} is in {path}: open it in Perfetto or TensorBoard; "
        text += f"operators by the time that each itself took:\n{table}"
        self._written.append(Notice(event="profile", text=text, rank=rank, step=step, path=path, table=table))
