"""`plan --config FILE`: show shares and memory for each number of workers."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steadfast.commands.options import add_config_arguments, read_config, run_on_cluster
from steadfast.config import BatchConfig, CheckpointConfig, Config, FsdpConfig, ParallelConfig, ScalingConfig
from steadfast.errors import UsageError
from steadfast.plan import largest_microbatch
from steadfast.units import duration, number, plural, size

if TYPE_CHECKING:
    from steadfast.analysis.memory import Estimate, Memory

_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    mtbf = 'mean time between failures of the whole run, for example "2 hours"'
    parser.add_argument("--mtbf", metavar="TIME", help=mtbf)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(options: Namespace) -> int:
    """Print the plan and its warnings."""
    config = read_config(options)
    mtbf_s = None if options.mtbf is None else _parse_time(options.mtbf)
    if options.cluster:
        return run_on_cluster(options)
    found = plan(config, mtbf_s)
    if options.json:
        print(json.dumps(found))
    else:
        print(_table(found))
    return 0


def plan(config: Config, mtbf_s: float | None) -> dict[str, Any]:
    """Return steps, shares, memory and warnings of a configuration.

    Args:
        config: the configuration of the run.
        mtbf_s: mean time between failures in seconds, if known.

    Raises:
        DataError: the data cannot be read.
        ConfigError: the model cannot be built on this machine.
    """
    import torch

    from steadfast.analysis.memory import Estimate
    from steadfast.data import Extent, Loader, build_dataset, build_order

    dataset = build_dataset(config.data)
    order = build_order(config.data, Extent.of(dataset), config.run.seed)
    loader = Loader(dataset, order, config.data, torch.device("cpu"))
    measured = config.batch.microbatch_size == "auto"
    if measured:
        config = config.replace("batch", _with_largest_microbatch(config.batch, config.scaling))
    # One real microbatch gives the shapes of the inputs, on which the memory for activations depends.
    example = loader.example(min(config.batch.samples_per_microbatch, order.num_train))
    estimate = Estimate(config, example)
    worlds = []
    for world_size in config.world_sizes(config.scaling.num_workers):
        worlds.append(_world(config.batch, config.parallel, world_size))
    _add_memory(worlds, estimate, config.parallel)
    num_steps = config.run.num_steps(order.num_train, config.batch.global_size)
    longest = max(worlds, key=lambda world: max(world["shares"]))
    most = max(longest["shares"])
    # A dataset of the user may lack `units_per_sample`. Then a sample counts as one unit, as in training.
    return {
        "steps": num_steps,
        "train_samples": order.num_train,
        "epochs": num_steps * config.batch.global_size / order.num_train,
        "step_units": config.batch.global_size * getattr(dataset, "units_per_sample", 1),
        "worlds": worlds,
        "stages": estimate.stages(longest["workers"], most),
        "link_bytes": most * estimate.hidden_bytes,
        "worker_bytes": asdict(estimate.whole),
        **_copies(config.checkpoint, config.parallel, estimate.whole),
        "microbatch_size": config.batch.microbatch_size,
        "microbatch_is_measured": measured,
        "warnings": list(warnings(config, order.num_train, mtbf_s)),
    }


def _with_largest_microbatch(batch: BatchConfig, scaling: ScalingConfig) -> BatchConfig:
    """Return the section `batch` with the largest size that `auto` may choose."""
    num_workers = min(scaling.num_workers[1], batch.global_size)
    return batch.with_microbatches_of(largest_microbatch(batch.global_size, num_workers, batch.global_size))


def _world(batch: BatchConfig, parallel: ParallelConfig, world_size: int) -> dict[str, Any]:
    layout, size = parallel.layout(world_size), batch.samples_per_microbatch
    # All shards of a replica run as many forward passes as the one with the largest share among them.
    plan = batch.plan_kind.even(batch.global_size, size, layout.data_size, layout.shard)
    shares, parts = plan.shares_at(1), plan.parts(1)
    pads = sum(plan.num_forwards(1, rank) for rank in range(layout.data_size)) - sum(shares)
    # Every rank waits for the rank with the most microbatches, and a stage while a step's first microbatch comes to it
    # and while the last one goes on from it.
    work: float = batch.num_microbatches
    longest: float = max(shares)
    if any(parts):
        work = batch.global_size / size
        longest += max(parts) / size - 1
    idle = 1 - work / ((longest + layout.stages - 1) * layout.data_size)
    found = {"workers": world_size, "layout": str(layout), "shares": shares, "parts": parts}
    return {**found, "pads": pads, "idle": idle}


def _add_memory(worlds: list[dict[str, Any]], estimate: "Estimate", parallel: ParallelConfig) -> None:
    """Add the memory of a worker to the worlds, under fsdp for both values of `reshard_after_forward`."""
    # All worlds are estimated together, because most of them are interpolated between two simulated ones.
    max_shares = {world["workers"]: max(world["shares"]) for world in worlds}
    for world in worlds:
        world["resharding"] = []
    if not isinstance(parallel, FsdpConfig):
        totals = estimate.of_worlds(max_shares, parallel)
    else:
        kept = estimate.of_worlds(max_shares, parallel.replace("reshard_after_forward", False))
        freed = estimate.of_worlds(max_shares, parallel.replace("reshard_after_forward", True))
        for world in worlds:
            gathers = {True: 2 * max_shares[world["workers"]], False: 1}
            if parallel.layout(world["workers"]).shard == 1:
                gathers = {True: 0, False: 0}
            for after_forward, found in ((True, freed), (False, kept)):
                memory_bytes = found[world["workers"]].device
                row = {"after_forward": after_forward, "gathers": gathers[after_forward], "memory_bytes": memory_bytes}
                world["resharding"].append(row)
        totals = freed if parallel.reshard_after_forward else kept
    for world in worlds:
        world["memory_bytes"] = totals[world["workers"]].device
        world["host_memory_bytes"] = totals[world["workers"]].host


def _copies(checkpoint: CheckpointConfig, parallel: ParallelConfig, whole: "Memory") -> dict[str, int]:
    """Return the bytes of a checkpoint and of all copies in memory.

    The copies take at least that much.
    """
    num_bytes = whole.parameters + whole.optimizer
    # There are two generations of copies. Under sharding each generation is on two nodes.
    num_copies = 2 if parallel.survivors_hold_all else 4
    if not checkpoint.node_memory:
        num_copies = 0
    return {"checkpoint_bytes": num_bytes, "node_memory_bytes": num_copies * num_bytes}


def warnings(config: Config, num_train: int, mtbf_s: float | None) -> Iterator[str]:
    """Yield a warning for each questionable value, with the keys to change."""
    num_steps = config.run.num_steps(num_train, config.batch.global_size)
    num_samples = num_steps * config.batch.global_size
    if num_samples < num_train:
        yield f"the run uses only a part of the dataset: {num_samples} of {num_train} samples; raise run.steps"
    # Not every schedule has a warm-up of its own: one_cycle has none.
    warmup_steps = getattr(config.schedule, "warmup_steps", 0)
    if 2 * warmup_steps > num_steps:
        yield f"schedule.warmup_steps {warmup_steps} is more than half of the run's {plural(num_steps, 'step')}"
    smallest, largest = config.scaling.num_workers
    useful = config.batch.num_microbatches * config.parallel.ranks_per_sample
    if largest > useful:
        yield f"only {useful} of up to {largest} workers have work; lower batch.microbatch_size or scaling.num_workers"
    every = config.checkpoint.every
    # An interval in steps or epochs counts as 0 seconds, because the time of a step is unknown before a run.
    interval_s = every.count * _SECONDS.get(every.unit.removesuffix("s"), 0.0)
    if mtbf_s is not None and interval_s > mtbf_s:
        yield f"checkpoint.every {every} is longer than the {duration(mtbf_s)} between two failures; lower it"
    if not config.checkpoint.node_memory and (smallest == 1 or not config.parallel.survivors_hold_all):
        yield f"with checkpoint.node_memory=false the only copy of the state is a checkpoint, as old as {every}"


def _parse_time(text: str) -> float:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?) *(second|minute|hour|day)s?", text)
    if matched is None or not float(matched[1]):
        raise UsageError(f'--mtbf {text}: must be a count and a unit, such as "30 minutes" or "2 hours"')
    return float(matched[1]) * _SECONDS[matched[2]]


def _table(found: dict[str, Any]) -> str:
    epochs = f"{number(found['epochs'])} epochs of {plural(found['train_samples'], 'sample')}"
    lines = [f"{plural(found['steps'], 'step')}, {epochs}", ""]
    # Under ddp a layout is the number of workers.
    with_layout = any(world["layout"] != str(world["workers"]) for world in found["worlds"])
    column = f"{'layout':<11}  " if with_layout else ""
    lines.append(f"workers  {column}microbatches of each       pads  idle  memory of a worker")
    for world in found["worlds"]:
        shares, parts = world["shares"], world["parts"]
        spread = _spread(shares)
        if any(parts):
            spread = f"{max(shares) - 1} and {_spread(parts)} samples"
        memory = size(world["memory_bytes"])
        if world["host_memory_bytes"]:
            memory = f"{memory} on its GPU, {size(world['host_memory_bytes'])} in the memory of its machine"
        figures = f"{world['pads']:>4}  {world['idle']:>4.0%}  {memory}"
        layout = f"{world['layout']:<11}  " if with_layout else ""
        lines.append(f"{world['workers']:>7}  {layout}{spread:<25}  {figures}")
    lines += _resharding_table(found["worlds"])
    if found["microbatch_is_measured"]:
        lines += ["", f"for the largest size that batch.microbatch_size=auto may choose: {found['microbatch_size']}"]
        lines.append("the run measures at its start which size fits, and keeps that size")
    if found["stages"]:
        lines += ["", "stage  layers  memory of its worker with the fewest replicas"]
        for stage_number, stage in enumerate(found["stages"]):
            lines.append(f"{stage_number:>5}  {stage['layers']:>6}  {size(stage['memory_bytes'])}")
        lines.append(f"a step sends up to {size(found['link_bytes'])} between two stages, and as much back")
    parts = [f"{name} {size(value)}" for name, value in found["worker_bytes"].items() if value]
    lines += ["", f"a whole model needs {', '.join(parts)}"]
    lines.append(
        f"a checkpoint takes {size(found['checkpoint_bytes'])}; copies in the memory of all nodes take "
        f"{size(found['node_memory_bytes'])}"
    )
    lines += [f"warning: {warning}" for warning in found["warnings"]]
    return "\n".join(lines)


def _spread(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{most}" if least == most else f"{least} to {most}"


def _resharding_table(worlds: list[dict[str, Any]]) -> list[str]:
    """Return a table of `parallel.reshard_after_forward`, empty unless the model is sharded."""
    lines = ["", "parallel.reshard_after_forward: gathers of a layer in a step, and memory of a worker"]
    lines.append("workers  true                 false")
    for world in worlds:
        if not world["resharding"]:
            return []
        cells = [f"{each['gathers']:<4} {size(each['memory_bytes']):<16}" for each in world["resharding"]]
        lines.append(f"{world['workers']:>7}  {''.join(cells).rstrip()}")
    return lines
