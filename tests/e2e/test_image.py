"""The steps of `cluster/Dockerfile`, by a shell in a clean root and, where there is one, by a container engine."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.lab.hosts import ROOT, missing
from tests.e2e.user import copy_project
from tests.support.command import SMALL

DOCKERFILE = ROOT / "cluster" / "Dockerfile"
TRAIN = ["python", "main.py", "--config", "ddp.yaml", *SMALL, "scaling.num_workers=1", "run.steps=1"]
UNWANTED = (".git/config", ".venv/bin/python", "runs/ddp/owner.key", "app/steadfast/__pycache__/cli.pyc")

# This machine's root, less the project, /root and /tmp, below a layer that is thrown away.
CLEAN_ROOT = """
set -e
mount -t tmpfs layers {layers}
mkdir {layers}/upper {layers}/work {layers}/root
mount -t overlay root -o lowerdir=/,upperdir={layers}/upper,workdir={layers}/work {layers}/root
cd {layers}/root
for folder in /root /tmp /run {project}; do
  if [ -d ".$folder" ]; then mount -t tmpfs -o mode=1777 clean ".$folder"; fi
done
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs -o size=2g,mode=1777 shm dev/shm
for folder in {kept}; do mkdir -p ".$folder"; mount --bind "$folder" ".$folder"; done
mkdir context
mount --bind {context} context
echo 'Acquire::Retries "5";' > etc/apt/apt.conf.d/99retries
cat > usr/local/bin/uv << 'END'
{uv}
END
chmod +x usr/local/bin/uv
exec env -i HOME=/root PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot . bash -exc {steps}
"""
# uv itself would load a Python and gigabytes of torch. Here the packages are those of this Python: pip builds the
# project from what has been copied by then, and fails if they do not meet one of its requirements.
UV = """#!/usr/bin/env bash
set -e
place=${{@: -1}}
case "$1 $2" in
  "venv --seed")
    {python} -m venv --without-pip "$place"
    printf '%s\\n' {packages} > "$(echo "$place"/lib/python*/site-packages)/packages.pth" ;;
  "pip install")
    "$4/bin/python" -m pip install --quiet --no-index --no-build-isolation "${{@:5}}" ;;
esac
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """The folder that is given to the build: the project, less what .dockerignore names."""
    if shutil.which("rsync") is None:
        pytest.skip("copying the project needs rsync")
    folder = tmp_path / "context"
    copy_project(folder)
    for name in UNWANTED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        for path in [] if pattern.startswith("#") else list(folder.glob(pattern)):
            shutil.rmtree(path)
    return folder


@pytest.mark.timeout(300)
def test_the_steps_of_the_dockerfile_make_a_clean_root_train(context: Path, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    uv = UV.format(python=os.path.realpath(sys.executable), packages=shlex.join(packages))
    unwanted = [f"test ! -e {name}" for name in UNWANTED]
    (tmp_path / "layers").mkdir()
    script = CLEAN_ROOT.format(
        layers=shlex.quote(str(tmp_path / "layers")),
        context=shlex.quote(str(context)),
        project=shlex.quote(str(ROOT)),
        kept=shlex.join([sys.base_prefix, *packages]),
        uv=uv,
        steps=shlex.quote("\n".join([*steps(), *unwanted, shlex.join(TRAIN)])),
    )
    command = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "bash", "-c", script]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "finished    1 step," in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_container_engine_builds_the_image_which_trains(context: Path) -> None:
    engine = next((each for each in ("docker", "podman") if is_there(each)), None)
    if engine is None:
        pytest.skip("no container engine")
    file = str(context / DOCKERFILE.relative_to(ROOT))
    subprocess.run([engine, "build", "--quiet", "-f", file, "-t", "steadfast-test", str(context)], check=True)
    subprocess.run([engine, "run", "--rm", "--shm-size=2g", "steadfast-test", *TRAIN], check=True)


def is_there(engine: str) -> bool:
    """Return whether a container engine is installed and answers."""
    if shutil.which(engine) is None:
        return False
    return subprocess.run([engine, "info"], capture_output=True, check=False).returncode == 0


def steps() -> Iterator[str]:
    """Yield the instructions of the Dockerfile as commands of a shell."""
    lines = DOCKERFILE.read_text().replace("\\\n", "").splitlines()
    for line in lines:
        name, _, rest = line.partition(" ")
        match name:
            case "#" | "FROM":
                continue
            case "RUN":
                yield f"sh -c {shlex.quote(rest)}"
            case "WORKDIR":
                yield f"mkdir -p {rest}; cd {rest}"
            case "ENV":
                yield f"export {rest}"
            case "COPY":
                *sources, target = rest.split()
                yield f"mkdir -p {target}"
                for source in sources:  # of a folder the content is copied
                    content = f"/context/{source}/." if (ROOT / source).is_dir() else f"/context/{source}"
                    yield f"cp -r {content} {target}"
            case _:
                raise AssertionError(f"{name}: not known to this test")
