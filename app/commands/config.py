"""`config [SECTION ...]`: print every key of the configuration, what it means and its default, as YAML."""

from argparse import ArgumentParser, Namespace

from app.config.describe import SECTIONS, describe
from app.errors import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; all if none")


def run(options: Namespace) -> int:
    """Print the sections."""
    for section in options.sections:
        if section not in SECTIONS:
            raise UsageError(f"there is no section {section}; there are: {', '.join(SECTIONS)}")
    print(describe(options.sections or SECTIONS))
    return 0
