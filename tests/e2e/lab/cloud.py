"""A cloud on one machine: moto answers EC2's and IAM's API, and each instance it runs is a host of the lab."""

import json
import shlex
import subprocess
import threading
from dataclasses import dataclass
from typing import Any

from tests.e2e.lab.hosts import Lab

_API, _PORT = "api", 5555
_REGION, _ZONE = "us-west-2", "us-west-2a"
_POLL_S = 1.0
_GONE = ("shutting-down", "terminated", "stopping", "stopped")
_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": _REGION}

# moto draws public addresses from all over the internet; here they are the lab's.
_SERVER = f"""
import itertools, moto.server
from moto.ec2.models import elastic_network_interfaces
numbers = itertools.count(1)
elastic_network_interfaces.random_public_ip = lambda: f"198.19.0.{{next(numbers)}}"
moto.server.main(["-H", "0.0.0.0", "-p", "{_PORT}"])
"""
_CLIENT = """
import boto3, json, sys
from botocore.config import Config
ec2 = boto3.client("ec2", config=Config(read_timeout=60, retries={"mode": "standard", "max_attempts": 10}))
for line in sys.stdin:
    verb, arguments = json.loads(line)
    print(json.dumps(getattr(ec2, verb)(**arguments), default=str), flush=True)
"""


@dataclass(frozen=True)
class Instance:
    id: str
    address: str
    public_address: str
    state: str
    type: str
    is_spot: bool
    key: str
    tags: dict[str, str]

    @property
    def host(self) -> str:
        return f"i{self.id[-7:]}"


class Cloud:
    """Powers hosts on and off as instances come and go, until closed.

    settings: the environment with which a host of the lab is a customer.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        lab.add(_API, 3, storage=False)
        self.settings = {"AWS_ENDPOINT_URL": f"http://{lab.addresses[_API]}:{_PORT}", **_KEYS}
        server = f"python -c {shlex.quote(_SERVER)} > ~/moto.log 2>&1"
        self._server = lab.start(_API, server, MOTO_IAM_LOAD_MANAGED_POLICIES="true")
        lab.run(_API, f"until (exec 3<>/dev/tcp/127.0.0.1/{_PORT}) 2>&-; do sleep 0.1; done", timeout_s=60)
        client = f"python -c {shlex.quote(_CLIENT)}"
        self._client = lab.start(_API, client, subprocess.PIPE, subprocess.PIPE, **self.settings)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._hosts: set[str] = set()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="cloud")
        self._thread.start()

    def subnet(self) -> str:
        """A new subnet, whose addresses are those of the lab."""
        vpc = self.ask("create_vpc", CidrBlock="198.18.0.0/16")["Vpc"]["VpcId"]
        made = self.ask("create_subnet", VpcId=vpc, CidrBlock="198.18.0.0/24", AvailabilityZone=_ZONE)
        subnet: str = made["Subnet"]["SubnetId"]
        self.ask("modify_subnet_attribute", SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
        return subnet

    def image(self) -> str:
        images = self.ask("describe_images", Owners=["amazon"])["Images"]
        return next(str(each["ImageId"]) for each in images if "buntu" in each["Name"])

    def instances(self) -> list[Instance]:
        reservations = self.ask("describe_instances")["Reservations"]
        keys = self.ask("describe_key_pairs", IncludePublicKey=True)["KeyPairs"]
        public = {key["KeyName"]: key.get("PublicKey", "") for key in keys}
        return [
            Instance(
                id=each["InstanceId"],
                address=each.get("PrivateIpAddress", ""),
                public_address=each.get("PublicIpAddress", ""),
                state=each["State"]["Name"],
                type=each["InstanceType"],
                is_spot=each.get("InstanceLifecycle") == "spot",
                key=public.get(each.get("KeyName"), "").strip(),
                tags={tag["Key"]: tag["Value"] for tag in each.get("Tags", [])},
            )
            for reservation in reservations
            for each in reservation["Instances"]
        ]

    def running(self) -> list[Instance]:
        return [each for each in self.instances() if each.state == "running"]

    def terminate(self, instance: Instance) -> None:
        self.ask("terminate_instances", InstanceIds=[instance.id])

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """A call of EC2's API."""
        assert self._client.stdin
        assert self._client.stdout
        with self._lock:
            self._client.stdin.write(json.dumps([verb, arguments]) + "\n")
            self._client.stdin.flush()
            found: dict[str, Any] = json.loads(self._client.stdout.readline())
        return found

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for process in (self._client, self._server):
            with process:  # closes its pipes, and waits
                process.kill()

    def _follow(self) -> None:
        while not self._closing.wait(_POLL_S):
            for each in self.instances():
                if each.state == "running" and each.host not in self._hosts:
                    self._hosts.add(each.host)
                    self._lab.add(each.host, int(each.address.rpartition(".")[2]), keys=(each.key,))
                    self._lab.give_address(each.host, each.public_address)
                elif each.state in _GONE and each.host in self._hosts:
                    self._lab.power_off(each.host)
