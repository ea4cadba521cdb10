"""Rows of tests that `make test` leaves out, because each shows a claim once more, by another kind, seed or option.

A row of `MORE` has the marker `more`, and CI runs a quarter of them each day; one of `SLOW` has the marker `slow`. A
test that a table of CONTRIBUTING.md names keeps a row in `make test`. `python -m tests.stages.rows` checks that, and
names the patterns that match no test.
"""

import re
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from tests.stages.record import ROOT

FOLDERS = ("tests/unit", "tests/dist", "tests/scale", "tests/cluster")

SLOW = [
    r"dist/test_activations.*result_is_that_without\[(ddp-selective|ddp-2|fsdp-full|fsdp-2)",
    r"dist/test_arithmetic.*(ways_to\w*\[(ddp|stages)-full-blocks|parts_of_layers.*shard_size: 1-shares0)",
    r"dist/test_balance.*recovers",
    r"dist/test_compiled.*(with_dropout|without_a_compiler)",
    r"dist/test_activations.*nobody_here_wrote\[(gpt2|resnet50)",
    r"dist/test_compiled.*more_worlds\w*\[(fsdp|ddp, )",
    r"dist/test_compiled.*(in_16_bits\[ddp|go_on_without\[fsdp|without_a_compiler\w*\[fsdp)",
    r"dist/test_deaths.*(no_death\w*\[(\w+-[23]|fsdp-1)|sharded_worlds.*(shard_size: 2|tensor_size|stages))",
    r"dist/test_differential.*equals.*\[(?!experts|gan|clip|tied|methods)\w+-fsdp",
    r"dist/test_exact.*every_sequence.*\[(fp32-worlds[04]|bf16-worlds[0135])",
    r"dist/test_exact.*(add_losses|take_the_unit)",
    r"dist/test_generations.*(equivalent\w*\[(ddp-bf16|fsdp-fp32)|wish\w*\[fsdp|draws_the_same\w*\[fsdp|built\w*\[(numpy|random))",
    r"dist/test_generations.*grows_equals\w*\[fsdp",
    r"dist/test_generations.*(gathered.*shard_size|equivalent\w*\[fsdp-bf16)",
    r"dist/test_global_loss.*\[({kind: ddp, reducer: torch}|20\])",
    r"dist/test_hooks.*(averages_of_shards.*(worlds[01])|finishes_early\[1)",
    r"dist/test_hooks.*averages_of_shards.*cpu_offload",
    r"dist/test_initial.*(draws_from_all\w*\[fsdp)",
    r"dist/test_numbers.*overflows\w*\[(ddp|fsdp, )",
    r"dist/test_memory.*gives_back.*(torch|fit)",
    r"dist/test_microbatch_size.*(bits_of_the_same.*(reducer|tracing-{kind: fsdp}|gpt-{kind: ddp}))",
    r"dist/test_models_nobody.*(has_become\[(resnet50|llama))",
    r"dist/test_models_nobody.*has_become\[vit",
    r"dist/test_mutations.*broken([6-9]|1[0-35-9])",
    r"dist/test_numbers.*MeanOfNothing.*-(torch|fsdp)",
    r"dist/test_optimizers.*(resize_equals\w*\[0\.0-ddp|zeros.*(ASGD|NAdam-ddp|TowardsStart-ddp))",
    r"dist/test_optimizers.*NAdam-fsdp",
    r"dist/test_order.*(resume\[(ddp-weighted|fsdp-sequential)|kills\[sequential)",
    r"dist/test_microbatch_size.*(whole_microbatches\[(1-pipeline|3-fsdp))",
    r"dist/test_recompute.*(undisturbed_one\[(gradient-owner|activation-second|weight-owner)|loader proc|bf16\]|short)",
    r"dist/test_recompute.*(no_false|changes_nothing\[(activation|running|unused))",
    r"dist/test_replicas.*(\[(hsdp|stages)-[23]\]|their_state\[(hsdp-\[4, (2|\[0)|stages-\[(4, (\[2|\[1)|2)))",
    r"dist/test_replicas.*(connect\w*\[(hsdp-0|stages-1)|costs\w*\[\w+-1|bit_by_bit\[hsdp)",
    r"dist/test_rescue.*shards_of_the_last_step.*({kind: fsdp}-2|stages: 2}.*(data|validation))",
    r"dist/test_rescue.*(interrupted\w*\[overrides1|shards_of_the_last\w*.*(backward|data))",
    r"dist/test_unusual.*plain_loop\[(offload|every|fsdp)\]",
    r"dist/test_unusual.*plain_loop\[hsdp_every",
    r"dist/test_unusual.*(\[0\.1-fsdp|\[null-ddp|five_new_worlds\w*\[torch)",
    r"dist/test_unusual.*(statistics\[15|attributes\w*\[{reducer: torch)",
    r"dist/test_watchdog.*named_with\w*\[2-ddp",
]

