"""Console text for the end of a run."""

from collections.abc import Mapping
from typing import Any

from steadfast.config import RunConfig
from steadfast.units import compact, duration, in_words, joined, plural

Summary = Mapping[str, Any]

SHORT_S = 600.0  # wall time below which the start alone makes the goodput low
_STALLED_S = 0.5  # least stall that the result names


def result(summary: Summary) -> list[str]:
    """Return the lines that report a run's work, interruptions and files.

    Lines with unknown values are left out, as is the line of interruptions if there were none.

    Args:
        summary: the content of `summary.json`. The command adds `tensorboard`, a directory or None.
    """
    done = [plural(summary["step"], "step")]
    done += [f"{compact(summary[amount])} {amount}" for amount in ("samples", "tokens") if summary.get(amount)]
    told = {
        summary["status"]: f"{', '.join(done)} in {duration(summary['wall_s'])}",
        "because": summary.get("ended_early"),
        "resume": "the same command" if summary["status"] == "stopped" else "",
        "cost" if summary["wall_s"] < SHORT_S else "goodput": _goodput(summary),
        "validation": in_words(summary["metrics"]),
        "checkpoint": summary["last_checkpoint"],
        # Further lines of a sample are indented, so that they align with the first one.
        "sample": (summary.get("sample") or "").replace("\n", "\n" + 12 * " "),
    }
    if summary.get("tensorboard"):
        told["curves"] = f"tensorboard --logdir {summary['tensorboard']}"
    return [f"{name:<10}  {text}" for name, text in told.items() if text]


def _goodput(summary: Summary) -> str:
    """Return the goodput with its causes, or "" after an undisturbed run.

    A short run has its causes only.
    """
    costs = []
    if summary["lost_steps"]:
        costs.append(plural(summary["lost_steps"], "lost step"))
    if summary["stall_s"] >= _STALLED_S:
        costs.append(f"stalled {duration(summary['stall_s'])}")
    if not costs:
        return ""
    if summary["wall_s"] >= SHORT_S:
        costs.insert(0, f"{summary['goodput']:.1%}")
    return joined(costs)


def already_finished(run: RunConfig, former: RunConfig | None, path: str, summary: Summary) -> str:
    """Return the message for a run that has no steps left."""
    return f"{_reached(path, summary)}\nExtend it with {_extension(run, former, summary)}, or choose another run.name"


def finished_otherwise(run: RunConfig, former: RunConfig | None, path: str, summary: Summary, differences: str) -> str:
    """Return the message for a run that finished with other values."""
    done = summary["step"]
    fewer = ""
    if run.steps and run.steps < done:
        fewer = f"\nrun.steps={run.steps} is fewer than the {done} steps that are done."
    elif run.epochs and former and former.epochs and run.epochs < former.epochs:
        fewer = f"\nrun.epochs={run.epochs} is fewer than the {former.epochs} epochs that are done."
    return (
        f"{_reached(path, summary)}. It was trained with other values:\n{differences}{fewer}\n"
        "Choose another run.name to train with the new values, or add "
        f"{_extension(run, former, summary)} to continue this run with them"
    )


def _reached(path: str, summary: Summary) -> str:
    done = f"{path} has finished: {plural(summary['step'], 'step')}"
    return joined([done, in_words(summary["metrics"]), summary.get("ended_early") or ""])


def _extension(run: RunConfig, former: RunConfig | None, summary: Summary) -> str:
    """Return an override that makes the run longer."""
    # A configuration has only one of the two lengths.
    if run.epochs:
        return f"run.epochs={2 * max(run.epochs, (former and former.epochs) or 0)}"
    return f"run.steps={2 * summary['step']}"
