# Two commands: `make quickstart` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that the tests are shared out to, a file at a time; each needs some 2 GB.
WORKERS ?= 2
# Compiled files are kept, or every process that a test starts would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-oldest test-extras lint types slow gpu format docs package clean

quickstart: $(VENV)/.installed
	$(BIN)/deepbregman quickstart

test: lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# The same tests with the lowest version of every dependency that pyproject.toml allows, on Python 3.11.
# That includes the extras timm, onnx, explore and heic, which dev has, parquet, and the driver of PostgreSQL.
OLDEST := .venv-oldest
DATABASE_TEST := tests/studies/test_tuning.py::test_three_workers_on_postgresql
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)
	$(OLDEST)/bin/python -m pytest -m slow $(DATABASE_TEST)

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	  --editable '.[dev,parquet,postgresql]'
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

# Packages for loggers, datasets and a database, which are large, and the tests that need them.
EXTRA_TESTS := tests/training/test_loggers.py tests/data/test_hugging_face.py $(DATABASE_TEST)
test-extras: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[mlflow,wandb,datasets,postgresql]'
	$(BIN)/python -m pytest -m 'slow or not slow' $(EXTRA_TESTS)

gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu

# The site, in build/docs; REPOSITORY is the address that links to files of the repository begin with.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs build/docs

# A source archive and a wheel made from it, in dist/; then the wheel in a clean environment.
CLEAN := build/clean
package: $(VENV)/.installed-dev
	rm -rf dist $(CLEAN)
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m venv $(CLEAN)
	$(CLEAN)/bin/python -m pip install --quiet dist/*.whl
	cd $(CLEAN) && bin/deepbregman --help && bin/deepbregman recipes && bin/deepbregman quickstart

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "deepbregman needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf build dist $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis
