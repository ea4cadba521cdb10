"""A search for a learning rate by Ray Tune, which calls `fit` in a process of each trial: tune_fit.py STORAGE."""

import os
import sys
from functools import partial
from typing import Any

import torch
from ray import tune
from torch import nn

from steadfast import Config, fit
from tests.examples.script import line, squared_error


def trial(sampled: dict[str, float], storage: str, faults: dict[str, Any]) -> None:
    lr = sampled["lr"]
    # Each rate is a run of its own. The same search again finds the finished runs, and trains only what is new.
    config = Config.model_validate(
        {
            "run": {"name": f"lr-{lr}", "storage": storage, "steps": 20},
            "batch": {"global_size": 12},
            "optimizer": {"lr": lr},
            "trackers": [],
            "checkpoint": {"every": "5 steps"},
            "faults": faults,
        }
    )
    torch.manual_seed(0)
    result = fit(config, model=nn.Linear(4, 1), dataset=line(120), validation=line(20), task=squared_error)
    tune.report({"loss": result.summary["metrics"]["loss"]})


def search(storage: str, **faults: Any) -> tune.ResultGrid:
    """Train each rate; a trial that dies starts again, and `fit` resumes its run."""
    space = {"lr": tune.grid_search([0.001, 0.1])}
    again = tune.FailureConfig(max_failures=2)
    run_config = tune.RunConfig(storage_path=os.path.join(storage, "tune"), failure_config=again, verbose=0)
    train = partial(trial, storage=storage, faults=faults)
    return tune.Tuner(train, param_space=space, run_config=run_config).fit()


if __name__ == "__main__":
    best = search(os.path.abspath(sys.argv[1])).get_best_result("loss", "min")
    assert best.config is not None
    print(f"the best rate is {best.config['lr']}, with a loss of {best.metrics['loss']:.3f}")
