# docker build -t deepbregman . && docker run --rm --gpus all --shm-size 8g -v "$PWD":/work deepbregman --help
# torch's wheels bring CUDA: the host needs NVIDIA's driver and container toolkit only. For another CUDA, or
# none, name torch's index: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim
ARG TORCH_INDEX=""
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"; fi \
    && pip install --no-cache-dir "/source[timm,onnx,explore]" \
    && rm -r /source
WORKDIR /work
ENTRYPOINT ["deepbregman"]
CMD ["--help"]
