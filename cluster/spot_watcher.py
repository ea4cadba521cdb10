"""Polls the cloud's notice of preemption on this machine, and drains the machine's Ray node with the real deadline.

    python cluster/spot_watcher.py                              # on every node, beside `ray start`
    python cluster/spot_watcher.py --drain-until 1767225600     # by hand: drain this node now, ask no cloud

Until there is a notice it needs only the standard library; Ray is loaded then, in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection

LINK_LOCAL = "169.254.169.254"  # AWS, GCP and Azure alike
REQUEST_TIMEOUT_S = 2.0
DRAIN_TIMEOUT_S = 10.0  # GCP gives 30 s: room for a second try

# A rebalance recommendation names no deadline and may arrive together with the interruption notice, which is given
# two minutes ahead: no interruption comes sooner.
AWS_REBALANCE_NOTICE_S = 120.0
GCP_NOTICE_S = 30.0

log = logging.getLogger("spot watcher")


@dataclass(frozen=True)
class Notice:
    """Says that this machine goes away at `deadline_s` (Unix time)."""

    deadline_s: float
    reason: str


Ask = Callable[[], Notice | None]  # raises whatever a wrong answer leads to
Drain = Callable[[Notice], None]  # raises unless Ray accepted


def fetch(host: str, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, str]:
    """Return status and body of an answer.

    No redirect is followed and no proxy of the environment is used: neither leads to this machine's data.
    """
    connection = HTTPConnection(host, timeout=REQUEST_TIMEOUT_S)
    connection.connect()
    # The socket's time-out is per read: a server that drips bytes would hold the watcher for ever.
    guard = threading.Timer(REQUEST_TIMEOUT_S, _shut, [connection.sock])
    guard.start()
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        guard.cancel()
        connection.close()


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed in this moment
        connected.shutdown(socket.SHUT_RDWR)


def fetch_ok(host: str, path: str, headers: dict[str, str], method: str = "GET") -> str:
    status, body = fetch(host, path, headers, method)
    if status != 200:
        raise ValueError(f"{method} {path} was answered {status}")
    return body


def unix_s(moment: datetime) -> float:
    if moment.tzinfo is None:  # would be taken for this machine's zone
        raise ValueError(f"{moment} names no time zone")
    return moment.timestamp()


class Aws:
    """Asks AWS, by IMDSv2.

    docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    def __init__(self, host: str, drain_on_rebalance: bool) -> None:
        self.host, self.drain_on_rebalance = host, drain_on_rebalance
        self.token = ""

    def __call__(self) -> Notice | None:
        if (body := self._get("spot/instance-action")) is not None:
            answer = json.loads(body)
            if answer["action"] not in ("terminate", "stop", "hibernate"):
                raise ValueError(f"unknown instance action {answer['action']!r}")
            return Notice(unix_s(datetime.fromisoformat(answer["time"])), f"AWS spot: {answer['action']}")
        if self.drain_on_rebalance and (body := self._get("events/recommendations/rebalance")) is not None:
            recommended_s = unix_s(datetime.fromisoformat(json.loads(body)["noticeTime"]))
            return Notice(recommended_s + AWS_REBALANCE_NOTICE_S, "AWS spot: rebalance recommended")
        return None

    def _get(self, item: str) -> str | None:
        """Return an item of the metadata, or None where there is no such item (404)."""
        status, body = self._get_with_token(item)
        if status == 401:  # the token has expired
            self.token = ""
            status, body = self._get_with_token(item)
        if status not in (200, 404):
            raise ValueError(f"{item} was answered {status}")
        return body if status == 200 else None

    def _get_with_token(self, item: str) -> tuple[int, str]:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}  # the longest that is allowed
        self.token = self.token or fetch_ok(self.host, "/latest/api/token", lifetime, "PUT")
        return fetch(self.host, f"/latest/meta-data/{item}", {"X-aws-ec2-metadata-token": self.token})


