"""Events in words: one event, one line. Pure, so what a person reads is tested with a table."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.filesize import pick_unit_and_suffix

from app.config import Config

Event = Mapping[str, Any]


def narrate(event: Event, verbose: bool = False) -> str:
    """The line for an event; `verbose` adds where the time of a start went."""
    match event["event"]:
        case "log":
            return _joined(_log(event))
        case "validation":
            return _joined([f"validation at step {event['step']}", *_metrics(event)])
        case "checkpoint":
            cost = f"{size(event['bytes'])} in {event['seconds']:.1f} s"
            stays = f"older ones cannot be deleted: {event['not_deleted']}" if event.get("not_deleted") else ""
            return _joined([f"checkpoint at step {event['step']}", cost, event["path"], stays])
        case "snapshot":
            cost = f"{size(event['bytes'])} a worker, {1e3 * event['stall_s']:.0f} ms each"
            return f"snapshots in the memory of other nodes from step {event['step']} on: {cost}"
        case "no_snapshots":
            return f"no snapshots in memory, a lost node costs the steps since the last checkpoint: {event['error']}"
        case "checkpoint_failed":
            needed = f" ({size(event['needed_bytes'])} are needed)" if event["needed_bytes"] else ""
            return f"no checkpoint at step {event['step']} yet, training goes on: {event['error']}{needed}"
        case "not_saved":
            return f"step {event['step']} was not saved: {event['error']}"
        case "checkpoint_quarantined":
            return f"checkpoint at step {event['step']} is damaged and will not be used: {event['error']}"
        case "attempt_started":
            return _attempt_started(event, verbose)
        case "attempt_ended":
            return f"attempt {event['attempt']} ended after step {event['step']}: {event['cause']}"
        case "failure":
            where = f" on node {event['node'][:8]}" if "node" in event else ""
            who = f" ({event['kind']}) of worker {event['member']}{where}" if "member" in event else ""
            return f"failure{who}: {event['error']}"
        case "preemption":
            left_s = event["deadline_s"] - event["time_s"]
            when = f"goes in {left_s:.0f} s" if event["deadline_s"] else "is going"
            return f"node {event['node'][:8]} {when}: {plural(len(event['members']), 'worker')} will leave it"
        case "hang":
            ranks = ", ".join(map(str, event["ranks"]))
            stuck = f"rank {ranks} stuck in {event['phase']} after step {event['step']} for {event['seconds']:.1f} s"
            return f"{stuck}; stacks in {event['stacks']}"
        case "straggler":
            return f"rank {event['rank']} is slow in {event['phase']}: others wait {event['share']:.0%} of every step"
        case "scale":
            return f"scaling.num_workers {list(event['before'])} -> {list(event['after'])}"
        case "waiting":
            return f"waiting for workers: {event['workers']} of at least {event['needed']} are there"
        case "shares":
            return _shares(event)
        case "rollback":
            steps = ", ".join(map(str, event["steps"]))
            return f"rolling back: {event['cause']}; left out from now on: {steps}"
        case name:
            fields = (f"{k} {v}" for k, v in event.items() if k not in ("event", "time_s") and v is not None)
            return _joined([name.replace("_", " "), *fields])


def _log(event: Event) -> list[str]:
    step, total = event["step"], event["total_steps"]
    rate, unit = ("samples_per_s", "samples") if event["unit"] == "samples" else ("units_per_s", "tok")
    return [
        f"step {step}/{total} {100 * step // total}%",
        f"loss {number(event['loss'])}",
        f"lr {event['lr']:.1e}".replace("e-0", "e-"),
        f"{event['step_ms']:.0f} ms",
        f"{compact(event[rate])} {unit}/s",
        f"mfu {event['mfu']:.1%}" if event["mfu"] else "",
        size(event["memory_bytes"]),
        plural(event["world_size"], "worker"),
        f"eta {duration(event['eta_s'])}",
    ]


def result(summary: Event) -> list[str]:
    """How a run ended: what it did, what it is worth, where it lies; what is unknown is left out."""
    amounts = [f"{compact(summary[key])} {key}" for key in ("samples", "tokens") if summary.get(key)]
    course = [
        f"{summary['goodput']:.1%}",
        plural(summary["attempts"], "attempt"),
        plural(summary["lost_steps"], "lost step"),
        f"stalled {duration(summary['stall_s'])}",
    ]
    done = ", ".join([plural(summary["step"], "step"), *amounts])
    lines = {
        summary["status"]: f"{done} in {duration(summary['wall_s'])}",
        "goodput": _joined(course),
        "validation": _joined(_metrics(summary["metrics"])),
        "checkpoint": summary["last_checkpoint"],
        "sample": summary.get("sample"),
        "curves": f"tensorboard --logdir {summary['tensorboard']}",
    }
    return [f"{name:<10}  {text}".replace("\n", f"\n{'':12}") for name, text in lines.items() if text]


def already_finished(config: Config, path: str, summary: Event) -> str:
    """What the same command says of a run that has nothing left to do."""
    key, length = ("epochs", config.run.epochs) if config.run.epochs else ("steps", summary["step"])
    reached = _joined([f"{path} has finished: {plural(summary['step'], 'step')}", *_metrics(summary["metrics"])])
    return f"{reached}\nExtend it with run.{key}={2 * length}, or choose another run.name"


def _attempt_started(event: Event, verbose: bool) -> str:
    origin = f"step {event['step']} restored from {event['source']}" if event["step"] else "from step 0"
    phases = {name: event[f"{name}_s"] for name in ("detected", "formed", "built", "restored", "first_step")}
    return _joined(
        [
            f"attempt {event['attempt']}: {plural(event['world_size'], 'worker')}, {origin}",
            f"ready in {sum(phases.values()):.1f} s",
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items()) if verbose else "",
        ]
    )


def _shares(event: Event) -> str:
    before, after = tuple(event["before"]), tuple(event["after"])
    if "parallel" in event:
        return f"shares stay even {after}: under {event['parallel']} every worker runs as many microbatches"
    change = f"shares {before} -> {after} from step {event['step']}"
    if "weights" in event:
        return f"{change}: weights {', '.join(f'{weight:g}' for weight in event['weights'])}"
    times = event["microbatch_ms"]
    slower = max(times) / min(times)
    return (
        f"{change}: rank {times.index(max(times))} is {slower:.1f}x slower"
        if slower >= 1.05
        else f"{change}: equally fast"
    )


def _metrics(event: Event) -> list[str]:
    return [f"{k} {number(v)}" for k, v in event.items() if isinstance(v, float) and k != "time_s"]


def _joined(parts: Iterable[str]) -> str:
    return " | ".join(part for part in parts if part)


def number(value: float) -> str:
    """Four digits, so that the width stays the same from line to line: 2.413, 2.000."""
    return f"{value:#.4g}".rstrip(".")


def compact(value: float) -> str:
    """812, 39.8k, 1.2M"""
    unit, suffix = pick_unit_and_suffix(int(value), ["", "k", "M", "G", "T"], 1000)
    return f"{value / unit:.{1 if suffix else 0}f}{suffix}"


def size(num_bytes: float) -> str:
    unit, suffix = pick_unit_and_suffix(int(num_bytes), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{num_bytes / unit:.1f} {suffix}"


def duration(seconds: float) -> str:
    """45s, 53m, 3h 12m: an estimate carries no more."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f}s"
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60}m"


def plural(count: float, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