MORE = [
    r"dist/test_activations.*(fsdp-selective|keep_a_part.*Linear|ddp-full)",
    r"dist/test_arithmetic.*(any_shares\w*\[hsdp|ways_to\w*\[hsdp|\[3-hsdp|chunks\w*\[hsdp)",
    r"dist/test_arithmetic.*stages_and_replicas.*(balance: \[1, 3\]|balance: \[1, 2, 1\]-gpipe)",
    r"dist/test_balance.*(begin_anew|too_early)",
    r"dist/test_s3.*looked_at\[fsdp",
    r"dist/test_compiled.*(in_16_bits\[fsdp|fsdp_gathers_within|go_on_without|running_statistics)",
    r"dist/test_deaths.*(\[fsdp-0|sharded_worlds|the_flag_set_after|collective_after)",
    r"dist/test_batches.*world\[fsdp",
    r"dist/test_generations.*(layers_gathered|any_sequence\w*\[fsdp|live_through_resizes\w*\[fsdp)",
    r"dist/test_hooks.*(all_ranks\w*\[fsdp|averages_of_shards)",
    r"dist/test_initial.*without_the_file_once\w*\[fsdp",
    r"dist/test_killed_while_saving.*(riskiest|damaged)\w*\[fsdp",
    r"dist/test_replicas.*(planned\w*\[stages|after_a_death\[stages)",
    r"dist/test_memory.*before_the_run\[fsdp",
    r"dist/test_validation.*whole_set\[fsdp",
    r"dist/test_microbatch_size.*\[(gpt-)?({kind: )?fsdp",
    r"dist/test_migrate.*(lightning_is_killed|ddp_script)",
    r"dist/test_models_nobody.*tensor_plan\w*\[llama-{kind: fsdp",
    r"dist/test_generations.*hosts_memory.*worlds1",
    r"dist/test_optimizers.*(groups\w*\[fsdp|TowardsStart-fsdp|rprop|0\.0-fsdp|without_state)",
    r"dist/test_order.*(mixed_equally\w*\[fsdp|kills\[parquet|resume\[fsdp-mixture|users_own)",
    r"dist/test_microbatch_size.*(\[1-fsdp|with_less\[fsdp)",
    r"dist/test_replicas.*connect\w*\[(hsdp-1|stages-0)",
    r"dist/test_replicas.*their_state\[(hsdp-\[4|stages-\[4, \[0)",
    r"dist/test_rescue.*(another_number|2-forward)",
    r"dist/test_restore.*two readers",
    r"dist/test_unusual.*\[hsdp",
    r"dist/test_watchdog.*no_alarm\[90",
    r"unit/test_analysis_memory.*(on_a_line|whole_gradients|take_no_more|memory_of_a_gpu)",
    r"unit/test_commands_plan.*time_of_their_own",
    r"cluster/test_fork_server.*of_an_embedded_ray",
    r"cluster/test_hugging_face.*llama_with_lora",
    r"cluster/test_nodes.*workers_die_at_once",
    r"cluster/test_torchrun.*leaves_a_bad_step_out",
    r"unit/test_interrupts.*swallowed\w*\[2-",
    # Each is dear, and a cheaper test shows the claim that CONTRIBUTING.md has of it, or it has none there.
    r"dist/test_activations.*gathered_as_a_whole",
    r"dist/test_arithmetic.*(logits_in_chunks|a_batch_ends\w*\[3-stages|any_grid\w*\[stages)",
    r"dist/test_balance.*(and_say_so|run_with_parts)",
    r"dist/test_batches.*(a_model_of|equally_through_kills|equally_over\w*\[{kind: pipeline)",
    r"dist/test_compare.*(losses_of_fp64|at_one_size|a_weight_that|was_left_out)",
    r"dist/test_compiled.*a_graph_break",
    r"dist/test_deaths.*while_a_world_connects",
    r"dist/test_differential.*plain_loop_through\w*\[\w+-fsdp",
    r"dist/test_exact.*(in_32_bits|that_is_left_out|that_do_not_fit|are_the_same|what_is_broken)",
    r"dist/test_exact.*(the_same_bits\w*\[bf16|number_of_threads\w*\[leave)",
    r"dist/test_generations.*by_the_other\w*\[fsdp",
    r"dist/test_global_loss.*(a_death_within|an_exact_run|one_process_over\w*\[{kind: fsdp)",
    r"dist/test_gpu_drills.*(what_it_asserts|that_is_ended)",
    r"dist/test_hooks.*is_what_is_validated",
    r"dist/test_initial.*(as_a_replicated|goes_on_without|needs_no_file)",
    r"dist/test_loader.*(outlive_stop_signals\w*\[worker|main_guard\w*\[1000000)",
    r"dist/test_memory.*(gives_back|no_freed_blocks)",
    r"dist/test_validation.*keep_every_sample",
    r"dist/test_microbatch_size.*(least_room|leader_that_is_new|where_two_samples)",
    r"dist/test_migrate.*(hugging_face|ends_with_the_figures|of_ray_train|page_of_defaults)",
    r"dist/test_mutations.*(torchs_reducer|nothing-fsdp|-pipeline-)",
    r"dist/test_node_memory.*is_free_again",
    r"dist/test_numbers.*(goes_on_over|is_named|overflows\w*\[fsdp|masked_changes\w*\[language_modeling-fsdp)",
    r"dist/test_optimizers.*(muon|over_a_resize\w*\[0\.9-fsdp)",
    r"dist/test_order.*(over_changes|with_them_are|through_kills\w*\[mixture)",
    r"dist/test_microbatch_size.*(go_on_with_less\w*\[pipeline|of_any_size\w*\[(1-ddp|3-pipeline))",
    r"dist/test_parts.*(base_from_a_file|by_any_world|told_of|16_bits\w*\[fsdp)",
    r"dist/test_recompute.*(two_ranks_tell|in_an_exact_run|is_named\w*\[(gradient|activation))",
    r"dist/test_recompute.*finds_nothing\w*\[(dropout|fewer)",
    r"dist/test_refusing_disk.*(does_not_take|only_be_read)",
    r"dist/test_replicas.*(their_state|loss_scale_and|after_a_death|costs_a_step\w*\[hsdp)",
    r"dist/test_rescue.*(an_update_was|stays_whole\w*\[ranks[12]|the_bug\w*\[fsdp)",
    r"dist/test_rescue.*of_the_last_step\w*\[par\w+={kind: fsdp",
    r"dist/test_restore.*is_read_by_one",
    r"dist/test_rollback.*(first_and_the_last|when_the_run_is_resumed|is_left_out\[fsdp)",
    r"dist/test_s3.*(one_gets_the_run|stopped_resumed|an_attempt_did)",
    r"dist/test_snapshots.*no_more_collectives",
    r"dist/test_trackers.*(no_half_step|different_ones|so_many_steps\w*\[fsdp)",
    r"dist/test_unusual.*(that_are_gathered|adds_up|plain_loop\w*\[(ddp|torch)|different_layers\w*\[{kind: fsdp, s)",
    r"dist/test_unusual.*(a_death_breaks|the_task_registers|statistics_are\w*\[null-fsdp)",
    r"dist/test_unusual.*(can_take\w*\[fsdp|in_the_checkpoint\w*\[Codebook-fsdp)",
    r"dist/test_validation.*(no_number|mode_and\w*\[True)",
    r"dist/test_watchdog.*(threads_come_and_go|named_with_its_phase)",
    r"cluster/test_endings.*(memory_is_left|says_so\[torchrun)",
    r"cluster/test_faults.*torchrun_ends",
    r"cluster/test_nodes.*costs_hardly",
    r"cluster/test_resume.*(before_the_first_step|in_a_bucket)",
    r"cluster/test_slots.*(newest_copy|what_the_survivor|rolled_back|1001_workers)",
    r"cluster/test_torchrun.*(a_killed_worker|meet_at|ctrl_c_under|told_by_one\[user)",
    r"dist/test_arithmetic.*(any_grid\w*\[ddp|any_microbatch\w*\[[138]-(stages|ddp))",
    r"dist/test_deaths.*leaves_garbage\[ddp-1",
    r"dist/test_differential.*equals.*\[(experts|ctc|ddpm|own_function|contra\w+|mixup\w*|gradient_penalty|vae)-ddp",
    r"dist/test_differential.*equals.*\[(class_weights|dpo|part_of_model|nadam|tied|penalty_in_loss|distillation)-ddp",
    r"dist/test_exact.*(draws_from_all|of_threads|bits_of_one_worker\w*\[(fp32-worlds1|bf16-worlds4))",
    r"dist/test_generations.*(change_what_is_read|in_memory\w*\[fsdp|its_strategy_on_the_way|was_not\w*\[fsdp)",
    r"dist/test_activations.*learn_once",
    r"dist/test_due_acts.*change_nothing\[1",
    r"dist/test_hooks.*sees_no_gradients\w*\[{kind: (fsdp|pipeline)",
    r"dist/test_recompute.*one_rank\[moment",
    r"dist/test_trackers.*few_microbatches\w*\[fsdp",
    r"dist/test_unfreezing.*a_stop\[Alternating",
    r"dist/test_unusual.*are_written_once\[Momentum",
    r"dist/test_refusing_disk.*two_gigabytes",
    r"dist/test_task_check.*-fsdp",
    r"cluster/test_bad_input.*(empty_dataset|more_gpus)",
    r"cluster/test_endings.*taken_over",
    r"cluster/test_fork_server.*joins_on_a_cluster",
    r"cluster/test_nodes.*that_no_node_is_left",
    r"cluster/test_slots.*of_a_sharded_world",
]


