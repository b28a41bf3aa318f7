PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

# Python keeps the bytecode of sources and tests: many tests start an interpreter
unexport PYTHONDONTWRITEBYTECODE

# each worker begins with half of the tests, so that tests of one file share what they set up
TWO = -n 2 --dist worksteal
SLOW = process or timing or data or browser or exhaustive or docs or matrix or extras

.PHONY: setup demo test test-rest test-all check docs fuzz soak bench combining records gpu dist clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | demo | test | test-all | check | docs | fuzz | soak | bench | records | gpu | dist"

.venv/base: pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/dev: .venv/base
	$(INSTALL) -e '.[dev,onnx]'
	touch $@

.venv/docs: .venv/base
	$(INSTALL) -e '.[docs]'
	touch $@

setup: .venv/dev

demo: .venv/base
	$(BIN)/kasoku train digits_cnn_98 $(ARGS)

# the fast tests, and one smoke test of every guarantee whose tests are slow
test: .venv/dev
	$(BIN)/python -m pytest $(TWO) -m "smoke or not ($(SLOW))"

# what `make test` leaves out; tests that judge times run alone
test-rest: .venv/dev
	$(BIN)/python -m pytest $(TWO) -m "not smoke and not timing and ($(SLOW))"
	$(BIN)/python -m pytest -m "not smoke and timing"

test-all: test test-rest

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the manual as a site, build/site/index.html; a dead link fails (with --quiet, --strict would not see it)
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# mutated inputs for the decoder, recipes and files: two minutes; LONG=1: a million inputs
fuzz: .venv/dev
	$(BIN)/python tests/fuzz $(if $(LONG),--long)

# faults at random over trainings, as root: ten minutes, or HOURS=1
soak: .venv/dev
	$(BIN)/python benchmarks/soak.py $(if $(HOURS),--hours $(HOURS))

bench: .venv/dev
	$(BIN)/python benchmarks/trainer_overhead.py

# every pair of techniques, and the page that says what combines; WITH="EMA Clip": the pairs of these
combining: .venv/dev
	cd tests && ../$(BIN)/python -m helpers.matrix $(WITH)
	$(BIN)/python docs/reference.py

# RECORDS.md from records/*.jsonl
records:
	$(PYTHON) benchmarks/records.py

gpu: .venv/dev
	$(BIN)/python benchmarks/gpu.py

# an sdist, and from it one wheel for every Python, tagged by auditwheel with the oldest Linux it runs on
DIST ?= dist
dist: .venv/dev
	rm -rf $(DIST)
	$(BIN)/python -m build --no-isolation --outdir $(DIST)/untagged .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) $(DIST)/untagged/*-py3-none-linux_*.whl
	mv $(DIST)/untagged/*.tar.gz $(DIST)
	rm -r $(DIST)/untagged

clean:
	rm -rf .venv runs build dist
