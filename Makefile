# Everything runs in $(VENV); the only prerequisite is a python3 (>= 3.11) with venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
PYTEST_ARGS ?=

.PHONY: help setup demo demo-redis serve test test-stores lint bench clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Create .venv with the CPU build of vLLM and the development tools

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "need Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet -e '.[cpu,dev]'
	@# These three do not load beside the CPU build's torch and break transformers.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: setup ## Replay real coding agents against stock vLLM, a plain tier, and hints
	$(BIN)/python -m benchmarks.demo

demo-redis: setup ## Move sessions from one server to another through a store
	$(BIN)/python -m benchmarks.demo_redis

serve: setup ## Start the demo's server with the connector, for use by hand
	$(BIN)/python -m benchmarks.demo.serve

test: setup ## Run every test but those that start store servers
	$(BIN)/python -m pytest -m "not redis" $(PYTEST_ARGS)

test-stores: setup ## Run the tests on real Redis and Valkey servers (needs redis-server)
	$(BIN)/python -m pytest -m redis $(PYTEST_ARGS)

lint: setup ## Check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## Run the CPU benchmarks and say which aims are met (15 min)
	$(BIN)/python -m benchmarks.bench

clean: ## Remove the virtual environment and every cache
	rm -rf $(VENV) .cache
