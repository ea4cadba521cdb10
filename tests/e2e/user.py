"""What a user types, and where."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.lab.hosts import ROOT, Lab
from tests.support.command import SMALL, Running

# What `ddp.yaml` is changed to for machines that share two cores: small, and slow enough to act between two steps.
WORDS = [word for word in SMALL if not word.startswith(("cluster.", "scaling."))]
SLOW = "faults.inject=[{kind: slow_at, ranks: [0, 1, 2, 3], ms: 60}]"


def copy_project(to: Path) -> None:
    """Copy the project's files, as `git clone` gives them, and those that are not committed yet."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout
    copying = ["rsync", "-a", "--ignore-missing-args", "--from0", "--files-from=-", f"{ROOT}/", str(to)]
    subprocess.run(copying, input=listed, check=True)


@dataclass
class User:
    """Sits at a host, in a copy of the project at ~/steadfast or in a folder of their own.

    settings: what is in the environment besides.
    command: what trains, before the overrides.
    """

    lab: Lab
    host: str = "laptop"
    settings: dict[str, str] | None = None
    folder: str = "steadfast"
    command: tuple[str, ...] = ("python", "main.py", "--config", "ddp.yaml")

    def clone(self) -> None:
        copy_project(self.project)

    def install(self, wheel: Path) -> None:
        """Install a wheel into an environment of this host, which also has the packages that all hosts share."""
        home = self.lab.home(self.host)
        shutil.copy(wheel, home)
        packages = shlex.join(path for path in sys.path if path.endswith("site-packages"))
        steps = [
            "python -m venv --without-pip ~/venv",
            f"printf '%s\\n' {packages} > $(echo ~/venv/lib/python*/site-packages)/packages.pth",
            f"~/venv/bin/python -m pip install --quiet --no-index --no-deps --ignore-installed ~/{wheel.name}",
        ]
        done = self.lab.run(self.host, " && ".join(steps))
        assert done.returncode == 0, done.stdout
        with (home / ".bashrc").open("a") as profile:
            profile.write("export PATH=~/venv/bin:$PATH\n")

    @property
    def project(self) -> Path:
        return self.lab.home(self.host) / self.folder

    def change(self, file: str, **values: str) -> None:
        """Other values for keys of a YAML file, wherever they stand in it."""
        path = self.project / file
        text = path.read_text()
        for key, value in values.items():
            one = rf"(\b{key}: )(\[[^]]*\]|[^,}}#\n]+?)(?=\s*(?:[,}}#]|$))"
            text, count = re.subn(one, rf"\g<1>{value}", text, flags=re.MULTILINE)
            assert count, f"{file} has no {key}"
        path.write_text(text)

    def types(self, command: str, timeout_s: float = 120) -> str:
        """What the command said, which must succeed."""
        done = self.lab.run(self.host, f"cd ~/{self.folder} && {command}", timeout_s, **(self.settings or {}))
        assert done.returncode == 0, done.stdout
        return str(done.stdout)

    def trains(self, *words: str, name: str = "run") -> Running:
        """The command that trains, while it runs."""
        typed = shlex.join([*self.command, f"run.name={name}", *words])
        output = self.lab.home(self.host) / f"{name}.txt"
        process = self.lab.start(
            self.host, f"cd ~/{self.folder} && exec {typed} > ~/{output.name} 2>&1", **(self.settings or {})
        )
        return Running(process, self.lab.storage / "runs" / name, output)
