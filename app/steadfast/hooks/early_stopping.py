"""Early stopping: end a run whose validation no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from steadfast.config import EarlyStoppingConfig
from steadfast.hooks.hook import HookContext
from steadfast.units import number, plural


class EarlyStopping:
    """Hook that ends a run when a validation metric stops improving."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self._config = config
        # Metrics are multiplied by the sign, so that less is better in both modes.
        self._sign = 1.0 if config.mode == "min" else -1.0
        self._best = math.inf
        self._num_worse = 0  # validations since the best one

    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        metric = self._config.metric
        # A metric that counts nothing in this validation has no value, which is no improvement.
        value = self._sign * metrics.get(metric, math.nan)
        if value < self._best - self._config.min_delta:
            self._best = value
            self._num_worse = 0
            return
        self._num_worse += 1
        if self._num_worse >= self._config.patience:
            validations = plural(self._config.patience, "validation")
            run.end_run(f"{metric} has not been better than {number(self._sign * self._best)} for {validations}")

    def state_dict(self) -> dict[str, float]:
        return {"best": self._best, "num_worse": self._num_worse}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._best = state["best"]
        self._num_worse = int(state["num_worse"])
