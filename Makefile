# Two commands: `make run` (the main job) and `make test` (everything). The rest is what they are made of.

PYTHON ?= python3
VENVS := .venvs
FRAMEWORKS := torch jax tensorflow mxnet
TORCH := $(VENVS)/torch/bin
VIRTUAL := 3
CORE := tests/test_structure.py tests/test_words.py tests/test_benchmark_limits.py tests/test_size.py tests/benchmarks \
	tests/schedule tests/forecast tests/tasks tests/parallel tests/placement tests/training/neutral tests/cli tests/audit/neutral tests/lab tests/docs/test_pages.py tests/docs/test_options.py

# MXNet 1.9.1 stops at Python 3.11, TensorFlow 2.21 at 3.13; what cannot be installed here is named and skipped.
SKIPPED := $(shell $(PYTHON) -c 'import sys; v = sys.version_info; \
	print(*["tensorflow"] * (v >= (3, 14)), *["mxnet"] * (v >= (3, 12)))')
HERE := $(filter-out $(SKIPPED),$(FRAMEWORKS))

# Virtual devices are asked for below, where they are meant: not by what happens to be set outside.
export MANYHANDS_VIRTUAL_DEVICES :=

# Hundreds of processes import the same modules: Python compiles each once, also where the variable forbids it outside.
export PYTHONDONTWRITEBYTECODE :=

# Tests write and delete thousands of small files, and each write of a checkpoint waits for the disk: in memory, where
# there is room for them.
ROOM := $(shell df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)
ifeq ($(shell test "$(ROOM)" -gt 4000000 2>/dev/null && echo yes),yes)
export PYTEST_DEBUG_TEMPROOT ?= /dev/shm
endif

# MXNet's threads are its own: OpenBLAS, where it stands below them, would start more inside of each.
%-mxnet: export OPENBLAS_NUM_THREADS := 1
%-tensorflow: export TF_CPP_MIN_LOG_LEVEL := 3

# A test compiles a small program and runs it a few times: fast machine code takes longer to make than it saves.
%-jax: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false

# Suites run side by side, one more than there are cores: tests often wait for other processes.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

# To ask a compiler which vector instructions there are takes longer than to compile the few programs of a test.
test-%: export TORCHINDUCTOR_VEC_ISA_OK := 0

# A thread that waits for others leaves its core to another suite.
test-%: export OMP_WAIT_POLICY := passive
test-training-%: export OMP_NUM_THREADS := 1

# The longest first: none of them is left alone at the end. But the one that may skip all of its tests does not come last.
SUITES := test-gpu test-backends-torch test-training-own-tensorflow test-training-own-jax test-training-own-torch-s-z \
	test-training-contract-jax test-training-own-torch-a-r test-training-contract-tensorflow test-core test-backends-tensorflow \
	test-training-contract-torch test-training-own-mxnet test-backends-jax test-examples test-backends-mxnet test-audit-torch \
	test-training-contract-mxnet test-virtual-torch test-virtual-jax test-virtual-tensorflow test-virtual-mxnet
SUITES_HERE := $(filter-out $(addprefix %-,$(SKIPPED)),$(SUITES))
OF_EACH := $(foreach kind,test test-backends test-virtual test-training test-training-contract test-training-own,\
	$(addprefix $(kind)-,$(FRAMEWORKS)))

.PHONY: run test environments everything test-long lint types $(SUITES) $(OF_EACH) skipped docs pictures examples test-package bench $(addprefix bench-,$(FRAMEWORKS)) clean

run: $(VENVS)/torch/.ready
	$(TORCH)/manyhands train

# The environments first: make comes back to suites that had to wait for one only after all others, and these are the longest.
test:
	@$(MAKE) --no-print-directory --jobs $(JOBS) environments
	@$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync=target everything
	@$(MAKE) --no-print-directory skipped

environments: $(patsubst %,$(VENVS)/%/.ready,$(HERE) docs)

everything: lint types test-package $(SUITES_HERE)

# The site in site/; a warning is an error. Nothing is loaded from the network, here or in a reader's browser.
docs: $(VENVS)/docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENVS)/docs/bin/mkdocs build --strict --quiet

# The pictures of README.md and the site, made again.
pictures: $(VENVS)/torch/.ready
	$(TORCH)/python docs/pictures/make.py

