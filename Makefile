# make serve   serve the demo             HOST=0.0.0.0 PORT=8001 FLAGS="--log-level debug"
# make test    run the tests              TESTS="tests/server -k flags"
# make help    the other targets
#
# The first run makes VENV with PYTHON and installs there; it is done again when pyproject.toml has changed.

PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
VENV ?= .venv
HOST ?=
PORT ?=
FLAGS ?=
TESTS ?= tests

STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python -P -m
PARTS := server engine kernels configs

.PHONY: help install serve test test-full lint format types clean

help:
	@echo "make serve      serve the demo model and its adapters (HOST, PORT, FLAGS)"
	@echo "make test       run the tests (TESTS)"
	@echo "make test-full  run the tests, the slow ones too"
	@echo "make lint       check format and style"
	@echo "make format     repair format and style"
	@echo "make types      check types"
	@echo "make install    make $(VENV) and install there"
	@echo "make clean      remove what these made, $(VENV) too"

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..."; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version) and installing loraplex there (torch is a large download)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,dev]'
	@touch $@

serve: $(STAMP)
	@echo "==> starting the demo (its last line says where it answers; Ctrl-C ends it)"
	@exec $(VENV)/bin/loraplex serve --config configs/serve/demo.yaml \
		$(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(FLAGS)

test: $(STAMP)
	@echo "==> running the tests (the slow ones are left to make test-full)"
	$(RUN) pytest -m "not slow" $(TESTS)

test-full: $(STAMP)
	@echo "==> running all tests"
	$(RUN) pytest $(TESTS)

lint: $(STAMP)
	@echo "==> checking format and style"
	$(RUN) ruff format --check .
	$(RUN) ruff check .

format: $(STAMP)
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

# A type checker cannot see through the mapping of folders to loraplex.*, but follows links.
types: $(STAMP)
	@echo "==> checking types"
	@mkdir -p .typing/loraplex
	@for part in $(PARTS); do ln -sfn ../../$$part .typing/loraplex/$$part; done
	@for file in __init__.py py.typed; do ln -sfn ../../server/public/$$file .typing/loraplex/$$file; done
	$(RUN) mypy --package loraplex

clean:
	rm -rf $(VENV) .typing .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find $(PARTS) tests -name __pycache__ -type d -exec rm -rf {} +
