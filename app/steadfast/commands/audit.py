"""`audit RUN`: prove from its ledger that a run used every sample as planned."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from steadfast.commands.options import add_run_argument, add_trust_argument, check_trusted, run_on_cluster, take_storage
from steadfast.config import Config, DataConfig, MixtureData, Target
from steadfast.errors import DataError, UsageError
from steadfast.run.directory import RunDirectory, find_run, reading
from steadfast.run.events import AttemptStarted
from steadfast.storage.documents import json_line
from steadfast.units import plural, printable

if TYPE_CHECKING:
    from steadfast.data import Extent

_MOST_SAMPLES = 2**48  # with this limit all positions of a run fit into 64 bits


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    length = "length of the dataset, held-out samples included, if the run did not record it"
    parser.add_argument("--samples", type=int, metavar="N", help=length)
    parser.add_argument("--json", action="store_true", help="print the numbers as one line of JSON")
    add_trust_argument(parser)


def run(options: Namespace) -> int:
    """Print the proof that a run used its planned samples, or a counter-example.

    Return the exit code: 0 if the proof holds, else 1.
    """
    take_storage(options)
    if len(options.runs) != 1:
        raise UsageError("audit takes one run, for example: audit ddp")
    if options.cluster:
        return run_on_cluster(options)
    from steadfast.analysis.audit import CounterExample, audit

    directory = find_run(options.runs[0], options.storage)
    config = directory.stored_config()
    if config is None:
        raise UsageError(f"{directory.uri} has no config.yaml, so the planned samples are unknown")
    with reading(directory):
        extent = _extent(directory, config, options)
    # The audit calls order functions of the user, which are code that the run directory names.
    targets = config.targets()
    check_trusted(options, targets, [key for key in targets if key.endswith("order.target")])
    try:
        with reading(directory):
            found = audit(directory, config, extent).to_line()
    except CounterExample as error:
        # For a script a counter-example is a result like a proof, and belongs in the same document.
        if not options.json:
            raise
        print(json_line({"run": directory.uri, "proved": False, "counter_example": error.to_line()}))
        return error.exit_code
    if options.json:
        print(json_line({"run": directory.uri, "proved": True, **found}))
    else:
        print(printable(_table(directory, config.data, found)))
    return 0


def _extent(directory: RunDirectory, config: Config, options: Namespace) -> "Extent | int":
    """Return the length of the dataset, and its parts if the order depends on these.

    It is taken from --samples, else from the events of the run, else from the dataset itself.
    """
    from steadfast.data import Extent, build_dataset

    given: int | None = options.samples
    sources = getattr(config.data, "sources", ())
    has_blocks = any(section.order == "blocks" for section in (config.data, *sources))
    if given is not None:
        if not 1 <= given <= _MOST_SAMPLES:
            raise UsageError(f"--samples {given}: must be from 1 to {_MOST_SAMPLES}")
        if has_blocks or sources:
            raise UsageError("--samples: the order of shards and mixtures depends on more than the number of samples")
        return given
    for event in directory.events(AttemptStarted):
        sizes = event.source_sizes if sources else (event.num_samples,)
        if sizes and not has_blocks and all(size is not None and 1 <= size <= _MOST_SAMPLES for size in sizes):
            extents = tuple(Extent(size) for size in sizes if size is not None)
            return Extent(sum(extent.num_samples for extent in extents), None, extents if sources else ())
    # A run of an earlier release, or a run before its first step, has no event with the length.
    by_length = "" if has_blocks or sources else "give the length of the dataset: --samples N"
    sections = {"data": config.data, **{f"data.sources.{number}": source for number, source in enumerate(sources)}}
    otherwise = by_length and f". Or {by_length}"
    check_trusted(options, config.targets(), [f"{key}.target" for key in sections], otherwise)
    places = {}
    for key, section in sections.items():
        for name in ("path", "source"):
            place = getattr(section, name, "python-docs")
            if place != "python-docs":
                places[f"{key}.{name}"] = place
    check_trusted(options, places, places, otherwise, "these data, and the command would read them")
    try:
        return Extent.of(build_dataset(config.data, keeps_indices=False))
    except DataError as error:
        remedy = by_length and f". If the data are not available here, {by_length}"
        raise UsageError(f"{error}{remedy}") from error


def _table(directory: RunDirectory, data: DataConfig, found: dict[str, Any]) -> str:
    left_out = "nothing"
    if found["left_out"]:
        left_out = f"{plural(found['left_out'], 'step')} of {plural(found['left_out_samples'], 'sample')}, by rollbacks"
    # An order of the user may read a sample several times in an epoch, so only the order itself is proved.
    once = "each with every training sample once"
    if isinstance(data, MixtureData):
        once = "and each source with every sample of its own once in an epoch of its own"
        if any(isinstance(source.order, Target) for source in data.sources):
            once += ", except sources that a function orders"
    if isinstance(data.order, Target):
        once = f"read in the order of {data.order.target}"
    digests = f"{found['digests']} compared, all as planned"
    if found["unconfirmed"]:
        digests += f"; {plural(found['unconfirmed'], 'step')} whose record was lost with a worker"
    rows = {
        "steps": f"1 to {found['steps']}, each once; {plural(found['redone'], 'line')} redone by a later attempt",
        "samples": f"{found['samples']} used, {found['epoch_samples']} in an epoch",
        "epochs": f"{found['epochs']} finished, {once}",
        "digests": digests,
        "left out": left_out,
    }
    if isinstance(data, MixtureData):
        rows["sources"] = _shares(data, found["source_samples"])
    lines = [f"proved: {directory.uri}"]
    for name, row in rows.items():
        lines.append(f"{name:<9} {row}")
    return "\n".join(lines)


def _shares(data: MixtureData, samples: Sequence[int]) -> str:
    """Return the number of samples and the share of each source."""
    weights = data.integer_weights
    shares = []
    for number, (count, weight) in enumerate(zip(samples, weights, strict=True)):
        share = f"{count / sum(samples):.2%}, weight {weight} of {sum(weights)}"
        shares.append(f"{number} {data.sources[number].kind}: {plural(count, 'sample')} ({share})")
    return "; ".join(shares)
