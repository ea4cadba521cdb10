"""Models of which a part is repeated, or frozen."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadfast.cli import main
from steadfast.config import Config
from steadfast.models import build_model
from tests.support.claims import check_checkpoint, check_equal, check_ledger, check_losses, check_run
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.models import WIDTH, Embedded
from tests.support.reference import reference
from tests.support.run_directories import write_as_a_command
from tests.support.small import small

KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        base = self.base(hidden.to(self.base.weight.dtype)).to(hidden.dtype)
        return hidden + torch.tanh(base + self.adapter(hidden))


class Repeated(Embedded):
    """Names its layers `blocks`, as minGPT does: a module that can be called, and no method. Its base may be frozen."""

    def __init__(self, frozen: bool = False, dtype: str = "float32", base_seed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Layer(), Layer(), Layer())
        generator = torch.Generator().manual_seed(base_seed if base_seed >= 0 else os.getpid())
        for layer in self.blocks:
            assert isinstance(layer, Layer)
            nn.init.normal_(layer.base.weight, generator=generator)
            layer.base.to(getattr(torch, dtype)).requires_grad_(not frozen)

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        repeated: Tensor = self.blocks(hidden)
        return repeated

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")


def repeated(storage: Path, *words: str, **args: object) -> Config:
    given = ", ".join(f"{name}: {value}" for name, value in args.items())
    return small(storage, "model.target=tests.dist.test_parts:Repeated", f"model.args={{{given}}}", *words)


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_are_gathered_one_at_a_time_and_told_of(tmp_path: Path, frozen: bool) -> None:
    config = repeated(tmp_path, "parallel.kind=fsdp", frozen=frozen)
    run = drill(config, worlds=[2, 3], leave_after=[5])
    check_run(run, reference(config))
    assert run.told("model_sharded", "num_units") == [4]
    assert run.told("model_sharded", "layers") == [{"Layer": 3}]


@KINDS
def test_a_frozen_base_stays_in_16_bits(tmp_path: Path, kind: str) -> None:
    words = f"parallel.kind={kind}", "precision.kind=fp32"
    config = repeated(tmp_path, *words, frozen=True, dtype="bfloat16", base_seed=5)
    weights = drill(config, worlds=[2, 1], leave_after=[5]).weights
    base = build_model(config.model).state_dict()["blocks.1.base.weight"]
    assert base.dtype == torch.bfloat16
    assert torch.equal(weights["blocks.1.base.weight"], base)
    assert weights["blocks.1.adapter.weight"].dtype == weights["head.weight"].dtype == torch.float32


TRAINABLE_ONLY = "checkpoint.trainable_only=true"


@pytest.mark.parametrize("kinds", [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_checkpoint_without_the_base_is_resumed_by_any_world(tmp_path: Path, kinds: tuple[str, str]) -> None:
    before, after = (repeated(tmp_path, f"parallel.kind={kind}", TRAINABLE_ONLY, frozen=True) for kind in kinds)
    drill(before, worlds=[2, 1, 2], leave_after=[2, 2], stop_after=2)
    run = drill(after, worlds=[3, 1], leave_after=[3])
    expected = reference(after)
    learned = {name: tensor for name, tensor in expected.weights.items() if ".base." not in name}
    assert len(learned) == len(expected.weights) - 6
    check_ledger(run, expected)
    check_losses(run, expected)
    check_checkpoint(run)
    check_equal(run.weights, learned)


def test_another_base_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    drill(repeated(tmp_path, TRAINABLE_ONLY, frozen=True), worlds=[2], stop_after=3)
    with pytest.raises(MemberFailed) as failure:
        drill(repeated(tmp_path, TRAINABLE_ONLY, frozen=True, base_seed=7), worlds=[2])
    said = r"step-0000000\d was trained on another base than this one: frozen parameters of sha256 \w+, not"
    assert len(re.findall(said, str(failure.value))) == 1


def test_workers_with_different_bases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MemberFailed, match="the frozen parameters of rank 1 differ from those of rank 0"):
        drill(repeated(tmp_path, TRAINABLE_ONLY, frozen=True, base_seed=-1), worlds=[2])


def test_where_nothing_is_frozen_nothing_is_left_out_and_that_is_told(tmp_path: Path) -> None:
    run = drill(repeated(tmp_path, TRAINABLE_ONLY), worlds=[2])
    assert run.told("notice", "text") == [
        "checkpoint.trainable_only leaves nothing out: all parameters of the model are trained"
    ]
    assert "blocks.0.base.weight" in run.weights


def test_a_base_from_a_file_is_read_at_every_start(tmp_path: Path) -> None:
    torch.manual_seed(9)
    torch.save(Repeated(base_seed=9).state_dict(), tmp_path / "weights.pt")
    start = f"run.init_from={tmp_path}/weights.pt"
    config = repeated(tmp_path, TRAINABLE_ONLY, start, frozen=True)
    drill(config, worlds=[2], stop_after=3)
    run = drill(config, worlds=[2])
    whole = drill(repeated(tmp_path / "whole", start, frozen=True), worlds=[2])
    check_equal(run.weights, {name: whole.weights[name] for name in run.weights})
    (tmp_path / "weights.pt").unlink()
    with pytest.raises(MemberFailed, match=r"run.init_from: .* cannot be loaded into this model"):
        drill(repeated(tmp_path, TRAINABLE_ONLY, start, "run.steps=20", frozen=True), worlds=[1])


def test_an_export_says_that_it_lacks_the_base_or_brings_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = repeated(tmp_path, TRAINABLE_ONLY, frozen=True)
    run = drill(config, worlds=[2])
    directory = write_as_a_command(config)

    def export(*words: object) -> tuple[int, str]:
        code = main(0.0, ["export", directory.uri, *map(str, words)])
        said = capsys.readouterr()
        return code, said.out + said.err

    code, said = export("--out", tmp_path / "weights.pt")
    assert (code, "without the frozen parameters, which the checkpoint leaves out" in said) == (0, True)
    check_equal(torch.load(tmp_path / "weights.pt"), run.weights)

    code, said = export("--format", "hf", "--out", tmp_path / "whole", "--trust-code")
    assert (code, "a Repeated of step 14" in said) == (0, True)
    check_equal(torch.load(tmp_path / "whole" / "weights.pt"), reference(config).weights)
    assert export("--format", "hf", "--out", tmp_path / "whole", "--trust-code") == (
        2,
        f"error: --out {tmp_path}/whole: already exists; choose another folder\n",
    )

    directory.write_config(repeated(tmp_path, TRAINABLE_ONLY, frozen=True, base_seed=7))
    code, said = export("--format", "hf", "--out", tmp_path / "other", "--trust-code")
    assert (code, "was trained on another base than this one" in said) == (1, True)
    assert not (tmp_path / "other").exists()
