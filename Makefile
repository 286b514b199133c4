# Every target works from a fresh clone: the virtual environment is made on first use.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip --disable-pip-version-check
TORCH := torch==2.13.0
# Another interpreter than the first that is new enough: make PYTHON=python3.14 test
PYTHON ?=
# An index for torch alone, e.g. https://download.pytorch.org/whl/cpu for the small CPU build.
TORCH_INDEX ?=
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers

# One thread per rank: two ranks on two cores otherwise fight over them, and the number of threads decides
# the order of some sums. The oneDNN limit is explained in docs/troubleshooting.md.
export OMP_NUM_THREADS := 1
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

# Programs of `make fuzz`, and the seed of the first.
N ?= 1000
SEED ?= 0

.PHONY: help demo quick test test-all lint fuzz patterns bench bench-overhead bench-window bench-pipeline gpu-test clean

help:
	@echo "make demo      train a small GPT on 2 ranks, stage 3, and compare it with plain torch"
	@echo "make quick     something of every kind of test, in less than two minutes on two cores"
	@echo "make test      lint, strict types, tests, in less than fifteen minutes on two cores"
	@echo "make test-all  the same, thorough tests, more random programs, both whole matrices, 200 kills during saves"
	@echo "make lint      ruff (rules, format, branches), lengths of functions, mypy"
	@echo "make fuzz      random models and programs against plain torch: N=1000 of them, from SEED=0 on"
	@echo "make patterns  run the free-form backward matrix and put its table into docs/matrix.md"
	@echo "make bench     time retrograde and its peers, and fill docs/benchmarks.md and README.md"
	@echo "make bench-overhead  what sharding costs per small parameter, into docs/benchmarks.md, in ten minutes"
	@echo "make bench-window  several backwards a step, reduced each time or once, into docs/benchmarks.md"
	@echo "make bench-pipeline  pipelines beside torch.distributed.pipelining, 120M parameters, into docs/benchmarks.md"
	@echo "make gpu-test  on accelerators: matrix, pipelines, overhead, memory, windows, training beside FSDP2; a report"
	@echo "make clean     remove the virtual environment and everything built"

# The first interpreter that runs and is new enough; a name on PATH alone may be a shim that does not.
define find_python
for p in $(PYTHON) python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; exit 0; fi; \
done; \
echo "Python 3.11 or newer is needed (python3.11 or python3 on PATH)" >&2; exit 1
endef

# Bytecode is made, and kept, of what is used: of all of torch it takes longer than the rest of the installation.
unexport PYTHONDONTWRITEBYTECODE

# torch goes first and alone, so that its version is ours and not what the other requirements resolve to.
$(READY): pyproject.toml
	@python=$$($(find_python)); echo "creating $(VENV) with $$($$python --version)"; $$python -m venv $(VENV)
	@echo "installing $(TORCH)"
	@$(PIP) install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@echo "installing retrograde and its development tools"
	@$(PIP) install --quiet --no-compile "$(TORCH)" --editable ".[dev]"
	@touch $@

# DeepSpeed's build imports the installed torch, hence no isolation. The benchmark runs without it too.
$(PEERS): $(READY)
	@echo "installing DeepSpeed for comparison"
	@if $(PIP) install --quiet --no-build-isolation "$(TORCH)" --editable ".[bench]"; then touch $@; \
	else echo "DeepSpeed could not be installed: the benchmark leaves it out"; fi

demo: $(READY)
	@$(VENV)/bin/torchrun --standalone --nproc-per-node=2 examples/train_gpt.py

lint: $(READY)
	@echo "ruff"; $(PY) -m ruff check .; $(PY) -m ruff format --quiet --check .
	@echo "lengths of functions, exemptions"; $(PY) tools/check_functions.py; $(PY) tools/check_exemptions.py
	@echo "mypy"; $(PY) -m mypy

# Two at a time: much of a test is one rank waiting for another. `quick` is chosen by tests/quick.py.
quick: $(READY)
	@$(PY) -m pytest -n 2 --dist worksteal -m quick

# The test device is compiled first, once: no test's time limit should have to allow for it.
test: lint
	@echo "test device"; $(PY) -m tests.accelerator.build >/dev/null
	@$(PY) -m pytest -n 2 --dist worksteal -m "not thorough"

test-all: test
	@$(PY) -m pytest -n 2 --dist worksteal -m thorough
	@$(PY) -m tests.fuzz --count 1000 --seed 50 --delays 1
	@$(PY) -m tests.order --count 10000
	@$(PY) -m tests.patterns.table
	@$(PY) -m tests.patterns.table --transport collective
	@$(PY) -m tests.accelerator.table
	@$(PY) -m tests.accelerator.table --mode sides
	@for seed in 1 2 3 4 5; do $(PY) -m tests.accelerator.table --mode random --seed $$seed; done
	@$(PY) -m tests.accelerator.table --sums backend
	@$(PY) -m tests.accelerator.table --world 4
	@$(PY) -m tests.accelerator.table --offload parameters --stages 2 3
	@$(PY) -m tests.accelerator.mutations
	@$(PY) -m benchmarks.gpu --tiny --device late --into build/gpu-report.md
	@$(PY) -m benchmarks.many_ranks --world 64
	@$(PY) -m benchmarks.steady
	@$(PY) -m tests.pipeline.test_zero
	@$(PY) -m tests.pipeline.test_shares
	@$(PY) -m tests.checkpoint.kills --count 200
	@$(PY) -m tests.checkpoint.loaded

fuzz: $(READY)
	@$(PY) -m tests.fuzz --count $(N) --seed $(SEED)
	@$(PY) -m tests.fuzz --count $(N) --seed $(SEED) --delays 1

patterns: $(READY)
	@mkdir -p build
	@$(PY) -m tests.patterns.table | tee build/patterns.md
	@$(PY) tools/fill_tables.py patterns build/patterns.md

bench: $(PEERS)
	@for field in fp32 compiled bf16; do $(PY) -m benchmarks.run --field $$field; done
	@$(PY) tools/fill_tables.py benchmarks benchmarks/results

bench-overhead: $(READY)
	@$(PY) -m benchmarks.overhead
	@$(PY) tools/fill_tables.py overhead benchmarks/results/latest-overhead.md

bench-window: $(PEERS)
	@$(PY) -m benchmarks.window
	@$(PY) tools/fill_tables.py window benchmarks/results/latest-window.md

bench-pipeline: $(READY)
	@$(PY) -m benchmarks.pipeline --bubble
	@$(PY) tools/fill_tables.py pipeline benchmarks/results/latest-pipeline.md

gpu-test: $(READY)
	@$(PY) -m benchmarks.gpu

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
