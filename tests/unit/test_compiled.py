"""What of a model is compiled, when it is, and what is told of it. By a compiler that writes no code, for speed."""

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadfast.parallel.compiled
import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.config import GptConfig
from steadfast.errors import TrainingError, UsageError
from steadfast.models import build_model
from steadfast.parallel.activations import checkpoint_activations
from steadfast.parallel.compiled import CompiledBlocks
from steadfast.tasks import LanguageModeling, summed_loss
from tests.support.events import notices

# Torch looks at the gradients of all inputs of what it compiles, and hides from users what it says of that itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

Count = Callable[[], int]
TOKENS = torch.arange(16).reshape(2, 8)


def compile_quickly(forward: Callable[..., Any]) -> Any:
    return torch.compile(forward, dynamic=False, backend="aot_eager")


@pytest.fixture
def num_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    """How many graphs have been compiled since the test began."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(steadfast.parallel.compiled, "_compile", compile_quickly)
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def gpt() -> nn.Module:
    torch.manual_seed(1)
    return build_model(GptConfig(num_layers=3, num_heads=2, embed_dim=8, context_length=8, vocab_size=16, dropout=0.1))


def compiled_with(model: nn.Module) -> tuple[nn.Module, CompiledBlocks]:
    compiled = CompiledBlocks("blocks")
    compiled.take(model)
    return model, compiled


def run(model: nn.Module, compiled: CompiledBlocks, tokens: Tensor = TOKENS, is_full: bool = True) -> Tensor:
    torch.manual_seed(2)  # of dropout
    with compiled.running(is_full):
        loss: Tensor = model(tokens).sum()
        loss.backward()
    return loss


def test_one_compilation_serves_all_layers_and_later_models_and_keeps_none_of_them(num_graphs: Count) -> None:
    expected = run(gpt(), CompiledBlocks("none"))
    assert num_graphs() == 0
    model, compiled = compiled_with(gpt())
    assert list(model.state_dict()) == list(gpt().state_dict())
    assert torch.equal(run(model, compiled), expected)
    assert num_graphs() == 1
    other = gpt()
    compiled.take(other)
    assert torch.equal(run(other, compiled), expected)
    assert num_graphs() == 1
    assert compiled.news() == []
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_loss_of_a_language_model_is_compiled_with_its_layers_and_computes_the_same(num_graphs: Count) -> None:
    model, task, batch = gpt().eval(), LanguageModeling(), (TOKENS, TOKENS.roll(1))
    expected = task.loss(model, batch).loss_sum
    CompiledBlocks("none").take_loss(task)
    assert task.summed_loss is summed_loss
    compiled = CompiledBlocks("blocks")
    compiled.take_loss(task)
    with compiled.running(is_full=False):
        assert torch.equal(task.loss(model, batch).loss_sum, expected)
    assert num_graphs() == 0
    with compiled.running(is_full=True):
        assert torch.equal(task.loss(model, batch).loss_sum, expected)
    assert num_graphs() == 1


def test_a_short_microbatch_and_what_runs_outside_of_a_step_is_not_compiled(num_graphs: Count) -> None:
    model, compiled = compiled_with(gpt())
    run(model, compiled, TOKENS[:1], is_full=False)
    with torch.no_grad():
        model.eval()(TOKENS)
    assert num_graphs() == 0


def test_also_a_checkpoint_of_the_models_own_runs_compiled_code_in_the_backward(num_graphs: Count) -> None:
    """Or it would be given other tensors than it has kept."""

    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False)
            return inputs

    model, compiled = compiled_with(Checkpointing())
    with compiled.running(is_full=True):
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        assert num_graphs() == 1
        loss.backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["full", "selective", 2])
def test_together_with_activation_checkpointing(num_graphs: Count, how: Any) -> None:
    plain, model = gpt(), gpt()
    expected = run(plain, CompiledBlocks("none"))
    checkpoint_activations(model, how)
    model, compiled = compiled_with(model)
    assert torch.equal(run(model, compiled), expected)
    assert num_graphs() >= 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_copy_computes_with_its_own_layers_and_a_pickled_model_comes_back_plain(num_graphs: Count) -> None:
    model, compiled = compiled_with(gpt())
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    before = run(model, compiled)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert torch.equal(run(other, compiled), before)
    assert torch.equal(run(pickled, CompiledBlocks("none")), before)
    assert pickled.layers[0].forward.__func__ is type(pickled.layers[0]).forward


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 10}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=10, n_head=4))


@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_layers_of_hugging_faces_models_are_compiled_once(build: Callable[[], Any], num_graphs: Count) -> None:
    """Ten of them, more than torch would compile one by one."""
    torch.manual_seed(1)
    plain = build().train()
    model, compiled = compiled_with(copy.deepcopy(plain))
    losses = []
    for each in (plain, model):
        torch.manual_seed(2)  # of dropout
        with compiled.running(is_full=True):
            loss = each(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0])
    assert num_graphs() == 1
    assert compiled.news() == []
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_models_that_cannot_be_compiled_are_refused_by_name(num_graphs: Count) -> None:
    with pytest.raises(UsageError, match=r"compile=blocks: no repeated layers are found; .* a method blocks\(\)"):
        CompiledBlocks("blocks").take(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].forward = model[0].forward
    with pytest.raises(UsageError, match="the forward of a Linear has been replaced; use none"):
        CompiledBlocks("blocks").take(model)


def test_another_shape_is_told_with_the_condition_that_does_not_hold(num_graphs: Count) -> None:
    model, compiled = compiled_with(gpt())
    run(model, compiled)
    run(model, compiled, TOKENS[:, :4])
    (event,) = notices(compiled.news(), "recompiled")
    reason = "tensor 'x' size mismatch at index 1. expected 8, actual 4"
    assert (event["function"], event["reason"]) == ("forward", reason)
    assert event["text"] == f"forward was compiled again in {event['seconds']} s: {reason}"
    assert notices(compiled.news(), "recompiled") == []
    run(model, compiled)
    assert notices(compiled.news(), "recompiled") == []


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.linear(inputs)
        torch._dynamo.graph_break()
        return inputs.tanh()


def test_a_graph_break_is_told_once_with_its_place(num_graphs: Count) -> None:
    model, compiled = compiled_with(nn.Sequential(Breaking(), Breaking()))
    for _ in range(2):
        with compiled.running(is_full=True):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert num_graphs() == 2
    (event,) = notices(compiled.news(), "graph_break")
    line = Breaking.forward.__code__.co_firstlineno + 2
    assert event["place"] == f"{__file__}:{line}"
    assert "graph_break" in event["reason"]
    assert "\n" not in event["text"]
    assert notices(compiled.news(), "graph_break") == []


def no_compiler(forward: Callable[..., Any]) -> Any:
    def backend(graph: Any, _: Any) -> Any:
        raise RuntimeError("no C++ compiler\nand a stack")

    return torch.compile(forward, dynamic=False, backend=backend)


def test_step_without_a_compiler_tells_the_remedy_or_runs_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steadfast.parallel.compiled, "_compile", no_compiler)
    model, compiled = compiled_with(gpt())
    with pytest.raises(TrainingError, match=r"cannot be compiled: .*no C\+\+ compiler; compile=none runs it"):
        run(model, compiled)
    compiled.try_out(lambda: model(TOKENS))
    assert "no C++ compiler" in compiled.refused
    assert "\n" not in compiled.refused
    assert torch.equal(run(model, compiled), run(gpt(), CompiledBlocks("none")))


def test_want_of_memory_is_no_want_of_a_compiler() -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fail() -> None:
        raise AssertionError

    compiled = CompiledBlocks("blocks")
    compiled.try_out(run_out)
    assert not compiled.refused
    with pytest.raises(torch.OutOfMemoryError), compiled.running(is_full=True):
        run_out()
    compiled.try_out(fail)
    assert compiled.refused == "AssertionError: "
