# Everything a newcomer needs: `make demo` and `make test` set up all they use.
# Python >= 3.11, pip and make are assumed; nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Also what builds the kernels has the pinned version. Older versions of pip read the first name, newer ones the second.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
# Compiled test modules are kept: compiling them again takes a fifth of the inner loop.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup test quick check format long faults fuzz fuzz-coverage sanitize damage model crash histories interleavings interrupts gc-soak simulate spark-long bench demo docs dist clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything into it

# Kernels are rebuilt when their sources change: they are compiled from the .py files.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/flagstone/kernels/_*.py src/flagstone/kernels/_*.pxd)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m flagstone.kernels
	@touch $@

test: setup check ## all tests, kernels both compiled and interpreted (what CI runs)
	HYPOTHESIS_PROFILE=quick FLAGSTONE_KERNELS=interpreted $(PYTEST) -n $(WORKERS) -q tests/golden tests/property/test_memtable.py tests/property/test_reads.py tests/property/test_format.py tests/unit/kernels tests/unit/format tests/unit/sst
	HYPOTHESIS_PROFILE=ci $(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not long'

quick: setup ## the inner loop: fast tests only, under a minute
	@$(BIN)/ruff check --quiet .
	HYPOTHESIS_PROFILE=quick $(PYTEST) -n $(WORKERS) -q -m 'not slow and not spark'

check: setup ## lint, types, layer contracts and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/architecture/prose.py

format: setup ## format the code
	$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

long: setup ## tests that take half a minute and more, properties with 200 examples, at most 40 minutes
	timeout 1200 $(PYTEST) -n $(WORKERS) -m long --dist loadgroup --timeout 600
	HYPOTHESIS_PROFILE=long timeout 1200 $(PYTEST) -n $(WORKERS) tests/property tests/unit/clones tests/unit/db --timeout 600

faults: setup ## a fault at every store call of every operation, long races on every server, at most 30 minutes
	SWEEP_STRIDE=1 LONG_RACES=1 timeout 1800 $(PYTEST) -n $(WORKERS) -rP tests/faults tests/contract/test_races.py tests/spark/test_load_request_faults.py tests/spark/test_stream_sink.py --timeout 600

fuzz: setup ## 10,000 damaged inputs against every decoder, compiled and interpreted
	HYPOTHESIS_PROFILE=fuzz timeout 3000 $(PYTEST) -n $(WORKERS) tests/property --timeout 1500
	HYPOTHESIS_PROFILE=fuzz FLAGSTONE_KERNELS=interpreted timeout 3000 $(PYTEST) -n $(WORKERS) tests/property --timeout 1500

fuzz-coverage: setup ## coverage-guided fuzzing of every decoder from the golden databases for 10 minutes, or `SECONDS=60`
	$(BIN)/python -m pip install --quiet -c constraints.txt atheris
	mkdir -p build/fuzz && cd build/fuzz && PYTHONPATH=../../tests timeout 1200 ../../$(BIN)/python ../../tests/fuzz/decoders.py -max_total_time=$(or $(SECONDS),600) corpus

# Kernels with checks live in a tree of their own: the ordinary ones stay as they are.
SANITIZED := build/sanitized
sanitize: setup ## property tests and fuzzing of kernels that check every memory access and every overflow, at most 40 minutes
	FLAGSTONE_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base build/sanitizing --build-lib $(SANITIZED)
	PYTHONPATH=$(SANITIZED) PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
		HYPOTHESIS_PROFILE=$(or $(PROFILE),long) timeout 2400 $(PYTEST) -p no:cacheprovider -q tests/property tests/unit/kernels tests/unit/format tests/unit/sst tests/golden --timeout 1200

damage: setup ## 20,000 damaged objects of real databases and parts of a disk cache, compiled and interpreted kernels, at most an hour
	DAMAGE_CASES=$(or $(CASES),20004) timeout 1800 $(PYTEST) -rP tests/damage --timeout 1700
	DAMAGE_CASES=$(or $(CASES),20004) FLAGSTONE_KERNELS=interpreted timeout 1800 $(PYTEST) -rP tests/damage --timeout 1700

model: setup ## 2,000 examples of every engine machine against the model, at most 20 minutes
	HYPOTHESIS_PROFILE=model timeout 1200 $(PYTEST) -n $(WORKERS) tests/stateful --timeout 1150

crash: setup ## kill -9 of a writer: 100 rounds on local files, 30 on SeaweedFS, at most 15 minutes
	KILL9_ROUNDS=100 KILL9_REMOTE_ROUNDS=30 timeout 900 $(PYTEST) -n $(WORKERS) -rP tests/soak

histories: setup ## 60,000 transactions of threads and tasks in both commit modes, checked with real-time order, at most 10 minutes
	HISTORY_TRANSACTIONS=30000 timeout 600 $(PYTEST) -n $(WORKERS) -rP tests/histories --timeout 580

interleavings: setup ## every order of stalled writers and garbage collection, models and real code, at most 30 minutes
	INTERLEAVINGS_FULL=1 timeout 1800 $(PYTEST) -n $(WORKERS) -rP tests/interleaving --timeout 1500

interrupts: setup ## exceptions at every bytecode of every write, 2,500 real Ctrl-C, threads for a minute in both kernel forms, at most 40 minutes
	INTERRUPT_STRIDE=1 INTERRUPT_ROUNDS=25 THREADS_SECONDS=60 timeout 2400 $(PYTEST) -n $(WORKERS) -rP tests/faults/test_interrupts.py tests/soak/test_interrupts.py tests/soak/test_threads.py --timeout 2300
	INTERRUPT_STRIDE=17 FLAGSTONE_KERNELS=interpreted timeout 1200 $(PYTEST) -n $(WORKERS) -rP tests/faults/test_interrupts.py --timeout 1100

gc-soak: setup ## writers, compaction, readers, clones, crashes and an eager garbage collector, 10 minutes and more
	GC_SOAK_SECONDS=600 timeout 1200 $(PYTEST) -rP tests/soak/test_gc_soak.py --timeout 1100

simulate: setup ## worlds of simulated machines, clocks and faults on both cores, 30 minutes; `SEED=N MINUTES=M` for others
	timeout 2400 $(BIN)/python -m flagstone.testing.simulate --seed $(or $(SEED),1) --minutes $(or $(MINUTES),30) --jobs $(WORKERS) --quiet

spark-long: setup ## executors killed in load, read, compaction and stream, streams restarted 20 times, Spark Connect, at most 60 minutes
	SPARK_KILLS=8 STREAM_RESTARTS=20 SPARK_CONNECT=1 timeout 3600 $(PYTEST) -rP tests/spark/test_kills.py tests/spark/test_load_cancelled.py tests/spark/test_stream_restarts.py tests/spark/test_connect.py --timeout 3500

bench: setup ## every comparison, scaling and latency, with charts, into bench/results; `BENCH=engine` for one
	$(BIN)/python -m bench $(BENCH)

demo: setup ## the main job end to end on a local folder and a local Spark; `ROWS=10000000` for more orders, `KEEP=1` keeps the database
	@$(BIN)/python examples/demo $(if $(ROWS),--rows $(ROWS)) $(if $(KEEP),--keep)

docs: setup ## the documentation site into build/site, offline, and how many code blocks are tested
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/python tests/docs/code_blocks.py

dist: setup ## source distribution, wheel for this machine and wheel without kernels into dist, each tried in an empty environment
	rm -rf dist && $(BIN)/python -m build --outdir dist
	FLAGSTONE_BUILD_KERNELS=0 $(BIN)/python -m build --wheel --outdir dist
	FLAGSTONE_DIST=dist $(PYTEST) -q tests/distribution

clean: ## remove everything that was made
	rm -rf $(VENV) build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests bench -name '__pycache__' -type d -prune -exec rm -rf {} +
	rm -f src/flagstone/kernels/_compiled/*.so
