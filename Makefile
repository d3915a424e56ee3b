# Everything happens in a virtual environment of the checkout's own. VENV and PYTHON may be overridden, and PIP_ARGS goes
# to every `pip install`, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a CPU build of torch.
VENV ?= .venv
PYTHON ?= python3
PIP_ARGS ?=
# What starts whole runs has the machine to itself; all other tests run in WORKERS processes.
WORKERS ?= 2
ALONE = tests/chaos tests/e2e tests/kafka tests/parallel
INSTALL = $(VENV)/bin/python -m pip install -q --constraint deploy/constraints.txt $(PIP_ARGS)

.PHONY: demo test check format

demo: $(VENV)/.demo
	$(VENV)/bin/echo-demo $(ARGS)

test: $(VENV)/.dev
ifdef ARGS
	$(VENV)/bin/python -m pytest $(ARGS)
else
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ALONE:%=--ignore=%)
	$(VENV)/bin/python -m pytest $(ALONE)
endif

check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python grafana/build.py --check

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Echo needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml deploy/constraints.txt
	$(INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml deploy/constraints.txt
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.demo
