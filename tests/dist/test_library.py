"""`steadfast.fit`, by which a program of the user's own trains: alone, under torchrun, and in a notebook."""

import copy
import json
import os
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbclient
import nbformat
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import steadfast
from steadfast.analysis.status import StatusReader
from steadfast.errors import ConfigError, RunConflict, UsageError
from steadfast.injection.inject import InjectedFault
from steadfast.run.directory import RunDirectory
from tests.examples import fit_example
from tests.examples.script import Counts, line, squared_error, train
from tests.support.command import ROOT, STANDALONE
from tests.support.programs import run_program

SCRIPT = "tests/examples/script.py"


def run(*words: str) -> list[dict[str, Any]]:
    """Run the user's program. Return what each rank prints at its end."""
    lines = sorted(run_program(*words).splitlines())
    return [json.loads(line.partition(": ")[2]) for line in lines if line.startswith("rank ")]


def test_two_ranks_begin_as_one_does_and_the_same_call_goes_on_elsewhere(tmp_path: Path) -> None:
    (whole,) = run(SCRIPT, str(tmp_path), "whole", "12")
    first, second = run(*STANDALONE, SCRIPT, str(tmp_path), "half", "6")
    assert first == second
    assert (first["status"], first["step"]) == ("finished", 6)

    with pytest.raises(RunConflict, match=r"model\.args\.parameters"):
        train(str(tmp_path), "half", 12, hidden=9)
    results: list[steadfast.Result] = []
    counts = Counts()
    resume = partial(train, str(tmp_path), "half", 12, hooks=[counts])
    thread = threading.Thread(target=lambda: results.append(resume()))  # no signals come here
    states = generator_states()
    thread.start()
    thread.join()
    # A search for a rate draws from them between two calls.
    assert generator_states() == states
    (resumed,) = results
    assert counts.steps.item() == 12
    assert (resumed.summary["step"], resumed.summary["attempts"], resumed.summary["lost_steps"]) == (12, 2, 0)
    expected = {name: torch.tensor(values, dtype=torch.float64) for name, values in whole["weights"].items()}
    torch.testing.assert_close(trained(resumed), expected, rtol=0.0, atol=1e-10)

    again = resume()  # it has finished
    torch.testing.assert_close(trained(again), trained(resumed), rtol=0.0, atol=0.0)
    assert again.summary == resumed.summary

    with pytest.raises(RunConflict, match=r"optimizer\.lr: 0\.05 -> 0\.1\nChoose another run\.name"):
        resume(lr=0.1)
    unasked = resume(lr=0.1, return_finished=True)
    torch.testing.assert_close(trained(unasked), trained(resumed), rtol=0.0, atol=0.0)
    with pytest.raises(RunConflict, match=r"model\.args\.parameters"):
        resume(hidden=9, return_finished=True)


def generator_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()


def trained(result: steadfast.Result) -> dict[str, torch.Tensor]:
    assert isinstance(result.model, nn.Sequential)
    return dict(result.model.state_dict())


def test_what_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    words = [f"run.storage={tmp_path}"]
    with pytest.raises(UsageError, match="collate needs a dataset of samples"):
        steadfast.fit("ddp.yaml", words, collate=list)
    with pytest.raises(UsageError, match="validation_collate needs a validation dataset"):
        steadfast.fit("ddp.yaml", [*words, "data.validation={source: '*.md'}"], validation_collate=list)
    with pytest.raises(UsageError, match=r"order='reversed': must be"):
        steadfast.fit("ddp.yaml", words, order="reversed")  # type: ignore[arg-type]
    for wanted in ("2", "[2, 4]"):
        said = r"scaling\.num_workers=\[?2.*, found 1: .*torchrun --nproc-per-node 2, or"
        with pytest.raises(UsageError, match=said):
            steadfast.fit("ddp.yaml", [*words, f"scaling.num_workers={wanted}"])
    with pytest.raises(UsageError, match="overrides need a configuration file"):
        steadfast.fit(steadfast.load_config("ddp.yaml"), words)
    with pytest.raises(ConfigError, match=r"cluster\.env\.NOT_SET_ANYWHERE: is null"):
        steadfast.fit("ddp.yaml", [*words, "cluster.env={NOT_SET_ANYWHERE: null}"])
    for without_gradients in (torch.no_grad(), torch.inference_mode()):
        with without_gradients, pytest.raises(UsageError, match=r"within torch\.no_grad.*call fit outside"):
            steadfast.fit("ddp.yaml", words)
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_copied_is_one_clear_error(tmp_path: Path) -> None:
    locked, abstract = nn.Linear(1, 1), nn.Linear(1, 1, device="meta")
    locked.lock = threading.Lock()  # type: ignore[assignment]
    for model, why in ((locked, "cannot pickle '_thread.lock' object"), (abstract, "its parameters have no values")):
        with pytest.raises(UsageError, match=rf"^model: this Linear cannot be copied: {why}.*model=lambda: Linear\(\)"):
            steadfast.fit("ddp.yaml", [f"run.storage={tmp_path}"], model=model)


