# `make test` and `make demo` set themselves up: Python 3.11+, pip and make are all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup test test-slow test-gpu coverage lint types docs demo wheel clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "curlfree needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

coverage: $(READY)
	$(BIN)/python -m pytest --cov=curlfree

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(READY)
	$(BIN)/curlfree reproduce toy2d --quick --out demo

wheel: $(READY)
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) dist site demo
