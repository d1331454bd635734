# psjob: everything a person or CI types. `make` alone lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The venv's tools come first, as they would after `source .venv/bin/activate`.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
PYTEST ?= python -m pytest

LINTS := lint-types lint-style lint-imports lint-pods lint-crd lint-prose

.PHONY: help install run test-unit test test-cluster test-nodes test-gpu test-all soak deps mutants lint format generate docs verify prose wheels sbom site release rehearsal bench e2e clean
.PHONY: $(LINTS)

help: ## list these commands
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## make .venv with everything pinned (seconds when nothing changed)
	@bash hack/install.sh

run: install ## train real digits on this machine: 2 shards, 4 workers
	@psjob run examples/digits/job.yaml

test-unit: install ## pure code: no torch, no process, no socket; a minute on two cores
	@bash hack/test.sh unit $(ARGS)

test: install ## each promise once, without root, Go or system packages; 8 minutes on two cores
	@bash hack/test.sh test $(ARGS)

test-cluster: install ## against a real API server (Go builds it once, or KUBEBUILDER_ASSETS names one)
	@python -m hack.needs test-cluster
	@bash hack/test.sh cluster $(ARGS)

test-nodes: install ## real kubelet, containerd, browser and network (root, Linux, and the packages of `make deps`)
	@python -m hack.needs test-nodes
	@bash hack/test.sh nodes $(ARGS)

test-gpu: install ## training on an NVIDIA GPU, with kills, and the copies from and to it (the same scripts run on the CPU in `make test` and `make soak`)
	@python -m hack.needs test-gpu
	@bash hack/test.sh gpu $(ARGS)

soak: install ## what shows again what cheaper tests show, and what takes hours
	@python -m hack.needs soak
	@bash hack/test.sh soak $(ARGS)

test-all: test test-cluster test-nodes soak test-gpu ## all of them, one after the other; hours

deps: install ## install the Debian packages that test-nodes and the images need (root)
	@python -m hack.cluster deps

lint: install ## ruff (its security rules too), mypy --strict, import-linter, checkov over chart, pods and Dockerfile, rules of kube-api-linter over the CRD, and prose
	@python -m hack.needs lint
	@$(MAKE) --no-print-directory -kj2 $(LINTS)

lint-types:
	mypy
lint-style:
	ruff check .
	ruff format --check .
lint-imports:
	lint-imports
lint-pods:
	python -m hack.scan
lint-crd:
	@python -m hack.crdlint
lint-prose:
	@python -m hack.prose

format: install ## let ruff write the format
	ruff check --fix .
	ruff format .

generate: install ## write what is generated: CRD, chart copy, references, copies of contract and licence
	@python hack/generate.py

docs: install ## what of the documentation is generated: references, the map of the packages, and pictures of runs
	@python hack/generate.py
	@python -m hack.runpicture
	@python -m hack.displaypicture

verify: install ## fail where a generated file differs from what the models say
	@python hack/generate.py --check

prose: install ## vale over documentation, docstrings and messages, with the rules of hack/prose (Go builds it, once); ARGS names files, with warnings
	@python -m hack.prose $(ARGS)

wheels: install ## build wheels and source archives of the three distributions into dist/, and check what they hold
	@python -m hack.needs wheels
	@python -m hack.wheels

sbom: install ## wheels, both images (root, Linux) and a CycloneDX list of what is in each, into dist/
	@python -m hack.needs sbom
	@python -m hack.sbom

site: install ## the documentation as a site that works from the file system, in dist/site
	@python -m hack.site

release: install ## all that a release publishes, from a tagged commit, into dist/release-VERSION (root, Linux)
	@python -m hack.needs release
	@python -m hack.release

rehearsal: install ## the same from any checkout, for a look or a test; it says what is missing for a release
	@python -m hack.needs release
	@python -m hack.release --rehearse

bench: install ## psjob and its peers in turn, as ratios (installs the peers the first time)
	@python -m bench

mutants: install ## faults put into the code by hand and by chance: the tests must find them
	@python -m hack.mutants --table
	@python -m hack.mutants --random 30

e2e: install ## everything on real nodes, long tests too (root and Linux)
	@python -m hack.needs test-nodes
	@bash hack/test.sh nodes -m nodes $(ARGS)

clean: ## remove .venv and caches of this checkout
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
