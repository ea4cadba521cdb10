"""`report RUN`: write an HTML page about a run and its failures."""

from argparse import Namespace

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.errors import UsageError
from steadfast.run.directory import find_run, reading
from steadfast.units import printable

add_arguments = add_run_argument


def run(options: Namespace) -> int:
    """Write `report.html` into the run directory, and print its place."""
    take_storage(options)
    if len(options.runs) != 1:
        raise UsageError("report takes one run, for example: report ddp")
    if options.cluster:
        return run_on_cluster(options)
    from steadfast.analysis.report.write import write_report

    directory = find_run(options.runs[0], options.storage)
    with reading(directory):
        print(printable(write_report(directory)))
    return 0
