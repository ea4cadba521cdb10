"""States in which a loss of power may leave the files of a program: recorded, then rebuilt."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Inode:
    """A file or a folder: its bytes and names now, and those at its last sync."""

    is_folder: bool = False
    now: bytes = b""
    safe: bytes = b""
    names: "dict[str, Inode]" = field(default_factory=dict)
    safe_names: "dict[str, Inode]" = field(default_factory=dict)

    def find(self, path: Path) -> "Inode | None":
        """Return the inode of a path below this one, None if the path has been removed."""
        found: Inode | None = self
        for name in path.parts:
            found = found.names.get(name) if found else None
        return found

    def write(self, place: Path, model: str) -> None:
        """Write what a loss of power leaves; the model "all" is that of a kill."""
        if not self.is_folder:
            place.write_bytes(self._left(model))
            return
        place.mkdir()
        for name, inode in (self.safe_names if model == "strict" else self.names).items():
            inode.write(place / name, model)

    def _left(self, model: str) -> bytes:
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
        self._root = root
        self.operations = list(_read(log))

    def rebuild(self, count: int, model: str, target: Path) -> None:
        """Write to `target` what a loss of power after so many operations may leave."""
        root = Inode(is_folder=True)
        for verb, file, to, offset, data in self.operations[:count]:
            path = Path(file).relative_to(self._root)
            inode, folder = root.find(path), root.find(path.parent)
            if verb in ("mkdir", "create", "truncate"):
                assert folder is not None
                inode = folder.names.setdefault(path.name, Inode(verb == "mkdir"))
                if verb == "truncate":
                    inode.now = b""
            elif inode is None or folder is None:
                continue  # a file that was removed while open
            elif verb == "rename":
                new = Path(to).relative_to(self._root)
                onto = root.find(new.parent)
                assert onto is not None
                onto.names[new.name] = folder.names.pop(path.name)
            elif verb == "remove":
                del folder.names[path.name]
            elif verb == "sync":
                inode.safe, inode.safe_names = inode.now, dict(inode.names)
            else:  # write or resize
                after = inode.now[offset + len(data) :] if verb == "write" else b""
                inode.now = inode.now[:offset].ljust(offset, b"\0") + data + after
        shutil.rmtree(target, ignore_errors=True)
        root.write(target, model)


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
    variables = {"LD_PRELOAD": str(shim), "POWER_ROOT": str(root), "POWER_LOG": str(log), "PYTHONPATH": python_path}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    recording = Recording(log, root)
    # An operation that the shim does not know would leave other files.
    recording.rebuild(len(recording.operations), "all", scratch / "replayed")
    assert _contents(scratch / "replayed") == _contents(root)
    return recording


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
