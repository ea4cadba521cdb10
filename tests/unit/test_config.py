"""The configuration: every bad input has its own clear message; what is written loads back the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import (
    BatchConfig,
    Config,
    Every,
    GptConfig,
    MlpConfig,
    Target,
    TargetData,
    TextData,
    diff,
    dump_config,
    identity,
    load_config,
    parse_config,
)
from app.config.load import CONFIGS
from app.errors import ConfigError


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "x.yaml", overrides)
    return str(caught.value).split("\n")


# fmt: off
BAD = [
    ("optimzer: {lr: 1}", "x.yaml:1: optimzer: unknown key; nearest is optimizer"),
    ("model:\n  num_layer: 4", "x.yaml:2: model.num_layer: unknown key; nearest is num_layers"),
    ("lr: 0.1", "x.yaml:1: lr: unknown key; nearest is optimizer.lr"),
    ("run: {batch_size: 8}", "x.yaml:1: run.batch_size: unknown key; nearest is batch.microbatch_size"),
    ("cluster: {zzz: 8}", "x.yaml:1: cluster.zzz: unknown key; valid: address"),
    ("1: 2", "x.yaml:1: 1: unknown key"),
    ("model: {kind: gtp}", 'x.yaml:1: model.kind: unknown kind, found "gtp"; nearest is gpt'),
    ("model: {kind: gpt, target: 'a:b'}", "x.yaml:1: model.kind: unknown key; valid: target, args"),
    ("model: {kind: ~}", "x.yaml:1: model.kind: unknown kind, found null; valid: gpt, mlp"),
    ("model: {kind: [gpt]}", 'x.yaml:1: model.kind: unknown kind, found ["gpt"]; nearest is gpt'),
    ("data: {kind: csv}", 'x.yaml:1: data.kind: unknown kind, found "csv"; valid: text, tokens'),
    ("optimizer: {kind: adam}", 'x.yaml:1: optimizer.kind: must be adamw, found "adam"; nearest is adamw'),
    ("trackers:\n- kind: tensorbord", 'x.yaml:2: trackers.0.kind: must be tensorboard, found "tensorbord"; '
     "nearest is tensorboard"),
    ("trackers:", "x.yaml:1: trackers: must be a list, found null"),
    ("model: {kind: mlp, in_features: 4}", "x.yaml:1: model.out_features: missing: numbers in one output: "
     "classes, or regression targets"),
    ("model: gpt", 'x.yaml:1: model: must be a mapping, found "gpt"'),
    ("run: {resume: atuo}", 'x.yaml:1: run.resume: must be auto, must or never, found "atuo"; nearest is auto'),
    ("run: {steps: many}", 'x.yaml:1: run.steps: must be a whole number, found "many"'),
    ("run: {steps: 1.5}", "x.yaml:1: run.steps: must be a whole number, found 1.5"),
    ("run: {steps: true}", "x.yaml:1: run.steps: must be a number, found true"),
    ("run: {steps: 0}", "x.yaml:1: run.steps: must be at least 1, found 0"),
    ("run: {steps: 5, epochs: 2}", "x.yaml:1: run.steps: give steps or epochs, found both (5 and 2)"),
    ("run: {steps: null}", "x.yaml:1: run.steps: give steps or epochs, found neither"),
    ("run: {name: a/b}", 'x.yaml:1: run.name: must be text that matches ^[A-Za-z0-9_][A-Za-z0-9._-]*$, found "a/b"'),
    ("run: {name: 12}", "x.yaml:1: run.name: must be text, found 12"),
    ("run: 7", "x.yaml:1: run: must be a mapping, found 7"),
    ("scaling: {gpus_per_worker: atuo}", "x.yaml:1: scaling.gpus_per_worker: must be auto or a whole number, "
     'found "atuo"; nearest is auto'),
    ("scaling: {gpus_per_worker: {a: 1}}", "x.yaml:1: scaling.gpus_per_worker: must be auto or a whole number, "
     'found {"a": 1}'),
    ("scaling: {num_workers: [4, 2]}", "x.yaml:1: scaling.num_workers: min must be at most max, found [4, 2]"),
    ("scaling: {num_workers: [4]}", "x.yaml:1: scaling.num_workers: must be a whole number or [min, max], found [4]"),
    ("scaling: {num_workers: [0, 2]}", "x.yaml:1: scaling.num_workers.0: must be at least 1, found 0"),
    ("batch: {global_size: 4}", "x.yaml:1: batch.microbatch_size: must be at most batch.global_size (4), found 8"),
    ("model: {num_heads: 3}", "x.yaml:1: model.num_heads: must divide model.embed_dim (128), found 3"),
    ("model: {vocab_size: 9}", "x.yaml:1: model.vocab_size: must be at least 256 for text, read as bytes, found 9"),
    ("run: {steps: 9}", "x.yaml:1: schedule.warmup_steps: must be at most run.steps (9), found 50"),
    ("data: {context_length: 256}", "x.yaml:1: data.context_length: must be at most model.context_length (128), "
     "found 256"),
    ("optimizer: {lr: .inf}", "x.yaml:1: optimizer.lr: must be a finite number, found Infinity"),
    ("optimizer: {lr: -1e-3}", "x.yaml:1: optimizer.lr: must be above 0.0, found -0.001"),
    ("optimizer: {betas: [0.9, 1]}", "x.yaml:1: optimizer.betas.1: must be below 1.0, found 1"),
    ("validation: {every: 200}", "x.yaml:1: validation.every: must be a count and a unit, such as "
     '"200 steps", "3 epochs" or "5 minutes", found 200'),
    ("model: {target: nowhere}", "x.yaml:1: model.target: must be text that matches "
     r'^\w+(\.\w+)*:\w+(\.\w+)*$, found "nowhere"'),
    ("run: {seed: 1}\nrun: {seed: 2}", "x.yaml:2: run: given twice, first on line 1"),
    ("- a\n- b", "x.yaml:1: must be a mapping of sections, found \"['a', 'b']\""),
    ("run:\n\tseed: 1", "x.yaml:2: not valid YAML: found character '\\t' that cannot start any token; "
     "indent with spaces, not tabs"),
    ("run: {seed: 1", "x.yaml:1: not valid YAML: expected ',' or '}', but got '<stream end>'"),
    ("run: !!python/object:os.system {}", "x.yaml:1: not valid YAML: could not determine a constructor for the tag "
     "'tag:yaml.org,2002:python/object:os.system'"),
]
BAD_OVERRIDES = [
    ("optimizer.lr=fast", 'override optimizer.lr: must be a number, found "fast"'),
    ("optimizer.lrr=1", "override optimizer.lrr: unknown key; nearest is lr"),
    ("lr=1", "override lr: unknown key; nearest is optimizer.lr"),
    ("optimizer.lr", "override optimizer.lr: must look like section.key=value"),
    ("optimizer.lr.x=1", "override optimizer.lr.x: optimizer.lr has no keys; set the whole of it"),
    ("scaling.num_workers=[1,4", "override scaling.num_workers: must be a whole number or [min, max], "
     'found "[1,4"'),
    ("model.kind=gtp", 'override model.kind: unknown kind, found "gtp"; nearest is gpt'),
    ("model={kind: gtp}", 'override model: model.kind: unknown kind, found "gtp"; nearest is gpt'),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), BAD)
def test_each_bad_file_has_its_message(text: str, message: str) -> None:
    (found,) = problems(text)
    assert found.startswith(message)


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES)
def test_each_bad_override_has_its_message(override: str, message: str) -> None:
    assert problems("optimizer: {lr: 1e-3}", override) == [message]


def test_all_problems_are_told_at_once_from_top_to_bottom() -> None:
    text = "run: {seeed: 1}\nbatch: {global_size: 4}\nmodel: {dropout: 2}\nmodel: {dropout: 1}\nlogging: {every: 1}"
    starts = (
        "x.yaml:1: run.seeed",
        "x.yaml:2: batch.micro",
        "x.yaml:4: model: given",
        "x.yaml:4: model.dropout",
    )
    found = problems(text, "optimizer.lr=x", "nonsense")
    assert len(found) == 7
    expected = (*starts, "x.yaml:5: logging.every", "override optimizer.lr", "override nonsense")
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))


def test_every_broken_rule_is_told() -> None:
    assert len(problems("run: {steps: 5}\nmodel: {context_length: 64, vocab_size: 64}")) == 3


def test_a_missing_key_is_placed_at_the_kind_that_asks_for_it() -> None:
    assert all(line.startswith("override model.kind: model.") for line in problems("", "model.kind=mlp"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load_by_name_and_by_path(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(path.name)
    assert config == load_config(str(path)) == parse_config(dump_config(config), "other.yaml")
    assert config.run.name == path.stem


def test_the_canonical_config_is_the_defaults() -> None:
    assert load_config("ddp.yaml") == parse_config("", "ddp.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"dpd.yaml: no such file, here or in configs/; nearest is ddp.yaml"):
        load_config("dpd.yaml")
    for path in (tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(ConfigError, match="cannot be read as text"):
            load_config(str(path))


def test_overrides() -> None:
    config = load_config(
        "ddp.yaml",
        ["optimizer.lr=3e-4", "scaling.num_workers=[1,4]", "data.source=*.txt", "batch.global_size=64", "trackers=[]",
         "optimizer.max_grad_norm=null"],
    )  # fmt: skip
    assert config.optimizer.lr == 3e-4
    assert (config.scaling.min_workers, config.scaling.max_workers) == (1, 4)
    assert config.data == TextData(source="*.txt")
    assert config.batch == BatchConfig(global_size=64)
    assert config.trackers == ()
    assert config.optimizer.max_grad_norm is None


def test_an_override_of_the_kind_drops_the_former_kinds_keys() -> None:
    text = "model: {kind: gpt, num_layers: 2, dropout: 0.5}"
    mlp = parse_config(text, "x.yaml", ["model.in_features=4", "model.kind=mlp", "model.out_features=2"])
    assert mlp.model == MlpConfig(in_features=4, out_features=2, dropout=0.5)
    assert parse_config(text, "x.yaml", ["model.target=a.b:c"]).model == Target(target="a.b:c")
    assert parse_config("model: {target: 'a:b', args: {x: 1}}", "x.yaml", ["model.kind=gpt"]).model == GptConfig()
    data = parse_config("data: {source: a, num_workers: 3}", "x.yaml", ["data.target=a:b"]).data
    assert data == TargetData(target="a:b", num_workers=3)


def test_an_override_of_the_length_replaces_the_files() -> None:
    assert load_config("ddp.yaml", ["run.epochs=3"]).run.steps is None
    assert load_config("digits.yaml", ["run.steps=300"]).run.epochs is None
    (found,) = problems("run: {steps: 100}", "run.epochs=3", "run.steps=300")
    assert found == "override run.steps: give steps or epochs, found both (300 and 3)"


def test_numbers_without_a_point_and_empty_sections() -> None:
    config = parse_config("optimizer: {lr: 1e-3, eps: 1E-6}\nrun: {steps: 1e4}\nmodel:\n", "x.yaml")
    assert (config.optimizer.lr, config.optimizer.eps, config.run.steps) == (1e-3, 1e-6, 10_000)
    assert config.model == GptConfig()


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("200 steps", Every(200, "steps")),
        ("1 epoch", Every(1, "epochs")),
        ("2.5 minutes", Every(2.5, "minutes")),
    ],
)
def test_every_reads_and_writes_the_same_text(text: str, every: Every) -> None:
    assert Every.parse(text) == every
    assert str(every) == text


@pytest.mark.parametrize("text", ["0 steps", "1.5 steps", "steps", "-1 steps", "5 fortnights", "", "5"])
def test_every_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="a count and a unit"):
        Every.parse(text)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@settings(deadline=None, max_examples=25)
@given(
    st.dictionaries(st.text(), st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
)
def test_round_trip_of_any_arguments(args: dict[str, object]) -> None:
    config = Config(model=Target(target="a:b", args=args))
    assert parse_config(dump_config(config), "x.yaml") == config


def test_identity_is_what_the_result_follows_from() -> None:
    keys = set(identity(load_config("ddp.yaml")))
    assert {"run.seed", "batch.global_size", "model.num_layers", "task.kind", "data.source"} <= keys
    assert not keys & {"batch.microbatch_size", "data.num_workers", "optimizer.lr", "run.steps", "run.name"}


def test_diff_sorts_changes_into_refused_told_and_free() -> None:
    old = load_config("ddp.yaml")
    new = load_config("ddp.yaml", ["run.seed=2", "optimizer.lr=1", "scaling.num_workers=3", "data.num_workers=1"])
    assert [tuple(change) for change in diff(old, new)] == [
        ("run.seed", 1, 2, True, False),
        ("scaling.num_workers", [1, 8], [3, 3], False, True),
        ("data.num_workers", 0, 1, False, True),
        ("optimizer.lr", 1e-3, 1.0, False, False),
    ]
    assert diff(old, old) == []
    kinds = {change.key for change in diff(old, load_config("ddp.yaml", ["model.target=a:b"]))}
    assert {"model.target", "model.kind", "model.num_layers"} <= kinds


def test_a_bad_config_is_told_without_loading_torch_or_ray() -> None:
    code = "import sys, app.config; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_says_what_it_is() -> None:
    from app.config.base import sections_in

    members = [(name, m) for name, field in Config.model_fields.items() for m in sections_in(field.annotation)]
    silent = [f"{name}.{key}" for name, m in members for key, field in m.model_fields.items() if not field.description]
    assert {key.split(".")[1] for key in silent} == {"kind"}
