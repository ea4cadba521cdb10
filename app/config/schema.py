"""The schema of the configuration: every section, its fields and their defaults.

A configuration is parsed once, frozen, and handed out in slices. A section that offers a choice is a union told apart
by `kind`; `target` puts the user's own code in its place. Rules across fields are methods named after the rule; their
errors are reported at the field that they are attached to, so a rule is attached to the field that is read later.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.config.base import (
    Balance,
    Every,
    Fraction,
    Interval,
    Order,
    Pattern,
    Range,
    Section,
    Target,
    Text,
    Texts,
    Value,
    Variable,
)
from app.config.faults import FaultsConfig
from app.plan import End, step_of


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] = "run"
    """names the run's directory; by default the stem of the configuration's file"""
    storage: Text = "runs"
    """where run directories live: a path, below /mnt/shared if there is one, or a URI (s3://..., gs://...)"""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto resumes an earlier run of this name if there is one; must needs one, never allows none"""
    epochs: PositiveInt | None = None
    """length of the run in passes over the training samples, in place of steps; the last step may be short, and a run
    that is extended goes on behind it"""
    # No default here: a file that gives epochs need not set it to null.
    steps: PositiveInt | None = None
    """length of the run in optimizer steps; 2000 unless epochs is given"""
    init_from: Text | None = None
    """weights to start from in place of random ones: a file that `export` wrote, or any state_dict of the model; or a
    folder that Hugging Face's save_pretrained wrote"""
    init_strict: bool = True
    """whether they must be exactly the model's; otherwise what fits is loaded, and the rest is named"""
    # torch.manual_seed takes a signed 64-bit integer.
    seed: Annotated[NonNegativeInt, Field(lt=2**63)] = 1
    """data order, initial weights and dropout follow from it"""
    deterministic: bool = False
    """compute the same bits each time on the same GPUs, more slowly; an operation that cannot raises an error"""
    exact: bool = False
    """the same bits whatever the number of workers, their shares, and what becomes of them: gradients are added as
    integers, which no order changes; takes 8 bytes a parameter more. For parallel.kind=ddp on one model of processor,
    with scaling.cpus_per_worker threads each; implies deterministic"""
    report: bool = True
    """write report.html into the run directory when the run ends; `report RUN` writes it at any time"""

    @property
    def reproducible(self) -> bool:
        """Return whether a microbatch has the same gradient, to the bit, on each rank with the same hardware."""
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
        """Return the length of the run in steps, given how many samples are trained on and how many are in a step.

        Args:
            ends: where the run ended before it was extended, oldest first.
        """
        return self.steps or step_of((self.epochs or 0) * num_train - 1, global_size, ends)

    def num_samples(self, num_train: int) -> int | None:
        """Return where the stream of samples ends, None for a run counted in steps."""
        # A run counted in epochs ends with the last sample of the last one, so its last step may be short.
        return None if self.steps else (self.epochs or 0) * num_train


class ClusterConfig(Section):
    address: Text = "auto"
    """HOST:PORT of a Ray cluster, or local for a Ray of this command's own, which listens on the loopback alone; auto
    takes RAY_ADDRESS, else the cluster that ray start has made this machine a part of, else local"""
    env: dict[Variable, Value | None] = Field(default_factory=dict)
    """variables that workers see; null takes the value from the command's environment, and writes it down nowhere"""
    env_prefixes: Texts = ("NCCL_", "TORCH_NCCL_", "GLOO_", "AWS_", "HF_", "WANDB_")
    """beside them, those of the command's environment whose names begin so; [] for none"""
    pip: Texts = ()
    """packages for the workers of a cluster, as for pip: also a requirements.txt, a wheel or the folder of a project
    (with a slash) in the working directory; an embedded Ray and torchrun use this Python as it is"""


_SMALLER = "ask for fewer, or lower batch.microbatch_size"


class ScalingConfig(Section):
    num_workers: Range = (1, 8)
    """how many workers, or [min, max]: any number between may train, and the number may change; those beyond the
    microbatches of a global batch would have nothing to do, and are not started"""
    spares: NonNegativeInt = 0
    """how many more workers to keep started beside the largest number, with imports done and the model built: one takes
    the place of a worker that dies in under a second. Each reserves cores and GPUs as a worker does; not with
    recovery.mode=restart"""
    gpus_per_worker: Literal["auto"] | NonNegativeInt = "auto"
    """1, or 0 to train on CPUs also where there are GPUs; auto is 1 where the cluster has a GPU or may start one; more
    for data_parallel alone"""
    cpus_per_worker: PositiveInt = 1
    """CPU cores that Ray reserves for each worker"""
    start_timeout_s: PositiveFloat = 60.0
    """how long to wait for room for the smallest number of workers, where no autoscaler may add nodes"""
    placement: Literal["pack", "spread"] = "pack"
    """whether workers share few nodes or are spread over many"""
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
    # 48 in microbatches of 8 are six: equal shares for 1, 2, 3 or 6 workers. Any other number is as correct.
    global_size: PositiveInt = 48
    """samples in one optimizer step, whatever the number of workers"""
    microbatch_size: Literal["auto"] | PositiveInt = 8
    """samples in one forward and backward pass; the last of a step may be short. auto measures at the run's start how
    many fit where there is the least room, leaves a microbatch to each of scaling.num_workers, and then stays"""
    balance: Balance = "even"
    """how a step's microbatches are shared out: evenly, by measured speed, or by a {label: weight} of machines"""

    @property
    def num_microbatches(self) -> int:
        """Return the most microbatches that a step may have: more workers would have nothing to do."""
        size = 1 if self.microbatch_size == "auto" else self.microbatch_size
        return -(-self.global_size // size)

    @property
    def samples_per_microbatch(self) -> int:
        """Return `microbatch_size` where it is a number: it was given, or has been chosen."""
        assert self.microbatch_size != "auto", "nobody has asked the run what was chosen for it"
        return self.microbatch_size

    def with_microbatches_of(self, size: int) -> Self:
        """Return this section with a number for `microbatch_size`."""
        return self.model_copy(update={"microbatch_size": size})

    @field_validator("microbatch_size")
    @classmethod
    def microbatch_fits_global_batch(cls, size: Literal["auto"] | int, info: ValidationInfo) -> Literal["auto"] | int:
        global_size = info.data.get("global_size", size)  # missing where it is itself wrong
        if size != "auto" and size > global_size:
            raise ValueError(f"must be at most batch.global_size ({global_size})")
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
    """most tokens that the model can take in"""
    vocab_size: PositiveInt = 256
    """number of tokens; 256 for bytes"""
    dropout: Fraction = 0.0
    """share of activations dropped in training"""
    bias: bool = True
    """biases in linear layers and norms"""

    @field_validator("num_heads")
    @classmethod
    def heads_divide_embed_dim(cls, num_heads: int, info: ValidationInfo) -> int:
        embed_dim = info.data.get("embed_dim", 0)
        if embed_dim % num_heads:
            raise ValueError(f"must divide model.embed_dim ({embed_dim})")
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


class CoupledConfig(Section):
    """Key that every task has."""

    coupled: bool = False
    """the loss of a microbatch is not the sum of its samples' losses, as with negatives of the microbatch or mixup: its
    samples then always share one forward, also where memory runs out, and `batch.microbatch_size` is a number"""


class TaskConfig(CoupledConfig):
    kind: Literal["language_modeling", "classification", "regression"] = "language_modeling"
    chunk_tokens: PositiveInt | None = None
    """for language_modeling: of how many tokens the logits are held at a time; they are computed again in the backward.
    The model's last layer is the nn.Linear that its method get_output_embeddings() returns. null holds all of them"""

    @field_validator("chunk_tokens")
    @classmethod
    def only_tokens_come_in_chunks(cls, chunk_tokens: int | None, info: ValidationInfo) -> int | None:
        if chunk_tokens is not None and info.data.get("kind") != "language_modeling":
            raise ValueError(f"must be null with task.kind={info.data.get('kind')}: only language_modeling has tokens")
        return chunk_tokens


class TargetTask(CoupledConfig, Target):
    """Task of the user's own."""


class LoaderConfig(Section):
    """How samples are fetched. No field changes which samples are, so a resume may change any of them."""

    num_workers: Literal["auto"] | NonNegativeInt = "auto"
    """loader processes for each training worker; 0 loads in the worker itself; auto is 0 on a CPU and 2 on a GPU, or 1
    where its machine has fewer than three cores a GPU"""
    prefetch_factor: PositiveInt = 2
    """microbatches each loader process keeps ready"""


class TextSource(Section):
    kind: Literal["text"] = "text"
    source: Text = "python-docs"
    """"python-docs" (comes with Python), or a glob of text files, read as bytes"""
    context_length: PositiveInt = 128
    """tokens in one sample"""


class TokensSource(Section):
    kind: Literal["tokens"] = "tokens"
    path: Text
    """a flat binary file of tokens"""
    dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """how one token is stored"""
    context_length: PositiveInt = 128
    """tokens in one sample"""


class ImageFolderSource(Section):
    kind: Literal["image_folder"] = "image_folder"
    path: Text
    """a folder with a folder of images for each class, as torchvision's ImageFolder reads it"""
    image_size: PositiveInt = 224
    """height and width of what the model sees, in pixels"""
    augment: bool = True
    """random crops and flips in training; validation always sees the middle of an image"""


class HuggingFaceSource(Section):
    kind: Literal["huggingface"] = "huggingface"
    path: Text
    """a folder that a dataset's save_to_disk wrote, or a folder or name that datasets.load_dataset takes"""
    name: Text | None = None
    """which configuration of a dataset that has several"""
    split: Text | None = None
    """train, validation, train[:80%]...; null is train where there are splits"""
    columns: tuple[Text, ...] = ()
    """the columns that a sample consists of; all if none are named"""


Source = TextSource | TokensSource | ImageFolderSource | HuggingFaceSource | Target


class CollateConfig(Section):
    collate: Target | None = None
    """a function of a list of samples that returns a batch; with args, or as a class, what makes one; null stacks the
    samples"""


class HeldOut(CollateConfig):
    """The samples of data.validation_fraction."""

    kind: Literal["held_out"] = "held_out"


class ValidationImages(CollateConfig, ImageFolderSource):
    pass


class ValidationHuggingFace(CollateConfig, HuggingFaceSource):
    pass


class ValidationTarget(CollateConfig, Target):
    pass


AnyValidation = Annotated[
    HeldOut | TextSource | TokensSource | ValidationImages | ValidationHuggingFace | ValidationTarget,
    Field(discriminator="kind"),
]


class DataConfig(LoaderConfig):
    order: Order = "shuffled"
    """the order in which an epoch reads its samples: shuffled, anew in each epoch; sequential, as the dataset has them;
    or that of a function of your own, Order in app/data/order.py (a class, or one with args, is called and returns it).
    Unless shuffled, the last samples of the dataset are the ones held out"""
    validation_fraction: Fraction = 0.1
    """share of the samples held out of training, chosen by the seed where the order is shuffled"""
    validation: AnyValidation | None = None
    """data of their own to validate on, in place of that share; of the same kind, they come at the same size.
    data.collate makes batches for training alone; {collate: ...} without a kind makes those of that share"""

    @property
    def held_out_fraction(self) -> float:
        """The share of the training data that is held out of them."""
        return 0.0 if self.has_own_validation else self.validation_fraction

    @property
    def has_own_validation(self) -> bool:
        """Return whether validation reads other data than those that the samples are held out of."""
        return self.validation is not None and not isinstance(self.validation, HeldOut)

    @field_validator("validation")
    @classmethod
    def something_is_held_out(cls, validation: Section | None, info: ValidationInfo) -> Section | None:
        if isinstance(validation, HeldOut) and info.data.get("validation_fraction") == 0:
            context = {"key": "data.validation.collate"}
            message = "has no samples: data.validation_fraction is 0, and data.validation names no data"
            raise PydanticCustomError("rule", message, context)
        return validation


class TextData(DataConfig, TextSource):
    pass


class TokensData(DataConfig, TokensSource):
    pass


class SamplesConfig(DataConfig, CollateConfig):
    """Samples that are read one by one, and made a batch."""


class ImageFolderData(SamplesConfig, ImageFolderSource):
    pass


class HuggingFaceData(SamplesConfig, HuggingFaceSource):
    pass


class TargetData(SamplesConfig, Target):
    """A map-style dataset of the user's own."""


class OptimizerConfig(Section):
    """What the program itself has to know of an optimizer."""

    lr: PositiveFloat = 1e-3
    """peak learning rate"""
    max_grad_norm: PositiveFloat | None = 1.0
    """gradients are scaled down to this norm; null for never"""


class GroupConfig(Section):
    """Parameters whose rate or weight decay is another one."""

    match: Pattern
    """regular expression that is searched for in their names; a parameter belongs to the first group that it matches"""
    lr_scale: PositiveFloat = 1.0
    """their rate as a multiple of lr"""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """theirs, matrices or not; null for that of the others"""


class GroupedConfig(OptimizerConfig):
    groups: tuple[GroupConfig, ...] = ()
    """parameters that differ from the others"""


class AdamWConfig(GroupedConfig):
    kind: Literal["adamw"] = "adamw"
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """decoupled weight decay, on matrices only"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """keeps the division finite"""


class AdamConfig(GroupedConfig):
    kind: Literal["adam"] = "adam"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """added to the gradient in proportion to the weight, on matrices only"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """decay of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """keeps the division finite"""


class SgdConfig(GroupedConfig):
    kind: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.9
    """share of the last update that goes on"""
    nesterov: bool = False
    """look ahead by the momentum before the gradient is applied; needs momentum"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """added to the gradient in proportion to the weight, on matrices only"""

    @field_validator("nesterov")
    @classmethod
    def nesterov_needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and not info.data.get("momentum"):
            raise ValueError("needs optimizer.momentum above 0")
        return nesterov


class MuonConfig(OptimizerConfig):
    """torch's Muon for matrices, and AdamW for all else, at one rate."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """share of the last update that goes on"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """decoupled weight decay, on matrices only"""
    adamw: Pattern = "head"
    """regular expression: matrices whose names it is found in are left to AdamW, as all embeddings are"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay of the running mean and of the running square"""
    eps: PositiveFloat = 1e-8
    """keeps AdamW's division finite"""


class TargetOptimizer(OptimizerConfig, Target):
    """An optimizer of the user's own: called with `params`, `lr` and `args`."""


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


class LinearConfig(Section):
    kind: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt = 50
    """steps in which the rate rises from 0 to lr"""
    min_lr_fraction: Fraction = 0.0
    """where the rate ends, as a share of lr"""


class WsdConfig(Section):
    """Warm-up, stable, decay: a run may be extended from any step of its stable part."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: NonNegativeInt = 50
    """steps in which the rate rises from 0 to lr"""
    decay_fraction: Fraction = 0.1
    """share of the run's steps in which the rate falls, at its end"""
    min_lr_fraction: Fraction = 0.0
    """where the rate ends, as a share of lr"""


class StepConfig(Section):
    kind: Literal["step"] = "step"
    warmup_steps: NonNegativeInt = 0
    """steps in which the rate rises from 0 to lr"""
    every_steps: PositiveInt
    """steps after which the rate falls, again and again"""
    gamma: Fraction = 0.1
    """what it is multiplied by then"""


class OneCycleConfig(Section):
    """As torch's OneCycleLR, which leaves the momentum alone here."""

    kind: Literal["one_cycle"] = "one_cycle"
    rising_fraction: Fraction = 0.3
    """share of the run's steps in which the rate rises to lr"""
    start_divisor: PositiveFloat = 25.0
    """what lr is divided by at the start"""
    end_divisor: PositiveFloat = 1e4
    """what the rate of the start is divided by at the end"""


class DdpConfig(Section):
    kind: Literal["ddp"] = "ddp"
    reducer: Literal["steadfast", "torch"] = "steadfast"
    """who adds gradients up over workers; torch is its DistributedDataParallel, for communication hooks of your own"""
    bucket_cap_mb: PositiveInt | None = None
    """gradients travel in buckets of this size; None is 25, with a smaller first bucket"""


FsdpUnits = Literal["blocks"] | PositiveInt | tuple[Text, ...]
ParamFormat = Literal["auto", "fp32", "bf16", "fp16"]


class FsdpConfig(Section):
    kind: Literal["fsdp"] = "fsdp"
    shard_size: Annotated[int, Field(ge=2)] | None = None
    """how many workers hold one model among them, a replica (HSDP); null: all of a world do. The others hold the same
    once more, and whole replicas come and go: the number of workers is a multiple, and who is left over waits"""
    wrap: FsdpUnits = "blocks"
    """what is gathered at a time: the repeated layers of the model; modules of the classes in a list of names; for a
    number, any module with so many parameters of its own. What is left is gathered for the whole step"""
    reshard_after_forward: bool = True
    """free what has been gathered after the forward, and gather it again in the backward"""
    reduce_every_microbatch: bool = False
    """sum gradients over workers after each microbatch, so that none is held whole; else once a step"""
    param_dtype: ParamFormat = "auto"
    """format in which parameters are gathered and compute; auto is that of `precision`"""
    reduce_dtype: ParamFormat = "auto"
    """format in which gradients are summed; auto is fp32 where `precision` computes in 16 bits"""
    prefetch: NonNegativeInt = 0
    """how many of what is gathered at a time to gather ahead; 0 leaves it to torch, which has one under way"""
    cpu_offload: bool = False
    """keep parameters, gradients and the optimizer's state in the machine's memory, and update them there: a GPU holds
    what is gathered, activations and buffers. Slower. Without GPUs nothing changes. Not run on a GPU yet"""


class DataParallelConfig(Section):
    """torch's nn.DataParallel, for scripts that have it: one worker for all GPUs of its machine. ddp is faster."""

    kind: Literal["data_parallel"] = "data_parallel"


class LossScaleConfig(Section):
    initial: PositiveFloat = 65536.0
    """what losses are multiplied by at the start, so that small gradients do not vanish; gradients are divided again"""
    factor: Annotated[float, Field(gt=1)] = 2.0
    """it is divided by this after an overflow, and multiplied by it after `window` updates without one"""
    window: PositiveInt = 2000
    """in updates"""


class PrecisionConfig(Section):
    kind: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    """auto is bf16 where the GPUs of all workers have it in hardware, else fp32; fp16 is for GPUs without bf16"""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """for fp16: a step whose gradients overflow updates nothing, on all ranks, and goes on with a smaller scale"""
    tf32: bool = False
    """fp32 products and convolutions on tensor cores, with 10 bits of the factors' 23"""


ActivationCheckpointing = Literal["none", "full", "selective"] | PositiveInt


class MemoryConfig(Section):
    activation_checkpointing: ActivationCheckpointing = "none"
    """what of the repeated layers (those that fsdp gathers one at a time) is computed again in the backward, so that it
    need not be kept: full is all but their inputs; selective keeps products of matrices and attention; 2 is all of
    every second layer"""


Compile = Literal["none", "blocks"]


class ValidationConfig(Section):
    every: Interval | None = Every(200, "steps")
    """how often to measure the loss on the held-out samples; null for at the end only"""


class KeepBestConfig(Section):
    metric: Text = "loss"
    """the name of a metric of validation"""
    mode: Literal["min", "max"] = "min"
    """whether the least or the greatest is the best"""


class CheckpointConfig(Section):
    # By the clock, so that what a failure costs does not depend on how long a step takes.
    every: Interval = Every(5, "minutes")
    """how often to write a checkpoint; the last step always does"""
    node_memory: bool = True
    """keep the newest state in each node's memory too, outside of the workers, so that the death of all of them costs
    seconds; a copy every so often that all of them take one per cent of the time; needs twice the state's size"""
    trainable_only: bool = False
    """leave out frozen parameters; a resume must find the same ones in the model's own target, or in run.init_from"""
    keep_last: PositiveInt = 3
    """how many checkpoints to keep"""
    keep_every: PositiveInt | None = None
    """beside them, the first checkpoint of every so many steps, for good"""
    keep_best: KeepBestConfig | None = None
    """beside them, the one with the best validation; each validation is then followed by a checkpoint"""


class LoggingConfig(Section):
    # Reading the loss makes the host wait for the device, so it is not done in every step.
    every_steps: PositiveInt = 10
    """steps between log lines; the device is read only then"""
    gradient_norms_every: Interval | None = None
    """how often trackers draw a histogram of the norms of all parameters' gradients; null for never"""
    weights_digest_every: Interval | None = None
    """after which steps the ledger has a digest of the trained weights, for `verify`: "100 steps", "1 epoch"; null for
    none, or for 100 steps with run.exact. The leader computes it, at a second or two for each GB; not with fsdp, where
    no worker has all weights"""

    @field_validator("weights_digest_every")
    @classmethod
    def digests_are_of_the_same_steps(cls, every: Every | None) -> Every | None:
        if every is not None and every.unit not in ("steps", "epochs"):
            raise ValueError("must be in steps or epochs: by the clock two runs would have digests of different steps")
        return every


class AuditConfig(Section):
    """What a run checks about itself while it trains."""

    recompute: Interval | None = None
    """how often, as in "100 steps", one microbatch of a step is computed by a second worker too, to compare the bits: a
    worker that computes wrongly is named and replaced, and its node gets no other for a while; null for never. Needs
    run.deterministic or run.exact, and ddp with its own reducer; workers with GPUs, or processors, of one model are
    compared"""

    @field_validator("recompute")
    @classmethod
    def counted_in_steps(cls, recompute: Every | None) -> Every | None:
        if recompute is not None and recompute.unit != "steps":
            raise ValueError('must be in steps, such as "100 steps": all workers have to know which ones')
        return recompute


class ProfileConfig(Section):
    """What torch records of time, memory and collectives; in `profile/` of the run directory, and in `stacks/`."""

    # Of torch.profiler, up to `flops`.
    wait: NonNegativeInt = 10
    """steps that are let pass before each recording, from the first of each attempt on"""
    warmup: NonNegativeInt = 1
    """steps after these that are recorded and thrown away, since the profiler itself is slow in its first"""
    active: NonNegativeInt = 0
    """steps of a recording; 0 for no profile"""
    repeat: PositiveInt = 1
    """recordings in an attempt"""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """the ranks that record"""
    shapes: bool = False
    """shapes of the operators' inputs"""
    stack: bool = False
    """the lines of code that call the operators"""
    memory: bool = False
    """what operators allocate and free"""
    flops: bool = False
    """floating-point operations of matrix products and convolutions"""
    memory_history: NonNegativeInt = 0
    """how many of the last allocations and frees on each GPU are remembered, with the lines of code, to be written when
    it is out of memory, for https://pytorch.org/memory_viz; each takes some KB of host memory, and a little time; 0 for
    none. Not tried on a GPU yet"""
    # As many as torch remembers by itself.
    flight_recorder: NonNegativeInt = 2000
    """how many of its last collectives each worker remembers; where the world hangs under Ray they are written to
    `stacks/`, for `torchfrtrace`; 0 for none. TORCH_FR_BUFFER_SIZE in cluster.env wins. Not tried with NCCL yet"""


class RecoveryConfig(Section):
    mode: Literal["auto", "slots", "restart"] = "auto"
    """slots keeps surviving workers running; restart starts all anew; auto is slots where Ray's version allows it"""
    max_failures: NonNegativeInt = 10
    """failures of one kind that are survived in a row, without a new step between two of them; workers that one attempt
    loses are one failure"""
    # Heartbeats come at least five times in this; waiting for less would take a busy machine for a dead one.
    silence_s: PositiveFloat = 5.0
    """without a heartbeat for so long a worker whose machine does not answer either counts as dead, and a silence is
    told; before its first world it has eight times as long; a connection that closes is noticed at once"""
    stall_s: PositiveFloat = 60.0
    """what seems hung is told after 3 s, and ended after this, five times the usual duration, or what being wrong would
    cost, whichever is longest; five times this where steps would be lost, ten times where nobody waits for anybody"""
    wait_s: PositiveFloat = 600.0
    """how long a run that has too few workers waits for more, including the start of their nodes; and how long copies
    in node memory outlive their last worker, and a command that was killed"""
    max_skipped_steps: NonNegativeInt = 5
    """in any 1000 steps, how many are left out because loss or gradient is not finite or spikes; after these, a value
    that is not finite ends the run, and a spike is let pass"""
    # Deviations are measured robustly, or the spikes themselves would raise the bar.
    spike: PositiveFloat | None = 10.0
    """how many robust deviations above the median of the last losses a spike is; null to look for none"""


class TensorBoardConfig(Section):
    kind: Literal["tensorboard"] = "tensorboard"


class WandbConfig(Section):
    """Weights & Biases. All attempts and resumes of a run are one run there; its id is in `wandb/run.json`."""

    kind: Literal["wandb"] = "wandb"
    project: Text = "steadfast"
    """where the run belongs"""
    entity: Text | None = None
    """a user or a team; null for the one that the key belongs to"""
    tags: Texts = ()
    """words to find the run by"""
    mode: Literal["auto", "online", "offline"] = "auto"
    """offline writes files that `wandb sync` uploads as one run; auto takes WANDB_MODE, else it is online where there
    is a key, in WANDB_API_KEY or by `wandb login`"""


class EmaConfig(Section):
    """An exponential moving average of the weights, which validation and export take."""

    kind: Literal["ema"] = "ema"
    decay: Fraction = 0.999
    """share of the average that stays in each step"""


class EarlyStoppingConfig(Section):
    kind: Literal["early_stopping"] = "early_stopping"
    metric: Text = "loss"
    """the name of a metric of validation"""
    mode: Literal["min", "max"] = "min"
    """whether less or more of it is better"""
    patience: PositiveInt = 3
    """validations without a better one, after which the run finishes"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """what counts as better"""


ScheduleConfig = CosineConfig | ConstantConfig | LinearConfig | WsdConfig | StepConfig | OneCycleConfig | Target
OptimizerKind = AdamWConfig | AdamConfig | SgdConfig | MuonConfig | TargetOptimizer
# A tracker of the user's own is called with `location` (of the run directory), `first_step` and `args`.
TrackerConfig = Annotated[TensorBoardConfig | WandbConfig | Target, Field(discriminator="kind")]
AnyData = TextData | TokensData | ImageFolderData | HuggingFaceData | TargetData
# What a hook of the user's own may have is told by `app.components.hook.Hook`.
HookConfig = Annotated[EmaConfig | EarlyStoppingConfig | Target, Field(discriminator="kind")]

_LISTS = ("trackers", "hooks")  # sections that are lists of sections


def _kind_of_validation(section: dict[str, Any]) -> str:
    """Return the kind of data to validate on where the section names none."""
    if "target" in section:
        return "target"
    return "held_out" if set(section) == {"collate"} else "text"


class Config(Section):
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    batch: BatchConfig = BatchConfig()
    model: GptConfig | MlpConfig | Target = Field(GptConfig(), discriminator="kind")
    task: TaskConfig | TargetTask = Field(TaskConfig(), discriminator="kind")
    data: AnyData = Field(TextData(), discriminator="kind")
    optimizer: OptimizerKind = Field(AdamWConfig(), discriminator="kind")
    schedule: ScheduleConfig = Field(CosineConfig(), discriminator="kind")
    parallel: DdpConfig | FsdpConfig | DataParallelConfig = Field(DdpConfig(), discriminator="kind")
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    compile: Compile = "none"
    """blocks runs the repeated layers (those that fsdp gathers one at a time), and the loss of language_modeling,
    through torch.compile in training. They are compiled once, for full microbatches of samples of one shape; a shorter
    one, validation and hooks run as without it, and so does a loss in chunks of tokens"""
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    audit: AuditConfig = AuditConfig()
    profile: ProfileConfig = ProfileConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    faults: FaultsConfig = FaultsConfig()
    trackers: tuple[TrackerConfig, ...] = (TensorBoardConfig(),)
    hooks: tuple[HookConfig, ...] = ()

    @property
    def weights_digest_every(self) -> Every | None:
        """Return after which steps the ledger has a digest of the weights, None for none."""
        return self.logging.weights_digest_every or (Every(100, "steps") if self.run.exact else None)

    @property
    def replica_size(self) -> int:
        """Return of how many workers the number of them is a multiple."""
        return (isinstance(self.parallel, FsdpConfig) and self.parallel.shard_size) or 1

    def world_sizes(self, bounds: tuple[int, int], num_microbatches: int | None = None) -> range:
        """Return the numbers of workers within `bounds` that make whole replicas, and all have a microbatch.

        Args:
            num_microbatches: of a step, where they are not those that the configuration gives.
        """
        unit = self.replica_size
        smallest, largest = bounds
        useful = max(unit, num_microbatches or self.batch.num_microbatches)  # without a whole replica nobody can train
        return range(-(-smallest // unit) * unit, min(largest, useful) + 1, unit)

    def targets(self) -> dict[str, str]:
        """Return every piece of the user's own code that the run needs: what to call, by its key."""
        found = {}
        for name, section in self:
            if isinstance(section, Target):
                found[f"{name}.target"] = section.target
        validation = self.data.validation
        parts = {
            "collate": getattr(self.data, "collate", None),
            "order": self.data.order,
            "validation": validation,
            "validation.collate": getattr(validation, "collate", None),
        }
        for name, part in parts.items():
            if isinstance(part, Target):
                found[f"data.{name}.target"] = part.target
        for name in _LISTS:
            for index, section in enumerate(getattr(self, name)):
                if isinstance(section, Target):
                    found[f"{name}.{index}.target"] = section.target
        return found

    @model_validator(mode="before")
    @classmethod
    def kind_may_be_left_out(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Fill in the kind: "target" where there is one, else that of the default."""
        complete = dict(tree)
        for name, field in cls.model_fields.items():
            section = tree.get(name)
            if field.discriminator and isinstance(section, dict):
                kind = "target" if "target" in section else field.default.kind
                complete[name] = {"kind": kind, **section}
        data = complete.get("data")
        if isinstance(data, dict) and isinstance(data.get("validation"), dict):
            own = {"kind": _kind_of_validation(data["validation"]), **data["validation"]}
            # Or a model would be measured, without a word, on samples of another size than it is trained on.
            sizes = {name: data[name] for name in ("context_length", "image_size") if name in data}
            complete["data"] = {**data, "validation": {**sizes, **own} if own["kind"] == data["kind"] else own}
        for name in _LISTS:
            if isinstance(tree.get(name), list):
                complete[name] = []
                for section in tree[name]:
                    is_target = isinstance(section, dict) and "target" in section
                    complete[name].append({"kind": "target", **section} if is_target else section)
        return complete

    @field_validator("parallel")
    @classmethod
    def muon_needs_whole_matrices(cls, parallel: DdpConfig | FsdpConfig, info: ValidationInfo) -> Section:
        if isinstance(info.data.get("optimizer"), MuonConfig) and isinstance(parallel, FsdpConfig):
            raise ValueError("must not be fsdp with optimizer.kind=muon, whose update needs whole matrices")
        return parallel

    @field_validator("parallel", "precision", "compile")
    @classmethod
    def exact_sums_are_those_of_ddp(cls, section: Any, info: ValidationInfo) -> Any:
        if not info.data.get("run", RunConfig()).exact:
            return section
        if info.field_name == "parallel" and (not isinstance(section, DdpConfig) or section.reducer != "steadfast"):
            raise ValueError("must be {kind: ddp} with run.exact, whose sums are those of its own gradient buckets")
        if info.field_name == "precision" and section.kind == "fp16":
            raise ValueError("must not be of kind fp16 with run.exact: take bf16, fp32 or fp64")
        if info.field_name == "compile" and section != "none":
            raise ValueError("must be none with run.exact: what is compiled may round otherwise on another machine")
        return section

    @field_validator("audit")
    @classmethod
    def what_is_compared_is_reproducible(cls, audit: AuditConfig, info: ValidationInfo) -> AuditConfig:
        parallel = info.data.get("parallel", DdpConfig())
        if audit.recompute is None:
            return audit
        context = {"key": "audit.recompute"}
        if not (isinstance(parallel, DdpConfig) and parallel.reducer == "steadfast"):
            message = "must be null without parallel.kind=ddp and parallel.reducer=steadfast, whose buckets it compares"
            raise PydanticCustomError("rule", message, context)
        if not info.data.get("run", RunConfig()).reproducible:
            message = "needs run.deterministic=true or run.exact=true: else two workers round in different ways"
            raise PydanticCustomError("rule", message, context)
        return audit

    @field_validator("compile")
    @classmethod
    def only_the_model_itself_is_compiled(cls, compile: Compile, info: ValidationInfo) -> Compile:
        if compile != "none" and isinstance(info.data.get("parallel"), DataParallelConfig):
            raise ValueError("must be none with parallel.kind=data_parallel, which copies the model in every forward")
        return compile

    @field_validator("logging")
    @classmethod
    def a_digest_is_of_weights_in_one_place(cls, logging: LoggingConfig, info: ValidationInfo) -> LoggingConfig:
        if logging.weights_digest_every is not None and isinstance(info.data.get("parallel"), FsdpConfig):
            context = {"key": "logging.weights_digest_every"}
            message = "must be null with parallel.kind=fsdp, where no worker has all weights"
            raise PydanticCustomError("rule", message, context)
        return logging

    @field_validator("batch")
    @classmethod
    def every_worker_has_a_microbatch(cls, batch: BatchConfig, info: ValidationInfo) -> BatchConfig:
        smallest = info.data.get("scaling", ScalingConfig()).min_workers
        if smallest > batch.num_microbatches:
            context = {"key": "scaling.num_workers", "limit": batch.num_microbatches, "found": smallest}
            message = "at least {found} workers have only {limit} microbatches in a global batch; " + _SMALLER
            raise PydanticCustomError("rule", message, context)
        return batch

    @field_validator("task")
    @classmethod
    def coupled_samples_share_a_forward(cls, task: CoupledConfig, info: ValidationInfo) -> CoupledConfig:
        if task.coupled and info.data.get("batch", BatchConfig()).microbatch_size == "auto":
            message = "must be a number with task.coupled=true: the loss follows from the samples of a microbatch"
            raise PydanticCustomError("rule", message, {"key": "batch.microbatch_size"})
        return task

    @field_validator("data")
    @classmethod
    def data_context_fits_model(cls, data: DataConfig, info: ValidationInfo) -> DataConfig:
        limit = getattr(info.data.get("model"), "context_length", None)
        found = getattr(data, "context_length", 0)
        if limit is not None and found > limit:
            # A ValueError would be reported at the section; this error brings the key, and so its line.
            context = {"key": "data.context_length", "limit": limit, "found": found}
            message = "must be at most model.context_length ({limit}), found {found}"
            raise PydanticCustomError("rule", message, context)
        return data

    @model_validator(mode="after")
    def some_world_has_whole_replicas(self) -> Self:
        bounds = self.scaling.num_workers
        if not self.world_sizes(bounds):
            context = {"key": "parallel.shard_size", "bounds": list(bounds), "limit": self.batch.num_microbatches}
            message = (
                "no number of workers in scaling.num_workers {bounds} is a multiple of it and at most the {limit} "
                "microbatches of a global batch"
            )
            raise PydanticCustomError("rule", message, context)
        return self

    @field_validator("parallel")
    @classmethod
    def auto_measures_one_gpu(cls, parallel: Section, info: ValidationInfo) -> Section:
        batch = info.data.get("batch", BatchConfig())
        if isinstance(parallel, DataParallelConfig) and batch.microbatch_size == "auto":
            context = {"key": "batch.microbatch_size"}
            message = "auto measures one GPU, and parallel.kind=data_parallel trains on several: give a number"
            raise PydanticCustomError("rule", message, context)
        return parallel

    @field_validator("parallel")
    @classmethod
    def chunks_need_the_model_itself(cls, parallel: Section, info: ValidationInfo) -> Section:
        task = info.data.get("task")
        if not isinstance(task, TaskConfig) or task.chunk_tokens is None:
            return parallel
        context = {"key": "task.chunk_tokens"}
        if isinstance(parallel, DataParallelConfig):
            message = "must be null with parallel.kind=data_parallel, which copies the model in every forward"
            raise PydanticCustomError("rule", message, context)
        if isinstance(parallel, DdpConfig) and parallel.reducer == "torch":
            message = "must be null with parallel.reducer=torch, which copies the outputs of the model"
            raise PydanticCustomError("rule", message, context)
        return parallel

    @field_validator("parallel")
    @classmethod
    def a_worker_has_one_gpu_unless_it_is_the_only_one(cls, parallel: Section, info: ValidationInfo) -> Section:
        scaling = info.data.get("scaling", ScalingConfig())
        if isinstance(parallel, DataParallelConfig):
            if scaling.num_workers != (1, 1):
                context = {"key": "parallel.kind", "found": scaling.num_workers[1]}
                message = "data_parallel is one process: scaling.num_workers must be 1, found up to {found}"
                raise PydanticCustomError("rule", message, context)
        elif scaling.gpus_per_worker not in ("auto", 0, 1):
            context = {"key": "scaling.gpus_per_worker", "found": scaling.gpus_per_worker}
            message = "must be 0, 1 or auto: a worker trains on one GPU, found {found}; for more, raise num_workers"
            raise PydanticCustomError("rule", message, context)
        return parallel