def gcp(host: str, now: Callable[[], float] = time.time) -> Notice | None:
    """Ask Google, which says that a machine goes and not when: cloud.google.com/compute/docs/instances/preemptible.

    Host maintenance is left out: its notice is an hour with GPUs and a minute without, and Ray takes no drain back.
    """
    answer = fetch_ok(host, "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip()
    if answer not in ("TRUE", "FALSE"):
        raise ValueError(f"preempted: {answer[:40]!r}")
    return Notice(now() + GCP_NOTICE_S, "GCP: preempted") if answer == "TRUE" else None


def azure(host: str, now: Callable[[], float] = time.time) -> Notice | None:
    """Ask Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events.

    Events of other machines of a scale set are in the answer too. The first answer may take Azure two minutes, in which
    the watcher sees time-outs.
    """
    item = functools.partial(fetch_ok, host, headers={"Metadata": "true"})
    events = json.loads(item("/metadata/scheduledevents?api-version=2020-07-01"))["Events"]
    events = [event for event in events if event["EventType"] in ("Preempt", "Terminate")]
    if not events:
        return None
    name = item("/metadata/instance/compute/name?api-version=2021-02-01&format=text").strip()
    mine = [event for event in events if name in event["Resources"]]
    notices = [Notice(_not_before_s(event, now), f"Azure: {event['EventType']}") for event in mine]
    return min(notices, key=lambda notice: notice.deadline_s, default=None)


def _not_before_s(event: dict[str, str], now: Callable[[], float]) -> float:
    if event["EventStatus"] == "Started":  # NotBefore is blank from then on
        return now()
    return unix_s(parsedate_to_datetime(event["NotBefore"]))


class FirstToAnswer:
    """Takes the cloud that first gives a sensible answer for this machine's.

    All are asked anew until one does: the metadata service may come up after the watcher.
    """

    def __init__(self, clouds: dict[str, Ask]) -> None:
        self.clouds = clouds
        self.found: Ask | None = None

    def __call__(self) -> Notice | None:
        return self.found() if self.found else self._find()

    def _find(self) -> Notice | None:
        for name, ask in self.clouds.items():
            with contextlib.suppress(Exception):
                notice = ask()
                self.found = ask
                log.info("the cloud is %s", name)
                return notice
        raise ValueError(f"none of {', '.join(self.clouds)} answers")


class Watcher:
    """Drains the node once for each notice, and tries again until Ray accepts.

    A sooner deadline in a later answer drains again; a later one does not, so that a notice without a moment of its own
    counts from when it was first seen.
    """

    def __init__(self, ask: Ask, drain: Drain) -> None:
        self.ask, self.drain = ask, drain
        self.notice: Notice | None = None
        self.accepted = False
        self.told: dict[str, str] = {}

    def poll(self) -> None:
        """Ask once. Never raises: whatever the metadata service or Ray answers, the next poll asks again."""
        try:
            self._take(self.ask())
        except Exception as error:
            self._tell("cloud", "wrong", f"no sensible answer from the metadata service: {_in_short(error)}")
        if self.notice and not self.accepted:
            self._drain(self.notice)

    def _take(self, notice: Notice | None) -> None:
        if notice is None:
            self._tell("cloud", "none", "no notice of preemption")
            self.notice, self.accepted = None, False
        elif self.notice is None or notice.deadline_s < self.notice.deadline_s - 1:
            self.notice, self.accepted = notice, False
        if notice:
            self._tell("cloud", notice.reason, f"{notice.reason}, {notice.deadline_s - time.time():.1f} s from now")

    def _drain(self, notice: Notice) -> None:
        try:
            self.drain(notice)
        except Exception as error:
            self._tell("ray", "refused", f"the node could not be drained, trying again: {_in_short(error)}")
        else:
            self.accepted = True
            self._tell("ray", str(notice), f"Ray drains the node until {notice.deadline_s:.1f}")

    def _tell(self, who: str, state: str, message: str) -> None:
        if self.told.get(who) != state:
            log.info(message)
        self.told[who] = state


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def drain_in_child(notice: Notice, address: str, node_ip: str) -> None:
    """Drain this machine's node from another process.

    Ray's client ends its own process when the head does not answer, and takes 50 MB. The deadline is given as a moment,
    since `ray drain-node` takes whole seconds, and counts them from when Ray is loaded.
    """
    options = [f"--drain-until={notice.deadline_s}", f"--reason={notice.reason}"]
    command = [sys.executable, __file__, *options, f"--address={address}", f"--node-ip={node_ip}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_TIMEOUT_S)
    if ended.returncode != 0:
        raise RuntimeError((ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1])


def drain_now(deadline_s: float, reason: str, address: str, node_ip: str) -> None:
    """Drain every living Ray node at this machine's address: the machine goes with all of them."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die, get_node_ip_address
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    gcs_address = canonicalize_bootstrap_address_or_die(address)
    node_ip = node_ip or get_node_ip_address(gcs_address)
    client = ray._raylet.GcsClient(address=gcs_address)
    # The dead as well would be accepted, and nothing drained.
    living = client.get_all_node_info(timeout=DRAIN_TIMEOUT_S / 2, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
    here = [node_id.hex() for node_id, node in living.items() if node.node_manager_address == node_ip]
    if not here:
        raise RuntimeError(f"no living Ray node at {node_ip} in the cluster of {gcs_address}")
    why = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    for node_id in here:
        accepted, refusal = client.drain_node(node_id, why, reason, int(deadline_s * 1000), DRAIN_TIMEOUT_S / 2)
        if not accepted:
            raise RuntimeError(f"Ray refused to drain {node_id}: {refusal}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rebalance = "AWS: take a rebalance recommendation for a notice of two minutes; Ray cannot take a drain back"
    parser.add_argument("--cloud", choices=["auto", "aws", "gcp", "azure"], default="auto")
    parser.add_argument("--host", default=LINK_LOCAL, help="HOST[:PORT] of the metadata service")
    parser.add_argument("--poll-interval-s", type=float, default=1.0)
    parser.add_argument("--drain-on-rebalance", action="store_true", help=rebalance)
    parser.add_argument("--address", default="auto", help="the Ray cluster; auto is the one this machine belongs to")
    parser.add_argument("--node-ip", default="", help="of the Ray node on this machine, when Ray would guess another")
    parser.add_argument("--drain-until", type=float, metavar="UNIX_S", help="drain this node now, and end")
    parser.add_argument("--reason", default="by hand", help="with --drain-until: what Ray is told")
    return parser.parse_args()


def main() -> None:
    given = parse()
    if given.drain_until is not None:
        drain_now(given.drain_until, given.reason, given.address, given.node_ip)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    clouds: dict[str, Ask] = {
        "aws": Aws(given.host, given.drain_on_rebalance),
        "gcp": functools.partial(gcp, given.host),
        "azure": functools.partial(azure, given.host),
    }
    ask = FirstToAnswer(clouds) if given.cloud == "auto" else clouds[given.cloud]
    watcher = Watcher(ask, functools.partial(drain_in_child, address=given.address, node_ip=given.node_ip))
    while True:
        watcher.poll()
        time.sleep(given.poll_interval_s)


if __name__ == "__main__":
    main()
