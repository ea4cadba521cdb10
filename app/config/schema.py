"""What a configuration may say. Frozen, parsed once, handed out in slices; every default is right untouched.

A section that offers a choice is a union told apart by `kind`; the user's own code may stand in by `target`. Rules
across fields are methods named after the rule; what they raise is said of the field that they are attached to.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator

from app.config.base import Balance, Every, Fraction, Interval, Range, Section, Target, Text, at_most
from app.config.faults import FaultsConfig


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "run"
    """names the run's directory; by default the stem of the configuration's file"""
    storage: Text = "runs"
    """where run directories live: a path, below /mnt/shared if there is one, or a URI (s3://..., gs://...)"""
    resume: Literal["auto", "must", "never"] = "auto"
    """go on from an earlier run of this name: if there is one, always, or refuse to"""
    epochs: PositiveInt | None = None
    """length of the run in passes over the training samples, in place of steps"""
    steps: PositiveInt | None = None
    """length of the run in optimizer steps; 2000 unless epochs is given"""
    init_from: Text | None = None
    """weights to start from in place of random ones: a file that `export` wrote, or any state_dict of the model"""
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 1
    """data order, initial weights and dropout follow from it"""

    @field_validator("steps")
    @classmethod
    def one_length_of_run(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("epochs")
        if steps and epochs:
            raise ValueError(f"must be null where run.epochs is given ({epochs})")
        return steps or (None if epochs else 2000)


class ClusterConfig(Section):
    address: Text = "auto"
    """a Ray cluster; auto takes RAY_ADDRESS, else this machine's cluster, else an embedded one"""


class ScalingConfig(Section):
    num_workers: Range = (1, 8)
    """how many workers, or [min, max]: any number between may train, and the number may change"""
    gpus_per_worker: Literal["auto"] | NonNegativeInt = "auto"
    """auto is 1 where the cluster has a GPU or may start one, else 0"""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that Ray reserves for each worker"""
    start_timeout_s: PositiveFloat = 60.0
    """how long to wait for room for the smallest number of workers, where no autoscaler may make it"""
    placement: Literal["pack", "spread"] = "pack"
    """workers on few nodes, or on many"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """nodes that may have workers, by Ray's node labels: {ray.io/accelerator-type: H100}"""

    @property
    def min_workers(self) -> int:
        return self.num_workers[0]

    @field_validator("num_workers")
    @classmethod
    def min_not_above_max(cls, ends: tuple[int, int]) -> tuple[int, int]:
        if ends[0] > ends[1]:
            raise ValueError("must be [min, max] with min at most max")
        return ends


class BatchConfig(Section):
    global_size: PositiveInt = 48
    """samples in one optimizer step, whatever the number of workers"""
    microbatch_size: PositiveInt = 8
    """samples in one forward and backward pass; the last of a step may be short"""
    balance: Balance = "even"
    """how a step's microbatches are shared out: evenly, by measured speed, or by a {label: weight} of machines"""

    @field_validator("microbatch_size")
    @classmethod
    def microbatch_fits_global_batch(cls, size: int, info: ValidationInfo) -> int:
        if size > (most := info.data.get("global_size", size)):
            raise ValueError(f"must be at most batch.global_size ({most})")
        return size


class GptConfig(Section):
    kind: Literal["gpt"] = "gpt"
    num_layers: PositiveInt = 4
    """transformer blocks"""
    embed_dim: PositiveInt = 128
    """width of the residual stream"""
    num_heads: PositiveInt = 4
    """attention heads in a block"""
    context_length: PositiveInt = 128
    """most tokens the model can look back on"""
    vocab_size: PositiveInt = 256
    """tokens known; 256 for bytes"""
    dropout: Fraction = 0.0
    """share of activations dropped in training"""
    bias: bool = True
    """biases in linear layers and norms"""

    @field_validator("num_heads")
    @classmethod
    def heads_divide_embed_dim(cls, num_heads: int, info: ValidationInfo) -> int:
        if (width := info.data.get("embed_dim", 0)) % num_heads:
            raise ValueError(f"must divide model.embed_dim ({width})")
        return num_heads


class MlpConfig(Section):
    kind: Literal["mlp"] = "mlp"
    in_features: PositiveInt
    """numbers in one input"""
    hidden: tuple[PositiveInt, ...] = (64,)
    """width of each hidden layer"""
    out_features: PositiveInt
    """numbers in one output: classes, or regression targets"""
    dropout: Fraction = 0.0
    """share of activations dropped in training"""


class TaskConfig(Section):
    kind: Literal["language_modeling", "classification", "regression"] = "language_modeling"


class LoaderConfig(Section):
    """How samples are fetched; none of it changes which samples are."""

    num_workers: NonNegativeInt = 0
    """loader processes for each training worker; 0 loads in the worker itself"""
    prefetch_factor: PositiveInt = 2
    """microbatches each loader process keeps ready"""


class DataConfig(LoaderConfig):
    validation_fraction: Fraction = 0.1
    """share of the samples held out, chosen by the seed"""


class TextData(DataConfig):
    kind: Literal["text"] = "text"
    source: Text = "python-docs"
    """"python-docs" (comes with Python), or a glob of text files, read as bytes"""
    context_length: PositiveInt = 128
    """tokens in one sample"""


class TokensData(DataConfig):
    kind: Literal["tokens"] = "tokens"
    path: Text
    """a flat binary file of tokens"""
    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """how one token is stored"""
    context_length: PositiveInt = 128
    """tokens in one sample"""


class TargetData(DataConfig, Target):
    """The user's own map-style dataset."""


class AdamWConfig(Section):
    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    """peak learning rate"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """decoupled weight decay, on matrices only"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """keeps the division finite"""
    max_grad_norm: PositiveFloat | None = 1.0
    """gradients are scaled down to this norm; null for never"""


class CosineConfig(Section):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 50
    """steps in which the rate rises from 0 to lr"""
    min_lr_fraction: Fraction = 0.1
    """where the rate ends, as a share of lr"""


class ConstantConfig(Section):
    kind: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0
    """steps in which the rate rises from 0 to lr"""


class DdpConfig(Section):
    kind: Literal["ddp"] = "ddp"
    bucket_cap_mb: PositiveInt | None = None
    """gradients are reduced in buckets of this size; None is DDP's own default, with a smaller first bucket"""


class FsdpConfig(Section):
    kind: Literal["fsdp"] = "fsdp"


class PrecisionConfig(Section):
    kind: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto is bf16 on a GPU that has it, else fp32"""


class ValidationConfig(Section):
    every: Interval | None = Every(200, "steps")
    """how often to measure the loss on the held-out samples; null for at the end only"""


class KeepBestConfig(Section):
    metric: Text = "loss"
    """one of what validation measures"""
    mode: Literal["min", "max"] = "min"
    """whether the least or the greatest is the best"""


class CheckpointConfig(Section):
    every: Interval = Every(5, "minutes")
    """how often to write a checkpoint; the last step always does"""
    keep_last: PositiveInt = 3
    """how many checkpoints to keep"""
    keep_every: PositiveInt | None = None
    """beside them, the first checkpoint of every so many steps, for good"""
    keep_best: KeepBestConfig | None = None
    """beside them, the one whose last validation was the best"""


class LoggingConfig(Section):
    every_steps: PositiveInt = 10
    """steps between log lines; the device is read only then"""


class RecoveryConfig(Section):
    mode: Literal["auto", "slots", "restart"] = "auto"
    """slots: surviving workers keep running; restart: all of them start anew; auto: slots where they can serve"""
    max_failures: NonNegativeInt = 10
    """failures of one kind survived without a new step between two of them"""
    silence_s: PositiveFloat = 5.0
    """a worker that is not heard of for so long is dead; one whose connection closes is known at once"""
    stall_s: PositiveFloat = 3.0
    """a part of a step may take five times what it mostly takes, and never less than this, before it counts as hung"""
    wait_s: PositiveFloat = 600.0
    """how long a run that has too few workers waits for more, and for the nodes that are to have them"""
    max_skipped_steps: NonNegativeInt = 5
    """steps in any 1000 that are left out for a loss or gradient that is not finite, or spikes; then the run ends,
    or lets a spike pass"""
    spike: PositiveFloat | None = 10.0
    """robust deviations above the median of the last losses that make a spike; null to look for none"""


class TensorBoardConfig(Section):
    kind: Literal["tensorboard"] = "tensorboard"


ScheduleConfig = CosineConfig | ConstantConfig


class Config(Section):
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    batch: BatchConfig = BatchConfig()
    model: GptConfig | MlpConfig | Target = Field(GptConfig(), discriminator="kind")
    task: TaskConfig | Target = Field(TaskConfig(), discriminator="kind")
    data: TextData | TokensData | TargetData = Field(TextData(), discriminator="kind")
    optimizer: AdamWConfig = AdamWConfig()
    schedule: ScheduleConfig = Field(CosineConfig(), discriminator="kind")
    parallel: DdpConfig | FsdpConfig = Field(DdpConfig(), discriminator="kind")
    precision: PrecisionConfig = PrecisionConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    faults: FaultsConfig = FaultsConfig()
    trackers: tuple[TensorBoardConfig, ...] = (TensorBoardConfig(),)

    @model_validator(mode="before")
    @classmethod
    def kind_may_be_left_out(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """It is "target" where there is one, else that of the default."""
        complete = dict(tree)
        for name, field in cls.model_fields.items():
            section = tree.get(name)
            if field.discriminator and isinstance(section, dict):
                kind = "target" if "target" in section else field.default.kind
                complete[name] = {"kind": kind, **section}
        return complete

    @field_validator("schedule")
    @classmethod
    def warmup_not_longer_than_run(cls, schedule: ScheduleConfig, info: ValidationInfo) -> ScheduleConfig:
        at_most(getattr(info.data.get("run"), "steps", None), "run.steps", schedule, "warmup_steps")
        return schedule

    @field_validator("data")
    @classmethod
    def data_context_fits_model(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        at_most(getattr(info.data.get("model"), "context_length", None), "model.context_length", data, "context_length")
        return data
