# One environment, made once: `make demo` and `make test` work on a fresh machine. `make PYTHON=python3.12 test` picks the
# interpreter; `make VENV=/somewhere test` the place. A second run starts at once (the stamp file).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The one place where torch is pinned. It is installed first and alone: a machine without a GPU then keeps whatever CPU build
# its index offers, and nothing later may replace it by another version. TORCH_INDEX takes extra pip options, e.g. an index of
# CPU wheels.
TORCH := torch==2.13.0
TORCH_INDEX ?=

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.outrider-installed
TOOLS := $(VENV)/.outrider-tools-installed
WHEELS_VENV := build/wheels/venv
WHEELS_TOOLS := $(WHEELS_VENV)/.installed
# zig compiles for every system, lief reads libraries of every system; each version of zig compiles anew
WHEELS_NEED := ziglang==0.17.1 lief==1.0.0 hatchling>=1.25 auditwheel>=6.8 twine>=6
# Byte code is made for what is imported, when it is; pip would make it for all of torch and transformers. It is kept even
# where the environment forbids that: else every process would compile them again, which takes longer than most tests.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-compile
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
MARKS ?= not slow and not nightly and not gpu
ARGS ?=
# One worker per processor, one thread each; a file's tests stay together, because they share loaded models. Files keep their
# order: the longest ones come early, so that the workers end together.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The core, and the contract with three drafters; their cases are shared out, because one file holds most of them.
QUICK := tests/test_architecture.py tests/contract/test_drafters.py \
	$(addprefix tests/unit/,kv llm trees test_configuration.py test_decode.py test_parts.py test_rows.py test_run.py) \
	$(addprefix tests/unit/verifiers/test_,batch.py greedy.py verifiers.py) \
	$(addprefix tests/unit/sampling/test_,coupling.py distribution.py params.py rng.py theory.py)

.PHONY: help demo quick test test-all vocabularies golden lint type check mutants bench gpu pages docs proto wheels clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(STAMP) ## answer a few problems with the embedded pair, then measure nine drafters
	@$(BIN)/outrider demo $(ARGS)

quick: $(TOOLS) ## the core, and the contract with three drafters: less than a minute
	@$(PYTEST) --dist load -m "$(MARKS)" --drafters none,ngram,draft-model $(QUICK) $(ARGS)

test: $(TOOLS) ## all tests but those marked slow: seven minutes on two processors
	@$(PYTEST) -m "$(MARKS)" $(ARGS)

test-all: $(TOOLS) ## the slow and the nightly ones too
	@$(PYTEST) -m "not gpu" $(ARGS)

vocabularies: $(TOOLS) ## llama.cpp's own vocabularies, against which tests compare our tokenizers
	@$(BIN)/python tools/llama_vocabularies.py fetch

golden: $(TOOLS) ## the golden reports anew: read the difference before you commit it
	@$(BIN)/python -m pytest tests/unit/report/test_golden.py --renew-golden

lint: $(TOOLS) ## ruff
	@$(BIN)/ruff check outrider tests benchmarks examples tools

type: $(TOOLS) ## mypy
	@$(BIN)/mypy

check: lint type test ## everything a commit must pass

mutants: $(TOOLS) ## faults put in on purpose, at night: do the fast tests find them? Half an hour
	@$(BIN)/python -m tools.mutants $(ARGS)

bench: $(TOOLS) ## side by side with other engines; benchmarks/setup_peers.sh installs them first
	@$(BIN)/python benchmarks/peers.py $(ARGS)

pages: $(STAMP) ## the commands of README and the tour, in environments with the extras that these pages name
	@$(BIN)/python -m tools.page_commands --torch "$(TORCH_INDEX) $(TORCH)"

docs: $(STAMP) ## the documentation as a site, in site/, with the command that shows it
	@$(PIP) -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "$(BIN)/python -m http.server 8080 --bind 127.0.0.1 --directory site    shows it: http://127.0.0.1:8080"

# On a machine that is lent with torch and transformers and no network: the environment where there is one, else that Python.
gpu: ## everything that must be asked of a real GPU, in 8 minutes; docs/gpu.md
	@$(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

$(STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "error: Python 3.11, 3.12 or 3.13 is needed; name one with make PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)" >&2; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)" >&2; $(PIP) $(TORCH_INDEX) "$(TORCH)"
	@echo "installing outrider: its native runtime is compiled, about a minute" >&2; $(PIP) -e ".[lab]"
	@touch $@

$(TOOLS): $(STAMP)
	@echo "installing what tests and the server need" >&2; $(PIP) -e ".[dev]"
	@touch $@

proto: $(TOOLS) ## the modules that are generated from remote.proto
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. outrider/remote/protocol/remote.proto

wheels: $(WHEELS_TOOLS) ## wheels for Linux, macOS and Windows, and the source package, in dist/: up to half an hour the first time
	@$(WHEELS_VENV)/bin/python -m tools.wheels $(ARGS)

$(WHEELS_TOOLS): Makefile
	@echo "installing what builds wheels" >&2; $(PYTHON) -m venv $(WHEELS_VENV)
	@$(WHEELS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(foreach tool,$(WHEELS_NEED),"$(tool)")
	@touch $@

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
