# `make demo` and `make test` do all the set-up on a fresh machine (Debian: apt-get install make python3-venv).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint docs bench clean

demo: export OMP_NUM_THREADS ?= 1
demo: $(VENV)/.installed
	@$(BIN)/trainpath demo $(ARGS)

test: $(VENV)/.installed
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

docs: $(VENV)/.installed
	@$(PIP) install -q -c constraints.txt -e '.[docs]'
	@$(BIN)/python -m sphinx -W -n -b html docs docs/_build

bench: $(VENV)/.installed
	@$(PIP) install -q -c constraints.txt -e '.[bench]'
	@for script in bench/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

# The stamp is written last, so a half-made environment is made again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install -q -c constraints.txt -e '.[test]'
	@touch $@

clean:
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build
