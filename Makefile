# Every target installs what it needs: `make test` works on a machine that has only Python 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve up test test-all test-gpu test-clients test-frameworks test-ray check coverage kernels fuzz fuzz-inputs sanitize audit simulate mutants chaos soak docs wheel sdist clean

# Serve a model: `make serve`, or `make serve ARGS="MODEL --port 9000"`.
serve: $(READY)
	@exec $(BIN)/headgate serve $(ARGS)

# Two servers and a router: `make up`, or `make up ARGS="--prefill 1 --decode 2"`.
up: $(READY)
	@exec $(BIN)/headgate up $(ARGS)

# Tests of one file run sequentially, files in parallel; then two minutes of load, during which memory must not grow.
# One more process than cores, at most four: many tests wait for timeouts and other processes.
TOGETHER := -n $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() + 1, 4))") --dist loadfile
# Tests run as on a machine that booted a minute ago, where the kernel allows it; `make test CLOCK=plain` uses the real clock.
STARTED := $(if $(filter plain,$(CLOCK)),,$(BIN)/python tests/just_started.py)
test: check coverage kernels
	$(STARTED) $(BIN)/python -m pytest -m "not slow and not gpu" $(TOGETHER)
	$(MAKE) soak MINUTES=2

test-all: check coverage kernels
	$(STARTED) $(BIN)/python -m pytest -m "not gpu" $(TOGETHER)

# Third-party clients, each in a separate environment in .venv-clients: `make test-clients`, or
# `make test-clients ONLY="anthropic openai"`.
test-clients: $(READY)
	$(BIN)/python tests/clients/run.py .venv-clients $(or $(EXAMPLES),30) $(ONLY)

# Released routers, load generators and trainers' clients, unchanged, each in a separate environment in .venv-frameworks:
# `make test-frameworks`, or `make test-frameworks ONLY=sglang-router`.
test-frameworks: $(READY)
	$(BIN)/python -m tests.frameworks.run $(ONLY)

# A fleet on a real Ray cluster of several nodes on loopback, in a separate environment that adds Ray to ours.
RAY := .venv-ray
PLACE := import sysconfig; print(sysconfig.get_path('purelib'))
test-ray: $(READY)
	test -d $(RAY) || $(PYTHON) -m venv $(RAY)
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(PLACE)")')" > $$($(RAY)/bin/python -c "$(PLACE)")/ours.pth
	$(RAY)/bin/python -m pip install -q 'ray>=2.40'
	$(RAY)/bin/python -m pytest tests/cluster/test_ray.py

# Compiled before the tests, so that servers started by tests need not wait for the compiler.
kernels: $(READY)
	$(BIN)/python -c "from headgate.layers.cpu.build import load_kernels; print(load_kernels())"

test-gpu:
	$(PYTHON) -m pytest -m gpu

# The router's C code and the CPU kernels under the address and undefined-behaviour sanitizers; docs/testing.md.
sanitize: $(READY)
	$(BIN)/python -m tests.sanitize $(ARGS)

# The unit tests of the scheduling core reach 100 % branch coverage; the fuzz is additional.
coverage: $(READY)
	$(BIN)/python -m coverage run -m pytest --durations=0 tests/core/test_scheduler.py tests/core/test_blocks.py tests/core/test_leases.py tests/core/test_windows.py tests/protocol tests/contract/test_sampling.py
	$(BIN)/python -m coverage report --fail-under=100 --skip-covered --show-missing

fuzz: $(READY)
	$(BIN)/python -m tests.core.fuzz 0 $(or $(SEEDS),2000)

# Property-based tests of every parser of untrusted input; prints the number of inputs.
fuzz-inputs: $(READY)
	$(BIN)/python -m tests.fuzzing $(or $(TIMES),200)

# Known vulnerabilities of dependencies, and insecure code patterns; docs/threat-model.md explains what is skipped.
AUDIT := .venv-audit
audit:
	test -d $(AUDIT) || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install -q bandit pip-audit
	$(AUDIT)/bin/bandit -q -r src --skip B101,B105,B311,B404,B603
	$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

# Simulated fleets with faults drawn from seeds, on all cores; docs/testing.md.
simulate: $(READY)
	$(BIN)/headgate simulate --seeds 0:$(or $(SEEDS),10000)

mutants: $(READY)
	$(BIN)/python -m tests.core.mutants $(or $(SEEDS),60)
	$(BIN)/python -m tests.sim.mutants $(or $(SEEDS),100)

# Fault injection into a fleet of real processes (docs/chaos.md); the report is in chaos/.
chaos: $(READY)
	$(BIN)/headgate chaos --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) --report chaos

# The same fleet without faults, under load with aborts, pauses and updates: memory must not grow.
soak: $(READY)
	$(BIN)/headgate chaos --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) --only clients,operators --report chaos/soak

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Builds the documentation site in site/; a broken link or page is an error.
docs: $(READY)
	$(BIN)/mkdocs build --strict --quiet

# Builds the wheel in dist/, with the compiled libraries, for this version of Python and torch; see docs/deployment.md.
wheel: $(READY)
	rm -rf build
	HEADGATE_PREBUILD=1 $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .

# Builds the source distribution in dist/. What is installed from it compiles the libraries on first use.
sdist: $(READY)
	rm -rf build
	$(BIN)/python -c "import setuptools.build_meta as build; build.build_sdist('dist')"

$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo 'Installing PyTorch and the other libraries in $(VENV): a few minutes, without output.'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
