# make run      install into .venv and run the quickstart
# make test     what CI runs: lint, types, import contracts, tests with coverage
# make lint     the first three of those
# make clean    remove .venv, caches and build output (never results/)

PIP := .venv/bin/python -m pip --disable-pip-version-check -q
FIND_PYTHON := for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	"$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$python" && exit; done; exit 1

.PHONY: help run test lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

run: .venv/.installed
	.venv/bin/speckv run scenarios/quickstart.yaml

test: lint
	.venv/bin/python -m pytest -n 2 --dist loadgroup --cov --cov-report=term:skip-covered

lint: .venv/.installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

clean:
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
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing speckv and what it needs into .venv"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing speckv with what its tests need into .venv"
	@$(PIP) install -c constraints.txt -e '.[dev,gpu,notebooks]'
	@touch .venv/.installed $@
