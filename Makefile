# SPDX-License-Identifier: Apache-2.0
# Sets everything up and runs it. `make help` lists the goals.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= $(shell nproc)

build := build/dev
# The architecture of the GPU that is here, else one, so that CUDA sources are at least compiled.
CUDA_ARCHITECTURE ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .),90)
# Warnings are errors with the compiler that CI has; a newer one's new warnings must not stop a user.
WARNINGS_AS_ERRORS ?= $(if $(filter 12,$(shell $(or $(CXX),c++) -dumpversion 2>/dev/null)),ON,OFF)

# The environment's pip and nothing of the caller's: no prompt, no notice of a newer pip.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

sources := $(shell find CMakeLists.txt pyproject.toml cmake include src python -type f -not -path '*/__pycache__/*')
cmake_options := -DCMAKE_BUILD_TYPE=Release -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DSTEADYNORM_TORCH=ON \
  -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURE) -DSTEADYNORM_WARNINGS_AS_ERRORS=$(WARNINGS_AS_ERRORS)

# With VENV=system the interpreter is used as it is: nothing is downloaded, and the package goes to build/site.
ifeq ($(VENV),system)
python := $(PYTHON)
export PYTHONPATH := $(CURDIR)/build/site$(if $(PYTHONPATH),:$(PYTHONPATH))
package := build/site/.stamp
base := $(package)
test_tools :=
demo_tools :=
else
python := $(VENV)/bin/python
package := $(VENV)/.stamp-package
base := $(VENV)/.stamp-base
test_tools := $(VENV)/.stamp-test
demo_tools := $(VENV)/.stamp-demo
endif

.PHONY: help demo test lint format sanitize test-gpu bench report build clean preflight-%
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make demo       train a 3-D U-Net on a real brain volume, stock GroupNorm beside ours; report in out/demo'
	@echo 'make test       lint, C++ tests, Python tests; last line: N passed, N failed, N skipped'
	@echo 'make lint       clang-format, clang-tidy, ruff and the rules of the tree'
	@echo 'make format     clang-format and ruff, in place'
	@echo 'make sanitize   C++ tests under the address, undefined-behaviour and thread sanitizers'
	@echo 'make test-gpu   the tests that need a CUDA device'
	@echo 'make bench      benchmarks on this device'
	@echo 'make report     docs/performance.md, its pictures and README'"'"'s table, from bench/results; no GPU needed'
	@echo 'make build      the virtual environment and the package in it, nothing run'
	@echo 'make clean      remove build/ and out/ (the virtual environment stays: rm -r .venv)'
	@echo
	@echo 'ARGS="..."      passed to the program: make demo ARGS="--steps 50"'
	@echo 'PYTHON=python3  the interpreter to make the virtual environment with'
	@echo 'VENV=.venv      where that environment is. VENV=system: use PYTHON as it is; it must have torch (and pytest'
	@echo '                for tests); nothing is downloaded, and linters that it lacks are counted as skipped'

# --- Set-up ----------------------------------------------------------------------------------------------------------
preflight-%:
	@tools/preflight.sh $* '$(PYTHON)' '$(VENV)'

$(VENV)/.stamp-base: requirements/base.txt
	@echo 'Setting up $(VENV): PyTorch is a download of about 3 GB, once, nothing printed meanwhile'
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet -r requirements/base.txt
	@touch $@

$(VENV)/.stamp-test: requirements/test.txt $(base)
	$(python) -m pip install --quiet -r requirements/test.txt
	@touch $@

$(VENV)/.stamp-demo: requirements/demo.txt requirements/demo-data.txt $(base)
	$(python) -m pip install --quiet -r requirements/demo.txt
	$(python) -m pip install --quiet --no-deps -r requirements/demo-data.txt
	@touch $@

# pip builds in the tree that the C++ tests use too, so nothing is compiled twice.
$(VENV)/.stamp-package: $(sources) $(base)
	@echo 'Building steadynorm in $(build): up to five minutes on two cores with the GPU kernels, nothing printed meanwhile'
	SKBUILD_BUILD_DIR=$(build) SKBUILD_CMAKE_ARGS='$(subst $() ,;,$(strip $(cmake_options)))' \
	  $(python) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

build/site/.stamp: $(sources)
	cmake -S . -B $(build) -G Ninja -DPython_EXECUTABLE=$(shell command -v $(PYTHON)) -DSTEADYNORM_TESTS=OFF $(cmake_options)
	cmake --build $(build) --target steadynorm_torch
	cmake --install $(build) --component python --prefix build/site
	@touch $@

build: preflight-build $(package)

# --- Goals -----------------------------------------------------------------------------------------------------------
demo: preflight-demo $(package) $(demo_tools)
	@$(python) examples/brain_unet/train.py $(ARGS)

# A build that fails is a failed test too, and says so in the last line.
test: preflight-test
	@$(MAKE) --no-print-directory $(package) $(test_tools) $(demo_tools) || { echo '0 passed, 1 failed, 0 skipped'; exit 1; }
	@$(python) tests/run.py --build $(build) --jobs $(JOBS) $(if $(filter system,$(VENV)),--allow-missing) $(ARGS)

lint: preflight-lint $(test_tools)
	@$(python) tests/lint/lint.py --jobs $(JOBS) $(ARGS)

format: preflight-format $(test_tools)
	@$(python) tests/lint/lint.py --fix

sanitize: preflight-sanitize
	@for preset in sanitize sanitize-threads; do \
	  cmake --preset $$preset && cmake --build --preset $$preset && ctest --preset $$preset $(ARGS) || exit 1; \
	done

test-gpu: preflight-test-gpu $(package) $(test_tools)
	@cmake -S . -B $(build) -DSTEADYNORM_TESTS=ON >/dev/null
	@cmake --build $(build) --target cuda_test
	@$(python) tests/cuda/run_gpu.py $(ARGS)

bench: preflight-bench $(package)
	@$(python) -m bench $(ARGS)

# Reads files and draws: needs no package, so that a page can be made again where nothing can be built.
report: preflight-report $(demo_tools)
	@$(python) -m bench.page $(ARGS)

clean:
	rm -rf build out
	rm -f $(VENV)/.stamp-package
