"""The files in cluster/: what can be known of them without a cluster."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from cluster.driver import LEAST, problem

CLUSTER = Path(__file__).parents[2] / "cluster"
CLOUDS = ["aws.yaml", "gcp.yaml", "azure.yaml"]
FILES = [*CLOUDS, "onprem.yaml"]
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


def strict(required: tuple[str, ...] = (), **properties: object) -> dict[str, object]:
    """An object with no other fields."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object", "required": ["spec"]}
GROUP = {"rayStartParams": TEXTS, "template": POD, "resources": TEXTS, "labels": TEXTS}
# Of KubeRay 1.6's reference of its custom resources, the fields that a run may need; the real ones are 900 kB.
RAY_JOB = strict(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=strict(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=NUMBER,
        backoffLimit=NUMBER,
        rayClusterSpec=strict(
            ("headGroupSpec", "workerGroupSpecs"),
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            authOptions=strict(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
            autoscalerOptions=strict(
                version={"enum": ["v1", "v2"]},
                upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
                idleTimeoutSeconds=NUMBER,
            ),
            headGroupSpec=strict(("template",), **GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": strict(
                    ("groupName", "template"),
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    idleTimeoutSeconds=NUMBER,
                    **GROUP,
                ),
            },
        ),
    ),
)


def parsed(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize("name", FILES)
def test_rays_schema_accepts_it(name: str) -> None:
    jsonschema.validate(parsed(name), SCHEMA)


def test_kuberays_fields_accept_the_job() -> None:
    jsonschema.validate(parsed("kuberay.yaml"), RAY_JOB)


@pytest.mark.parametrize("name", FILES)
def test_every_node_gets_the_project_with_the_token_and_a_dead_one_is_known_in_ten_seconds(name: str) -> None:
    cluster = parsed(name)
    assert cluster["file_mounts"] == {"~/steadfast": "."}
    assert {".venv", "runs", ".git"} <= set(cluster["rsync_exclude"])
    assert cluster["setup_commands"] == ["bash ~/steadfast/cluster/setup.sh"]
    assert "ray get-auth-token --generate > /dev/null" in cluster["head_setup_commands"]
    assert cluster["cluster_synced_files"] == ["~/.ray/auth_token"]
    start = cluster["head_start_ray_commands"][-1]
    settings = dict(re.findall(r"RAY_health_check_(\w+)=(\d+)", start))
    period, timeout, threshold = (int(settings[key]) for key in ("period_ms", "timeout_ms", "failure_threshold"))
    assert threshold * (period + timeout) < 10_000
    assert "--dashboard-host=127.0.0.1" in start  # which only this machine sees


def test_the_image_is_built_by_the_same_list_and_lacks_what_ray_up_leaves_out() -> None:
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    assert "RUN bash cluster/setup.sh" in lines
    assert not any(re.search(r"\b(uv )?pip install\b", line) for line in lines)
    lines = (CLUSTER.parent / ".dockerignore").read_text().splitlines()
    ignored = [line.removeprefix("**/") for line in lines if not line.startswith("#")]
    assert ignored == parsed("aws.yaml")["rsync_exclude"]


@pytest.mark.parametrize("name", CLOUDS)
def test_the_head_trains_nothing_and_workers_are_of_two_strengths_on_demand_and_spot(name: str) -> None:
    cluster = parsed(name)
    types = dict(cluster["available_node_types"])
    assert types.pop(cluster["head_node_type"])["resources"] == {"CPU": 0}
    assert all(each["resources"]["GPU"] >= 1 and each["max_workers"] for each in types.values())
    assert len({each["labels"]["gpu"] for each in types.values()}) >= 2
    assert {each["labels"]["market"] for each in types.values()} == {"spot", "on_demand"}


@pytest.mark.parametrize("name", ["gcp.yaml", "azure.yaml", "kuberay.yaml"])
def test_what_was_not_run_says_so_at_the_top(name: str) -> None:
    head = "".join((CLUSTER / name).read_text().splitlines(keepends=True)[:4])
    assert re.search(r"not run\b|Not run\b", head)


def test_scripts_are_valid_bash() -> None:
    for script in (*CLUSTER.glob("*.sh"), CLUSTER / "slurm.sbatch"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    for name in FILES:
        cluster = parsed(name)
        for key in (key for key in cluster if key.endswith("_commands")):
            for command in cluster[key]:
                assert shlex.split(command)
                subprocess.run(["bash", "-n", "-c", command], check=True)


PINNED = ("torch==2.13.0", "13.0")  # a new pin needs a look at the CUDA of its wheel on PyPI
IMAGES = [*CLOUDS, "kuberay.yaml", "../docs/deploy/kubernetes.md", "../docs/deploy/clouds.md"]


def test_azures_parameters_are_those_of_rays_template() -> None:
    folder = Path(ray.__file__).parent / "autoscaler" / "_private" / "_azure"
    known = json.loads((folder / "azure-vm-template.json").read_text())["parameters"]
    for each in parsed("azure.yaml")["available_node_types"].values():
        assert set(each["node_config"]["azure_arm_parameters"]) <= set(known)


@pytest.mark.parametrize("name", IMAGES)
def test_images_have_a_driver_for_the_pinned_torch(name: str) -> None:
    torch, cuda = PINNED
    assert torch in (CLUSTER.parent / "constraints.txt").read_text().splitlines()
    drivers = re.findall(r"(?:driver |nvidia-)(\d{3})\b", (CLUSTER / name).read_text())
    assert drivers
    assert not [driver for driver in drivers if problem(driver, cuda)]
    assert f"nvidia/cuda:{cuda}." in (CLUSTER / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["aws.yaml", "azure.yaml"])
def test_a_node_that_has_ended_costs_nothing(name: str) -> None:
    assert parsed(name)["provider"]["cache_stopped_nodes"] is False


@pytest.mark.parametrize(
    ("driver", "cuda", "is_wrong"),
    [("570.133.20", "13.0", True), ("580.65", "13.0", False), ("520.1", "12.6", True), ("470.1", None, False)],
)
def test_setup_stops_at_a_driver_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, cuda: Any, is_wrong: bool
) -> None:
    assert "\npython cluster/driver.py\n" in (CLUSTER / "setup.sh").read_text()
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\necho {driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {cuda!r}\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = subprocess.run([sys.executable, CLUSTER / "driver.py"], capture_output=True, text=True)
    assert (ended.returncode, f"{LEAST[13]} or newer" in ended.stdout) == (is_wrong, is_wrong and cuda == "13.0")
