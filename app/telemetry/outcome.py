"""Console text for the end of a run."""

from collections.abc import Mapping
from typing import Any

from app.config import Config
from app.units import compact, duration, in_words, joined, plural

Summary = Mapping[str, Any]


def result(summary: Summary) -> list[str]:
    """Return the lines that report a run's work, goodput and files.

    Lines with unknown values are left out.

    Args:
        summary: the content of `summary.json`. The command adds `tensorboard`, a directory or None.
    """
    done = [plural(summary["step"], "step")]
    for amount in ("samples", "tokens"):
        if summary.get(amount):
            done.append(f"{compact(summary[amount])} {amount}")
    course = [
        f"{summary['goodput']:.1%}",
        plural(summary["attempts"], "attempt"),
        plural(summary["lost_steps"], "lost step"),
        f"stalled {duration(summary['stall_s'])}",
    ]
    told = {
        summary["status"]: f"{', '.join(done)} in {duration(summary['wall_s'])}",
        "because": summary.get("ended_early"),
        "goodput": joined(course),
        "validation": in_words(summary["metrics"]),
        "checkpoint": summary["last_checkpoint"],
        # Further lines of a sample are indented, so that they align with the first one.
        "sample": (summary.get("sample") or "").replace("\n", "\n" + 12 * " "),
    }
    if summary.get("tensorboard"):
        told["curves"] = f"tensorboard --logdir {summary['tensorboard']}"
    return [f"{name:<10}  {text}" for name, text in told.items() if text]


def already_finished(config: Config, path: str, summary: Summary) -> str:
    """Return the message for a run that has no steps left."""
    return f"{_reached(path, summary)}\nExtend it with {_extension(config, summary)}, or choose another run.name"


def finished_otherwise(config: Config, path: str, summary: Summary, differences: str) -> str:
    """Return the message for a run that finished with other values."""
    done, asked = summary["step"], config.run.steps
    fewer = f"\nrun.steps={asked} is fewer than the {done} steps that are done." if asked and asked < done else ""
    return (
        f"{_reached(path, summary)}. It was trained with other values:\n{differences}{fewer}\n"
        f"Choose another run.name to train with the new values, or add {_extension(config, summary)} to continue this "
        "run with them"
    )


def _reached(path: str, summary: Summary) -> str:
    done = f"{path} has finished: {plural(summary['step'], 'step')}"
    return joined([done, in_words(summary["metrics"]), summary.get("ended_early") or ""])


def _extension(config: Config, summary: Summary) -> str:
    """Return an override that makes the run longer."""
    if config.run.epochs:
        return f"run.epochs={2 * config.run.epochs}"
    return f"run.steps={2 * summary['step']}"
