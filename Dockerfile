# BASE is a Debian or Ubuntu with Python 3.11 or later. It needs no CUDA: those libraries come with the locked torch, the driver from
# the machine. CPU=1 is an image without CUDA; TORCH is then a CPU build that pip finds. docs/cluster.md has the commands.
ARG BASE=debian:12-slim
FROM ${BASE}
ARG CPU=
ARG TORCH=torch>=2.11

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    CUBLAS_WORKSPACE_CONFIG=:4096:8 \
    NCCL_NVLS_ENABLE=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# gcc builds Triton's launchers. Versions follow the release of the base image.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    ca-certificates gcc libc6-dev make python3 python3-dev python3-venv tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 segpipe \
 && mkdir /opt/segpipe \
 && chown 10001:10001 /opt/segpipe
WORKDIR /opt/segpipe
USER 10001

# This layer depends on the lock alone: a change of the source installs nothing again.
COPY --chown=10001:10001 Makefile requirements.txt ./
COPY --chown=10001:10001 packaging/cpu.py packaging/
RUN make packages CPU="$CPU" TORCH="$TORCH"

COPY --chown=10001:10001 . .
# A named volume on runs/ starts as a copy of this folder with its owner; without the folder, root would own it.
RUN touch .venv/.ready && make setup && mkdir -p runs
ENV PATH=/opt/segpipe/.venv/bin:$PATH

# docker run --gpus all --shm-size=8g -v DATA:/data:ro -v RUNS:/opt/segpipe/runs IMAGE train data=camvid data.root=/data
# As process 1, segpipe would get no SIGTERM outside the steps of a training.
ENTRYPOINT ["tini", "--", "segpipe"]
CMD ["--help"]
