"""The verbs of the command line, one file each: `add_arguments(parser)` says what it takes, `run(options)` does it.

What takes long to import, above all torch and Ray, is imported inside the functions that need it: help, and what is
wrong with a command, is then shown in a fraction of a second.
"""

from typing import NamedTuple


class Verb(NamedTuple):
    """A line of the overview, below a heading that neighbours share."""

    heading: str
    usage: str
    summary: str


_EXPORT = "the weights of a checkpoint, by default the newest, as .safetensors or .pt; or for from_pretrained"
_DOCTOR = "check the machines before a run; with RUN, read its checkpoints and compare them with what was written"
_VERIFY = "that two runs have the same samples, losses and weights, or at which step they part, and who ran it"
_CHAOS = "do every fault to this application, stock Ray Train and torchrun on this machine, and compare"

VERBS = {
    "train": Verb("run", "train (default)", "train, or resume where the run stopped"),
    "plan": Verb("run", "plan --config FILE", "what a run would do with each number of workers, and what it needs"),
    "scale": Verb("run", "scale RUN --workers MIN:MAX", "change the bounds of a run that is under way"),
    "status": Verb("look", "status [RUN] [--watch]", "how a run is now and what its failures cost, or a line for each"),
    "config": Verb("look", "config [SECTION ...]", "every key of the configuration, what it means and its default"),
    "report": Verb("look", "report RUN", "a page of HTML: losses, failures and their cost, and where the time went"),
    "doctor": Verb("look", "doctor [RUN]", _DOCTOR),
    "export": Verb("look", "export RUN --out FILE [--format hf]", _EXPORT),
    "audit": Verb("prove", "audit RUN [--json]", "that a run has used every sample as planned, from its ledger"),
    "verify": Verb("prove", "verify RUN_A RUN_B [--json]", _VERIFY),
    "chaos": Verb("prove", "chaos [--minutes N]", _CHAOS),
}
