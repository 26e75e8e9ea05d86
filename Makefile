# make run      install into .venv and run the quickstart
# make test     what CI runs: lint, types, import contracts, tests with coverage, and those of the core on the compiled one
# make lint     the first three of those
# make instructions  count what a small run executes; fail if that has grown by more than 10 percent (test does so too)
# make compile  compile the core if its sources have changed; run and test do so too (SPECKV_CORE=plain: they do not)
# make clean    remove .venv, the compiled core, caches and build output (never results/)

PIP := .venv/bin/python -m pip --disable-pip-version-check -q
FIND_PYTHON := for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	"$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$python" && exit; done; exit 1

# What the compiled core is made of is said in pyproject.toml; this is at least that.
SOURCES := setup.py pyproject.toml $(wildcard sim/*.py sim/*/*.py workloads/*.py)
COMPILED := $(if $(filter plain,$(SPECKV_CORE)),,.venv/.compiled)
# Tests of what runs before or after the core, or only around it; the others are run on both.
BESIDE_THE_CORE := acceptance_% calibrat% compare% compiled explain importing models_acceptance models_hardware models_memory \
	models_shapes notebook% pictures python_docs report scenario% step_timers timeline tune validation wheel workloads_%
CORE_TESTS := $(filter-out $(BESIDE_THE_CORE:%=tests/test_%.py),$(wildcard tests/test_*.py))

.PHONY: help run test lint instructions compile clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run: .venv/.installed $(COMPILED)
	.venv/bin/speckv run scenarios/quickstart.yaml

test: lint $(COMPILED)
	SPECKV_CORE=plain .venv/bin/python -m pytest -n 2 --dist loadgroup --cov --cov-report=term:skip-covered
	@if .venv/bin/speckv version | grep -q "^core: compiled"; then \
		SPECKV_CORE=compiled .venv/bin/python -m pytest -n 2 --dist loadgroup $(CORE_TESTS); \
	else .venv/bin/speckv version; echo "No compiled core: the tests have run on the plain one only."; fi
	.venv/bin/python benchmarks/instructions.py

lint: .venv/.installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

instructions: .venv/.installed-dev $(COMPILED)
	.venv/bin/python benchmarks/instructions.py

compile: .venv/.compiled
	@.venv/bin/speckv version

clean:
	find sim \( -name "*.so" -o -name "*.pyd" -o -name "_core__mypyc*" \) -delete
	rm -rf .venv build dist *.egg-info .coverage .coverage.* .hypothesis
	rm -rf .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find gpu_backend sim tests workloads -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@python=$$($(FIND_PYTHON)) || { \
		echo "speckv needs Python 3.11 or newer with the venv module (on Debian and Ubuntu the package python3-venv)." >&2; \
		echo "None was found as python3 or python3.11 to python3.14; name one with: make run PYTHON=/path/to/python" >&2; \
		exit 1; }; \
	echo "Making .venv with $$python"; "$$python" -m venv .venv

# The stamps: nothing is installed again until what is to be installed changes.
.venv/.installed: setup.py pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing speckv and what it needs into .venv, and compiling its core"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: setup.py pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing speckv with what its tests need into .venv, and compiling its core"
	@$(PIP) install -c constraints.txt -e '.[dev,gpu,notebooks]'
	@touch .venv/.installed $@

# If it cannot be compiled, `speckv version` says why; it is not tried again until something changes.
.venv/.compiled: $(SOURCES) | .venv/.installed
	@SPECKV_CORE= .venv/bin/speckv version | grep -q "^core: compiled" || { \
		echo "Compiling the core: about a minute"; \
		.venv/bin/python -c "import mypyc, setuptools" 2>/dev/null && here=--no-build-isolation; \
		$(PIP) install --no-deps $$here -e . || [ "$(SPECKV_CORE)" != compiled ]; }
	@touch $@
