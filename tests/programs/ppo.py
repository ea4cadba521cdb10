"""PPO: every three steps the policy of that moment acts, and what it has done is the data of the next three."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from steadfast import Sums
from steadfast.hooks.hook import HookContext
from tests.programs.program import Program, Trained, build, numbers, whole_batches

STATES, ACTIONS, EVERY = 33, 4, 3


def Model() -> nn.Module:  # noqa: N802
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, ACTIONS))


def data() -> TensorDataset:
    """Return states with their numbers, by which a rollout has their actions."""
    return TensorDataset(numbers(STATES, 3), torch.arange(STATES))


@torch.no_grad()
def act(policy: nn.Module, step: int) -> dict[str, Tensor]:
    """Return an action for each state, its log probability and its advantage, each (states,)."""
    states = numbers(STATES, 3)
    scores = policy(states).log_softmax(1)
    actions = scores.exp().multinomial(1, generator=torch.Generator().manual_seed(step))[:, 0]
    reward = torch.cos(states.sum(1) + actions)
    return {
        "actions": actions,
        "log_probs": scores.gather(1, actions[:, None])[:, 0],
        "advantages": reward - reward.mean(),
    }


def objective(policy: nn.Module, states: Tensor, rollout: Mapping[str, Tensor], chosen: Tensor) -> Tensor:
    """Return the clipped objective of PPO with a minus sign, summed over samples."""
    actions, before, advantages = (rollout[name][chosen] for name in ("actions", "log_probs", "advantages"))
    scores = policy(states).log_softmax(1)
    ratio = (scores.gather(1, actions[:, None])[:, 0] - before).exp()
    entropy = -(scores.exp() * scores).sum(1)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return torch.as_tensor(-(gain + 0.01 * entropy).sum())


def plain() -> Trained:
    model, losses = build(Model), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rollout: dict[str, Tensor] = {}
    for step, (states, chosen) in enumerate(whole_batches(data()), 1):
        if step % EVERY == 1:
            rollout = act(model, step)
        optimizer.zero_grad()
        loss = objective(model, states, rollout, chosen) / len(states)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


class Rollouts:
    """Hook that acts. What has been done is a part of every checkpoint."""

    def __init__(self) -> None:
        empty = torch.zeros(STATES, dtype=torch.float64)
        Task.rollout = {"actions": empty.long(), "log_probs": empty, "advantages": empty.clone()}

    def on_start(self, run: HookContext) -> None:
        if run.step == 0:
            Task.rollout = act(run.model, 1)

    def on_step(self, run: HookContext) -> None:
        if run.step % EVERY == 0:
            Task.rollout = act(run.model, run.step + 1)

    def state_dict(self) -> dict[str, Tensor]:
        return Task.rollout

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        Task.rollout = {name: tensor.clone() for name, tensor in state.items()}


class Task:
    rollout: dict[str, Tensor]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        states, chosen = batch
        return Sums(objective(model, states, Task.rollout, chosen), len(states))


PROGRAM = Program(
    __name__,
    "PPO: the model makes its data",
    plain,
    words=("optimizer.lr=0.05", f"hooks=[{{target: '{__name__}:Rollouts'}}]"),
    advice="a hook acts, and gives what was done by `state_dict`",
)
