# An inference server on an NVIDIA GPU; CUDA and cuDNN come from the Python packages, the driver from the host. From the root of a clone:
#     docker build -f docker/cuda13.Dockerfile -t cudnn-actor:cuda13 .
#     docker run --read-only --tmpfs /tmp --gpus all -v "$PWD/models:/models:ro" -p 127.0.0.1:8000:8000 cudnn-actor:cuda13
FROM python:3.13-slim AS build
COPY . /src
RUN python -m venv /opt/venv
RUN /opt/venv/bin/pip install --no-cache-dir "/src[serve,cuda13]"

FROM python:3.13-slim
COPY --from=build /opt/venv /opt/venv
RUN useradd --system --uid 10001 --create-home service
USER 10001
# What the NVIDIA container runtime brings in.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["/opt/venv/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/live')"]
# Exec form: the server gets SIGTERM itself, and answers what is under way.
CMD ["/opt/venv/bin/cudnn-actor", "serve", "--repository", "/models", "--host", "0.0.0.0", "--device", "cuda"]
