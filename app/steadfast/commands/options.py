"""Arguments and checks that several verbs share."""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType

from steadfast.commands import VERBS
from steadfast.config import Config, load_config
from steadfast.config.schema import RunConfig
from steadfast.errors import UsageError
from steadfast.launch import remote

_NONE: Mapping[str, str] = MappingProxyType({})


def parser_of(name: str) -> tuple[ArgumentParser, ModuleType]:
    """Return the parser and the module of a verb."""
    # Only the module of this verb is imported, so that other verbs can neither slow it down nor break it.
    verb = import_module(f"steadfast.commands.{name}")
    parser = ArgumentParser(
        f"steadfast {name}", f"steadfast {VERBS[name].usage} [options]", VERBS[name].summary, allow_abbrev=False
    )
    verb.add_arguments(parser)
    parser.add_argument("--cluster", metavar="FILE", help="run on the cluster that `ray up FILE` started")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks, phase times, Ray's own messages")
    return parser, verb


def add_config_arguments(parser: ArgumentParser) -> None:
    """Add --config and its overrides."""
    parser.usage = f"{parser.prog} --config FILE [key=value ...] [options]"
    overrides = "overrides FILE, with dots for sections: batch.global_size=96"
    parser.add_argument("words", nargs="*", metavar="key=value", help=overrides)
    parser.add_argument("-c", "--config", metavar="FILE", help="configuration to train: a path, or a file of configs/")


def add_run_argument(parser: ArgumentParser) -> None:
    """Add RUN, any number of times, and --storage."""
    # Each verb checks the number of runs itself, because argparse's own message would lack an example.
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run: its name below runs/, its path or its URI")
    storage = "folder or URI in which runs are found by name; run.storage=PLACE is the same"
    parser.add_argument("--storage", metavar="PLACE", help=storage)


def take_storage(options: Namespace) -> None:
    """Accept `run.storage=` and `run.name=` in place of --storage and RUN.

    Without any storage the option gets the default of `run.storage`.
    """
    # A user can repeat the words of the command that trained.
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
    """Return whether a word overrides a key of an existing section."""
    # The name of a run may contain an equals sign too.
    key = word.partition("=")[0]
    return is_override(word) and key.partition(".")[0] in Config.model_fields


def read_config(options: Namespace) -> Config:
    """Read the configuration of the command, with its overrides."""
    for word in options.words:
        if not is_override(word):
            raise unknown_verb(word)
    if options.config is None:
        raise UsageError("--config FILE is missing, for example --config ddp.yaml")
    return load_config(options.config, options.words)


def is_override(word: str) -> bool:
    """Return whether a word has the form key=value and is no URI."""
    # The path of a URI may contain an equals sign.
    key, equals, _ = word.partition("=")
    return bool(equals) and "://" not in key


def unknown_verb(word: str) -> UsageError:
    """Return the error for a word that should be a verb."""
    # Users and scripts of earlier releases still use this name.
    if word == "verify":
        return UsageError("the verb verify is called compare now")
    return UsageError(f"unknown verb {word}; there are: {', '.join(VERBS)}. Overrides are written key=value")


def add_trust_argument(parser: ArgumentParser) -> None:
    """Add --trust-code."""
    trust = "run the code and read the data that RUN's config.yaml names, as you; only for runs that you trust"
    parser.add_argument("--trust-code", action="store_true", help=trust)


def check_trusted(
    options: Namespace,
    targets: Mapping[str, str],
    keys: Iterable[str],
    otherwise: str = "",
    use: str = "this code, and the command would import and run it",
) -> None:
    """Check that the command may use code or data that a run's configuration names.

    Every user who can write the run directory can choose these. They are used with the rights of the user who reads
    the run.

    Args:
        options: the options of the command.
        targets: the user's code, or the places of data, in the configuration of the run, by key.
        keys: the keys of those that the command would use.
        otherwise: text with another remedy.
        use: what they are, and what the command would do.

    Raises:
        UsageError: the configuration has such a key, and the command lacks --trust-code.
    """
    named = [f"{key} {target}" for key, target in targets.items() if key in keys]
    if named and not options.trust_code:
        again = shlex.join([*options.arguments, "--trust-code"])
        raise UsageError(
            f"{', '.join(named)}: the run's config.yaml names {use}. "
            f"If you trust every user who can write the run directory: steadfast {again}{otherwise}"
        )


def run_on_cluster(options: Namespace, *added: str, variables: Mapping[str, str] = _NONE) -> int:
    """Run the same command on the head of a cluster.

    Args:
        options: the options of the command.
        added: further arguments for the command.
        variables: environment variables for the command.
    """
    # With --cluster the head would forward the command once more.
    arguments = without_option(options.arguments, "--cluster", options.cluster)
    return remote.run_on_head(options.cluster, [*arguments, *added], options.verbose, variables)


def without_option(arguments: list[str], option: str, value: str | None = None) -> list[str]:
    """Return the command line without one option and its value."""
    left = [each for each in arguments if each not in (option, f"{option}={value}")]
    if value is not None and option in arguments:
        # The value is now at the option's old position. Only that word is deleted, because another argument may be
        # equal to it.
        del left[arguments.index(option)]
    return left
