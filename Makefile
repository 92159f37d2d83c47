# All of these need Python 3.11 or newer and nothing else; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PPO needs an older TRL.
PPO_VENV := .venv-ppo
PPO_TESTS := tests/training/test_ppo.py tests/runs/test_ppo_recipe.py tests/distributed/test_ppo.py

.PHONY: demo test test-ppo test-slow lint clean

demo: $(VENV)/.installed
	$(BIN)/ram-trl demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-ppo: $(PPO_VENV)/.installed
	$(PPO_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not slow" $(PPO_TESTS)

test-slow: $(VENV)/.installed-test $(PPO_VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m slow
	$(PPO_VENV)/bin/python -m pytest -n 2 -m slow $(PPO_TESTS)

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

$(PPO_VENV)/.installed: pyproject.toml constraints-ppo.txt
	$(PYTHON) -m venv $(PPO_VENV)
	$(PPO_VENV)/bin/python -m pip install --quiet --constraint constraints-ppo.txt --editable ".[deepspeed,ppo,test]"
	touch $@

clean:
	rm -rf $(VENV) $(PPO_VENV)
