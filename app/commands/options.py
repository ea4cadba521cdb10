"""What several verbs share: their arguments, and what has to be right before a command does anything."""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from app.commands import VERBS
from app.config import Config, load_config
from app.config.schema import RunConfig
from app.errors import UsageError
from app.launch import remote

_NONE: Mapping[str, str] = MappingProxyType({})


def add_config_arguments(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} --config FILE [key=value ...] [options]"
    overrides = "overrides FILE, with dots for sections: batch.global_size=96"
    parser.add_argument("words", nargs="*", metavar="key=value", help=overrides)
    parser.add_argument("-c", "--config", metavar="FILE", help="what to train: as given, else from configs/")


def add_run_argument(parser: ArgumentParser) -> None:
    # Any number of runs passes here, and the verb counts them: argparse's own message would lack an example.
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run: its name below runs/, its path or its URI")
    storage = "where runs are looked for by name; run.storage=PLACE is the same"
    parser.add_argument("--storage", metavar="PLACE", help=storage)


def take_storage(options: Namespace) -> None:
    """Read `run.storage` and `run.name` among the words for runs, as training takes them, and default the storage."""
    runs = []
    for word in options.runs:
        key, equals, value = word.partition("=")
        if equals and key == "run.storage":
            options.storage = value
        elif equals and key == "run.name":
            runs.append(value)
        else:
            runs.append(word)
    options.runs = runs
    options.storage = options.storage or RunConfig().storage


def is_of_config(word: str) -> bool:
    """Return whether a word is an override of a section that there is; a run may have an equals sign in its name."""
    key = word.partition("=")[0]
    return is_override(word) and key.partition(".")[0] in Config.model_fields


def read_config(options: Namespace) -> Config:
    """Read the configuration that the command names, with its overrides."""
    for word in options.words:
        if not is_override(word):
            raise unknown_verb(word)
    if options.config is None:
        raise UsageError("--config FILE is missing, for example --config ddp.yaml")
    return load_config(options.config, options.words)


def is_override(word: str) -> bool:
    """Return whether a word is written key=value, and is not a URI with an equals sign in it."""
    key, equals, _ = word.partition("=")
    return bool(equals) and "://" not in key


def unknown_verb(word: str) -> UsageError:
    return UsageError(f"unknown verb {word}; there are: {', '.join(VERBS)}. Overrides are written key=value")


def add_trust_argument(parser: ArgumentParser) -> None:
    trust = "run the code that RUN's config.yaml names, as the current user; only for runs that you trust"
    parser.add_argument("--trust-code", action="store_true", help=trust)


def check_trusted(options: Namespace, config: Config, keys: Iterable[str], otherwise: str = "") -> None:
    """Check that the command may import the code that a run's `config` names at `keys`.

    Whoever can write the run directory chooses that code, and it would run with the rights of who reads the run.

    Args:
        otherwise: another remedy.

    Raises:
        UsageError: there is such code, and the command lacks --trust-code.
    """
    named = [f"{key} {target}" for key, target in config.targets().items() if key in keys]
    if named and not options.trust_code:
        again = shlex.join([*options.arguments, "--trust-code"])
        raise UsageError(
            f"{', '.join(named)}: code that the run's config.yaml names, and that this command would import and run. "
            f"If you trust whoever can write the run directory: main.py {again}{otherwise}"
        )


def run_on_cluster(options: Namespace, *added: str, variables: Mapping[str, str] = _NONE) -> int:
    """Give the same command, and `added` with it, on the head of the cluster that `--cluster` names."""
    arguments = without_option(options.arguments, "--cluster", options.cluster)
    return remote.run_on_head(options.cluster, [*arguments, *added], options.verbose, variables)


def without_option(arguments: list[str], option: str, value: str | None = None) -> list[str]:
    """Return the command line without one option and its value."""
    left = [each for each in arguments if each not in (option, f"{option}={value}")]
    if value is not None and option in arguments:
        # The value stands where the option stood. Only there: another argument may be the same word.
        del left[arguments.index(option)]
    return left
