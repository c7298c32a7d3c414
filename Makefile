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

.PHONY: demo demo-digits test test-flower-oldest nightly mutants lint clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints/ci.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[digits,vision]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints/ci.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.demo

# The main job: Local, FedAvg and FedAvg + FedDEA on four dense tasks of rendered scenes, and a picture.
demo: $(VENV)/.demo
	@rm -rf runs/demo
	@$(BIN)/fedloom run feddea/scenes method=local --out runs/demo/local
	@$(BIN)/fedloom run feddea/scenes method=fedavg --out runs/demo/fedavg
	@$(BIN)/fedloom run feddea/scenes method.codec=sparse --out runs/demo/feddea
	@$(BIN)/fedloom compare runs/demo/local runs/demo/fedavg runs/demo/feddea --markdown runs/demo/comparison.md
	@$(BIN)/fedloom picture runs/demo/feddea runs/demo/predictions.png
	@echo "The runs are in runs/demo, with the table (comparison.md) and what FedAvg + FedDEA predicts (predictions.png)"

# The same on four tasks of real handwritten digits, three seeds each.
demo-digits: $(VENV)/.demo
	@rm -rf runs/digits
	@for seed in 0 1 2; do \
	  $(BIN)/fedloom run digits-tasks seed=$$seed method=local --out runs/digits/local-s$$seed && \
	  $(BIN)/fedloom run digits-tasks seed=$$seed method=fedavg --out runs/digits/fedavg-s$$seed && \
	  $(BIN)/fedloom run digits-tasks seed=$$seed method=fedavg method.add.feddea.rho=0.3 method.codec=sparse \
	    --out runs/digits/feddea-s$$seed || exit 1; \
	done
	@$(BIN)/fedloom compare runs/digits/local-s* runs/digits/fedavg-s* runs/digits/feddea-s*

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n 2

# The test of the report in a browser runs where Chromium and its driver are (Debian: apt install chromium chromium-driver)
# and selenium is: .venv/bin/pip install -e '.[browser]'
# The oldest flwr that is supported, in an environment of its own: `make test` has the newest.
test-flower-oldest:
	$(PYTHON) -m venv $(VENV)-flower
	$(VENV)-flower/bin/python -m pip install -q -c constraints/flower-oldest.txt $(PIP_ARGS) -e '.[test]'
	$(VENV)-flower/bin/pytest tests/flower

nightly: lint
	$(BIN)/pytest -n 2 -m 'slow or not slow'
	$(MAKE) mutants ARGS="--seed $$(date +%Y%m%d)"

# Do the tests notice? Small changes of the source, one at a time, and which of them no test sees; ARGS='--help'
ARGS ?=
mutants: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-flower runs build dist
