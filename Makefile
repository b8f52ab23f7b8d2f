# Every target below is complete on a machine with Python and make: it makes its own environment first.
#
#   make demo           train a ResNet plain and with stochastic depth, side by side, and export it
#   make bench          measure steps, memory and tracing (about an hour, on an idle machine)
#   make test           the tests on the newest TensorFlow with its Keras 3     (leg keras3)
#   make test-keras2    the tests on TensorFlow 2.15 with tensorflow-addons     (leg keras2)
#   make test-legacy    the tests on the newest TensorFlow with tf_keras        (leg legacy)
#   make test-all       the three of them
#   make zoo            every network of keras.applications wrapped and run, on both: most of an hour
#   make lint           ruff check and ruff format --check
#   make clean          remove the environments and caches
#
# To change: PYTHON, PYTHON_KERAS2, TENSORFLOW, TENSORFLOW_KERAS2, PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS. Run
# `make clean` first when an environment of another TensorFlow is already there.

.DEFAULT_GOAL := help
.PHONY: help demo bench test test-keras2 test-legacy test-all zoo lint clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
VENV_KERAS2 := .venv-keras2

# On Linux x86_64 a build without GPU code is published, a fraction of the size.
BUILD_OF_TENSORFLOW := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' '-')),tensorflow-cpu,tensorflow)
TENSORFLOW ?= $(BUILD_OF_TENSORFLOW)
TENSORFLOW_KERAS2 ?= $(BUILD_OF_TENSORFLOW)>=2.15,<2.16
ADDONS := tensorflow-addons==0.23.0
# Newer ones cannot be imported beside the ml_dtypes of TensorFlow 2.15, and do not say so.
ONNX_KERAS2 := onnx<1.19
HUB := keras-hub==0.32.0
HUB_NEEDS := absl-py kagglehub kagglesdk==0.1.28 packaging regex rich sentencepiece tokenizers

PYTEST_ARGS ?= -n 2 tests
DEMO_ARGS ?=
BENCH_ARGS ?=

# A command of the right name may still not run (a version manager's placeholder) or lack the module
# that fills a new environment with pip (some distributions package it apart), so each is tried.
MODERN := import sys, ensurepip; sys.exit(sys.version_info < (3, 11))
KERAS2 := import sys, ensurepip; sys.exit(not (3, 9) <= sys.version_info < (3, 12))
first_that = $(shell for python in $(2); do $$python -c '$(1)' >/dev/null 2>&1 && echo $$python && break; done)

PYTHON ?= $(call first_that,$(MODERN),python3.12 python3.11 python3.13 python3 python)
PYTHON_KERAS2 ?= $(call first_that,$(KERAS2),python3.11 python3.10 python3.9 python3 python)
need_modern = $(if $(PYTHON),,$(error this needs Python 3.11 or newer with its venv module, and none was found. Install one, or name it: make PYTHON=/path/to/python3.11))
need_keras2 = $(if $(PYTHON_KERAS2),,$(error the keras2 leg (TensorFlow 2.15 with tensorflow-addons) needs Python 3.9, 3.10 or 3.11 with its venv module, and none was found. Install one, or name it: make PYTHON_KERAS2=/path/to/python3.11))

# -qq leaves errors alone.
PIP_INSTALL := -m pip --disable-pip-version-check install -qq

export TF_CPP_MIN_LOG_LEVEL := 2
export KERAS_BACKEND := tensorflow

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(VENV)/demo.stamp
	$(VENV)/bin/python tutorials/digits_resnet.py $(DEMO_ARGS)

bench: $(VENV)/bench.stamp
	$(VENV)/bin/python benchmarks/run.py --json bench-output/results.json --png bench-output/results.png $(BENCH_ARGS)

test: $(VENV)/test.stamp
	TFSD_LEG=keras3 TF_USE_LEGACY_KERAS=0 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-keras2: $(VENV_KERAS2)/test.stamp
	TFSD_LEG=keras2 TF_USE_LEGACY_KERAS=0 $(VENV_KERAS2)/bin/python -m pytest $(PYTEST_ARGS)

test-legacy: $(VENV)/test.stamp
	TFSD_LEG=legacy TF_USE_LEGACY_KERAS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-all: LEGS := test test-keras2 test-legacy
zoo: LEGS := test test-keras2
# One process: the largest networks take several GB.
zoo: export PYTEST_ARGS := tests/test_zoo.py
zoo: export TFSD_ZOO := all

# A leg that fails does not keep the next from running; any failure is a failure of the whole.
test-all zoo:
	@failed=; \
	for leg in $(LEGS); do \
	  echo "== make $$leg"; \
	  $(MAKE) --no-print-directory $$leg || failed="$$failed $$leg"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi; \
	echo "every leg passed: $(LEGS)"

lint: $(VENV)/lint.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) $(VENV_KERAS2) build *.egg-info .pytest_cache .ruff_cache .hypothesis demo-output bench-output
	find tfa_stochastic_depth tests tutorials benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- environments: one stamp file for each set of things installed -------------------------------

$(VENV)/made.stamp:
	$(need_modern)@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/tensorflow.stamp: $(VENV)/made.stamp pyproject.toml
	@echo "installing $(TENSORFLOW) into $(VENV)"
	@$(VENV)/bin/python $(PIP_INSTALL) --editable . '$(TENSORFLOW)'
	@touch $@

$(VENV)/demo.stamp: $(VENV)/tensorflow.stamp
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/bench.stamp: $(VENV)/tensorflow.stamp
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[bench]'
	@touch $@

# Both legs of this environment meet models of the other's Keras, so both need tf_keras. It must be
# of TensorFlow's own minor version. The declared dependencies of tf_keras and keras-hub include the
# large build of TensorFlow.
$(VENV)/test.stamp: $(VENV)/tensorflow.stamp
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[test]'
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps "tf_keras==$$($(VENV)/bin/python -c \
	  'import tensorflow as tf; print(".".join(tf.__version__.split(".")[:2]))' 2>/dev/null).*"
	@$(VENV)/bin/python $(PIP_INSTALL) $(HUB_NEEDS)
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(HUB)
	@touch $@

$(VENV)/lint.stamp: $(VENV)/made.stamp pyproject.toml
	@$(VENV)/bin/python $(PIP_INSTALL) --editable '.[lint]'
	@touch $@

$(VENV_KERAS2)/test.stamp: pyproject.toml
	$(need_keras2)@echo "making $(VENV_KERAS2) with $(PYTHON_KERAS2), installing $(TENSORFLOW_KERAS2) and $(ADDONS)"
	@$(PYTHON_KERAS2) -m venv --clear $(VENV_KERAS2)
	@$(VENV_KERAS2)/bin/python $(PIP_INSTALL) --editable '.[test]' '$(TENSORFLOW_KERAS2)' '$(ADDONS)' '$(ONNX_KERAS2)'
	@touch $@
