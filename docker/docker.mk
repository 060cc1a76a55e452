# The images and the stack of containers: docs/containers.md. Settings are in docker/.env; the environment goes first.

# A client that has BuildKit: the one on the path if it has buildx, or else Debian's, whose engine has it built in.
DOCKER ?= $(shell if ! docker buildx version >/dev/null 2>&1 && test -x /usr/bin/docker; \
  then echo /usr/bin/docker; else echo docker; fi)
COMPOSE ?= $(shell if docker compose version >/dev/null 2>&1; then echo docker compose; else echo docker-compose; fi)

# What is added to the stack: observability, gpu, neuron, tls, jobs. Where Jaeger or a worker runs, or certificates were
# made, commands for the running stack know it.
containers_of = $(shell $(DOCKER) ps -aq --filter label=com.docker.compose.project=$(PROJECT) \
  --filter label=com.docker.compose.service=$(1))
LAYERS ?= $(if $(call containers_of,jaeger),observability) $(if $(call containers_of,certificates),tls) \
  $(if $(call containers_of,worker),jobs)
# Files with the names of several layers are added where all of these are.
combined = $(foreach file,$(sort $(wildcard docker/compose.*-*.yaml)),\
  $(if $(filter-out $(LAYERS),$(subst -, ,$(patsubst docker/compose.%.yaml,%,$(file)))),,$(file)))
COMPOSE_FILES ?= docker/compose.yaml $(LAYERS:%=docker/compose.%.yaml) $(combined)
PROJECT = $(or $(COMPOSE_PROJECT_NAME),$(shell sed -n 's/^COMPOSE_PROJECT_NAME=//p' docker/.env))
compose = $(COMPOSE) $(COMPOSE_FILES:%=-f %)

SERVICES := gateway tokenizer neuron-executor postprocessor
executor = $(if $(filter neuron,$(LAYERS)),neuron,$(if $(filter gpu,$(LAYERS)),gpu,neuron-executor))
images = $(SERVICES:neuron-executor=$(executor)) $(if $(filter neuron,$(LAYERS)),,compile) \
  $(if $(filter tls,$(LAYERS)),certificates) $(if $(filter jobs,$(LAYERS)),worker jobs-redis) $(if $(filter observability,$(LAYERS)),jaeger prometheus grafana)
build = DOCKER="$(DOCKER)" docker/build

.PHONY: images image-sizes up up-observability down logs ps redeploy
images:
	$(build) $(images)

# Writes the table of docs/containers.md; images that are not built are left out.
image-sizes:
	DOCKER="$(DOCKER)" $(PYTHON) docker/sizes.py

# Returns when the gateway reaches all stages; Compose 1.29 has no --wait. If the compile step fails, its reason comes
# last.
up: images
	@$(compose) up -d || {
	  compile=$$($(compose) ps -aq compile)
	  if [[ $$compile && $$($(DOCKER) inspect --format '{{.State.ExitCode}}' $$compile) != 0 ]]; then
	    { echo "the compile step failed:"; $(DOCKER) logs --tail 10 $$compile; } 2>&1
	  fi
	  exit 1
	}
	for _ in {1..120}; do
	  state=$$($(DOCKER) inspect --format '{{.State.Health.Status}}' $$($(compose) ps -q gateway))
	  if [[ $$state == healthy ]]; then break; fi
	  sleep 0.5
	done
	$(compose) ps
	[[ $$state == healthy ]] || { echo "the gateway is $$state; see: make logs"; exit 1; }
	echo "all healthy after $$SECONDS s"
	$(if $(filter tls,$(LAYERS)),$(MAKE) --no-print-directory caller-certificates)

up-observability:
	$(MAKE) up LAYERS="observability $(filter-out observability,$(LAYERS))"

# The layer tls: new certificates for all services, which take them while they run, and a caller's in CALLER_CERTIFICATES. The authority stays.
CALLER_CERTIFICATES ?= .cache/certificates
.PHONY: certificates caller-certificates
certificates:
	$(compose) run --rm -e RENEW=1 certificates
	$(MAKE) --no-print-directory caller-certificates
caller-certificates:
	mkdir -p $(CALLER_CERTIFICATES)
	$(DOCKER) cp $(firstword $(call containers_of,certificates)):/tls/caller/. $(CALLER_CERTIFICATES)

# Bundles and downloaded models go, too; `docker compose stop` keeps them.
down: LAYERS = observability tls jobs
down:
	$(compose) down --volumes --remove-orphans

logs:
	$(compose) logs -f --tail=100 $(service)

ps:
	$(compose) ps

# One service from the sources as they are now, in as many containers as it has; the others go on.
redeploy:
	test -n "$(service)" || { echo "say which: make redeploy service=tokenizer"; exit 2; }
	$(build) $(service:neuron-executor=$(executor))
	count=$$($(compose) ps -q $(service) | wc -l)
	$(compose) up -d --no-deps --scale $(service)=$$((count > 0 ? count : 1)) $(service)

.PHONY: verify-locks fix-locks
verify-locks: .venv/.dev
	$(BIN)/python docker/lock.py --check
fix-locks: .venv/.dev
	$(BIN)/python docker/lock.py

# A software bill of materials for each image, as the image has it in /usr/share/sbom.
SBOM ?= .cache/sbom
.PHONY: sbom
sbom: .venv/.dev
	$(BIN)/python docker/sbom.py $(SBOM)
	ls $(SBOM)

# Known vulnerabilities of what the locks pin. Where no index of advisories answers, it says so and passes, but with
# AUDIT=--required. AUDIT="--osv-url URL" asks another index.
AUDIT ?=
.PHONY: verify-audit
verify-audit: .venv/.dev
	$(BIN)/python docker/audit.py $(AUDIT)

# It has its own images and its own project, so it does not touch a stack that runs. If no registry answers, the bases
# are made of Debian's packages.
.PHONY: e2e
e2e: .venv/.dev $(NODE)/node_modules/.ready
	export DOCKER="$(DOCKER)" COMPOSE="$(COMPOSE)" IMAGE_PREFIX=neuronpipe-e2e VERSION=e2e
	$(DOCKER) info >/dev/null || { echo "make e2e needs a Docker engine: docker/with-engine make e2e starts one"; exit 1; }
	bases=$$(docker/base-images)
	export $$bases
	$(build) $(SERVICES) compile prometheus certificates worker jobs-redis
	DOCKER_BUILDKIT=1 $(DOCKER) build --file tests/e2e/Dockerfile \
	  --build-arg "TOKENIZER_IMAGE=$$IMAGE_PREFIX/tokenizer:$$VERSION" --tag "$$IMAGE_PREFIX/receiver:$$VERSION" .
	$(BIN)/python -m pytest tests/e2e --timeout 900
