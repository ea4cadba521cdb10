"""Section `parallel`, by kind: how the model and the batch are divided between workers."""

import itertools
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from steadfast.config.axes import Layout, layout_of_most
from steadfast.config.base import Section, Text

AxisSize = PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Sizes = tuple[int, ...]


def sizes_of(given: int | Sizes) -> Sizes:
    """Return the possible sizes of an axis, the smallest first."""
    return (given,) if isinstance(given, int) else tuple(sorted(set(given)))


class ParallelSection(Section):
    # True if any survivor can pass the state to a new worker, and one rank can write it. If False, lost workers take
    # their shards along, and every rank writes its own shards.
    survivors_hold_all: ClassVar[bool] = True

    @property
    def replica_key(self) -> str:
        """Return the key on which the size of a replica depends."""
        return "parallel.shard_size"

    def layout(self, num_workers: int) -> Layout:
        """Return the layout that trains on most of `num_workers` workers.

        The layout has no ranks if the workers hold no whole model.
        """
        return Layout(num_workers)

    @property
    def smallest_replica(self) -> int:
        """Return the smallest number of workers that hold one whole model."""
        return 1

    @property
    def has_stages(self) -> bool:
        return False

    @property
    def tensor_sizes(self) -> Sizes:
        """Return the possible numbers of workers that compute parts of the same layers for the same samples."""
        return (1,)

    @property
    def has_tensor_parts(self) -> bool:
        return self.tensor_sizes != (1,)

    @property
    def ranks_per_sample(self) -> int:
        """Return the largest number of workers that compute the same samples."""
        return max(self.tensor_sizes)


class DdpConfig(ParallelSection):
    kind: Literal["ddp"] = "ddp"
    reducer: Literal["steadfast", "torch"] = "steadfast"
    """code that sums gradients over workers: steadfast, or torch for its DistributedDataParallel, which runs
    communication hooks of the user's own"""


class TensorSection(ParallelSection):
    tensor_size: AxisSize = 1
    """number of neighbouring workers that compute parts of the same layers for the same samples (tensor parallel). With
    a list, each new world takes the number with which most workers train, and of these the smallest. These workers
    exchange activations in every layer: use it for workers of one machine with fast links between its GPUs"""
    plan: dict[Text, Literal["column", "row"]] | None = None
    """linear layers that tensor_size splits, by name or by a pattern with *: column by outputs, as the first layers of
    a block, and row by inputs, as the layer that takes their results. null for the model's own plan: its method
    tensor_plan() or the _tp_plan of Hugging Face's models, whose embeddings and head stay whole"""

    @property
    def tensor_sizes(self) -> Sizes:
        return sizes_of(self.tensor_size)

    @model_validator(mode="after")
    def tensor_parts_are_of_whole_layers(self) -> Self:
        if self.has_tensor_parts and 1 in self.tensor_sizes:
            raise ValueError("tensor_size must be a number, or a list of numbers from 2 on")
        if self.plan is not None and not self.has_tensor_parts:
            raise ValueError("plan needs a tensor_size of at least 2")
        if self.plan is not None and not {"column", "row"} <= set(self.plan.values()):
            raise ValueError("plan must have layers of both kinds, column and row, which follow each other")
        return self


FsdpUnits = Literal["blocks"] | PositiveInt | tuple[Text, ...]
ParamFormat = Literal["auto", "fp32", "bf16", "fp16"]


