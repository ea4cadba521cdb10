"""Optimizers, and the rescaling and clipping of gradients before an update."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from steadfast.config import (
    AdamConfig,
    AdamWConfig,
    GroupedConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
    TargetOptimizer,
)
from steadfast.errors import ConfigError, Problem
from steadfast.optim.own_optimizer import begin_added, build_own, parameters_of
from steadfast.optim.schedule import Schedule
from steadfast.parallel.dtensor import is_sharded, is_split, local, unsharded
from steadfast.parallel.precision import Precision
from steadfast.parallel.stages import held_elsewhere

PEAK = "initial_lr"  # torch's own name for a parameter group's rate before a schedule scales it


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer over the parameters that require a gradient."""
    optimizer = _build(config, model)
    # The schedule overwrites `lr`. Each group keeps its own peak, because a user's optimizer may have several.
    for group in optimizer.param_groups:
        group.setdefault(PEAK, float(group["lr"]))
    members: Sequence[torch.optim.Optimizer] = [optimizer]
    if isinstance(optimizer, _CombinedOptimizer):
        members = optimizer.members
    for member in members:
        if type(member) in (torch.optim.AdamW, torch.optim.Adam):
            _keep_lists(member)
    return optimizer


def _build(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    match config:
        case AdamWConfig() | AdamConfig():
            groups = _groups(config, config.weight_decay, model)
            # One kernel in place of hundreds: on CUDA, launches are most of a small model's update.
            fused = any(param.is_cuda for param in parameters_of(groups))
            kind = torch.optim.AdamW if isinstance(config, AdamWConfig) else torch.optim.Adam
            return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
        case MuonConfig():
            return _muon(config, model)
        case SgdConfig():
            groups = _groups(config, config.weight_decay, model)
            # Kernels over several tensors take no parts of layers together with whole ones, which are on another mesh.
            foreach = False if any(map(is_split, parameters_of(groups))) else None
            return torch.optim.SGD(
                groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, foreach=foreach
            )
        case TargetOptimizer():
            return build_own(config, [param for param in model.parameters() if param.requires_grad])
    raise TypeError(type(config))


class _CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, each with its own parameters."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        groups: list[dict[str, Any]] = []
        for member in members:
            groups += member.param_groups
        super().__init__([{"params": group["params"]} for group in groups], {})
        # The base class has made new groups. The members' own groups replace them, so that new rates reach the members.
        self.param_groups = groups
        self.members = members
        # One dictionary holds the state of all members, in which checkpoints find every parameter.
        for member in members:
            member.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step()


def _keep_lists(optimizer: Any) -> None:
    """Let Adam keep the lists of its tensors from step to step.

    Of DTensors the lists hold this rank's parts, which suffice for an elementwise update.
    """
    collect = optimizer._init_group
    sharded = any(map(is_sharded, parameters_of(optimizer.param_groups)))
    kept: dict[int, tuple[list[Any], list[list[Tensor]], Any]] = {}

    # Collecting takes the host a good part of an update, and an operation on a DTensor takes many times as long as one
    # on its local part.
    def fill(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        """Fill the lists with a group's parameters, gradients and moments."""
        params = [param for param in group["params"] if param.grad is not None]
        gradients = [param.grad for param in params]
        states = optimizer.state.values()
        sources, parts, answer = kept.get(id(group), ([], [], None))
        # A checkpoint, a new parameter or user code may have replaced any of them.
        if not _are_same(sources, [*params, *chain.from_iterable(map(dict.values, states))]):
            answer = collect(group, *lists)
            parts = [list(map(local, tensors)) for tensors in lists]
            sources = [*params, *chain.from_iterable(map(dict.values, states))]
            kept[id(group)] = sources, parts, answer
        for tensors, own in zip(lists, parts, strict=True):
            tensors[:] = own
        lists[1][:] = map(local, gradients) if sharded else gradients
        return answer

    optimizer._init_group = fill


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _muon(config: MuonConfig, model: nn.Module) -> torch.optim.Optimizer:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, param in model.named_parameters():
        if param.requires_grad:
            if param.dim() == 2 and param not in embeddings and not re.search(config.adamw, name):
                matrices.append(param)
            else:
                others.append(param)
    if not matrices:
        what = "finds no matrix that optimizer.adamw leaves to it; take adamw"
        raise ConfigError([Problem("", "optimizer.kind", what)])
    # With updates as large as AdamW's, one rate suits both (arXiv:2502.16982).
    muon = torch.optim.Muon(matrices, config.lr, config.weight_decay, config.momentum, adjust_lr_fn="match_rms_adamw")
    decayed = _decay_matrices_only(others, config.weight_decay)
    adamw = torch.optim.AdamW(decayed, config.lr, config.betas, config.eps, fused=matrices[0].is_cuda)
    return _CombinedOptimizer(muon, adamw)


def _groups(config: GroupedConfig, weight_decay: float, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups, first the parameters without a configured group."""
    members: list[list[nn.Parameter]] = [[] for _ in (None, *config.groups)]
    for name, param in model.named_parameters():
        if param.requires_grad:
            members[_number_of_group(config, name)].append(param)
    groups = _decay_matrices_only(members[0], weight_decay)
    elsewhere = {_number_of_group(config, name) for name, param in held_elsewhere(model).items() if param.requires_grad}
    for index, group in enumerate(config.groups, 1):
        if not (members[index] or index in elsewhere):
            what = f'"{group.match}" is in the name of no parameter that trains and that no group before it matches'
            first = {param: name for name, param in model.named_parameters()}
            for name, param in model.named_parameters(remove_duplicate=False):
                if name != first[param] and re.search(group.match, name):
                    what += f"; {name} is the same parameter as {first[param]}"
            raise ConfigError([Problem("", f"optimizer.groups.{index - 1}.match", what)])
        if group.weight_decay is None:
            parts = _decay_matrices_only(members[index], weight_decay)
        else:
            parts = [{"params": members[index], "weight_decay": group.weight_decay}]
        for part in parts:
            if part["params"]:
                groups.append({**part, "lr": config.lr * group.lr_scale})
    return groups


def _number_of_group(config: GroupedConfig, name: str) -> int:
    """Return the group of a parameter, counted from 1; 0 for none.

    This is the first group whose regular expression is found in the parameter's name.
    """
    for number, group in enumerate(config.groups, 1):
        if re.search(group.match, name):
            return number
    return 0


def _decay_matrices_only(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups, the second without weight decay."""
    # Decay harms biases, gains and other one-dimensional parameters: pulled to zero, a norm would disable its layer.
    matrices = [param for param in params if param.dim() >= 2]
    vectors = [param for param in params if param.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def refuse_sparse(model: nn.Module) -> None:
    """Raise ConfigError for a layer with sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            what = (
                f"its layer {name} has sparse=True, but gradients here are dense, as are all updates. "
                f"Build the {type(module).__name__} with sparse=False"
            )
            raise ConfigError([Problem("", "model", what)])


def extend_optimizer(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, model: nn.Module, added: Iterable[nn.Parameter]
) -> None:
    """Add parameters to the groups in which a new optimizer would have them."""
    trained = {*parameters_of(optimizer.param_groups), *added}
    flags = {param: param.requires_grad for param in model.parameters()}
    for param in flags:
        param.requires_grad_(param in trained)  # also a parameter that is frozen now and was trained before
    try:
        wanted = build_optimizer(config, model)
    finally:
        for param, flag in flags.items():
            param.requires_grad_(flag)
    same = len(wanted.param_groups) == len(optimizer.param_groups)
    missing = trained.difference(parameters_of(optimizer.param_groups))
    for index, group in enumerate(wanted.param_groups):
        own = [param for param in group["params"] if param in missing]
        peers = [each for each in optimizer.param_groups if not set(each["params"]).isdisjoint(group["params"])]
        if same:
            peers = [optimizer.param_groups[index]]
        if peers:
            peers[0]["params"] += own
        elif own:
            optimizer.add_param_group({**group, "params": own})
    if isinstance(config, TargetOptimizer):
        begin_added(optimizer, wanted, missing)


def set_learning_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, step: int) -> float:
    """Set all parameter groups' rates for `step`; return the first."""
    for group in optimizer.param_groups:
        group["lr"] = schedule(step, group[PEAK])
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


@torch.no_grad()
def rescale_gradients(
    model: nn.Module,
    precision: Precision,
    correction: float | Tensor,
    max_norm: float | None,
    whole_norms: Callable[[Tensor, list[Tensor]], Tensor],
) -> tuple[Tensor, Tensor]:
    """Multiply all gradients by `correction`, then clip their norm.

    `correction` is the same on every rank. `Precision.loss_scale` is divided out first. Clipping limits the global norm
    to `max_norm`.

    Args:
        whole_norms: as `Parallel.whole_norms`.

    Returns:
        The norm of the whole gradient after the correction and before clipping, (), which is never sharded; and the
        norm of each parameter's gradient before the correction, (parameters,), sharded as the gradients are.
    """
    # Correction and clipping share one pass over the gradients, which moves as many bytes as the model has.
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    if not gradients:  # the step has used no parameter
        nothing = torch.zeros(1, device=precision.device)
        return nothing[0], nothing
    # Computed on local parts, because the foreach kernels do not support sharded tensors.
    parts = list(map(local, gradients))
    norms = whole_norms(_norms(parts), gradients)
    norm = unsharded(torch.linalg.vector_norm(norms))
    correction = correction / precision.loss_scale
    norm = norm * correction
    if max_norm is not None:
        # The factor is computed on the device: an `if` on the norm would make the host wait for it.
        correction = (max_norm / (norm + 1e-6)).clamp(max=1.0) * correction
    precision.rescale(parts, correction)
    return norm, norms


def _norms(gradients: list[Tensor]) -> Tensor:
    """Return the norm of each gradient, (parameters,), as torch's get_total_norm does."""
    return torch.stack(list(torch._foreach_norm(gradients)))
