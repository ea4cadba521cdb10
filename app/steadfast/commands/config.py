"""`config [SECTION ...]`: print every key of the configuration, as YAML or as a JSON schema.

The YAML has the meaning and the default of each key.
"""

import json
from argparse import ArgumentParser, Namespace

from steadfast.config.describe import SECTIONS, describe, json_schema
from steadfast.errors import UsageError

_SCHEMA = (
    "print the JSON schema of all sections, with which editors complete and check keys. Write it to a file beside the "
    "configuration, and name that file in the first line of the configuration: "
    "# yaml-language-server: $schema=FILE"
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; by default all")
    parser.add_argument("--schema", action="store_true", help=_SCHEMA)


def run(options: Namespace) -> int:
    """Print the keys of the given sections, by default of all sections."""
    if options.schema:
        if options.sections:
            raise UsageError("config --schema describes whole files, and takes no section: config --schema > FILE")
        print(json.dumps(json_schema(), indent=2))
        return 0
    for section in options.sections:
        if section not in SECTIONS:
            raise UsageError(f"there is no section {section}; there are: {', '.join(SECTIONS)}")
    print(describe(options.sections or SECTIONS))
    return 0
