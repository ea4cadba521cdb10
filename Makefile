# Each target is enough by itself on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest/bin
PYTEST := $(BIN)/python -m pytest
# Test processes at a time, where tests do not mind their neighbours.
JOBS ?= 2
# Few at a time to each process: long tests that wait would hold back the short ones behind them.
PARALLEL := -n $(JOBS) --maxschedchunk 4

# For `make gpu`: a Python whose torch has CUDA, and where results go.
GPU_PYTHON ?= python3
GPU_OUT ?= gpu-drills

.PHONY: install train unit test test-slow slow-unit slow-dist slow-cluster slow-files test-all test-newest e2e gpu gpu-1 gpu-2 check docs site storm

PIP_INSTALL := $(BIN)/pip install --quiet -c constraints.txt

.venv/.train: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e .
	@touch $@

# Streaming with the packages that read shards, and torchft. All of their requirements would bring other versions of
# numpy, transformers and opentelemetry.
WITHOUT_REQUIREMENTS := mosaicml-streaming brotli catalogue cramjam python-snappy zstd torchft
.venv/.dev: pyproject.toml constraints.txt .venv/.train
	$(PIP_INSTALL) -e ".[dev]"
	$(PIP_INSTALL) --no-deps $(WITHOUT_REQUIREMENTS)
	@touch $@

.venv/.e2e: pyproject.toml constraints.txt .venv/.dev
	$(PIP_INSTALL) -e ".[e2e]"
	@touch $@

.venv/.docs: pyproject.toml constraints.txt .venv/.train
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

install: .venv/.train

train: .venv/.train
	$(BIN)/python main.py --config ddp.yaml

# What to run after each edit: a minute and a half on two cores.
unit: .venv/.dev
	$(PYTEST) $(PARALLEL) tests/unit -m "not slow"

# Every claim once. The cheap failures come first.
test: unit
	$(PYTEST) $(PARALLEL) tests/dist -m "not slow"
	$(PYTEST) tests/scale
	$(PYTEST) tests/cluster -m "not slow"

# What `make test` leaves out: more worlds, more points to be killed at, more seeds.
test-slow: slow-unit slow-dist slow-cluster

slow-unit: .venv/.dev
	$(PYTEST) $(PARALLEL) --hypothesis-profile=thorough tests/unit -m "slow or hypothesis"

slow-dist: .venv/.dev
	$(PYTEST) $(PARALLEL) tests/dist -m slow

slow-cluster: .venv/.dev
	$(PYTEST) tests/cluster -m slow

# Slow tests of FILES, one after the other.
slow-files: .venv/.dev
	$(PYTEST) --hypothesis-profile=thorough $(FILES) -m "slow or hypothesis"

test-all: test test-slow

# Unit and dist tests with the newest torch that pyproject.toml allows. With torch, pip downloads gigabytes for GPUs.
test-newest:
	$(PYTHON) -m venv .venv-newest
	grep -vE '^(torch|torchvision|triton|nvidia-.*)==' constraints.txt > .venv-newest/constraints.txt
	$(NEWEST)/pip install --quiet -c .venv-newest/constraints.txt -e ".[dev]"
	$(NEWEST)/pip install --quiet -c .venv-newest/constraints.txt --no-deps $(WITHOUT_REQUIREMENTS)
	$(NEWEST)/python -c "import torch; print('torch', torch.__version__)"
	$(NEWEST)/python -m pytest $(PARALLEL) tests/unit -m "not slow"
	$(NEWEST)/python -m pytest $(PARALLEL) tests/dist -m "not slow"

# Needs root and, on Debian, apt-get install openssh-server rsync iproute2. `pytest tests/e2e -m slow` is the rest.
e2e: .venv/.e2e
	$(PYTEST) tests/e2e -m "not slow"

# The same work under the same random faults, by this application and by others: 20 minutes, or MINUTES=120 for all.
storm: .venv/.dev
	$(BIN)/python main.py chaos --config ddp.yaml --storm $(if $(MINUTES),--minutes $(MINUTES))

# Drills on one GPU, in two parts of nine minutes. Installs nothing: tests/gpu/README.md says what the Python needs.
gpu:
	$(MAKE) --keep-going --jobs 1 gpu-1 gpu-2

gpu-1 gpu-2: gpu-%:
	$(GPU_PYTHON) -m tests.gpu.drills --part $* --out $(GPU_OUT)/part-$* --minutes 9

check: .venv/.dev
	$(BIN)/ruff check app cluster main.py tests
	$(BIN)/ruff format --check app cluster main.py tests
	$(BIN)/mypy --strict app cluster tests main.py
	PYTHONPATH=app $(BIN)/lint-imports
	$(BIN)/python -m tests.prose

# The pages that are made from the code: docs/reference.md, docs/events.md, docs/command_line.md and docs/programs.md.
docs: .venv/.dev
	$(BIN)/python -m tests.documents

# The documentation, with search: docs/_build/html/index.html. A warning, such as a broken link, is an error.
site: .venv/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
