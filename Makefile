# Each target is enough by itself on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install train test e2e check

.venv/.train: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e .
	@touch $@

.venv/.dev: pyproject.toml .venv/.train
	$(BIN)/pip install --quiet -e ".[dev]"
	@touch $@

.venv/.e2e: pyproject.toml .venv/.dev
	$(BIN)/pip install --quiet -e ".[e2e]"
	@touch $@

install: .venv/.train

train: .venv/.train
	$(BIN)/python main.py --config ddp.yaml

# The cheap failures come first.
test: .venv/.dev
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/dist
	$(BIN)/python -m pytest tests/cluster

# Needs root and, on Debian, apt-get install openssh-server rsync iproute2.
e2e: .venv/.e2e
	$(BIN)/python -m pytest tests/e2e

check: .venv/.dev
	$(BIN)/ruff check app cluster main.py tests
	$(BIN)/ruff format --check app cluster main.py tests
	$(BIN)/mypy --strict app cluster
