# `make train` trains a robot, `make test` runs the tests; both build .venv first if it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test slow lint format fceumm clean

$(VENV)/.ready: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

train: $(VENV)/.ready   ## HalfCheetah learns to run: about two minutes on two cores
	$(BIN)/python ppo_continuous_mujoco.py --configs halfcheetah $(ARGS)

test: $(VENV)/.ready    ## the default suite
	$(BIN)/python -m pytest $(ARGS)

slow: $(VENV)/.ready    ## the learning tests
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.ready    ## style, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

fceumm: $(VENV)/.ready  ## the faster Mario emulator; --no-deps because its pyglet differs from nes-py's, and neither is used
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps stable-retro==1.0.1
