"""`plan`: what it says of a run that has not begun."""

import json

import pytest

from steadfast.cli import main
from steadfast.commands.plan import plan, warnings
from tests.support.json_tables import check_document
from tests.support.small import planned
from tests.support.verbs import printed


def said(*overrides: str, num_train: int = 1000, mtbf_s: float | None = None) -> list[str]:
    return list(warnings(planned("scaling.num_workers=[2, 6]", *overrides), num_train, mtbf_s))


def test_shares_pads_and_idle_time_of_each_world() -> None:
    found = plan(planned(), None)
    assert [world["workers"] for world in found["worlds"]] == [2, 3, 4, 5, 6]  # eight would have nothing to do
    assert found["worlds"][2]["shares"] == (2, 2, 1, 1)
    assert [round(world["idle"], 2) for world in found["worlds"]] == [0, 0, 0.25, 0.4, 0]
    assert {world["pads"] for world in found["worlds"]} == {0}
    sharded = plan(planned("parallel.kind=fsdp"), None)
    assert [world["pads"] for world in sharded["worlds"]] == [0, 0, 2, 4, 0]
    assert (found["steps"], found["step_units"]) == (100, 12 * 64)


def test_parts_of_microbatches_leave_less_idle_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "batch.balance=even_samples",
        "batch.microbatch_size=4",
        "batch.global_size=29",
        "scaling.num_workers=[3, 5]",
    ]
    found = plan(planned(*words), None)["worlds"]
    assert [world["shares"] for world in found] == [(3, 3, 3), (2, 2, 2, 2), (2, 2, 2, 2, 2)]
    assert [world["parts"] for world in found] == [(2, 2, 1), (0, 0, 0, 0), (2, 2, 2, 2, 1)]
    # Of 29 samples a worker has up to 10, 8 and 6.
    assert [round(world["idle"], 3) for world in found] == [round(1 - 29 / 30, 3), 0, round(1 - 29 / 30, 3)]
    assert {world["pads"] for world in found} == {0}
    assert main(0.0, ["plan", "--config", "ddp.yaml", "model.num_layers=1", "batch.balance=even_samples"]) == 0
    assert "\n      4  1 and 4 samples               0    0%  " in capsys.readouterr().out


def test_stages_have_memory_and_idle_time_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel={kind: pipeline, stages: 2}", "scaling.num_workers=[2, 4]"]
    found = plan(planned(*words), None)
    assert [world["shares"] for world in found["worlds"]] == [(6,), (3, 3)]
    assert [round(world["idle"], 3) for world in found["worlds"]] == [round(1 / 7, 3), round(1 / 4, 3)]
    first, last = found["stages"]
    assert first["layers"] == last["layers"] == 1
    whole = sum(found["worker_bytes"].values())
    assert max(first["memory_bytes"], last["memory_bytes"]) < whole
    # Six microbatches of two samples of 64 tokens, each 64 numbers in fp32.
    assert found["link_bytes"] == 6 * 2 * 64 * 64 * 4
    every = plan(planned("parallel={kind: pipeline, stages: 2, schedule: gpipe}", words[1]), None)
    assert every["stages"][0]["memory_bytes"] > first["memory_bytes"]
    assert "stage  layers  memory" in printed(capsys, "plan", "--config", "ddp.yaml", "model.num_layers=2", *words).out


@pytest.mark.slow
def test_workers_that_share_the_layers_of_a_stage_need_less_memory_each() -> None:
    words = ["parallel={kind: pipeline, stages: 2}", "scaling.num_workers=[4, 8]", "model.attention_dropout=0"]
    whole, parts = (plan(planned(*words, f"parallel.tensor_size={size}"), None) for size in (1, 2))
    assert [world["workers"] for world in parts["worlds"]] == [4, 8]
    assert [world["shares"] for world in parts["worlds"]] == [(6,), (3, 3)]
    assert parts["worlds"][0]["idle"] == pytest.approx(1 / 7)
    for stage, of_parts in zip(whole["stages"], parts["stages"], strict=True):
        assert of_parts["memory_bytes"] < stage["memory_bytes"]
    # No simulation counts more than another one.
    most = max(stage["memory_bytes"] for stage in parts["stages"])
    assert [world["memory_bytes"] for world in parts["worlds"]] == [most, most]


def test_a_size_that_is_measured_is_planned_with_at_its_largest(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(planned("batch.microbatch_size=auto", "scaling.num_workers=[2, 4]"), None)
    assert found["microbatch_is_measured"]
    assert found["microbatch_size"] == 3  # 12 over 4 workers
    assert found["worlds"] == plan(planned("batch.microbatch_size=3", "scaling.num_workers=[2, 4]"), None)["worlds"]
    assert main(0.0, ["plan", "--config", "ddp.yaml", "model.num_layers=1", "batch.microbatch_size=auto"]) == 0
    assert "the largest size that batch.microbatch_size=auto may choose: 6\nthe run measures" in capsys.readouterr().out


def test_a_model_beyond_the_machines_memory_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, ["plan", "--config", "ddp.yaml", "model.embed_dim=4000000000"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model: cannot be built on this machine" in line


def test_what_a_reviewer_would_ask_about_and_nothing_of_a_good_plan() -> None:
    assert said(mtbf_s=3600.0) == []
    assert "only a part of the dataset: 1200 of 1201 samples" in said(num_train=1201)[0]
    assert "warmup_steps 51 is more than half of the run's 100 steps" in said("schedule.warmup_steps=51")[0]
    assert "only 6 of up to 9 workers have work" in said("scaling.num_workers=[2, 9]")[0]
    assert "checkpoint.every 5 minutes is longer than the 4m" in said(mtbf_s=240.0)[0]
    assert "the only copy of the state" in said("checkpoint.node_memory=false", "parallel.kind=fsdp")[0]
    assert not said("checkpoint.node_memory=false")


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", "ddp.yaml", "model.num_layers=1", "--mtbf", "2 minutes"]
    text = printed(capsys, *words).out
    assert "\n      4  1 to 2                        0   25%  " in text
    assert "\nwarning: checkpoint.every 5 minutes is longer than the 2m between two failures" in text
    found = json.loads(printed(capsys, *words, "--json").out)
    assert len(found["warnings"]) == 2
    check_document("`plan`", found)
