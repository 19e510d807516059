# Commands for a fresh machine with python3 and make: `make search`, `make test`, `make check` (the quick part of the tests),
# `make docs` (the API reference, in build/docs), `make record` (what nvcc makes of the kernels that tests judge, for tests/). Each
# sets up .venv first, which is done again only where pyproject.toml, constraints.txt or this folder's place has changed.

SHELL := /bin/sh
PYTHON ?= python3
ARGS ?= --shape 8_16_4096_128 --causal

VENV := .venv
RUN := $(VENV)/bin/python
# What is imported is compiled then, and kept: of torch alone that spares 20 seconds. Tests start Python hundreds of times.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(RUN) tools/install.py --quiet --constraint constraints.txt

.PHONY: search test prepare check record docs setup lint pytest
.DELETE_ON_ERROR:

search: setup
	@$(RUN) -m bwdtune.tuner search $(ARGS)

# A worker more than there are CPUs: some tests wait for other processes. One that has no test left takes some of another's, so
# that the last minutes are not one worker's alone.
PYTEST = $(RUN) -m pytest --numprocesses $$($(RUN) -c 'import os; print(os.cpu_count() + 1)') --dist worksteal $(SELECTED)

test: prepare
	@$(MAKE) --no-print-directory pytest

# All that `make test` does before the tests.
prepare: setup
	@$(MAKE) --no-print-directory --jobs 3 $(VENV)/servers $(VENV)/collected lint

check:
	@$(MAKE) --no-print-directory --jobs 2 lint pytest SELECTED="-m 'not slow'"

pytest: setup
	$(PYTEST)

record: setup
	$(PYTEST) -m compiled --write-record

# Ray and PostgreSQL, for tests that start a cluster and a server; where they are not installed these are skipped.
$(VENV)/servers: $(VENV)/installed
	@echo 'installing Ray and PostgreSQL'
	@$(INSTALL) --no-build-isolation --editable '.[servers]'
	@touch $@

# What a fresh .venv imports is compiled, and tests' assertions are rewritten: here by one process, beside an installation, rather
# than by each worker.
$(VENV)/collected: $(VENV)/installed
	@-$(RUN) -m pytest --collect-only --quiet > /dev/null 2>&1
	@touch $@

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: setup
	$(RUN) -m pdoc --docformat google --output-directory build/docs bwdtune

# Which nvcc there is may change at any time, so it is asked for each time.
setup: $(VENV)/installed
	@$(RUN) -m bwdtune.gen.build.toolchain || { echo 'installing the nvcc wheels'; $(INSTALL) --no-build-isolation --editable '.[nvcc]'; }

# A folder that was moved or copied has a .venv that leads to the old one.
ifneq ($(shell pwd -P | cmp -s - $(VENV)/installed && $(RUN) -c '' 2>&1 && echo valid),valid)
.PHONY: $(VENV)/installed
endif

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'Python 3.10 or newer is needed: make PYTHON=...'; exit 1; }
	@echo 'setting up $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) uv || echo 'uv could not be installed: pip takes a minute longer'
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --editable '.[dev]'
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/bwdtune
	@pwd -P > $@
