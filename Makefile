# Each target sets up what it needs: .venv is made from constraints.txt when it is missing.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint bench clean

demo: .venv/base
	$(BIN)/python examples/demo.py

test: .venv/dev lint
	$(BIN)/python -m pytest -p no:benchmark -n auto --dist loadscope -m "not slow"
	$(BIN)/python -m pytest bench --benchmark-disable

test-all: .venv/dev lint
	$(BIN)/python -m pytest -p no:benchmark -n auto --dist loadscope
	$(BIN)/python -m pytest bench --benchmark-disable

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy examples

bench: .venv/bench
	$(BIN)/python -m fastbrain bench
	$(BIN)/python -m bench.training_step --precision both --profile

clean:
	rm -rf .venv demo-out

.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev: .venv/base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/bench: .venv/base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@
