# `make demo` and `make test` do all the set-up on a fresh machine (Debian: apt-get install make python3-venv).
# Settings: PYTHON (which interpreter), VENV (where the environment goes), ARGS (passed on to the command).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
READY  := $(VENV)/.installed

.PHONY: demo test lint docs bench clean

demo: export OMP_NUM_THREADS ?= 1
demo: $(READY)
	@$(BIN)/trainpath demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy tests/typing
	@$(BIN)/codespell

docs: $(READY)-docs
	@$(BIN)/python -m sphinx -q -W -n -b html docs docs/_build $(ARGS)

bench: $(READY)-bench
	@for script in bench/[a-z]*.py; do $(BIN)/python $$script $(ARGS) || exit 1; done

# The stamp is written last. A mark left behind by an interrupted installation, an empty folder or an
# environment without pip each mean: make the environment again from nothing.
$(READY): pyproject.toml constraints.txt
	@if test -e $(VENV)/.installing || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Making $(VENV); the first installation takes a few minutes."; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@touch $(VENV)/.installing
	@$(PIP) install -qq -c constraints.txt -e '.[test]'
	@rm $(VENV)/.installing
	@touch $@

$(READY)-%: $(READY)
	@$(PIP) install -qq -c constraints.txt -e '.[$*]'
	@touch $@

clean:
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build dist
