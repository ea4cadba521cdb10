"""A command that starts, resumes or extends a run, or is refused with the difference."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from steadfast.checkpoint import memory_server
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.manifest import Manifest
from steadfast.config import parse_config
from steadfast.errors import RunConflict, StorageError
from steadfast.launch.resume import start_or_resume
from steadfast.plan import Amendments, End
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Rollback, RunStarted
from steadfast.run.owner import read_key
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import FileStream
from tests.support.events import event_lines
from tests.support.history import write_ledger

BEGUN = RunStarted(time_s=0.0, launcher="ray")
CONFIG = """
model: {kind: mlp, in_features: 4, hidden: [3], out_features: 2}
task: {kind: classification}
data: {target: 'tests.examples.digits:dataset'}
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(LocalStore(tmp_path / "run"))
    directory.check_writable()
    return directory


def test_another_run_begun_in_the_same_folder_takes_nothing_of_others_along(directory: RunDirectory) -> None:
    directory.store.commit("model.safetensors", b"x")
    start_or_resume(parse_config(f"{CONFIG}\nrun: {{seed: 1}}"), directory, BEGUN, print)
    start_or_resume(parse_config(f"{CONFIG}\nrun: {{seed: 2}}"), directory, BEGUN, print)
    assert directory.store.read("model.safetensors") == b"x"
    assert [event["event"] for event in event_lines(directory)] == ["run_started"]


@pytest.mark.parametrize(
    ("words", "again", "kept"),
    [
        ("", None, True),
        ("steps: 7", None, True),
        ("seed: 2", None, False),
        ("resume: never", None, False),
        ("resume: never", True, True),  # the command that was told so goes on
    ],
)
def test_copies_of_a_killed_command_are_found_unless_the_run_begins_anew(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, words: str, again: bool | None, kept: bool
) -> None:
    monkeypatch.setattr(memory_server, "_END_S", 0.01)
    start_or_resume(parse_config(CONFIG), directory, BEGUN, print)
    key = read_key(directory.store)
    listener = memory_server.listen(memory_server.server_name(directory.uri, key))
    assert listener
    listener.settimeout(0)
    begun = BEGUN.model_copy(update={"again": again})
    with listener:
        start_or_resume(parse_config(f"{CONFIG}\nrun: {{{words}}}"), directory, begun, print)
        assert (read_key(directory.store) == key) == kept
        with nullcontext() if not kept else pytest.raises(BlockingIOError):
            connection, _ = listener.accept()
            assert connection.recv(1000) == b'{"verb": "end"}'
            connection.close()
    key = read_key(directory.store)
    directory.store.delete("config.yaml")
    start_or_resume(parse_config(CONFIG), directory, begun, print)
    assert read_key(directory.store) != key, "of a run without a configuration they are not found"


def finish(directory: RunDirectory, text: str, num_samples: int = 13) -> None:
    """Leave what a run leaves that has finished with step 13, of so many samples."""
    assert start_or_resume(parse_config(text), directory, BEGUN, print)
    write_ledger(directory.store, ({"step": step, "attempt": 1, "num_samples": 13} for step in range(1, 13)))
    write_ledger(directory.store, [{"step": 13, "attempt": 1, "num_samples": num_samples}])
    directory.write_summary({"status": "finished", "step": 13, "metrics": {}})


EPOCHS = "batch: {global_size: 13}\nrun: {epochs: 3}"
LONGER = "batch: {global_size: 13}\nrun: {epochs: 4}"


@pytest.mark.parametrize("longer", ["epochs: 4", "steps: 20"])
def test_an_extended_run_goes_on_behind_its_short_step_and_says_so(directory: RunDirectory, longer: str) -> None:
    finish(directory, EPOCHS, 9)
    said: list[str] = []
    extended = parse_config(f"batch: {{global_size: 13}}\nrun: {{{longer}}}")
    assert start_or_resume(extended, directory, BEGUN, said.append)
    assert directory.amendments().ends == (End(13, 165),)
    assert said == [
        "step 13 keeps fewer samples than batch.global_size, because the run had ended with this step; "
        "the next step begins at position 165 of the training samples"
    ]
    # It was broken off before its first step, and is given another length, or the same one, or its first one again.
    for text in ("epochs: 5", "epochs: 5", "epochs: 3"):
        config = parse_config(f"batch: {{global_size: 13}}\nrun: {{{text}}}")
        assert start_or_resume(config, directory, BEGUN, print)
        assert directory.amendments().ends == (End(13, 165),)


