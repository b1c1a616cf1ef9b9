# Two commands do everything on a fresh machine with Python and pip: `make demo` and `make test`.
# The first one creates .venv; PY=/path/to/python uses an existing environment instead.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
READY := $(VENV)/.ready
CODE := src tests bench examples
RIVALS := bench-results/rivals
COMPAT ?= 2.11.0 2.14.1 2.15.0

ifdef PY
  READY :=
else
  PY := $(VENV)/bin/python
endif

# If it is set, each of the many processes of the tests compiles the whole source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test check soak compat bench docs clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS=... is passed on: make test ARGS='-k reshard -x', make bench ARGS='--gb 0.2 --rounds 1'"

demo: $(READY) ## Train on 4 ranks, kill the job, resume on 2; every tensor and loss is checked (about a minute)
	$(PY) examples/demo/demo.py $(ARGS)

test: check ## Everything CI runs: the checks below, then every test
	$(PY) -m pytest -p tests.slow_first --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	  --ignore tests/test_architecture.py $(ARGS)

check: $(READY) ## Lint, format, types, and the one-direction rule of the folders
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_architecture.py

soak: $(READY) ## Save, prune, kill and restart jobs for half an hour, and check what is on the disk (ARGS='--minutes 5')
	$(PY) -m tests.soak $(ARGS)

compat: $(addprefix compat-,$(COMPAT)) ## Test the drop-in, the engine and state on other versions of torch, each in its own .compat/ environment

compat-%:
	test -x .compat/$*/bin/python || $(PYTHON) -m venv .compat/$*
	.compat/$*/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.compat/$*/bin/python -m pip install --quiet torch==$*
	.compat/$*/bin/python -m pip install --quiet --editable . --group dev
	.compat/$*/bin/python -m pytest -q --numprocesses 3 --dist loadfile tests/dcp tests/protocol tests/golden tests/engine \
	  tests/state tests/objects tests/toolkit tests/training $(ARGS)

docs: $(READY) ## Build the documentation into site/
	$(PY) -m mkdocs build --strict

bench: $(READY) $(RIVALS) ## Measure against the raw disk, torch DCP, torch.save, safetensors, obstore, boto3 and zipnn
	BENCH_S3FS=$(RIVALS)/s3fs $(PY) bench/run.py $(ARGS)
	$(PY) bench/codecs.py --zipnn $(RIVALS)/zipnn

# Each in a folder of its own, as they want other versions of things than ours do. What cannot be had is left out.
$(RIVALS): | $(READY)
	mkdir -p $@
	-$(PY) -m pip install --quiet --target $@/s3fs s3fs
	-$(PY) -m pip install --quiet --no-deps --target $@/zipnn zipnn

venv: $(READY) ## Make .venv with everything in it

# Torch goes first and alone, by version: where a CPU build of it is at hand pip takes that, and the second install
# then finds torch satisfied and pulls no CUDA packages. The dev tools are a dependency group, which pip knows from 25.1.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --editable . --group dev
	@$(VENV)/bin/python -m pip list --format freeze | grep -i '^nvidia-' >/dev/null \
	  && echo "note: this torch came with CUDA packages. The small CPU build is enough here:" \
	  && echo "  make clean venv TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'" \
	  || $(VENV)/bin/python -c "import torch; print('torch', torch.__version__, '- no CUDA packages installed')"
	@touch $@

clean: ## Remove .venv, caches and benchmark results
	rm -rf $(VENV) build dist site bench-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .compat
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
