# Every target sets up what it needs: on a machine with Python 3.11 and nothing else, `make test` is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve up test test-all test-gpu test-clients check coverage fuzz simulate mutants docs wheel clean

# A model to talk to: `make serve`, or `make serve ARGS="MODEL --port 9000"`.
serve: $(READY)
	@exec $(BIN)/headgate serve $(ARGS)

# Two servers and a router in front of them: `make up`, or `make up ARGS="--prefill 1 --decode 2"`.
up: $(READY)
	@exec $(BIN)/headgate up $(ARGS)

test: check coverage
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: check coverage
	$(BIN)/python -m pytest -m "not gpu"

# Other people's clients, in an environment of their own.
CLIENTS := .venv-clients
test-clients: $(READY)
	test -d $(CLIENTS) || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q litellm langchain-openai schemathesis
	$(BIN)/python tests/clients/run.py $(CLIENTS)/bin/python $(or $(EXAMPLES),30)

test-gpu:
	$(PYTHON) -m pytest -m gpu

# The scheduling core is covered branch by branch by its unit tests alone; the fuzz comes on top.
coverage: $(READY)
	$(BIN)/python -m coverage run -m pytest --durations=0 tests/core/test_scheduler.py tests/core/test_blocks.py tests/core/test_leases.py tests/protocol
	$(BIN)/python -m coverage report --fail-under=100 --skip-covered --show-missing

fuzz: $(READY)
	$(BIN)/python -m tests.core.fuzz 0 $(or $(SEEDS),2000)

# Whole fleets with faults drawn from seeds, on all cores; docs/testing.md.
simulate: $(READY)
	$(BIN)/headgate simulate --seeds 0:$(or $(SEEDS),10000)

mutants: $(READY)
	$(BIN)/python -m tests.core.mutants $(or $(SEEDS),60)
	$(BIN)/python -m tests.sim.mutants $(or $(SEEDS),100)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a site, in site/; a link or a page that is not right fails.
docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet

# What is installed elsewhere, in dist/.
wheel: $(READY)
	rm -rf build
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .

$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
