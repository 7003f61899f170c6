# make demo / make test set everything up and run; a second run is quick.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test bench soak lint clean setup gpu-test gpu-bench

setup: $(VENV)/.built

# Python packages and system packages: again when what they are changes
$(VENV)/.ready: pyproject.toml tools/setup.sh
	@tools/setup.sh
	@touch $@

# extensions: again when a source changes
$(VENV)/.built: $(VENV)/.ready setup.py $(wildcard pyx/*.pyx pyx/*.pxd pyx/*.pxi pyx/*.h)
	@echo "building the extensions"
	@$(PY) setup.py -q build_ext --inplace -j2 > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@grep "left out" $(VENV)/build.log || true
	@touch $@

demo: setup
	@$(PY) -m fabricx demo $(ARGS)

# the kernels' tests in a process of their own: Triton decides on import whether it interprets
test: setup
	@$(PY) -m pytest --ignore tests/gpu --ignore tests/kernels $(ARGS)
ifeq ($(strip $(ARGS)),)
	@$(PY) -m pytest tests/kernels
	@echo "not run here: tests/gpu, which need a GPU (make gpu-test)"
endif

bench: setup
	@$(PY) -m fabricx bench p2p $(ARGS)

# what would take too long for every change: a million seeds, long stress
soak: setup
	@FABRICX_SOAK=1 FABRICX_SEEDS=$${FABRICX_SEEDS:-1000000} $(PY) -m pytest --timeout 100000 tests/engine/test_chaos.py tests/test_lockfree.py $(ARGS)

# on a machine with a GPU, in the Python environment that is there (torch, triton, numba, pytest); nothing is downloaded
GPU_PY ?= python3
gpu-test:
	@$(GPU_PY) -m pytest tests/gpu -q -p no:cacheprovider $(ARGS)

gpu-bench:
	@mkdir -p results && $(GPU_PY) -m fabricx.kernels.bench --json results/kernels.json $(ARGS)

lint: setup
	@$(PY) -m pip install -q ruff && $(PY) -m ruff check fabricx tests setup.py

clean:
	rm -rf $(VENV) build dist *.egg-info fabricx/*.so pyx/*.c results
