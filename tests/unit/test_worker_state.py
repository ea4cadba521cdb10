"""The state of a worker that has no world yet."""

import pytest
import torch

from steadfast.checkpoint.node_memory import Label, ProcessMemory, SnapshotId
from steadfast.checkpoint.state import HeldState
from steadfast.config import parse_config
from steadfast.loop.worker_state import WorkerState
from steadfast.models import build_model
from tests.support.allocator import peak_bytes

RUN = """
model: {num_layers: 2, embed_dim: 64, context_length: 64, num_heads: 2}
data: {context_length: 64}
"""


def test_a_worker_creates_no_optimizer_state_for_a_model_that_is_to_be_sharded() -> None:
    """The state of AdamW is twice the model, and the whole model may fit just so."""
    config = parse_config(RUN, "run.yaml", ["parallel.kind=fsdp", "model.embed_dim=256"])
    whole = sum(param.numel() * param.element_size() for param in build_model(config.model).parameters())
    assert peak_bytes(lambda: WorkerState(config, torch.device("cpu"))) < 2 * whole


@pytest.mark.parametrize("copies", [True, False])
def test_a_state_that_no_rank_can_trust_is_forgotten_with_its_copies_in_memory(copies: bool) -> None:
    memory = ProcessMemory()
    memory.commit(memory.take(8), Label(SnapshotId(6, 1, 1), "", ((0, 0, 8),)))
    worker = WorkerState.__new__(WorkerState)
    worker.held, worker._memory = HeldState(), memory
    worker.held.complete(6)
    worker.forget(copies)
    assert (worker.step, len(memory.stored())) == (0, 0 if copies else 1)
