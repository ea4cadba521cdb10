"""What a worker holds when an exception in the user's code ends the run is saved, if it is worth that."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from app.checkpoint.durable import Checkpoints
from app.checkpoint.state import Tensors, app_state, flatten
from app.config import Config
from app.errors import SteadfastError
from app.faults.numerics import BadStep
from app.groups import is_peer_loss
from app.kept import Kept
from app.rundir import RunDirectory
from app.runtime import Runtime, World

_LIMIT_S = 60.0


def rescue(
    config: Config, runtime: Runtime, world: World, kept: Kept, directory: RunDirectory, error: BaseException
) -> None:
    """Writes a checkpoint of the last step that was done, or says why not. For errors of the user's own only: after
    others the state is on storage, with a survivor, or not to be trusted."""
    if kept.held <= 0 or isinstance(error, BadStep | SteadfastError) or is_peer_loss(error):
        return
    if kept.held == kept.writer.committed:  # it is on storage
        return
    said = {"attempt": world.attempt, "step": kept.held}
    optimizer = cast(torch.optim.Optimizer, kept.optimizer)
    state = app_state(kept.model, optimizer) if config.parallel.kind == "ddp" else {}
    if why_not := _why_not(state, kept.model, world):
        runtime.publish({"event": "not_saved", **said, "error": why_not})
        return
    checkpoints = Checkpoints(config, directory, world, kept.fingerprint, True, kept.writer)
    checkpoints.save_alone(kept.held, state, {})
    try:
        checkpoints.finish(_LIMIT_S)
    except SteadfastError as late:
        runtime.publish({"event": "not_saved", **said, "error": str(late)})
    for news in checkpoints.news():
        runtime.publish({"attempt": world.attempt, **news})


def _why_not(state: dict[str, Tensors], model: nn.Module, world: World) -> str:
    if not state:
        return "the state is spread over workers that have stopped"
    if world.progress.phase == "update":
        return "the exception came while the weights were being updated"
    learned = {**dict(model.named_parameters()), **flatten(state["optimizer"])}  # a mask may hold infinities
    if not all(bool(tensor.isfinite().all()) for tensor in learned.values()):
        return "some of the weights are not finite"
    return ""
