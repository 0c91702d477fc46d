# Every target sets up what it needs: on a machine with Python 3.11 and nothing else, `make test` is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve up test test-all test-gpu test-clients test-ray check coverage kernels fuzz fuzz-inputs sanitize audit simulate mutants chaos soak docs wheel clean

# A model to talk to: `make serve`, or `make serve ARGS="MODEL --port 9000"`.
serve: $(READY)
	@exec $(BIN)/headgate serve $(ARGS)

# Two servers and a router in front of them: `make up`, or `make up ARGS="--prefill 1 --decode 2"`.
up: $(READY)
	@exec $(BIN)/headgate up $(ARGS)

# Tests of one file run one after another, files side by side; then two minutes of load, after which nothing may have grown.
TOGETHER := -n auto --maxprocesses 4 --dist loadfile
# As on a machine that has been up for a minute, where the kernel allows it; `make test CLOCK=plain` takes the clock as it is.
STARTED := $(if $(filter plain,$(CLOCK)),,$(BIN)/python tests/just_started.py)
test: check coverage kernels
	$(STARTED) $(BIN)/python -m pytest -m "not slow and not gpu" $(TOGETHER)
	$(MAKE) soak MINUTES=2

test-all: check coverage kernels
	$(STARTED) $(BIN)/python -m pytest -m "not gpu" $(TOGETHER)

# Other people's clients, in an environment of their own.
CLIENTS := .venv-clients
test-clients: $(READY)
	test -d $(CLIENTS) || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q litellm langchain-openai schemathesis
	$(BIN)/python tests/clients/run.py $(CLIENTS)/bin/python $(or $(EXAMPLES),30)

# A fleet on a real Ray cluster of several nodes, on loopback; in an environment of its own that has what ours has, and Ray.
RAY := .venv-ray
PLACE := import sysconfig; print(sysconfig.get_path('purelib'))
test-ray: $(READY)
	test -d $(RAY) || $(PYTHON) -m venv $(RAY)
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(PLACE)")')" > $$($(RAY)/bin/python -c "$(PLACE)")/ours.pth
	$(RAY)/bin/python -m pip install -q 'ray>=2.40'
	$(RAY)/bin/python -m pytest tests/cluster/test_ray.py

# Compiled first: whoever waits for a server in a test would have to wait for them, too.
kernels: $(READY)
	$(BIN)/python -c "from headgate.layers.cpu.build import load_kernels; print(load_kernels())"

test-gpu:
	$(PYTHON) -m pytest -m gpu

# The router's C code and the CPU kernels under the address and undefined-behaviour sanitizers; docs/testing.md.
sanitize: $(READY)
	$(BIN)/python -m tests.sanitize $(ARGS)

# The scheduling core is covered branch by branch by its unit tests alone; the fuzz comes on top.
coverage: $(READY)
	$(BIN)/python -m coverage run -m pytest --durations=0 tests/core/test_scheduler.py tests/core/test_blocks.py tests/core/test_leases.py tests/protocol tests/contract/test_sampling.py
	$(BIN)/python -m coverage report --fail-under=100 --skip-covered --show-missing

fuzz: $(READY)
	$(BIN)/python -m tests.core.fuzz 0 $(or $(SEEDS),2000)

# What strangers may send: every parser with inputs that nobody would write, and how many there were.
fuzz-inputs: $(READY)
	$(BIN)/python -m tests.fuzzing $(or $(TIMES),200)

# Known holes in what we depend on, and habits that lead to holes; what is skipped is explained in docs/threat-model.md.
AUDIT := .venv-audit
audit:
	test -d $(AUDIT) || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install -q bandit pip-audit
	$(AUDIT)/bin/bandit -q -r src --skip B101,B105,B311,B404,B603
	$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

# Whole fleets with faults drawn from seeds, on all cores; docs/testing.md.
simulate: $(READY)
	$(BIN)/headgate simulate --seeds 0:$(or $(SEEDS),10000)

mutants: $(READY)
	$(BIN)/python -m tests.core.mutants $(or $(SEEDS),60)
	$(BIN)/python -m tests.sim.mutants $(or $(SEEDS),100)

# Real processes, broken on purpose (docs/chaos.md); the report is in chaos/.
chaos: $(READY)
	$(BIN)/headgate chaos --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) --report chaos

# The same fleet with nothing broken, under load with aborts, pauses and updates: nothing may grow.
soak: $(READY)
	$(BIN)/headgate chaos --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) --only clients,operators --report chaos/soak

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
