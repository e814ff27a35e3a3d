# docker build -t loraplex .
# docker run --gpus all -p 8000:8000 loraplex                                          the demo
# docker run --gpus all -p 8000:8000 -v /models:/models loraplex serve /models/m       another model
#     … -v /adapters:/adapters loraplex serve /models/m --adapter-root /adapters       and adapters, loaded at run time
#     … -e LORAPLEX_PORT=9000 -p 9000:9000 …                                           another port: the health check
#                                                                                      reads the variable, not --port
#
# BASE needs apt, or Python 3.11 or newer with venv. For a machine without a GPU, without --gpus:
# docker build --build-arg BASE=python:3.12-slim -t loraplex .
# That base does with a GPU too: torch's wheels bring their CUDA libraries. The default has their CUDA, 13.
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${BASE}

RUN python3 -c 'import ensurepip, sys; assert sys.version_info >= (3, 11)' 2>/dev/null \
    || (apt-get update \
        && apt-get install --yes --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*)
RUN python3 -m venv /opt/loraplex
ENV PATH=/opt/loraplex/bin:$PATH

WORKDIR /app
COPY pyproject.toml README.md LICENSE /src/
COPY server /src/server
COPY engine /src/engine
COPY kernels /src/kernels
COPY configs/__init__.py configs/py.typed /src/configs/
COPY configs/serve /src/configs/serve
RUN pip install --no-cache-dir /src
COPY configs/serve /app/configs/serve
COPY configs/demo /app/configs/demo

RUN useradd --create-home --uid 10001 loraplex
USER loraplex
ENV LORAPLEX_HOST=0.0.0.0 LORAPLEX_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"LORAPLEX_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["loraplex"]
CMD ["serve", "--config", "configs/serve/demo.yaml"]
