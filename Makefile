# Mailroom. `make` alone lists what there is. Every target makes the virtual environment itself if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := mailroom outbox inbox dispatcher benchmarks examples tests alembic

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.PHONY: venv
venv: $(STAMP) ## Make the virtual environment

.PHONY: demo
demo: $(STAMP) ## The main job on real data: 336,776 flights through an embedded PostgreSQL, verified
	$(BIN)/mailroom demo

.PHONY: test
test: $(STAMP) ## The tests, without the slow ones
	$(BIN)/python -m pytest -n 2 -m 'not slow'

.PHONY: test-all
test-all: $(STAMP) ## All tests, on every PostgreSQL found (15 to 18)
	$(BIN)/python -m pytest -n 2 --pg all

.PHONY: lint
lint: $(STAMP) ## Format, lint, types and import contracts
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.PHONY: check
check: lint test-all ## Everything that CI runs

.PHONY: format
format: $(STAMP) ## Put the code into its format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

.PHONY: bench
bench: $(STAMP) ## Measure, beside the limits of this machine
	$(BIN)/mailroom bench

.PHONY: mutants
mutants: $(STAMP) ## Break each rule once and see its test fail
	$(BIN)/python -m tests.mutants

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache
