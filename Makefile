# `make train` and `make test` do their own whole set-up in .venv; the other targets too.
# Words after the target: make train ARGS="recipes=cpu/sleep trainer.num_steps=5"

.DEFAULT_GOAL := help
.PHONY: help train test test-fast test-nightly sglang-cpu lint format docs figures bench

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG_STAMP := $(VENV)/.sglang-cpu
ARGS ?=
CONSTRAINTS ?= constraints.txt
TORCH ?= torch
# The first Python that is new enough; `make train PYTHON=/path/to/python3.12` chooses another.
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
# Spinning OpenMP threads of two processes on two cores cost 8-9x.
TEST_ENVIRONMENT := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 RAY_worker_niceness=0
BENCHMARKS ?= $(filter-out figures publish source_tree picture kills child budget gpu,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)))

help:
	@echo "make train         set up, then train the default: a small model learns on this CPU"
	@echo "make test          set up, then run the tests"
	@echo "make test-fast     the tests that start neither Ray nor SGLang nor process groups"
	@echo "make test-nightly  the long tests"
	@echo "make test-oldest   the tests with the oldest transformers and SGLang of setup.py, in a second venv;"
	@echo "                   also test-torch-next, test-newest, test-megatron-next: docs/versions.md"
	@echo "make test-standards environments of OpenEnv and verifiers, in venvs of their own"
	@echo "make sglang-cpu    set up the real SGLang on a machine without CUDA, for rollout=sglang"
	@echo "make lint          ruff, mypy --strict, import-linter, codespell"
	@echo "make format        ruff format and its safe fixes, lines of Markdown"
	@echo "make docs          build the documentation into site/, links checked"
	@echo "make figures       measure this code into docs/figures.md"
	@echo "make bench         run every script of benchmarks/"
	@echo 'ARGS="..." is handed on: make train ARGS="recipes=cpu/sleep trainer.num_steps=5"'

