"""States in which a loss of power may leave the files of a program: recorded, then rebuilt."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support.command import ROOT

# What a file system leaves of data and names that were not synced: neither; names alone; half of the data; zeros.
MODELS = ("strict", "names", "half", "zeros")


class Operation(NamedTuple):
    verb: str
    path: str
    to: str
    offset: int
    data: bytes


@dataclass
class Inode:
    """A file or folder: its content now, and at its last sync."""

    is_folder: bool = False
    now: bytes = b""
    safe: bytes = b""

    def content(self, model: str) -> bytes:
        """Return what a loss of power leaves; the model "all" is that of a kill."""
        if model == "all":
            return self.now
        if not self.now.startswith(self.safe):
            return self.safe
        unsafe = len(self.now) - len(self.safe)
        if model == "half":
            return self.now[: len(self.safe) + unsafe // 2]
        return self.safe + bytes(unsafe if model == "zeros" else 0)


class Recording:
    """Changes of files below a folder, in their order."""

    def __init__(self, log: Path, root: Path) -> None:
        self._root = f"{root}/"
        self.operations = list(_read(log))

    def rebuild(self, count: int, model: str, target: Path) -> None:
        """Write to `target` what a loss of power after so many operations may leave."""
        now: dict[str, Inode] = {}
        safe: dict[str, Inode] = {}  # the names that have been synced
        for verb, path, to, offset, data in self.operations[:count]:
            inode = now.get(path)
            if verb == "mkdir":
                now[path] = Inode(is_folder=True)
            elif verb in ("create", "truncate"):
                inode = now.setdefault(path, Inode())
                if verb == "truncate":
                    inode.now = b""
            elif verb == "rename":
                for name in [name for name in now if name == path or name.startswith(f"{path}/")]:
                    now[to + name.removeprefix(path)] = now.pop(name)
            elif verb == "remove":
                now.pop(path, None)
            elif inode is None:
                _sync_names(path, now, safe, verb)
            elif verb == "write":
                inode.now = inode.now[:offset].ljust(offset, b"\0") + data + inode.now[offset + len(data) :]
            elif verb == "resize":
                inode.now = inode.now[:offset].ljust(offset, b"\0")
            elif inode.is_folder:
                _sync_names(path, now, safe, verb)
            else:
                inode.safe = inode.now
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path, inode in (safe if model == "strict" else now).items():
            place = target / path.removeprefix(self._root)
            if inode.is_folder:
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(inode.content(model))


def _sync_names(folder: str, now: dict[str, Inode], safe: dict[str, Inode], verb: str) -> None:
    assert verb == "sync", verb
    for path in [path for path in safe if os.path.dirname(path) == folder and path not in now]:
        del safe[path]
    safe.update((path, inode) for path, inode in now.items() if os.path.dirname(path) == folder)


def _read(log: Path) -> Iterator[Operation]:
    with log.open("rb") as file:
        while head := file.readline():
            verb, path, to, offset, size = head.decode().rstrip("\n").split("\t")
            yield Operation(verb, path, to, int(offset), file.read(int(size)))


def record(command: Sequence[str], root: Path, scratch: Path) -> Recording:
    """Run a command and record what changes below `root`, a folder that the command does not remove."""
    shim, log = scratch / "power.so", scratch / "power.log"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl", "-lpthread"], check=True)
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "app")])
    variables = {"LD_PRELOAD": str(shim), "POWER_ROOT": f"{root}/", "POWER_LOG": str(log), "PYTHONPATH": python_path}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    recording = Recording(log, root)
    # An operation that the shim does not know would leave other files.
    recording.rebuild(len(recording.operations), "all", scratch / "replayed")
    assert _contents(scratch / "replayed") == _contents(root)
    return recording


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
