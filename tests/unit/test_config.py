"""The configuration: every bad input has its own clear message; what is written loads back the same."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.config import (
    BatchConfig,
    Config,
    Every,
    GptConfig,
    HeldOut,
    MlpConfig,
    Target,
    TargetData,
    TextData,
    TextSource,
    ValidationHuggingFace,
    ValidationImages,
    ValidationTarget,
    diff,
    dump_config,
    load_config,
    parse_config,
)
from steadfast.config.load import CONFIGS
from steadfast.config.schema import RunConfig
from steadfast.errors import ConfigError
from steadfast.plan import End


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "x.yaml", overrides)
    return str(caught.value).split("\n")


# fmt: off
BAD = [
    ("optimzer: {lr: 1}", "1: optimzer: unknown key; nearest is optimizer"),
    ("model:\n  num_layer: 4", "2: model.num_layer: unknown key; nearest is num_layers"),
    ("cluster: {zzz: 8}", "1: cluster.zzz: unknown key; valid: address"),
    ("1: 2", "1: 1: unknown key"),
    ("model: {kind: gtp}", '1: model.kind: unknown kind, found "gtp"; nearest is gpt'),
    ("model: {kind: gpt, target: 'a:b'}", "1: model.target: unknown key"),
    ("model: {kind: ~}", "1: model.kind: unknown kind, found null; valid: gpt, mlp, target"),
    ("data: {kind: csv}", '1: data.kind: unknown kind, found "csv"; valid: huggingface, image_folder, jsonl, mixture, '
     "parquet, target, text, tokens, webdataset"),
    ("optimizer: {kind: adan}", '1: optimizer.kind: unknown kind, found "adan"; nearest is adam'),
    ("trackers:\n- kind: tensorbord", '2: trackers.0.kind: unknown kind, found "tensorbord"; nearest is tensorboard'),
    ("model: {kind: mlp, in_features: 4}", "1: model.out_features: missing"),
    ("model: gpt", "1: model: must be a valid dictionary"),
    ("run: {resume: atuo}", "1: run.resume: must be 'auto', 'must' or 'never', found \"atuo\"; nearest is auto"),
    ("run: {steps: many}", "1: run.steps: must be a valid integer"),
    ("run: {steps: 0}", "1: run.steps: must be greater than 0, found 0"),
    ("run: {steps: 5, epochs: 2}", "1: run.steps: must be null where run.epochs is given (2), found 5"),
    ("run: {name: a/b}", "1: run.name: must have letters, digits"),
    ("model: {target: nope}", "1: model.target: must be package.module:name, found"),
    ("cluster: {env: {1A: x}}", "1: cluster.env.1A.[key]: must have letters, digits and _ alone, and begin"),
    ("run: 7", "1: run: must be a valid dictionary or instance of RunConfig, found 7"),
    ("scaling: {gpus_per_worker: atuo}", "1: scaling.gpus_per_worker: must be 'auto' or must be a valid"),
    ("parallel: {kind: fsdp, reshard_after_forward: nie}", "1: parallel.reshard_after_forward: must be a valid "
     "boolean, unable to interpret input or must be"),
    ("scaling: {num_workers: [4, 2]}", "1: scaling.num_workers: must be [min, max] with min at most max, found [4, 2]"),
    ("scaling: {num_workers: [4]}", "1: scaling.num_workers.1: missing"),
    ("scaling: {num_workers: [0, 2]}", "1: scaling.num_workers.0: must be greater than 0, found 0"),
    ("scaling:\n  num_workers: 9", "2: scaling.num_workers: at least 9 workers have only 6 microbatches in a global "
     "batch; ask for fewer workers, or lower batch.microbatch_size"),
    ("batch: {global_size: 4}", "1: batch.microbatch_size: must be at most batch.global_size (4), found 8"),
    ("batch: {balance: sped}", "1: batch.balance: must be 'even', 'even_samples' or 'speed', found \"sped\"; nearest "
     "is speed"),
    ("batch: {balance: even_samples}\nmodel: {dropout: 0.1}", "1: batch.balance: must not be even_samples with dropout "
     "in the model: a part of a microbatch would draw other numbers"),
    ("batch: {balance: even_samples}\nmodel: {attention_dropout: 0.1}", "1: batch.balance: must not be even_samples "
     "with dropout in the model"),
    ("batch: {balance: even_samples}\nrun: {exact: true}", "1: batch.balance: must not be even_samples with run.exact: "
     "a part of a microbatch rounds differently"),
    ("batch: {balance: even_samples}\ntask: {coupled: true}", "1: batch.balance: must not be even_samples with "
     "task.coupled, which keeps a microbatch together"),
    ("batch: {balance: even_samples}\nparallel: {kind: pipeline, stages: 2}",
     "1: batch.balance: must not be even_samples without parallel.kind ddp or fsdp"),
    ("batch: {balance: even_samples}\ndata: {target: 'a:B', collate: {target: 'a:b'}}",
     "1: batch.balance: must not be even_samples with data.collate, which makes whole microbatches"),
    ("batch: {balance: {A100: 0}}", "1: batch.balance.A100: must be greater than 0, found 0"),
    ("batch: {balance: {}}", "1: batch.balance: Dictionary should have at least 1 item"),
    ("model: {num_heads: 3}", "1: model.num_heads: must divide model.embed_dim (128), found 3"),
    ("data: {context_length: 256}", "1: data.context_length: must be at most model.context_length (128), found 256"),
    ("optimizer: {lr: .inf}", "1: optimizer.lr: must be a finite number, found Infinity"),
    ("optimizer: {betas: [0.9, 1]}", "1: optimizer.betas.1: must be less than 1, found 1"),
    ("validation: {every: 200}", '1: validation.every: must be a count and a unit, such as "200 steps", "3 epochs" or '
     '"5 minutes", found 200'),
    ("faults:\n  inject:\n  - {kind: fail_at, step: 7, rnk: 1}", "3: faults.inject.0.rnk: unknown key; nearest is "
     "rank"),
    ("faults:\n  inject:\n  - {kind: fail_at, step: 0}", "3: faults.inject.0.step: must be greater than 0"),
    ("faults:\n  inject:\n  - {kind: fail_at, step: 1}\n  - {kind: slow_at, ms: 7}",
     "4: faults.inject.1.ranks: missing"),
    ("faults: {inject: [{kind: fail, step: 7}]}", '1: faults.inject.0.kind: unknown kind, found "fail"; nearest is '
     "fail_at"),
    ("faults: {inject: [{step: 7}]}", "1: faults.inject.0.kind: missing"),
    ("faults: {inject: [{kind: hang_at, step: 7, phase: forwards}]}", "1: faults.inject.0.phase: must be 'loader', "
     "'forward', 'collective' or 'checkpoint', found \"forwards\"; nearest is forward"),
    ("faults: {inject: {kind: fail_at, step: 7}}", "1: faults.inject: must be a valid"),
    ("run: {seed: 1}\nrun: {seed: 2}", "2: run: given twice, first on line 1"),
    ("- a\n- b", "1: must be a mapping of sections"),
    ("run: {seed: 1", "1: not valid YAML: expected ',' or '}', but got '<stream end>'"),
    ("run: !!python/object:os.system {}", "1: not valid YAML: could not determine a constructor for the tag "
     "'tag:yaml.org,2002:python/object:os.system'"),
    ("scaling:\n  gpus_per_worker: 2", "2: scaling.gpus_per_worker: must be 0, 1 or auto: a worker trains on one GPU, "
     "so raise num_workers for more, found 2"),
    ("run: {seed: 1}\nparallel: {kind: data_parallel}", '2: parallel.kind: unknown kind, found "data_parallel"; use '
     "parallel.kind=ddp, with a worker for each GPU"),
    ("recovery: {mode: restart}", "1: recovery.mode: unknown key; the key was removed, because surviving workers "
     "always keep running. Leave it out"),
    ("profile: {shapes: true}", "1: profile.shapes: unknown key; the key was removed. A hook of your own may run "
     "torch.profiler"),
    ("batch: {microbatch_size: auto}\ntask: {coupled: true}", "1: batch.microbatch_size: must be a number with "
     "task.coupled=true: the loss depends on which samples share a microbatch"),
    ("task: {kind: regression, chunk_tokens: 8}", "1: task.chunk_tokens: must be null with task.kind=regression: only "
     "language_modeling has tokens, found 8"),
    ("task: {chunk_tokens: 8}\nparallel: {reducer: torch}", "1: task.chunk_tokens: must be null with "
     "parallel.reducer=torch, which copies the outputs of the model"),
    ("scaling: {num_workers: 3}\nparallel: {kind: fsdp, shard_size: 2}", "2: parallel.shard_size: no number of workers "
     "in scaling.num_workers [3, 3] is a multiple of it and at most the 6 microbatches of a global "),
    ("batch: {microbatch_size: automatic}", "1: batch.microbatch_size: must be"),
    ("parallel: {kind: fsdp, tensor_size: 2}\nmodel: {attention_dropout: 0}\ncompile: blocks\n"
     "memory: {activation_checkpointing: full}",
     "3: compile: must be none with parallel.tensor_size and memory.activation_checkpointing: torch.compile cannot "
     "save a device mesh"),
    ("recovery: {stall_s: 3}", "1: recovery.stall_s: unknown key; the key is called recovery.hang_limit_s now"),
    ("parallel: {bucket_cap_mb: 50}", "1: parallel.bucket_cap_mb: unknown key; the key was removed, and its value"),
    ("trackers: [{kind: wandb, tags: a}]", "1: trackers.0.tags: unknown key; the key was removed. Set WANDB_TAGS"),
    ("audit: {recompute: 5 steps}", "1: audit: unknown key; the key audit.recompute is called recompute.every"),
    ("run: {deterministic: true}\nrecompute: {every: 5 minutes}", '2: recompute.every: must be in steps, such as "100 '
     'steps", because all workers must check the same steps, found "5 minutes"'),
    ("run: {seed: 1}\nrecompute: {every: 100 steps}", "2: recompute.every: needs run.deterministic=true or "
     "run.exact=true: otherwise two workers round differently"),
    *[("run: {exact: true}\nscaling: {num_workers: 1}\nparallel: " + parallel, "3: parallel: must be "
       "{kind: ddp} with run.exact, which sums integers in its own gradient buckets")
      for parallel in ("{kind: fsdp}", "{reducer: torch}")],
    ("run: {exact: true}\nprecision: {kind: fp16}", "2: precision: must not be of kind fp16 with run.exact"),
    ("run: {exact: true}\ncompile: blocks", "2: compile: must be none with run.exact: compiled code may "),
    *[("run: {deterministic: true}\nscaling: {num_workers: 1}\nrecompute: {every: 1 step}\nparallel: " + parallel,
       "3: recompute.every: must be null without parallel.kind=ddp and parallel.reducer=steadfast, whose "
       "buckets it compares") for parallel in ("{kind: fsdp}", "{reducer: torch}")],
    ("checkpoint: {lose_at_most: 1 epoch}", '1: checkpoint.lose_at_most: must be in seconds, minutes or steps, found '
     '"1 epoch"'),
    ("logging: {weights_digest_every: 4}", "1: logging.weights_digest_every: must be a count and a unit"),
    ("logging: {weights_digest_every: 5 minutes}", "1: logging.weights_digest_every: must be in steps or epochs: by "
     "the clock two runs would"),
    ("logging: {weights_digest_every: 4 steps}\nparallel: {kind: fsdp}", "1: logging.weights_digest_every: must be "
     "null with parallel.kind=fsdp"),
    ("parallel: {kind: fsdp, shard_size: [1, 2]}", "1: parallel: shard_size must be at least 2 without tensor_"),
    ("parallel: {kind: fsdp, tensor_size: [1, 2]}", "1: parallel: tensor_size must be a number, or a list of numbers "
     "from 2 on"),
    ("parallel: {kind: pipeline, stages: 1}", "1: parallel: stages must be at least 2"),
    ("parallel: {kind: pipeline, stages: [2, 4], balance: [1, 1]}", "1: parallel: balance must have one number for "
     "each stage"),
    ("data: {kind: text, end_token: 0}", "1: data.end_token: unknown key"),
    ("faults: {inject: [{kind: flip_at, step: 7, where: wieght}]}", "1: faults.inject.0.where: must be 'gradient', "
     "'activation' or 'weight', found \"wieght\"; nearest is weight"),
    ("faults: {inject: [{kind: flip_at, step: 7, bit: 64}]}", "1: faults.inject.0.bit: must be less than 64"),
    ("batch: {global_size: 4, microbatch_size: auto}\nscaling:\n  num_workers: 5",
     "3: scaling.num_workers: at least 5 workers have only 4 microbatches in a global batch"),
]
BAD_OVERRIDES = [
    ("optimizer.lr=fast", "override: optimizer.lr: must be a valid number, unable to parse string as a number, "
     'found "fast"'),
    ("optimizer.lrr=1", "override: optimizer.lrr: unknown key; nearest is lr"),
    ("optimizer.lr", "override: optimizer.lr: must be given as section.key=value"),
    ("optimizer.lr.x=1", 'override: optimizer.lr: must be a valid number, found {"x": 1}'),
    ("model.kind=gtp", 'override: model.kind: unknown kind, found "gtp"; nearest is gpt'),
    ("model={kind: gtp}", 'override: model.kind: unknown kind, found "gtp"; nearest is gpt'),
    ("parallel.find_unused_parameters=true", "override: parallel.find_unused_parameters: unknown key; parameters that "
     "a step does not use are fine without it, with reducer=steadfast, the default"),
    ("parallel.sync_batchnorm=true", "override: parallel.sync_batchnorm: unknown key; BatchNorm has the statistics of "
     "a microbatch, and the same running ones at any number of workers; for larger groups raise "
     "batch.microbatch_size"),
]
# fmt: on


@pytest.mark.parametrize(("text", "message"), BAD)
def test_each_bad_file_has_its_message(text: str, message: str) -> None:
    (found,) = problems(text)
    assert found.startswith(f"x.yaml:{message}")


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES)
def test_each_bad_override_has_its_message(override: str, message: str) -> None:
    assert problems("optimizer: {lr: 1e-3}", override) == [message]


def test_all_problems_are_told_at_once_from_top_to_bottom() -> None:
    text = "run: {seeed: 1}\nbatch: {global_size: 4}\nmodel: {dropout: 2}\nmodel: {dropout: 1}\nlogging: {every: 1}\n"
    text += "parallel: {kind: fsdp, shard_size: []}"
    expected = (
        "x.yaml:1: run.seeed",
        "x.yaml:2: batch.micro",
        "x.yaml:4: model: given",
        "x.yaml:4: model.dropout",
        "x.yaml:5: logging.every",
        "x.yaml:6: parallel.shard_size: must be",
        "x.yaml:6: parallel.shard_size.tuple",
        "override: nonsense",
        "override: optimizer.lr",
    )
    found = problems(text, "optimizer.lr=x", "nonsense")
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))
    assert len(problems("batch: {global_size: 4}\nmodel: {context_length: 64}")) == 2  # each broken rule
    # A missing key is placed at the section that lacks it.
    assert all(line.startswith("override: model.") for line in problems("", "model.kind=mlp"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load_by_name_and_by_path(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(path.name)
    assert config == load_config(str(path)) == parse_config(dump_config(config), "other.yaml")
    assert config.run.name == path.stem


def test_the_canonical_config_is_the_defaults_but_for_a_length_that_a_laptop_can_wait_for() -> None:
    differing = {change.key for change in diff(parse_config("", "ddp.yaml"), load_config("ddp.yaml"))}
    assert differing == {"run.steps", "optimizer.lr"}


def test_a_file_that_is_not_there_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.config.load.CONFIGS", tmp_path / "configs")
    with pytest.raises(
        ConfigError, match=r"ddp.yaml: no such file\. An installed package has no configs/.*steadfast init"
    ):
        load_config("ddp.yaml")


def test_overrides() -> None:
    config = load_config(
        "ddp.yaml",
        ["optimizer.lr=3e-4", "scaling.num_workers=[1,4]", "data.source=*.txt", "batch.global_size=64", "trackers=[]",
         "optimizer.max_grad_norm=null"],
    )  # fmt: skip
    assert config.optimizer.lr == 3e-4
    assert config.scaling.num_workers == (1, 4)
    assert config.data == TextData(source="*.txt")
    assert config.batch == BatchConfig(global_size=64)
    assert config.trackers == ()
    assert config.optimizer.max_grad_norm is None


def test_an_override_of_the_kind_drops_the_former_kinds_keys() -> None:
    text = "model: {kind: gpt, num_layers: 2}"
    mlp = parse_config(text, "x.yaml", ["model.in_features=4", "model.kind=mlp", "model.out_features=2"])
    assert mlp.model == MlpConfig(in_features=4, out_features=2)
    assert parse_config(text, "x.yaml", ["model.kind=gpt"]).model == GptConfig(num_layers=2)
    assert parse_config(text, "x.yaml", ["model.target=a.b:c"]).model == Target(target="a.b:c")
    assert parse_config("model: {target: 'a:b', args: {x: 1}}", "x.yaml", ["model.kind=gpt"]).model == GptConfig()


def test_an_override_of_the_length_replaces_the_files() -> None:
    assert load_config("ddp.yaml", ["run.epochs=3"]).run.steps is None
    assert load_config("digits.yaml", ["run.steps=300"]).run.epochs is None
    assert load_config("ddp.yaml", ["run.steps=20"]).schedule.warmup_steps == 50  # which a run may be shorter than
    assert str(load_config("ddp.yaml", ["logging.weights_digest_every=1 epoch"]).weights_digest_every) == "1 epoch"


def test_an_extended_run_is_as_long_as_its_steps_have_samples() -> None:
    """Of 55 samples, in steps of 13: the third epoch ended with step 13, of 9 samples."""
    ends = [End(13, 165)]
    assert [RunConfig(epochs=epochs).num_steps(55, 13) for epochs in (2, 3, 4)] == [9, 13, 17]
    assert [RunConfig(epochs=epochs).num_steps(55, 13, ends) for epochs in (2, 3, 4)] == [9, 13, 18]
    assert RunConfig(steps=20).num_steps(55, 13, ends) == 20


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
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(st.dictionaries(st.text(), NESTED, max_size=4))
def test_round_trip_of_any_arguments(args: dict[str, object]) -> None:
    config = Config(model=Target(target="a:b", args=args))
    assert parse_config(dump_config(config), "x.yaml") == config


def test_diff_sorts_changes_into_refused_told_and_free() -> None:
    old = load_config("ddp.yaml")
    changed = [
        ("run.seed", 1, 2, True, False),
        ("run.deterministic", False, True, False, False),
        ("scaling.num_workers", [1, 8], [3, 3], False, True),
        ("data.num_workers", "auto", 1, False, True),
        ("optimizer.lr", 3e-3, 1.0, False, False),
        ("precision.tf32", False, True, False, False),
        ("compile", "none", "blocks", False, False),
        ("checkpoint.trainable_only", False, True, True, False),
    ]
    new = load_config("ddp.yaml", [f"{key}={json.dumps(value)}" for key, _, value, *_ in changed])
    assert [tuple(change) for change in diff(old, new)] == changed
    assert diff(old, old) == []
    kinds = {change.key for change in diff(old, load_config("ddp.yaml", ["model.target=a:b"]))}
    assert {"model.target", "model.kind", "model.num_layers"} <= kinds


def test_data_to_validate_on_are_told_apart_as_the_data_themselves_are() -> None:
    text = "data: {target: 'a:b', collate: {target: 'c:d'}, validation: {target: 'e:f'}}"
    config = parse_config(text, "x.yaml")
    assert config.data.validation == ValidationTarget(target="e:f")
    assert {"data.target": "a:b", "data.collate.target": "c:d", "data.validation.target": "e:f"}.items() <= (
        config.targets().items()
    )
    config = parse_config("data: {source: '*.txt', validation: {source: '*.md', context_length: 64}}", "x.yaml")
    assert config.data.validation == TextSource(source="*.md", context_length=64)
    assert parse_config(dump_config(config), "x.yaml") == config
    # Data of one kind have the sizes that the model is trained with.
    folders = "data: {kind: image_folder, path: a, image_size: 32, validation: {kind: image_folder, path: b}}"
    assert parse_config(folders, "x.yaml").data.validation == ValidationImages(path="b", image_size=32)
    texts = "data: {context_length: 64, validation: {source: '*.md'}}"
    assert parse_config(texts, "x.yaml").data.validation == TextSource(source="*.md", context_length=64)
    tokens = "data: {kind: tokens, path: a.bin, end_token: 7, validation: {kind: tokens, path: b.bin}}"
    assert parse_config(tokens, "x.yaml").data.validation.end_token == 7
    others = "data: {context_length: 64, validation: {kind: huggingface, path: b}}"
    assert parse_config(others, "x.yaml").data.validation == ValidationHuggingFace(path="b")


def test_collate_alone_is_that_of_the_samples_held_out() -> None:
    config = parse_config("data: {target: 'a:b', validation: {collate: {target: 'c:d'}}}", "x.yaml")
    assert config.data.validation == HeldOut(collate=Target(target="c:d"))
    assert config.data.held_out_fraction == 0.1
    assert config.targets()["data.validation.collate.target"] == "c:d"
    assert parse_config(dump_config(config), "x.yaml") == config
    of_its_own = "data: {target: 'a:b', validation: {target: 'e:f', collate: {target: 'c:d', args: {n: 1}}}}"
    config = parse_config(of_its_own, "x.yaml")
    assert config.data.held_out_fraction == 0.0
    assert config.data.validation == ValidationTarget(target="e:f", collate=Target(target="c:d", args={"n": 1}))
    assert problems("data: {target: 'a:b', validation_fraction: 0, validation: {collate: {target: 'c:d'}}}") == [
        "x.yaml:1: data.validation.collate: has no samples: data.validation_fraction is 0, and data.validation names "
        "no data"
    ]


def test_an_order_is_a_word_or_a_target_and_makes_another_run() -> None:
    config = parse_config("data: {order: {target: 'a:b', args: {n: 1}}}", "x.yaml")
    assert config.data.order == Target(target="a:b", args={"n": 1})
    assert config.targets()["data.order.target"] == "a:b"
    assert parse_config(dump_config(config), "x.yaml") == config
    assert all(change.identity for change in diff(config, parse_config("", "x.yaml")))
    assert problems("data: {order: sequentail}") == [
        "x.yaml:1: data.order: must be 'shuffled', 'blocks' or 'sequential', found \"sequentail\"; "
        "nearest is sequential"
    ]
    assert problems("data: {order: {targt: 'a:b'}}")[0] == "x.yaml:1: data.order.target: missing"
    assert problems("data: {shuffle: false}") == [
        "x.yaml:1: data.shuffle: unknown key; data.order=sequential reads samples as the dataset has them, and a "
        "target there in an order of your own"
    ]


def test_a_section_replaces_the_keys_given_before_it_and_keeps_those_after_it() -> None:
    words = [
        "data.context_length=32",
        "data={target: 'a:b'}",
        "data.validation.collate.target=x:y",
        "data.num_workers=3",
    ]
    data = parse_config("data: {kind: text}", overrides=words).data
    assert isinstance(data, TargetData)
    assert data.num_workers == 3
    assert isinstance(data.validation, HeldOut)
    assert data.validation.collate is not None
    data = parse_config("data: {kind: text}", overrides=[*words, "data={kind: text}"]).data
    assert isinstance(data, TextData)
    assert (data.num_workers, data.validation) == ("auto", None)
    model = parse_config(
        "model: {kind: gpt}", overrides=["model.args={a: 1}", "model.args.x=2", "model.target=m:M"]
    ).model
    assert isinstance(model, Target)
    assert model.args == {"a": 1, "x": 2}
