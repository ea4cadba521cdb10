"""The theorem of steadfast.plan: whoever computes what, a step is the same sum divided by the same count."""

import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from steadfast.config import Config
from steadfast.plan import even_shares
from tests.support.claims import EQUAL, check_equal
from tests.support.gang import Gang
from tests.support.patches import write_no_code
from tests.support.reference import Reference, reference
from tests.support.small import small
from tests.support.stepping import Stepped, take_steps

Shares = tuple[int, ...]
Steps = Callable[[Config, Shares], Stepped]
Case = tuple[list[str], Shares]

NOWHERE = Path("nothing-is-written")
NUM_WORKERS = 6
EIGHT_ATTEMPTS = count(1)
PARALLEL = {
    "ddp": "{kind: ddp}",
    "torch": "{kind: ddp, reducer: torch}",
    "fsdp": "{kind: fsdp}",
    "fsdp by size": "{kind: fsdp, wrap: 30, reshard_after_forward: false}",
    "hsdp": "{kind: fsdp, shard_size: 2, reduce_every_microbatch: true}",
    "hsdp gathered once": "{kind: fsdp, shard_size: 2, reshard_after_forward: false}",
    "fsdp offloaded": "{kind: fsdp, cpu_offload: true, reduce_every_microbatch: true}",
    "fsdp by class": "{kind: fsdp, wrap: [Linear], reduce_every_microbatch: true, prefetch: 1}",
    "stages": "{kind: pipeline, stages: 2}",
}
WITH_PARTS = {
    "tensor": "{kind: fsdp, shard_size: 1, tensor_size: 2}",
    "shards of parts": "{kind: fsdp, tensor_size: 2}",
    "parts in stages": "{kind: pipeline, stages: 2, tensor_size: 2}",
}
OFTEN = ("ddp", "hsdp", "stages")  # what the others do is a part of what these do


