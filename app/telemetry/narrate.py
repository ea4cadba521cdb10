"""Events in words: one event, one line. Pure, so what a person reads is tested with a table."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from app.config import Config

Event = Mapping[str, Any]


def narrate(event: Event, verbose: bool = False) -> str:
    """The line for an event; `verbose` adds where the time of a start went."""
    match event["event"]:
        case "log":
            return _joined([position(event), *figures(event), eta(event)])
        case "validation":
            return _joined([f"validation at step {event['step']}", *_metrics(event)])
        case "checkpoint":
            cost = f"{size(event['bytes'])} in {event['seconds']:.1f} s"
            return _joined([f"checkpoint at step {event['step']}", cost, event["path"]])
        case "attempt_started":
            return _attempt_started(event, verbose)
        case "attempt_ended":
            return f"attempt {event['attempt']} ended after step {event['step']}: {event['cause']}"
        case name:
            fields = (f"{k} {v}" for k, v in event.items() if k not in ("event", "time_s") and v is not None)
            return _joined([name.replace("_", " "), *fields])


def position(event: Event) -> str:
    """`step 1200/9000 13%`"""
    step, total = event["step"], event["total_steps"]
    return f"step {step}/{total} {100 * step // total}%"


def figures(event: Event) -> list[str]:
    """The middle of the log line, without what the event does not know."""
    rate, unit = ("samples_per_s", "samples") if event.get("unit") == "samples" else ("units_per_s", "tok")
    words: dict[str, Callable[[float], str]] = {
        "loss": lambda v: f"loss {number(v)}",
        "lr": lambda v: f"lr {v:.1e}".replace("e-0", "e-"),
        "step_ms": lambda v: f"{v:.{0 if v >= 10 else 1}f} ms",
        rate: lambda v: f"{compact(v)} {unit}/s",
        "mfu": lambda v: f"mfu {v:.1%}",
        "memory_bytes": size,
        "world_size": lambda v: plural(v, "worker"),
    }
    return [say(event[key]) for key, say in words.items() if event.get(key) is not None]


def eta(event: Event) -> str:
    return f"eta {duration(event['eta_s'])}" if event.get("eta_s") is not None else ""


def result(summary: Event) -> list[str]:
    """How a run ended: what it did, what it is worth, where it lies; what is unknown is left out."""
    amounts = [f"{compact(summary[key])} {key}" for key in ("samples", "tokens") if summary.get(key)]
    wall = f" in {duration(summary['wall_s'])}" if "wall_s" in summary else ""
    goodput = [f"{summary['goodput']:.1%}"] if summary.get("goodput") is not None else []
    attempts = [plural(summary["attempts"], "attempt")] if summary.get("attempts") else []
    lost = [plural(summary["lost_steps"], "lost step")] if summary.get("lost_steps") else []
    stall = [f"stalled {duration(summary['stall_s'])}"] if summary.get("stall_s", 0) >= 1 else []
    lines = {
        summary["status"]: ", ".join([plural(summary["step"], "step"), *amounts]) + wall,
        "goodput": _joined([*goodput, *attempts, *lost, *stall]),
        "validation": _joined(_metrics(summary.get("metrics", {}))),
        "checkpoint": summary.get("last_checkpoint"),
        "sample": summary.get("sample"),
        "curves": f"tensorboard --logdir {summary['tensorboard']}" if summary.get("tensorboard") else "",
    }
    return [f"{name:<10}  {text}".replace("\n", f"\n{'':12}") for name, text in lines.items() if text]


def already_finished(config: Config, path: str, summary: Event) -> str:
    """What the same command says of a run that has nothing left to do."""
    key, length = ("epochs", config.run.epochs) if config.run.epochs else ("steps", summary["step"])
    reached = _joined([f"{path} has finished: {plural(summary['step'], 'step')}", *_metrics(summary["metrics"])])
    return f"{reached}\nExtend it with run.{key}={2 * length}, or choose another run.name"


def _attempt_started(event: Event, verbose: bool) -> str:
    origin = f"step {event['step']} restored from {event['source']}" if event["step"] else "from step 0"
    names = ("detected", "formed", "built", "restored", "first_step")
    phases = {name: event[f"{name}_s"] for name in names if event.get(f"{name}_s") is not None}
    ready = f"ready in {sum(phases.values()):.1f} s" if phases else ""
    spent = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in phases.items())
    start = f"attempt {event['attempt']}: {plural(event['world_size'], 'worker')}, {origin}"
    return _joined([start, ready, spent if verbose else ""])


def _metrics(event: Event) -> list[str]:
    known = {k: v for k, v in event.items() if isinstance(v, int | float) and k not in ("step", "time_s", "attempt")}
    return [f"{name} {number(value)}" for name, value in known.items()]


def _joined(parts: Iterable[str]) -> str:
    return " | ".join(part for part in parts if part)


def number(value: float) -> str:
    """Four digits, so that the width stays the same from line to line: 2.413, 2.000."""
    return f"{value:#.4g}".rstrip(".")


def compact(value: float) -> str:
    """812, 39.8k, 1.2M"""
    return _scaled(value, 1e3, ("", "k", "M", "G", "T"))


def size(num_bytes: float) -> str:
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB"))


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.{1 if power or 0 < value < 10 else 0}f}{units[power]}"


def duration(seconds: float) -> str:
    """45s, 3m 41s, 53m, 3h 12m, 2d 4h: an estimate carries no more."""
    minutes, hours, days = (int(seconds // unit) for unit in (60, 3600, 86400))
    if hours:
        return f"{days}d {hours % 24}h" if days else f"{hours}h {minutes % 60}m"
    if minutes:
        return f"{minutes}m" if minutes >= 10 else f"{minutes}m {int(seconds % 60)}s"
    return f"{seconds:.0f}s"


def plural(count: float, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
