# Each target makes .venv and installs what it needs; nothing has to be installed before but Python >= 3.11.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install train test test-long faults coverage lint bench-cpu docs serve-docs release-check clean

install: $(VENV)/.hf
	@echo "fdp is installed in $(VENV). Activate it: source $(VENV)/bin/activate"

train: $(VENV)/.core
	$(BIN)/fdp train

# Memory that torch frees is kept for the next test instead of going back to the system.
PYTEST := OMP_NUM_THREADS=1 MIMALLOC_PURGE_DELAY=-1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.test
	$(PYTEST)

test-long: $(VENV)/.test
	$(PYTEST) -m 'long and not slow and not gpu'

faults: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults

coverage: $(VENV)/.test
	$(PYTEST) --cov=fdp --cov-report=term:skip-covered --cov-fail-under=90

lint: $(VENV)/.test $(VENV)/.lint $(VENV)/.docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench-cpu: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

serve-docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

release-check: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/test_release.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"fdp needs Python >= 3.11, and $(PYTHON) is {v}; give another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) --editable '.[test]'
	# backpack asks for torchvision, which it does not import and which would bring a torch of its own
	$(PIP) --no-deps curvlinops-for-pytorch==3.0.1 backpack-for-pytorch==1.7.1 unfoldNd==0.2.3
	touch $@

$(VENV)/.hf: $(VENV)/.core
	$(PIP) --editable '.[hf]'
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.lint: $(VENV)/.core
	$(PIP) --editable '.[lint]'
	touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP) --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) runs
