# docker build -t deepbregman .
# docker run --rm --init --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD":/work deepbregman --help
# torch's wheels bring CUDA: the host needs NVIDIA's driver and container toolkit only. For another CUDA, or
# none, name torch's index: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim
# Compiled training steps need a compiler on the machine that trains: Triton builds its launchers with it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=""
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"; fi
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir "/source[timm,onnx,explore,heic,parquet]" \
    && rm -r /source \
    && deepbregman --version
# Any user may run it (--user): programs keep their caches in a home that all can write to, and torch asks for a name.
ENV HOME=/home/anyone USER=anyone
RUN mkdir -m 1777 /home/anyone
WORKDIR /work
ENTRYPOINT ["deepbregman"]
CMD ["--help"]
