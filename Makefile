# Two commands: `make run` (the main job) and `make test` (everything). The rest is what they are made of.

PYTHON ?= python3
VENVS := .venvs
FRAMEWORKS := torch jax tensorflow mxnet
TORCH := $(VENVS)/torch/bin
VIRTUAL := 3

# MXNet 1.9.1 stops at Python 3.11; what cannot be installed here is named and skipped.
CAN_MXNET := $(shell $(PYTHON) -c 'import sys; print(int(sys.version_info < (3, 12)))')
SKIPPED := $(if $(filter 0,$(CAN_MXNET)),mxnet)
HERE := $(filter-out $(SKIPPED),$(FRAMEWORKS))

.PHONY: run test lint types test-core $(addprefix test-,$(FRAMEWORKS)) skipped bench clean

run: $(VENVS)/torch/.ready
	$(TORCH)/manyhands devices --measure

test: lint types $(addprefix test-,$(HERE)) skipped

lint: $(VENVS)/torch/.ready
	$(TORCH)/ruff check src tests benchmarks requirements
	$(TORCH)/ruff format --check src tests benchmarks requirements

types: $(VENVS)/torch/.ready
	$(TORCH)/mypy

# The core's own tests need no framework: they run on the fake one.
test-core: $(VENVS)/torch/.ready
	$(TORCH)/pytest tests/core

test-torch: test-core

# The contract suite, and what is each framework's own: with the devices that are there, then with virtual ones.
$(addprefix test-,$(FRAMEWORKS)): test-%: $(VENVS)/%/.ready
	$(VENVS)/$*/bin/pytest tests/contract tests/own/$* --framework $*
	MANYHANDS_VIRTUAL_DEVICES=$(VIRTUAL) $(VENVS)/$*/bin/pytest tests/contract tests/own/$* --framework $*

skipped:
	@$(foreach name,$(SKIPPED),echo "skipped: $(name) cannot be installed for $$($(PYTHON) --version)";)

# An environment is made once, and again when its list of versions changes.
$(VENVS)/%/.ready: requirements/%.txt requirements/common.txt requirements/install.py pyproject.toml
	$(PYTHON) requirements/install.py $* $(VENVS)/$*
	touch $@

bench: $(VENVS)/torch/.ready
	$(TORCH)/python benchmarks/placement.py

clean:
	rm -rf $(VENVS) build dist .mypy_cache .ruff_cache .hypothesis
