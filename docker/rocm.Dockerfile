# AMD GPUs. From the top of the checkout, with the address that pytorch.org's selector shows for Linux, Pip and ROCm:
#   docker build -f docker/rocm.Dockerfile --build-arg TORCH_INDEX=ADDRESS -t train-language-models:rocm .
#   docker run --rm -it --device /dev/kfd --device /dev/dri --group-add video --ipc host --security-opt seccomp=unconfined \
#       -v "$PWD/runs:/course/runs" train-language-models:rocm make run
# PyTorch calls an AMD GPU "cuda" too, so configurations stay as they are. BASE should be of the same ROCm as the wheel.
# Checked here: that it parses, that what it copies is there and that its commands exist. Nobody has built it, or run it on such a GPU, yet.
ARG BASE=rocm/dev-ubuntu-24.04:7.0-complete
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
RUN test -n "$TORCH_INDEX" || { echo "Give --build-arg TORCH_INDEX=ADDRESS, or pip installs PyTorch for NVIDIA's GPUs." >&2; exit 1; }
RUN make install TORCH_INDEX=$TORCH_INDEX

COPY . .
RUN touch .venv/ready
CMD ["make", "run"]
