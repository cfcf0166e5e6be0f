# Every target makes .venv by itself; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
BIN    := .venv/bin
# One more than CI has cores: some tests wait for processes that they have started.
NPROC  ?= 3

.PHONY: demo test test-elsewhere attack lint types bench peers docs serve-docs clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo 'make demo   survey the built-in GPT and say where the page is'
	@echo 'make test   what CI runs: ruff, mypy, pytest with doctests'
	@echo 'make test-elsewhere  the tests with the kernels of other CPUs, shuffled, busy, without a network'
	@echo 'make attack hundreds of faults against files, runs, commands and probes, counted in a table'
	@echo 'make lint   ruff alone        make types   mypy alone'
	@echo 'make bench  the benchmarks    make docs    the documentation, built strictly'
	@echo 'make peers  an environment with the packages that some tests and benchmarks compare with'

# The stamp depends on what is installed, so a changed pyproject.toml installs again.
.venv/stamp: pyproject.toml studies/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e studies
	@touch $@

.venv/docs-stamp: .venv/stamp
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Without dependencies: one of them would bring torchvision, and with it another torch.
.venv-peers/stamp: pyproject.toml constraints.txt tests/outside/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/outside/peers.txt
	@touch $@

peers: .venv-peers/stamp

demo: .venv/stamp
	$(BIN)/theodolite survey --out survey.html

lint: .venv/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/stamp
	$(BIN)/mypy

# The tests start many processes, which should not compile all files again.
test: export PYTHONDONTWRITEBYTECODE =
test: lint
	@$(BIN)/mypy & types=$$!; $(BIN)/pytest -n $(NPROC) --dist worksteal; tests=$$?; wait $$types && exit $$tests

# Twice the suite, as other machines would run it: other kernels, another order, no network, busy, ...
test-elsewhere: .venv/stamp
	$(BIN)/python tests/elsewhere.py

# Faults by the hundred: kills, flipped bits, hostile files, odd command lines. Half an hour or so.
attack: .venv/stamp
	$(BIN)/python -m tests.faults.attack

bench: .venv/stamp
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: .venv/docs-stamp
	$(BIN)/mkdocs build --strict

serve-docs: .venv/docs-stamp
	$(BIN)/mkdocs serve

clean:
	rm -rf .venv .venv-peers site .pytest_cache .mypy_cache .ruff_cache survey.html survey.json
