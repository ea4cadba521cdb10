"""The memory of a worker, as `plan` estimates it."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from steadfast.cli import main
from steadfast.commands.plan import plan
from steadfast.config import Config, parse_config
from steadfast.models import build_model
from steadfast.optim.optimizer import build_optimizer
from steadfast.parallel.buckets import GradientBuckets
from steadfast.tasks import build_task
from tests.support.allocator import peak_bytes
from tests.support.json_tables import check_document
from tests.support.small import planned


@pytest.mark.parametrize("model", ["model.num_layers=1", "model.embed_dim=128"])
def test_memory_is_that_of_the_allocator(model: str) -> None:
    config = planned(model)
    estimated = plan(config, None)["worlds"][0]["memory_bytes"]
    measured = peak_bytes(lambda: train(config))
    assert estimated == pytest.approx(measured, rel=0.15)


def train(config: Config) -> None:
    """Two steps of two microbatches, as a worker makes them."""
    model = build_model(config.model).train()
    optimizer = build_optimizer(config.optimizer, model)
    buckets = GradientBuckets.of(model)
    task = build_task(config.task)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    for _ in range(2):
        for _ in range(2):
            task.loss(model, (tokens, tokens)).loss_sum.backward()
        optimizer.step()
        buckets.clear()


class Moved(torch.nn.Module):
    """A language model whose code moves modules, and which has two names for one parameter."""

    def __init__(self, move: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 64)
        self.head = torch.nn.Linear(64, 256, bias=False)
        self.head.weight = self.embed.weight
        if move:
            self.head.to("cpu")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


def test_a_model_that_cannot_be_built_without_data_is_built_with_them() -> None:
    target = "model={{target: 'tests.unit.test_analysis_memory:Moved', args: {{move: {}}}}}"
    moved, plain = (plan(planned(target.format(move)), None)["worker_bytes"] for move in ("true", "false"))
    assert moved == plain
    assert moved["parameters"] == 256 * 64 * 4


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.filterwarnings("ignore")  # of imports, and of the pointers that peft asks for
def test_adapters_by_peft_have_a_plan() -> None:
    """Which moves modules, and copies them with the mode that they were built in."""
    path = Path(__file__).parents[2] / "configs" / "lora.yaml"
    found = plan(parse_config(path.read_text(), "lora.yaml"), None)
    assert found["worker_bytes"]["parameters"] > 5 * found["worker_bytes"]["gradients"]
    assert found["worlds"][0]["memory_bytes"] > found["worlds"][1]["memory_bytes"]


def test_worlds_between_two_others_are_put_on_a_line() -> None:
    """Within two per cent of what the world itself would be estimated at."""
    by_sharding = "parallel.kind=fsdp"
    among_others = {world["workers"]: world["memory_bytes"] for world in plan(planned(by_sharding), None)["worlds"]}
    alone = plan(planned(by_sharding, "scaling.num_workers=3"), None)["worlds"][0]["memory_bytes"]
    assert among_others[3] == pytest.approx(alone, rel=0.02)
    assert among_others[2] > among_others[3] > among_others[5]


def test_a_worker_that_adds_up_microbatches_holds_whole_gradients() -> None:
    """The last of these worlds has one microbatch for each worker, which travels shard by shard at once."""
    sharded = plan(planned("parallel.kind=fsdp", "model.embed_dim=256"), None)
    several, one = [world["memory_bytes"] for world in sharded["worlds"][-2:]]
    assert several - one > 0.8 * sharded["worker_bytes"]["gradients"]


def test_what_is_kept_on_the_host_takes_no_memory_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.embed_dim=256", "scaling.num_workers=2"]
    (kept,) = plan(planned("parallel={kind: fsdp, cpu_offload: true}", *words), None)["worlds"]
    (plain,) = plan(planned("parallel.kind=fsdp", *words), None)["worlds"]
    assert plain["host_memory_bytes"] == 0
    assert kept["memory_bytes"] + kept["host_memory_bytes"] == plain["memory_bytes"]
    model = build_model(planned(*words).model)
    state = 4 * sum(param.numel() * param.element_size() for param in model.parameters()) // 2  # half of it, by AdamW
    assert kept["host_memory_bytes"] == pytest.approx(state, rel=0.02)
    offloaded = ["parallel.kind=fsdp", "parallel.cpu_offload=true", "scaling.num_workers=2"]
    assert main(0.0, ["plan", "--config", "ddp.yaml", "model.num_layers=1", *offloaded]) == 0
    assert re.search(r" MiB on its GPU, .* MiB in the memory of its machine\n", capsys.readouterr().out)


def resharding(*overrides: str) -> list[dict[str, Any]]:
    words = ["parallel.kind=fsdp", "model.num_layers=6", "model.embed_dim=128", "scaling.num_workers=2"]
    (world,) = plan(planned(*words, *overrides), None)["worlds"]
    found: list[dict[str, Any]] = world["resharding"]
    freed, kept = found
    configured = found["parallel.reshard_after_forward=false" in overrides]
    assert world["memory_bytes"] == configured["memory_bytes"]
    assert (freed["after_forward"], kept["after_forward"]) == (True, False)
    return found


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return resharding()


def test_plan_has_the_gathers_and_memory_of_both_ways_to_reshard(both: list[dict[str, Any]]) -> None:
    freed, kept = both
    assert (freed["gathers"], kept["gathers"]) == (6, 1)  # three microbatches each
    one = 4 * 12 * 128**2  # the matrices of a layer
    # One layer, or two while the next one is fetched, is gathered at the peak in any case.
    assert 4 * one <= kept["memory_bytes"] - freed["memory_bytes"] <= 6 * one


def test_layers_gathered_for_a_step_take_no_more(monkeypatch: pytest.MonkeyPatch, both: list[dict[str, Any]]) -> None:
    """So `reshard_after_forward=false` need not gather again for each microbatch."""
    honest = FSDPModule.set_reshard_after_backward
    monkeypatch.setattr(FSDPModule, "set_reshard_after_backward", lambda self, _: honest(self, True))
    freed, gathered_again = resharding("parallel.reshard_after_forward=false")
    assert freed == both[0]
    assert both[1]["memory_bytes"] <= gathered_again["memory_bytes"]


def test_plan_prints_both_ways_to_reshard(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", "ddp.yaml", "model.num_layers=1", "parallel.kind=fsdp", "scaling.num_workers=[1,2]"]
    assert main(0.0, words) == 0
    mib = r"[\d.]+ MiB"
    table = rf"workers  true +false\n      1  0    {mib} +0    {mib}\n      2  6    {mib} +1    {mib}\n"
    assert re.search(table, capsys.readouterr().out)
    assert main(0.0, [*words, "--json"]) == 0
    check_document("`plan`", json.loads(capsys.readouterr().out))
