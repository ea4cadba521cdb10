"""`completion`: print a bash script that completes verbs, options, keys and runs."""

import shlex
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator

from steadfast.commands import VERBS
from steadfast.commands.options import parser_of
from steadfast.config import Config, parse_config
from steadfast.config.base import Section, kinds_in

# If the function finds nothing, bash completes the name of a file, for example behind --config.
_SCRIPT = """\
# Bash completion. In ~/.bashrc:  eval "$(steadfast completion)"
_steadfast() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=train each words
  case ${{COMP_WORDS[COMP_CWORD-1]}} in
    =|{with_value}) return ;;
  esac
  for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $each in
      {verbs}) verb=$each ;;
    esac
  done
  case $verb in
{words}
  esac
  case $verb in
    {of_runs}) words+=" $(ls runs 2> /dev/null)" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _steadfast steadfast
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add nothing."""


def run(options: Namespace) -> int:
    """Print the script."""
    lines = []
    of_runs = []
    with_value: set[str] = set()
    keys = list(_keys())
    for name in VERBS:
        parser, _ = parser_of(name)
        words: list[str] = []
        for action in parser._actions:
            if action.help != SUPPRESS:
                words += action.option_strings
            if action.nargs != 0:
                with_value.update(action.option_strings)
        arguments = [action.dest for action in parser._actions if not action.option_strings]
        if "words" in arguments:
            words += keys
        if "runs" in arguments:
            of_runs.append(name)
        if name == "train":  # the verb that a command without a verb has
            words += [*VERBS, "--version"]
        lines.append(f"    {name}) words={shlex.quote(' '.join(words))} ;;")
    script = _SCRIPT.format(
        with_value="|".join(sorted(with_value)),
        verbs="|".join(VERBS),
        words="\n".join(lines),
        of_runs="|".join(of_runs),
    )
    print(script, end="")
    return 0


def _keys() -> Iterator[str]:
    """Yield the beginning of each override: run.steps=."""
    defaults = parse_config("")
    for name, field in Config.model_fields.items():
        if not isinstance(getattr(defaults, name), Section):  # a list of sections, or a single key
            yield f"{name}="
            continue
        keys: set[str] = set()
        for kind in kinds_in(field.annotation):
            keys.update(kind.model_fields)
        yield from (f"{name}.{key}=" for key in sorted(keys))
