"""Check that a user's task trains here as in a plain loop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast.config import Config, EarlyStoppingConfig, Target, TaskConfig
from steadfast.config.load import suggestion
from steadfast.data.batches import IGNORED, Batch, tensors_of
from steadfast.data.parts import rows_of, uncuttable
from steadfast.data.randomness import own_randomness
from steadfast.errors import ConfigError, Problem, SteadfastError, UsageError
from steadfast.loop.seed import seed_generators
from steadfast.loop.side_effects import undone
from steadfast.loop.validate import Validator
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.parallel.dtensor import reshard
from steadfast.plan import Microbatch
from steadfast.tasks import Sums
from steadfast.tasks.metrics import SummedMetrics
from steadfast.tasks.own import GlobalTask
from steadfast.world.control import any_rank
from steadfast.world.runtime import World

_NUM_ROWS = 4  # samples in a forward
_NUM_SEEDS = 6  # for a random loss: in one draw of six, mixup's permutation exchanges no rows between the halves
# Difference that rounding can explain, as a share of the compared losses.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_TF32_TOLERANCE = 2e-3
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WHY_SUMS = (
    "So the loss follows from batch.microbatch_size, and changes where memory runs out and a microbatch runs in "
    "smaller forwards. Negatives of the batch, mixup and means over the batch are such losses. For a loss over the "
    "whole global batch give the task embed(model, batch) and loss(embeddings). For one over each microbatch as it is, "
    "set task.coupled=true"
)
_WHY_SUMS_IN_TRAINING = (
    "The model was in training mode. batch.balance=even_samples cuts microbatches between workers, and so would change "
    "the loss. Set batch.balance=even"
)


def check_task(worker: WorkerState, world: World, parallel: Parallel, model: nn.Module) -> None:
    """Refuse a user's task that would train differently here. A collective.

    The task is tried on a few samples.

    The loss of a batch must be the sum of the losses of its parts, because parts of a microbatch may run in separate
    forwards; the rows of an embedding must not depend on each other. The trial runs in training mode, without layers of
    torch that draw random numbers or have the statistics of a microbatch by design. The user's own layers may do so
    too, so a loss that differs there passes if it is a sum in evaluation mode. `batch.balance=even_samples` excludes
    such layers, so a trial with all layers follows. With `task.coupled` the task is called but its losses are not
    compared.

    Raises:
        UsageError: the task returns no `Sums`, calls a collective, or its loss couples samples.
        ConfigError: a key needs the loss of each microbatch, and the task has a loss over the global batch.
    """
    config = worker.config
    # The tasks of this program keep these rules with any model of this program.
    if isinstance(config.task, TaskConfig) and not isinstance(config.model, Target):
        return
    if isinstance(worker.task, GlobalTask):
        _refuse_what_needs_each_loss(config)
    # Checked once per command: workers that join a world find members that have checked the same code.
    is_checked = any_rank(worker.task_checked, world.groups.control)
    worker.task_checked = True
    if is_checked:
        return
    world.progress.enter("validation")
    trial = _Trial(worker, world, parallel, parallel.unwrap(model), _WHY_SUMS)
    error = trial.error(_quiet)
    if error is not None and not isinstance(error, _Coupled) and isinstance(error, SteadfastError):
        raise error
    # All ranks try the same samples, but one rank might round otherwise.
    if any_rank(error is not None or not trial.is_conclusive, world.groups.control):
        _raise(_verdict(error, trial.error(nn.Module.eval)))
    if config.batch.balance == "even_samples":
        # In training mode a layer of the user's own may depend on the whole microbatch, as BatchNorm does.
        _raise(_Trial(worker, world, parallel, parallel.unwrap(model), _WHY_SUMS_IN_TRAINING).error(nn.Module.train))


def _quiet(model: nn.Module) -> None:
    """Put layers alone into evaluation mode that draw random numbers or mix the samples of a microbatch."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS + _BATCH_NORMS):
            module.eval()


