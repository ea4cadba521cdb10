# Each target is enough by itself on a fresh machine: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install train test check

.venv/.train: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e .
	@touch $@

.venv/.dev: pyproject.toml .venv/.train
	$(BIN)/pip install --quiet -e ".[dev]"
	@touch $@

install: .venv/.train

train: .venv/.train
	$(BIN)/python main.py --config ddp.yaml

# The cheap failures come first.
test: .venv/.dev
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/dist
	$(BIN)/python -m pytest tests/cluster

check: .venv/.dev
	$(BIN)/ruff check app cluster main.py tests
	$(BIN)/ruff format --check app cluster main.py tests
	$(BIN)/mypy --strict app cluster