@pytest.mark.parametrize("other", ["", "\noptimizer: {lr: 0.5}"])
def test_a_finished_run_is_offered_more_epochs_than_it_has_had(directory: RunDirectory, other: str) -> None:
    finish(directory, "run: {epochs: 6}", 9)
    said: list[str] = []
    try:
        assert not start_or_resume(parse_config(f"run: {{epochs: 2}}{other}"), directory, BEGUN, said.append)
    except RunConflict as refused:
        said.append(str(refused))
    assert "run.epochs=12" in said[-1]


def test_a_run_whose_ledger_lacks_its_last_steps_is_not_extended(directory: RunDirectory) -> None:
    """Its checkpoint may be of a short step, and the position behind that is told by nobody yet."""
    finish(directory, EPOCHS, 9)
    checkpoint = Manifest(14, 1, 1, 0.0, "data", {})
    Catalog(directory.store).commit(checkpoint)
    with pytest.raises(RunConflict, match=r"a checkpoint of step 14, and its ledger ends with step 13.*run.epochs=3"):
        start_or_resume(parse_config(LONGER), directory, BEGUN, print)
    assert directory.stored_config() == parse_config(EPOCHS)
    write_ledger(directory.store, [{"step": 14, "attempt": 2, "num_samples": 13, "confirmed": False}])
    assert start_or_resume(parse_config(LONGER), directory, BEGUN, print)


def test_a_run_is_not_extended_where_its_end_cannot_be_written_down(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(directory, EPOCHS, 9)
    monkeypatch.setattr(FileStream, "write", lambda self, lines: None)  # a disk that is full raises nothing
    with pytest.raises(StorageError, match="an event cannot be written"):
        start_or_resume(parse_config(LONGER), directory, BEGUN, print)
    assert directory.stored_config() == parse_config(EPOCHS)
    assert directory.summary()


@pytest.mark.parametrize(("steps", "goes_on"), [(100, False), (200, True), (70, True)])
def test_a_run_that_a_hook_has_ended_is_finished_until_another_length_is_asked_for(
    directory: RunDirectory, steps: int, goes_on: bool
) -> None:
    said: list[str] = []
    assert start_or_resume(parse_config("run: {steps: 100}"), directory, BEGUN, said.append)
    summary = {"status": "finished", "step": 60, "metrics": {}, "ended_early": "loss has not been better than 2.1"}
    directory.write_summary(summary)
    again = parse_config(f"run: {{steps: {steps}}}")
    assert start_or_resume(again, directory, BEGUN, said.append) == goes_on
    if not goes_on:
        assert said[-1].startswith(f"{directory.uri} has finished: 60 steps | loss has not been better than 2.1")


TENTH = "run: {steps: 13}\nbatch: {global_size: 13, microbatch_size: 13}\noptimizer: {lr: 0.1}"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["optimizer.lr=0.5"], ["  optimizer.lr: 0.1 -> 0.5", "another run.name", "add run.steps=26 to continue"]),
        (
            ["optimizer.lr=0.5", "schedule.warmup_steps=7", "logging.every_steps=3"],
            ["optimizer.lr: 0.1 -> 0.5", "schedule.warmup_steps: 50 -> 7"],
        ),
        (["run.steps=5"], ["run.steps: 13 -> 5", "run.steps=5 is fewer than the 13 steps that are", "run.steps=26"]),
        (["batch.microbatch_size=4"], ["batch.microbatch_size: 13 -> 4"]),
    ],
)
def test_a_finished_run_of_other_values_is_a_conflict_that_lists_them(
    directory: RunDirectory, overrides: list[str], told: list[str]
) -> None:
    finish(directory, TENTH)
    config = parse_config(TENTH, overrides=overrides)
    with pytest.raises(RunConflict, match="has finished: 13 steps") as refused:
        start_or_resume(config, directory, BEGUN, print)
    assert all(part in str(refused.value) for part in told)
    assert "logging" not in str(refused.value)
    assert directory.summary(), "the finished run stays as it is"
    said: list[str] = []
    assert not start_or_resume(config, directory, BEGUN, said.append, return_finished=True)
    assert len(said) == len(overrides) + 1
    assert directory.stored_config() == parse_config(TENTH)


