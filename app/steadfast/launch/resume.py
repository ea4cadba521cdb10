"""Decide whether a command starts, resumes or only reports a run."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from steadfast.checkpoint.catalog import Catalog, Damaged
from steadfast.checkpoint.memory_server import end_server, server_name
from steadfast.config import BatchConfig, Change, Config, RunConfig, diff
from steadfast.errors import RunConflict, StorageError
from steadfast.plan import End, begin_of
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import Event, Failure, ForwardsShrunk, Rollback, RunStarted, ShortStep
from steadfast.run.ledger import last_end
from steadfast.run.owner import Ownership, read_key, write_key
from steadfast.storage.jsonl import read_lines
from steadfast.telemetry.environment import environment
from steadfast.telemetry.outcome import already_finished, finished_otherwise


def start_or_resume(
    config: Config,
    directory: RunDirectory,
    begun: RunStarted,
    say: Callable[[str], object],
    return_finished: bool = False,
) -> bool:
    """Prepare the run directory to start or resume a run.

    Return False if the run has finished, after a report through `say`.

    Args:
        begun: the event that records the command.
        say: reports a line to the user.
        return_finished: whether to accept a finished run although `config` would have trained another model.

    Raises:
        RunConflict: the directory holds another run, or a finished run of a configuration that trains another model,
            or `run.resume` forbids starting or resuming.
        StorageError: a file of the directory is damaged, or cannot be written.
    """
    try:
        return _start_or_resume(config, directory, begun, say, return_finished)
    except OSError as error:
        what = str(error.strerror or error)
        if error.filename:
            what = f"{error.filename}: {what}"
        raise StorageError(
            f"{directory.uri} cannot be used: {what}. Make room or remove what is in the way there, or choose another "
            "run.name"
        ) from error


def _start_or_resume(
    config: Config, directory: RunDirectory, begun: RunStarted, say: Callable[[str], object], return_finished: bool
) -> bool:
    stored = directory.stored_config()
    former = stored.run if stored else None
    resumable = has_checkpoint(directory)
    _check_resume_mode(config.run, directory, resumable)

    changes = diff(stored, config) if stored else []
    refused = [change for change in changes if change.identity]
    if refused and resumable:
        raise RunConflict(
            f"{directory.uri} holds a run of another configuration:\n{_listed(refused)}\n"
            "Give the former values to resume it, or choose another run.name"
        )
    if refused:
        # There is no state to resume, and ledger and events of the former configuration would mislead the user.
        directory.clear()
        # Nothing of the former run is left, and goodput counts the time from a start that is no restart.
        begun = begun.model_copy(update={"again": None})
    never = config.run.resume == "never" and not begun.again
    if not resumable and (stored is None or refused or never):
        end_copies(directory)  # a killed command may have left copies in memory

    summary = directory.summary()
    if summary and summary["status"] == "finished" and not _extends(config.run, former, summary):
        others = _training_otherwise(changes, directory)
        if others and not return_finished:
            raise RunConflict(finished_otherwise(config.run, former, directory.uri, summary, _listed(others)))
        if stored is None:
            say(f"{directory.uri} has no config.yaml: the configurations were not compared")
        for change in changes:
            if not change.free:
                say(f"{change.key}: {change.old} -> {change.new} has no effect, as the run has finished")
        say(already_finished(config.run, former, directory.uri, summary))
        return False

    if resumable:
        _restore_amendments(directory, say)
    if former is None or _length(former) != _length(config.run):
        _note_short_step(former, config.batch.global_size, directory, say)
    directory.delete_summary()
    # Old requests of users were meant for the former command.
    directory.pop_requests()
    # Without a checkpoint, the memory of a node may still hold the run's finished steps.
    if stored is not None and (resumable or directory.last_step()):
        _keep_microbatch_size(stored.batch, config.batch, directory)
    directory.write_config(config)
    for change in changes:
        if resumable and not change.identity and not change.free:
            say(f"changed {change.key}: {change.old} -> {change.new}")
    if resumable and stored is None:
        say(f"{directory.uri} has checkpoints and no config.yaml: resumed without comparing the configurations")
    directory.record(begun)
    directory.write_environment(environment())
    return True


def _training_otherwise(changes: list[Change], directory: RunDirectory) -> list[Change]:
    """Return the changes with which the finished run would have trained another model."""
    found: list[Change] = []
    for change in changes:
        changes_model = change.numeric
        if change.key == "batch.microbatch_size":
            # With auto a run keeps the number that it has chosen, so the same number and auto train the same model.
            chosen = directory.microbatch_size() if change.old == "auto" else change.old
            changes_model = change.new not in ("auto", chosen)
        if changes_model:
            found.append(change)
    return found


def _listed(changes: list[Change]) -> str:
    return "\n".join(f"  {change.key}: {change.old} -> {change.new}" for change in changes)


def _keep_microbatch_size(stored: BatchConfig, batch: BatchConfig, directory: RunDirectory) -> None:
    """Keep the run's `batch.microbatch_size` if the new configuration says auto."""
    # All steps of a run have microbatches of one size, because dropout draws its numbers by microbatch.
    if batch.microbatch_size == "auto" and stored.microbatch_size != "auto":
        directory.write_microbatch_size(stored.microbatch_size)


