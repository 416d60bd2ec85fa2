# make demo        set up and train the default recipe; the same command resumes
# make test        set up and run the tests of the core, and a row of each vertical (10 minutes on 2 cores)
# make test-all    every test that is not a long proof
# make test-due    the verticals and long proofs that are due: what changed since they ran, then the oldest
# make test-slow   the long proofs; of their tables one row
# make test-large  the other rows, and models of billions compiled for TPU pods: about four hours;
#                  PART=2/10 runs the third of ten parts, in which most tables have a row
# make costs       what each test of the last `make test` cost
# make hashes      numbers of a table of features, to be compared after a move: make hashes-compare
# make lint        ruff, pyright, codespell
# make docs        build the documentation site into .docs/_build/html; a warning is an error
# make accelerator everything on one GPU or TPU: is it right, how fast, beside whom (MINUTES=8)
# make bench       kernels, routers, a step beside transformers (ten minutes, machine left alone)
#
# The newest installed Python of 3.11 to 3.13 is taken; 3.12 and 3.13 have jax 0.12, 3.11 has 0.10.
# PYTHON=python3.11 chooses the interpreter, JAX=0.11 another jax, VENV=dir another place. Where the
# driver of an NVIDIA GPU answers, demo and accelerator install the extra cuda; CUDA= leaves it out.

# The first that runs and can make an environment: Debian has Pythons without `ensurepip`.
ifndef PYTHON
PYTHON := $(shell for python in python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && break; done)
PYTHON := $(or $(PYTHON),python3)
endif
VENV ?= .venv
JAX ?=
WORKERS ?= 2
MINUTES ?= 8
PART ?= 0/1
CUDA ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)

BIN := $(VENV)/bin
# One stamp per interpreter, jax and pins: whatever changes, the environment is made anew.
KEY := $(shell ($(PYTHON) -VV; echo "$(JAX)"; cat constraints.txt pyproject.toml) | cksum | cut -d' ' -f1)
BASE := $(VENV)/.base-$(KEY)
TRAIN := $(VENV)/.train-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
HF := $(VENV)/.hf-$(KEY)
# What the commands of an accelerator need: with a GPU also the extra cuda.
DEVICE := $(TRAIN) $(if $(CUDA),$(VENV)/.cuda-$(KEY))
DOCS := $(VENV)/.docs-$(KEY)
# libtpu, which compiles for TPUs that are not there; and transformers and PyTorch, as oracles and
# peers: pinned for Python 3.11, where the CPU build comes.
HAS_PEERS := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info < (3, 12) else "")' 2>/dev/null)
comma := ,
# Python compiles what it imports; compiling all that is installed takes twelve seconds.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt

# What Python compiles is kept, outside of the sources: commands start in half the time.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.cache/python

.PHONY: demo test test-all test-due test-slow test-large hashes hashes-compare costs bench accelerator lint docs docs-packages proof-packages format clean

demo: $(DEVICE)
	$(BIN)/python -m experiments.pretrain

test: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ring core --costs=.cache/costs/test.json -m "not slow and not accelerator and not large"

test-all: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --costs=.cache/costs/test-all.json -m "not slow and not accelerator and not large"

test-due: $(HF)
	$(BIN)/python -m tests.support.due --record

test-slow: $(HF)
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and trains and not large and not accelerator"
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not trains and not large and not accelerator"

test-large: $(HF)
	$(BIN)/python -m pytest -v -n $(WORKERS) --part $(PART) -m "large and not trains and not accelerator"
	$(BIN)/python -m pytest -v -n $(WORKERS) --part $(PART) -m "large and trains and not accelerator"

bench: $(HF)
	$(BIN)/python -m experiments.bench kernels
	$(BIN)/python -m experiments.bench routers
	$(BIN)/python -m experiments.bench step $(if $(HAS_PEERS),,--peer none)

accelerator: $(DEVICE)
	$(BIN)/python -m experiments.bench accelerator --minutes $(MINUTES)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell jaxmoe sharding pallas_kernels experiments tests .docs/*.md .docs/*.py .docs/concepts .docs/guides README.md CHANGELOG.md
	$(BIN)/pyright --pythonpath $(BIN)/python

docs-packages: $(DOCS)

proof-packages: $(HF)

# Losses, gradients, states, tokens and collectives of a table of features: before and after a move.
hashes: $(HF)
	$(BIN)/python -m tests.support.hashes take .cache/hashes/$$(git rev-parse --short HEAD).json --workers $(WORKERS)

# make hashes-compare OLD=FILE NEW=FILE
hashes-compare: $(HF)
	$(BIN)/python -m tests.support.hashes compare $(OLD) $(NEW)

# What each test of the last `make test` cost.
costs: $(DEV)
	$(BIN)/python -m tests.support.costs .cache/costs/test.json

docs: $(DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -b html .docs .docs/_build/html
	@echo "see .docs/_build/html/index.html"

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .docs/_build .docs/generated

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: jaxmoe needs Python 3.11 or newer, $(PYTHON) is older: set PYTHON=..."; exit 2; }
	@echo "setting up $(VENV) (once)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(JAX)" ]; then \
		grep -Ev '^(jax|jaxlib|libtpu)==' constraints.txt > $(VENV)/constraints.txt; \
		printf 'jax==%s.*\njaxlib==%s.*\n' "$(JAX)" "$(JAX)" >> $(VENV)/constraints.txt; \
	else \
		cp constraints.txt $(VENV)/constraints.txt; \
	fi
	@touch $@

$(TRAIN): $(BASE)
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.cuda-$(KEY): $(TRAIN)
	@echo "an NVIDIA GPU: installing the extra cuda (make demo CUDA= leaves it out)"
	$(INSTALL) -e '.[train,cuda]'
	@touch $@

$(DEV): $(TRAIN)
	$(INSTALL) -e '.[train,dev]'
	@touch $@

$(HF): $(DEV)
	$(INSTALL) -e '.[train,dev,plan$(if $(HAS_PEERS),$(comma)hf$(comma)lm-eval)]'
	@touch $@

$(DOCS): $(DEV)
	$(INSTALL) -e '.[train,dev,docs]'
	@touch $@
