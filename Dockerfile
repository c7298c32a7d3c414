# fedloom on a CPU: docker build -t fedloom . && docker run --rm --user "$(id -u)" -v "$PWD:/work" fedloom demo
# Worker processes (runtime.workers) share data and models in /dev/shm, of which Docker gives 64 MB: add --shm-size=2g.
# The node of a Flower deployment is docker/node.Dockerfile.
FROM python:3.11-slim
# PyTorch's own index has wheels without CUDA, several GB smaller.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=vision,report,flower
WORKDIR /opt/fedloom
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY constraints constraints
COPY src src
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints/ci.txt ".[$EXTRAS]" \
    && useradd --create-home --uid 1000 fedloom && mkdir /work && chown fedloom /work
USER 1000
WORKDIR /work
ENTRYPOINT ["fedloom"]
CMD ["--help"]
