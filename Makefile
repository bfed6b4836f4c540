# Two commands do everything, each from a clean clone: `make demo` and `make test`.
# They make .venv with uv where it is installed, else with the first Python >= 3.12 that is found.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# The demo and the tests run on the CPU; say e.g. JAX_PLATFORMS=cuda for another device.
export JAX_PLATFORMS ?= cpu

.PHONY: demo test check format clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .jax_cache

$(VENV)/.%: $(VENV)/.python pyproject.toml
	@if command -v uv >/dev/null; then uv pip install --python $(BIN)/python -e '.[$*]'; \
	else $(BIN)/python -m pip install --quiet -e '.[$*]'; fi
	@touch $@

$(VENV)/.python:
	@if command -v uv >/dev/null; then uv venv --python '>=3.12,<3.14' $(VENV); else \
	  python=$$(scripts/find_python.sh) || exit 1; echo "using $$python"; "$$python" -m venv $(VENV); fi
	@touch $@
