# syntax=docker/dockerfile:1.7
#
# Tetris Serve for CPUs (target `cpu`) and NVIDIA GPUs (target `gpu`):
#
#   docker build --target cpu -t tetris-serve:cpu \
#       --build-arg PYTHON_DIGEST=sha256:... --build-arg REVISION="$(git rev-parse HEAD)" .
#
# The base is pinned by digest and has no default, so that nobody builds from a moving
# tag unawares: the build stops and names what is missing. The digest is what
# `docker buildx imagetools inspect python:3.12-slim-bookworm` shows.
#
# The image runs as a user without a name or a password, and with a read-only root file
# system if /tmp, /home/tetris and /var/cache/tetris are writable:
#
#   docker run --read-only --tmpfs /tmp:exec --tmpfs /home/tetris --shm-size 2g \
#       -v models:/var/cache/tetris -p 8000:8000 tetris-serve:cpu
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG PYTHON_DIGEST=give-it-with-build-arg-PYTHON_DIGEST

# ---------------------------------------------------------------------------- install
FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS install
ENV PYTHONDONTWRITEBYTECODE=1 \
    TETRIS_VENV=/opt/venv \
    UV_LINK_MODE=copy
WORKDIR /opt/tetris-serve
# Where the cache is mounted, nothing can be linked from it. On a read-only root, modules
# that are not compiled here would be compiled at every start; a few are for other Pythons.
#
# The packages themselves come later: the editable install only needs to know where they
# will be, and gigabytes of dependencies stay one layer when only our code changes.
COPY pyproject.toml README.md LICENSE ./
COPY .ci/bootstrap.py .ci/
COPY configs/requirements/ configs/requirements/
RUN for package in policies serving; do \
        mkdir "$package" && touch "$package/__init__.py" || exit 1; \
    done

FROM install AS install-cpu
RUN --mount=type=cache,target=/root/.cache \
    TETRIS_DEVICE=cpu python -I .ci/bootstrap.py \
    && { python -m compileall -q -j 0 /opt/venv/lib >/dev/null || true; }

FROM install AS install-gpu
RUN --mount=type=cache,target=/root/.cache \
    TETRIS_DEVICE=gpu python -I .ci/bootstrap.py \
    && { python -m compileall -q -j 0 /opt/venv/lib >/dev/null || true; }

# -------------------------------------------------------------------------------- run
FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST} AS run
ARG PYTHON_IMAGE
ARG PYTHON_DIGEST
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tetris Serve" \
      org.opencontainers.image.description="LLM serving on Ray Serve and vLLM with batch-wide selection of draft tokens" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.base.digest="${PYTHON_DIGEST}"
# libnuma1 is linked by vLLM's CPU kernels; tcmalloc is preloaded where it is found;
# tini passes signals on and collects orphans as process 1. Versions are those of the
# base image's own Debian release, which the digest fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        libnuma1 libtcmalloc-minimal4 tini \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner 10001 --group 10001 /home/tetris /var/cache/tetris
ENV HOME=/home/tetris \
    HF_HOME=/var/cache/tetris/huggingface \
    PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_CACHE_ROOT=/var/cache/tetris/vllm \
    VLLM_NO_USAGE_STATS=1 \
    XDG_CACHE_HOME=/var/cache/tetris
WORKDIR /opt/tetris-serve
EXPOSE 8000 8080 8265
# 4xx and 5xx make urlopen fail; /health is 503 until an engine replica runs.
HEALTHCHECK --interval=15s --timeout=10s --start-period=10m --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('PORT', '8000') + '/health', timeout=8)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--"]
# The demo, for whomever the container's port is published to.
CMD ["tetris-serve", "up", "--config", "configs/tiny.yaml", "--host", "0.0.0.0", \
     "--set", "http.access.allow_anonymous=true"]

# -------------------------------------------------------------------------------- gpu
FROM run AS gpu
# Not a build tool here: Triton compiles a small launcher for every kernel when it first
# runs. FlashInfer's kernels would want nvcc: engines sample without them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# Asks NVIDIA's container runtime for the driver, one that CUDA in the packages can work
# with; where there is no such runtime, as on GKE, it is mounted in that folder.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA=cuda>=13.0 \
    NVIDIA_VISIBLE_DEVICES=all \
    TRITON_CACHE_DIR=/var/cache/tetris/triton
COPY --from=install-gpu /opt/venv /opt/venv
COPY . .
USER 10001:10001
# Finds its device itself, which the files under configs/ say is the CPU.
CMD ["tetris-serve", "up", "configs/models/demo-target", \
     "--draft", "configs/models/demo-draft", "--host", "0.0.0.0", \
     "--set", "http.access.allow_anonymous=true"]

# -------------------------------------------------------------------------------- cpu
# Last, so that it is what a build without --target makes.
FROM run AS cpu
COPY --from=install-cpu /opt/venv /opt/venv
COPY . .
USER 10001:10001
