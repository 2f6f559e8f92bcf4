# docker build -t deepbregman . && docker run --rm --gpus all --shm-size 8g -v "$PWD":/work deepbregman --help
# torch's wheels bring CUDA: the host needs NVIDIA's driver and container toolkit only. For another CUDA, or
# none, name torch's index: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim
# Compiled training steps need a compiler on the machine that trains: Triton builds its launchers with it.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=""
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"; fi \
    && pip install --no-cache-dir "/source[timm,onnx,explore,heic]" \
    && rm -r /source
WORKDIR /work
ENTRYPOINT ["deepbregman"]
CMD ["--help"]
