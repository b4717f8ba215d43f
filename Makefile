# SPDX-License-Identifier: BSD-3-Clause
# Set-up, build, test and demonstration of shiftverbs. `make help` lists the targets.

# Debian's pyverbs belongs to the system interpreter; `python3` on PATH may be another one.
SYSTEM_PYTHON := /usr/bin/python3
VENV          := .venv
PYTHON        := $(VENV)/bin/python
PYTEST_ARGS   ?=

APT_PACKAGES := gcc libc6-dev util-linux \
    python3 python3-dev python3-venv python3-pyverbs \
    libibverbs-dev ibverbs-utils perftest iproute2 openssl curl \
    clang libclang-rt-dev spin valgrind

C_SOURCES = $(shell git ls-files --cached --others --exclude-standard -- '*.c' '*.h')
CYTHON_SOURCES = $(shell git ls-files --cached --others --exclude-standard -- '*.pyx' '*.pxd' '*.pxi')
BASH_SOURCES = $(shell git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run)

.PHONY: help setup build demo bench torch others train fabric straggler test simulate conformance yardstick compat test-san test-debian test-rxe soak-rxe fuzz soak docs lint wheel clean distclean

help:
	@echo "setup   Debian packages (as root or with sudo) and the virtual environment $(VENV)"
	@echo "build   compile in place (incremental)"
	@echo "demo    set-up, build, and the failover demonstration"
	@echo "bench   pyverbs and shiftverbs side by side: table, build/bench/*.png and .svg   (BENCH_ARGS=--quick)"
	@echo "train   a GPT through five failures: table, build/train/training.png and .svg   (TRAIN_ARGS='--ranks 4')"
	@echo "fabric  congestion and flow control on rails: tables, build/fabric/*.png and .svg   (FABRIC_ARGS=--no-processes)"
	@echo "straggler  slow paths in virtual time: tables   (STRAGGLER_ARGS='--seeds 2 --minutes 10')"
	@echo "test    set-up, build, and all tests            (PYTEST_ARGS='-k name')"
	@echo "conformance  rdma-core's own pyverbs tests on the software RNIC, with pyverbs and with shiftverbs: one table"
	@echo "yardstick  torch's own tests of a process group, with gloo and with shift: one table (not in CI)"
	@echo "torch   Debian's torch (650 MB): without it the tests of shiftverbs.torch are skipped"
	@echo "others  UCX, Open MPI, libfabric, Gloo, Mooncake (some 200 MB): without them the tests of tests/others are skipped"
	@echo "compat  core, mirror, failover and rdma-core's tests with pyverbs 59, built from PyPI's sources (not in CI)"
	@echo "test-san  the same with our C under AddressSanitizer and UBSan"
	@echo "test-rxe  failover, rdma-core's tests, interoperation on the kernel's soft-RoCE, in guests (soak-rxe: all of it)"
	@echo "test-debian  demo and tests in a bare Debian of another release (root): make test-debian RELEASE=trixie"
	@echo "fuzz    search for input from outside that breaks us: make fuzz SECONDS=60 (for each target)"
	@echo "simulate  random schedules in virtual time: make simulate SCHEDULES=100000 [SEED=0] [COMPILED=1]; a job: HOSTS=64"
	@echo "soak    random faults on real processes: make soak MINUTES=30 [SEED=…]"
	@echo "docs    the documentation as a site, build/site/index.html; warnings are errors"
	@echo "lint    ruff (rules and format), mypy, import-linter and the same for cimports, cython-lint, clang-format"
	@echo "wheel   wheel and source distribution in dist/"
	@echo "clean   remove what build made; distclean removes $(VENV) too"

setup: $(VENV)/stamp-python

$(VENV)/stamp-apt: Makefile tools/apt_packages.sh
	@mkdir -p $(VENV)
	@tools/apt_packages.sh $(APT_PACKAGES)
	@touch $@

# One at a time: several `make` runs may meet in a fresh checkout.
$(VENV)/stamp-python: $(VENV)/stamp-apt pyproject.toml tools/requirements.py tools/make_venv.sh
	@tools/make_venv.sh $(SYSTEM_PYTHON) $(VENV)
	@touch $@

build: setup
	@tools/build_in_place.sh $(VENV) build/dev

demo: build
	$(VENV)/bin/shiftverbs demo

# What it measures, and how to read it: docs/performance.md.
bench: build
	$(PYTHON) -m benchmarks $(BENCH_ARGS)

# Debian's torch, for the tests and programs that need it: not part of the set-up, it is 650 MB.
torch: $(VENV)/stamp-torch

# Slow paths in virtual time, the tables of docs/stragglers.md; STRAGGLER_ARGS='--fault-seeds 1 --seeds 2' is quicker.
straggler: build
	$(PYTHON) -m benchmarks.stragglers $(STRAGGLER_ARGS)

# Fig. 8 of the SHIFT paper, small enough for two cores: docs/training.md.
train: build $(VENV)/stamp-torch
	$(PYTHON) -m benchmarks.train $(TRAIN_ARGS)

