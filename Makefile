# Everything happens in a virtual environment of the checkout's own. VENV and PYTHON may be overridden, and PIP_ARGS goes
# to every `pip install`, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a CPU build of torch.
VENV ?= .venv
PYTHON ?= python3
PIP_ARGS ?=
# What starts whole runs has the machine to itself; all other tests run in WORKERS processes.
WORKERS ?= 2
ALONE = tests/chaos tests/e2e tests/kafka tests/parallel
# Both ends of the ranges in pyproject.toml have environments of their own. HOLD names packages that keep the tested version there:
# HOLD=torch on a machine without a GPU, since other builds of torch than the one at hand may be CUDA's, of several GB.
LOWEST ?= .venv-lowest
NEWEST ?= .venv-newest
HOLD ?=
QUICK = -m "not e2e and not chaos and not kafka"
INSTALL = $(VENV)/bin/python -m pip install -q --constraint deploy/constraints.txt $(PIP_ARGS)

.PHONY: demo test test-lowest test-newest check format

demo: $(VENV)/.demo
	$(VENV)/bin/echo-demo $(ARGS)

test: $(VENV)/.dev
ifdef ARGS
	$(VENV)/bin/python -m pytest $(ARGS)
else
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ALONE:%=--ignore=%)
	$(VENV)/bin/python -m pytest $(ALONE)
endif

# $(call held,ENVIRONMENT): makes it, and writes what HOLD names to held.txt in it, as constraints.
define held
	$(PYTHON) -m venv $(1)
	for name in $(HOLD); do grep -i "^$$name==" deploy/constraints.txt || exit 1; done > $(1)/held.txt
endef

define test-quickly
	$(1)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(QUICK) $(ALONE:%=--ignore=%)
	$(1)/bin/python -m pytest $(QUICK) $(ALONE)
endef

test-lowest:
	$(call held,$(LOWEST))
	$(LOWEST)/bin/python -m pip install -q uv
	$(LOWEST)/bin/uv pip compile -q --resolution lowest-direct --extra dev --no-annotate --python $(LOWEST)/bin/python \
		--constraint $(LOWEST)/held.txt --output-file $(LOWEST)/lowest.txt pyproject.toml
	$(LOWEST)/bin/python -m pip install -q --constraint $(LOWEST)/lowest.txt $(PIP_ARGS) --editable '.[dev]'
	$(call test-quickly,$(LOWEST))

test-newest:
	$(call held,$(NEWEST))
	$(NEWEST)/bin/python -m pip install -q --upgrade --upgrade-strategy eager --constraint $(NEWEST)/held.txt $(PIP_ARGS) \
		--editable '.[dev]'
	$(call test-quickly,$(NEWEST))

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
