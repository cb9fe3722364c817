# The image of ddp_runner, for CPUs and NVIDIA GPUs:
#
#   docker build -t ddp-runner .
#   docker run --rm -v runs:/app/outputs -v /DATA:/app/data:ro --gpus all ddp-runner model=resnet18
#
# GPUs need no other base: torch's wheels carry CUDA, and the container runtime adds the driver.
ARG PYTHON=3.12

FROM docker.io/library/python:${PYTHON}-slim AS wheel
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM docker.io/library/python:${PYTHON}-slim
ARG EXTRAS=text,streams,hf,metrics
# Torch is a separate layer: it is almost the whole image, and changes less often.
RUN pip install --no-cache-dir "torch>=2.11" torchvision
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[$EXTRAS]"
COPY deploy/entrypoint.sh /usr/local/bin/entrypoint.sh

# If a volume was mounted for another user, run as that user: --user, or runAsUser.
RUN useradd --uid 1000 --create-home runner \
    && install --directory --owner=runner --group=runner /app /app/outputs /app/data
USER 1000:1000
WORKDIR /app
ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["entrypoint.sh"]
