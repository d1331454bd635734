# psjob: everything a person or CI types. `make` alone lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The venv's tools come first, as they would after `source .venv/bin/activate`.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export OMP_NUM_THREADS ?= 1
PYTEST ?= python -m pytest

.PHONY: help install run test test-unit lint format generate docs verify prose wheels sbom site release rehearsal bench e2e soak clean

help: ## list these commands
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## make .venv with everything pinned (seconds when nothing changed)
	@bash hack/install.sh

run: install ## train real digits on this machine: 2 shards, 4 workers
	@psjob run examples/digits/job.yaml

test: install ## tests of every part, an hour on two cores; names those that this machine cannot run
	@python -m hack.needs test
	@bash hack/test.sh

test-unit: install ## pure code alone: tables, properties, simulation
	@$(PYTEST) -n 2 tests/unit tests/simulation -m "not soak"

lint: install ## ruff (its security rules too), mypy --strict, import-linter, checkov over chart, pods and Dockerfile, and prose
	@python -m hack.needs lint
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	python -m hack.scan
	@python -m hack.prose

format: install ## let ruff write the format
	ruff check --fix .
	ruff format .

generate: install ## write what is generated: CRD, chart copy, references, copies of contract and licence
	@python hack/generate.py

docs: install ## what of the documentation is generated: references, the map of the packages, and a picture of a run of the digits example
	@python hack/generate.py
	@python -m hack.runpicture

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

e2e: install ## real kubelet and containerd, real training pods (root and Linux)
	@python -m hack.needs e2e
	@PSJOB_MARKS="e2e or e2e_long" bash hack/test.sh

soak: install ## what is too long for every change
	@python -m hack.needs soak
	@PSJOB_MARKS="soak" bash hack/test.sh

clean: ## remove .venv and caches of this checkout
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
