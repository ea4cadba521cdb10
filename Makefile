# Each target is enough by itself on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest/bin
PYTEST := $(BIN)/python -m pytest
# Test processes at a time, where tests do not mind their neighbours, other than tests/stages/stages.toml states.
export JOBS

# For `make gpu`: a Python whose torch has CUDA, and where results go.
GPU_PYTHON ?= python3
GPU_OUT ?= gpu-drills

.PHONY: install train quick unit test test-more test-slow slow-files test-all test-newest e2e gpu check docs site storm

PIP_INSTALL := $(BIN)/pip install --quiet -c constraints.txt

.venv/.train: pyproject.toml constraints.txt
	@echo "== installing torch and Ray into .venv, once: one to five minutes"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) -e .
	@touch $@

# Streaming with the packages that read shards, and torchft. All of their requirements would bring other versions of
# numpy, transformers and opentelemetry.
WITHOUT_REQUIREMENTS := mosaicml-streaming brotli catalogue cramjam python-snappy zstd torchft
.venv/.dev: pyproject.toml constraints.txt .venv/.train
	@echo "== installing what the tests need, once: one to five minutes"
	@$(PIP_INSTALL) -e ".[dev]"
	@$(PIP_INSTALL) --no-deps $(WITHOUT_REQUIREMENTS)
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

# quick      one minute: a resize, a death, a killed command, a refusal of each kind
# unit       what to run after each edit: neither Ray nor workers
# test       every claim once
# test-more  the same claims by other kinds, layouts and seeds, of which CI runs a quarter each day
# test-slow  more worlds, more points to be killed at, more seeds: hours
quick unit test test-more test-slow:
	@$(PYTHON) -m tests.stages --plan $@
	@$(MAKE) --no-print-directory .venv/.dev
	@$(BIN)/python -m tests.stages $@

test-all: test test-more test-slow

# Slow tests of FILES, one after the other.
slow-files: .venv/.dev
	$(PYTEST) --hypothesis-profile=thorough $(FILES) -m "slow or hypothesis"

# Unit and dist tests with the newest torch that pyproject.toml allows. With torch, pip downloads gigabytes for GPUs.
test-newest:
	$(PYTHON) -m venv .venv-newest
	grep -vE '^(torch|torchvision|triton|nvidia-.*)==' constraints.txt > .venv-newest/constraints.txt
	$(NEWEST)/pip install --quiet -c .venv-newest/constraints.txt -e ".[dev]"
	$(NEWEST)/pip install --quiet -c .venv-newest/constraints.txt --no-deps $(WITHOUT_REQUIREMENTS)
	$(NEWEST)/python -c "import torch; print('torch', torch.__version__)"
	$(NEWEST)/python -m tests.stages unit
	$(NEWEST)/python -m tests.stages processes tests/dist

# Needs root and, on Debian, apt-get install openssh-server rsync iproute2. `pytest tests/e2e -m slow` is the rest.
E2E ?= tests/e2e
e2e: .venv/.e2e
	$(PYTEST) $(E2E) -m "not slow"

# The same work under the same random faults, by this application and by others: 20 minutes, or MINUTES=120 for all.
storm: .venv/.dev
	$(BIN)/python main.py chaos --config ddp.yaml --storm $(if $(MINUTES),--minutes $(MINUTES))

# Drills on one GPU, within eight minutes. Installs nothing: tests/gpu/README.md says what the Python needs.
gpu:
	$(GPU_PYTHON) -m tests.gpu.drills --out $(GPU_OUT)

check: .venv/.dev
	$(BIN)/ruff check app cluster main.py tests
	$(BIN)/ruff format --check app cluster main.py tests
	$(BIN)/mypy --strict app cluster tests main.py
	PYTHONPATH=app $(BIN)/lint-imports
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.stages.rows

# The pages that are made from the code: docs/reference.md, docs/events.md, docs/command_line.md and docs/programs.md.
docs: .venv/.dev
	$(BIN)/python -m tests.documents

# The documentation, with search: docs/_build/html/index.html. A warning, such as a broken link, is an error.
site: .venv/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
