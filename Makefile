# Two jobs: `make quickstart` (the main job on a real model) and `make test`. Each makes its own .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build of torch is the default. For another build: make quickstart TORCH="torch==2.13.0 --index-url ..."
TORCH ?= torch==2.13.0
OUT ?= bundle

.PHONY: quickstart test lint clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

quickstart: $(VENV)/.base
	$(BIN)/compress recipes/quickstart.yaml --out $(OUT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n logical --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
