"""What a configuration may say. Frozen, parsed once, handed out in slices; every default is right untouched.

A section that offers a choice is a union told apart by `kind` (the first member where none is named), or by
`target` where the user's own code may stand in. Rules across fields are methods named after the rule.
"""

from typing import Annotated, Literal

from pydantic import Field

from app.config.base import (
    Amount,
    ByKind,
    Count,
    Every,
    Fraction,
    Interval,
    Positive,
    PositiveAmount,
    Range,
    Section,
    Target,
    Text,
    rule,
)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "run"
    """names the run's directory; by default the stem of the configuration's file"""
    storage: Text = "runs"
    """where run directories live: a path or a URI (s3://..., gs://...)"""
    resume: Literal["auto", "must", "never"] = "auto"
    """go on from an earlier run of this name: if there is one, always, or refuse to"""
    epochs: Positive | None = None
    """length of the run in passes over the training samples, in place of steps"""
    # Declared after `epochs`, because the default looks at it.
    steps: Positive | None = Field(default_factory=lambda given: None if given.get("epochs") else 2000)
    """length of the run in optimizer steps; 2000 unless epochs is given"""
    seed: Annotated[Count, Field(lt=2**63)] = 1
    """data order, initial weights and dropout follow from it"""

    @rule("steps")
    def one_length_of_run(self) -> str | None:
        if self.steps and self.epochs:
            return f"give steps or epochs, found both ({self.steps} and {self.epochs})"
        return None if self.steps or self.epochs else "give steps or epochs, found neither"


class ClusterConfig(Section):
    address: Text = "auto"
    """a Ray cluster; auto takes RAY_ADDRESS, else this machine's cluster, else an embedded one"""


class ScalingConfig(Section):
    num_workers: Range = (1, 8)
    """how many workers, or [min, max]: any number between may train, and the number may change"""
    gpus_per_worker: Literal["auto"] | Count = "auto"
    """auto is 1 where the cluster has a GPU or may start one, else 0"""
    cpus_per_worker: Positive = 1
    """CPU cores that Ray reserves for each worker"""
    start_timeout_s: PositiveAmount = 60.0
    """how long to wait for the smallest number of workers before giving up"""

    @property
    def min_workers(self) -> int:
        return self.num_workers[0]

    @property
    def max_workers(self) -> int:
        return self.num_workers[1]

    @rule("num_workers")
    def min_not_above_max(self) -> str | None:
        low, high = self.num_workers
        return f"min must be at most max, found [{low}, {high}]" if low > high else None


