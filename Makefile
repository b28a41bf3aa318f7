PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test check bench gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | demo | test | check | bench | gpu"

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/dev: .venv/base
	$(INSTALL) -e '.[dev,onnx]'
	touch $@

setup: .venv/dev

demo: .venv/base
	$(BIN)/kasoku train recipes/digits_cnn_98.toml

test: .venv/dev
	$(BIN)/python -m pytest

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/dev
	$(BIN)/python benchmarks/trainer_overhead.py

gpu: .venv/dev
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf .venv runs build dist
