# docker build -t train-language-models .
# docker run --rm -it train-language-models make run
# docker run --rm -it -p 8888:8888 train-language-models .venv/bin/jupyter lab --ip 0.0.0.0 --allow-root notebooks
# With NVIDIA GPUs: docker run --gpus all --ipc host ...
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends make git g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /course

# The packages first: they change less often than the course.
COPY pyproject.toml Makefile README.md LICENSE ./
COPY .ci .ci
COPY shared/__init__.py shared/__init__.py
COPY chapters/__init__.py chapters/__init__.py
ARG TORCH_INDEX=
RUN make install GROUP=lab TORCH_INDEX=$TORCH_INDEX

COPY . .
RUN touch .venv/ready .venv/ready-lab
CMD ["make", "run"]
