"""Schema of the configuration: sections, keys and defaults.

A configuration is parsed once, frozen, and handed out in slices. A section that offers a choice is a union, in which
`kind` selects the type; `target` names the user's own code instead. A rule across several fields is a method with the
rule's name. An error is reported at the field of its method, so a rule belongs to the field that is read later.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from steadfast.config.base import (
    NAME,
    Balance,
    Every,
    Fraction,
    Interval,
    Pattern,
    Range,
    Section,
    Target,
    Text,
    Texts,
    Value,
    Variable,
)
from steadfast.config.data_sections import AnyData, DataConfig, TextData
from steadfast.config.faults import FaultsConfig
from steadfast.config.parallel_sections import DdpConfig, FsdpConfig, ParallelConfig, PipelineConfig
from steadfast.plan import End, EvenSamplesPlan, Plan, step_of


class RunConfig(Section):
    name: Annotated[str, Field(pattern=NAME)] = "run"
    """name of the run's directory; the default is the name of the configuration's file without its suffix"""
    storage: Text = "runs"
    """where run directories are stored: a path, which is below /mnt/shared if that exists, or a URI (s3://...,
    gs://...)"""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto resumes a run of this name if there is one; must requires an earlier run, and never forbids one"""
    epochs: PositiveInt | None = None
    """length of the run in passes over the training samples, instead of run.steps; the last step may have fewer
    samples, and a run that is extended later continues after that step"""
    # No default here: a file that gives epochs need not set it to null.
    steps: PositiveInt | None = None
    """length of the run in optimizer steps; 2000 unless run.epochs is given"""
    init_from: Text | None = None
    """file of initial weights, instead of random weights: a file written by `export`, a state_dict of the model, or a
    folder written by Hugging Face's save_pretrained or by torch.distributed.checkpoint"""
    init_strict: bool = True
    """require that run.init_from has exactly the model's parameters; with false, matching parameters are loaded, and
    the run reports the rest"""
    # torch.manual_seed takes a signed 64-bit integer.
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 1
    """number from which data order, initial weights and dropout follow"""
    deterministic: bool = False
    """compute the same bits each time on the same GPUs, which is slower; an operation without a deterministic form
    raises an error"""
    exact: bool = False
    """compute the same bits for any number of workers, any shares and after any failure: gradients are added as
    integers, so that their order has no effect. Needs 8 bytes more per parameter, parallel.kind=ddp, one model of
    processor and the same scaling.cpus_per_worker; implies run.deterministic"""
    report: bool = True
    """write report.html into the run directory when the run ends; `report RUN` writes it at any time"""

    @property
    def reproducible(self) -> bool:
        """Return whether ranks with equal hardware compute bit-equal gradients."""
        return self.deterministic or self.exact

    @field_validator("steps")
    @classmethod
    def one_length_of_run(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("epochs")
        if steps and epochs:
            raise ValueError(f"must be null where run.epochs is given ({epochs})")
        if epochs:
            return None
        return steps or 2000

    def num_steps(self, num_train: int, global_size: int, ends: Sequence[End] = ()) -> int:
        """Return the length of the run in steps.

        Args:
            num_train: number of training samples.
            ends: short steps with which the run once ended, oldest first.
        """
        # Positions count from 0, so the last position of the run is one less than the number of its samples.
        return self.steps or step_of((self.epochs or 0) * num_train - 1, global_size, ends)

    def num_samples(self, num_train: int) -> int | None:
        """Return the number of samples in the run's stream.

        Returns None for a run counted in steps.
        """
        # A run counted in epochs ends with the last sample of the last epoch, so its last step may be short.
        if self.steps:
            return None
        return (self.epochs or 0) * num_train


class ClusterConfig(Section):
    address: Text = "auto"
    """HOST:PORT of a Ray cluster, or local for a Ray that this command starts and that listens on the loopback only;
    auto takes RAY_ADDRESS, else the cluster that this machine has joined by ray start, else local"""
    env: dict[Variable, Value | None] = Field(default_factory=dict)
    """environment variables of the workers; null copies the value from the command's environment without storing it in
    a file"""
    env_prefixes: Texts = ("NCCL_", "TORCH_NCCL_", "GLOO_", "AWS_", "HF_", "WANDB_", "MLFLOW_")
    """also pass on the variables of the command's environment that start with one of these prefixes; [] for none"""
    pip: Texts = ()
    """packages that pip installs for the workers of a cluster: names, a requirements.txt, a wheel, or the folder of a
    project (with a slash) in the working directory; a Ray of this command and torchrun ignore this key"""


_SMALLER = "ask for fewer workers, or lower batch.microbatch_size"


class ScalingConfig(Section):
    num_workers: Range = (1, 8)
    """number of workers, or [min, max] to let the run grow and shrink between the two; workers without a microbatch in
    the global batch are not started"""
    spares: NonNegativeInt = 0
    """extra workers that are started beside the largest number and have built the model, so that one of them replaces a
    dead worker in under a second. Each reserves cores and GPUs like a worker"""
    gpus_per_worker: Literal["auto"] | NonNegativeInt = "auto"
    """GPUs of a worker: 1, or 0 to train on CPUs; auto is 1 if the cluster has a GPU or can start a node with one"""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that Ray reserves for each worker. Raise it if workers have loader processes or train on CPUs"""
    start_timeout_s: PositiveFloat = 60.0
    """seconds to wait until the cluster has room for the smallest number of workers, if no autoscaler can add nodes.
    Raise it if nodes join late"""
    placement: Literal["pack", "spread"] = "pack"
    """pack puts workers on few nodes; spread puts workers on many nodes, so that losing one node costs few workers"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Ray's labels of the nodes that may have workers, such as {ray.io/accelerator-type: H100}"""

    @property
    def min_workers(self) -> int:
        return self.num_workers[0]

    @field_validator("num_workers")
    @classmethod
    def min_not_above_max(cls, ends: tuple[int, int]) -> tuple[int, int]:
        if ends[0] > ends[1]:
            raise ValueError("must be [min, max] with min at most max")
        return ends

    @field_validator("gpus_per_worker")
    @classmethod
    def a_worker_trains_on_one_gpu(cls, number: Literal["auto"] | int) -> Literal["auto"] | int:
        if number not in ("auto", 0, 1):
            raise ValueError("must be 0, 1 or auto: a worker trains on one GPU, so raise num_workers for more")
        return number


class BatchConfig(Section):
    # A step of 48 samples in microbatches of 8 has six microbatches: equal shares for 1, 2, 3 or 6 workers. Any other
    # number of workers gives the same result.
    global_size: PositiveInt = 48
    """samples in one optimizer step, for any number of workers. It is a hyperparameter, and need not follow the number
    of workers"""
    microbatch_size: Literal["auto"] | PositiveInt = 8
    """samples in one forward and backward pass; the last microbatch of a step may have fewer. Raise it for speed, and
    lower it for memory; auto measures at the run's start how many samples fit on the rank with the least free memory,
    leaves a microbatch for each of scaling.num_workers, and keeps the number for the whole run"""
    balance: Balance = "even"
    """how a step's microbatches are distributed: even; even_samples, which also cuts those left over, if the number of
    workers does not divide the microbatches, into a part for each worker; speed, by measured speed; or weights of
    machines by label, {label: weight}. even_samples needs ddp or fsdp and a loss that is a sum over samples: it is
    refused with dropout and other random numbers of the model or task, BatchNorm, data.collate, task.coupled and
    run.exact"""

    @property
    def num_microbatches(self) -> int:
        """Return the largest number of microbatches in a step.

        Further workers would have no microbatch.
        """
        # An automatic size is not known yet, and may be as small as one sample.
        size = 1 if self.microbatch_size == "auto" else self.microbatch_size
        return -(-self.global_size // size)

    @property
    def plan_kind(self) -> type[Plan]:
        """Return the kind of plan that distributes the microbatches at first."""
        return EvenSamplesPlan if self.balance == "even_samples" else Plan

    @property
    def samples_per_microbatch(self) -> int:
        """Return `microbatch_size` as a number, given or chosen."""
        assert self.microbatch_size != "auto", "the size that the run has chosen was not looked up"
        return self.microbatch_size

    def with_microbatches_of(self, size: int) -> Self:
        """Return this section with a number as `microbatch_size`."""
        return self.replace("microbatch_size", size)

    @field_validator("microbatch_size")
    @classmethod
    def microbatch_fits_global_batch(cls, size: Literal["auto"] | int, info: ValidationInfo) -> Literal["auto"] | int:
        global_size = info.data.get("global_size", size)  # missing if invalid itself
        if size != "auto" and size > global_size:
            raise ValueError(f"must be at most batch.global_size ({global_size})")
        return size


class GptConfig(Section):
    kind: Literal["gpt"] = "gpt"
    num_layers: PositiveInt = 4
    """number of transformer blocks"""
    embed_dim: PositiveInt = 128
    """width of the residual stream"""
    num_heads: PositiveInt = 4
    """number of attention heads in a block; must divide model.embed_dim"""
    context_length: PositiveInt = 128
    """largest number of tokens in one input"""
    vocab_size: PositiveInt = 256
    """number of different tokens; 256 for bytes"""
    dropout: Fraction = 0.0
    """share of activations that dropout sets to zero in training, from 0 to below 1"""
    attention_dropout: Fraction | None = None
    """share of attention weights that dropout sets to zero in training; null for model.dropout. Must be 0 with
    parallel.tensor_size, which gives each worker some of the heads"""
    bias: bool = True
    """use biases in linear layers and norms"""

    @property
    def dropout_of_attention(self) -> float:
        """Return the share of attention weights that dropout sets to zero."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @field_validator("num_heads")
    @classmethod
    def heads_divide_embed_dim(cls, num_heads: int, info: ValidationInfo) -> int:
        # An `embed_dim` that is invalid itself is missing here. Any number divides 0, so there is no second error.
        embed_dim = info.data.get("embed_dim", 0)
        if embed_dim % num_heads:
            raise ValueError(f"must divide model.embed_dim ({embed_dim})")
        return num_heads


class MlpConfig(Section):
    kind: Literal["mlp"] = "mlp"
    in_features: PositiveInt
    """number of values in one input"""
    hidden: tuple[PositiveInt, ...] = (64,)
    """width of each hidden layer"""
    out_features: PositiveInt
    """number of values in one output: classes, or regression targets"""
    dropout: Fraction = 0.0
    """share of activations that dropout sets to zero in training, from 0 to below 1"""


class CoupledConfig(Section):
    """Base class of the sections of all tasks."""

    coupled: bool = False
    """set true if the loss of a microbatch is not the sum of its samples' losses, as with in-batch negatives or mixup:
    the samples of a microbatch then always share one forward, even if memory runs out, and batch.microbatch_size must
    be a number"""


class TaskConfig(CoupledConfig):
    kind: Literal["language_modeling", "classification", "regression"] = "language_modeling"
    chunk_tokens: PositiveInt | None = None
    """largest number of tokens whose logits are held in memory at a time, for language_modeling; the logits are
    computed again in the backward. The model's method get_output_embeddings() must return its last layer, an nn.Linear.
    null holds all logits"""
    label_smoothing: Fraction = 0.0
    """share of each label that is spread over all classes, for classification; as in torch's cross_entropy, in
    validation too"""

    @field_validator("chunk_tokens")
    @classmethod
    def only_tokens_come_in_chunks(cls, chunk_tokens: int | None, info: ValidationInfo) -> int | None:
        if chunk_tokens is not None and info.data.get("kind") != "language_modeling":
            raise ValueError(f"must be null with task.kind={info.data.get('kind')}: only language_modeling has tokens")
        return chunk_tokens

    @field_validator("label_smoothing")
    @classmethod
    def only_classes_are_smoothed(cls, label_smoothing: float, info: ValidationInfo) -> float:
        if label_smoothing and info.data.get("kind") != "classification":
            raise ValueError(f"must be 0 with task.kind={info.data.get('kind')}: only classification has labels")
        return label_smoothing


class TargetTask(CoupledConfig, Target):
    """Task of the user's own."""


class OptimizerConfig(Section):
    """Keys that the program itself needs of every optimizer."""

    lr: PositiveFloat = 1e-3
    """peak learning rate"""
    max_grad_norm: PositiveFloat | None = 1.0
    """largest norm of the gradient of a step; a larger gradient is scaled down to it; null for no limit. Lower it if
    the loss spikes"""


class GroupConfig(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: Pattern
    """regular expression that is searched in the parameters' names; the first group that matches a parameter applies"""
    lr_scale: PositiveFloat = 1.0
    """learning rate of the group, as a multiple of optimizer.lr"""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """weight decay of every parameter in the group, matrix or not; null treats them like other parameters"""


class GroupedConfig(OptimizerConfig):
    groups: tuple[GroupConfig, ...] = ()
    """groups of parameters with a learning rate or weight decay of their own"""


class AdamWConfig(GroupedConfig):
    # These defaults are usual for language models. torch's own are a decay of 0.01 and betas of 0.9 and 0.999.
    kind: Literal["adamw"] = "adamw"
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """decoupled weight decay, applied to matrices only"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay rates of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """small number in the denominator, which keeps the division finite"""


class AdamConfig(GroupedConfig):
    kind: Literal["adam"] = "adam"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """factor of the weight that is added to the gradient, for matrices only"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """decay rates of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """small number in the denominator, which keeps the division finite"""


class SgdConfig(GroupedConfig):
    kind: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9
    """share of the last update that is kept in the next update, from 0 to below 1"""
    nesterov: bool = False
    """use Nesterov's momentum; needs optimizer.momentum above 0"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """factor of the weight that is added to the gradient, for matrices only"""

    @field_validator("nesterov")
    @classmethod
    def nesterov_needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        # torch would refuse this too, but only once workers have been started.
        if nesterov and not info.data.get("momentum"):
            raise ValueError("needs optimizer.momentum above 0")
        return nesterov


class MuonConfig(OptimizerConfig):
    """torch's Muon for matrices and AdamW for all other parameters, with one learning rate."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """share of the last update that is kept in the next update, from 0 to below 1"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """decoupled weight decay, applied to matrices only"""
    adamw: Pattern = "head"
    """regular expression that is searched in the names of matrices; AdamW updates the matrices that match, and all
    embeddings"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """small number in AdamW's denominator, which keeps the division finite"""


class TargetOptimizer(OptimizerConfig, Target):
    """Optimizer of the user's own, called with `params`, `lr` and `args`."""


WarmupSteps = Annotated[
    NonNegativeInt, Field(description="steps in which the learning rate rises from 0 to optimizer.lr")
]
EndFraction = Annotated[Fraction, Field(description="learning rate at the end of the run, as a share of optimizer.lr")]


class CosineConfig(Section):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: WarmupSteps = 50
    min_lr_fraction: EndFraction = 0.1


class ConstantConfig(Section):
    kind: Literal["constant"] = "constant"
    warmup_steps: WarmupSteps = 0


class LinearConfig(Section):
    kind: Literal["linear"] = "linear"
    warmup_steps: WarmupSteps = 50
    min_lr_fraction: EndFraction = 0.0


class WsdConfig(Section):
    """Warm-up, stable part, decay: a run may be extended from any step of its stable part."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: WarmupSteps = 50
    decay_fraction: Fraction = 0.1
    """share of the run's steps, at its end, in which the learning rate falls"""
    min_lr_fraction: EndFraction = 0.0


class StepConfig(Section):
    kind: Literal["step"] = "step"
    warmup_steps: WarmupSteps = 0
    every_steps: PositiveInt
    """number of steps after which the learning rate falls each time, counted from the first step of the run"""
    gamma: Fraction = 0.1
    """factor of the learning rate at each fall"""


class OneCycleConfig(Section):
    """torch's OneCycleLR with its defaults, without its changes of momentum."""

    kind: Literal["one_cycle"] = "one_cycle"


class PrecisionConfig(Section):
    kind: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """dtype of the computation: auto is bf16 if the GPUs of all workers support it in hardware, else fp32; fp16 is for
    GPUs without bf16, and scales the loss as torch.amp.GradScaler does: a step with overflowing gradients changes no
    weights on any rank, and lowers the scale"""
    tf32: bool = False
    """compute fp32 products and convolutions on tensor cores, with 10 bits of the factors' 23; faster and less
    precise"""


ActivationCheckpointing = Literal["none", "full", "selective"] | PositiveInt


class MemoryConfig(Section):
    activation_checkpointing: ActivationCheckpointing = "none"
    """which activations of the repeated layers (the layers that fsdp gathers one at a time) are computed again in the
    backward instead of kept, to save memory: full keeps only the layers' inputs; selective also keeps products of
    matrices and attention; 2 is full for every second layer"""


Compile = Literal["none", "blocks"]


class ValidationConfig(Section):
    every: Interval | None = Every(200, "steps")
    """how often to measure the loss on held-out samples; null measures it at the end of the run only. Validate less
    often if validation takes much of the time"""


class KeepBestConfig(Section):
    metric: Text = "loss"
    """name of a metric of validation"""
    mode: Literal["min", "max"] = "min"
    """whether the least or the greatest value is the best"""


class CheckpointConfig(Section):
    # The interval is a time, so that the cost of a failure does not depend on the duration of a step.
    every: Interval = Every(5, "minutes")
    """how often to write a checkpoint; the last step of the run always writes one. A shorter interval loses fewer steps
    with a machine"""
    node_memory: bool = True
    """also keep the newest state in each node's memory, outside of the workers, so that the death of all workers costs
    seconds. Copies take about one per cent of the time, and at most twice the state's size of each node's memory"""
    lose_at_most: Interval = Every(30, "seconds")
    """most training, in seconds, minutes or steps, that is repeated after the loss of a worker whose part no other one
    holds, as under fsdp: the largest age of copies in node memory, whatever they cost. Training waits for the copies of
    a bound in steps. Raise it if copies take too much of the time"""
    trainable_only: bool = False
    """leave out frozen parameters; a resume must get the same ones from the model's target or from run.init_from"""
    keep_last: PositiveInt = 3
    """number of newest checkpoints that are kept. Raise it to keep older states, at the price of storage"""
    keep_every: PositiveInt | None = None
    """also keep one checkpoint for every N steps, which is never deleted"""
    keep_best: KeepBestConfig | None = None
    """also keep the checkpoint with the best validation; a checkpoint then follows each validation"""

    @field_validator("lose_at_most")
    @classmethod
    def a_loss_is_counted_in_steps_or_time(cls, bound: Every) -> Every:
        if bound.unit == "epochs":
            raise ValueError("must be in seconds, minutes or steps")
        return bound


class LoggingConfig(Section):
    # Reading the loss makes the host wait for the device, so only log steps read it.
    every_steps: PositiveInt = 10
    """steps between two log lines; the host waits for the device in these steps only. Raise it if steps are short"""
    gradient_norms_every: Interval | None = None
    """how often trackers draw a histogram of the norms of all parameters' gradients; null for never"""
    weights_digest_every: Interval | None = None
    """how often the ledger gets a digest of the trained weights, in steps or epochs, for `compare`; null for never, or
    for every 100 steps with run.exact. The digest takes rank 0 a second or two per GB; not with fsdp, because no
    worker has all weights"""

    @field_validator("weights_digest_every")
    @classmethod
    def digests_are_of_the_same_steps(cls, every: Every | None) -> Every | None:
        if every is not None and every.unit not in ("steps", "epochs"):
            raise ValueError("must be in steps or epochs: by the clock two runs would have digests of different steps")
        return every


class RecomputeConfig(Section):
    """Checks of a run's own computation during training."""

    every: Interval | None = None
    """how often, as in "100 steps", a second worker computes one microbatch again, to compare the gradients bit by bit:
    a worker that computes wrongly is named and replaced, and its node gets no worker for a while; null for never. With
    checkpoint.every a multiple of it, the step of each checkpoint is checked. Needs run.deterministic or run.exact, ddp
    with its own reducer, and workers with the same model of GPU or processor"""

    @field_validator("every")
    @classmethod
    def counted_in_steps(cls, every: Every | None) -> Every | None:
        if every is not None and every.unit != "steps":
            raise ValueError('must be in steps, such as "100 steps", because all workers must check the same steps')
        return every


class ProfileConfig(Section):
    """torch's records of time and memory, in `profile/` of the run directory."""

    wait: NonNegativeInt = 10
    """steps from the beginning of an attempt to its recording"""
    active: NonNegativeInt = 0
    """steps of the recording, by torch.profiler; 0 for no profile"""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """ranks that record"""
    memory_history: NonNegativeInt = 0
    """number of a GPU's last allocations and frees that are kept with their lines of code, and written for
    https://pytorch.org/memory_viz if the GPU runs out of memory; each takes some KB of host memory and a little time; 0
    for none. Not tried on a GPU yet"""


class RecoveryConfig(Section):
    max_failures: NonNegativeInt = 10
    """number of failures of one kind in a row, without a new step between them, that the run survives; the next one
    ends the run. Kinds are those of the `failure` event. All workers lost in one attempt count as one failure. Raise it
    for unreliable nodes"""
    # Heartbeats come at least five times in this time. A shorter limit would declare a busy machine dead.
    silence_s: PositiveFloat = 5.0
    """seconds without a heartbeat after which a worker counts as dead if its machine does not answer either; if the
    machine answers, a warning is reported. The limit is eight times as long before a worker's first world; a closed
    connection is noticed at once. Raise it for an unreliable network"""
    hang_limit_s: PositiveFloat = 60.0
    """seconds that a rank may block the others before it is ended, with a warning after 3 s. The real limit is longer
    if a phase usually takes longer or if a wrong verdict would cost more: five times this if steps would be lost, and
    ten times if no rank waits for another. Raise it if ranks pause regularly, for a slow file system for example"""
    wait_s: PositiveFloat = 600.0
    """seconds that a run waits for missing workers, including the start of their nodes; also how long copies in node
    memory outlive their last worker and a command that was killed. Raise it if nodes are replaced slowly"""
    max_skipped_steps: NonNegativeInt = 5
    """largest number of steps in any 1000 that the run skips because loss or gradient is not finite or spikes; after
    that, a value that is not finite ends the run, and a spike is ignored. Set 0 to stop at the first value that is not
    finite"""
    # Deviations are measured robustly, because the spikes themselves would raise an ordinary deviation.
    spike: PositiveFloat | None = 10.0
    """height of a spike, in robust deviations of the last losses above their median; null to ignore spikes. Raise it if
    normal losses count as spikes"""


class TensorBoardConfig(Section):
    kind: Literal["tensorboard"] = "tensorboard"


class WandbConfig(Section):
    """Weights & Biases.

    All attempts and resumes of a run are one run there; its id is in `wandb/run.json`. Without WANDB_MODE the run is
    online if there is an API key, in WANDB_API_KEY or from `wandb login`, and else offline: `wandb sync` uploads its
    files as one run.
    """

    kind: Literal["wandb"] = "wandb"
    project: Text = "steadfast"
    """W&B project of the run"""
    entity: Text | None = None
    """W&B user or team of the run; null for the default of the API key"""


class MlflowConfig(Section):
    """MLflow.

    All attempts and resumes of a run are one run there; its id is in `mlflow/run.json`.
    """

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: Text | None = None
    """server or database; null takes MLFLOW_TRACKING_URI, else the database mlflow/mlflow.db in the run directory,
    which `mlflow ui --backend-store-uri sqlite:///PATH` shows"""
    experiment: Text = "steadfast"
    """MLflow experiment of the run"""


class EmaConfig(Section):
    """Exponential moving average of the weights, for validation and export."""

    kind: Literal["ema"] = "ema"
    decay: Fraction = 0.999
    """share of the average that is kept in each step, from 0 to below 1. A larger share averages over more steps"""


class EarlyStoppingConfig(KeepBestConfig):
    kind: Literal["early_stopping"] = "early_stopping"
    patience: PositiveInt = 3
    """number of validations without improvement after which the run finishes. Raise it if the metric is noisy"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """smallest change of the metric that counts as an improvement"""


ScheduleConfig = CosineConfig | ConstantConfig | LinearConfig | WsdConfig | StepConfig | OneCycleConfig | Target
OptimizerKind = AdamWConfig | AdamConfig | SgdConfig | MuonConfig | TargetOptimizer
# A tracker of the user's own is called with `location` (the run directory), `first_step` and `args`.
TrackerConfig = Annotated[TensorBoardConfig | WandbConfig | MlflowConfig | Target, Field(discriminator="kind")]
# `steadfast.hooks.hook.Hook` lists the methods that a hook of the user's own may have.
HookConfig = Annotated[EmaConfig | EarlyStoppingConfig | Target, Field(discriminator="kind")]

_LISTS = ("trackers", "hooks")  # sections that are lists of sections


def _kind_of_validation(section: dict[str, Any]) -> str:
    """Return the default kind of a section `data.validation`."""
    if "target" in section:
        return "target"
    # A collate function alone names no data, so it is for the samples that are held out.
    if set(section) == {"collate"}:
        return "held_out"
    return "text"


def _with_kind(section: Any) -> Any:
    """Return an item of a list of sections, with the kind of a target filled in."""
    if isinstance(section, dict) and "target" in section:
        return {"kind": "target", **section}
    return section


class Config(Section):
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    batch: BatchConfig = BatchConfig()
    model: GptConfig | MlpConfig | Target = Field(default=GptConfig(), discriminator="kind")
    task: TaskConfig | TargetTask = Field(default=TaskConfig(), discriminator="kind")
    data: AnyData = Field(default=TextData(), discriminator="kind")
    optimizer: OptimizerKind = Field(default=AdamWConfig(), discriminator="kind")
    schedule: ScheduleConfig = Field(default=CosineConfig(), discriminator="kind")
    parallel: ParallelConfig = Field(default=DdpConfig(), discriminator="kind")
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    compile: Compile = "none"
    """blocks compiles the repeated layers (the layers that fsdp gathers one at a time) and language_modeling's loss
    with torch.compile for training, which is faster after a slow first step. They are compiled once, for full
    microbatches of samples of one shape; shorter microbatches, validation, hooks and a loss in chunks of tokens run
    uncompiled"""
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    profile: ProfileConfig = ProfileConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    faults: FaultsConfig = FaultsConfig()
    trackers: tuple[TrackerConfig, ...] = (TensorBoardConfig(),)
    hooks: tuple[HookConfig, ...] = ()

    @property
    def weights_digest_every(self) -> Every | None:
        """Return how often the ledger gets a digest of the weights, None for never."""
        every = self.logging.weights_digest_every
        # The weights of two exact runs must be equal, so their ledgers get digests for `compare` by default.
        if every is None and self.run.exact:
            return Every(100, "steps")
        return every

    def world_sizes(self, bounds: tuple[int, int], num_microbatches: int | None = None) -> list[int]:
        """Return the possible sizes of a world within `bounds`.

        In each size the replicas are whole, and every worker has a microbatch.

        Args:
            num_microbatches: of a step, if not as the configuration says.
        """
        # Training needs at least one whole replica.
        least = self.parallel.smallest_replica
        most = num_microbatches or self.batch.num_microbatches
        smallest, largest = bounds
        found: list[int] = []
        for size in range(max(smallest, least), min(largest, max(least, most * self.parallel.ranks_per_sample)) + 1):
            layout = self.parallel.layout(size)
            if layout.size == size and (layout.data_size <= most or size == least):
                found.append(size)
        return found

    def targets(self) -> dict[str, str]:
        """Return the targets of the user's own code, by key."""
        return {f"{key}.target": section.target for key, section in self.target_sections().items()}

    def target_sections(self) -> dict[str, Target]:
        """Return the sections that name or hold the user's own code, by key."""
        # A section with a target is itself a Target, but in `data` its parts may be targets too.
        found = {name: section for name, section in self if isinstance(section, Target)}
        validation = self.data.validation
        parts = {
            "collate": getattr(self.data, "collate", None),
            "order": self.data.order,
            "validation": validation,
            "validation.collate": getattr(validation, "collate", None),
        }
        for index, source in enumerate(getattr(self.data, "sources", ())):
            parts[f"sources.{index}"] = source
            parts[f"sources.{index}.order"] = source.order
        for name, part in parts.items():
            if isinstance(part, Target):
                found[f"data.{name}"] = part
        for name in _LISTS:
            for index, section in enumerate(getattr(self, name)):
                if isinstance(section, Target):
                    found[f"{name}.{index}"] = section
        return found

    @model_validator(mode="before")
    @classmethod
    def kind_may_be_left_out(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Fill in missing kinds: "target" for a target, else the default."""
        # Pydantic selects the member of a union by its kind, so the kind must be there before the validation.
        complete = dict(tree)
        for name, field in cls.model_fields.items():
            section = tree.get(name)
            if field.discriminator and isinstance(section, dict):
                kind = "target" if "target" in section else field.default.kind
                complete[name] = {"kind": kind, **section}
        data = complete.get("data")
        if isinstance(data, dict) and isinstance(data.get("sources"), list):
            data = complete["data"] = {**data, "sources": list(map(_with_kind, data["sources"]))}
        if isinstance(data, dict) and isinstance(data.get("validation"), dict):
            own = {"kind": _kind_of_validation(data["validation"]), **data["validation"]}
            # Otherwise the model would be validated on samples of another size than its training samples, without an
            # error.
            if own["kind"] == data["kind"]:
                for name in ("context_length", "image_size", "end_token"):
                    if name in data:
                        own.setdefault(name, data[name])
            complete["data"] = {**data, "validation": own}
        for name in _LISTS:
            if isinstance(tree.get(name), list):
                complete[name] = list(map(_with_kind, tree[name]))
        return complete

    @field_validator("parallel")
    @classmethod
    def muon_needs_whole_matrices(cls, parallel: ParallelConfig, info: ValidationInfo) -> Section:
        if not isinstance(info.data.get("optimizer"), MuonConfig):
            return parallel
        if isinstance(parallel, FsdpConfig):
            raise ValueError("must not be fsdp with optimizer.kind=muon, whose update needs whole matrices")
        if parallel.has_tensor_parts:
            raise ValueError("must be without tensor_size with optimizer.kind=muon, whose update needs whole matrices")
        return parallel

    @field_validator("parallel", "precision", "compile")
    @classmethod
    def exact_sums_are_those_of_ddp(cls, section: Any, info: ValidationInfo) -> Any:
        # A section that is invalid itself is missing from `info.data`. Its default takes its place here and below, so
        # that one mistake does not cause a second error.
        if not info.data.get("run", RunConfig()).exact:
            return section
        if info.field_name == "parallel" and (not isinstance(section, DdpConfig) or section.reducer != "steadfast"):
            raise ValueError("must be {kind: ddp} with run.exact, which sums integers in its own gradient buckets")
        if info.field_name == "precision" and section.kind == "fp16":
            raise ValueError("must not be of kind fp16 with run.exact: take bf16, fp32 or fp64")
        if info.field_name == "compile" and section != "none":
            raise ValueError("must be none with run.exact: compiled code may round differently on another machine")
        return section

    @field_validator("recompute")
    @classmethod
    def what_is_compared_is_reproducible(cls, recompute: RecomputeConfig, info: ValidationInfo) -> RecomputeConfig:
        parallel = info.data.get("parallel", DdpConfig())
        if recompute.every is None:
            return recompute
        context = {"key": "recompute.every"}
        if not (isinstance(parallel, DdpConfig) and parallel.reducer == "steadfast"):
            message = "must be null without parallel.kind=ddp and parallel.reducer=steadfast, whose buckets it compares"
            raise PydanticCustomError("rule", message, context)
        if not info.data.get("run", RunConfig()).reproducible:
            message = "needs run.deterministic=true or run.exact=true: otherwise two workers round differently"
            raise PydanticCustomError("rule", message, context)
        return recompute

    @field_validator("compile")
    @classmethod
    def checkpointed_parts_are_not_compiled(cls, compile: Compile, info: ValidationInfo) -> Compile:
        is_checkpointed = info.data.get("memory", MemoryConfig()).activation_checkpointing != "none"
        if compile != "none" and is_checkpointed and info.data.get("parallel", DdpConfig()).has_tensor_parts:
            raise ValueError(
                "must be none with parallel.tensor_size and memory.activation_checkpointing: torch.compile cannot "
                "save a device mesh for the backward pass"
            )
        return compile

    @field_validator("logging")
    @classmethod
    def a_digest_is_of_weights_in_one_place(cls, logging: LoggingConfig, info: ValidationInfo) -> LoggingConfig:
        parallel = info.data.get("parallel", DdpConfig())
        if logging.weights_digest_every is not None and not parallel.survivors_hold_all:
            context = {"key": "logging.weights_digest_every", "kind": parallel.kind}
            message = "must be null with parallel.kind={kind}, because no worker has all weights"
            raise PydanticCustomError("rule", message, context)
        return logging

    @field_validator("task")
    @classmethod
    def coupled_samples_share_a_forward(cls, task: CoupledConfig, info: ValidationInfo) -> CoupledConfig:
        if task.coupled and info.data.get("batch", BatchConfig()).microbatch_size == "auto":
            message = "must be a number with task.coupled=true: the loss depends on which samples share a microbatch"
            raise PydanticCustomError("rule", message, {"key": "batch.microbatch_size"})
        return task

    @field_validator("parallel")
    @classmethod
    def cut_microbatches_are_sums_of_samples(cls, parallel: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        if info.data.get("batch", BatchConfig()).balance != "even_samples":
            return parallel
        model = info.data.get("model")
        draws = getattr(model, "dropout", 0.0) or getattr(model, "dropout_of_attention", 0.0)
        refused = (
            (not isinstance(parallel, DdpConfig | FsdpConfig), "without parallel.kind ddp or fsdp"),
            (info.data.get("run", RunConfig()).exact, "with run.exact: a part of a microbatch rounds differently"),
            (info.data.get("task", TaskConfig()).coupled, "with task.coupled, which keeps a microbatch together"),
            (draws, "with dropout in the model: a part of a microbatch would draw other numbers"),
            (getattr(info.data.get("data"), "collate", None), "with data.collate, which makes whole microbatches"),
        )
        for applies, why in refused:
            if applies:
                raise PydanticCustomError("rule", f"must not be even_samples {why}", {"key": "batch.balance"})
        return parallel

    @field_validator("data")
    @classmethod
    def data_context_fits_model(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        # A model or data of another kind may have no context at all.
        limit = getattr(info.data.get("model"), "context_length", None)
        sections = {"data": data}
        sections |= {f"data.sources[{index}]": source for index, source in enumerate(getattr(data, "sources", ()))}
        for key, section in sections.items():
            found = getattr(section, "context_length", 0)
            if limit is not None and found > limit:
                # A ValueError would be reported at the section. This error names the key, so that the key's line is
                # reported.
                context = {"key": f"{key}.context_length", "limit": limit, "found": found}
                message = "must be at most model.context_length ({limit}), found {found}"
                raise PydanticCustomError("rule", message, context)
        return data

    @model_validator(mode="after")
    def some_world_has_whole_replicas(self) -> Self:
        # This rule needs the finished configuration, because `world_sizes` reads several sections.
        bounds = self.scaling.num_workers
        smallest = self.scaling.min_workers
        if smallest > self.batch.num_microbatches * self.parallel.ranks_per_sample:
            context = {"key": "scaling.num_workers", "limit": self.batch.num_microbatches, "found": smallest}
            message = "at least {found} workers have only {limit} microbatches in a global batch; " + _SMALLER
            raise PydanticCustomError("rule", message, context)
        if not self.world_sizes(bounds):
            context = {"key": self.parallel.replica_key, "bounds": list(bounds), "limit": self.batch.num_microbatches}
            message = (
                "no number of workers in scaling.num_workers {bounds} is a multiple of it and at most the {limit} "
                "microbatches of a global batch"
            )
            raise PydanticCustomError("rule", message, context)
        return self

    @field_validator("parallel")
    @classmethod
    def stages_work_in_turn(cls, parallel: Section, info: ValidationInfo) -> Section:
        batch = info.data.get("batch", BatchConfig())
        if not isinstance(parallel, PipelineConfig):
            return parallel
        if batch.microbatch_size == "auto":
            message = "must be a number with parallel.kind=pipeline: auto measures a worker that holds all layers"
            raise PydanticCustomError("rule", message, {"key": "batch.microbatch_size"})
        if batch.balance == "speed":
            message = "must be even or weights by label with parallel.kind=pipeline, whose stages wait for each other"
            raise PydanticCustomError("rule", message, {"key": "batch.balance"})
        return parallel

    @field_validator("parallel")
    @classmethod
    def tensor_parts_are_equal(cls, parallel: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        if not parallel.has_tensor_parts:
            return parallel
        batch, model = info.data.get("batch", BatchConfig()), info.data.get("model")
        if batch.microbatch_size == "auto":
            message = "must be a number with parallel.tensor_size: auto measures each worker by itself"
            raise PydanticCustomError("rule", message, {"key": "batch.microbatch_size"})
        if batch.balance == "speed":
            message = "must be even or weights by label with parallel.tensor_size, whose workers wait for each other"
            raise PydanticCustomError("rule", message, {"key": "batch.balance"})
        if isinstance(model, GptConfig):
            for num_parts in parallel.tensor_sizes:
                if model.num_heads % num_parts:
                    context = {"key": "model.num_heads", "size": num_parts, "found": model.num_heads}
                    message = "must be a multiple of parallel.tensor_size ({size}), found {found}"
                    raise PydanticCustomError("rule", message, context)
            if model.dropout_of_attention:
                context = {"key": "model.attention_dropout"}
                message = (
                    "must be 0 with parallel.tensor_size: each worker has some of the heads, and would draw other "
                    "numbers than one process; model.dropout may stay as it is"
                )
                raise PydanticCustomError("rule", message, context)
        return parallel

    @field_validator("parallel")
    @classmethod
    def chunks_need_the_model_itself(cls, parallel: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        task = info.data.get("task")
        if not isinstance(task, TaskConfig) or task.chunk_tokens is None:
            return parallel
        if isinstance(parallel, DdpConfig) and parallel.reducer == "torch":
            message = "must be null with parallel.reducer=torch, which copies the outputs of the model"
            raise PydanticCustomError("rule", message, {"key": "task.chunk_tokens"})
        return parallel
