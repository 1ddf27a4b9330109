# The two commands of a new user are `make run` and `make test`; each sets the machine up first (scripts/setup.sh), once.

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
C_SOURCES = $(shell find native -name '*.[ch]' -not -path '*/build/*')

.DEFAULT_GOAL := help
.PHONY: help setup run test test-quick lint fmt bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## distribution packages, .venv and the native binary
	@scripts/setup.sh test

run: ## 64 rollouts of a real repair task in real sandboxes, then a table
	@scripts/setup.sh run
	@$(PY) -m examples.rollouts $(ARGS)

test: ## every test; as root all of them, else those that can run
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory -C native check
	@DSEC_TEST_EXCLUSIVE=$${DSEC_TEST_EXCLUSIVE:-1} $(PYTEST) $(ARGS)

test-quick: ## the tests that take under 0.25 s and no network
	@scripts/setup.sh test
	@$(PYTEST) -q -m "not slow and not network" $(ARGS)

lint: ## ruff, mypy, import-linter, clang-format
	@scripts/setup.sh test
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports
	@clang-format --dry-run -Werror $(C_SOURCES)

fmt: ## put the code into its form
	@scripts/setup.sh test
	@$(PY) -m ruff check --fix-only -q .
	@$(PY) -m ruff format -q .
	@clang-format -i $(C_SOURCES)

bench: ## what sandboxes and environments cost, with the peers in the same run; one JSON object each
	@scripts/setup.sh bench
	@$(PY) -m benchmarks $(ARGS)

clean: ## what the build made; .venv stays
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@$(MAKE) --no-print-directory -C native clean
	@rm -f src/dsec/_native/dsec-native
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
