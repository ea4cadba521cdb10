"""Verbs of the command line, one file each, with `add_arguments(parser)` and `run(options)`.

Slow imports, above all torch and Ray, are inside the functions that need them. So help texts and usage errors appear in
a fraction of a second.
"""

from typing import NamedTuple


class Verb(NamedTuple):
    """Line of the overview of verbs. Consecutive verbs may share a heading."""

    heading: str
    usage: str
    summary: str


_EXPORT = "write the weights of a checkpoint, by default the newest, as .safetensors or .pt, or for from_pretrained"
_DOCTOR = "check the machines before a run; with RUN, read all its checkpoints and verify their digests"
_COMPARE = "show which keys, results and costs of runs differ; for two runs also the first step that differs"
_RUNS = "list runs with date and size, or delete a run"
_CHAOS = "inject every fault into this application, stock Ray Train and torchrun on this machine, and compare"
_TOKENIZE = "write the tokens of text, JSON lines or Parquet into one file, for data.kind=tokens"
_INDEX = "write the samples of a stream into shards once, for data.kind=parquet"

VERBS = {
    "init": Verb("begin", "init [FOLDER]", "write a starter to change: configuration, your own code, cluster file"),
    "completion": Verb("begin", "completion", "print the completion of verbs, options and keys, for bash"),
    "tokenize": Verb("begin", "tokenize FILE ... --tokenizer NAME --out FILE", _TOKENIZE),
    "index": Verb("begin", "index --config FILE --out FOLDER", _INDEX),
    "train": Verb("run", "train (default)", "train, or resume where the run stopped"),
    "plan": Verb("run", "plan --config FILE", "show shares and memory for each number of workers, without training"),
    "scale": Verb("run", "scale RUN --workers MIN:MAX", "change the worker bounds of a run in progress"),
    "status": Verb(
        "look", "status [RUN] [--watch | --live]", "show a run and what its failures cost, or a line for each run"
    ),
    "runs": Verb("look", "runs [--delete NAME]", _RUNS),
    "config": Verb(
        "look", "config [SECTION ...] [--schema]", "show every key of the configuration, its meaning and its default"
    ),
    "report": Verb("look", "report RUN", "write an HTML page: losses, metrics, failures and their cost, use of time"),
    "doctor": Verb("look", "doctor [RUN]", _DOCTOR),
    "export": Verb("look", "export RUN --out FILE [--format hf]", _EXPORT),
    "audit": Verb("prove", "audit RUN [--json]", "prove from its ledger that a run used every sample as planned"),
    "compare": Verb("prove", "compare RUN RUN ... [--html FILE]", _COMPARE),
    "chaos": Verb("prove", "chaos [--minutes N]", _CHAOS),
}