# The wheel, its size and the files in it; the site, built with warnings as errors and looked at in a browser.
test-package: $(VENVS)/docs/.ready
	$(VENVS)/docs/bin/pytest tests/package

lint: $(VENVS)/torch/.ready
	$(TORCH)/ruff check src tests benchmarks requirements examples
	$(TORCH)/ruff format --check src tests benchmarks requirements examples

types: $(VENVS)/torch/.ready
	$(TORCH)/mypy

# The core's own tests need no framework: they run on the fake one.
test-core: $(VENVS)/torch/.ready
	$(TORCH)/pytest $(CORE)

# Where there is no GPU these are imported, and skipped.
test-gpu: $(VENVS)/torch/.ready
	$(TORCH)/pytest tests/gpu

# Guards and the command on PyTorch's virtual devices, each in processes of its own.
test-audit-torch: $(VENVS)/torch/.ready
	$(TORCH)/pytest tests/audit/torch

# The notebooks, run and written with their outputs.
examples: $(VENVS)/torch/.ready
	$(TORCH)/python examples/build.py

test-examples: $(VENVS)/torch/.ready
	$(TORCH)/pytest tests/examples

# The contract suite, and what is each framework's own, with the devices that are there; then on virtual devices what needs several.
test-torch: test-core test-gpu test-audit-torch test-examples
$(addprefix test-,$(FRAMEWORKS)): test-%: test-backends-% test-virtual-%

$(addprefix test-backends-,$(FRAMEWORKS)): test-backends-%: $(VENVS)/%/.ready
	$(VENVS)/$*/bin/pytest tests/contract tests/backends/$* tests/audit/frameworks tests/docs/test_page_examples.py --framework $*

$(addprefix test-virtual-,$(FRAMEWORKS)): test-virtual-%: $(VENVS)/%/.ready
	MANYHANDS_VIRTUAL_DEVICES=$(VIRTUAL) $(VENVS)/$*/bin/pytest tests/contract $(wildcard tests/backends/$*/test_$*.py) --framework $*

# Training makes its devices itself. The contract suite, and what is each framework's own; PyTorch's in two halves.
$(addprefix test-training-,$(FRAMEWORKS)): test-training-%: test-training-contract-% test-training-own-%

$(addprefix test-training-contract-,$(FRAMEWORKS)): test-training-contract-%: $(VENVS)/%/.ready
	$(VENVS)/$*/bin/pytest tests/training/contract --framework $*

test-training-own-torch: test-training-own-torch-a-r test-training-own-torch-s-z

$(addprefix test-training-own-torch-,a-r s-z): test-training-own-torch-%: $(VENVS)/torch/.ready
	$(TORCH)/pytest $$(find tests/training/torch -name 'test_[$*]*.py' | sort)

$(addprefix test-training-own-,jax tensorflow mxnet): test-training-own-%: $(VENVS)/%/.ready
	$(VENVS)/$*/bin/pytest tests/training/$*

# What takes long and shows another case of what shorter tests show.
test-long: $(addprefix $(VENVS)/,$(addsuffix /.ready,$(HERE)))
	$(foreach name,$(HERE),$(VENVS)/$(name)/bin/pytest tests/contract tests/backends/$(name) tests/training/contract --long -m "long or neutral" --framework $(name) &&) true
	$(foreach name,$(filter-out mxnet,$(HERE)),$(VENVS)/$(name)/bin/pytest tests/training/$(name) --long -m long &&) true
	$(TORCH)/pytest tests/examples --long -m long

skipped:
	@$(foreach name,$(SKIPPED),echo "skipped: $(name) cannot be installed for $$($(PYTHON) --version)";)
	@command -v nvidia-smi >/dev/null || echo "skipped: tests/gpu, because there is no GPU"
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
		echo "skipped: pages of the site in a browser, because there is no Chromium (apt-get install chromium)"

# An environment is made once, and again when its list of versions changes.
$(VENVS)/%/.ready: requirements/%.txt requirements/common.txt requirements/install.py pyproject.toml
	$(PYTHON) requirements/install.py $* $(VENVS)/$*
	touch $@

bench: $(addprefix bench-,$(HERE)) skipped

$(addprefix bench-,$(FRAMEWORKS)): bench-%: $(VENVS)/%/.ready
	$(VENVS)/$*/bin/python benchmarks/placement.py $*

clean:
	rm -rf $(VENVS) build dist site .mypy_cache .ruff_cache .hypothesis
