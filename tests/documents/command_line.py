"""Make docs/command_line.md: the help of every verb."""

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from unittest import mock

from steadfast.cli import main
from steadfast.commands import VERBS

_HEAD = """\
# Command line

Written by `make docs` from the verbs of `app/steadfast/commands`; change those files, not this one.
[Commands and configuration](guides/commands.md) has examples.
"""


def command_line_page() -> str:
    """Return the page with the help of the command and of each verb."""
    parts = [_HEAD, _block(["--help"])]
    for verb in VERBS:
        parts += [f"## `{verb}`\n", _block([verb, "--help"])]
    return "\n".join(parts)


def _block(arguments: list[str]) -> str:
    output = StringIO()
    # argparse wraps lines at the width of the terminal, ends the process after a help text, and adds colors.
    with mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"), redirect_stdout(output), suppress(SystemExit):
        main(0.0, arguments)
    return f"```text\n{output.getvalue().strip()}\n```\n"