def seldom(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


def kinds_of(*left_out: str) -> list[Any]:
    """Return the kinds of parallelism, of which most are for the slow tests."""
    return [kind if kind in OFTEN else seldom(kind) for kind in PARALLEL if kind not in left_out]


KINDS = pytest.mark.parametrize("kind", kinds_of())
KINDS_OF_ANY_CASE = pytest.mark.parametrize("kind", [*kinds_of(), *map(seldom, WITH_PARTS)])


@pytest.fixture(scope="module")
def steps() -> Iterator[Steps]:
    """All steps of a run, in six processes that all tests of this module share."""
    attempts = count(1)
    with Gang(NUM_WORKERS, write_no_code) as gang:
        yield lambda config, shares: take_steps(gang, next(attempts), config, of_whole_replicas(config, shares))


def of_whole_replicas(config: Config, shares: Shares) -> Shares:
    """Add a worker without a share where they are too few, or join the last shares where their stages are too many."""
    most = NUM_WORKERS // config.parallel.ranks_per_sample
    shares = (*shares[: most - 1], sum(shares[most - 1 :])) if len(shares) > most else shares
    while config.parallel.layout(size := len(shares) * config.parallel.ranks_per_sample).size < size:
        shares = (*shares, 0)
    return shares


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A batch of any size, cut into microbatches of any size, dealt out to one to five workers in any way."""
    global_size = draw(st.integers(1, 12))
    microbatch_size = draw(st.integers(1, global_size))
    grid = -(-global_size // microbatch_size)
    num_workers = draw(st.integers(1, 5))
    cuts = draw(st.lists(st.integers(0, grid), min_size=num_workers - 1, max_size=num_workers - 1))
    length = draw(st.sampled_from(["run.steps=3", "run.epochs=1"]))
    num_samples = draw(st.integers(3, 3 + 3 * global_size))
    overrides = [
        length,
        f"data.args.num_samples={num_samples}",
        f"batch.global_size={global_size}",
        f"batch.microbatch_size={microbatch_size}",
        f"data.args.masked={draw(st.booleans())}",
        f"model.dropout={draw(st.sampled_from([0.0, 0.2]))}",
        f"memory.activation_checkpointing={draw(st.sampled_from(['none', 'full']))}",
        f"compile={draw(st.sampled_from(['none', 'blocks']))}",
        f"optimizer.max_grad_norm={draw(st.sampled_from(['null', '0.3']))}",
        "schedule.warmup_steps=0",
    ]
    return overrides, tuple(right - left for left, right in pairwise([0, *sorted(cuts), grid]))


# Compilations of layers whose parts fsdp gathers say that they break.
pytestmark = pytest.mark.filterwarnings("ignore")


@KINDS_OF_ANY_CASE
@settings(
    max_examples=int(os.environ.get("SHARES_EXAMPLES", "4")),  # 16 or more to search for a case nobody thought of
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
@example(case=([], (0, 7, 0)))
@example(case=(["model.target=tests.support.models:Normalised"], (3, 0, 1, 2, 1)))
@example(case=(["batch.global_size=1", "batch.microbatch_size=1", "data.args.masked=false"], (0, 0, 0, 0, 1)))
def test_any_shares_of_any_grid_give_the_steps_of_one_process(steps: Steps, kind: str, case: Case) -> None:
    overrides, shares = case
    # These are refused.
    assume(kind not in ("stages", *WITH_PARTS) or "model.target=tests.support.models:Normalised" not in overrides)
    if kind in WITH_PARTS:
        assume(not {"compile=blocks", "memory.activation_checkpointing=full"} <= {*overrides})
        overrides = [*overrides, "model.attention_dropout=0"]
    config = small(NOWHERE, f"parallel={(PARALLEL | WITH_PARTS)[kind]}", *overrides)
    expected = reference(config)
    # A whole step in which nothing counts has no mean.
    assume(all(loss is not None and math.isfinite(loss) for loss in expected.losses))
    check_steps(steps(config, shares), expected)


LAYERS, WHOLE_HEADS = "model.num_layers=4", "model.attention_dropout=0"


@cache
def twenty(*words: str) -> Reference:
    """Twenty steps of one process, as plainly as they can be done."""
    return reference(small(NOWHERE, *words, "run.steps=20"))


MOST_AT_ONCE = ("full", "blocks")
WAYS = [
    MOST_AT_ONCE,
    ("none", "none"),
    ("none", "blocks"),
    ("full", "none"),
    ("selective", "none"),
    ("selective", "blocks"),
]
AT_ONCE = [(kind, *MOST_AT_ONCE) for kind in OFTEN]
ONE_BY_ONE = [(kind, *way) for kind in PARALLEL for way in WAYS if (kind, *way) not in AT_ONCE]


@pytest.mark.parametrize(("kind", "checkpointing", "compiled"), [*AT_ONCE, *(seldom(*row) for row in ONE_BY_ONE)])
def test_ways_to_compute_layers_give_plain_steps(steps: Steps, kind: str, checkpointing: str, compiled: str) -> None:
    if checkpointing == "selective" and kind in ("fsdp by size", "fsdp by class"):
        pytest.skip("refused: tests/dist/test_activations.py")
    overrides = [f"parallel={PARALLEL[kind]}", f"memory.activation_checkpointing={checkpointing}"]
    config = small(NOWHERE, *overrides, f"compile={compiled}", "run.steps=20")
    for num_workers in range(1, 5):
        check_steps(steps(config, even_shares(7, num_workers)), twenty())


@KINDS
@pytest.mark.parametrize("microbatch_size", [seldom(1), 3, seldom(8)])
def test_any_microbatch_size_gives_the_steps_of_one_microbatch(steps: Steps, kind: str, microbatch_size: int) -> None:
    overrides = [f"parallel={PARALLEL[kind]}", "model.dropout=0", "run.steps=5"]
    whole = small(NOWHERE, *overrides, "batch.microbatch_size=13")
    cut = small(NOWHERE, *overrides, f"batch.microbatch_size={microbatch_size}")
    check_steps(steps(cut, even_shares(-(-13 // microbatch_size), 3)), reference(whole))


@pytest.mark.parametrize("kind", kinds_of("torch"))
def test_logits_in_chunks_give_the_steps_of_all_of_them(steps: Steps, kind: str) -> None:
    overrides = [f"parallel={PARALLEL[kind]}", "run.steps=3"]
    chunked = small(NOWHERE, *overrides, "task.chunk_tokens=5")
    check_steps(steps(chunked, (3, 0, 4)), reference(small(NOWHERE, *overrides)))


@KINDS
@pytest.mark.parametrize("num_workers", [seldom(1), 3, seldom(5)])
def test_a_stream_that_ends_within_a_batch_ends_in_a_shorter_one(steps: Steps, kind: str, num_workers: int) -> None:
    config = small(NOWHERE, f"parallel={PARALLEL[kind]}", "run.epochs=1")
    expected = reference(config)
    assert expected.num_samples == [13, 13, 13, 13, 3]  # two of seven microbatches are left for the last step
    check_steps(steps(config, even_shares(7, num_workers)), expected)


@pytest.mark.parametrize(
    ("layout", "schedule", "shares"),
    [
        seldom("stages: 2", "1f1b", (7,)),
        seldom("stages: 2", "gpipe", (7,)),
        ("stages: 2, balance: [1, 3]", "1f1b", (1, 4, 2)),
        seldom("stages: 2, balance: [1, 3]", "gpipe", (1, 4, 2)),
        ("stages: 3", "1f1b", (7,)),
        seldom("stages: 3", "gpipe", (7,)),
        # A replica with fewer microbatches than stages.
        seldom("stages: 3, balance: [1, 2, 1]", "1f1b", (6, 1)),
        ("stages: 3, balance: [1, 2, 1]", "gpipe", (6, 1)),
    ],
)
def test_stages_and_replicas_give_the_steps_of_one_process(
    steps: Steps, layout: str, schedule: str, shares: Shares
) -> None:
    config = small(NOWHERE, f"parallel={{kind: pipeline, {layout}, schedule: {schedule}}}", LAYERS, "run.steps=20")
    check_steps(steps(config, shares), twenty(LAYERS))


@pytest.mark.parametrize(
    ("layout", "shares", "checkpointing", "compiled"),
    [
        ("shard_size: 1", (6, 1), "full", "none"),
        ("reduce_every_microbatch: true", (3, 2, 2), "none", "none"),  # three shards of each part
        seldom("shard_size: 1", (7,), "none", "none"),
        seldom("reshard_after_forward: false", (4, 3), "none", "blocks"),
        seldom("wrap: [Linear]", (4, 3), "full", "none"),
    ],
)
def test_parts_of_layers_with_shards_and_replicas_give_the_steps_of_one_process(
    steps: Steps, layout: str, shares: Shares, checkpointing: str, compiled: str
) -> None:
    words = [WHOLE_HEADS, f"memory.activation_checkpointing={checkpointing}", f"compile={compiled}"]
    config = small(NOWHERE, f"parallel={{kind: fsdp, tensor_size: 2, {layout}}}", *words, "run.steps=20")
    check_steps(steps(config, shares), twenty(WHOLE_HEADS))


PARTS_IN_STAGES = "parallel={kind: pipeline, stages: 2, tensor_size: 2}", WHOLE_HEADS, "run.steps=20"


def test_stages_of_parts_of_layers_give_the_steps_of_one_process(steps: Steps) -> None:
    check_steps(steps(small(NOWHERE, *PARTS_IN_STAGES), (7,)), twenty(WHOLE_HEADS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("compile=blocks",),
        ("memory.activation_checkpointing=full", "parallel.schedule=gpipe"),
        # Only the last stage has layers to split.
        ("parallel.plan={layers.1.expand: column, layers.1.project: row}",),
    ],
    ids=["compiled", "recomputed", "one stage"],
)
def test_replicas_of_stages_of_parts_give_the_steps_of_one_process(eight: Gang, words: tuple[str, ...]) -> None:
    config = small(NOWHERE, *PARTS_IN_STAGES, *words)
    check_steps(take_steps(eight, next(EIGHT_ATTEMPTS), config, (5, 2)), twenty(WHOLE_HEADS))


@pytest.fixture(scope="module")
def eight() -> Iterator[Gang]:
    with Gang(8, write_no_code) as gang:
        yield gang


def check_steps(found: Stepped, expected: Reference) -> None:
    check_equal(found.weights, expected.weights)
    assert found.losses == pytest.approx(expected.losses, abs=EQUAL)
    assert found.num_samples == expected.num_samples
    assert found.digests == expected.digests