def test_fit_leaves_the_callers_model_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    before = copy.deepcopy(model.state_dict())
    words = [f"run.storage={tmp_path}", "run.steps=2", "batch.global_size=12", "trackers=[]", "run.report=false"]
    result = steadfast.fit("ddp.yaml", words, model=model, dataset=line(24), task=squared_error)
    torch.testing.assert_close(model.state_dict(), before, rtol=0.0, atol=0.0)
    assert all(param.grad is None for param in model.parameters())
    assert not model.training
    changed = trained(result)
    assert all(not torch.equal(changed[name], weights) for name, weights in before.items() if "weight" in name)


def test_an_order_and_functions_that_make_batches_may_be_objects(tmp_path: Path) -> None:
    trained: list[list[float]] = []  # by the check of the task before the first step too
    evaluated: list[list[float]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> steadfast.Sums:
        (trained if model.training else evaluated).append(batch.flatten().tolist())
        return steadfast.Sums(model(batch).sum(), len(batch))

    result = steadfast.fit(
        "ddp.yaml",
        [f"run.storage={tmp_path}", "run.steps=2", "batch={global_size: 4, microbatch_size: 2}", "data={kind: text}"],
        model=nn.Linear(1, 1),
        dataset=[float(index) for index in range(10)],
        collate=lambda samples: torch.tensor(samples)[:, None],
        validation_collate=lambda samples: 100 + torch.tensor(samples)[:, None],
        order=lambda seed, epoch, place, num_samples: num_samples - 1 - place,
        task=loss,
    )
    assert result.summary["status"] == "finished"
    assert trained[-4:] == [[8.0, 7.0], [6.0, 5.0], [4.0, 3.0], [2.0, 1.0]]
    assert evaluated == [[109.0]]


def config_of(storage: str, **sections: Any) -> steadfast.Config:
    return steadfast.Config.model_validate(
        {
            "run": {"name": "x", "storage": storage, "steps": 8, "report": False},
            "batch": {"global_size": 12, "microbatch_size": 4},
            "checkpoint": {"every": "4 steps"},
            "trackers": [],
            **sections,
        }
    )


def fitted(config: steadfast.Config, hooks: Sequence[Any] = ()) -> steadfast.Result:
    torch.manual_seed(0)
    return steadfast.fit(config, model=nn.Linear(4, 1), dataset=line(120), task=squared_error, hooks=hooks)


@pytest.mark.parametrize(("fault", "event"), [("nan_at", "rollback"), ("oom_at", "forwards_shrunk")])
def test_fit_goes_on_after_a_bad_step_and_one_that_does_not_fit(tmp_path: Path, fault: str, event: str) -> None:
    config = config_of(str(tmp_path), faults={"inject": [{"kind": fault, "step": 6}]})
    result = fitted(config)
    assert (result.summary["status"], result.summary["step"], result.summary["attempts"]) == ("finished", 8, 2)
    assert result.model is not None
    events = [json.loads(text) for text in (tmp_path / "x/events.jsonl").read_text().splitlines()]
    names = [each["event"] for each in events]
    assert names.count("run_started") == 1
    assert names.count(event) == 1
    if event == "rollback":
        steps = [json.loads(text) for text in (tmp_path / "x/steps.jsonl").read_text().splitlines()]
        assert [each["step"] for each in steps if each.get("skipped")] == [6]


class Shows:
    """A task that shows what its model has learnt."""

    loss = staticmethod(squared_error)

    def sample(self, model: nn.Module, device: torch.device) -> str:
        return "2 + 2 is 4.01"


def test_the_sample_of_a_task_is_shown_and_kept_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = steadfast.fit(config_of(str(tmp_path)), model=nn.Linear(4, 1), dataset=line(120), task=Shows())
    assert result.summary["sample"] == "2 + 2 is 4.01"
    assert json.loads((tmp_path / "x/summary.json").read_text())["sample"] == "2 + 2 is 4.01"
    assert "sample      2 + 2 is 4.01" in capsys.readouterr().out


def test_a_run_without_ray_that_an_exception_has_ended_is_failed(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), faults={"inject": [{"kind": "fail_at", "step": 6}]})
    with pytest.raises(InjectedFault):
        fitted(config)
    assert StatusReader(RunDirectory.of(config)).read().state == "failed"
    # The same call goes on.
    assert fitted(config).summary["status"] == "finished"
    assert StatusReader(RunDirectory.of(config)).read().state == "finished"


