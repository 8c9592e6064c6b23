# make train     install, then train a small language model on Ray actors
# make quick     install, then lint, the core tier and the tests of what changed since BASE (default: main), in 3 minutes
# make test      install, then every tier of tests without its long tests (TIERS="lint core" for some)
# make test-long install, then the long tests of every tier (TIERS="ray" for some, SHARE=2/3 for the second third of them)
# make test-gpu  the tests that need an NVIDIA GPU, with a torch for CUDA in .venv; make bench-gpu measures there
# make gpu-lease both in 15 minutes, with python3 as it is: docs/gpu.md (PART=1 for the first half, DEVICE=cpu to try it)
# make test-torch VERSION=2.11  the tests that compute, and those that need a GPU, with another torch (TIERS="ray" for some)

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TIERS ?=
BASE ?= main

OTHER := .venv-torch-$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help install lint quick test test-long test-gpu test-torch bench-gpu gpu-lease train clean

help:
	@echo "make install | lint | quick [BASE=main] | test [TIERS='lint core laws engine ray gpu'] | test-long | test-gpu | test-torch VERSION=2.11 | bench-gpu | gpu-lease | train | clean"

install: $(INSTALLED)

# torch comes first and by its exact pin: asked for together with the others, pip may choose another build of it.
$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raypipe needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=python3.11 or the like")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet "$$(grep '^torch==' requirements.txt)"
	$(RUN) -m pip install --quiet --requirement requirements.txt
	$(RUN) -m pip install --quiet --no-deps --editable .
	@touch $@

lint: install
	$(RUN) tests/tiers.py lint

quick: install
	$(RUN) tests/quick.py --base $(BASE)

test: install
	$(RUN) tests/tiers.py $(TIERS) $(if $(MUST_RUN),--must-run)

test-long: install
	$(RUN) tests/tiers.py --long $(TIERS) $(if $(MUST_RUN),--must-run) $(if $(SHARE),--part $(SHARE))

# With the packages that are there: an install would put the pinned torch for CPUs over one for CUDA.
test-gpu:
	$(RUN) tests/tiers.py gpu

# In a virtual environment with that torch and what it needs; all other packages are those of .venv.
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python tests/tiers.py $(or $(TIERS),engine gpu)
	$(OTHER)/bin/python tests/tiers.py --long $(or $(TIERS),engine gpu)

$(OTHER)/.installed: $(INSTALLED)
	@test -n "$(VERSION)" || { echo "Say which torch: make test-torch VERSION=2.11"; exit 1; }
	$(RUN) -m venv --clear --without-pip $(OTHER)
	$(RUN) -m pip --python $(OTHER) install --quiet "torch==$(VERSION).*"
	cd $(OTHER)/lib/python3.*/site-packages && \
		echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python3.*/site-packages)')" > others.pth
	@touch $@

bench-gpu:
	$(RUN) jobs/bench/codec
	$(RUN) jobs/bench/gpu

# Without .venv: such a machine has its own torch.
gpu-lease:
	$(PYTHON) jobs/check/gpu_machine.py $(if $(PART),--part $(PART)) $(if $(DEVICE),--device $(DEVICE))

train: install
	$(RUN) jobs/train/lm.py

clean:
	rm -rf $(VENV) .venv-torch-* runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find raypipe jobs tests -name __pycache__ -type d -prune -exec rm -rf {} +
