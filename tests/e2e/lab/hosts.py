"""Hosts in namespaces: each has its own address, name, processes, /root, /tmp, /run, /dev/shm, /mnt and sshd.

Their switch is a namespace too: whatever address is asked for, nothing leaves the lab. Needs root, and Debian's
openssh-server, rsync and iproute2. 198.18.0.0/15 is the range for benchmarks (RFC 2544): neither private nor public.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "sf-"
_SWITCH = f"{_PREFIX}switch"
_NETWORK = "198.18.0"
_BOOT_S = 10.0
INSTALL = "apt-get install openssh-server rsync iproute2"
_TOOLS = ("ip", "nsenter", "unshare", "rsync", "ssh", "/usr/sbin/sshd")
_BIN = Path(sys.executable).parent  # of the virtual environment, which all hosts share
ROOT = Path(__file__).parents[3]
STATE = Path("/var/tmp/steadfast-lab")
_SETTINGS = {"HOME": "/root", "USER": "root", "TERM": "xterm", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def missing() -> str | None:
    """Why no lab can be had here; None if one can."""
    if os.geteuid() != 0:
        return "a lab of hosts needs root"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"a lab of hosts needs {', '.join(lacking)}: {INSTALL}" if lacking else None


@dataclass
class Lab:
    """Ended by `close`, which is also what a new one begins with: a lab that was killed leaves nothing behind.

    addresses: of the hosts that have been added, whether they are powered or not.
    """

    addresses: dict[str, str] = field(default_factory=dict)
    _powered: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: list[subprocess.Popen[str]] = field(default_factory=list)  # they end with their hosts at the latest

    def __post_init__(self) -> None:
        sweep()
        self.storage.mkdir(parents=True)
        for key in ("id", "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(STATE / key))
        _run("ip", "netns", "add", _SWITCH)
        for words in ("set lo up", "add br0 type bridge stp_state 0 forward_delay 0", "set br0 up"):
            _run("ip", "-n", _SWITCH, "link", *words.split())

    def add(self, name: str, number: int, storage: bool = True, keys: tuple[str, ...] = ()) -> None:
        """A new host with address `number`.

        Args:
            storage: whether it has the shared storage at /mnt/shared.
            keys: more public keys that it lets in.
        """
        self.addresses[name] = f"{_NETWORK}.{number}"
        home = self.home(name)
        (home / ".ssh").mkdir(parents=True)
        own = (STATE / "id.pub").read_text()
        (home / ".ssh" / "authorized_keys").write_text("\n".join([own.strip(), *keys, ""]))
        (home / ".bashrc").write_text(f"export PATH={_BIN}:$PATH RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1\n")
        (home / ".profile").write_text(". ~/.bashrc\n")
        if storage:
            (STATE / name / "has_storage").touch()
        self.power_on(name)

    def home(self, name: str) -> Path:
        """Its /root, seen from outside."""
        return STATE / name / "root"

    @property
    def storage(self) -> Path:
        """/mnt/shared of the hosts, seen from outside."""
        return STATE / "storage"

    def give_key(self, name: str) -> None:
        """Lets a host into all others: ~/.ssh/id_lab."""
        shutil.copy(STATE / "id", self.home(name) / ".ssh" / "id_lab")
        (self.home(name) / ".ssh" / "id_lab").chmod(0o600)

    def power_on(self, name: str) -> None:
        space, port = f"{_PREFIX}{name}", _port(name)
        _run("ip", "netns", "add", space)
        _run("ip", "-n", _SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "-n", _SWITCH, "link", "set", port, "master", "br0")
        _run("ip", "-n", _SWITCH, "link", "set", port, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        self.give_address(name, self.addresses[name])
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        # By it programs learn which address is theirs, and it leads to the other hosts only.
        _run("ip", "-n", space, "route", "add", "default", "dev", "eth0")
        own = ("--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
        script = shutil.copy(Path(__file__).with_name("host.sh"), STATE)  # from where the host still sees it
        init = ("bash", script, name, str(STATE), str(ROOT), str(_BIN.parent), sys.base_prefix)
        with (STATE / name / "init.log").open("ab") as log:
            command = ["ip", "netns", "exec", space, "unshare", *own, *init]
            self._powered[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (STATE / name / "pid").write_text(str(self._powered[name].pid))
        self._await_sshd(name)

    def give_address(self, name: str, address: str) -> None:
        """One more, for as long as the host has power."""
        _run("ip", "-n", f"{_PREFIX}{name}", "addr", "add", f"{address}/15", "dev", "eth0")

    def power_off(self, name: str) -> None:
        """Every process of the host ends at once; its disk stays."""
        process = self._powered.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()
            _unplug(name)

    def cut(self, name: str) -> None:
        """Its network cable is out: nothing is refused, nothing arrives."""
        _run("ip", "-n", _SWITCH, "link", "set", _port(name), "down")

    def heal(self, name: str) -> None:
        _run("ip", "-n", _SWITCH, "link", "set", _port(name), "up")

    def narrow(self, name: str, mbit_per_s: int) -> None:
        """Its network card has that speed in both directions, for as long as the host has power."""
        shape = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "400ms")
        for space, interface in ((f"{_PREFIX}{name}", "eth0"), (_SWITCH, _port(name))):
            _run("tc", "-n", space, "qdisc", "replace", "dev", interface, "root", *shape)

    def start(
        self,
        name: str,
        command: str,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        /,
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Start a shell command typed on a host itself, in its /root; its errors go where its output goes."""
        process = subprocess.Popen(
            [*typing_at(name), command],
            env=_SETTINGS | environment,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started = [*(each for each in self._started if each.poll() is None), process]
        return process

    def run(
        self, name: str, command: str, timeout_s: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command to its end; output and errors are in `stdout`."""
        process = self.start(name, command, subprocess.DEVNULL, subprocess.PIPE, **environment)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise TimeoutError(f"on {name} after {timeout_s:g} s: {command}\n{output}") from None
        return subprocess.CompletedProcess(command, process.returncode, output)

    def open_ports(self, of: str, seen_from: str) -> list[int]:
        """TCP ports of a host that a connection from another one reaches, but for its loopback's."""
        listening = self.run(of, "ss -Hltn | awk '{print $4}'").stdout.split()
        ports = sorted({int(place.rpartition(":")[2]) for place in listening})
        probe = (
            f"for p in {' '.join(map(str, ports))}; do (exec 3<>/dev/tcp/{self.addresses[of]}/$p) 2>&- && echo $p; done"
        )
        return [int(port) for port in self.run(seen_from, f"{probe}; true").stdout.split()]

    def await_end_of(self, pattern: str, hosts: Iterable[str], timeout_s: float) -> None:
        """Until no process whose command line matches is left on any of them."""
        until = time.monotonic() + timeout_s
        for host in hosts:
            while left := self.run(host, f"pgrep -af '{pattern}' | cut -c1-200").stdout:
                assert time.monotonic() < until, f"left on {host}:\n{left}"
                time.sleep(0.5)

    def close(self) -> None:
        for name in list(self._powered):
            self.power_off(name)
        for process in self._started:
            process.wait()
        sweep()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_sshd(self, name: str) -> None:
        until = time.monotonic() + _BOOT_S
        probe = ["ip", "netns", "exec", f"{_PREFIX}{name}", "bash", "-c", f"exec 3<>/dev/tcp/{self.addresses[name]}/22"]
        while subprocess.run(probe, capture_output=True, check=False).returncode:
            assert time.monotonic() < until, f"no sshd on {name}:\n{(STATE / name / 'init.log').read_text()}"
            time.sleep(0.05)


def typing_at(name: str) -> list[str]:
    """Whatever follows as one word is a shell command of a host that is powered on."""
    pid = (STATE / name / "pid").read_text()
    first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    spaces = ("--net", "--mount", "--pid", "--uts", "--ipc")
    return ["nsenter", "-t", first, *spaces, "bash", "-c", 'cd && . ~/.bashrc && eval "$1"', "-"]


def sweep() -> None:
    """Ends what a lab has left that could not end itself."""
    for file in STATE.glob("*/pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            if "host.sh" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.split()
    for space in spaces:  # also of a host that was not there yet when its lab was ended
        if space.startswith(_PREFIX):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    shutil.rmtree(STATE, ignore_errors=True)


def _unplug(name: str) -> None:
    subprocess.run(["ip", "netns", "del", f"{_PREFIX}{name}"], capture_output=True, check=False)
    subprocess.run(["ip", "-n", _SWITCH, "link", "del", _port(name)], capture_output=True, check=False)


def _port(name: str) -> str:
    return f"p-{name}"[:15]  # the longest name that Linux takes


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
