"""Console text for the end of a run."""

from collections.abc import Mapping
from typing import Any

from steadfast.config import RunConfig
from steadfast.units import compact, duration, in_words, joined, plural

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


def already_finished(run: RunConfig, path: str, summary: Summary) -> str:
    """Return the message for a run that has no steps left."""
    return f"{_reached(path, summary)}\nExtend it with {_extension(run, summary)}, or choose another run.name"


def finished_otherwise(run: RunConfig, path: str, summary: Summary, differences: str) -> str:
    """Return the message for a run that finished with other values."""
    done = summary["step"]
    fewer = ""
    if run.steps and run.steps < done:
        fewer = f"\nrun.steps={run.steps} is fewer than the {done} steps that are done."
    return (
        f"{_reached(path, summary)}. It was trained with other values:\n{differences}{fewer}\n"
        f"Choose another run.name to train with the new values, or add {_extension(run, summary)} to continue this run "
        "with them"
    )


def _reached(path: str, summary: Summary) -> str:
    done = f"{path} has finished: {plural(summary['step'], 'step')}"
    return joined([done, in_words(summary["metrics"]), summary.get("ended_early") or ""])


def _extension(run: RunConfig, summary: Summary) -> str:
    """Return an override that makes the run longer."""
    # A configuration has only one of the two lengths.
    if run.epochs:
        return f"run.epochs={2 * run.epochs}"
    return f"run.steps={2 * summary['step']}"
