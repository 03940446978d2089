# make demo   install into .venv, then run an MLA layer end to end and verify it
# make test   install into .venv, then lint, type check, every test, and every claim of the backends that run here

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The plugins that are ready for use; plugins/trtllm_like is in development.
PLUGINS := plugins/vanilla plugins/flashinfer
STAMP := $(VENV)/.installed

# Two workers with one thread each: torch's own threads would fight over the same cores. A fixed hash seed gives every
# worker the same test ids, and loadfile builds a file's shared fixtures once.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

.PHONY: demo test install lint types unit conformance format clean

demo: install
	$(BIN)/mla run --model deepseek-v3 --dtype float32 --verify
	$(BIN)/mla run --checkpoint tests/data/tiny_mla_kjv --layers 0,1,2 --dtype float32 --verify

test: lint types unit conformance

install: $(STAMP)

# torch goes first and alone: its exact version decides which build is taken, and nothing after may replace it.
$(STAMP): pyproject.toml $(PLUGINS:%=%/pyproject.toml) constraints.txt requirements-writers.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(shell grep '^torch==' constraints.txt)
	$(PIP) install -q -c constraints.txt editables hatchling
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test]' $(PLUGINS:%=-e %)
	$(PIP) install -q --no-deps -r requirements-writers.txt
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(PYTEST)

# Prints how many cells were verified, refused and left unverified.
conformance: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --pyargs mla_core.conformance.suite --mla-backend vanilla

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
