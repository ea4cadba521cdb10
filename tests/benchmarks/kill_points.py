"""Killed at every point of a checkpoint, or the checkpoint damaged: where ours and stock Ray Train go on from.

python -m tests.benchmarks.kill_points

Stock is `torch.save` and `ray.train.report`, as Ray's guides write it, with one worker; command, controller and worker
are killed at once, as by the loss of a machine. Ours is a drill with one worker. The same command is then given again.
A row is right if the run goes on from the newest checkpoint that is whole on storage, and ends with the weights of an
undisturbed run.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from steadfast.config import Config
from steadfast.run.directory import RunDirectory
from tests.benchmarks.commands import ROOT
from tests.benchmarks.statistics import table
from tests.support import processes
from tests.support.drill import Drilled, drill
from tests.support.gang import MemberFailed
from tests.support.killing import DAMAGES, Point, kill_at, newest_whole, points, record, recorded, wait_for_each
from tests.support.small import small


class Row(NamedTuple):
    """resumed: at which step, or what happened instead. expected: the newest checkpoint that is whole on storage."""

    resumed: str
    expected: int
    right: bool

    def cells(self) -> list[str]:
        return [self.resumed, str(self.expected), "yes" if self.right else "NO"]


NUM_STEPS, KILLED_STEP = 8, 5  # of the stock loop
LIMIT_S = 300
_STAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_AutoscalingCoordinatorActor", "ray::IDLE")
_MOMENT, _FOLDER = "KILL_POINTS_MOMENT", "KILL_POINTS_FOLDER"


class Case(NamedTuple):
    """stock: the moment at which it is killed. ours: which of our points is the same."""

    name: str
    stock: str
    ours: Callable[[Point], bool]


def _is(verb: str, suffix: str, moment: str) -> Callable[[Point], bool]:
    def matches(point: Point) -> bool:
        return point.operation.verb == verb and point.operation.name.endswith(suffix) and point.moment == moment

    return matches


CASES = [
    Case("the state is half-written", "saving", _is("write", ".safetensors", "half-way")),
    Case("half of it is on storage", "uploading", _is("write", ".safetensors", "half-way")),
    Case("all of it is, not registered", "uploaded", _is("commit", "manifest.json", "before")),
    Case("the register is being written", "registering", _is("commit", "manifest.json", "half-way")),
    Case("registered", "registered", _is("delete", "manifest.json", "before")),
    Case("the oldest is half-deleted", "deleting", _is("delete", "06", "half-way")),
]


# ---- stock ----


def stock(folder: Path, moment: str) -> None:
    """The command of a user of Ray Train."""
    import ray
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    variables = {_MOMENT: moment, _FOLDER: str(folder)}
    hook = "tests.benchmarks.kill_points.prepare_to_die"
    ray.init(log_to_driver=False, runtime_env={"env_vars": variables, "worker_process_setup_hook": hook})
    TorchTrainer(
        stock_loop,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "storage"), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    ).fit()


def stock_loop(settings: dict[str, Any]) -> None:
    import ray.train
    import torch
    from ray.train import Checkpoint

    folder = Path(settings["folder"])
    torch.manual_seed(1)
    model = torch.nn.Linear(200, 200).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, source = 0, "start"
    if checkpoint := ray.train.get_checkpoint():
        source = Path(checkpoint.path).name
        with checkpoint.as_directory() as restored:
            state = torch.load(Path(restored) / "state.pt")
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    _append(folder / "resumed.jsonl", {"step": step, "source": source})
    while step < NUM_STEPS:
        inputs = torch.randn(8, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if os.environ.get(_MOMENT) and step == KILLED_STEP:  # Ray registers up to 2 s later, as if a step took longer
            _wait_until_registered(folder, step - 1)
        with tempfile.TemporaryDirectory() as temporary:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, buffer := io.BytesIO())
            _append(folder / "saved.jsonl", {"step": step, "sha256": hashlib.sha256(buffer.getvalue()).hexdigest()})
            if _due("saving", step):
                Path(temporary, "state.pt").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
                _wait_for_the_end()
            Path(temporary, "state.pt").write_bytes(buffer.getvalue())  # as torch.save does, with the bytes noted above
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(temporary))
        if _due("registered", step):
            _wait_until_registered(folder, step)
            _wait_for_the_end()
        if os.environ.get(_MOMENT) and step == KILLED_STEP:  # the controller is what stands still
            time.sleep(LIMIT_S)
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()
    _append(folder / "finished.jsonl", {"digest": digest})


def prepare_to_die() -> None:
    """In every process that Ray starts: those through which a checkpoint goes stand still at the moment that is wanted,
    until all are killed."""
    moment = os.environ.get(_MOMENT)
    if not moment:
        return
    from ray.train.v2._internal.execution import storage
    from ray.train.v2._internal.execution.checkpoint import checkpoint_manager

    copy, delete = storage._pyarrow_fs_copy_files, checkpoint_manager.delete_fs_path
    write = checkpoint_manager.CheckpointManager._write_state_to_storage
    numbers = {"copy": 0, "write": 0}

    def dying_copy(source: str, destination: str, *args: Any, **kwargs: Any) -> None:
        numbers["copy"] += 1
        if moment == "uploading" and numbers["copy"] == KILLED_STEP:
            data = Path(source, "state.pt").read_bytes()
            Path(destination, "state.pt").write_bytes(data[: len(data) // 2])
            _wait_for_the_end()
        copy(source, destination, *args, **kwargs)
        if moment == "uploaded" and numbers["copy"] == KILLED_STEP:
            _wait_for_the_end()

    def dying_write(self: Any) -> None:
        numbers["write"] += 1
        write(self)
        if moment == "registering" and numbers["write"] == KILLED_STEP:
            path = Path(self._storage_context.checkpoint_manager_snapshot_path)
            os.truncate(path, 0)  # as between the opening of the stream, which empties the file, and the write
            _wait_for_the_end()

    def dying_delete(fs: Any, fs_path: str) -> None:
        if moment == "deleting" and numbers["write"] == KILLED_STEP:
            next(Path(fs_path).iterdir()).unlink()
            _wait_for_the_end()
        delete(fs=fs, fs_path=fs_path)

    storage._pyarrow_fs_copy_files = dying_copy
    checkpoint_manager.delete_fs_path = dying_delete
    checkpoint_manager.CheckpointManager._write_state_to_storage = dying_write


def _due(moment: str, step: int) -> bool:
    return os.environ.get(_MOMENT) == moment and step == KILLED_STEP


def _wait_for_the_end() -> None:
    Path(os.environ[_FOLDER], "now").touch()
    time.sleep(LIMIT_S)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _wait_until_registered(folder: Path, step: int) -> None:
    register = folder / "storage/run/checkpoint_manager_snapshot.json"
    while True:
        with contextlib.suppress(OSError, ValueError):  # Ray replaces it in place
            if step in [each["metrics"]["step"] for each in json.loads(register.read_text())["checkpoint_results"]]:
                return
        time.sleep(0.05)


class Stock:
    """The command at work on a cluster that outlives it."""

    def __init__(self, folder: Path, moment: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._now, self._log = folder / "now", folder / f"output-{moment or 'again'}.txt"
        command = [sys.executable, "-m", "tests.benchmarks.kill_points", str(folder), moment]
        with self._log.open("w") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def wait(self) -> str:
        """How it failed, if it did."""
        try:
            code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            self._kill()
        errors = [line.strip() for line in self._log.read_text().splitlines() if "Error" in line.partition(":")[0]]
        return f"crashed: {errors[-1].partition(':')[0].rpartition('.')[2] if errors else code}" if code else ""

    def kill_when_ready(self) -> None:
        until_s = time.monotonic() + LIMIT_S
        while not self._now.exists():
            late = self._process.poll() is not None or time.monotonic() > until_s
            assert not late, f"the moment never came:\n{self._log.read_text()[-2000:]}"
            time.sleep(0.05)
        self._kill()

    def _kill(self) -> None:
        """The command, the controller and the worker, at once; the agents of the cluster stay."""
        workers = {pid: title for pid, title in processes.descendants().items() if "ray::" in title}
        for pid in (self._process.pid, *(pid for pid, title in workers.items() if not set(_STAY) & set(title.split()))):
            processes.send(pid, signal.SIGKILL)
        self._process.wait()


def resume_stock(folder: Path, digest: str) -> Row:
    expected = newest_of_stock(folder)
    (folder / "resumed.jsonl").unlink()
    failure = Stock(folder).wait()
    if failure:
        return Row(failure, expected, False)
    resumed = _lines(folder / "resumed.jsonl")[0]["step"]
    same = _lines(folder / "finished.jsonl")[0]["digest"] == digest
    return Row(f"{resumed}" + ("" if same else ", other weights"), expected, same and resumed == expected)


def newest_of_stock(folder: Path) -> int:
    """The step of the newest file that is what was saved, registered or not."""
    saved = {each["sha256"]: each["step"] for each in _lines(folder / "saved.jsonl")}
    files = (folder / "storage/run").glob("checkpoint_*/state.pt")
    return max((saved.get(hashlib.sha256(path.read_bytes()).hexdigest(), 0) for path in files), default=0)


# ---- ours ----


class Ours:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed = drill(self._config("undisturbed"), worlds=[1])
        drill(self._config("stopped"), worlds=[1], stop_after=7, patch=wait_for_each)
        log = folder / "operations.jsonl"
        drill(self._copy("honest"), worlds=[1], patch=partial(record, log))
        self._points = list(points(recorded(log)))

    def kill(self, number: int, case: Case) -> Row:
        config = self._copy(f"kill-{number}")
        point = next(filter(case.ours, self._points))
        try:
            drill(config, worlds=[1], patch=partial(kill_at, point))
        except MemberFailed:
            return self._resume(config)
        raise AssertionError(f"{case.name}: nothing was killed")

    def damage(self, damage: Callable[[Path], None], name: str) -> Row:
        config = self._copy(f"{damage.__name__}-{name}")
        damage(next((_checkpoints(config) / "step-00000008").glob(name)))
        return self._resume(config)

    def _resume(self, config: Config) -> Row:
        expected = newest_whole(_checkpoints(config))
        run = drill(config, worlds=[1])
        resumed = run.told("attempt_started", "step")[-1]
        return Row(str(resumed), expected, resumed == expected and _same(run, self._undisturbed))

    def _copy(self, name: str) -> Config:
        shutil.copytree(self._folder / "stopped", self._folder / name)
        return self._config(name)

    def _config(self, name: str) -> Config:
        return small(self._folder / name, "run.steps=12", "checkpoint.every=2 steps", "checkpoint.keep_last=2")


def _checkpoints(config: Config) -> Path:
    return Path(RunDirectory.of(config).uri) / "checkpoints"


def _same(one: Drilled, other: Drilled) -> bool:
    return all(one.summary[f"{part}_sha256"] == other.summary[f"{part}_sha256"] for part in ("model", "optimizer"))


def compare(folder: Path) -> list[list[str]]:
    ours = Ours(folder / "ours")
    undisturbed = folder / "undisturbed"
    failure = Stock(undisturbed).wait()
    assert not failure, failure
    digest = _lines(undisturbed / "finished.jsonl")[0]["digest"]
    rows = [["point", "ours: resumed at", "newest whole", "right", "stock: resumed at", "newest whole", "right"]]

    def add(name: str, mine: Row, theirs: Row) -> None:
        rows.append([name, *mine.cells(), *theirs.cells()])
        print(rows[-1], flush=True)

    for number, case in enumerate(CASES):
        path = folder / f"stock-{case.stock}"
        Stock(path, case.stock).kill_when_ready()
        if case.stock == "registered":
            shutil.copytree(path, folder / "killed", ignore=shutil.ignore_patterns("now", ".*"))
        add(case.name, ours.kill(number, case), resume_stock(path, digest))
    newest = max((folder / "killed/storage/run").glob("checkpoint_*/state.pt")).parent.name
    for mine, theirs in (
        ("*.safetensors", f"{newest}/state.pt"),
        ("manifest.json", "checkpoint_manager_snapshot.json"),
    ):
        for damage in DAMAGES:
            path = folder / f"stock-{damage.__name__}-{mine.strip('*.')}"
            shutil.copytree(folder / "killed", path)
            damage(path / "storage/run" / theirs)
            name = f"{damage.__name__}: {'the state' if '*' in mine else 'the manifest, the register'}"
            add(name, ours.damage(damage, mine), resume_stock(path, digest))
    return rows


def main() -> None:
    if len(sys.argv) > 1:
        stock(Path(sys.argv[1]), sys.argv[2])
        return
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="points-") as folder:
        os.environ |= {
            "HOME": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        os.environ["RAY_ADDRESS"] = cluster.address
        try:
            print(table(compare(Path(folder))))
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
