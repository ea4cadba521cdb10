# Each target is enough by itself on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Test processes at a time, where tests do not mind their neighbours.
JOBS ?= 2
# Few at a time to each process: long tests that wait would hold back the short ones behind them.
PARALLEL := -n $(JOBS) --maxschedchunk 4

# For `make gpu`: a Python whose torch has CUDA, and where results go.
GPU_PYTHON ?= python3
GPU_OUT ?= gpu-drills

.PHONY: install train unit test test-slow test-all e2e gpu gpu-1 gpu-2 check docs

PIP_INSTALL := $(BIN)/pip install --quiet -c constraints.txt

.venv/.train: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e .
	@touch $@

# Of Streaming only what reads shards: all that it asks for would take numpy and transformers back to older ones.
.venv/.dev: pyproject.toml constraints.txt .venv/.train
	$(PIP_INSTALL) -e ".[dev]"
	$(PIP_INSTALL) --no-deps mosaicml-streaming brotli catalogue cramjam python-snappy zstd
	@touch $@

.venv/.e2e: pyproject.toml constraints.txt .venv/.dev
	$(PIP_INSTALL) -e ".[e2e]"
	@touch $@

install: .venv/.train

train: .venv/.train
	$(BIN)/python main.py --config ddp.yaml

# Under a minute: what to run after each edit.
unit: .venv/.dev
	$(PYTEST) $(PARALLEL) tests/unit -m "not slow"

# Every claim once. The cheap failures come first.
test: unit
	$(PYTEST) $(PARALLEL) tests/dist -m "not slow"
	$(PYTEST) tests/cluster -m "not slow"

# What `make test` leaves out: more worlds, more points to be killed at, more seeds.
test-slow: .venv/.dev
	$(PYTEST) $(PARALLEL) --hypothesis-profile=thorough tests/unit -m "slow or hypothesis"
	$(PYTEST) $(PARALLEL) tests/dist -m slow
	$(PYTEST) tests/cluster -m slow

test-all: test test-slow

# Needs root and, on Debian, apt-get install openssh-server rsync iproute2. `pytest tests/e2e -m slow` is the rest.
e2e: .venv/.e2e
	$(PYTEST) tests/e2e -m "not slow"

# Drills on one GPU, in two parts of nine minutes. Installs nothing: tests/gpu/README.md says what the Python needs.
gpu:
	$(MAKE) --keep-going --jobs 1 gpu-1 gpu-2

gpu-1 gpu-2: gpu-%:
	$(GPU_PYTHON) -m tests.gpu.drills --part $* --out $(GPU_OUT)/part-$* --minutes 9

check: .venv/.dev
	$(BIN)/ruff check app cluster main.py tests
	$(BIN)/ruff format --check app cluster main.py tests
	$(BIN)/mypy --strict app cluster tests main.py
	$(BIN)/lint-imports

# The pages that are made from the code: docs/events.md and docs/reference.md.
docs: .venv/.dev
	$(BIN)/python -m tests.documents
