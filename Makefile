# `make demo` trains and evaluates a small model, `make training-free` gives a published one other
# attention patterns, `make test` runs the tests. Each creates the environment first if it is missing.
# PYTHON chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
# Of the demo, and of the training-free sweep; each has its own if neither is given.
demo: WORKDIR ?= runs/demo
training-free: WORKDIR ?= runs/training_free
table1-mini: WORKDIR ?= runs/table1_mini
# Where downloaded models are kept.
CACHE ?= $(HOME)/.cache/sa_jax

BIN := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Exact versions for the Python versions that are tested; others get what setup.cfg allows.
CONSTRAINTS := $(wildcard constraints/python$(VERSION).txt)
# Modules are compiled when first imported: most never are.
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check \
	$(addprefix --constraint ,$(CONSTRAINTS)) --editable
SOURCES := sa_jax experiments configs scripts tests
SMOLLM2 := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo training-free table1-mini test test-quick lint format clean

demo: $(VENV)/train.stamp  ## Train, evaluate and sample the demo model: ten minutes at most.
	$(BIN)/python -m experiments.pretrain --config=configs/pretrain/demo.py --workdir=$(WORKDIR)

training-free: $(VENV)/pretrained.stamp  ## Score SmolLM2 under four patterns.
	$(BIN)/python scripts/fetch_smollm2.py $(SMOLLM2)
	$(BIN)/python -m experiments.training_free --flagfile=configs/training_free/speeches.flags \
		--model=$(SMOLLM2) --workdir=$(WORKDIR)

table1-mini: $(VENV)/train.stamp  ## Train and compare the variants of Table 1 at a small scale: a day.
	$(BIN)/python -m experiments.compare --config=configs/pretrain/table1_mini.py --workdir=$(WORKDIR)

test: $(VENV)/dev.stamp  ## All tests: up to half an hour on two cores.
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

test-quick: $(VENV)/dev.stamp  ## The tests that take seconds: up to ten minutes.
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal -m 'not slow' \
		--hypothesis-profile=few

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

$(VENV)/pretrained.stamp: setup.cfg $(CONSTRAINTS) | $(VENV)/bin/python
	@echo 'Installing the environment for published models into $(VENV) …'
	$(INSTALL) '.[train,pretrained]'
	@touch $@ $(VENV)/train.stamp

$(VENV)/dev.stamp: setup.cfg $(CONSTRAINTS) | $(VENV)/bin/python
	@echo 'Installing the development environment into $(VENV) …'
	$(INSTALL) '.[all,dev]'
	@touch $@ $(VENV)/train.stamp $(VENV)/pretrained.stamp
