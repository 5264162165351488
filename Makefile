# `make demo` and `make test` start from nothing but Python 3.11+ and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow coverage browser check format bench clean help

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fedfa needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)   ## train FedAvg and FedFA on an embedded federation and compare them
	$(BIN)/fedfa run digit-sites algorithm=fedavg
	$(BIN)/fedfa run digit-sites algorithm=fedfa
	$(BIN)/python examples/demo_comparison.py

test: $(READY) browser   ## what CI runs: style, types, tests
	$(MAKE) --no-print-directory check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --cov --cov-report=term --cov-fail-under=90

test-slow: $(READY)  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

browser:         ## Chromium for the tests of the report's page, where apt can install it; they are skipped without
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u 2>/dev/null)" = 0 ] && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive && \
	  { apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1; } || \
	echo "no browser: the tests of the report's page are skipped"

check: $(READY)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## put the code into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)  ## speed, as ratios in one run
	$(BIN)/python -m benchmarks

clean:           ## everything that was made here, runs excepted
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .coverage dist