class BatchConfig(Section):
    global_size: Positive = 48
    """samples in one optimizer step, whatever the number of workers"""
    microbatch_size: Positive = 8
    """samples in one forward and backward pass; the last of a step may be short"""
    balance: Literal["even"] = "even"
    """how a step's microbatches are shared out among the workers"""

    @property
    def num_microbatches(self) -> int:
        return -(-self.global_size // self.microbatch_size)

    @rule("microbatch_size")
    def microbatch_fits_global_batch(self) -> str | None:
        size, most = self.microbatch_size, self.global_size
        return None if size <= most else f"must be at most batch.global_size ({most}), found {size}"


class GptConfig(Section):
    kind: Literal["gpt"] = "gpt"
    num_layers: Positive = 4
    """transformer blocks"""
    num_heads: Positive = 4
    """attention heads in a block"""
    embed_dim: Positive = 128
    """width of the residual stream"""
    context_length: Positive = 128
    """most tokens the model can look back on"""
    vocab_size: Positive = 256
    """tokens known; 256 for bytes"""
    dropout: Fraction = 0.0
    """share of activations dropped in training"""
    bias: bool = True
    """biases in linear layers and norms"""

    @rule("num_heads")
    def heads_divide_embed_dim(self) -> str | None:
        fits = self.embed_dim % self.num_heads == 0
        return None if fits else f"must divide model.embed_dim ({self.embed_dim}), found {self.num_heads}"


class MlpConfig(Section):
    kind: Literal["mlp"] = "mlp"
    in_features: Positive
    """numbers in one input"""
    hidden: tuple[Positive, ...] = (64,)
    """width of each hidden layer"""
    out_features: Positive
    """numbers in one output: classes, or regression targets"""
    dropout: Fraction = 0.0
    """share of activations dropped in training"""


class LanguageModelingConfig(Section):
    kind: Literal["language_modeling"] = "language_modeling"


class ClassificationConfig(Section):
    kind: Literal["classification"] = "classification"


class RegressionConfig(Section):
    kind: Literal["regression"] = "regression"


class LoaderConfig(Section):
    """How samples are fetched; none of it changes which samples are."""

    num_workers: Count = 0
    """loader processes for each training worker; 0 loads in the worker itself"""
    prefetch_factor: Positive = 2
    """microbatches each loader process keeps ready"""
    pin_memory: Literal["auto"] | bool = "auto"
    """page-locked host memory, for faster copies; auto is true on a GPU"""
    persistent_workers: bool = True
    """keep loader processes alive between epochs and attempts"""


class DataConfig(LoaderConfig):
    validation_fraction: Fraction = 0.1
    """share of the samples held out, chosen by the seed"""


class TextData(DataConfig):
    kind: Literal["text"] = "text"
    source: Text = "python-docs"
    """"python-docs" (comes with Python), or a glob of text files, read as bytes"""
    context_length: Positive = 128
    """tokens in one sample"""


class TokensData(DataConfig):
    kind: Literal["tokens"] = "tokens"
    path: Text
    """a flat binary file of tokens"""
    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """how one token is stored"""
    context_length: Positive = 128
    """tokens in one sample"""


class TargetData(DataConfig, Target):
    """The user's own map-style dataset."""


class AdamWConfig(Section):
    kind: Literal["adamw"] = "adamw"
    lr: PositiveAmount = 1e-3
    """peak learning rate"""
    weight_decay: Amount = 0.1
    """decoupled weight decay, on matrices only"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay of the running mean and of the running square"""
    eps: PositiveAmount = 1e-8
    """keeps the division finite"""
    max_grad_norm: PositiveAmount | None = 1.0
    """gradients are scaled down to this norm; null for never"""


class CosineConfig(Section):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: Count = 50
    """steps in which the rate rises from 0 to lr"""
    min_lr_fraction: Annotated[Amount, Field(le=1)] = 0.1
    """where the rate ends, as a share of lr"""


class ConstantConfig(Section):
    kind: Literal["constant"] = "constant"
    warmup_steps: Count = 0
    """steps in which the rate rises from 0 to lr"""


class DdpConfig(Section):
    kind: Literal["ddp"] = "ddp"
    bucket_cap_mb: Positive = 25
    """gradients are reduced in buckets of this size"""


class FsdpConfig(Section):
    kind: Literal["fsdp"] = "fsdp"


class PrecisionConfig(Section):
    kind: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """auto is bf16 on a GPU that has it, else fp32"""


class ValidationConfig(Section):
    every: Interval | None = Every(200, "steps")
    """how often to measure the loss on the held-out samples; null for at the end only"""


class CheckpointConfig(Section):
    every: Interval = Every(5, "minutes")
    """how often to write a checkpoint; the last step always does"""
    keep_last: Positive = 3
    """how many checkpoints to keep"""


class LoggingConfig(Section):
    every_steps: Positive = 10
    """steps between log lines; the device is read only then"""


class RecoveryConfig(Section):
    mode: Literal["auto", "restart"] = "auto"
    """auto keeps surviving workers running where it can; restart starts all of them anew"""
    max_failures: Count = 10
    """failures survived before the run gives up"""


class TensorBoardConfig(Section):
    kind: Literal["tensorboard"] = "tensorboard"


ModelConfig = Annotated[GptConfig | MlpConfig | Target, ByKind()]
TaskConfig = Annotated[LanguageModelingConfig | ClassificationConfig | RegressionConfig | Target, ByKind()]
ScheduleConfig = Annotated[CosineConfig | ConstantConfig, ByKind()]
ParallelConfig = Annotated[DdpConfig | FsdpConfig, ByKind()]


class Config(Section):
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    batch: BatchConfig = BatchConfig()
    model: ModelConfig = GptConfig()
    task: TaskConfig = LanguageModelingConfig()
    data: Annotated[TextData | TokensData | TargetData, ByKind()] = TextData()
    optimizer: AdamWConfig = AdamWConfig()
    schedule: ScheduleConfig = CosineConfig()
    parallel: ParallelConfig = DdpConfig()
    precision: PrecisionConfig = PrecisionConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    trackers: tuple[TensorBoardConfig, ...] = (TensorBoardConfig(),)

    @rule("schedule.warmup_steps")
    def warmup_not_longer_than_run(self) -> str | None:
        warmup, steps = self.schedule.warmup_steps, self.run.steps
        fits = steps is None or warmup <= steps
        return None if fits else f"must be at most run.steps ({steps}), found {warmup}"

    @rule("data.context_length")
    def data_context_fits_model(self) -> str | None:
        if not (isinstance(self.data, TextData | TokensData) and isinstance(self.model, GptConfig)):
            return None
        longest, asked = self.model.context_length, self.data.context_length
        return None if asked <= longest else f"must be at most model.context_length ({longest}), found {asked}"

    @rule("model.vocab_size")
    def vocabulary_holds_every_byte(self) -> str | None:
        if not (isinstance(self.data, TextData) and isinstance(self.model, GptConfig)):
            return None
        size = self.model.vocab_size
        return None if size >= 256 else f"must be at least 256 for text, read as bytes, found {size}"