def test_a_finished_run_reports_differences_that_train_the_same_model_in_a_line_each(directory: RunDirectory) -> None:
    finish(directory, TENTH)
    said: list[str] = []
    words = ["logging.every_steps=3", "checkpoint.keep_last=9", "scaling.num_workers=2", "batch.microbatch_size=auto"]
    assert not start_or_resume(parse_config(TENTH, overrides=words), directory, BEGUN, said.append)
    *lines, finished, extend = "\n".join(said).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "batch.microbatch_size",
        "checkpoint.keep_last",
        "logging.every_steps",
    ]
    assert lines[-1] == "logging.every_steps: 10 -> 3 has no effect, as the run has finished"
    assert finished == f"{directory.uri} has finished: 13 steps"
    assert extend == "Extend it with run.steps=26, or choose another run.name"
    # Extended, it goes on with other values.
    config = parse_config(TENTH, overrides=["optimizer.lr=0.5", "run.steps=20"])
    assert start_or_resume(config, directory, BEGUN, print)
    assert directory.stored_config() == config
    assert directory.amendments().ends == (), "it ended with a whole step"


def test_the_number_that_auto_has_chosen_is_no_other_value_of_a_finished_run(directory: RunDirectory) -> None:
    chosen = TENTH.replace("microbatch_size: 13", "microbatch_size: auto")
    finish(directory, chosen, 13)
    directory.write_microbatch_size(13)
    assert not start_or_resume(parse_config(TENTH), directory, BEGUN, print)
    other = parse_config(TENTH, overrides=["batch.microbatch_size=4"])
    with pytest.raises(RunConflict, match=r"batch\.microbatch_size: auto -> 4"):
        start_or_resume(other, directory, BEGUN, print)


def test_a_run_that_has_lost_its_configuration_says_that_nothing_was_compared(directory: RunDirectory) -> None:
    said: list[str] = []
    assert start_or_resume(parse_config(TENTH), directory, BEGUN, print)
    Catalog(directory.store).commit(Manifest(5, 1, 1, 0.0, "data", {}))
    directory.store.delete("config.yaml")
    assert start_or_resume(parse_config(TENTH), directory, BEGUN, said.append)
    directory.store.delete("config.yaml")
    directory.write_summary({"status": "finished", "step": 13, "metrics": {}})
    assert not start_or_resume(parse_config(TENTH, overrides=["optimizer.lr=0.5"]), directory, BEGUN, said.append)
    assert said[:2] == [
        f"{directory.uri} has checkpoints and no config.yaml: resumed without comparing the configurations",
        f"{directory.uri} has no config.yaml: the configurations were not compared",
    ]


def test_another_kind_of_optimizer_is_refused_on_resume_with_the_difference(directory: RunDirectory) -> None:
    said: list[str] = []
    start_or_resume(parse_config(""), directory, BEGUN, said.append)
    directory.store.commit("checkpoints/step-00000001/manifest.json", b"{}")
    with pytest.raises(RunConflict, match=r"optimizer.kind: adamw -> sgd"):
        start_or_resume(parse_config("", overrides=["optimizer.kind=sgd"]), directory, BEGUN, said.append)
    start_or_resume(parse_config("", overrides=["optimizer.lr=0.5"]), directory, BEGUN, said.append)
    assert said == ["changed optimizer.lr: 0.001 -> 0.5"]


@pytest.mark.parametrize(
    ("recorded", "attempt"),
    [
        ({"skipped": [6]}, 2),
        ({"skipped": [6], "ends": [[9, 80]], "forward_size": 4}, 2),
        ({"ends": [[9, 80]]}, None),
        ({"forward_size": 2}, None),
    ],
)
def test_changes_to_the_plan_that_events_have_lost_come_from_the_newest_manifest(
    directory: RunDirectory, recorded: dict[str, Any], attempt: int | None
) -> None:
    said: list[str] = []
    assert start_or_resume(parse_config(TENTH), directory, BEGUN, print)
    lines = [{"step": 6, "attempt": 2, "num_samples": 13}, {"step": 6, "attempt": 3, "skipped": True}]
    write_ledger(directory.store, [*lines, {"step": 6, "attempt": 4, "skipped": True}])
    Catalog(directory.store).commit(Manifest(12, 5, 1, 0.0, "data", {}, **recorded))
    before = directory.amendments()
    assert before == Amendments()
    assert start_or_resume(parse_config(TENTH), directory, BEGUN, said.append)
    found = directory.amendments()
    assert sorted(found.skip) == recorded.get("skipped", [])
    assert [list(end) for end in found.ends] == recorded.get("ends", [])
    assert found.forward_size == recorded.get("forward_size")
    assert [event.attempt for event in directory.events(Rollback)] == [attempt] * ("skipped" in recorded)
    assert "events.jsonl has lost a line that the checkpoint of step 12 depends on" in said[0]
    start_or_resume(parse_config(TENTH), directory, BEGUN, said.append)
    assert len([line for line in said if "has lost" in line]) == 1, "nothing is lost any more"