# DCQCN, PFC and neither, in virtual time and between processes, some four minutes: docs/fabric.md.
fabric: build
	nice $(PYTHON) -m benchmarks.fabric $(FABRIC_ARGS)

# Other people's programs that use verbs, for the tests that run them on the software NIC: Debian's, and Mooncake's wheel.
others: $(VENV)/stamp-others

$(VENV)/stamp-others: tools/apt_packages.sh $(VENV)/stamp-python
	@tools/apt_packages.sh ucx-utils openmpi-bin python3-mpi4py libfabric-bin libgloo-dev g++
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/others mooncake-transfer-engine-non-cuda
	@touch $@

$(VENV)/stamp-torch: tools/apt_packages.sh
	@mkdir -p $(VENV)
	@tools/apt_packages.sh python3-torch libopenblas0-pthread
	@touch $@

test: build
	$(PYTHON) -m pytest $(PYTEST_ARGS)

# Exit status 0: no test fails, none differs, and what passes on the kernel's soft-RoCE passes here.
conformance: build
	$(PYTHON) tests/conformance/compare.py

# Some ten minutes. torch's test cases need expecttest, which Debian does not have.
yardstick: build $(VENV)/stamp-torch
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade --target build/yardstick/packages expecttest
	PYTHONPATH="$(CURDIR)/build/yardstick/packages" $(PYTHON) tests/torch/yardstick.py

# With pyverbs 59 from PyPI, built in $XDG_CACHE_HOME/shiftverbs: some minutes the first time.
compat: build
	tools/compat.sh $(VENV) $(PYTEST_ARGS)

# The same tests with our C under AddressSanitizer and UBSan, in a copy of the package. Leaks are not looked for: the
# interpreter leaves much behind on purpose.
test-san: setup
	@tools/build_in_place.sh $(VENV) build/san address,undefined
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	    PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/build/san/tree" $(VENV)/bin/pytest -p no:cacheprovider $(PYTEST_ARGS)

# In guests under QEMU with Debian's stock kernel, kept in $XDG_CACHE_HOME/shiftverbs; skipped loudly where there is none.
# A busy machine: RXE_TIME_SCALE=3 make test-rxe. Only some: make test-rxe RXE_GROUPS='interop demo'.
test-rxe: build
	$(PYTHON) tools/rxe/run.py $(RXE_GROUPS)

# On another release of Debian, in a chroot made by debootstrap (root), kept in $XDG_CACHE_HOME/shiftverbs: one run of
# demo and tests as a user there has them. make test-debian RELEASE=trixie DEBIAN_MAKE=demo; REFRESH=1: from scratch.
RELEASE     ?= trixie
DEBIAN_MAKE ?= demo test
test-debian:
	PYTEST_ARGS='$(PYTEST_ARGS)' tools/debian.sh $(RELEASE) make $(DEBIAN_MAKE)

soak-rxe: build
	$(PYTHON) tools/rxe/run.py --soak $(RXE_GROUPS)

# The production code in virtual time, random schedules on all cores; a failure prints its seed. With HOSTS=64 a job on so
# many hosts instead (half a minute of CPU): tables.
SCHEDULES ?= 10000
simulate: build
ifdef HOSTS
	$(PYTHON) tests/simulator/many_hosts.py $(HOSTS) $(or $(SEED),1)
else
	$(PYTHON) tests/simulator/campaign.py $(if $(COMPILED),--compiled) $(or $(SEED),0) $$(($(or $(SEED),0) + $(SCHEDULES))) $$(nproc)
endif

# What fails is kept in build/fuzz; inputs worth keeping are copied to tests/fuzz/corpus by hand.
SECONDS ?= 60
fuzz: build
	$(PYTHON) tests/fuzz/fuzzing.py $(SECONDS)

# Real processes, real etcd, the software RNIC; a failure prints its seed, its steps and how to repeat it.
MINUTES ?= 5
soak: build
	$(PYTHON) tests/soak/campaign.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The pages quote what the commands print, so those must run. Not --quiet, with which mkdocs counts no warnings. What
# mkdocs-material says of its own future is no warning about our pages.
docs: export NO_MKDOCS_2_WARNING := 1
docs: build
	$(PYTHON) -m mkdocs build --strict

# cython-lint calls pycodestyle by name.
lint: export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(PYTHON) tools/check_cimports.py
	@if [ -n "$(CYTHON_SOURCES)" ]; then set -x; $(VENV)/bin/cython-lint $(CYTHON_SOURCES); fi
	@if [ -n "$(C_SOURCES)" ]; then set -x; $(VENV)/bin/clang-format --dry-run --Werror $(C_SOURCES); fi
	@for script in $(BASH_SOURCES); do bash -n $$script || exit 1; done

wheel: setup
	$(PYTHON) -m build --no-isolation --outdir dist .

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find shiftverbs -name '*.so' -delete
	find shiftverbs tests benchmarks tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
