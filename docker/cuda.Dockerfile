# NVIDIA GPUs. From the top of the checkout, with the NVIDIA container toolkit on the machine:
#   docker build -f docker/cuda.Dockerfile -t train-language-models:cuda .
#   docker run --rm -it --gpus all --ipc host -v "$PWD/runs:/course/runs" train-language-models:cuda make run
#   docker run --rm -it --gpus all --ipc host -v "$PWD/runs:/course/runs" train-language-models:cuda make gpu
# PyTorch's wheel brings its own CUDA libraries, so the pinned version runs here as it does outside. The image from NVIDIA's registry (NGC) adds
# the compiler that torch.compile needs and, at sites that build on it, their network's libraries: give theirs with --build-arg BASE=...
# Checked here: that it parses, that what it copies is there and that its commands exist. Nobody has built it yet.
ARG BASE=nvcr.io/nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends make git g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /course

# The packages first: they change less often than the course.
COPY pyproject.toml Makefile README.md LICENSE ./
COPY .ci .ci
COPY shared/__init__.py shared/__init__.py
COPY chapters/__init__.py chapters/__init__.py
ARG TORCH_INDEX=
RUN make install TORCH_INDEX=$TORCH_INDEX

COPY . .
RUN touch .venv/ready
CMD ["make", "run"]