def _verdict(in_training: Exception | None, in_evaluation: Exception | None) -> Exception | None:
    """Return the error of a task, None if it is accepted."""
    if in_training is None:
        # Nothing could be compared in training mode. In evaluation mode a model of detection gives no losses.
        return in_evaluation if isinstance(in_evaluation, _Coupled) else None
    if in_evaluation is None or (isinstance(in_training, _Coupled) and isinstance(in_evaluation, _Coupled)):
        return in_evaluation
    return in_training


def _raise(error: Exception | None) -> None:
    if isinstance(error, _Coupled):
        raise UsageError(str(error))
    if error is not None:
        raise error


class _Coupled(UsageError):
    """The loss of a batch is not the sum of its parts' losses."""


def check_watched_metrics(worker: WorkerState, world: World, parallel: Parallel, model: nn.Module) -> None:
    """Refuse to watch a metric that validation does not measure. A collective, once per command.

    The first held-out samples are measured. If these lack a name, all are, because a metric may come with few samples.

    Raises:
        ConfigError: validation measures no such metric, or no samples are held out.
    """
    keep_best = worker.config.checkpoint.keep_best
    watched = {} if keep_best is None else {"checkpoint.keep_best.metric": keep_best.metric}
    for index, hook in enumerate(worker.config.hooks):
        if isinstance(hook, EarlyStoppingConfig):
            watched[f"hooks.{index}.metric"] = hook.metric
    num_samples = worker.loader.num_validation
    if watched and not num_samples:
        why = "no samples are held out, so nothing is measured. Set data.validation_fraction or data.validation"
        raise ConfigError([Problem("", key, why) for key in watched])
    missing = {key: metric for key, metric in watched.items() if metric != "loss"}
    if not missing or any_rank(worker.watched_checked, world.groups.control):
        return
    worker.watched_checked = True
    for size in sorted({min(worker.batch.global_size, num_samples), num_samples}):
        with _without_a_trace(worker, parallel, parallel.unwrap(model)):
            names = Validator(worker, parallel, world, size).names(model)
        missing = {key: metric for key, metric in missing.items() if metric not in names}
        if not missing:
            return
    what = '"{}" is no metric of validation{}'
    raise ConfigError([Problem("", key, what.format(name, suggestion(name, names))) for key, name in missing.items()])


