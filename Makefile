# Every target sets up what it needs first, so that a fresh clone needs no other step,
# and is then one or two plain commands that also run by themselves.

PYTHON ?= python3
CONFIG ?= configs/smollm2.yaml
TETRIS_VENV ?= .venv
# What is set up is what CONFIG is for, which by itself is a CPU.
TETRIS_DEVICE ?= $(or $(shell sed -n 's/^  device: *\([a-z]*\).*/\1/p' $(CONFIG) 2>&-),cpu)
export TETRIS_VENV TETRIS_DEVICE

# Whatever these hold was meant for another Python than the one in $(TETRIS_VENV).
unexport PYTHONHOME PYTHONPATH

BIN := $(TETRIS_VENV)/bin
SET_UP := $(PYTHON) -I .ci/bootstrap.py
REQUIREMENTS := configs/requirements
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-build \
	--fork-strategy fewest --generate-hashes --annotation-style line --custom-compile-command 'make lock' \
	--excludes $(REQUIREMENTS)/excludes.in $(if $(UPGRADE),--upgrade)

SAME := -c $(REQUIREMENTS)/cpu.txt -c $(REQUIREMENTS)/gpu.txt

.DEFAULT_GOAL := help
.PHONY: help serve test faults law fuzz lint format bench loadtest demo-pair generated \
	lock audit clean

help:
	@echo "make serve      set up and serve $(CONFIG) until Ctrl-C (CONFIG=, PORT=, ARGS=)"
	@echo "make test       set up and run the tests (ARGS='-k selection'; FAST=1: no engine)"
	@echo "make faults     break everything that serving/FAULTS.md names, and look (ARGS=)"
	@echo "make law        judge sampled tokens by the target's law, with new seeds (ARGS=)"
	@echo "make fuzz       send a server 20,000 requests nobody thought of (ARGS=--seed=7)"
	@echo "make lint       check formatting, style and types"
	@echo "make format     format the code and apply safe fixes"
	@echo "make bench      compare policies on the real engine (OUTPUT=, ARGS=--preset=smoke)"
	@echo "make loadtest   compare policies over HTTP under load (PRESET=, OUTPUT=, ARGS=)"
	@echo "make demo-pair  train the demo target and draft anew"
	@echo "make generated  renew what docs and chart take from settings and metrics"
	@echo "make lock       renew configs/requirements (UPGRADE=1: newest versions allowed)"
	@echo "make audit      licences, bills of materials, secrets, vulnerabilities (OUTPUT=)"
	@echo "make clean      remove .venv and all caches"

# The wrapper lets Ctrl-C reach the server alone. Otherwise make would report an error
# even after a clean shutdown, because it dies of any SIGINT that it receives itself.
serve:
	@$(SET_UP)
	@$(BIN)/python .ci/foreground.py $(BIN)/tetris-serve up \
		--config $(CONFIG) $(if $(PORT),--port $(PORT)) $(ARGS)

# Two tests at a time, for an engine pins one thread; but whatever starts Ray needs both
# cores of a small machine, for two thirds of the time: what only computes, and looks at
# no clock, takes the rest. With ARGS either may have nothing to run.
PYTEST := $(BIN)/pytest --durations=40
# Where those are, so that the others are not read for nothing.
WITH_RAY := tests/helm tests/serving
PATIENT := tests/engine tests/gpu_adapter
# Files in their order: by the number of tests the one that takes longest would come last.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
NONE_IS_FINE := $(if $(ARGS),|| [ $$? -eq 5 ])

test:
	@$(SET_UP) --dev
ifdef FAST
	$(PYTEST) $(SHARED) -m "not ray and not vllm and not slow" $(ARGS)
else
	$(PYTEST) $(SHARED) -m "not ray and not patient" $(ARGS) $(NONE_IS_FINE)
	@.ci/beside $(PYTEST) -m ray $(or $(ARGS),$(WITH_RAY)) \
		-- $(PYTEST) -p no:cacheprovider -m patient $(or $(ARGS),$(PATIENT)) $(NONE_IS_FINE)
endif

faults:
	@$(SET_UP) --dev
	$(PYTEST) $(SHARED) -m "faults and not ray" $(ARGS) $(NONE_IS_FINE)
	$(PYTEST) -m "faults and ray" $(or $(ARGS),$(WITH_RAY)) $(NONE_IS_FINE)
	$(PYTEST) tests/serving/check_lost_host.py $(ARGS) $(NONE_IS_FINE)

# All cases on both runners, hours, in as many pieces as wanted: Ctrl-C, and the same
# command goes on. Adds to tests/engine/law/evidence.json after every case.
law:
	@$(SET_UP) --dev
	@.ci/extras
	$(BIN)/python -m tests.engine.law $(ARGS)
	PYTHONPATH=$(TETRIS_VENV)/triton $(BIN)/python -m tests.gpu_adapter.interpreted $(ARGS)

# Writes tests/serving/fuzz/record.json.
fuzz:
	@$(SET_UP) --dev
	$(BIN)/python -m tests.serving.fuzz $(ARGS)

lint:
	@$(SET_UP) --dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format:
	@$(SET_UP) --dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Takes hours, in as many pieces as wanted: Ctrl-C, and the same command goes on. The
# wrapper is there for the same reason as in `serve`.
bench:
	@$(SET_UP) --loadtest
	@$(BIN)/python .ci/foreground.py $(BIN)/tetris-serve bench engine \
		--output $(or $(OUTPUT),results/scratch/engine) $(ARGS)

loadtest:
	@$(SET_UP) --loadtest
	@$(BIN)/python .ci/foreground.py $(BIN)/tetris-serve bench http \
		--output $(or $(OUTPUT),results/scratch/http-$(or $(PRESET),smoke)) \
		--preset $(or $(PRESET),smoke) $(ARGS)

demo-pair:
	@$(SET_UP) --loadtest
	$(BIN)/python -m loadtest.models $(ARGS)

generated:
	@$(SET_UP) --dev
	$(BIN)/python .ci/generated.py

# Versions in the files stay unless UPGRADE is given. A package whose requirements are
# not wanted is a line in pyproject.toml and its requirements are lines in excludes.in.
lock:
	@$(SET_UP)
	$(LOCK) pyproject.toml --extra cpu --excludes $(REQUIREMENTS)/excludes-cpu.in \
		-o $(REQUIREMENTS)/cpu.txt
	$(LOCK) pyproject.toml --extra gpu -o $(REQUIREMENTS)/gpu.txt
	$(LOCK) pyproject.toml --extra loadtest $(SAME) -o $(REQUIREMENTS)/loadtest.txt
	$(LOCK) pyproject.toml --extra dev $(SAME) -c $(REQUIREMENTS)/loadtest.txt \
		-o $(REQUIREMENTS)/dev.txt
	echo uv | $(LOCK) - -o $(REQUIREMENTS)/uv.txt

# All of it, whatever is found on the way; the status tells. Takes an index that knows of
# vulnerabilities, and 500 MB.
audit:
	@$(SET_UP)
	OUTPUT=$(OUTPUT) .ci/audit

clean:
	rm -rf .venv *.egg-info build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
