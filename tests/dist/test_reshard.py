"""Any number of ranks reads what any other number wrote, sharded or not: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoint.durable import Checkpoints
from app.checkpoint.restore import restore
from app.checkpoint.state import app_state, flatten, sha256
from app.kept import Kept
from app.optim import build_optimizer
from app.parallel import build_parallel
from app.rundir import RunDirectory
from app.runtime import form_world
from tests.dist.gang import Gang, Member
from tests.dist.reference import CPU
from tests.dist.small import small

SIZES = (1, 2, 3, 4)
KINDS = ("ddp", "fsdp")


def written_or_read(
    member: Member, attempt: int, folder: str, kind: str, size: int, writes: bool
) -> dict[str, str] | None:
    """The digests of what a world of `size` wrote, or found."""
    if member.number >= size:
        return None
    config = small(Path(folder), f"parallel.kind={kind}", "model.dropout=0", "model.embed_dim=20")
    world = form_world(member.store, member.number, size, attempt, CPU)
    try:
        kept = Kept(config, CPU)
        parallel = build_parallel(config, world, kept.precision)
        if not parallel.replicated:
            kept.forget()
        model = parallel.wrap(kept.model)
        optimizer = build_optimizer(config.optimizer, kept.model)
        state = app_state(parallel.plain(model), optimizer)
        checkpoints = Checkpoints(config, RunDirectory.of(config), world, "data", parallel.replicated, kept.writer)
        if writes:
            fill(state)
            checkpoints.save(7, state, {}, last=True)
        else:
            assert restore(state, kept, checkpoints, world.groups, parallel.replicated).step == 7
        return {part: sha256(tensors) for part, tensors in state.items()}
    finally:
        world.groups.destroy()


def fill(state: dict[str, Any]) -> None:
    """Each tensor with numbers of its own, the same in every world."""
    for number, tensor in enumerate(flatten(state).values()):
        whole = torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(number))
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if part is tensor:
            tensor.detach().copy_(whole)
        elif part.numel():
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            part.detach().copy_(whole[offset[0] : offset[0] + len(part)])


@pytest.fixture(scope="module")
def gang() -> Any:
    with Gang(max(SIZES)) as started:
        yield started


def test_one_state_has_one_digest_whoever_wrote_and_whoever_reads_it(gang: Gang, tmp_path: Path) -> None:
    found, attempt = {}, 0
    for kind in KINDS:
        for size in SIZES:
            folder = tmp_path / f"{kind}-{size}"
            for task in [(kind, size, True), *((other, readers, False) for other in KINDS for readers in SIZES)]:
                attempt += 1
                answers = gang.run(written_or_read, attempt, str(folder), *task)
                for answer in answers[: task[1]]:
                    found[(kind, size, *task, answer["model"], answer["optimizer"])] = None
    assert len(found) == len(KINDS) * len(SIZES) * (1 + len(KINDS) * len(SIZES))
    assert len({(model, optimizer) for *_, model, optimizer in found}) == 1
