PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

SLOW = process or timing or data or browser or exhaustive

.PHONY: setup demo test test-rest test-all check fuzz bench gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | demo | test | test-all | check | fuzz | bench | gpu"

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/dev: .venv/base
	$(INSTALL) -e '.[dev,onnx]'
	touch $@

setup: .venv/dev

demo: .venv/base
	$(BIN)/kasoku train digits_cnn_98 $(ARGS)

# the fast tests, and one smoke test of every guarantee whose tests are slow
test: .venv/dev
	$(BIN)/python -m pytest -n 2 -m "smoke or not ($(SLOW))"

# what `make test` leaves out; tests that judge times run alone
test-rest: .venv/dev
	$(BIN)/python -m pytest -n 2 -m "not smoke and not timing and ($(SLOW))"
	$(BIN)/python -m pytest -m "not smoke and timing"

test-all: test test-rest

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# mutated inputs for the decoder, recipes and files: two minutes; LONG=1: a million inputs
fuzz: .venv/dev
	$(BIN)/python tests/fuzz $(if $(LONG),--long)

bench: .venv/dev
	$(BIN)/python benchmarks/trainer_overhead.py

gpu: .venv/dev
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv runs build dist
