# The whole interface of this repository; every target sets up what it needs in .venv. `make` alone lists the targets.
#
#   PYTHON=python3.12 make setup      another interpreter than the first of 3.11 or later on the PATH
#   make demo DEMO_ARGS="--epochs 2"  a shorter demo
#   make test TEST_ARGS="-k barrier"  some tests only

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage check fix protos reference up bench clean

# Where this is set, each of the thousands of processes that tests start would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for p in python3 python3.15 python3.14 python3.13 python3.12 python3.11; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := .venv/bin
READY := .venv/ready
# What is imported is compiled then; to compile thousands of files that nobody imports would take half of the setup's time.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile
SAY := @printf '\n== %s\n'
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?= all_reduce
# Tests wait for processes, sockets and timers a third of the time, so three workers keep two processors busy.
TEST_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n + n / 2)))
# A worker that a test has ended is not replaced: the new one would begin with the same test.
SPREAD = --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: $(READY)  ## make .venv with ferrorpc (editable), the examples' libraries and the developer's tools
	@echo ".venv is ready"

$(READY): pyproject.toml
	@if [ -z "$(PYTHON)" ]; then echo "make: no Python 3.11 or later on the PATH; try: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	$(SAY) "setup 1/3: a virtual environment in .venv with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { echo "make: $(PYTHON) cannot make virtual environments; try: apt install python3-venv" >&2; rm -rf .venv; exit 1; }
	$(SAY) "setup 2/3: a pip that knows dependency groups"
	@$(INSTALL) --upgrade "pip>=25.1"
	$(SAY) "setup 3/3: ferrorpc, the libraries of the examples and the tools (about a minute the first time)"
	@$(INSTALL) --editable ".[examples,ui]" --group dev
	@touch $(READY)

demo: $(READY)  ## train on handwritten digits with 4 processes over gRPC
	$(SAY) "demo: 4 processes train one network on 1,797 images of handwritten digits; gradients meet over gRPC"
	@FERRORPC_TRANSPORT=grpc $(BIN)/ferrorpc demo $(DEMO_ARGS)

test: $(READY)  ## run every test, three workers on two processors; TEST_ARGS chooses which
	$(SAY) "test: all tests (some start real processes and kill them: a few minutes)"
	@$(BIN)/pytest $(SPREAD) $(TEST_ARGS)

coverage: $(READY)  ## the same with the coverage of ferrorpc and services, which takes about twice as long
	@$(BIN)/pytest $(SPREAD) --cov $(TEST_ARGS)

check: $(READY)  ## lint, format, types and layers, without changing anything
	$(SAY) "check 1/4: ruff check"
	@$(BIN)/ruff check .
	$(SAY) "check 2/4: ruff format --check"
	@$(BIN)/ruff format --check .
	$(SAY) "check 3/4: mypy --strict"
	@$(BIN)/mypy
	$(SAY) "check 4/4: who may import whom"
	@$(BIN)/lint-imports --no-cache

fix: $(READY)  ## let ruff mend what it can and format everything
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(READY)  ## generate ferrorpc/v1 from protos/ with the pinned generator
	$(SAY) "protos: ferrorpc/v1 from protos/ferrorpc/v1"
	@$(BIN)/python scripts/protos.py

reference: $(READY)  ## write docs/reference.md from signatures and docstrings
	@$(BIN)/python scripts/reference.py

up:  ## start a coordinator and four workers in containers (needs Docker with Compose v2)
	$(SAY) "up: one coordinator and four workers in containers; Ctrl-C stops them"
	@docker compose up --build

bench: $(READY)  ## measure; BENCH_ARGS chooses what
	$(SAY) "bench: $(BENCH_ARGS)"
	@$(BIN)/ferrorpc bench $(BENCH_ARGS)

clean:  ## remove .venv and what tools leave behind
	@rm -rf .venv .coverage .coverage.* .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build dist wheelhouse
