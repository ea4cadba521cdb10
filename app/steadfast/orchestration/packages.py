"""Install the packages of `cluster.pip` on each node that runs a worker.

The packages go into a layer of their own above the node's packages. Ray's runtime environments do not offer this:

- `pip` and `uv`: if the node's Python is in a virtual environment, Ray clones all of it, including torch and CUDA, for
  each list of packages and in each Ray session. The cache does not follow local folders either: the key of `pip`
  ignores their contents, and the key of `uv` changes with every file of the working directory.
- `py_executable` with `uv run --with`: uv resolves dependencies without regard to the node's packages, so a package
  that requires torch brings a second torch, or fails offline.
"""

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

from steadfast.errors import ConfigError, Problem, UsageError

_LAYERS = Path("~/.cache/steadfast/packages")
_SHOWN_LINES = 20  # lines of pip's output in an error


def check_packages(entries: Sequence[str], here: Path) -> None:
    """Check that Ray copies local packages to the nodes. Raises ConfigError.

    Args:
        entries: the value of `cluster.pip`.
        here: the working directory, which Ray copies to the nodes.
    """
    for index, entry in enumerate(entries):
        if not _is_path(entry):
            continue
        path = (here / entry).resolve()
        why = ""
        if not path.exists() or not path.is_relative_to(here):
            why = "is not in the working directory, and only that directory is copied to the nodes"
        elif _is_ignored(path):
            why = "is ignored by git, and ignored files are not copied to the nodes. Move it elsewhere"
        if why:
            raise ConfigError([Problem("", f"cluster.pip.{index}", f"{entry} {why}")])


def install_packages(entries: Sequence[str], here: Path, layers: Path = _LAYERS) -> None:
    """Make packages importable in this process.

    The first worker of a node installs the packages into a layer above the node's own packages. The node's own packages
    are neither copied nor changed.

    Args:
        entries: the value of `cluster.pip`.
        here: the working directory, to which paths are relative.
        layers: folder of all layers of this node.

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
        fcntl.flock(lock, fcntl.LOCK_EX)  # all workers of a node start at the same time
        # The mark is written last, so that a layer whose installation was interrupted is installed anew.
        if not done.exists():
            _install(entries, here, layer / "venv", packages)
            done.touch()
    # The layer comes before the node's own packages, and after the working directory.
    places = [index for index, place in enumerate(sys.path) if place.endswith("-packages")]
    sys.path.insert(min(places, default=len(sys.path)), str(packages))
    # Finders remember the contents of folders, and the layer is newer than what they remember.
    importlib.invalidate_caches()


def _install(entries: Sequence[str], here: Path, folder: Path, packages: Path) -> None:
    # The node's own pip is used if it exists. An environment of `uv venv` has no pip.
    venv.create(folder, clear=True, symlinks=True, with_pip=importlib.util.find_spec("pip") is None)
    # With these paths, pip finds the node's packages and does not install them again.
    beneath = [place for place in sys.path if place.endswith("-packages")]
    (packages / "node.pth").write_text("\n".join(beneath))
    words: list[str] = []
    for entry in entries:
        if entry.endswith(".txt"):
            words.append("-r")
        words.append(entry)
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
    except OSError:  # git is not installed
        return False


def _digest(entries: Sequence[str], here: Path) -> str:
    """Return a digest of the packages, which names their layer.

    The digest includes the contents of local files, so that a changed package gets a new layer.
    """
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
