"""Models of transformers and torchvision: sharded, checkpointed, compiled, exported, and loaded by their own libraries.

Each is trained by two workers to what one process comes to, and its own library makes of the export what the trained
model makes of the same inputs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.hooks.hook import HookContext
from steadfast.loop.modes import evaluating
from tests.support.claims import EQUAL, check_ledger, check_weights, largest_difference
from tests.support.drill import Drilled, Members, drill
from tests.support.patches import write_no_code
from tests.support.programs import run_program
from tests.support.reference import Reference, reference
from tests.support.run_directories import write_as_a_command
from tests.support.small import CONTEXT, VOCABULARY, small

from torchvision import models  # isort: skip

# The libraries warn of what is to come in them, and torch looks at the gradients of all that it compiles.
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = "tests.dist.test_models_nobody_here_wrote"
IMAGE_SIZE = 32  # that of Digits


def llama(tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, tie_word_embeddings=tied))


def gpt2(tied: bool = True) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 16, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied))


def resnet50() -> nn.Module:
    model: nn.Module = models.resnet50(num_classes=10)
    return model


def vit(dropout: float = 0.0) -> nn.Module:
    size = {"patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    drops = {"dropout": dropout, "attention_dropout": dropout}
    model: nn.Module = models.VisionTransformer(image_size=IMAGE_SIZE, **size, **drops, num_classes=10)
    return model


def some_inputs(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind == "tokens":
        return torch.randint(VOCABULARY, (3, CONTEXT), generator=generator)
    return torch.rand(3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator, dtype=torch.float64)


def outputs_of(model: nn.Module, kind: str) -> Tensor:
    with evaluating(model), torch.no_grad():
        found = model(some_inputs(kind))
    logits: Tensor = getattr(found, "logits", found)
    return logits


class Outputs:
    """A hook that writes down what the trained model makes of some inputs. All ranks run it, as it is in shards."""

    def __init__(self, kind: str, folder: str) -> None:
        self._kind = kind
        self._folder = Path(folder)

    def on_end(self, run: HookContext) -> None:
        torch.save(outputs_of(run.model, self._kind), self._folder / f"outputs-{run.rank}.pt")


class Case(NamedTuple):
    """A model of others, and how it is trained here."""

    model: Callable[..., Any]
    inputs: str  # tokens or images
    blocks: dict[str, int]  # that fsdp gathers one at a time
    words: tuple[str, ...] = ()
    equal: float = EQUAL


IMAGES = (
    "batch.global_size=32",
    "batch.microbatch_size=8",
    "data={target: 'tests.examples.vision:Digits', args: {split: train}, validation_fraction: 0}",
    "task.target=tests.examples.vision:TopClassification",
)
# Statistics of few numbers make the last bits of a sum large within some steps, as would a higher rate.
GENTLY = "optimizer={kind: sgd, lr: 1.0e-3}"
# Llama's norms and rotations are in fp32, whatever its weights are in.
CASES = {
    "llama": Case(llama, "tokens", {"LlamaDecoderLayer": 3}, ("compile=blocks",), equal=1e-6),
    "gpt2": Case(gpt2, "tokens", {"GPT2Block": 3}, ("compile=blocks",)),
    "resnet50": Case(resnet50, "images", {"Bottleneck": 3}, (*IMAGES, GENTLY, "run.steps=2")),
    "vit": Case(vit, "images", {"EncoderBlock": 3}, (*IMAGES, "compile=blocks")),
}


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), *sorted(CASES.keys() - {"gpt2"})])
def test_its_own_library_loads_what_it_has_become(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    hook = f"{{target: '{HERE}:Outputs', args: {{kind: {case.inputs}, folder: {tmp_path}}}}}"
    words = [f"model.target={HERE}:{name}", "run.steps=4", *case.words]
    settings = ["parallel.kind=fsdp", "memory.activation_checkpointing=full", f"hooks=[{hook}]"]
    config = small(tmp_path, *words, *settings)
    write_as_a_command(config)
    run = drill(config, worlds=[2], patch=write_no_code)
    check_result(run, reference(config), case)
    assert not run.told("graph_break", "place")
    assert not run.told("not_compiled", "reason")
    assert run.told("model_sharded", "layers") == [case.blocks]

    trained = torch.load(tmp_path / "outputs-0.pt")
    assert torch.equal(torch.load(tmp_path / "outputs-1.pt"), trained)
    loaded = from_its_library(case, tmp_path / config.run.name, tmp_path)
    torch.testing.assert_close(outputs_of(loaded, case.inputs), trained, rtol=0, atol=case.equal)


STAGES = "{kind: pipeline, stages: 2}"


@pytest.mark.parametrize(
    ("name", "parallel", "worlds"),
    [
        ("llama", "{kind: fsdp, shard_size: 1, tensor_size: 2}", [4, 2]),
        pytest.param("llama", "{kind: pipeline, stages: 2, tensor_size: 2}", [4, 4], marks=pytest.mark.slow),
        pytest.param("llama", STAGES, [4, 2], marks=pytest.mark.slow),
        ("gpt2", STAGES, [4, 2]),
    ],
)
def test_its_own_library_loads_what_stages_and_its_tensor_plan_have_made_of_it(
    name: str, parallel: str, worlds: list[Members], tmp_path: Path
) -> None:
    case = CASES[name]
    tied = "pipeline" not in parallel  # otherwise the head and the embeddings are of different stages
    model = f"model={{target: '{HERE}:{name}', args: {{tied: {str(tied).lower()}}}}}"
    config = small(tmp_path, model, "run.steps=4", f"parallel={parallel}")
    write_as_a_command(config)
    expected = reference(config)
    check_result(drill(config, worlds=worlds, leave_after=[1]), expected, case)
    loaded = from_its_library(case, tmp_path / config.run.name, tmp_path)
    trained = case.model(tied).double()
    trained.load_state_dict(expected.weights)
    torch.testing.assert_close(outputs_of(loaded, "tokens"), outputs_of(trained, "tokens"), rtol=0, atol=case.equal)


def check_result(run: Drilled, expected: Reference, case: Case) -> None:
    check_ledger(run, expected)
    assert largest_difference(run.weights, expected.weights) <= case.equal


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_workers"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_layers_with_dropout_are_compiled_as_they_are(kind: str, num_workers: int, tmp_path: Path) -> None:
    """By the compiler that users have. aot_eager cannot: its backward asks dropout for a stride that it has not."""
    words = [f"model={{target: '{HERE}:vit', args: {{dropout: 0.1}}}}", "run.steps=5", f"parallel.kind={kind}"]
    config = small(tmp_path, *words, *IMAGES, "compile=blocks")
    run, expected = drill(config, worlds=[num_workers]), reference(config)
    check_ledger(run, expected)
    check_weights(run, expected)
    assert not run.told("graph_break", "place")
    assert not run.told("not_compiled", "reason")
    # What attention puts out lies in another order than the inputs of the first layer.
    assert ["stride mismatch" in reason for reason in run.told("recompiled", "reason")] == [True]


def from_its_library(case: Case, run: Path, folder: Path) -> nn.Module:
    """Return the exported model, loaded by those who know nothing of this program."""
    if case.inputs == "images":
        run_program("main.py", "export", run, "--out", folder / "weights.pt")
        model: nn.Module = case.model().double()
        model.load_state_dict(torch.load(folder / "weights.pt"), strict=True)
        return model
    from transformers import AutoModelForCausalLM

    run_program("main.py", "export", run, "--out", folder / "exported", "--format", "hf", "--trust-code")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype="auto")
    is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert is_tied == loaded.config.tie_word_embeddings
    return loaded  # type: ignore[no-any-return]