def test_a_run_without_ray_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    config = config_of(str(tmp_path), run={"name": "x", "storage": str(tmp_path), "resume": "must"})
    with pytest.raises(RunConflict, match="holds no checkpoint"):
        fitted(config)
    assert not (tmp_path / "x").exists()


def test_fit_returns_the_model_after_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # As a cell of a notebook or Hydra may.
    result = fitted(config_of("relative"), [SimpleNamespace(on_step=lambda run: os.chdir("/"))])
    assert Path.cwd() == Path("/")
    assert (result.summary["status"], result.directory) == ("finished", str(tmp_path / "relative/x"))
    assert result.model is not None


def test_a_second_fit_at_the_same_time_is_refused_and_later_ones_train(tmp_path: Path) -> None:
    other = config_of(str(tmp_path / "other"))
    calls: list[Future[steadfast.Result]] = []

    def fit_too(run: object) -> None:
        if not calls:
            with ThreadPoolExecutor(1) as thread:
                calls.append(thread.submit(fitted, other))

    hook = SimpleNamespace(on_step=fit_too)
    assert fitted(config_of(str(tmp_path / "one")), [hook]).summary["status"] == "finished"
    with pytest.raises(UsageError, match=r"^another fit is training in this process:"):
        calls[0].result()
    assert not (tmp_path / "other").exists()
    assert fitted(other).summary["status"] == "finished"


CELLS = [
    """
import os, signal
from types import SimpleNamespace
from tests.examples.script import train
presses = iter([signal.SIGINT])  # of the button with which Jupyter interrupts a cell
press = SimpleNamespace(on_step=lambda run: [os.kill(os.getpid(), each) for each in presses])
fail = SimpleNamespace(on_step=lambda run: run.no_such_thing)
""",
    "result = train(STORAGE, 'cell', 6)",
    "train(STORAGE, 'cell', 9, hooks=[fail])",
    "result = train(STORAGE, 'cell', 9, hooks=[press])\nprint(result.summary['status'])",
    "result = train(STORAGE, 'cell', 9)\nprint(result.summary['status'], result.summary['step'], type(result.model))",
]


# The kernel has an event loop of its own, in the thread in which cells run.
def test_cells_of_a_notebook_train_after_one_another_also_after_an_exception_and_an_interrupt(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(cell) for cell in (f"STORAGE = {str(tmp_path)!r}", *CELLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": ROOT}}
    ).execute()
    _, _, first, broken, interrupted, last = notebook.cells
    assert "checkpoint at step 6" in text_of(first)
    (error,) = [output for output in broken.outputs if output.output_type == "error"]
    assert error.ename == "AttributeError"
    assert "no_such_thing" in error.evalue
    assert text_of(interrupted).endswith("stopped\n")
    assert "restored from checkpoint" in text_of(last)
    assert "finished 9 <class 'torch.nn.modules.container.Sequential'>" in text_of(last)


def text_of(cell: Any) -> str:
    """Return the output of a cell, all of which must be plain lines."""
    assert {output.output_type for output in cell.outputs} == {"stream"}, cell.outputs
    text = "".join(output.text for output in cell.outputs)
    assert not {"\r", "\x1b"} & set(text), text
    return text


def test_readme_example_trains_as_the_loop_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    # The same order of samples in both, so that the weights can be compared.
    before = before.replace("shuffle=True", "shuffle=False")
    after = after.replace("dataset=dataset,", 'dataset=dataset, order="sequential",')
    images = torch.randn(256, 4)  # an epoch of the plain loop is a whole number of steps
    dataset = TensorDataset(images, (images.sum(1) > 0).long())
    names: dict[str, Any] = {"dataset": dataset, "held_out": dataset, "DataLoader": DataLoader, "F": F, "torch": torch}
    model = nn.Linear(4, 2)
    ours = {**names, "model": copy.deepcopy(model), "__name__": "__main__"}
    exec(before, {**names, "model": model})
    exec(after, ours)
    trained = ours["result"].model
    torch.testing.assert_close(trained.weight, model.weight, rtol=1e-4, atol=1e-6)


def test_the_example_that_type_checkers_accept_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fit_example.train("mine", 5).summary["status"] == "finished"
