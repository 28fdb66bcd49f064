# The two commands: `make demo` trains and evaluates a small model, `make test` runs the tests.
# Both create the environment first if it is missing. PYTHON chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/demo

BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Exact versions for the Python versions that are tested; others get what setup.cfg allows.
CONSTRAINTS := $(wildcard constraints/python$(VERSION).txt)
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check \
	$(addprefix --constraint ,$(CONSTRAINTS)) --editable
SOURCES := sa_jax experiments configs tests

.PHONY: demo test test-quick lint format clean

demo: $(VENV)/train.stamp  ## Train, evaluate and sample the demo model: ten minutes at most.
	$(BIN)/python -m experiments.pretrain --config=configs/pretrain/demo.py --workdir=$(WORKDIR)

test: $(VENV)/dev.stamp  ## All tests: fifteen minutes at most on two cores.
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

test-quick: $(VENV)/dev.stamp  ## The tests that take seconds.
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal -m 'not slow'

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'sa_jax needs Python 3.11 or newer, found $(VERSION): make PYTHON=python3.12 …'; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/train.stamp: setup.cfg $(CONSTRAINTS) | $(VENV)/bin/python
	@echo 'Installing the training environment into $(VENV) …'
	$(INSTALL) '.[train]'
	@touch $@

$(VENV)/dev.stamp: setup.cfg $(CONSTRAINTS) | $(VENV)/bin/python
	@echo 'Installing the development environment into $(VENV) …'
	$(INSTALL) '.[all,dev]'
	@touch $@ $(VENV)/train.stamp
