"""`cluster.pip`: packages for the workers of a run, on nodes that come later too."""

# Not by the `pip` of Ray's runtime environments: where a node's Python lies in a virtual environment, Ray copies all of
# it, torch and CUDA included, each time that a package has changed.
import fcntl
import hashlib
import importlib.util
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.errors import ConfigError, Problem, UsageError

_LAYERS = Path("~/.cache/steadfast/packages")
_SHOWN_LINES = 20  # of pip's, where it fails


def check_packages(entries: Sequence[str], here: Path) -> None:
    """Check that what lies in the working directory `here` goes to the nodes with it. Raises ConfigError."""
    for index, entry in enumerate(entries):
        path = (here / entry).resolve()
        why = ""
        if not _is_path(entry):
            continue
        if not path.exists() or not path.is_relative_to(here):
            why = "is not in the working directory, which is what the nodes get"
        elif _is_ignored(path):
            why = "is ignored by git, and what is ignored does not go to the nodes. Move it elsewhere"
        if why:
            raise ConfigError([Problem("", f"cluster.pip.{index}", f"{entry} {why}")])


def install_packages(entries: Sequence[str], here: Path, layers: Path = _LAYERS) -> None:
    """Let this process import packages, which are installed if no worker of this node has done so.

    They lie in a layer above the node's own, which are neither copied nor changed.

    Args:
        here: the working directory, to which paths are relative.

    Raises:
        UsageError: pip fails.
    """
    if not entries:
        return
    layer = layers.expanduser() / _digest(entries, here)
    layer.mkdir(parents=True, exist_ok=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(layer / "venv")}))
    done = layer / "done"
    with (layer / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # all workers of a node come at once
        if not done.exists():
            _install(entries, here, layer / "venv", packages)
            done.touch()
    # Before those of the node, and behind the working directory.
    places = [index for index, place in enumerate(sys.path) if place.endswith("-packages")]
    sys.path.insert(min(places, default=len(sys.path)), str(packages))
    importlib.invalidate_caches()


def _install(entries: Sequence[str], here: Path, folder: Path, packages: Path) -> None:
    # A node's own pip will do; that of `uv venv` has none.
    venv.create(folder, clear=True, symlinks=True, with_pip=importlib.util.find_spec("pip") is None)
    # By these, pip takes what the node has for installed, and does not change it.
    beneath = [place for place in sys.path if place.endswith("-packages")]
    (packages / "node.pth").write_text("\n".join(beneath))
    words: list[str] = []
    for entry in entries:
        words += ["-r", entry] if entry.endswith(".txt") else [entry]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *words]
    done = subprocess.run(pip, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
        raise UsageError(f"cluster.pip cannot be installed on {socket.gethostname()}:\n{said}")


def _is_path(entry: str) -> bool:
    looks_so = entry.endswith((".txt", ".whl", ".tar.gz")) or "/" in entry
    return looks_so and "://" not in entry and not entry.startswith("-")


def _is_ignored(path: Path) -> bool:
    command = ["git", "-C", str(path.parent), "check-ignore", "-q", str(path)]
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:  # there is no git here
        return False


def _digest(entries: Sequence[str], here: Path) -> str:
    """Return what changes with the packages: with what lies in the working directory, also by its contents."""
    digest = hashlib.sha256(f"{sys.executable}\0{sys.version}".encode())
    for entry in entries:
        digest.update(f"\0{entry}".encode())
        if _is_path(entry):
            for file in _files_below(here / entry):
                digest.update(f"\0{file.relative_to(here)}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file
