# syntax=docker/dockerfile:1
# The CUDA libraries come with the locked torch wheels; the base image adds the driver interface and cuDNN tools.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    CUBLAS_WORKSPACE_CONFIG=:4096:8

# gcc builds Triton's launchers. Versions follow the release of the base image, which is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev make python3 python3-dev python3-venv tini \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 segpipe
WORKDIR /opt/segpipe
RUN chown 10001:10001 /opt/segpipe
USER 10001

# This layer depends on the lock alone: a change of the source installs nothing again.
COPY --chown=10001:10001 requirements.txt ./
RUN python3 -m venv .venv \
 && .venv/bin/python -m pip install --require-hashes --requirement requirements.txt

COPY --chown=10001:10001 . .
# A named volume on runs/ starts as a copy of this folder with its owner; without the folder, root would own it.
RUN .venv/bin/python -m pip install --no-deps --no-build-isolation --editable . \
 && touch .venv/.ready \
 && mkdir -p runs
ENV PATH=/opt/segpipe/.venv/bin:$PATH

# docker run --gpus all --shm-size=8g -v DATA:/data:ro -v RUNS:/opt/segpipe/runs IMAGE train data=camvid data.root=/data
# As process 1, segpipe would get no SIGTERM outside the steps of a training.
ENTRYPOINT ["tini", "--", "segpipe"]
CMD ["--help"]