def _check_resume_mode(run: RunConfig, directory: RunDirectory, resumable: bool) -> None:
    if run.resume == "must" and not resumable:
        raise RunConflict(f"run.resume=must, but {directory.uri} holds no checkpoint to resume from")
    if run.resume == "never" and resumable:
        raise RunConflict(
            f"run.resume=never, but {directory.uri} holds checkpoints. Choose another run.name, or remove the run"
        )


def _extends(run: RunConfig, former: RunConfig | None, summary: dict[str, Any]) -> bool:
    """Return whether `run` makes the finished run longer."""
    if summary.get("ended_early") and former is not None:
        # A run that ended early counts as finished for its own length. Only another length extends it.
        return _length(run) != _length(former)
    if run.steps is not None:
        return run.steps > int(summary["step"])
    if former is None or former.epochs is None:
        # The number of epochs in the finished steps is not known here. If no epoch is left, the run ends at once.
        return True
    return (run.epochs or 0) > former.epochs


def _length(run: RunConfig) -> tuple[int | None, int | None]:
    return run.steps, run.epochs


def _note_short_step(
    former: RunConfig | None, size: int, directory: RunDirectory, say: Callable[[str], object]
) -> None:
    """Record the end of the run if its last step was short.

    The next step of the longer run begins at that position in the data.

    Args:
        former: the length of the run so far, if known.
        size: number of samples in a global batch.

    Raises:
        RunConflict: the position at which the run ended is not known.
        StorageError: storage refuses the event.
    """
    ends = directory.amendments().ends
    end = last_end(directory.store, size, ends)
    newest = Catalog(directory.store).newest() or 0
    if former and former.epochs and newest > end.step:
        # The leader wrote the checkpoint and died before the ledger was on storage. The missing step may be short.
        length = f"run.epochs={former.epochs}"
        raise RunConflict(
            f"{directory.uri} has a checkpoint of step {newest}, and its ledger ends with step {end.step}: it is not "
            f"known where a run of another length would go on. Give {length} once more, which completes the ledger"
        )
    if not begin_of(end.step, size, ends) < end.position < begin_of(end.step + 1, size, ends):
        return  # the step was whole, or its end is recorded already
    event = ShortStep(step=end.step, position=end.position)
    directory.record(event)
    # `record` raises no errors of storage. Without this event samples would be left out, so its presence is checked.
    if end not in directory.amendments().ends:
        raise StorageError(f"{directory.uri}: an event cannot be written; make room there, and give the command again")
    say(event.line())


def _restore_amendments(directory: RunDirectory, say: Callable[[str], object]) -> None:
    """Record changes to the plan again that the events have lost, from the newest checkpoint's manifest.

    Without the changes no later checkpoint would fit the run.
    """
    catalog = Catalog(directory.store)
    known = directory.amendments()
    for step in catalog.steps():
        with suppress(Damaged, StorageError):  # told when the checkpoint is looked for
            if not (manifest := catalog.manifest(step)):
                continue
            cause = f"events.jsonl has lost a line that the checkpoint of step {step} depends on (a loss of power?)"
            lost: list[Event] = []
            if skipped := sorted({*manifest.skipped} - known.skip):
                lines = [line for line in read_lines(directory.store, STEPS) if line.get("step") == skipped[0]]
                # The attempt before the first one that has left the step out.
                first = min((line["attempt"] for line in lines if line.get("skipped")), default=manifest.attempt)
                lost.append(Rollback(steps=tuple(skipped), cause=cause, attempt=first - 1))
            for end in map(End._make, manifest.ends):
                if end not in known.ends:
                    lost.append(ShortStep(step=end.step, position=end.position))
            size = manifest.forward_size
            if size and size < (known.forward_size or math.inf):
                lost.append(ForwardsShrunk(step=step, forward_size=size, error=cause))
            if lost:
                say(f"{cause}: recorded again from its manifest")
            for event in lost:
                directory.record(event)
            return


def has_checkpoint(directory: RunDirectory) -> bool:
    """Return whether the run has a checkpoint, even a damaged one."""
    catalog = Catalog(directory.store)
    return bool(catalog.quarantined()) or catalog.newest() is not None


def end_copies(directory: RunDirectory) -> None:
    """End all copies of the run's state in memory.

    Copies on this machine end at once, and copies on other machines become invalid.

    Raises OSError if storage refuses the secret.
    """
    if key := read_key(directory.store):
        end_server(server_name(directory.uri, key))
    # The name of a process that holds copies follows from the secret, so with a new secret no later command finds one.
    write_key(directory.store)


def release_run(directory: RunDirectory, ownership: Ownership, new: bool) -> None:
    """Release the run, and delete its folder if it holds nothing useful.

    Args:
        new: whether this command has created the folder.
    """
    # The folder is deleted only while this command owns the run. Otherwise the folder may have been deleted already,
    # and another command may have begun a run in a folder of the same name.
    if new and ownership.holds() and not _worth_reading(directory):
        directory.store.delete("")
    else:
        ownership.release()


def _worth_reading(directory: RunDirectory) -> bool:
    """Return whether the run has a step, a failure, stacks or a profile."""
    # A message may have referred the user to these files.
    if has_checkpoint(directory) or directory.last_step() or directory.holds_traces():
        return True
    # A failure of kind "ours" is explained by its message alone, so its event is not worth reading.
    return any(failure.kind != "ours" for failure in directory.events(Failure))
