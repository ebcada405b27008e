# Two targets do all the set-up: `make demo` and `make test`. Both work in .venv, made once from constraints.txt.

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: demo test zoo docs dist clean

demo: $(READY)
	$(BIN)/python -m examples.demo $(if $(DEMO_DATA),--data "$(DEMO_DATA)")

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/pytest tests --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Models of other libraries, converted and not (docs/zoo.md). ZOO_PYTHON is the Python of an environment with these libraries.
ZOO_PYTHON ?= .venv-interop/bin/python
zoo:
	$(ZOO_PYTHON) -W ignore -m benchmarks zoo --json zoo.json

# The documentation as a site, in site/index.html.
docs: $(READY)
	@$(BIN)/pip install --quiet --constraint constraints.txt '.[docs]' --no-build-isolation
	$(BIN)/python benchmarks/numbers_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

# Wheel and sdist in dist/, built twice and compared, installed into an empty environment and asked for a diagnosis.
dist: $(READY)
	THERMOCLINE_INSTALL=1 PIP_EXTRA_INDEX_URL="$(TORCH_INDEX)" $(BIN)/pytest tests/test_packaging.py
	rm -rf dist && $(BIN)/python -m hatchling build

# torch comes first and alone: its CPU build lives on an index of its own, which nothing else should be looked up on.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "thermocline needs Python 3.10 or newer; name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "this Python cannot make virtual environments; mend it with: sudo apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) (the first time: several hundred MB to download)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --retries 2 --no-deps --constraint constraints.txt --extra-index-url "$(TORCH_INDEX)" torch
	@$(BIN)/pip install --quiet --constraint constraints.txt hatchling editables
	@$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
