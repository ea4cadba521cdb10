"""`config [SECTION ...]`: print every key of the configuration as YAML.

Each key comes with its meaning and its default.
"""

from argparse import ArgumentParser, Namespace

from steadfast.config.describe import SECTIONS, describe
from steadfast.errors import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; by default all")


def run(options: Namespace) -> int:
    """Print the keys of the given sections, by default of all sections."""
    for section in options.sections:
        if section not in SECTIONS:
            raise UsageError(f"there is no section {section}; there are: {', '.join(SECTIONS)}")
    print(describe(options.sections or SECTIONS))
    return 0
