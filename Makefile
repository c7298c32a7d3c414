# Two commands do everything on a fresh machine: `make demo` and `make test`.
#
# PYTHON   an interpreter of version 3.11 or later
# PIP_ARGS more arguments for pip; on Linux without a GPU, PyTorch's own CPU index saves several GB
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# The constraints keep pip from replacing torch when it installs something else that needs it.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt $(PIP_ARGS)
export OMP_NUM_THREADS ?= 1
# Tests of one file run in one process, so that the runs which they share are made once.
TWO := -n 2 --dist loadscope

.PHONY: demo demo-scenes results-claims docs test test-flower-oldest test-oldest nightly trials bench bench-gpu gpu bench-peers mutants lint clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints/ci.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[vision,report]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints/ci.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo

# The demo: patients of 16 countries with four of six outcomes each, trained alone and together, three seeds; then the
# change compared with training alone, and the page of all runs.
demo: $(VENV)/.demo
	@rm -rf grids/demo
	@$(BIN)/fedloom demo

# Four dense tasks of rendered scenes: Local, FedAvg and FedAvg + FedDEA, a table and a picture of what it predicts.
demo-scenes: $(VENV)/.demo
	@rm -rf runs/demo
	@$(BIN)/fedloom run feddea/scenes method=local --out runs/demo/local
	@$(BIN)/fedloom run feddea/scenes method=fedavg --out runs/demo/fedavg
	@$(BIN)/fedloom run feddea/scenes method.codec=sparse --out runs/demo/feddea
	@$(BIN)/fedloom compare runs/demo/local runs/demo/fedavg runs/demo/feddea
	@$(BIN)/fedloom compare runs/demo/local runs/demo/fedavg runs/demo/feddea --format markdown --out runs/demo/comparison.md
	@$(BIN)/fedloom plot picture runs/demo/feddea --out runs/demo/predictions.png
	@echo "The runs are in runs/demo, with the table (comparison.md) and what FedAvg + FedDEA predicts (predictions.png)"

# The numbers of docs/results, again: `make results-claims/fedhca2-scenes` runs the grid of that name (fedloom grid
# lists them), goes on where it was stopped, writes its table, its tests and its page to grids/NAME, and both tables to
# docs/results/tables, from where a page includes them.
RESULTS := $(filter-out results-claims,$(filter results-%,$(MAKECMDGOALS)))
$(RESULTS): results-%: $(VENV)/.test
	$(BIN)/fedloom grid $* --out grids/$* $(ARGS)
	$(BIN)/fedloom compare grids/$* --format markdown --out grids/$*/table.md
	cp grids/$*/table.md docs/results/tables/$(subst /,-,$*).md
	$(BIN)/fedloom report grids/$*
	if ! grep -q '^delta: none' grids/$*/grid.yaml; then \
	  $(BIN)/fedloom compare grids/$* --tests --format markdown --out grids/$*/tests.md && \
	  { printf '\n<details><summary>Paired tests</summary>\n\n'; cat grids/$*/tests.md; printf '\n</details>\n'; } \
	    >> docs/results/tables/$(subst /,-,$*).md; fi

# Every verdict of docs/results/verdicts.md, again, from an empty folder; it goes on where it was stopped. One grid alone:
# make results-claims ARGS="--only claims/feddea-digits"
results-claims: $(VENV)/.test
	$(BIN)/fedloom study claims docs/results/claims.yaml --run --format markdown --out docs/results/verdicts.md $(ARGS)

# The site, strict: every warning is an error, every block of code on a page runs, every link leads somewhere.
$(VENV)/.docs: pyproject.toml constraints/ci.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/pytest -q -c docs/pytest.ini docs
	$(BIN)/sphinx-build -q -W --keep-going -d docs/_build/doctrees -b html docs docs/_build/html

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest $(TWO)

# The test of the report in a browser runs where Chromium and its driver are (Debian: apt install chromium chromium-driver)
# and selenium is: .venv/bin/pip install selenium
# The oldest flwr that is supported, in an environment of its own: `make test` has the newest.
test-flower-oldest:
	$(PYTHON) -m venv $(VENV)-flower
	$(VENV)-flower/bin/python -m pip install -q -c constraints/flower-oldest.txt $(PIP_ARGS) -e '.[test]'
	$(VENV)-flower/bin/pytest tests/flower

# The oldest versions that pyproject.toml allows, in an environment of their own; they warn of what came after them.
# Newer pyarrow, which datasets would take, needs numpy 2.
test-oldest:
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install -q -c constraints/oldest.txt $(PIP_ARGS) -e '.[vision,data,report,notebook,privacy]' \
	  peft networkx pytest pytest-timeout pytest-xdist hypothesis torchmetrics jsonschema hatchling setuptools 'pyarrow<18'
	$(VENV)-oldest/bin/pytest $(TWO) -W default $(ARGS)

nightly: lint
	$(BIN)/pytest $(TWO) --timeout 1800 -m 'slow or not slow'
	$(MAKE) mutants ARGS="--seed $$(date +%Y%m%d)"

# What fedloom costs beside what it does: a table of ratios and their aims, in some ten minutes.
bench: $(VENV)/.test
	cd benchmarks && ../$(BIN)/python table.py $(ARGS)

# One job by hand, by fedloom and by Flower's simulation, which gets a virtual environment of its own.
bench-peers: $(VENV)/.test
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python benchmarks/peers $(ARGS)

# Runs on a GPU against the same on the CPU: dense, LoRA, stacked, a pool, deterministic, a cluster of one.
# FEDLOOM_DEVICE=cpu tries the tests themselves where there is none.
gpu: $(VENV)/.test
	FEDLOOM_DEVICE=$${FEDLOOM_DEVICE:-cuda} $(BIN)/pytest -m 'slow or not slow' tests/engines/test_devices.py $(ARGS)

# Ways to use a GPU, where there is one.
bench-gpu: $(VENV)/.test
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# Kills, faults of the disk and of processes, and 10,000 damaged files and recipes: what docs/guarantees.md promises. The
# counts of each suite stand at the end; the default test run tries a few of the same cases.
trials: $(VENV)/.test
	FEDLOOM_TRIALS=large $(BIN)/pytest -n 2 --timeout 7200 tests/trials $(ARGS)

# Do the tests notice? Small changes of the source, one at a time, and which of them no test sees; ARGS='--help'
ARGS ?=
mutants: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-flower $(VENV)-oldest runs build dist docs/_build