class FsdpConfig(TensorSection):
    survivors_hold_all: ClassVar[bool] = False

    kind: Literal["fsdp"] = "fsdp"
    shard_size: AxisSize | Literal["auto"] | None = None
    """number of workers that together hold one model, a replica (HSDP); null for all workers. Further replicas hold the
    same model, and are added or removed whole: workers that do not fill a replica wait. With a list, each new world
    takes the number with which most workers train, and of these the smallest; auto is a list of all numbers from 2 on.
    With tensor_size a replica has shard_size times tensor_size workers, and shard_size may be 1"""
    wrap: FsdpUnits = "blocks"
    """modules that are gathered one at a time: blocks, the repeated layers of the model; a list of class names; or a
    number, for modules with at least this many parameters of their own. The rest of the model stays gathered for the
    whole step"""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """true frees gathered parameters after each forward and each backward: a layer is gathered twice for each
    microbatch. false keeps them until the last backward of a step: a layer is gathered once a step, and a worker needs
    memory for the whole gathered model. auto is false if the second step of a world shows room for that on each GPU,
    else true. On CPUs auto is true, because the memory that is free for a worker is not known there; also after a
    forward ran out of memory. auto has not run on a GPU yet"""
    reduce_every_microbatch: bool = False
    """sum gradients over workers after each microbatch, which saves memory, instead of once per step, which is
    faster"""
    param_dtype: ParamFormat = "auto"
    """dtype of gathered parameters and of the computation; auto is the dtype of precision.kind"""
    reduce_dtype: ParamFormat = "auto"
    """dtype in which gradients are summed over workers; auto is fp32 if precision.kind computes in 16 bits, else the
    dtype of the gathered parameters"""
    prefetch: NonNegativeInt = 0
    """number of modules that are gathered ahead of time; 0 leaves the choice to torch, which gathers one ahead. Raise
    it if the GPU waits for gathers and memory allows"""
    cpu_offload: bool = False
    """keep parameters, gradients and optimizer state in the machine's memory, and update parameters there, so that a
    GPU holds only gathered modules, activations and buffers. Slower; no effect without GPUs. Not run on a GPU yet"""

    def layout(self, num_workers: int) -> Layout:
        found: list[Layout] = []
        for tensor in self.tensor_sizes:
            most = num_workers // tensor
            shards: Iterable[int] = (most,)
            if self.shard_size == "auto":
                # Any other number leaves workers over.
                shards = (next((number for number in range(2, most) if most % number == 0), most),)
            elif self.shard_size is not None:
                shards = sizes_of(self.shard_size)
            # Fewer workers than a tensor group hold no shard.
            found += [Layout(1, 1, shard, tensor) for shard in shards if shard]
        return layout_of_most(num_workers, found)

    @property
    def smallest_replica(self) -> int:
        if self.shard_size is None or self.shard_size == "auto":
            return min(self.tensor_sizes)
        return min(sizes_of(self.shard_size)) * min(self.tensor_sizes)

    @property
    def replica_key(self) -> str:
        if not self.has_tensor_parts:
            return "parallel.shard_size"
        return "parallel.tensor_size" if self.shard_size is None else "parallel.shard_size x parallel.tensor_size"

    @model_validator(mode="after")
    def shards_go_with_tensor_parts(self) -> Self:
        if not self.has_tensor_parts and isinstance(self.shard_size, int | tuple) and 1 in sizes_of(self.shard_size):
            raise ValueError("shard_size must be at least 2 without tensor_size; kind ddp trains without shards")
        if self.cpu_offload and self.has_tensor_parts:
            raise ValueError("cpu_offload must be false with tensor_size, which has not been tried with it")
        return self


class PipelineConfig(TensorSection):
    survivors_hold_all: ClassVar[bool] = False

    kind: Literal["pipeline"] = "pipeline"
    stages: AxisSize = 2
    """number of workers that together hold one model, a replica: each holds some of the repeated layers, and passes its
    results to the next one. Further replicas are added or removed whole. With a list, each new world takes the number
    with which most workers train, and of these the smallest. With tensor_size each stage has as many workers, and a
    replica stages times tensor_size"""
    balance: tuple[PositiveInt, ...] | None = None
    """number of repeated layers of each stage; null for even numbers, as with a list of stages. Give a stage fewer
    layers if its worker is slower or has less memory, or if the last stage's head is large"""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """order of a step's microbatches: 1f1b runs a backward as soon as it can, so that a stage keeps activations of as
    many microbatches as there are stages from it on; gpipe runs all forwards first, and keeps those of all"""

    def layout(self, num_workers: int) -> Layout:
        pairs = itertools.product(sizes_of(self.stages), self.tensor_sizes)
        return layout_of_most(num_workers, [Layout(1, stages, 1, tensor) for stages, tensor in pairs])

    @property
    def smallest_replica(self) -> int:
        return min(sizes_of(self.stages)) * min(self.tensor_sizes)

    @property
    def replica_key(self) -> str:
        return "parallel.stages x parallel.tensor_size" if self.has_tensor_parts else "parallel.stages"

    @property
    def has_stages(self) -> bool:
        return True

    @property
    def ranks_per_sample(self) -> int:
        return max(sizes_of(self.stages)) * super().ranks_per_sample

    @model_validator(mode="after")
    def each_stage_has_layers(self) -> Self:
        numbers = sizes_of(self.stages)
        if 1 in numbers:
            raise ValueError("stages must be at least 2; kind ddp trains without stages")
        if self.balance is not None and numbers != (len(self.balance),):
            raise ValueError("balance must have one number for each stage, and stages must be one number")
        return self


ParallelConfig = DdpConfig | FsdpConfig | PipelineConfig