class _Trial:
    """Evaluates a task on rows of one batch of real samples.

    Args:
        why: why the loss must be a sum over samples and what to do, for messages.
    """

    def __init__(self, worker: WorkerState, world: World, parallel: Parallel, model: nn.Module, why: str) -> None:
        self._why = why
        self.is_conclusive = False  # whether the last `error` has compared losses
        self._worker = worker
        config = worker.config
        self._world = world
        self._parallel = parallel
        self._name = getattr(config.task, "target", config.task.kind).rpartition(":")[2]
        self._model = model
        self._num_rows = min(worker.batch.samples_per_microbatch, worker.order.num_train)
        # A coupled loss may need a whole microbatch, for example if the model keeps a state per sample.
        if not config.task.coupled:
            self._num_rows = min(_NUM_ROWS, self._num_rows)
        self._tolerance = _TOLERANCES[worker.precision.compute_dtype]
        if config.precision.tf32 and worker.precision.device.type == "cuda":
            self._tolerance = _TF32_TOLERANCE

    def error(self, enter_mode: Callable[[nn.Module], object]) -> Exception | None:
        """Return why the task fails in a mode of the model, None if it does not."""
        with _without_a_trace(self._worker, self._parallel, self._model):
            # Gradients stay enabled, because a loss may compute gradients itself.
            try:
                enter_mode(self._model)
                self.is_conclusive = self._run()
                if self._worker.config.data.has_documents:
                    self._compare_documents()
            except Exception as error:
                reshard(self._model)
                return error
        return None

    def _run(self) -> bool:
        """Compare the loss of a batch with the losses of its parts. Return whether they could be compared."""
        num_rows, half = self._num_rows, self._num_rows // 2
        whole = self._worker.loader.example(num_rows)
        loss = self._loss(whole, seed=0)
        # A batch that has no row for each sample never runs in parts.
        if self._worker.config.task.coupled or not half or uncuttable(whole, num_rows) is not None:
            return True
        halves = [rows_of(whole, range(half), num_rows), rows_of(whole, range(half, num_rows), num_rows)]
        if isinstance(self._worker.task, GlobalTask):
            return self._compare_rows(self._worker.task, whole, *halves)
        parts = self._losses_of(halves)
        self._compare_counts(loss, parts)
        if not self._is_equal([loss], [self._loss(whole, seed=0)]):
            return False  # a loss that changes from call to call cannot be compared
        if not self._is_equal([loss], [self._loss(whole, seed=1)]):
            return self._exchange_halves()
        if not self._is_equal([loss], parts):
            found, expected = float(loss.loss_sum), sum(float(part.loss_sum) for part in parts)
            self._refuse(f"the loss of {num_rows} samples is {found:.6g}, and {expected:.6g} as the sum of its halves")
        return True

    def _compare_documents(self) -> None:
        """Check that a document does not change the loss of the next one in its window."""
        batch = self._worker.loader.example(self._num_rows)
        if not (isinstance(batch, tuple | list) and isinstance(batch[0], dict) and "position_ids" in batch[0]):
            return  # a mixture, whose data.collate makes batches of its own
        inputs, targets = batch
        tokens = inputs["input_ids"]
        # Each window as two documents, whatever documents it has.
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        middle = tokens.shape[1] // 2
        is_first = places < middle
        positions = torch.where(is_first, places, places - middle)
        later = targets.masked_fill(is_first, IGNORED)
        losses: list[Sums] = []
        # The second time the first documents have tokens of other windows, or of other places.
        for replaced in (tokens, torch.where(is_first, tokens.flip(0).roll(1, 1), tokens)):
            losses.append(self._loss(({"input_ids": replaced, "position_ids": positions}, later), seed=0))
        if not self._is_equal(losses[:1], losses[1:]):
            raise _Coupled(
                "data.end_token: the loss of a document depends on the document before it, so the model does not keep "
                "documents apart by position_ids. Models of Hugging Face do so with attn_implementation=sdpa. Use such "
                "a model, or set data.end_token=null"
            )

    def _losses_of(self, parts: Sequence[Batch]) -> list[Sums]:
        try:
            return [self._loss(part, seed=0) for part in parts]
        except UsageError:
            raise
        except Exception as error:  # for example from a model that keeps a state for each sample of a microbatch
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._refuse(f"the loss of half of a batch of {self._num_rows} samples fails ({what})")

    def _exchange_halves(self) -> bool:
        """Check that one half of a batch does not change the loss of the other half.

        Returns False if there are too few samples.

        With half batches A, B, C and D, the batches AB and CD must have the same summed loss as the batches AD and CB.
        Equal seeds and shapes give equal random draws, so a random loss is comparable too.
        """
        half = self._num_rows // 2
        size = 4 * half
        if size > self._worker.order.num_train:
            return False
        batch = self._worker.loader.example(size)
        a, b, c, d = (range(start, start + half) for start in range(0, size, half))
        for seed in range(_NUM_SEEDS):
            losses: list[Sums] = []
            for left, right in ((a, b), (c, d), (a, d), (c, b)):
                losses.append(self._loss(rows_of(batch, [*left, *right], size), seed))
            # Both pairs of batches have the same halves in each place, so a sum over samples is the same for both.
            if not self._is_equal(losses[:2], losses[2:]):
                self._refuse("the loss of one half of a batch follows from the samples of the other half")
        return True

    def _loss(self, batch: Batch, seed: int) -> Sums:
        seed_generators(seed, Microbatch(0, 0, 0, 0), self._worker.precision.device)
        with self._worker.precision.autocast():
            sums = self._parallel.loss(self._worker.task, self._model, batch)
        reshard(self._model)
        sums = replace(sums, loss_sum=sums.loss_sum.detach())
        return sums if self._world.stages == 1 else self._of_all_stages(sums)

    def _of_all_stages(self, sums: Sums) -> Sums:
        """Return the last stage's sums on every stage, which all go on in the same way. A collective."""
        numbers = torch.tensor([float(sums.loss_sum), float(sums.count)], dtype=torch.float64)
        # All ranks of the last stage try the same samples.
        numbers /= self._world.size // self._world.stages
        dist.all_reduce(numbers, group=self._world.groups.control)
        return replace(sums, loss_sum=numbers[0], count=numbers[1])

    def _compare_rows(self, task: GlobalTask, *batches: Batch) -> bool:
        is_conclusive = True
        found: list[list[Tensor]] = []
        for batch in (*batches, batches[0]):
            seed_generators(len(found) // len(batches), Microbatch(0, 0, 0, 0), self._worker.precision.device)
            with torch.no_grad(), self._worker.precision.autocast():
                found.append([tensor.double() for tensor in tensors_of(task.embed(self._model, batch))])
            reshard(self._model)
        whole, first, second, again = found
        for of_whole, of_first, of_second, redrawn in zip(whole, first, second, again, strict=True):
            limit = self._tolerance * float(of_whole.abs().max())
            halves = torch.cat([of_first, of_second])
            if _differ(of_whole, redrawn, limit):
                is_conclusive = False  # embeddings that contain random draws cannot be compared
                continue
            if halves.shape != of_whole.shape or _differ(of_whole, halves, limit):
                self._refuse("the embedding of a sample follows from the other samples of its batch")
        return is_conclusive

    def _compare_counts(self, whole: Sums, parts: Sequence[Sums]) -> None:
        count, expected = float(whole.count), sum(float(part.count) for part in parts)
        if abs(count - expected) > 1e-6 * abs(expected):
            raise _Coupled(
                f"{self._name}.loss counts {count:g} in {self._num_rows} samples, and {expected:g} in their halves "
                "together. The count of Sums is how many losses are in loss_sum: for a mean loss over a batch return "
                "Sums(loss * len(batch), len(batch))"
            )

    def _is_equal(self, found: Sequence[Sums], expected: Sequence[Sums]) -> bool:
        losses = [float(sums.loss_sum) for sums in (*found, *expected)]
        difference = sum(losses[: len(found)]) - sum(losses[len(found) :])
        # `not ... >` accepts losses that are not finite, because nothing can be concluded from them.
        return not abs(difference) > self._tolerance * sum(map(abs, losses))

    def _refuse(self, what: str) -> NoReturn:
        raise _Coupled(f"{self._name}: {what}. {self._why}")


@contextmanager
def _without_a_trace(worker: WorkerState, parallel: Parallel, model: nn.Module) -> Iterator[None]:
    """Undo all side effects of forwards and backwards within the context."""
    device = worker.precision.device
    with ExitStack() as unchanged:
        unchanged.callback(parallel.clear_gradients, worker.optimizer)
        unchanged.enter_context(undone(model, worker.task))
        unchanged.enter_context(torch.random.fork_rng([device], enabled=device.type == "cuda"))
        unchanged.enter_context(own_randomness(0))
        unchanged.enter_context(SummedMetrics(worker.task, device).counting(0))
        yield


def _differ(one: Tensor, other: Tensor, limit: float) -> bool:
    return bool((one - other).abs().max() > limit)


def _refuse_what_needs_each_loss(config: Config) -> None:
    problems: list[Problem] = []
    why = "with a task that has embed and loss(embeddings): no microbatch has a loss of its own"
    if config.recompute.every is not None:
        problems.append(Problem("", "recompute.every", f"must be null {why}"))
    if config.batch.balance == "speed":
        problems.append(Problem("", "batch.balance", f"must be even or weights by label {why}"))
    if problems:
        raise ConfigError(problems)
