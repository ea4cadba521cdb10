from __future__ import annotations

import re

import pytest
import torch

pytest.register_assert_rewrite("tests.support.claims", "tests.support.stores")

# Rows that show a claim once more, by another kind, seed or option: slow tests, like those that are marked so. Each
# is a part of a test's id.
ONCE_MORE = [
    r"test_activations.*result_is_that_without\[(ddp-selective|ddp-2|fsdp-full|fsdp-2)",
    r"test_arithmetic.*(ways_to\w*\[(ddp|stages)-full-blocks|parts_of_layers.*shard_size: 1-shares0)",
    r"test_balance.*recovers",
    r"test_compiled.*(with_dropout|under_torchs|without_a_compiler)",
    r"test_activations.*nobody_here_wrote\[(gpt2|resnet50)",
    r"test_compiled.*(ten_more_worlds\w*\[fsdp|in_16_bits\[ddp|go_on_without\[fsdp|without_a_compiler\w*\[fsdp)",
    r"test_deaths.*(no_death\w*\[(\w+-[23]|fsdp-1)|sharded_worlds.*(shard_size: 2|tensor_size|stages))",
    r"test_differential.*equals.*\[(?!experts|gan|clip|tied|methods)\w+-fsdp",
    r"test_exact.*every_sequence.*\[(fp32-worlds[04]|bf16-worlds[0135])",
    r"test_exact.*(add_losses|take_the_unit)",
    r"test_extended.*\[ddp",
    r"test_faults.*hangs_for_a_while\w*\[(loader|checkpoint)",
    r"test_generations.*(equivalent\w*\[(ddp-bf16|fsdp-fp32)|wish\w*\[fsdp|draws_the_same\w*\[fsdp|built\w*\[(numpy|random))",
    r"test_generations.*(grows_equals\w*\[fsdp|identical_to_one\w*\[ddp|change_its_strategy\w*\[ddp)",
    r"test_generations.*(gathered.*shard_size|equivalent\w*\[fsdp-bf16|ranks_change\w*\[ddp)",
    r"test_global_loss.*\[({kind: ddp, reducer: torch}|20\])",
    r"test_hooks.*(averages_of_shards.*(worlds[01])|finishes_early\[1)",
    r"test_hooks.*(all_ranks\w*\[ddp|averages_of_shards.*cpu_offload)",
    r"test_initial.*(without_the_file_once\w*\[ddp|draws_from_all\w*\[fsdp)",
    r"test_layouts.*leader",
    r"test_loss_scale.*(overflows\w*\[(ddp|fsdp, )|resizes_and_a_resume\[ddp)",
    r"test_loss_scale.*resume\[pipeline",
    r"test_memory.*(gives_back.*torch|former_model\[4-ddp|all_of_its_model\[4-fsdp)",
    r"test_memory.*fit_gives_back",
    r"test_metrics.*whole_set\[ddp",
    r"test_microbatch_size.*(bits_of_the_same.*(reducer|tracing-{kind: fsdp}|gpt-{kind: ddp})|resume_keeps\w*\[ddp)",
    r"test_microbatch_size.*(two_samples\w*\[ddp|later_the_size\w*\[ddp)",
    r"test_models_nobody.*(has_become\[(resnet50|llama)|two_stages\w*\[gpt2)",
    r"test_models_nobody.*has_become\[vit",
    r"test_mutations.*broken([6-9]|1[0-35-9])",
    r"test_numbers.*MeanOfNothing.*-(torch|fsdp)",
    r"test_optimizers.*(resize_equals\w*\[0\.0-ddp|zeros.*(ASGD|NAdam-ddp|TowardsStart-ddp)|own_live\w*\[ddp)",
    r"test_optimizers.*NAdam-fsdp",
    r"test_order.*(resume\[(ddp-weighted|fsdp-sequential)|kills\[sequential)",
    r"test_out_of_memory.*(whole_microbatches\[(1-ddp|1-pipeline|3-fsdp)|with_less\[ddp)",
    r"test_recompute.*(undisturbed_one\[(gradient-owner|activation-second|weight-owner)|loader proc|bf16\]|short)",
    r"test_recompute.*(no_false|changes_nothing\[(activation|running|unused))",
    r"test_replicas.*(\[(hsdp|stages)-[23]\]|their_state\[(hsdp-\[4, (2|\[0)|stages-\[(4, (\[2|\[1)|2)))",
    r"test_replicas.*(connect\w*\[(hsdp-0|stages-1)|costs\w*\[\w+-1|bit_by_bit\[hsdp)",
    r"test_rescue.*shards_of_the_last_step.*({kind: fsdp}-2|stages: 2}.*(data|validation))",
    r"test_rescue.*(interrupted\w*\[overrides1|shards_of_the_last\w*.*(backward|data))",
    r"test_unused.*plain_loop\[(torch|data_parallel|offload|every|fsdp)\]",
    r"test_unused.*plain_loop\[hsdp_every",
    r"test_unusual.*(\[0\.1-fsdp|\[null-ddp|five_new_worlds\w*\[torch|statistics\[15|attributes\w*\[{reducer: torch)",
    r"test_unusual.*resnet_18",
    r"test_watchdog.*named_with\w*\[2-ddp",
]
_ONCE_MORE = re.compile("|".join(ONCE_MORE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _ONCE_MORE.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The processes of a drill share the machine with each other and with this one."""
    torch.set_num_threads(1)
