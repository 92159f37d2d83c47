# `make demo` and `make test` need Python 3.11 or newer and nothing else; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint clean

demo: $(VENV)/.installed
	$(BIN)/ram-trl demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[deepspeed,test,bench]"
	touch $@

clean:
	rm -rf $(VENV)