def marker_of(test: str) -> str | None:
    """Return the name of the marker that a test has by these tables."""
    if any(pattern.search(test) for pattern in _SLOW):
        return "slow"
    return "more" if any(pattern.search(test) for pattern in _MORE) else None


class Collector:
    """Plugin of pytest that keeps the tests, and those of `make test` among them."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.all = [item.nodeid for item in items]
        self.quick = [
            item.nodeid for item in items if not {"slow", "more"} & {mark.name for mark in item.iter_markers()}
        ]


def unmatched(tests: list[str]) -> list[str]:
    """Return the patterns that match none of these tests."""
    text = "\n".join(tests)
    return [f"{pattern} matches no test" for pattern in [*SLOW, *MORE] if not re.search(pattern, text)]


def unproved(tests: list[str]) -> list[str]:
    """Return the promises of CONTRIBUTING.md of which none of these tests is named."""
    functions = {test.partition("[")[0].removeprefix("tests/") for test in tests}
    found = []
    for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines():
        named = re.findall(r"`((?:unit|dist|scale|cluster)/\w+\.py::\w+)`", line)
        if named and not functions & set(named):
            found.append(f"no test of make test proves: {line}")
    return found


_SLOW, _MORE = ([re.compile(pattern) for pattern in patterns] for patterns in (SLOW, MORE))

if __name__ == "__main__":
    collector = Collector()
    with redirect_stdout(StringIO()):
        pytest.main(["--collect-only", "-qq", *FOLDERS], plugins=[collector])
    if found := [*unmatched(collector.all), *unproved(collector.quick)]:
        sys.exit("\n".join(found))