# torch goes first and alone, so that nothing else pulls another build of it. Modules are compiled when they
# are first imported: most never are, and to compile all takes a minute. Where Python must not keep what it
# compiled, each of hundreds of processes would compile anew: twice the time of the tests.
export PYTHONDONTWRITEBYTECODE :=
$(STAMP): setup.py constraints.txt
	@$(or $(PYTHON),false) -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { \
		echo "hybridrl needs Python 3.11 or newer, and none was found as '$(or $(PYTHON),python3)'."; \
		echo "Install one, then: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS) $(TORCH)
	$(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS) --editable '.[dev,docs,mcp,megatron,search]'
	@touch $@

# SGLang, its router, torchvision and triton go in without their dependencies: those pull CUDA. The stand-ins
# take the place of SGLang's compiled kernels, which no index has for a CPU.
SGLANG := tests/sglang
$(SGLANG_STAMP): $(STAMP) $(SGLANG)/requirements.txt $(wildcard $(SGLANG)/stand_ins/*.py $(SGLANG)/stand_ins/site/*.py $(SGLANG)/stand_ins/site/*/*.py)
	$(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS) --no-deps sglang sglang-router torchvision triton
	$(BIN)/python -m pip install --no-compile --constraint $(CONSTRAINTS) --requirement $(SGLANG)/requirements.txt
	$(BIN)/python $(SGLANG)/stand_ins/install.py
	@touch $@

sglang-cpu: $(SGLANG_STAMP)
	@echo "SGLang is ready (what pip said is missing is for CUDA). Now:"
	@echo "  source $(VENV)/bin/activate && python -m hybridrl.main rollout=sglang"

train: $(STAMP)
	$(BIN)/python -m hybridrl.main $(ARGS)

# Workers that share the tests (tests/workers_share.py), and beside them one process with SGLang's, the only
# one that imports it: its servers wait more than they compute. It is done in half the time, so another one
# goes on with folders that compute and wait for nothing, as many as keep it busy until the workers are
# done. With ARGS one process runs what they say.
WORKERS ?= 2
SGLANG_LOG := $(VENV)/sglang-tests.log
BEHIND_SGLANG := tests/rehearsal tests/config tests/algorithms
FAST := $(addprefix tests/,algorithms checkpoint config data planning report style) $(filter-out tests/test_ranks.py,$(wildcard tests/test_*.py))
.PHONY: test-of-sglang test-of-the-rest
test: $(SGLANG_STAMP)
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-of-the-rest test-of-sglang
else
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "not nightly" $(ARGS)
endif

test-of-the-rest:
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $(WORKERS) -m "not nightly" --durations 25 \
		$(addprefix --ignore ,tests/sglang $(BEHIND_SGLANG))

test-of-sglang:
	@for folders in tests/sglang "$(BEHIND_SGLANG)"; do \
		$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "not nightly" --durations 15 $$folders || status=1; \
	done > $(SGLANG_LOG) 2>&1; cat $(SGLANG_LOG); exit $${status:-0}

test-fast: $(STAMP)
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "not nightly" --durations 10 $(FAST) $(ARGS)

test-nightly: $(SGLANG_STAMP)
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -m "nightly or drawn" --hypothesis-profile by_night --durations 40 $(ARGS)

# The ends of setup.py's ranges: each in a venv of its own, with its packages in place of those that
# constraints.txt pins. torch from 2.14 on has no CPU build: gigabytes of CUDA. SGLang goes in without
# what it asks for, as in $(SGLANG_STAMP).
.PHONY: test-oldest test-torch-next test-newest test-megatron-next test-stack
test-oldest:
	@$(MAKE) test-stack VENV=.venv-oldest SETUP=sglang-cpu SGLANG_PACKAGE=sglang==0.5.21 \
		PACKAGES="transformers==5.12.1 tokenizers==0.22.2"
test-torch-next:
	@$(MAKE) test-stack VENV=.venv-torch-next SETUP=sglang-cpu PACKAGES=torch==2.14.1
test-newest: # SGLang 0.5.23 cannot be imported with them
	@$(MAKE) test-stack VENV=.venv-newest PACKAGES="torch==2.15.0 transformers==5.24.0" STACK_TESTS="$(NUMERICAL)"
test-megatron-next:
	@mkdir -p .cache && grep -vE "^(torch|triton|megatron-core)==" constraints.txt > .cache/constraints-next.txt
	@$(MAKE) test-stack VENV=.venv-megatron-next PYTHON=$(PYTHON312) CONSTRAINTS=.cache/constraints-next.txt \
		TORCH=torch==2.14.1 PACKAGES=megatron-core==0.19.2 STACK_TESTS="tests/megatron tests/contract tests/workers/train/megatron"

PYTHON312 ?= python3.12
NUMERICAL := $(addprefix tests/,algorithms models contract megatron workers trainer end_to_end)
STACK_TESTS ?= tests
SETUP ?= $(STAMP)
test-stack:
	@$(MAKE) $(SETUP) VENV=$(VENV) PYTHON=$(PYTHON)
	$(if $(SGLANG_PACKAGE),$(BIN)/python -m pip install --quiet --no-deps $(SGLANG_PACKAGE))
	$(BIN)/python -m pip install --quiet $(PACKAGES)
	@$(BIN)/python -m pip list 2>/dev/null | grep -iE "^(torch|transformers|sglang|megatron-core|ray) "
	@$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n $(WORKERS) -m "not nightly" $(STACK_TESTS) $(ARGS)

# Packages that do not go together with SGLang's, each in a venv of its own: the tests ask programs there.
STANDARDS := openenv-core==0.3.0 openenv==0.10.0 verifiers==0.4.0 verifiers==0.1.14
.PHONY: test-standards
test-standards: $(STAMP)
	@for package in $(STANDARDS); do test -f .venv-$$package/.installed || { \
		$(PYTHON312) -m venv .venv-$$package && \
		.venv-$$package/bin/python -m pip install --quiet --no-compile $$package && \
		touch .venv-$$package/.installed; } || exit 1; done
	@for openenv in openenv-core==0.3.0 openenv==0.10.0; do \
		OPENENV_PYTHON=$$PWD/.venv-$$openenv/bin/python $(TEST_ENVIRONMENT) \
		$(BIN)/python -m pytest tests/agents/test_openenv.py $(ARGS) || exit 1; done
	@VERIFIERS_PYTHON=$$PWD/.venv-verifiers==0.4.0/bin/python \
		OLD_VERIFIERS_PYTHON=$$PWD/.venv-verifiers==0.1.14/bin/python \
		$(TEST_ENVIRONMENT) \
		$(BIN)/python -m pytest tests/end_to_end/test_standards.py $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python docs/shown.py
	@$(BIN)/python docs/reflow.py

# Material announces its end of life on every build.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "$(BIN)/python -m http.server --directory site    # then open http://localhost:8000"

figures: $(STAMP)
	@mkdir -p docs
	@$(BIN)/python -m benchmarks.figures > docs/figures.md
	@cat docs/figures.md

bench: $(STAMP)
	@for script in $(BENCHMARKS); do \
		echo "## $$script"; $(TEST_ENVIRONMENT) $(BIN)/python -m benchmarks.$$script || exit 1; done
