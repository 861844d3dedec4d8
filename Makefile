# Everything runs in a virtual environment of its own, made from nothing but python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Without setuptools' warning of what an editable installation is.
QUIETLY := PYTHONWARNINGS=ignore::UserWarning

# Tests start hundreds of interpreters. Each would compile the package again if none were to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

# The GPU targets use an environment of their own with one of the extras cuda13 and cuda12, or an interpreter
# that has everything: make test-gpu GPU_PYTHON=python3
CUDA ?= cuda13
GPU_VENV := .venv-$(CUDA)
GPU_PYTHON ?= $(GPU_VENV)/bin/python
GPU_READY := $(if $(filter $(GPU_VENV)/bin/python,$(GPU_PYTHON)),$(GPU_VENV)/.ready)

# What builds plans for a GPU without one: cuDNN's packages, and a library in the place of the driver's.
CUDNN ?= 9.28
SUPPORT_VENV := .venv-support-$(CUDNN)

.PHONY: help test test-all suite beside-suite check site wheel demo bench support-packages support-venv test-support test-gpu bench-gpu fmt coverage clean
help:
	@echo "make demo      photographs, gradients, a model, and crashes that nobody notices: writes demo.png"
	@echo "make test      lint, types, layers, tests, and a wheel that installs and imports"
	@echo "make test-all  the same with all parameters and more random examples (tests/whole.py): some minutes longer"
	@echo "make site      the documentation as a site, in build/site, with a search; any warning is an error"
	@echo "make bench     latencies and throughput, printed and written to benchmarks/results/"
	@echo "make test-support"
	@echo "               builds what is claimed to run on a GPU, with cuDNN but without a GPU: installs 2 GB;"
	@echo "               CUDNN=9.19 for another version, TEST_ALL=1 for all graphs and kernels: several times as long"
	@echo "make test-gpu  the tests that need an NVIDIA GPU; skipped, with the reason, where there is none"
	@echo "make bench-gpu the measurements on a GPU, one by one, written to benchmarks/results/; needs PyTorch"
	@echo "               both: CUDA=cuda12 for a driver of CUDA 12, GPU_PYTHON=python3 for an interpreter that"
	@echo "               has the packages already; else they are installed here, some gigabytes"
	@echo "make fmt       format the code"
	@echo "make coverage  the tests once more, with a coverage report"
	@echo "make clean     remove the environment and what was built"

# A stamp for what is installed: remade when the project's dependencies change.
$(VENV)/.demo: pyproject.toml
	@echo "installing this package, and the packages that it and its demo need, in $(VENV): about a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(QUIETLY) $(BIN)/python -m pip install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --group test --group check
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "installing what builds the site"
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

# The checks, the site and the wheel take one processor, one after the other, while the tests leave some of another.
# The packages that tests import come first. The wheel is installed into an environment of its own.
# A part beside the tests that fails is named once more at the end, below the output of the tests.
test: $(VENV)/.dev $(VENV)/.docs
	@mkdir -p build && rm -f build/failed
	$(MAKE) --no-print-directory --jobs 2 suite beside-suite || \
	  { test ! -f build/failed || echo "failed beside the tests: make $$(cat build/failed)"; false; }

beside-suite:
	@mkdir -p build
	@for part in check site wheel; do \
	  $(MAKE) --no-print-directory $$part || { echo $$part > build/failed; exit 1; }; \
	done

test-all: export TEST_ALL := 1
test-all: test

# Without a GPU, where there is one: on purpose, so that nothing warns of it.
suite: $(VENV)/.dev
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m "not gpu and not support" --numprocesses 4 --dist worksteal --timeout 1200

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy cudnn_actor tests examples benchmarks pytest_cudnn_actor.py
	$(BIN)/lint-imports --no-cache

# All pages each time: names of the reference are counted while they are read.
site: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -b html -c website . build/site

# The wheel, in an empty environment, with nothing on the path but itself and what it declares. Another environment's
# pip installs it, and what is run of it compiles only what it imports: a pip of its own takes five seconds of a
# processor, and compiling all that is installed takes another five.
wheel: $(VENV)/.dev
	rm -rf build/wheel build/lib build/bdist.* && mkdir -p build/wheel
	$(BIN)/python -m build --outdir build/wheel . > build/wheel/log 2>&1 || (cat build/wheel/log; false)
	$(PYTHON) -m venv --without-pip build/wheel/venv
	$(BIN)/python -m pip --python build/wheel/venv/bin/python install --quiet --no-compile build/wheel/*.whl
	cd build/wheel && venv/bin/python -I -m cudnn_actor.cli doctor --device cpu

demo: $(VENV)/.demo
	$(BIN)/cudnn-actor demo --out demo.png

bench: $(VENV)/.demo
	$(BIN)/cudnn-actor bench --out benchmarks/results

# The frontend's own requirements are compilers that only its engines written in Python use. The packages are a
# step of their own, which writes nothing but the environment: it can be made while tests run.
$(SUPPORT_VENV)/.packages: pyproject.toml
	$(PYTHON) -m venv $(SUPPORT_VENV)
	$(SUPPORT_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(SUPPORT_VENV)/bin/python -m pip install --quiet --group support
	$(SUPPORT_VENV)/bin/python -m pip install --quiet "nvidia-cudnn-cu13==$(CUDNN).*"
	$(SUPPORT_VENV)/bin/python -m pip install --quiet --no-deps "nvidia-cudnn-frontend==1.32.*"
	@touch $@

$(SUPPORT_VENV)/.ready: $(SUPPORT_VENV)/.packages tests/support/stub_libcuda.c
	$(QUIETLY) $(SUPPORT_VENV)/bin/python -m pip install --quiet --editable .
	mkdir -p $(SUPPORT_VENV)/stub
	gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o $(SUPPORT_VENV)/stub/libcuda.so.1 tests/support/stub_libcuda.c
	@touch $@

support-packages: $(SUPPORT_VENV)/.packages

support-venv: $(SUPPORT_VENV)/.ready

test-support: $(SUPPORT_VENV)/.ready
	LD_LIBRARY_PATH=$(CURDIR)/$(SUPPORT_VENV)/stub \
	  $(SUPPORT_VENV)/bin/python -m pytest -m support --numprocesses 2 --dist worksteal --timeout 1200 tests/support

$(GPU_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(QUIETLY) $(GPU_VENV)/bin/python -m pip install --quiet --editable ".[demo,$(CUDA)]" --group test
	@touch $@

test-gpu: $(GPU_READY)
	TEST_ALL=1 $(GPU_PYTHON) -m pytest -m gpu --timeout 1200 tests

bench-gpu: $(GPU_READY)
	@failed=; for part in gpu networks operations movement building "models --device cuda:0" depthwise epilogues \
	    library_faults; do \
	  echo "benchmarks.$$part"; $(GPU_PYTHON) -m benchmarks.$$part --out benchmarks/results || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; false; }

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

coverage: $(VENV)/.dev
	$(BIN)/coverage run -m pytest -q
	$(BIN)/coverage report

clean:
	rm -rf $(VENV) .venv-support* .venv-cuda13 .venv-cuda12 build dist *.egg-info
