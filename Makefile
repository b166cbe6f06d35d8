# One command each; every one sets up .venv by itself. PYTHON chooses the interpreter that .venv is made with.
PYTHON ?= python3
BIN := .venv/bin

# Threads that spin while they wait made a run on a busy machine 13 times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test check clean

# `make demo rollout.group_size=16` hands dotted settings on, as the command line takes them.
demo: .venv/installed
	$(BIN)/flatpeak demo $(foreach setting,$(MAKEOVERRIDES),$(if $(findstring .,$(firstword $(subst =, ,$(setting)))),$(setting)))

# The models of the tests are tiny: two threads would wait for each other most of the time.
test check: export OMP_NUM_THREADS ?= 1

test: .venv/installed-dev
	$(BIN)/python -m pytest

check: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

# The stamps are made last, so that an installation that failed is tried again. torch goes first and alone: any other
# order may fetch gigabytes of CUDA builds.
.venv/installed-torch: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install "torch>=2.11,<2.14"
	touch $@

.venv/installed: .venv/installed-torch
	$(BIN)/pip install -e .
	touch $@

.venv/installed-dev: .venv/installed-torch
	$(BIN)/pip install -e ".[dev]"
	touch .venv/installed $@

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
